"""Products of 8-bit floats with scales on TPUs: sums of each block of D are scaled in VMEM, as they leave the matrix unit.

Dense products with scales of whole rows are XLA's, which scales what leaves the matrix unit too. Operands stay in 8 bits until
there: TPU7x multiplies them at twice its rate of bfloat16; on v5e, v5p and v6e the matrix units read them as bfloat16.
What quantises operands with scales of whole rows is in `pallas_quantizing.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.matmul.pallas_visits import Visits, put_rows, visits_of
from kernels.framework.work import Work, nbytes
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig, op
from kernels.ops.scaled_matmul.formats import step_of
from kernels.ops.scaled_matmul.grouped import check_scales, grouped_op
from kernels.ops.scaled_matmul.pallas_quantizing import activated, both_ways, cotangents
from kernels.ops.scaled_matmul.quantizing import activate_op, both_ways_op, cotangents_op, norm_both_ways_op, rstd_of
from kernels.toolchains.pallas import pallas_launch

LANES = 128
MOST_DEPTH = 1024  # entries of D that a program has at a time
MOST_WHOLE = 4096  # of D that no whole tiles make up, all in one program
# Memory for the blocks of a program, with room for its sums: the smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 12 * 2**20


def _column(scales, index):
    """Returns column `index` of scales [rows, blocks] as [rows, 1]: lanes cannot be sliced by a number that is not constant."""
    if scales.shape[1] == 1:
        return scales
    lane = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
    return jnp.sum(jnp.where(lane == index, scales, 0.0), axis=1, keepdims=True)


def scaled_matmul_kernel(
    expert, block, begin, end, count, a_ref, b_ref, as_ref, bs_ref, out_ref, total, *, step, steps
):
    """Operands: a [rows, k], a matrix [1, n, k], the scales of the rows [rows, blocks] and of the matrix [1, blocks, n]; the
    result; its float32 sum. `step`: entries of D with the same scales; `steps`: how many of those D has."""
    v, k = pl.program_id(1), pl.program_id(2)
    active, depth = v < count[0], a_ref.shape[1]

    def scaled(x, index):
        of_rows = _column(as_ref[...], lax.div(index, steps // as_ref.shape[1]))
        return x * of_rows * bs_ref[0, pl.ds(lax.div(index, steps // bs_ref.shape[1]), 1), :]

    def product(a, b):
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    @pl.when(active & (k == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(active & (expert[v] >= 0))
    def _():
        if steps == 1:
            total[...] += product(a_ref[...], b_ref[0])
            return
        sums = total[...]
        for i in range(depth // step):
            part = pl.ds(i * step, step)
            sums += scaled(product(a_ref[:, part], b_ref[0, :, part]), k * (depth // step) + i)
        total[...] = sums

    @pl.when(active & (k == pl.num_programs(2) - 1))
    def _():
        sums = total[...]
        put_rows(Visits(expert, block, begin, end, count), v, [out_ref], [scaled(sums, 0) if steps == 1 else sums])


def _depth(D: int, step: int) -> int:
    """Returns how many entries of D a program has at a time: whole tiles that divide D, of whole steps, or all of D; 0 if there
    is neither."""
    steps = D // step
    if steps > 1 and step % LANES:
        return 0
    unit = step if steps > 1 else LANES
    sizes = [n for n in range(unit, MOST_DEPTH + 1, unit) if D % n == 0]
    return sizes[-1] if sizes else unit if steps > 1 else D if D <= MOST_WHOLE else 0


def _product(a, b, a_scale, b_scale, visits, dtype, cfg):
    """Returns rows of a [M, D] times their matrices b [E, F, D], transposed, with scales [M, blocks] and [E, rows, blocks]."""
    (M, D), F = a.shape, b.shape[1]
    step = step_of(D, a_scale, b_scale)
    depth = _depth(D, step)
    bm, bn, last = min(cfg.block_m, M), min(cfg.block_n, F), D // depth - 1
    # A row for each scale along D, so that a row of a tile is as many lanes as a tile of the result has.
    of_columns = jnp.repeat(b_scale.astype(jnp.float32), F // b_scale.shape[1], axis=1).swapaxes(1, 2)
    of_rows = jnp.broadcast_to(a_scale.astype(jnp.float32), (M, a_scale.shape[1]))

    def at(v, k, expert, count):  # a visit that multiplies nothing fetches nothing new
        return jnp.where((expert[v] >= 0) & (v < count[0]), k, last)

    def a_at(n, v, k, expert, block, begin, end, count):
        return block[v], at(v, k, expert, count)

    def b_at(n, v, k, expert, block, begin, end, count):
        return jnp.maximum(expert[v], 0), n, at(v, k, expert, count)

    out = jax.ShapeDtypeStruct((M, F), dtype)
    return pallas_launch(
        functools.partial(scaled_matmul_kernel, step=step, steps=D // step),
        *visits,
        a,
        b,
        of_rows,
        of_columns,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(F, bn), visits.expert.shape[0], last + 1),
            in_specs=[
                pl.BlockSpec((bm, depth), a_at),
                pl.BlockSpec((1, bn, depth), b_at),
                pl.BlockSpec((bm, of_rows.shape[1]), lambda n, v, k, expert, block, *_: (block[v], 0)),
                pl.BlockSpec(
                    (1, of_columns.shape[1], bn), lambda n, v, k, expert, *_: (jnp.maximum(expert[v], 0), 0, n)
                ),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda n, v, k, expert, block, *_: (block[v], n)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        work=Work(2 * M * D * F, nbytes(a, b, of_rows, of_columns, out)),
        name="scaled_matmul_kernel",
    )


def forward(a, b, a_scale, b_scale, dtype, fast_accumulation, cfg):  # sums in float32, whether they may be less or not
    M = a.shape[0]
    blocks = jnp.arange(pl.cdiv(M, min(cfg.block_m, M)), dtype=jnp.int32)
    zeros = jnp.zeros_like(blocks)
    visits = Visits(zeros, blocks, zeros, zeros + M, jnp.full((1,), blocks.shape[0], jnp.int32))
    return _product(a, b[None], a_scale, b_scale[None], visits, dtype, cfg)


def grouped(a, b, a_scale, b_scale, group_sizes, dtype, cfg):
    check_scales(a, b, a_scale, b_scale)
    M = a.shape[0]
    edges = jnp.minimum(jnp.pad(jnp.cumsum(group_sizes.astype(jnp.int32)), (1, 0)), M)
    visits = visits_of(edges[:-1], edges[1:], M, min(cfg.block_m, M), False)
    return _product(a, b, a_scale, b_scale, visits, dtype, cfg)


# -- what they take ----------------------------------------------------------------------------------------------------


def _vmem(call, cfg, depth):
    """Returns the bytes of a program's blocks, twice where they are loaded ahead, and of its sums."""
    bm, bn = min(cfg.block_m, call.dims["M"]), min(cfg.block_n, call.dims["F"])
    scales = bm * -(-call.a_scale.shape[-1] // LANES) * LANES + bn * max(8, call.b_scale.shape[-1])
    return 2 * (bm + bn) * depth + 2 * 4 * scales + bm * bn * (4 + 4 + 2 * 4)


def depth_of(call) -> int:
    """Returns how many entries of D a program of a call has at a time, 0 where it can have none."""
    return _depth(call.dims["D"], step_of(call.dims["D"], call.a_scale, call.b_scale))


def _choices(call) -> list[ScaledMatmulConfig]:
    """Returns the tiles that fit, largest first."""
    depth = depth_of(call)
    sides = [(512, 512), (256, 512), (512, 256), (256, 256), (128, 256), (128, 128)]
    tiles = [ScaledMatmulConfig(block_m=rows, block_n=columns) for rows, columns in sides]
    return [cfg for cfg in tiles if depth and _vmem(call, cfg, depth) <= VMEM_BUDGET]


def rejects_any(call):
    if str(call.b.dtype) not in ("float8_e4m3fn", "float8_e5m2"):
        return f"'b' is {call.b.dtype}"
    if call.arguments["dtype"] == "float16":
        return "dtype = 'float16' is a result that Mosaic has not"
    if 0 in (*call.a.shape, *call.b.shape):
        return "an array has no elements"
    D, step = call.dims["D"], step_of(call.dims["D"], call.a_scale, call.b_scale)
    if D > step and step % LANES:
        return f"scales are of {step} entries each; it takes blocks of {LANES} or a multiple of it"
    if not _choices(call):
        return f"D = {D} has no part of whole tiles, and all of it does not fit into the {VMEM_BUDGET >> 20} MiB of a program"
    return None


def rejects(call):
    for name in ("a_scale", "b_scale"):
        if getattr(call, name).dtype == jnp.uint8:
            return (
                f"{name!r} has powers of two, by which XLA multiplies operands exactly, so that one product is enough"
            )
    if step_of(call.dims["D"], call.a_scale, call.b_scale) == call.dims["D"]:
        return "scales of whole rows need no more than XLA's product of 8-bit operands, which it scales as it writes it"
    return rejects_any(call)


def heuristic(call, platform):
    return _choices(call)[0]


for _op, _function, _rejects in ((op, forward, rejects), (grouped_op, grouped, rejects_any)):
    _op.register(
        _function,
        platforms={"tpu"},
        dtypes={"float8_e4m3fn", "float8_e5m2"},
        rejects=_rejects,
        heuristic=heuristic,
        candidates=_choices,
    )


# -- quantisation along both dims --------------------------------------------------------------------------------------


def quantise(x, rows, turned_rows, entries, matrices, dtype, cfg):
    return both_ways(x, dtype, cfg, matrices)


def normalise(x, weight, eps, entries, cfg):
    rstd = rstd_of(x, eps)
    return *both_ways(x, "float8_e4m3fn", cfg, norm=(rstd, weight)), rstd


def activate(gate, up, activation, entries, cfg):
    return activated(gate, up, activation, cfg)


def activation_cotangents(gate, up, d, activation, entries, cfg):
    return cotangents(gate, up, d, activation, cfg)


def rejects_blocks(call):
    if call.entries is not None:
        return "scales of blocks are XLA's: on TPUs products with them take longer than in bfloat16"
    return "an array has no elements" if 0 in call.dims.values() else None


for _op, _function, _columns in (
    (both_ways_op, quantise, 2048),
    (norm_both_ways_op, normalise, 2048),
    (activate_op, activate, 1024),
    (cotangents_op, activation_cotangents, 1024),
):
    _op.register(
        _function,
        platforms={"tpu"},
        dtypes={"float32", "bfloat16"},
        rejects=rejects_blocks,
        heuristic=lambda call, platform, columns=_columns: ScaledMatmulConfig(
            block_m=256, block_n=columns * 2 // jnp.dtype(call.dtype).itemsize
        ),
        candidates=lambda call: [ScaledMatmulConfig(block_m=m, block_n=n) for m, n in ((256, 1024), (128, 1024))],
    )
