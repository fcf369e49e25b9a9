"""Faults of recurrent."""

from faults import Fault

CELLS = "tests/kernels/test_recurrent.py"
TRITON = "tests/kernels/test_recurrent_triton.py"
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
    Fault(
        "LSTM in Triton: a state goes on across documents",
        "lstm_fwd_kernel",
        "$goes_on &= $code != BEGINS",
        "pass",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: padding changes the cell",
        "lstm_fwd_kernel",
        "$c, $h = tl.where($counts, $c, $old), tl.where($counts, $h, $$rest)",
        "$h = tl.where($counts, $h, $$rest)",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: a launch does the token of the one before",
        "lstm_fwd_kernel",
        "tl.store(next_ptr, ($t + 1).to(tl.int32))",
        "tl.store(next_ptr, $t.to(tl.int32))",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: padding takes the gradient of the hidden state",
        "lstm_bwd_kernel",
        "tl.where($counts, 0.0, $d_h)",
        "tl.where($counts, 0.0, 0.0)",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: a gradient of the cell goes on across documents",
        "lstm_bwd_kernel",
        "tl.where($counts, tl.where(($code == BEGINS)[:, None], 0.0, $before), $d_c)",
        "tl.where($counts, $before, $d_c)",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: a gradient of the hidden state goes on across documents",
        "lstm_bwd_kernel",
        "$followed[:, None] & ($k < 4 * F)[None, :]",
        "($followed | True)[:, None] & ($k < 4 * F)[None, :]",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: the cell's gradient is not through its tanh",
        "lstm_bwd_kernel",
        "$d_c + $d_out * $o * (1.0 - $c * $c)",
        "$d_c + $d_out * $o",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: gates of a document's first token are of the state before it, in the gradient",
        "triton_lstm_calls:backward",
        "jnp.where(($codes == BEGINS.value)[..., None], 0, $before)",
        "$before",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: gradients go through the weights, not their transposes",
        "triton_lstm_calls:backward",
        "$weight.T, 5 + ($codes is not None)",
        "$weight.reshape($weight.T.shape), 5 + ($codes is not None)",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: padding has the output of the token before",
        "triton_lstm_calls:forward",
        "jnp.where($of.tokens.valid[..., None], $out, 0)",
        "$out",
        TRITON,
    ),
    Fault(
        "LSTM in Triton: the way back is differentiated at the states of the way there",
        "recurrent/triton_gpu:backward",
        "$saved.get($name + $of.end)",
        "$saved.get($name)",
        TRITON,
    ),
)
