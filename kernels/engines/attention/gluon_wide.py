"""The backward kernel of flash attention in Gluon, for Hopper and heads wider than 128: each warpgroup owns one
gradient.

Like `gluon_gradients.py`, it makes one pass over the pairs. At this width the gradients of keys or of values fill all
registers of a warpgroup, so a program has 64 keys, and three warpgroups share the products of a pair of blocks:

- one computes the weights, and the gradient of the values;
- one computes the gradients of the logits from the weights, and the gradient of the keys;
- one multiplies those with the keys, and adds the products to the gradient of the queries in memory, some columns at a
  time.

Weights, and then in their place the gradients of the logits, are passed on through shared memory in 16 bits. Weights,
from 0 to 1, are passed as float16 whatever the dtype of the arrays, times a power of two that keeps small ones exact.
Otherwise bfloat16 would round them to few bits before the gradients are computed. There is no producer warp: the last
warpgroup to read a tile loads the next one into its stage.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.engines.attention.gluon_gradients import place, row_of, store_keys, weights_of
from kernels.engines.attention.gluon_parts import BLOCK, BLOCK_OF_SUMS, ROW, TILE_OF_SUMS, masks_of, span_of
from kernels.toolchains.gluon import SWIZZLED, after

# The scale of weights passed between warpgroups: the largest, 1, becomes half of float16's maximum. Weights down to
# 2**-29, as in a row of half a billion keys, keep all their bits.
ONE = gl.constexpr(2.0**15)


@gluon.constexpr_function
def _columns(O):
    """Returns the number of columns of queries and keys that are multiplied first. For heads up to 192 these are half
    of the columns of the tiles, followed by 64 more; for others, all."""
    return 128 if O.H <= 192 else 256


@gluon.jit
def _make_barriers(STAGES: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, BLOCK_Q: gl.constexpr, WIDTH: gl.constexpr):
    """Allocates a ring: (tiles of queries or cotangents, rows of their statistic, and per stage a barrier for "is
    full")."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, WIDTH], SWIZZLED)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_Q], ROW)
    return tiles, rows, _make_barriers(STAGES)


@gluon.jit
def _load(desc, row_desc, b, m, n, ring, stage, pred, O: gl.constexpr):
    """Loads a block of queries or cotangents with its statistic into a stage that is no longer read.

    A warpgroup that has read the stage need not synchronise first: `expect` begins with a barrier of all its warps.
    """
    tiles, rows, full = ring
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    arrived = full.index(stage)
    block = tiles.index(stage).reinterpret(shape=[1, O.BLOCK_Q, 1, WIDTH], layout=BLOCK)
    mbarrier.expect(arrived, desc.nbytes_per_cta + row_desc.nbytes_per_cta, pred=pred)
    tma.async_load(desc, [b, m * O.BLOCK_Q, n, 0], arrived, block, pred=pred)
    tma.async_load(row_desc, [b * O.N + n, m * O.BLOCK_Q], arrived, rows.index(stage), pred=pred)


@gluon.jit
def _following(m, n, first, last):
    """Returns the next block of queries and its head."""
    ended = m + 1 == last
    return gl.where(ended, first, m + 1), gl.where(ended, n + 1, n)


@gluon.jit
def _load_first(desc, row_desc, b, m, n, first, last, steps, ring, O: gl.constexpr, STAGES: gl.constexpr):
    """Fills the stages, and returns the next block and its head."""
    for i in gl.static_range(STAGES):
        _load(desc, row_desc, b, m, n, ring, i, i < steps, O)
        m, n = _following(m, n, first, last)
    return m, n


@gluon.jit
def _logits(k_tile, q_tile, s, O: gl.constexpr):
    """Starts the products of a block of keys and a block of queries, accumulated on s."""
    COLUMNS: gl.constexpr = _columns(O)
    s = warpgroup_mma(k_tile.slice(0, COLUMNS, 1), q_tile.slice(0, COLUMNS, 1).permute((1, 0)), s, is_async=True)
    if COLUMNS < O.BLOCK_H:
        s = warpgroup_mma(k_tile.slice(COLUMNS, 64, 1), q_tile.slice(COLUMNS, 64, 1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _weigh(d_out_desc, delta_desc, spans_ptr, side_ptr, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr, dv_ptr,
           k_tile, v_tile, kv_full, queries, cotangents, pairs, done, O: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Computes the weights of a block, and the gradient of the values."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_Q, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_V, 16])
    SHAPE: gl.constexpr = (O.BLOCK_K, O.BLOCK_Q)
    dtype: gl.constexpr = k_tile.dtype
    q_tiles, q_rows, q_full = queries
    d_tiles, d_rows, d_full = cotangents
    tiles, weighed, differentiated, tile_free = pairs
    b, head, block = place(side_ptr, O)
    first, full_first, full_end, last = span_of(spans_ptr, b, block, O)
    steps = O.N // O.K * (last - first)
    masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)

    zeros = gl.zeros(SHAPE, gl.float32, PAIRS)
    dv = gl.zeros([O.BLOCK_K, O.BLOCK_V], gl.float32, SUMS)
    ahead, ahead_n = _load_first(
        d_out_desc, delta_desc, b, first, head * (O.N // O.K), first, last, steps, cotangents, O, STAGES
    )
    mbarrier.wait(kv_full, 0)
    if steps > 0:
        stage, phase = 0, 0
        m = first
        mbarrier.wait(q_full.index(0), 0)
        # Without a soft cap, minus lse.
        s = zeros if O.CAP is not None else row_of(q_rows, 0, SHAPE, PAIRS)
        s = _logits(k_tile, q_tiles.index(0), s, O)
        s = warpgroup_mma_wait(0, (s,))
        for i in range(steps):
            p, capped = weights_of(
                s, q_rows, stage, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr,
                O)  # fmt: skip
            weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            mbarrier.wait(tile_free.index(stage), phase ^ 1)
            passed = tiles.index(stage).reinterpret(dtype=gl.float16)
            if O.CAP is None:
                passed.store((p * ONE).to(gl.float16))
            else:
                passed.store((p * (ONE - ONE * (capped * capped))).to(gl.float16))
            mbarrier.arrive(weighed.index(stage))
            mbarrier.wait(d_full.index(stage), phase)
            dv = warpgroup_mma(weights, d_tiles.index(stage), dv, is_async=True)
            next_stage, next_phase = after(stage, phase, STAGES)
            # In the last iteration these products read stale data, and their result is not used.
            mbarrier.wait(q_full.index(next_stage), next_phase, pred=i + 1 < steps)
            s = zeros if O.CAP is not None else row_of(q_rows, next_stage, SHAPE, PAIRS)
            s = _logits(k_tile, q_tiles.index(next_stage), s, O)
            dv = warpgroup_mma_wait(1, (dv,))
            # The next warpgroup has finished the products of these cotangents and the values.
            mbarrier.wait(differentiated.index(stage), phase)
            _load(d_out_desc, delta_desc, b, ahead, ahead_n, cotangents, stage, i + STAGES < steps, O)
            ahead, ahead_n = _following(ahead, ahead_n, first, last)
            s = warpgroup_mma_wait(0, (s,))
            stage, phase = after(stage, phase, STAGES)
            m += 1
            m = gl.where(m == last, first, m)
    mbarrier.arrive(done.index(0))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_V, O.BLOCK_V // 8], [4, 1], [1, 0])
    mbarrier.wait(done.index(1), 0)
    store_keys(dv_ptr, dv, v_tile, b, block, head, O.K, O.S, O.HV, WIDE, 0)


@gluon.jit
def _differentiate(q_desc, k_desc, v_desc, lse_desc, spans_ptr, side_ptr, dk_ptr, k_tile, v_tile, kv_full, queries, cotangents,
                    pairs, done, O: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Computes the gradients of the logits of a block, and the gradient of the keys."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_Q, 16])
    # The columns after the first COLUMNS have a separate accumulator.
    COLUMNS: gl.constexpr = _columns(O)
    TWO: gl.constexpr = COLUMNS < O.BLOCK_H
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SHAPE: gl.constexpr = (O.BLOCK_K, O.BLOCK_Q)
    dtype: gl.constexpr = k_tile.dtype
    q_tiles, q_rows, q_full = queries
    d_tiles, d_rows, d_full = cotangents
    tiles, weighed, differentiated, tile_free = pairs
    b, head, block = place(side_ptr, O)
    first, full_first, full_end, last = span_of(spans_ptr, b, block, O)
    steps = O.N // O.K * (last - first)
    dk = gl.zeros([O.BLOCK_K, COLUMNS], gl.float32, SUMS)
    rest = gl.zeros([O.BLOCK_K, 64], gl.float32, REST)
    mbarrier.expect(kv_full, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
    k_block = k_tile.reinterpret(shape=[1, O.BLOCK_K, 1, O.BLOCK_H], layout=BLOCK)
    v_block = v_tile.reinterpret(shape=[1, O.BLOCK_K, 1, O.BLOCK_V], layout=BLOCK)
    tma.async_load(k_desc, [b, block * O.BLOCK_K, head // O.SHARES, 0], kv_full, k_block)
    tma.async_load(v_desc, [b, block * O.BLOCK_K, head // O.SHARES, 0], kv_full, v_block)
    ahead, ahead_n = _load_first(
        q_desc, lse_desc, b, first, head * (O.N // O.K), first, last, steps, queries, O, STAGES
    )
    mbarrier.wait(kv_full, 0)
    if steps > 0:
        stage, phase = 0, 0
        mbarrier.wait(d_full.index(0), 0)
        # The gradients of the weights minus delta.
        dp = row_of(d_rows, 0, SHAPE, PAIRS)
        dp = warpgroup_mma(v_tile, d_tiles.index(0).permute((1, 0)), dp, is_async=True)
        dp = warpgroup_mma_wait(0, (dp,))
        for i in range(steps):
            mbarrier.wait(weighed.index(stage), phase)
            tile = tiles.index(stage)
            ds = (tile.reinterpret(dtype=gl.float16).load(PAIRS).to(gl.float32) * (dp * (1 / ONE))).to(dtype)
            tile.store(ds)
            fence_async_shared()
            mbarrier.arrive(differentiated.index(stage))
            left = gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2))
            mbarrier.wait(q_full.index(stage), phase)
            q = q_tiles.index(stage)
            dk = warpgroup_mma(left, q.slice(0, COLUMNS, 1), dk, is_async=True)
            if TWO:
                same = gl.convert_layout(ds, gl.DotOperandLayout(0, REST, 2))
                rest = warpgroup_mma(same, q.slice(COLUMNS, 64, 1), rest, is_async=True)
            next_stage, next_phase = after(stage, phase, STAGES)
            mbarrier.wait(d_full.index(next_stage), next_phase, pred=i + 1 < steps)
            dp = row_of(d_rows, next_stage, SHAPE, PAIRS)
            dp = warpgroup_mma(v_tile, d_tiles.index(next_stage).permute((1, 0)), dp, is_async=True)
            if TWO:
                dk, rest = warpgroup_mma_wait(1, (dk, rest))
            else:
                dk = warpgroup_mma_wait(1, (dk,))
            # The first warpgroup has finished the products of these queries and the keys, since their weights arrived.
            _load(q_desc, lse_desc, b, ahead, ahead_n, queries, stage, i + STAGES < steps, O)
            ahead, ahead_n = _following(ahead, ahead_n, first, last)
            dp = warpgroup_mma_wait(0, (dp,))
            stage, phase = after(stage, phase, STAGES)
    mbarrier.arrive(done.index(1))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    mbarrier.wait(done.index(0), 0)
    store_keys(dk_ptr, dk * O.SCALE, k_tile.slice(0, COLUMNS, 1), b, block, head, O.K, O.S, O.H, WIDE, 0)
    if TWO:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        store_keys(dk_ptr, rest * O.SCALE, k_tile.slice(COLUMNS, 64, 1), b, block, head, O.K, O.S, O.H, NARROW, COLUMNS)


@gluon.jit
def _add(dq_desc, spans_ptr, side_ptr, k_tile, kv_full, pairs, done, dq_tiles, O: gl.constexpr,
         STAGES: gl.constexpr):  # fmt: skip
    """Adds the gradient of a block of queries to memory, two tiles of columns at a time: one is written while TMA adds
    the other."""
    HALF: gl.constexpr = dq_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = 2 * HALF
    PARTS: gl.constexpr = (O.H + COLUMNS - 1) // COLUMNS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    tiles, weighed, differentiated, tile_free = pairs
    b, head, block = place(side_ptr, O)
    first, full_first, full_end, last = span_of(spans_ptr, b, block, O)
    G: gl.constexpr = O.N // O.K
    zeros = gl.zeros([O.BLOCK_Q, COLUMNS], gl.float32, SUMS)
    stage, phase = 0, 0
    mbarrier.wait(kv_full, 0)
    for g in range(G):
        n = head * G + g
        for m in range(first, last):
            mbarrier.wait(differentiated.index(stage), phase)
            for i in gl.static_range(PARTS):
                ds = tiles.index(stage).permute((1, 0))
                dq = warpgroup_mma(ds, k_tile.slice(i * COLUMNS, COLUMNS, 1), zeros, use_acc=False)
                if i == PARTS - 1:
                    mbarrier.arrive(tile_free.index(stage))
                left, right = dq.reshape([O.BLOCK_Q, 2, HALF]).permute((0, 2, 1)).split()
                for h in gl.static_range(2):
                    tma.store_wait(1)
                    dq_tiles.index(h).store(left if h == 0 else right)
                    fence_async_shared()
                    part = dq_tiles.index(h).reinterpret(shape=[1, O.BLOCK_Q, 1, HALF], layout=BLOCK_OF_SUMS)
                    tma.async_atomic_add(dq_desc, [b, m * O.BLOCK_Q, n, i * COLUMNS + h * HALF], part)
            stage, phase = after(stage, phase, STAGES)
    mbarrier.arrive(done.index(0))
    tma.store_wait(0)


@gluon.jit
def warp_specialized_wide_bwd_kernel(
    dq_desc,  # [B, T, N, H] float32 in blocks [1, BLOCK_Q, 1, columns of a tile], zero-initialised; times 1 / SCALE
    d_out_desc,  # this and the following as in `warp_specialized_bwd_kernel`
    q_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    spans_ptr,
    side_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dk_ptr,
    dv_ptr,
    O: gl.constexpr,  # `Options`, with a BLOCK_K of 64
    STAGES: gl.constexpr,
    KEY_REGISTERS: gl.constexpr,  # registers per thread of the warpgroup for the gradient of the keys
    QUERY_REGISTERS: gl.constexpr,  # likewise for the gradient of the queries; the first warpgroup gets the rest
):
    dtype: gl.constexpr = q_desc.dtype
    k_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_K, O.BLOCK_H], SWIZZLED)
    v_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_K, O.BLOCK_V], SWIZZLED)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    queries = _make_ring(STAGES, dtype, O.BLOCK_Q, O.BLOCK_H)
    cotangents = _make_ring(STAGES, dtype, O.BLOCK_Q, O.BLOCK_V)
    # Weights, and then the gradients of logits; per stage a barrier each for "holds weights", "holds gradients" and "is
    # free".
    tiles = gl.allocate_shared_memory(dtype, [STAGES, O.BLOCK_K, O.BLOCK_Q], SWIZZLED)
    pairs = tiles, _make_barriers(STAGES), _make_barriers(STAGES), _make_barriers(STAGES)
    # Barriers for "keys no longer read" and "values no longer read": their gradients are stored through their tiles.
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(done.index(0), count=2)
    mbarrier.init(done.index(1), count=1)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, O.BLOCK_Q, dq_desc.block_type.shape[3]], TILE_OF_SUMS)
    gl.warp_specialize(
        [
            (_weigh, (d_out_desc, delta_desc, spans_ptr, side_ptr, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr,
                      dv_ptr, k_tile, v_tile, kv_full, queries, cotangents, pairs, done, O, STAGES)),
            (_differentiate, (q_desc, k_desc, v_desc, lse_desc, spans_ptr, side_ptr, dk_ptr, k_tile, v_tile, kv_full, queries,
                              cotangents, pairs, done, O, STAGES)),
            (_add, (dq_desc, spans_ptr, side_ptr, k_tile, kv_full, pairs, done, dq_tiles, O, STAGES)),
        ],
        [4, 4],
        [KEY_REGISTERS, QUERY_REGISTERS],
    )  # fmt: skip
