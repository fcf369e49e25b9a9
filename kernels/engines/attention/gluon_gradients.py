"""The backward kernel of flash attention in Gluon, for Hopper: one producer warp, and two consumer warpgroups that
share a block of keys.

One pass over the pairs, with five products per pair of blocks. The gradients of keys and values stay in registers; the
gradient of the queries is added to memory in float32 with atomics, in arbitrary order, so this kernel is not deterministic
(those of `triton_gradients.py` are). With blocks of 64 queries, the logits of the next block are started before the
gradients of this one are done, so that the tensor cores stay busy while weights are computed; with a soft cap, where
that takes longer, the next weights are computed early as well. Blocks of 128 leave no registers for that, and have less
latency to hide.
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

from kernels.engines.attention.gluon_parts import (
    BLOCK,
    BLOCK_OF_SUMS,
    ROW,
    TILE_OF_SUMS,
    ends_of,
    first_head,
    first_key_head,
    heads_of,
    in_one_segment,
    in_range,
    masks_of,
    one_after_the_other,
    positions_in,
    segments_of,
    span_of,
    tanh,
    tile_of,
)
from kernels.engines.attention.triton_parts import LOG2E
from kernels.toolchains.gluon import SWIZZLED, after


@gluon.jit
def place(side_ptr, O: gl.constexpr):
    """Returns the batch row, the key head and the block of keys of a program. The first keys come first, of as many heads
    side by side as `side_ptr` says."""
    BLOCKS: gl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    side = gl.load(side_ptr)
    pid = gl.program_id(0)
    group = pid // (BLOCKS * side)
    return group // (O.K // side), group % (O.K // side) * side + pid % side, pid // side % BLOCKS


@gluon.jit
def _turn(order_ptr, b, block, O: gl.constexpr):
    """Returns the block of keys whose turn it is, if an array says in which order they come."""
    BLOCKS: gl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    if order_ptr is not None:
        block = tile_of(order_ptr, b, 0, block, BLOCKS, 1, O)
    return block


@gluon.jit
def _make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, O: gl.constexpr):
    """Allocates a ring: (tiles of queries, tiles of cotangents, rows of the two statistics, and per stage a barrier for
    "is full" and one for "is free")."""
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, O.BLOCK_Q, O.BLOCK_H], SWIZZLED)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, O.BLOCK_Q, O.BLOCK_V], SWIZZLED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, O.BLOCK_Q], ROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return q_tiles, d_tiles, rows, full, free


@gluon.jit
def _load(d_out_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc, spans_ptr, side_ptr, order_ptr, first_ptr, k_tile, v_tile,
          kv_full, ring, O: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    b, head, block = place(side_ptr, O)
    block = _turn(order_ptr, b, block, O)
    first, full_first, full_end, last = span_of(spans_ptr, b, block, O)
    mbarrier.expect(kv_full, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
    k_block = k_tile.reinterpret(shape=[1, O.BLOCK_K, 1, O.BLOCK_H], layout=BLOCK)
    v_block = v_tile.reinterpret(shape=[1, O.BLOCK_K, 1, O.BLOCK_V], layout=BLOCK)
    key_head = first_key_head(first_ptr) + head // O.SHARES
    tma.async_load(k_desc, [b, block * O.BLOCK_K, key_head, 0], kv_full, k_block)
    tma.async_load(v_desc, [b, block * O.BLOCK_K, key_head, O.H if O.JOINED else 0], kv_full, v_block)
    q_tiles, d_tiles, rows, full, free = ring
    BYTES: gl.constexpr = q_desc.nbytes_per_cta + d_out_desc.nbytes_per_cta + 2 * lse_desc.nbytes_per_cta
    stage, phase = 0, 0
    for g in range(heads_of(O) // O.K):
        n = first_head(first_ptr) + head * (heads_of(O) // O.K) + g
        for m in range(first, last):
            row = m * O.BLOCK_Q
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            q_block = q_tiles.index(stage).reinterpret(shape=[1, O.BLOCK_Q, 1, O.BLOCK_H], layout=BLOCK)
            d_block = d_tiles.index(stage).reinterpret(shape=[1, O.BLOCK_Q, 1, O.BLOCK_V], layout=BLOCK)
            tma.async_load(q_desc, [b, row, n, 0], arrived, q_block)
            tma.async_load(lse_desc, [b * O.N + n, row], arrived, rows.index(2 * stage))
            tma.async_load(d_out_desc, [b, row, n, 0], arrived, d_block)
            tma.async_load(delta_desc, [b * O.N + n, row], arrived, rows.index(2 * stage + 1))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def row_of(rows, index, shape: gl.constexpr, layout: gl.constexpr):
    """Returns a row of statistics broadcast to all rows of a tile: the initial accumulator of its products."""
    row = rows.index(index).reinterpret(shape=[shape[1]], layout=gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.zeros(shape, gl.float32, layout) + row.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _seen(p, m, block, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr, O: gl.constexpr):
    """Returns the weights [keys, queries] of a pair of blocks, zero where a pair does not attend.

    A thread has 16 queries, and no registers for both their positions and their segments.
    """
    PAIRS: gl.constexpr = p.type.layout
    qi = m * O.BLOCK_Q + gl.arange(0, O.BLOCK_Q, gl.SliceLayout(0, PAIRS))
    kj = block * O.BLOCK_K + gl.arange(0, O.BLOCK_K, gl.SliceLayout(1, PAIRS))
    q_at = positions_in(q_at_ptr, qi, m * O.BLOCK_Q, O.S - O.T, O.T, O)[None, :]
    k_at = positions_in(k_at_ptr, kj, block * O.BLOCK_K, 0, O.S, O)[:, None]
    ends = ends_of(ends_ptr, qi[None, :], O)
    p = gl.where(in_range(kj[:, None], q_at, k_at, ends, O), p, 0.0)
    if O.SEGMENTS:
        p, qi = one_after_the_other(p, qi)
        q_segment = segments_of(q_segment_ptr, qi, O.T)[None, :]
        k_segment = segments_of(k_segment_ptr, kj, O.S)[:, None]
        p = gl.where(in_one_segment(q_segment, k_segment), p, 0.0)
    return p


@gluon.jit
def _logits(k_tile, ring, stage, zeros, O: gl.constexpr):
    """Starts the products of keys and queries; without a soft cap, minus lse."""
    q_tiles, d_tiles, rows, full, free = ring
    s = zeros if O.CAP is not None else row_of(rows, 2 * stage, zeros.shape, zeros.type.layout)
    return warpgroup_mma(k_tile, q_tiles.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def weights_of(s, rows, index, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr,
               O: gl.constexpr):  # fmt: skip
    """Returns (weights [keys, queries] of a pair of blocks, capped logits divided by the cap). Without a cap, lse is
    already subtracted from the logits; with one, row `index` holds what to add."""
    if O.CAP is None:
        p = gl.exp2(s * (O.SCALE * LOG2E))
    else:
        s = tanh(s * (O.SCALE / O.CAP), O)
        p = gl.exp2(s * (O.CAP * LOG2E) + row_of(rows, index, s.shape, s.type.layout))
    if (m >= full_end) | (m < full_first):
        p = _seen(p, m, block, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr, O)
    return p, s


@gluon.jit
def _weigh(s, rows, stage, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr,
           dtype: gl.constexpr, VALUES: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Returns (weights as the left operand of their product with cotangents, weights times the derivative of the soft
    cap)."""
    p, capped = weights_of(
        s, rows, 2 * stage, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr,
        O)  # fmt: skip
    weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, VALUES, 2))
    if O.CAP is not None:
        p *= 1.0 - capped * capped
    return weights, p


@gluon.jit
def _gradients(dq_desc, spans_ptr, side_ptr, order_ptr, first_ptr, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr,
               ends_ptr, dk_ptr, dv_ptr, k_tile, v_tile, kv_full, ring, ds_tile, dq_tile, O: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    G: gl.constexpr = heads_of(O) // O.K
    AHEAD: gl.constexpr = O.BLOCK_Q <= 64  # start the logits of the next block in this iteration
    EARLY: gl.constexpr = AHEAD and O.CAP is not None  # compute its weights too
    SHAPE: gl.constexpr = (O.BLOCK_K, O.BLOCK_Q)
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, O.BLOCK_Q, 16])
    OF_KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, O.BLOCK_H, 16])
    OF_VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, O.BLOCK_V, 16])
    OF_QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, O.BLOCK_H // 2, 16])
    dtype: gl.constexpr = k_tile.dtype
    q_tiles, d_tiles, rows, full, free = ring
    b, head, block = place(side_ptr, O)
    block = _turn(order_ptr, b, block, O)
    first, full_first, full_end, last = span_of(spans_ptr, b, block, O)
    masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)

    no_pair = gl.zeros(SHAPE, gl.float32, PAIRS)
    no_query = gl.zeros([O.BLOCK_Q, O.BLOCK_H], gl.float32, OF_QUERIES)
    dk = gl.zeros([O.BLOCK_K, O.BLOCK_H], gl.float32, OF_KEYS)
    dv = gl.zeros([O.BLOCK_K, O.BLOCK_V], gl.float32, OF_VALUES)
    steps = G * (last - first)
    mbarrier.wait(kv_full, 0)
    if steps > 0:
        stage, phase = 0, 0
        m, n = first, first_head(first_ptr) + head * G
        if AHEAD:
            mbarrier.wait(full.index(0), 0)
            s = _logits(k_tile, ring, 0, no_pair, O)
            delta = row_of(rows, 1, SHAPE, PAIRS)
            s = warpgroup_mma_wait(0, (s,))
        if EARLY:
            weights, p = _weigh(
                s, rows, 0, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr,
                ends_ptr, dtype, OF_VALUES, O)  # fmt: skip
        for i in range(steps):
            if not AHEAD:
                mbarrier.wait(full.index(stage), phase)
                s = _logits(k_tile, ring, stage, no_pair, O)
                delta = row_of(rows, 2 * stage + 1, SHAPE, PAIRS)
            # The gradients of the weights minus delta; the weights are computed meanwhile.
            dp = warpgroup_mma(v_tile, d_tiles.index(stage).permute((1, 0)), delta, is_async=True)
            if AHEAD:
                mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=i > 0)
            else:
                s = warpgroup_mma_wait(1, (s,))
            if not EARLY:
                weights, p = _weigh(
                    s, rows, stage, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr,
                    ends_ptr, dtype, OF_VALUES, O)  # fmt: skip
            dv = warpgroup_mma(weights, d_tiles.index(stage), dv, is_async=True)
            dp = warpgroup_mma_wait(1, (dp,))
            ds_tile.store((p * dp).to(dtype))
            fence_async_shared()
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, no_query, use_acc=False, is_async=True)
            if not EARLY:
                dk = warpgroup_mma(ds_tile, q_tiles.index(stage), dk, is_async=True)
            next_stage, next_phase = after(stage, phase, STAGES)
            if AHEAD:
                # In the last iteration these products read stale data, and their result is not used.
                mbarrier.wait(full.index(next_stage), next_phase, pred=i + 1 < steps)
                s = _logits(k_tile, ring, next_stage, no_pair, O)
            if EARLY:
                dk = warpgroup_mma(ds_tile, q_tiles.index(stage), dk, is_async=True)
            dq, dv = warpgroup_mma_wait(2 if AHEAD else 1, (dq, dv))
            tma.store_wait(0)
            dq_tile.store(dq)
            fence_async_shared()
            part = dq_tile.reinterpret(shape=[1, O.BLOCK_Q, 1, O.BLOCK_H], layout=BLOCK_OF_SUMS)
            tma.async_atomic_add(dq_desc, [b, m * O.BLOCK_Q, n, 0], part)
            m += 1
            ended = m == last
            m = gl.where(ended, first, m)
            n = gl.where(ended, n + 1, n)
            if EARLY:
                s = warpgroup_mma_wait(1, (s,))
                weights, p = _weigh(
                    s, rows, next_stage, m, block, full_first, full_end, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr,
                    ends_ptr, dtype, OF_VALUES, O)  # fmt: skip
            if AHEAD:
                delta = row_of(rows, 2 * next_stage + 1, SHAPE, PAIRS)
            if AHEAD and not EARLY:
                s, dk = warpgroup_mma_wait(0, (s, dk))
            else:
                dk = warpgroup_mma_wait(0, (dk,))
            if not AHEAD:
                mbarrier.arrive(free.index(stage))
            stage, phase = next_stage, next_phase
    WIDE_KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_H, O.BLOCK_H // 8], [8, 1], [1, 0])
    WIDE_VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_V, O.BLOCK_V // 8], [8, 1], [1, 0])
    b, head, block = place(side_ptr, O)  # again: the loop has no registers for it
    block = _turn(order_ptr, b, block, O)
    if O.JOINED:
        store_keys(dk_ptr, dk * O.SCALE, k_tile, b, block, head, O.K, O.S, O.H + O.HV, WIDE_KEYS, 0)
        store_keys(dk_ptr, dv, v_tile, b, block, head, O.K, O.S, O.H + O.HV, WIDE_VALUES, O.H)
    else:
        store_keys(dk_ptr, dk * O.SCALE, k_tile, b, block, head, O.K, O.S, O.H, WIDE_KEYS, 0)
        store_keys(dv_ptr, dv, v_tile, b, block, head, O.K, O.S, O.HV, WIDE_VALUES, 0)
    tma.store_wait(0)


@gluon.jit
def store_keys(ptr, x, tile, b, block, head, HEADS: gl.constexpr, LENGTH: gl.constexpr, WIDTH: gl.constexpr,
               WIDE: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Stores a block of keys or values, or its columns from FIRST on: in 16 bits through the tile that held them, so that each
    thread writes 16 contiguous bytes, and in float32 from where the numbers are."""
    ROWS: gl.constexpr = tile.shape[0]
    WHOLE: gl.constexpr = ptr.dtype.element_ty == gl.float32
    LAYOUT: gl.constexpr = x.type.layout if WHOLE else WIDE
    if not WHOLE:
        tile.store(x.to(tile.dtype))
        x = tile.load(WIDE)
    rows = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = FIRST + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    where = ((b * LENGTH + rows).to(gl.int64) * HEADS + head) * WIDTH
    mask = (rows < LENGTH)[:, None] & (cols < WIDTH)[None, :]
    gl.store(ptr + where[:, None] + cols[None, :], x, mask=mask)


@gluon.jit
def warp_specialized_bwd_kernel(
    dq_desc,  # [B, T, N, H] float32 in blocks [1, BLOCK_Q, 1, BLOCK_H], zero-initialised; times 1 / SCALE
    d_out_desc,  # [B, T, N, HV] in blocks [1, BLOCK_Q, 1, BLOCK_V]
    q_desc,  # [B, T, N, H] in blocks [1, BLOCK_Q, 1, BLOCK_H]
    k_desc,  # [B, S, K, H] in blocks [1, BLOCK_K, 1, BLOCK_H]
    v_desc,  # [B, S, K, HV] in blocks [1, BLOCK_K, 1, BLOCK_V]
    lse_desc,  # [B * N, T padded to whole blocks] in blocks [1, BLOCK_Q]: -lse, in units of the products or, with a soft
    # cap, of log 2; -inf for rows out of bounds or without keys
    delta_desc,  # likewise: -delta
    spans_ptr,  # this and the following but `side_ptr` as in `key_gradient_kernel`
    side_ptr,  # [1]: how many key heads run side by side
    order_ptr,  # int32 [B or 1, blocks of keys] or None: in which order these come
    first_ptr,  # int32 [2] or None: the first of O.PART query heads, and of O.K heads of keys, in their arrays
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dk_ptr,  # with O.JOINED that of the values too, beside
    dv_ptr,
    O: gl.constexpr,  # `Options`, with a BLOCK_K of 128
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,  # registers per producer thread
):
    dtype: gl.constexpr = q_desc.dtype
    k_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_K, O.BLOCK_H], SWIZZLED)
    v_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_K, O.BLOCK_V], SWIZZLED)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    ring = _make_ring(STAGES, dtype, O)
    ds_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_K, O.BLOCK_Q], SWIZZLED)
    dq_tile = gl.allocate_shared_memory(gl.float32, [O.BLOCK_Q, O.BLOCK_H], TILE_OF_SUMS)
    gl.warp_specialize(
        [
            (_gradients, (dq_desc, spans_ptr, side_ptr, order_ptr, first_ptr, q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr,
                          ends_ptr, dk_ptr, dv_ptr, k_tile, v_tile, kv_full, ring, ds_tile, dq_tile, O, STAGES)),
            (_load, (d_out_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc, spans_ptr, side_ptr, order_ptr, first_ptr,
                     k_tile, v_tile, kv_full, ring, O, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
