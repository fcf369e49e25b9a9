"""The forward kernel of flash attention in Triton; the backward kernels are in `triton_gradients.py`. Plain Triton:
runs on any GPU since Ampere, and in the interpreter.

A program owns a block of queries, or of keys, of one head and batch row, and loops over the blocks paired with it: full
blocks without evaluating the mask, others entry by entry (tiles.py). Logits are in units of log 2, so that each
exponential is one instruction.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.attention.triton_parts import (
    LN2,
    LOG2E,
    dropout_factor,
    ends_of,
    limits_of,
    list_of,
    masks_of,
    nth,
    positions_of,
    rows_of,
    scores,
    segments_of,
    store_rows,
    tile_of,
)


@triton.jit
def _forward_blocks(acc, row_max, row_sum, begin, end, list_ptr, q, k_ptr, v_ptr, qi, q_at, q_segment, k_at_ptr,
                    k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, head, O: tl.constexpr,
                    MASKED: tl.constexpr):  # fmt: skip
    """Returns the state of the rows after the key blocks from `begin` to `end`, or those entries of a list of
    blocks."""
    for i in range(begin, end):
        n = nth(list_ptr, i)
        kj = n * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
        k = rows_of(k_ptr, kj, O.K, head, O.H, O.S, O.BLOCK_H)
        k_at = positions_of(k_at_ptr, kj, 0, O.S)[None, :]
        k_segment = segments_of(k_segment_ptr, kj, O.S)[None, :]
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        x, _ = scores(qk, qi, kj[None, :], q_at, k_at, q_segment, k_segment, ends, dense_ptr, bias_ptr, slope, O,
                       MASKED)  # fmt: skip
        new = tl.maximum(row_max, tl.max(x, axis=1))
        anchor = new
        if MASKED:
            anchor = tl.where(new == float("-inf"), 0.0, new)  # a row that has not seen any key yet
        p = tl.exp2(x - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        row_max = new
        if seed is not None:
            p *= dropout_factor(seed, q_at, k_at, O.THRESHOLD, O.FACTOR)
        v = rows_of(v_ptr, kj, O.K, head, O.HV, O.S, O.BLOCK_V)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q_ptr,  # [B, T, N, H]
    k_ptr,  # [B, S, K, H]
    v_ptr,  # [B, S, K, HV]
    spans_ptr,  # [B|1, query blocks, 4]; with lists, per tile (number of full blocks, number of blocks)
    index_ptr,  # [B|1, N|1, query blocks, key blocks]: lists of the key blocks to visit, or None
    order_ptr,  # [B|1, N|1, query blocks]: query blocks, those with the longest lists first
    q_at_ptr,  # [B|1, T], positions, or None, like all below
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,  # [B|1, ends, T], those that are arrays
    dense_ptr,  # [B|1, N|1, T|1, S|1] int8
    bias_ptr,  # likewise
    sink_ptr,  # [N]: the log-sum-exp of a head's sinks
    slope_ptr,  # [B|1, N]
    seed_ptr,  # [B|1, N|1]
    out_ptr,  # [B, T, N, HV]
    lse_ptr,  # [B, T, N]
    O: tl.constexpr,  # `Options`
):
    # The last queries usually see the most keys: start the longest programs first.
    BLOCKS: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    n, b = tl.program_id(0) // BLOCKS % O.N, tl.program_id(0) // (BLOCKS * O.N)
    head = n // (O.N // O.K)
    if order_ptr is not None:
        block = tile_of(order_ptr, b, n, tl.program_id(0) % BLOCKS, BLOCKS, 1, O)
    b64 = b.to(tl.int64)
    qi = block * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
    q_ptr += b64 * (O.T * O.N * O.H)
    k_ptr += b64 * (O.S * O.K * O.H)
    v_ptr += b64 * (O.S * O.K * O.HV)
    masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)
    if dense_ptr is not None:
        dense_ptr += b64 * O.DENSE_BATCH + n.to(tl.int64) * O.DENSE_HEAD
    if bias_ptr is not None:
        bias_ptr += b64 * O.BIAS_BATCH + n.to(tl.int64) * O.BIAS_HEAD
    slope, seed = None, None
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + b * O.SLOPE_BATCH + n).to(tl.float32)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr + b * O.SEED_BATCH + n * O.SEED_HEAD)
    q_at = positions_of(q_at_ptr, qi, O.S - O.T, O.T)[:, None]
    q_segment = segments_of(q_segment_ptr, qi, O.T)[:, None]
    ends = ends_of(ends_ptr, qi[:, None], O)
    q = rows_of(q_ptr, qi, O.N, n, O.H, O.T, O.BLOCK_H)

    acc = tl.zeros([O.BLOCK_Q, O.BLOCK_V], tl.float32)
    row_max = tl.full([O.BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([O.BLOCK_Q], tl.float32)
    if sink_ptr is not None:  # acts as the first key of every row, with value zero
        sink = tl.load(sink_ptr + n) * LOG2E
        row_max = tl.zeros([O.BLOCK_Q], tl.float32) + sink
        row_sum = tl.where(row_max > float("-inf"), 1.0, 0.0)
    K_BLOCKS: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, K_BLOCKS, O)
    first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, first, full, list_ptr, q, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, head, O, True)  # fmt: skip
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, full, full_end, list_ptr, q, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, head, O, False)  # fmt: skip
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, full_end, last, list_ptr, q, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, head, O, True)  # fmt: skip
    nonempty = row_sum != 0  # true for NaN too, so that lse becomes NaN
    row_sum = tl.where(nonempty, row_sum, 1.0)
    lse = tl.where(nonempty, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    tl.store(lse_ptr + (b64 * O.T + qi) * O.N + n, lse, mask=qi < O.T)
    store_rows(out_ptr + b64 * (O.T * O.N * O.HV), acc / row_sum[:, None], qi, O.N, n, O.HV, O.T, O.BLOCK_V)
