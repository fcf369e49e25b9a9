"""mean_pooling for NVIDIA GPUs in Triton: x is read once in the forward and its gradient written once in the backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.mean_pooling.contract import MeanPoolingConfig, op, work
from kernels.toolchains.triton import triton_launch

# Minimum number of programs per multiprocessor, so that some load while others wait.
PROGRAMS_EACH = 8
# Minimum number of tiles of tokens for which a part of a segment gets its own program.
LEAST_TILES = 4


@triton.jit
def mean_pooling_fwd_kernel(
    x_ptr,
    ids_ptr,
    begin_ptr,  # [B, G]: the first token of each segment, and one past the last
    end_ptr,
    total_ptr,  # [SPLITS, B, G, D]: a partial sum for each program of a segment
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    SEGMENTS: tl.constexpr,  # over all rows: B * G
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    segment, part = tl.program_id(0), tl.program_id(2)
    row, g = segment // G, segment % G
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = tl.load(begin_ptr + segment), tl.load(end_ptr + segment)
    if SPLITS > 1:
        tiles = tl.cdiv(tl.cdiv(end - begin, BLOCK_T), SPLITS)
        begin += part * tiles * BLOCK_T
        end = tl.minimum(end, begin + tiles * BLOCK_T)
    first = row.to(tl.int64) * T
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T)
        # Tokens between the first and the last of a segment may belong to others.
        in_segment = tl.load(ids_ptr + first + position, mask=position < end, other=-1) == g
        mask = in_segment[:, None] & (cols < D)[None, :]
        total += tl.load(x_ptr + (first + position)[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = total_ptr + (part.to(tl.int64) * SEGMENTS + segment) * D + cols
    tl.store(out, tl.sum(total, axis=0), mask=cols < D)


@triton.jit
def mean_pooling_bwd_kernel(
    ids_ptr,
    d_total_ptr,
    dx_ptr,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TILES: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    row = tl.program_id(0) // TILES
    position = tl.program_id(0) % TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tokens = row.to(tl.int64) * T + position
    ids = tl.load(ids_ptr + tokens, mask=position < T, other=-1)
    inside = (ids >= 0) & (ids < G)
    if G == 1:
        d_row = tl.load(d_total_ptr + row * D + cols, mask=cols < D, other=0.0)[None, :]
        dx = tl.where(inside[:, None], d_row, 0.0)
    else:
        rows = row.to(tl.int64) * G + ids
        mask = inside[:, None] & (cols < D)[None, :]
        dx = tl.load(d_total_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    mask = (position < T)[:, None] & (cols < D)[None, :]
    tl.store(dx_ptr + tokens[:, None] * D + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _bounds(ids, num_segments):
    """Returns for each segment the position of its first token and one past its last, int32 [B, G]; 0 and 0 if it is
    empty."""
    B, T = ids.shape
    inside = (ids >= 0) & (ids < num_segments)
    position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), ids.shape)
    if num_segments == 1:
        begin = jnp.min(jnp.where(inside, position, T), axis=1, keepdims=True)
        end = jnp.max(jnp.where(inside, position + 1, 0), axis=1, keepdims=True)
    else:
        change = ids[:, 1:] != ids[:, :-1]
        edge = jnp.ones((B, 1), bool)
        heads, tails = jnp.concatenate([edge, change], axis=1), jnp.concatenate([change, edge], axis=1)
        rows = jnp.arange(B)[:, None]
        # Only the ends of runs are scattered: writes of all tokens of a long sequence to one place would serialise.
        first, last = (jnp.where(inside & ends, ids, num_segments) for ends in (heads, tails))
        begin = jnp.full((B, num_segments), T, jnp.int32).at[rows, first].min(position, mode="drop")
        end = jnp.zeros((B, num_segments), jnp.int32).at[rows, last].max(position + 1, mode="drop")
    return jnp.minimum(begin, end), end


def _power(least: int, n: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(n)))


def _splits(call, block_t: int, block_d: int) -> int:
    """Returns how many programs share a segment: enough to fill the GPU, if a segment of mean length has tiles for
    them."""
    B, T, D = (call.dims[d] for d in "BTD")
    segments = max(1, call.num_segments)
    programs = B * segments * triton.cdiv(D, block_d)
    target = triton.cdiv(PROGRAMS_EACH * MULTIPROCESSORS, programs)
    worth = T // (segments * block_t * LEAST_TILES)
    return max(1, min(target, worth))


def heuristic(call, platform):
    T, D = call.dims["T"], call.dims["D"]
    # A tile of 8192 elements on 4 warps is 64 float32 of the sum in a thread; 16 bytes of x are one load.
    block_d = _power(16, D, 512)
    block_t = _power(1, T, max(1, 8192 // block_d))
    backward_block_t = _power(1, T, max(1, 4096 // block_d))
    return MeanPoolingConfig(block_t, block_d, 4, _splits(call, block_t, block_d), backward_block_t, block_d, 4)


def candidates(call):
    T, D = call.dims["T"], call.dims["D"]
    configs = [heuristic(call, "cuda")]
    for most in (128, 256, 512, 1024):
        block_d = _power(16, D, most)
        for elements in (2048, 4096, 8192, 16384):
            block_t = _power(1, T, max(1, elements // block_d))
            for num_warps in (4, 8):
                if not 8 <= block_t * block_d // (32 * num_warps) <= 64:
                    continue
                best = _splits(call, block_t, block_d)
                for splits in (best, 2 * best):
                    configs.append(
                        MeanPoolingConfig(block_t, block_d, num_warps, splits, block_t, block_d, num_warps),
                    )
    return list(dict.fromkeys(configs))


def rejects(call):
    if 0 in call.x.shape:
        return "x has no elements"
    return None


def forward(x, segment_ids, num_segments, cfg):
    B, T, D = x.shape
    ids = segment_ids.astype(jnp.int32)
    (total,) = triton_launch(
        mean_pooling_fwd_kernel,
        x,
        ids,
        *_bounds(ids, num_segments),
        out_shape=(jax.ShapeDtypeStruct((cfg.splits, B, num_segments, D), jnp.float32),),
        grid=(B * num_segments, triton.cdiv(D, cfg.block_d), cfg.splits),
        num_warps=cfg.num_warps,
        work=work(op.bind(x, segment_ids, num_segments=num_segments))[0],
        T=T,
        D=D,
        G=num_segments,
        SEGMENTS=B * num_segments,
        SPLITS=cfg.splits,
        BLOCK_T=cfg.block_t,
        BLOCK_D=cfg.block_d,
    )
    # Summed in a fixed order, not by atomics, for bitwise reproducible results.
    return total[0] if cfg.splits == 1 else jnp.sum(total, axis=0)


def backward(saved, x, segment_ids, num_segments, cfg):
    B, T, D = x.shape
    (dx,) = triton_launch(
        mean_pooling_bwd_kernel,
        segment_ids.astype(jnp.int32),
        saved.d_total,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        grid=(B * triton.cdiv(T, cfg.backward_block_t), triton.cdiv(D, cfg.backward_block_d)),
        num_warps=cfg.backward_num_warps,
        work=work(op.bind(x, segment_ids, num_segments=num_segments))[1],
        T=T,
        D=D,
        G=num_segments,
        BLOCK_T=cfg.backward_block_t,
        BLOCK_D=cfg.backward_block_d,
    )
    return {"x": dx}


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
