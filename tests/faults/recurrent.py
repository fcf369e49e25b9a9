"""Faults of recurrent."""

from faults import Fault

CELLS = "tests/kernels/test_recurrent.py"
PALLAS = "tests/test_ops.py -k 'numbers_or and recurrent and pallas'"

FAULTS = (
    Fault(
        "cells hand their state on across documents",
        "_goes_on",
        "$none | ($before < 0) | ($before == $first)",
        "$none | ($before == $before)",
        f"{CELLS} -k mesh[lstm2-documents-sp2]",
    ),
    Fault(
        "the reset gate before the matmul's bias",
        "gates_of.gru",
        "$xn + $sigmoid($xr + $hr) * $hn",
        "$sigmoid($xr + $hr) * ($xn + $hn)",
        f"{CELLS} -k numpy[gru2-packed]",
    ),
    Fault(
        "padding's state has a gradient of its own",
        "_run_back.step",
        "_where($now.valid, $d_old, $d_state)",
        "$d_old",
        f"{CELLS} -k numpy[lstm2-documents]",
    ),
    Fault(
        "sums joined without their exponents",
        "recurrent/xla:_joined",
        "jnp.maximum($p, $q)",
        "$q",
        f"{CELLS} -k no_float",
    ),
    Fault(
        "cells in Pallas: tokens past the end of a row are walked over",
        "recurrent/pallas_tpu:_fwd_kernel",
        "jnp.minimum($plan.together, $plan.T - $step * $plan.together)",
        "$plan.together",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: the backward begins past the last token",
        "recurrent/pallas_tpu:_bwd_kernel",
        "jnp.minimum($plan.together, $plan.T - ($plan.steps - 1 - $step) * $plan.together)",
        "$plan.together",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: a state goes on across documents",
        "recurrent/pallas_tpu:_fwd_kernel.token",
        'jnp.where($refs["begins"][$i] > 0, 0.0, $x)',
        "$x",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: a gradient goes on across documents",
        "recurrent/pallas_tpu:_bwd_kernel.token",
        "jnp.where($begins, 0.0, jnp.where($valid, $x, $y))",
        "jnp.where($valid, $x, $y)",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: padding changes a state",
        "recurrent/pallas_tpu:_fwd_kernel.token",
        "[jnp.where($valid, $x, $y) for $x, $y in zip($after, $before)]",
        "$after",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: no gradient passes weight_hh",
        "recurrent/pallas_tpu:_bwd_kernel.token",
        '$d[0] += _product($d_hidden, $refs["weight_hh"][...], 0)',
        "$d[0] += 0.0",
        PALLAS,
    ),
    Fault(
        "cells in Pallas: weights of any size are taken",
        "recurrent/pallas_tpu:_vmem",
        "$weights + 2 * $blocks + $rows * $gates * 8 + 4 * $plan.n * $plan.B * $plan.F * 4",
        "0",
        f"{CELLS} -k too_large",
    ),
)
