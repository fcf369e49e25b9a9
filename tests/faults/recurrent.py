"""Faults of recurrent."""

from faults import Fault

CELLS = "tests/kernels/test_recurrent.py"

FAULTS = (
    Fault(
        "cells hand their state on across documents",
        "ejdist/sequence/recurrent.py",
        "return none | (before < 0) | (before == first)",
        "return none | (before == before)",
        f"{CELLS} -k mesh[lstm2-documents-sp2]",
    ),
    Fault(
        "the reset gate before the matmul's bias",
        "kernels/ops/recurrent/contract.py",
        "z, n = sigmoid(xz + hz), act(xn + sigmoid(xr + hr) * hn)",
        "z, n = sigmoid(xz + hz), act(sigmoid(xr + hr) * (xn + hn))",
        f"{CELLS} -k numpy[gru2-packed]",
    ),
    Fault(
        "padding's state has a gradient of its own",
        "kernels/ops/recurrent/xla.py",
        "d_old = _where(now.valid, d_old, d_state)",
        "d_old = d_old",
        f"{CELLS} -k numpy[lstm2-documents]",
    ),
    Fault(
        "sums joined without their exponents",
        "kernels/ops/recurrent/xla.py",
        "    p = p + decay\n    top = jnp.maximum(p, q)",
        "    p = p + decay\n    top = q",
        f"{CELLS} -k no_float",
    ),
)
