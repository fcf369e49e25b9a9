"""mean_pooling on TPUs: tiles of tokens times a one-hot matrix on the MXU, into sums that stay in VMEM."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.ops.mean_pooling.contract import MeanPoolingConfig, op, work
from kernels.toolchains.pallas import pallas_launch

# Memory for a kernel's blocks and temporaries. The smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 10 * 2**20
# Tokens are along the lanes in blocks of ids, and features in blocks of x.
LANES = 128
MOST_T, MOST_D = 512, 1024


def _column(ids):
    """Returns ids [1, t], along the lanes, as a column [t, 1]."""
    return jnp.broadcast_to(ids, (LANES, ids.shape[1])).T[:, :1]


def _dot(a, b, contracting):
    # A product with 0 or 1 is exact in float32 if the MXU makes enough passes.
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def mean_pooling_fwd_kernel(ids_ref, x_ref, total_ref, *, num_segments):
    @pl.when(pl.program_id(2) == 0)
    def _():
        total_ref[...] = jnp.zeros_like(total_ref)

    ids, x = ids_ref[0], x_ref[0]
    column = _column(ids)
    # Tokens without a segment, or past the end of the array, may hold anything, including NaN.
    wide = jnp.where((column >= 0) & (column < num_segments), x.astype(jnp.float32), 0.0)
    if num_segments == 1:
        total_ref[0] += jnp.sum(wide, axis=0, keepdims=True)
    else:
        member = jax.lax.broadcasted_iota(jnp.int32, (num_segments, ids.shape[1]), 0) == ids
        total_ref[0] += _dot(member.astype(x.dtype), wide.astype(x.dtype), (1, 0))


def mean_pooling_bwd_kernel(ids_ref, d_total_ref, dx_ref, *, num_segments):
    column, d_total = _column(ids_ref[0]), d_total_ref[0]
    if num_segments == 1:
        dx = jnp.where(column == 0, d_total, 0.0)
    else:
        member = jax.lax.broadcasted_iota(jnp.int32, (column.shape[0], num_segments), 1) == column
        # Only one term of each sum is nonzero, so rounding before the sum equals rounding after it.
        dx = _dot(member.astype(dx_ref.dtype), d_total.astype(dx_ref.dtype), (1, 0))
    dx_ref[0] = dx.astype(dx_ref.dtype)


def _lanes(n: int) -> int:
    return pl.cdiv(n, LANES) * LANES


def _vmem(num_segments: int, block_t: int, block_d: int, itemsize: int) -> int:
    """Returns the bytes that a program of either direction may need."""
    segments = _lanes(num_segments)
    tile, sums, member = block_t * block_d, segments * block_d, segments * block_t
    # Blocks of x and of the sums twice (double buffering); float32 copies; the one-hot matrix as bool and as float; ids, and
    # their column.
    return tile * (2 * itemsize + 8) + sums * (2 * 4 + 4) + member * 8 + block_t * (2 * 8 * 4 + 2 * LANES * 4)


def _tile(call) -> tuple[int, int]:
    """Returns the largest (block_t, block_d) that fits, or (0, 0)."""
    T, D, itemsize = call.dims["T"], call.dims["D"], call.x.dtype.itemsize
    for block_t in (MOST_T, 256, 128):
        for block_d in (MOST_D, 512, 256, 128):
            t, d = min(block_t, _lanes(T)), min(block_d, _lanes(D))
            if _vmem(call.num_segments, t, d, itemsize) <= VMEM_BUDGET:
                return t, d
    return 0, 0


def heuristic(call, platform):
    block_t, block_d = _tile(call)
    return MeanPoolingConfig(block_t, block_d, backward_block_t=block_t, backward_block_d=block_d)


def candidates(call):
    T, D, itemsize = call.dims["T"], call.dims["D"], call.x.dtype.itemsize
    configs = [heuristic(call, "tpu")]
    for block_t in (128, 256, 512, 1024):
        for block_d in (128, 256, 512, 1024, 2048):
            t, d = min(block_t, _lanes(T)), min(block_d, _lanes(D))
            if _vmem(call.num_segments, t, d, itemsize) <= VMEM_BUDGET:
                configs.append(MeanPoolingConfig(t, d, backward_block_t=t, backward_block_d=d))
    return list(dict.fromkeys(configs))


def rejects(call):
    if 0 in call.x.shape:
        return "x has no elements"
    if not _tile(call)[0]:
        return (
            f"num_segments = {call.num_segments} is too large: their sums, of {LANES} features each, and their "
            f"one-hot matrix do not fit in the {VMEM_BUDGET >> 20} MiB of VMEM of a program"
        )
    return None


def _padded(segment_ids, block_t: int):
    """Returns the ids as int32 [B, 1, T], padded with -1 to whole blocks."""
    T = segment_ids.shape[1]
    return jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, -T % block_t)), constant_values=-1)[:, None]


def forward(x, segment_ids, num_segments, cfg):
    B, T, D = x.shape
    block_t, block_d = cfg.block_t, D if D <= cfg.block_d else cfg.block_d
    return pallas_launch(
        functools.partial(mean_pooling_fwd_kernel, num_segments=num_segments),
        _padded(segment_ids, block_t),
        x,
        out_shape=jax.ShapeDtypeStruct((B, num_segments, D), jnp.float32),
        grid=(B, pl.cdiv(D, block_d), pl.cdiv(T, block_t)),
        in_specs=[
            pl.BlockSpec((1, 1, block_t), lambda b, d, t: (b, 0, t)),
            pl.BlockSpec((1, block_t, block_d), lambda b, d, t: (b, t, d)),
        ],
        out_specs=pl.BlockSpec((1, num_segments, block_d), lambda b, d, t: (b, 0, d)),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        work=work(op.bind(x, segment_ids, num_segments=num_segments))[0],
        name="mean_pooling_fwd_kernel",
    )


def backward(saved, x, segment_ids, num_segments, cfg):
    B, T, D = x.shape
    block_t, block_d = cfg.backward_block_t, D if D <= cfg.backward_block_d else cfg.backward_block_d
    dx = pallas_launch(
        functools.partial(mean_pooling_bwd_kernel, num_segments=num_segments),
        _padded(segment_ids, block_t),
        saved.d_total,
        out_shape=jax.ShapeDtypeStruct((B, T, D), x.dtype),
        grid=(B, pl.cdiv(D, block_d), pl.cdiv(T, block_t)),  # tokens last, so that the sums' gradient is read once
        in_specs=[
            pl.BlockSpec((1, 1, block_t), lambda b, d, t: (b, 0, t)),
            pl.BlockSpec((1, num_segments, block_d), lambda b, d, t: (b, 0, d)),
        ],
        out_specs=pl.BlockSpec((1, block_t, block_d), lambda b, d, t: (b, t, d)),
        dimension_semantics=("parallel", "parallel", "parallel"),
        work=work(op.bind(x, segment_ids, num_segments=num_segments))[1],
        name="mean_pooling_bwd_kernel",
    )
    return {"x": dx}


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
