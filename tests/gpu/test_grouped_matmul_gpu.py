"""grouped_matmul's specialised warps on a CUDA device, which no interpreter runs. Run with the command in CONTRIBUTING.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error

from kernels.ops.grouped_matmul import op
from kernels.ops.grouped_matmul.contract import GroupedMatmulConfig, Tile


def is_hopper():
    try:
        return jax.devices("cuda")[0].compute_capability == "9.0"
    except RuntimeError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_hopper(), reason="JAX sees no GPU of compute capability 9.0 here"),
]

# Whole steps and tiles, parts of them, one row, none, and rows past the last group.
SIZES = {
    "ragged": (300, 0, 37, 1, 192, 64, 0, 129, 15),
    "whole": (256, 512, 128, 64),
    "empty": (0, 0, 700),
    "one": (1,),
}
REST = 45


def arguments(sizes, D, F, dtype, transposed, offset):
    rng = np.random.default_rng(0)
    E, used = len(sizes) - 2 * (offset is not None), sum(sizes)
    rows = used + REST
    rhs = rng.standard_normal((E, D, F)) / np.sqrt(D)
    floats = {"lhs": rng.standard_normal((rows, D)), "rhs": np.moveaxis(rhs, 1, -1) if transposed else rhs}
    d = rng.standard_normal((rows, F))
    begin = sum(sizes[:offset]) if offset else 0
    end = sum(sizes[: offset + E]) if offset else used
    mine = (np.arange(rows) >= begin) & (np.arange(rows) < end)
    return {n: jnp.asarray(x, dtype) for n, x in floats.items()}, jnp.asarray(d, dtype), jnp.asarray(mine)[:, None]


def run(platform, cfg, sizes, offset, transposed, floats, d):
    def forward(lhs, rhs):
        weights = (None, rhs) if transposed else (rhs, None)
        first = None if offset is None else jnp.int32(offset)
        return op(lhs, *weights, jnp.int32(sizes), first, platform=platform, cfg=cfg)

    out, pull = jax.vjp(forward, *floats.values())
    return dict(zip(("out", "lhs", "rhs"), (out, *pull(d))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("D", "F"), [(128, 320), (64, 64), (320, 1408)])
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_numbers_of_specialised_warps(specialised, D, F, transposed, dtype):
    """Rows of no group hold NaN, in the rows and in the cotangent: nobody's business, and least of all the last step's."""
    cfg = GroupedMatmulConfig(*[Tile(specialised=specialised)] * 3)
    for name, sizes in SIZES.items():
        for offset in (None, 1) if len(sizes) > 3 else (None,):
            floats, d, mine = arguments(sizes, D, F, dtype, transposed, offset)
            wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
            exact = jax.jit(functools.partial(run, "xla", None, sizes, offset, transposed))
            want = exact(wide, jnp.where(mine, d, 0).astype(jnp.float32))
            floats["lhs"], d = jnp.where(mine, floats["lhs"], jnp.nan), jnp.where(mine, d, jnp.nan)
            made = jax.jit(functools.partial(run, "triton", cfg, sizes, offset, transposed)).lower(floats, d).compile()
            for again in range(3):
                poison = [jnp.full(x.shape, jnp.nan, dtype) for x in want.values()]
                jax.block_until_ready(poison)
                del poison
                got = made(floats, d)
                for key in want:
                    far = np.abs(np.asarray(got[key], np.float32) - np.asarray(want[key])).max()
                    scale = np.sqrt(np.mean(np.square(np.asarray(want[key])))) + 1e-30
                    place = (name, offset, key, again)
                    assert error(got[key], want[key]) < FLOOR[dtype], place
                    assert far < 64 * FLOOR[dtype] * scale, place  # one wrong row of many
