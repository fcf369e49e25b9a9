"""scaled_matmul's kernel for Hopper on one. Run with the command in CONTRIBUTING.md.

On a CPU it is interpreted, in tests/kernels/test_scaled_matmul_hopper.py: here it is the code that the compiler made of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import on_a_gpu
from hopper_scaled import BLOCKS, BOTH, CALLS, GROUPED, ROWS, check, check_grouped, operands

from kernels.ops.scaled_matmul import (
    ScaledMatmulConfig,
    activate_op,
    activate_rows_op,
    both_ways_op,
    cotangents_op,
    norm_both_ways_op,
    op,
    row_cotangents_op,
    rows_op,
)

pytestmark = on_a_gpu()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[1:])))
def test_numbers(call):
    check(*call, again=2)


@pytest.mark.parametrize("call", GROUPED, ids=lambda call: "-".join(map(str, call[2:])))
def test_numbers_of_groups(call):
    check_grouped(*call, again=2)


@pytest.mark.parametrize(
    ("blocks", "fast", "most"), [(ROWS, False, 4e-3), (ROWS, True, 2e-2), (BLOCKS, False, 4e-3), (BOTH, False, 4e-3)]
)
def test_numbers_of_long_products(blocks, fast, most):
    """Many steps of many tiles, with the tile that a call gets; what rounds to bfloat16 is 1.7e-3 off."""
    arrays = operands(blocks, 1024, 4096, 2048, "float8_e4m3fn")
    want = np.asarray(jax.jit(lambda *a: op(*a, dtype="float32", platform="xla"))(*arrays), np.float64)
    got = np.asarray(jax.jit(lambda *a: op(*a, fast_accumulation=fast, platform="triton"))(*arrays), np.float64)
    assert np.linalg.norm(got - want) < most * np.linalg.norm(want)
    assert np.abs(got - want).max() < 4 * most * np.abs(want).max()


def test_the_same_call_gives_the_same_bits():
    arrays = operands(BLOCKS, 1024, 2048, 2048, "float8_e4m3fn")
    first, second = (np.asarray(op(*arrays, platform="triton")) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_operands_of_both_ways_are_those_of_xla(warps):
    """Bit by bit; an activation's exponential may differ in its last bit, which moves few of its roundings."""
    rng, cfg = np.random.default_rng(0), ScaledMatmulConfig(num_warps=warps)
    gate, up, d = (jnp.asarray(rng.standard_normal((512, 1024)) * 4, jnp.bfloat16) for _ in range(3))
    calls = [(both_ways_op, (gate,), {"rows": r, "turned_rows": t}, 0) for r, t in ((1, 1), (1, 128), (128, 128))]
    calls += [(both_ways_op, (gate,), {"entries": None, "matrices": n}, 0) for n in (1, 2)]
    calls += [(both_ways_op, (gate,), {"rows": 128, "turned_rows": 128, "matrices": 4}, 0)]
    calls += [(activate_op, (gate, up), {}, 2e-3), (cotangents_op, (gate, up, d), {}, 2e-3)]
    weight = jnp.asarray(rng.standard_normal(1024), jnp.float32)
    # Another order of a sum of squares, or of three factors, moves few roundings.
    calls += [(norm_both_ways_op, (gate, weight), {"entries": e}, 2e-3) for e in (128, None)]
    pair = jnp.stack([gate, up], 1)[:500]
    calls += [(rows_op, (gate[:500],), {}, 0), (activate_rows_op, (pair,), {}, 2e-3)]
    calls += [(row_cotangents_op, (pair, d[:500]), {}, 2e-3)]
    for op_, arrays, how, most in calls:
        got, want = (
            jax.jit(lambda *a, op_=op_, how=how, on=on: op_(*a, **how, **on))(*arrays)
            for on in ({"platform": "triton", "cfg": cfg}, {"platform": "xla"})
        )
        for name, g, w in zip(op_.outputs, got, want, strict=True):
            off = np.asarray(g).astype(np.float32) != np.asarray(w).astype(np.float32)
            if name == "rstd":
                np.testing.assert_allclose(g, w, rtol=1e-6)
                continue
            assert off.mean() <= most * (1 if "scale" not in name else 50), (op_.name, name, off.mean())
