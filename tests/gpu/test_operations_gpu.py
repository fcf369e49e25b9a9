"""Every operation that has a Triton backend, on a CUDA device: numbers, tuning candidates, and the same bits twice.

Run with: pytest -n 0 -m gpu tests/gpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error, value_and_gradients

import kernels
from kernels._core.binding import is_float_array


def has_cuda():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

OPS = [op for op in kernels.operations().values() if "triton_gpu" in op.backends]
ROWS = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.cases if "bench" not in case.tags
]
each = pytest.mark.parametrize(("op", "case"), ROWS)


def off(op, case, dtype, cfg=None):
    """Returns what is farther from the contract in float32 than twice its own rounding, by name."""
    arguments = op.case_inputs(case, dtype=dtype)
    exact = {k: v.astype(jnp.float32) if is_float_array(v) else v for k, v in arguments.items()}
    truth, true_gradients, d = value_and_gradients(op.function, exact)
    rounded, rounded_gradients, _ = value_and_gradients(op.function, arguments, d)
    got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform="triton", cfg=cfg), arguments, d)
    rows = [*zip(op.outputs, got, truth, rounded)]
    rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in true_gradients]
    return [(name, cfg) for name, a, w, y in rows if not error(a, w) <= 2 * error(y, w) + FLOOR[dtype]]


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers(op, case, dtype):
    assert not off(op, case, dtype)


@each
def test_numbers_of_every_tuning_candidate(op, case):
    backend = op.backends["triton_gpu"]
    call = op.bind(**op.case_inputs(case, dtype="bfloat16"))
    for cfg in backend.candidates(call) if backend.candidates else ():
        assert not off(op, case, "bfloat16", cfg)


@each
def test_the_same_call_gives_the_same_bits(op, case):
    arguments = op.case_inputs(case, dtype="bfloat16")
    runs = [value_and_gradients(lambda **a: op(**a, platform="triton"), arguments) for _ in range(2)]
    first, second = ([np.asarray(x).tobytes() for x in jax.tree.leaves(r)] for r in runs)
    assert first == second
