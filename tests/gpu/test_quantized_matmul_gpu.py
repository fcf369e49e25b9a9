"""quantized_matmul's kernel for Hopper on one. Run with the command in CONTRIBUTING.md.

On a CPU it is interpreted, in tests/kernels/test_quantized_matmul_hopper.py: here it is the code that the compiler made of it.
"""

import jax
import numpy as np
import pytest
from hopper import on_a_gpu
from hopper_quantized import CALLS, arrays_of, check

from kernels import quantized_matmul

pytestmark = on_a_gpu()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))
def test_numbers(call):
    check(*call, again=2)


@pytest.mark.parametrize("M", [1, 16, 64, 128, 200])
def test_the_tiles_that_a_call_gets(M):
    """Near XLA's numbers, and the same bits again."""
    x, *packed = arrays_of("affine", 4, 64, "bfloat16", M, 2048, 1544)
    want, first, second = (
        np.asarray(jax.jit(lambda x, *w, p=p: quantized_matmul(x, *w, bits=4, platform=p))(x, *packed), np.float32)
        for p in ("xla", "triton", "triton")
    )
    assert np.linalg.norm(first - want) < 4e-3 * np.linalg.norm(want)
    assert first.tobytes() == second.tobytes()
