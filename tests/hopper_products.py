"""Products of grouped_matmul's kernels for Hopper, and how their numbers are held: on a GPU, and interpreted on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from grid import FLOOR, error
from hopper import spoil_memory

from kernels.ops.grouped_matmul import gathered_op, op
from kernels.ops.grouped_matmul.contract import GroupedMatmulConfig, Tile

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
    typed = {n: jnp.asarray(x.astype(dtype)) for n, x in floats.items()}
    return typed, jnp.asarray(d.astype(dtype)), jnp.asarray(mine[:, None])


def run(platform, cfg, sizes, offset, transposed, activation, floats, d):
    def forward(floats):
        weights = (None, floats["rhs"]) if transposed else (floats["rhs"], None)
        first = None if offset is None else jnp.int32(offset)
        options = {"activation": activation, "platform": platform, "cfg": cfg}
        return op(floats["lhs"], *weights, jnp.int32(sizes), first, floats.get("rhs_bias"), **options)

    out, pull = jax.vjp(forward, floats)
    return {"out": out, **pull(d)[0]}


def check(specialised, D, F, dtype, transposed, offset, sizes, activation=None, *, again=0, **how):
    """Holds a result and its gradients, once and `again` times more, over memory that is full of NaN.

    Rows of no group hold NaN, in the rows and in the cotangent: nobody's business, and least of all the last step's.
    """
    cfg = GroupedMatmulConfig(*[Tile(specialised=specialised)] * 3)
    floats, d, mine = arguments(sizes, D, F, dtype, transposed, offset, **how)
    wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
    exact = jax.jit(functools.partial(run, "xla", None, sizes, offset, transposed, activation))
    want = exact(wide, jnp.where(mine, d, 0).astype(jnp.float32))
    floats["lhs"], d = jnp.where(mine, floats["lhs"], jnp.nan), jnp.where(mine, d, jnp.nan)
    ours = jax.jit(functools.partial(run, "triton", cfg, sizes, offset, transposed, activation))
    for time in range(1 + again):
        spoil_memory([*floats.values(), d])
        got = ours(floats, d)
        for key in want:
            far = np.abs(np.asarray(got[key], np.float32) - np.asarray(want[key])).max()
            scale = np.sqrt(np.mean(np.square(np.asarray(want[key])))) + 1e-30
            assert error(got[key], want[key]) < FLOOR[dtype], (key, time)
            assert far < 64 * FLOOR[dtype] * scale, (key, time)  # one wrong row of many


def run_gathered(platform, cfg, sizes, transposed, activation, rows, slots, floats, d):
    def forward(floats):
        weights = (None, floats["rhs"]) if transposed else (floats["rhs"], None)
        options = {"activation": activation, "platform": platform, "cfg": cfg}
        return gathered_op(
            floats["lhs"], *weights, jnp.int32(sizes), rows, slots, None, floats.get("rhs_bias"), **options
        )

    out, pull = jax.vjp(forward, floats)
    return {"out": out, **pull(d)[0]}


def check_gathered(specialised, D, F, dtype, transposed, sizes, activation=None, *, again=0, **how):
    """Holds the same of rows that are gathered: two of each token, in any order, some of none, and those of no group NaN."""
    cfg = GroupedMatmulConfig(*[Tile(specialised=specialised)] * 3)
    floats, d, mine = arguments(sizes, D, F, dtype, transposed, None, **how)
    rng, M, used = np.random.default_rng(1), d.shape[0], sum(sizes)
    pairs = np.concatenate([rng.permutation(used), np.arange(used, M)])
    pairs[5:used:11] = -1
    rows, slots = np.where(pairs < 0, -1, pairs // 2), np.full(2 * -(-M // 2), -1)
    slots[pairs[pairs >= 0]] = np.flatnonzero(pairs >= 0)
    rows, slots = jnp.int32(rows), jnp.int32(slots.reshape(-1, 2))
    floats["lhs"] = floats["lhs"][: len(slots)]
    wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
    call = sizes, transposed, activation, rows, slots
    exact = jax.jit(functools.partial(run_gathered, "xla", None, *call))
    want = exact(wide, jnp.where(mine, d, 0).astype(jnp.float32))
    grouped = (jnp.arange(len(slots)) < -(-used // 2))[:, None]
    floats["lhs"], d = jnp.where(grouped, floats["lhs"], jnp.nan), jnp.where(mine, d, jnp.nan)
    ours = jax.jit(functools.partial(run_gathered, "triton", cfg, *call))
    for time in range(1 + again):
        spoil_memory([*floats.values(), d])
        got = ours(floats, d)
        for key in want:
            far = np.abs(np.asarray(got[key], np.float32) - np.asarray(want[key])).max()
            scale = np.sqrt(np.mean(np.square(np.asarray(want[key])))) + 1e-30
            assert error(got[key], want[key]) < FLOOR[dtype], (key, time)
            assert far < 64 * FLOOR[dtype] * scale, (key, time)


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
