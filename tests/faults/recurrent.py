"""Faults of recurrent."""

from faults import Fault

CELLS = "tests/kernels/test_recurrent.py"

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
        "cell_of.gru",
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
)
