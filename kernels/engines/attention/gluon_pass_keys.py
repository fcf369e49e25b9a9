"""The pass of attention's backward on Hopper that owns a block of keys, for the gradients of keys and values: see
`gluon_passes.py`."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.engines.attention.gluon_gradients import row_of, store_keys
from kernels.engines.attention.gluon_parts import limits_of, list_of, nth, tanh
from kernels.engines.attention.gluon_passes import (
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
def _load_queries(descs, lists, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):
    d_out_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    spans_ptr, index_ptr, order_ptr = lists
    q_tiles, d_tiles, rows, full, free = ring
    G: gl.constexpr = O.N // O.K
    BLOCKS: gl.constexpr = count_of(O.S, O.BLOCK_K)
    OTHERS: gl.constexpr = count_of(O.T, ROWS)
    BYTES: gl.constexpr = q_desc.nbytes_per_cta + d_out_desc.nbytes_per_cta + 2 * lse_desc.nbytes_per_cta
    b, head, block = place_of(order_ptr, O.S, O.BLOCK_K, O.K, G, O, HEADS)
    load_what_stays(k_desc, v_desc, b, block * O.BLOCK_K, head, stays, O.BLOCK_K // ROWS)
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
            load_block(q_desc, b, row, n, arrived, q_tiles.index(stage))
            tma.async_load(lse_desc, [b * O.N + n, row], arrived, rows.index(2 * stage))
            load_block(d_out_desc, b, row, n, arrived, d_tiles.index(stage))
            tma.async_load(delta_desc, [b * O.N + n, row], arrived, rows.index(2 * stage + 1))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _logits_of_queries(k_tile, ring, stage, zeros, O: gl.constexpr):
    """Starts the products of keys and queries; without a soft cap, minus lse."""
    q_tiles, d_tiles, rows, full, free = ring
    s = zeros if O.CAP is not None else row_of(rows, 2 * stage, zeros.shape, zeros.type.layout)
    return warpgroup_mma(k_tile, q_tiles.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _differentiate_keys(lists, masks, outputs, stays, ring, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
                        WHICH: gl.constexpr):  # fmt: skip
    G: gl.constexpr = O.N // O.K
    BLOCKS: gl.constexpr = count_of(O.S, O.BLOCK_K)
    OTHERS: gl.constexpr = count_of(O.T, ROWS)
    # A program that shares its multiprocessor has 232 registers per thread, not 240: ptxas then serialises its products
    # unless the registers of the weights are free before the gradients of the logits exist. The other program fills the
    # gap.
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
    b, head, block = place_of(order_ptr, O.S, O.BLOCK_K, O.K, G, O, HEADS)
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
                # The gradients of the weights minus delta; the weights are computed meanwhile.
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
                    p = seen_of(p, qi, kj, b, masks, False, O)
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
                # In the last iteration these products read stale data, and their result is not used.
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
    key_block = block * (O.BLOCK_K // ROWS) + WHICH
    store_keys(dk_ptr, dk * O.SCALE, k_tile, b, key_block, head, O.K, O.S, O.H, WIDE, 0)
    store_keys(dv_ptr, dv, v_tile, b, key_block, head, O.K, O.S, O.HV, TALL, 0)


@gluon.jit
def warp_specialized_dkdv_kernel(
    d_out_desc,  # [B, T, N, HV] in blocks [1, 64, 1, BLOCK_V]
    q_desc,  # [B, T, N, H] in blocks [1, 64, 1, BLOCK_H]
    k_desc,  # [B, S, K, H] in blocks [1, 64, 1, BLOCK_H]
    v_desc,  # [B, S, K, HV] in blocks [1, 64, 1, BLOCK_V]
    lse_desc,  # as in `warp_specialized_bwd_kernel`, in blocks [1, 64]
    delta_desc,
    spans_ptr,  # this and the following as in `key_gradient_kernel`, with blocks of BLOCK_K keys and 64 queries
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
    CONSUMER_REGISTERS: gl.constexpr,  # registers per thread of the second warpgroup; the first gets the rest
    PRODUCER_REGISTERS: gl.constexpr,  # registers per producer thread
):
    WARPGROUPS: gl.constexpr = O.BLOCK_K // ROWS
    dtype: gl.constexpr = q_desc.dtype
    stays = make_stays(dtype, WARPGROUPS, O.BLOCK_H, O.BLOCK_V)
    ring = make_ring(STAGES, dtype, O.BLOCK_H, O.BLOCK_V, WARPGROUPS)
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
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_differentiate_keys, (lists, masks, outputs, stays, ring, O, HEADS, STAGES, 0)),
                (_differentiate_keys, (lists, masks, outputs, stays, ring, O, HEADS, STAGES, 1)),
                (_load_queries, (descs, lists, stays, ring, O, HEADS, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
