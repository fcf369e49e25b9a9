"""The backward of attention in Gluon, for Hopper, in two passes: the same call gives the same bits, because each gradient has
one owner and nothing is added to memory.

One pass has a block of keys and goes over the queries that see it, for the gradients of keys and values; the other has a block
of queries and goes over the keys that they see, for the gradient of the queries. That is seven products of a pair of tiles in
place of five in one pass (`gluon_gradients.py`). What stays and what passes by are tiles of 64 rows; a program has one or two
warpgroups with 64 rows that stay each, and a warp that loads what passes by for both. Weights and gradients of logits never
leave the registers of the warpgroup that makes them: they are the left sides of the products that follow.

In every turn of a warpgroup the gradients of the weights are multiplied while the weights are made, and the logits of the next
tile are begun before the gradients of this one are done; the other warpgroup fills what gaps are left.
"""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.engines.attention.gluon_gradients import row_of, store_keys
from kernels.engines.attention.gluon_parts import (
    BLOCK,
    ROW,
    ends_of,
    limits_of,
    list_of,
    nth,
    positions_of,
    segments_of,
    tanh,
    tile_of,
    visible,
)
from kernels.engines.attention.triton_parts import LOG2E
from kernels.toolchains.gluon import SWIZZLED, after

ROWS = gl.constexpr(64)  # of a tile that stays and of one that passes by: the fewest that an instruction multiplies
PADDED = gl.constexpr(128)  # rows of statistics are filled up to a multiple of these


@gluon.constexpr_function
def _blocks(length, block):
    return (length + block - 1) // block


@gluon.jit
def _place(order_ptr, LENGTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, ALL: gl.constexpr, GROUP: gl.constexpr, O: gl.constexpr,
           HEADS: gl.constexpr):  # fmt: skip
    """Returns the row of the batch, the head (of ALL) and the block of a program; those with the longest lists come first, or
    the last ones, of a few heads side by side, so that what they read stays in the cache."""
    BLOCKS: gl.constexpr = _blocks(LENGTH, BLOCK_ROWS)
    pid = gl.program_id(0)
    some = pid // (BLOCKS * HEADS)
    b, n, rank = some // (ALL // HEADS), some % (ALL // HEADS) * HEADS + pid % HEADS, pid // HEADS % BLOCKS
    if order_ptr is None:
        block = BLOCKS - 1 - rank
    else:
        block = tile_of(order_ptr, b, n, rank, BLOCKS, GROUP, O)
    return b, n, block


@gluon.jit
def _make_ring(
    STAGES: gl.constexpr, dtype: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr, READERS: gl.constexpr
):
    """Returns (tiles of queries or keys, of cotangents or values, rows of the two statistics, a barrier of each stage for "is
    full", and one for "is free")."""
    wide = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDE], SWIZZLED)
    tall = gl.allocate_shared_memory(dtype, [STAGES, ROWS, TALL], SWIZZLED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, ROWS], ROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return wide, tall, rows, full, free


@gluon.jit
def _load_block(desc, b, row, head, barrier, tile):
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    tma.async_load(desc, [b, row, head, 0], barrier, tile.reinterpret(shape=[1, ROWS, 1, WIDTH], layout=BLOCK))


@gluon.jit
def _load_what_stays(wide_desc, tall_desc, b, row, head, stays, WARPGROUPS: gl.constexpr):
    wide, tall, full = stays
    mbarrier.expect(full, WARPGROUPS * (wide_desc.nbytes_per_cta + tall_desc.nbytes_per_cta))
    for i in gl.static_range(WARPGROUPS):
        _load_block(wide_desc, b, row + i * ROWS, head, full, wide.index(i))
        _load_block(tall_desc, b, row + i * ROWS, head, full, tall.index(i))


@gluon.jit
def _make_stays(dtype: gl.constexpr, WARPGROUPS: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr):
    """Returns (a tile of keys or queries for each warpgroup, one of values or cotangents, a barrier for "are full")."""
    wide = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, WIDE], SWIZZLED)
    tall = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, TALL], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return wide, tall, full


@gluon.jit
def _seen(p, qi, kj, b, masks, BY_QUERY: gl.constexpr, O: gl.constexpr):
    """Returns weights, zero where a pair does not attend, of queries qi and keys kj: rows and columns, or the other way around."""
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks
    Q: gl.constexpr = 1 if BY_QUERY else 0  # the dim in which queries are alike
    if ends_ptr is not None:
        ends_ptr += b * O.ENDS_BATCH
    if q_at_ptr is not None:
        q_at_ptr += b * O.Q_AT_BATCH
        k_at_ptr += b * O.K_AT_BATCH
    if q_segment_ptr is not None:
        q_segment_ptr += b * O.Q_SEGMENT_BATCH
        k_segment_ptr += b * O.K_SEGMENT_BATCH
    q_at, q_segment = positions_of(q_at_ptr, qi, O.S - O.T, O.T), segments_of(q_segment_ptr, qi, O.T)
    k_at, k_segment = positions_of(k_at_ptr, kj, 0, O.S), segments_of(k_segment_ptr, kj, O.S)
    if BY_QUERY:
        ends = ends_of(ends_ptr, qi[:, None], O)
        seen = visible(kj[None, :], q_at[:, None], k_at[None, :], q_segment[:, None], k_segment[None, :], ends, O)
    else:
        ends = ends_of(ends_ptr, qi[None, :], O)
        seen = visible(kj[:, None], q_at[None, :], k_at[:, None], q_segment[None, :], k_segment[:, None], ends, O)
    return gl.where(seen, p, 0.0)


# -- the gradients of keys and values -----------------------------------------------------------------------------------


@gluon.jit
def _load_queries(descs, lists, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):
    d_out_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    spans_ptr, index_ptr, order_ptr = lists
    q_tiles, d_tiles, rows, full, free = ring
    G: gl.constexpr = O.N // O.K
    BLOCKS: gl.constexpr = _blocks(O.S, O.BLOCK_K)
    OTHERS: gl.constexpr = _blocks(O.T, ROWS)
    BYTES: gl.constexpr = q_desc.nbytes_per_cta + d_out_desc.nbytes_per_cta + 2 * lse_desc.nbytes_per_cta
    b, head, block = _place(order_ptr, O.S, O.BLOCK_K, O.K, G, O, HEADS)
    _load_what_stays(k_desc, v_desc, b, block * O.BLOCK_K, head, stays, O.BLOCK_K // ROWS)
    stage, phase = 0, 0
    for g in range(G):
        n = head * G + g
        list_ptr = list_of(index_ptr, b, n, block, BLOCKS, OTHERS, O)
        first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
        for j in range(first, last):
            row = nth(list_ptr, j) * ROWS
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            _load_block(q_desc, b, row, n, arrived, q_tiles.index(stage))
            tma.async_load(lse_desc, [b * O.N + n, row], arrived, rows.index(2 * stage))
            _load_block(d_out_desc, b, row, n, arrived, d_tiles.index(stage))
            tma.async_load(delta_desc, [b * O.N + n, row], arrived, rows.index(2 * stage + 1))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _logits_of_queries(k_tile, ring, stage, zeros, O: gl.constexpr):
    """Begins the products of keys and queries; without a soft cap less lse."""
    q_tiles, d_tiles, rows, full, free = ring
    s = zeros if O.CAP is not None else row_of(rows, 2 * stage, zeros.shape, zeros.type.layout)
    return warpgroup_mma(k_tile, q_tiles.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _differentiate_keys(lists, masks, outputs, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
                        WHICH: gl.constexpr):  # fmt: skip
    G: gl.constexpr = O.N // O.K
    BLOCKS: gl.constexpr = _blocks(O.S, O.BLOCK_K)
    OTHERS: gl.constexpr = _blocks(O.T, ROWS)
    # A program that shares its multiprocessor has 232 registers a thread, not 240: its products wait for one another unless the
    # weights leave theirs before there are gradients of logits. The other program fills the gap.
    ALONE: gl.constexpr = O.BLOCK_K == ROWS
    SHAPE: gl.constexpr = (ROWS, ROWS)
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OF_KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_H, 16])
    OF_VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_V, 16])
    spans_ptr, index_ptr, order_ptr = lists
    dk_ptr, dv_ptr = outputs
    k_tiles, v_tiles, stays_full = stays
    q_tiles, d_tiles, rows, full, free = ring
    k_tile, v_tile = k_tiles.index(WHICH), v_tiles.index(WHICH)
    dtype: gl.constexpr = k_tile.dtype
    b, head, block = _place(order_ptr, O.S, O.BLOCK_K, O.K, G, O, HEADS)
    steps = 0
    for g in range(G):
        first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, head * G + g, block, BLOCKS, O)
        steps += last - first

    zeros = gl.zeros(SHAPE, gl.float32, PAIRS)
    dk = gl.zeros([ROWS, O.BLOCK_H], gl.float32, OF_KEYS)
    dv = gl.zeros([ROWS, O.BLOCK_V], gl.float32, OF_VALUES)
    mbarrier.wait(stays_full, 0)
    if steps > 0:
        stage, phase = 0, 0
        mbarrier.wait(full.index(0), 0)
        s = _logits_of_queries(k_tile, ring, 0, zeros, O)
        s = warpgroup_mma_wait(0, (s,))
        for g in range(G):
            n = head * G + g
            list_ptr = list_of(index_ptr, b, n, block, BLOCKS, OTHERS, O)
            first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
            for j in range(first, last):
                # The gradients of weights less delta, under which the weights are made.
                dp = row_of(rows, 2 * stage + 1, SHAPE, PAIRS)
                dp = warpgroup_mma(v_tile, d_tiles.index(stage).permute((1, 0)), dp, is_async=True)
                if O.CAP is None:
                    p = gl.exp2(s * (O.SCALE * LOG2E))
                else:
                    s = tanh(s * (O.SCALE / O.CAP), O)
                    p = gl.exp2(s * (O.CAP * LOG2E) + row_of(rows, 2 * stage, SHAPE, PAIRS))
                if (j >= full_end) | (j < full_first):
                    qi = nth(list_ptr, j) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, PAIRS))
                    kj = block * O.BLOCK_K + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS))
                    p = _seen(p, qi, kj, b, masks, False, O)
                weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, OF_VALUES, 2))
                if O.CAP is not None:
                    p *= 1.0 - s * s
                dv = warpgroup_mma(weights, d_tiles.index(stage), dv, is_async=True)
                if ALONE:
                    dp, dv = warpgroup_mma_wait(0, (dp, dv))
                else:
                    dp = warpgroup_mma_wait(1, (dp,))
                ds = gl.convert_layout((p * dp).to(dtype), gl.DotOperandLayout(0, OF_KEYS, 2))
                dk = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
                next_stage, next_phase = after(stage, phase, STAGES)
                steps -= 1
                # After the last tile these are of whatever lies there, and nobody reads them.
                mbarrier.wait(full.index(next_stage), next_phase, pred=steps > 0)
                s = _logits_of_queries(k_tile, ring, next_stage, zeros, O)
                if ALONE:
                    dk = warpgroup_mma_wait(1, (dk,))
                else:
                    dk, dv = warpgroup_mma_wait(1, (dk, dv))
                mbarrier.arrive(free.index(stage))
                s = warpgroup_mma_wait(0, (s,))
                stage, phase = next_stage, next_phase
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_H, O.BLOCK_H // 8], [4, 1], [1, 0])
    TALL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_V, O.BLOCK_V // 8], [4, 1], [1, 0])
    own = block * (O.BLOCK_K // ROWS) + WHICH
    store_keys(dk_ptr, dk * O.SCALE, k_tile, b, own, head, O.K, O.S, O.H, WIDE, 0)
    store_keys(dv_ptr, dv, v_tile, b, own, head, O.K, O.S, O.HV, TALL, 0)


@gluon.jit
def specialised_key_gradient_kernel(
    d_out_desc,  # [B, T, N, HV] in blocks [1, 64, 1, BLOCK_V]
    q_desc,  # [B, T, N, H] in blocks [1, 64, 1, BLOCK_H]
    k_desc,  # [B, S, K, H] in blocks [1, 64, 1, BLOCK_H]
    v_desc,  # [B, S, K, HV] in blocks [1, 64, 1, BLOCK_V]
    lse_desc,  # as of `specialised_gradient_kernel`, in blocks [1, 64]
    delta_desc,
    spans_ptr,  # this and what follows: as of `key_gradient_kernel`, of blocks of BLOCK_K keys and 64 queries
    index_ptr,
    order_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dk_ptr,
    dv_ptr,
    O: gl.constexpr,  # `Options`, with a BLOCK_Q of 64 and a BLOCK_K of 64 or 128
    HEADS: gl.constexpr,  # key heads that run side by side
    STAGES: gl.constexpr,
    DIFFERENTIATING: gl.constexpr,  # registers of a thread of the second warpgroup; those of the first are what is left
    LOADING: gl.constexpr,  # and of one that loads
):
    WARPGROUPS: gl.constexpr = O.BLOCK_K // ROWS
    dtype: gl.constexpr = q_desc.dtype
    stays = _make_stays(dtype, WARPGROUPS, O.BLOCK_H, O.BLOCK_V)
    ring = _make_ring(STAGES, dtype, O.BLOCK_H, O.BLOCK_V, WARPGROUPS)
    lists = spans_ptr, index_ptr, order_ptr
    masks = q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr
    descs = d_out_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc
    outputs = dk_ptr, dv_ptr
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_differentiate_keys, (lists, masks, outputs, stays, ring, O, HEADS, STAGES, 0)),
                (_load_queries, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [1],
            [LOADING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_differentiate_keys, (lists, masks, outputs, stays, ring, O, HEADS, STAGES, 0)),
                (_differentiate_keys, (lists, masks, outputs, stays, ring, O, HEADS, STAGES, 1)),
                (_load_queries, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [4, 1],
            [DIFFERENTIATING, LOADING],
        )  # fmt: skip


# -- the gradient of the queries ------------------------------------------------------------------------------------------


@gluon.jit
def _load_keys(descs, lists, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):
    d_out_desc, q_desc, k_desc, v_desc = descs
    spans_ptr, index_ptr, order_ptr = lists
    k_tiles, v_tiles, rows, full, free = ring
    BLOCKS: gl.constexpr = _blocks(O.T, O.BLOCK_Q)
    b, n, block = _place(order_ptr, O.T, O.BLOCK_Q, O.N, 1, O, HEADS)
    head = n // (O.N // O.K)
    _load_what_stays(q_desc, d_out_desc, b, block * O.BLOCK_Q, n, stays, O.BLOCK_Q // ROWS)
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, _blocks(O.S, ROWS), O)
    first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
    stage, phase = 0, 0
    for j in range(first, last):
        row = nth(list_ptr, j) * ROWS
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
        _load_block(k_desc, b, row, head, full.index(stage), k_tiles.index(stage))
        _load_block(v_desc, b, row, head, full.index(stage), v_tiles.index(stage))
        stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _differentiate_queries(lists, masks, rows_ptr, dq_ptr, stays, ring, O: gl.constexpr, HEADS: gl.constexpr,
                           STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    BLOCKS: gl.constexpr = _blocks(O.T, O.BLOCK_Q)
    LENGTH: gl.constexpr = _blocks(O.T, PADDED) * PADDED
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_H, 16])
    UNIT: gl.constexpr = (O.SCALE if O.CAP is None else O.CAP) * LOG2E
    spans_ptr, index_ptr, order_ptr = lists
    lse_ptr, delta_ptr = rows_ptr
    q_tiles, d_tiles, stays_full = stays
    k_tiles, v_tiles, rows, full, free = ring
    q_tile, d_tile = q_tiles.index(WHICH), d_tiles.index(WHICH)
    dtype: gl.constexpr = q_tile.dtype
    b, n, block = _place(order_ptr, O.T, O.BLOCK_Q, O.N, 1, O, HEADS)
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, _blocks(O.S, ROWS), O)
    first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
    qi = block * O.BLOCK_Q + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS))
    row = (b * O.N + n).to(gl.int64) * LENGTH
    lse, delta = gl.load(lse_ptr + row + qi), gl.load(delta_ptr + row + qi)
    if O.CAP is None:
        lse = lse * UNIT

    zeros = gl.zeros([ROWS, ROWS], gl.float32, PAIRS)
    dq = gl.zeros([ROWS, O.BLOCK_H], gl.float32, SUMS)
    mbarrier.wait(stays_full, 0)
    if last > first:
        stage, phase = 0, 0
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        for j in range(first, last):
            dp = warpgroup_mma(d_tile, v_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if O.CAP is not None:
                s = tanh(s * (O.SCALE / O.CAP), O)
            p = gl.exp2(s * UNIT + lse[:, None])
            if (j >= full_end) | (j < full_first):
                kj = nth(list_ptr, j) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, PAIRS))
                p = _seen(p, qi, kj, b, masks, True, O)
            if O.CAP is not None:
                p *= 1.0 - s * s
            dp = warpgroup_mma_wait(0, (dp,))
            ds = gl.convert_layout((p * (dp + delta[:, None])).to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            dq = warpgroup_mma(ds, k_tiles.index(stage), dq, is_async=True)
            next_stage, next_phase = after(stage, phase, STAGES)
            # After the last tile these are of whatever lies there, and nobody reads them.
            mbarrier.wait(full.index(next_stage), next_phase, pred=j + 1 < last)
            s = warpgroup_mma(q_tile, k_tiles.index(next_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(1, (dq,))
            mbarrier.arrive(free.index(stage))
            s = warpgroup_mma_wait(0, (s,))
            stage, phase = next_stage, next_phase
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_H, O.BLOCK_H // 8], [4, 1], [1, 0])
    own = block * (O.BLOCK_Q // ROWS) + WHICH
    store_keys(dq_ptr, dq * O.SCALE, q_tile, b, own, n, O.N, O.T, O.H, WIDE, 0)


@gluon.jit
def specialised_query_gradient_kernel(
    d_out_desc,  # as above
    q_desc,
    k_desc,
    v_desc,
    lse_ptr,  # [B * N, T and what fills its last 128]: the array of `lse_desc` above
    delta_ptr,
    spans_ptr,  # this and what follows: as of `query_gradient_kernel`, of blocks of BLOCK_Q queries and 64 keys
    index_ptr,
    order_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dq_ptr,
    O: gl.constexpr,  # `Options`, with a BLOCK_Q of 64 or 128 and a BLOCK_K of 64
    HEADS: gl.constexpr,  # that run side by side
    STAGES: gl.constexpr,
    DIFFERENTIATING: gl.constexpr,  # as above
    LOADING: gl.constexpr,
):
    WARPGROUPS: gl.constexpr = O.BLOCK_Q // ROWS
    dtype: gl.constexpr = q_desc.dtype
    stays = _make_stays(dtype, WARPGROUPS, O.BLOCK_H, O.BLOCK_V)
    ring = _make_ring(STAGES, dtype, O.BLOCK_H, O.BLOCK_V, WARPGROUPS)
    lists = spans_ptr, index_ptr, order_ptr
    masks = q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr
    descs = d_out_desc, q_desc, k_desc, v_desc
    rows_ptr = lse_ptr, delta_ptr
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_differentiate_queries, (lists, masks, rows_ptr, dq_ptr, stays, ring, O, HEADS, STAGES, 0)),
                (_load_keys, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [1],
            [LOADING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_differentiate_queries, (lists, masks, rows_ptr, dq_ptr, stays, ring, O, HEADS, STAGES, 0)),
                (_differentiate_queries, (lists, masks, rows_ptr, dq_ptr, stays, ring, O, HEADS, STAGES, 1)),
                (_load_keys, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [4, 1],
            [DIFFERENTIATING, LOADING],
        )  # fmt: skip
