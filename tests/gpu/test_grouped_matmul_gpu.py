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


def arguments(sizes, D, F, dtype, transposed, offset, gated=False, bias=False):
    rng = np.random.default_rng(0)
    E, used = len(sizes) - 2 * (offset is not None), sum(sizes)
    rows, columns = used + REST, (2, F) if gated else (F,)
    rhs = rng.standard_normal((E, D, *columns)) / np.sqrt(D)
    floats = {"lhs": rng.standard_normal((rows, D)), "rhs": np.moveaxis(rhs, 1, -1) if transposed else rhs}
    floats |= {"rhs_bias": rng.standard_normal((E, *columns))} if bias else {}
    d = rng.standard_normal((rows, F))
    begin = sum(sizes[:offset]) if offset else 0
    end = sum(sizes[: offset + E]) if offset else used
    mine = (np.arange(rows) >= begin) & (np.arange(rows) < end)
    return {n: jnp.asarray(x, dtype) for n, x in floats.items()}, jnp.asarray(d, dtype), jnp.asarray(mine)[:, None]


def run(platform, cfg, sizes, offset, transposed, activation, floats, d):
    def forward(floats):
        weights = (None, floats["rhs"]) if transposed else (floats["rhs"], None)
        first = None if offset is None else jnp.int32(offset)
        options = {"activation": activation, "platform": platform, "cfg": cfg}
        return op(floats["lhs"], *weights, jnp.int32(sizes), first, floats.get("rhs_bias"), **options)

    out, pull = jax.vjp(forward, floats)
    return {"out": out, **pull(d)[0]}


def check(specialised, D, F, dtype, transposed, offset, sizes, activation=None, **how):
    """Rows of no group hold NaN, in the rows and in the cotangent: nobody's business, and least of all the last step's."""
    cfg = GroupedMatmulConfig(*[Tile(specialised=specialised)] * 3)
    floats, d, mine = arguments(sizes, D, F, dtype, transposed, offset, **how)
    wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
    exact = jax.jit(functools.partial(run, "xla", None, sizes, offset, transposed, activation))
    want = exact(wide, jnp.where(mine, d, 0).astype(jnp.float32))
    floats["lhs"], d = jnp.where(mine, floats["lhs"], jnp.nan), jnp.where(mine, d, jnp.nan)
    ours = jax.jit(functools.partial(run, "triton", cfg, sizes, offset, transposed, activation))
    made = ours.lower(floats, d).compile()
    for again in range(3):
        poison = [jnp.full(x.shape, jnp.nan, dtype) for x in want.values()]
        jax.block_until_ready(poison)
        del poison
        got = made(floats, d)
        for key in want:
            far = np.abs(np.asarray(got[key], np.float32) - np.asarray(want[key])).max()
            scale = np.sqrt(np.mean(np.square(np.asarray(want[key])))) + 1e-30
            assert error(got[key], want[key]) < FLOOR[dtype], (key, again)
            assert far < 64 * FLOOR[dtype] * scale, (key, again)  # one wrong row of many


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("D", "F"), [(128, 320), (64, 64), (320, 1408)])
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_numbers_of_specialised_warps(specialised, D, F, transposed, dtype):
    for sizes in SIZES.values():
        for offset in (None, 1) if len(sizes) > 3 else (None,):
            check(specialised, D, F, dtype, transposed, offset, sizes)


# (activation, gated, bias, transposed, dtype); of a matrix whose last tile is half, or part, of one, or of whole ones.
ACTIVATED = [
    ("silu", True, False, False, "bfloat16"),
    ("silu", True, True, True, "float16"),
    ("gelu", True, True, False, "bfloat16"),
    ("gelu_tanh", True, False, True, "bfloat16"),
    ("relu", True, True, False, "float16"),
    ("gelu", False, True, True, "bfloat16"),
    ("relu", False, False, False, "bfloat16"),
    (None, False, True, False, "bfloat16"),
]


@pytest.mark.parametrize(("D", "F", "sizes"), [(128, 320, "ragged"), (320, 1408, "empty"), (64, 72, "one")])
@pytest.mark.parametrize(("activation", "gated", "bias", "transposed", "dtype"), ACTIVATED)
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_numbers_of_activations(specialised, activation, gated, bias, transposed, dtype, D, F, sizes):
    offset = 1 if sizes == "ragged" and gated else None
    check(specialised, D, F, dtype, transposed, offset, SIZES[sizes], activation, gated=gated, bias=bias)
