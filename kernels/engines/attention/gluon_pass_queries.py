"""The pass of attention's backward on Hopper that owns a block of queries, for their gradient: see
`gluon_passes.py`."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.engines.attention.gluon_gradients import store_keys
from kernels.engines.attention.gluon_parts import limits_of, list_of, nth, tanh
from kernels.engines.attention.gluon_passes import (
    PADDED,
    ROWS,
    count_of,
    load_block,
    load_what_stays,
    make_ring,
    make_stays,
    place_of,
    seen_of,
)
from kernels.engines.attention.triton_parts import LOG2E
from kernels.toolchains.gluon import after


@gluon.jit
def _load_keys(descs, lists, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):
    d_out_desc, q_desc, k_desc, v_desc = descs
    spans_ptr, index_ptr, order_ptr = lists
    k_tiles, v_tiles, rows, full, free = ring
    BLOCKS: gl.constexpr = count_of(O.T, O.BLOCK_Q)
    b, n, block = place_of(order_ptr, O.T, O.BLOCK_Q, O.N, 1, O, HEADS)
    head = n // (O.N // O.K)
    load_what_stays(q_desc, d_out_desc, b, block * O.BLOCK_Q, n, stays, O.BLOCK_Q // ROWS)
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, count_of(O.S, ROWS), O)
    first, full_first, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
    stage, phase = 0, 0
    for j in range(first, last):
        row = nth(list_ptr, j) * ROWS
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
        load_block(k_desc, b, row, head, full.index(stage), k_tiles.index(stage))
        load_block(v_desc, b, row, head, full.index(stage), v_tiles.index(stage))
        stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _differentiate_queries(lists, masks, rows_ptr, dq_ptr, stays, ring, O: gl.constexpr, HEADS: gl.constexpr,
                           STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    BLOCKS: gl.constexpr = count_of(O.T, O.BLOCK_Q)
    LENGTH: gl.constexpr = count_of(O.T, PADDED) * PADDED
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_H, 16])
    UNIT: gl.constexpr = (O.SCALE if O.CAP is None else O.CAP) * LOG2E
    spans_ptr, index_ptr, order_ptr = lists
    lse_ptr, delta_ptr = rows_ptr
    q_tiles, d_tiles, stays_full = stays
    k_tiles, v_tiles, rows, full, free = ring
    q_tile, d_tile = q_tiles.index(WHICH), d_tiles.index(WHICH)
    dtype: gl.constexpr = q_tile.dtype
    b, n, block = place_of(order_ptr, O.T, O.BLOCK_Q, O.N, 1, O, HEADS)
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, count_of(O.S, ROWS), O)
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
                p = seen_of(p, qi, kj, b, masks, True, O)
            if O.CAP is not None:
                p *= 1.0 - s * s
            dp = warpgroup_mma_wait(0, (dp,))
            ds = gl.convert_layout((p * (dp + delta[:, None])).to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            dq = warpgroup_mma(ds, k_tiles.index(stage), dq, is_async=True)
            next_stage, next_phase = after(stage, phase, STAGES)
            # In the last iteration these products read stale data, and their result is not used.
            mbarrier.wait(full.index(next_stage), next_phase, pred=j + 1 < last)
            s = warpgroup_mma(q_tile, k_tiles.index(next_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(1, (dq,))
            mbarrier.arrive(free.index(stage))
            s = warpgroup_mma_wait(0, (s,))
            stage, phase = next_stage, next_phase
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // O.BLOCK_H, O.BLOCK_H // 8], [4, 1], [1, 0])
    query_block = block * (O.BLOCK_Q // ROWS) + WHICH
    store_keys(dq_ptr, dq * O.SCALE, q_tile, b, query_block, n, O.N, O.T, O.H, WIDE, 0)


@gluon.jit
def warp_specialized_dq_kernel(
    d_out_desc,  # as above
    q_desc,
    k_desc,
    v_desc,
    lse_ptr,  # [B * N, T padded to a multiple of 128]: the array of `lse_desc` above
    delta_ptr,
    spans_ptr,  # this and the following as in `query_gradient_kernel`, with blocks of BLOCK_Q queries and 64 keys
    index_ptr,
    order_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dq_ptr,
    O: gl.constexpr,  # `Options`, with a BLOCK_Q of 64 or 128 and a BLOCK_K of 64
    HEADS: gl.constexpr,  # heads that run side by side
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,  # as above
    PRODUCER_REGISTERS: gl.constexpr,
):
    WARPGROUPS: gl.constexpr = O.BLOCK_Q // ROWS
    dtype: gl.constexpr = q_desc.dtype
    stays = make_stays(dtype, WARPGROUPS, O.BLOCK_H, O.BLOCK_V)
    ring = make_ring(STAGES, dtype, O.BLOCK_H, O.BLOCK_V, WARPGROUPS)
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
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_differentiate_queries, (lists, masks, rows_ptr, dq_ptr, stays, ring, O, HEADS, STAGES, 0)),
                (_differentiate_queries, (lists, masks, rows_ptr, dq_ptr, stays, ring, O, HEADS, STAGES, 1)),
                (_load_keys, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
