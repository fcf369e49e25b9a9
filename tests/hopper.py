"""What the tests of kernels for Hopper have in common, on one and interpreted."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.framework.interpret import interpret
from kernels.toolchains.simulate import gluon_interpreter


def _is_there():
    try:
        return jax.devices("cuda")[0].compute_capability == "9.0"
    except RuntimeError:
        return False


def on_a_gpu():
    """Returns the marks of a file whose tests run on one."""
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(not _is_there(), reason="JAX sees no GPU of compute capability 9.0 here"),
    ]


@contextlib.contextmanager
def interpreted(monkeypatch, op, triton_gpu):
    """Inside, an operation's kernels for Hopper are interpreted, by three programs, so that tiles come from the queue; and some
    must have been."""
    ran, run_grid = [], gluon_interpreter.run_grid
    monkeypatch.setattr(gluon_interpreter, "run_grid", lambda *args: ran.append(args) or run_grid(*args))
    monkeypatch.setattr(triton_gpu, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(op, "_programs", {})
    with interpret(90):
        yield
        # A call returns before its kernels have run.
        jax.block_until_ready(jax.live_arrays())
    assert ran


def spoil_memory(arrays):
    """Fills memory of the sizes of arrays with NaN, and frees it: what a kernel then leaves out is NaN, as a rule."""
    jax.block_until_ready([jnp.asarray(np.full(x.shape, np.nan, x.dtype)) for x in arrays])
