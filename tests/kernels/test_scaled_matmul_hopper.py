"""scaled_matmul's kernel for Hopper, interpreted: its numbers. On a GPU: tests/gpu/test_scaled_matmul_gpu.py."""

import jax
import jax.numpy as jnp
import pytest
from hopper import interpreted
from hopper_scaled import CALLS, GROUPED, check, check_grouped

from kernels.ops.scaled_matmul import grouped_op, op, triton_gpu


def some(calls, *quick):
    return [pytest.param(call, marks=() if i in quick else pytest.mark.slow) for i, call in enumerate(calls)]


@pytest.mark.parametrize("call", some(CALLS, 1, 2, 5, 7, 10), ids=lambda call: "-".join(map(str, call[1:])))
def test_numbers(call, monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        check(*call)


@pytest.mark.parametrize(
    ("M", "D", "F", "tile"),
    [(512, 8192, 2048, (128, 64)), (8192, 8192, 8192, (256, 128)), (1000, 4096, 4096, (256, 128))],
)
def test_small_results_get_small_tiles(M, D, F, tile):
    a, b = (jax.ShapeDtypeStruct((n, D), jnp.float8_e4m3fn) for n in (M, F))
    scales = (jax.ShapeDtypeStruct((n, 1), jnp.float32) for n in (M, F))
    cfg = triton_gpu.candidates(op.bind(a, b, *scales))[0]
    assert (cfg.block_m, cfg.block_n) == tile


@pytest.mark.parametrize("call", some(GROUPED, 1), ids=lambda call: "-".join(map(str, call[2:])))
def test_numbers_of_groups(call, monkeypatch):
    with interpreted(monkeypatch, grouped_op, triton_gpu):
        check_grouped(*call)
