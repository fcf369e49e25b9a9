"""The backward kernels of flash attention in Triton: two passes, and one for a broadcast bias."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.attention.triton_parts import (
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
    statistics,
    store_rows,
    tile_of,
)


@triton.jit
def _query_blocks(dq, d_slope, begin, end, list_ptr, q, d_out, lse, delta, k_ptr, v_ptr, qi, q_at, q_segment, k_at_ptr,
                  k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, d_bias_ptr, head, O: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    """Returns the gradients of a block of queries, and of the ALiBi slope, after the key blocks from `begin` to
    `end`."""
    for i in range(begin, end):
        n = nth(list_ptr, i)
        kj = n * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
        k = rows_of(k_ptr, kj, O.K, head, O.H, O.S, O.BLOCK_H)
        v = rows_of(v_ptr, kj, O.K, head, O.HV, O.S, O.BLOCK_V)
        k_at = positions_of(k_at_ptr, kj, 0, O.S)[None, :]
        k_segment = segments_of(k_segment_ptr, kj, O.S)[None, :]
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        x, softcap_grad = scores(qk, qi, kj[None, :], q_at, k_at, q_segment, k_segment, ends, dense_ptr, bias_ptr, slope, O,
                       MASKED)  # fmt: skip
        p = tl.exp2(x - lse[:, None])
        dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
        if seed is not None:
            dp *= dropout_factor(seed, q_at, k_at, O.THRESHOLD, O.FACTOR)
        ds = p * (dp - delta[:, None])
        if slope is not None:
            d_slope -= tl.sum(ds * tl.abs(q_at - k_at).to(tl.float32), axis=1)
        if d_bias_ptr is not None:
            where = d_bias_ptr + qi.to(tl.int64) * O.BIAS_ROW + kj[None, :] * O.BIAS_COLUMN
            inside = (qi < O.T) & (kj < O.S)[None, :]
            tl.store(where, ds, mask=inside)
        raw = ds * softcap_grad * O.SCALE
        dq = tl.dot(raw.to(k.dtype), k, dq, input_precision="ieee")
    return dq, d_slope


@triton.jit
def query_gradient_kernel(
    d_bias_ptr,  # [B, N, T, S] float32, zero-initialised; None without a bias, or if it is broadcast
    d_out_ptr,  # [B, T, N, HV]
    lse_ptr,  # [B, T, N]
    delta_ptr,
    q_ptr,  # as in the forward
    k_ptr,
    v_ptr,
    spans_ptr,
    index_ptr,
    order_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dense_ptr,
    bias_ptr,
    slope_ptr,
    seed_ptr,
    dq_ptr,  # [B, T, N, H]
    d_slope_ptr,  # [B, N, query blocks], partial sums
    O: tl.constexpr,  # `Options`
):
    BLOCKS: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    n, b = tl.program_id(0) // BLOCKS % O.N, tl.program_id(0) // (BLOCKS * O.N)
    head = n // (O.N // O.K)
    if order_ptr is not None:
        block = tile_of(order_ptr, b, n, tl.program_id(0) % BLOCKS, BLOCKS, 1, O)
    b64 = b.to(tl.int64)
    qi = block * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
    k_ptr += b64 * (O.S * O.K * O.H)
    v_ptr += b64 * (O.S * O.K * O.HV)
    masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)
    if dense_ptr is not None:
        dense_ptr += b64 * O.DENSE_BATCH + n.to(tl.int64) * O.DENSE_HEAD
    if bias_ptr is not None:
        bias_ptr += b64 * O.BIAS_BATCH + n.to(tl.int64) * O.BIAS_HEAD
    if d_bias_ptr is not None:
        d_bias_ptr += b64 * O.BIAS_BATCH + n.to(tl.int64) * O.BIAS_HEAD
    slope, seed = None, None
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + b * O.SLOPE_BATCH + n).to(tl.float32)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr + b * O.SEED_BATCH + n * O.SEED_HEAD)
    q_at = positions_of(q_at_ptr, qi, O.S - O.T, O.T)[:, None]
    q_segment = segments_of(q_segment_ptr, qi, O.T)[:, None]
    ends = ends_of(ends_ptr, qi[:, None], O)
    q = rows_of(q_ptr + b64 * (O.T * O.N * O.H), qi, O.N, n, O.H, O.T, O.BLOCK_H)
    d_out = rows_of(d_out_ptr + b64 * (O.T * O.N * O.HV), qi, O.N, n, O.HV, O.T, O.BLOCK_V)
    lse, delta = statistics(lse_ptr + b64 * (O.T * O.N), delta_ptr + b64 * (O.T * O.N), qi, n, O)

    dq = tl.zeros([O.BLOCK_Q, O.BLOCK_H], tl.float32)
    d_slope = tl.zeros([O.BLOCK_Q], tl.float32)
    K_BLOCKS: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    list_ptr = list_of(index_ptr, b, n, block, BLOCKS, K_BLOCKS, O)
    first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
    dq, d_slope = _query_blocks(
        dq, d_slope, first, full, list_ptr, q, d_out, lse, delta, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, d_bias_ptr, head, O, True)  # fmt: skip
    dq, d_slope = _query_blocks(
        dq, d_slope, full, full_end, list_ptr, q, d_out, lse, delta, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, d_bias_ptr, head, O, False)  # fmt: skip
    dq, d_slope = _query_blocks(
        dq, d_slope, full_end, last, list_ptr, q, d_out, lse, delta, k_ptr, v_ptr, qi[:, None], q_at, q_segment, k_at_ptr,
        k_segment_ptr, ends, dense_ptr, bias_ptr, slope, seed, d_bias_ptr, head, O, True)  # fmt: skip
    store_rows(dq_ptr + b64 * (O.T * O.N * O.H), dq, qi, O.N, n, O.H, O.T, O.BLOCK_H)
    if slope_ptr is not None:
        tl.store(d_slope_ptr + (b * O.N + n) * BLOCKS + block, tl.sum(d_slope, axis=0))


@triton.jit
def _key_blocks(dk, dv, begin, end, list_ptr, k, v, d_out_ptr, lse_ptr, delta_ptr, q_ptr, kj, k_at, k_segment, q_at_ptr,
                q_segment_ptr, ends_ptr, dense_ptr, bias_ptr, slope, seed, n, O: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Returns the gradients of a block of keys and values after the query blocks from `begin` to `end` of head n. The
    logits are transposed, with keys as rows, so that the weights are the left operand of both products without a
    transpose."""
    for i in range(begin, end):
        m = nth(list_ptr, i)
        qi = m * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
        q = rows_of(q_ptr, qi, O.N, n, O.H, O.T, O.BLOCK_H)
        d_out = rows_of(d_out_ptr, qi, O.N, n, O.HV, O.T, O.BLOCK_V)
        lse, delta = statistics(lse_ptr, delta_ptr, qi, n, O)
        q_at = positions_of(q_at_ptr, qi, O.S - O.T, O.T)[None, :]
        q_segment = segments_of(q_segment_ptr, qi, O.T)[None, :]
        ends = ends_of(ends_ptr, qi[None, :], O)
        kq = tl.dot(k, tl.trans(q), input_precision="ieee")
        x, softcap_grad = scores(kq, qi[None, :], kj, q_at, k_at, q_segment, k_segment, ends, dense_ptr, bias_ptr, slope, O,
                       MASKED)  # fmt: skip
        p = tl.exp2(x - lse[None, :])
        dp = tl.dot(v, tl.trans(d_out), input_precision="ieee")
        p_dropped = p
        if seed is not None:
            factor = dropout_factor(seed, q_at, k_at, O.THRESHOLD, O.FACTOR)
            p_dropped = p * factor
            dp *= factor
        dv = tl.dot(p_dropped.to(d_out.dtype), d_out, dv, input_precision="ieee")
        raw = p * (dp - delta[None, :]) * softcap_grad * O.SCALE
        dk = tl.dot(raw.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_gradient_kernel(
    d_out_ptr,  # as above
    lse_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    spans_ptr,  # [B|1, key blocks, 4]; with lists, as in the forward
    index_ptr,  # [B|1, N|1, key blocks, query blocks]: lists of the query blocks to visit, or None
    order_ptr,  # [B|1, K|1, key blocks]: key blocks, those with the longest lists first
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dense_ptr,
    bias_ptr,
    slope_ptr,
    seed_ptr,
    dk_ptr,  # [B, S, K, H]
    dv_ptr,  # [B, S, K, HV]
    O: tl.constexpr,  # `Options`
):
    G: tl.constexpr = O.N // O.K
    BLOCKS: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    block = tl.program_id(0) % BLOCKS
    head, b = tl.program_id(0) // BLOCKS % O.K, tl.program_id(0) // (BLOCKS * O.K)
    if order_ptr is not None:
        block = tile_of(order_ptr, b, head, tl.program_id(0) % BLOCKS, BLOCKS, G, O)
    b64 = b.to(tl.int64)
    kj = block * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
    d_out_ptr += b64 * (O.T * O.N * O.HV)
    lse_ptr += b64 * (O.T * O.N)
    delta_ptr += b64 * (O.T * O.N)
    q_ptr += b64 * (O.T * O.N * O.H)
    masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)
    k_at = positions_of(k_at_ptr, kj, 0, O.S)[:, None]
    k_segment = segments_of(k_segment_ptr, kj, O.S)[:, None]
    k = rows_of(k_ptr + b64 * (O.S * O.K * O.H), kj, O.K, head, O.H, O.S, O.BLOCK_H)
    v = rows_of(v_ptr + b64 * (O.S * O.K * O.HV), kj, O.K, head, O.HV, O.S, O.BLOCK_V)

    dk = tl.zeros([O.BLOCK_K, O.BLOCK_H], tl.float32)
    dv = tl.zeros([O.BLOCK_K, O.BLOCK_V], tl.float32)
    Q_BLOCKS: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    if index_ptr is None:
        first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, head, block, BLOCKS, O)
    for g in range(G):  # the query heads that read this key head
        n = head * G + g
        list_ptr = list_of(index_ptr, b, n, block, BLOCKS, Q_BLOCKS, O)
        if index_ptr is not None:
            first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, BLOCKS, O)
        dense, bias, slope, seed = dense_ptr, bias_ptr, None, None
        if dense_ptr is not None:
            dense = dense_ptr + b64 * O.DENSE_BATCH + n.to(tl.int64) * O.DENSE_HEAD
        if bias_ptr is not None:
            bias = bias_ptr + b64 * O.BIAS_BATCH + n.to(tl.int64) * O.BIAS_HEAD
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + b * O.SLOPE_BATCH + n).to(tl.float32)
        if seed_ptr is not None:
            seed = tl.load(seed_ptr + b * O.SEED_BATCH + n * O.SEED_HEAD)
        dk, dv = _key_blocks(
            dk, dv, first, full, list_ptr, k, v, d_out_ptr, lse_ptr, delta_ptr, q_ptr, kj[:, None], k_at, k_segment,
            q_at_ptr, q_segment_ptr, ends_ptr, dense, bias, slope, seed, n, O, True)  # fmt: skip
        dk, dv = _key_blocks(
            dk, dv, full, full_end, list_ptr, k, v, d_out_ptr, lse_ptr, delta_ptr, q_ptr, kj[:, None], k_at, k_segment,
            q_at_ptr, q_segment_ptr, ends_ptr, dense, bias, slope, seed, n, O, False)  # fmt: skip
        dk, dv = _key_blocks(
            dk, dv, full_end, last, list_ptr, k, v, d_out_ptr, lse_ptr, delta_ptr, q_ptr, kj[:, None], k_at, k_segment,
            q_at_ptr, q_segment_ptr, ends_ptr, dense, bias, slope, seed, n, O, True)  # fmt: skip
    store_rows(dk_ptr + b64 * (O.S * O.K * O.H), dk, kj, O.K, head, O.H, O.S, O.BLOCK_H)
    store_rows(dv_ptr + b64 * (O.S * O.K * O.HV), dv, kj, O.K, head, O.HV, O.S, O.BLOCK_V)


@triton.jit
def bias_gradient_kernel(
    d_out_ptr,  # as above
    lse_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    spans_ptr,  # [B|1, query blocks, 4]
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    dense_ptr,
    bias_ptr,
    slope_ptr,
    seed_ptr,
    d_bias_ptr,  # [B|1, N|1, T|1, S|1] float32
    O: tl.constexpr,  # `Options`
):
    """The gradient of a broadcast bias. A program owns a block of it and loops over everything it was broadcast to, so
    that the order of summation is fixed. Logits and gradients of weights are recomputed for it."""
    Q_BLOCKS: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    K_BLOCKS: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    rest = tl.program_id(0)
    if O.BIAS_COLUMN == 0:
        k_begin, k_end = 0, K_BLOCKS
    else:
        k_begin, k_end = rest % K_BLOCKS, rest % K_BLOCKS + 1
        rest = rest // K_BLOCKS
    if O.BIAS_ROW == 0:
        q_begin, q_end = 0, Q_BLOCKS
    else:
        q_begin, q_end = rest % Q_BLOCKS, rest % Q_BLOCKS + 1
        rest = rest // Q_BLOCKS
    if O.BIAS_HEAD == 0:
        n_begin, n_end = 0, O.N
    else:
        n_begin, n_end = rest % O.N, rest % O.N + 1
        rest = rest // O.N
    if O.BIAS_BATCH == 0:
        b_begin, b_end = 0, O.B
    else:
        b_begin, b_end = rest, rest + 1
    acc = tl.zeros([O.BLOCK_Q, O.BLOCK_K], tl.float32)
    for b in range(b_begin, b_end):
        b64 = tl.cast(b, tl.int64)
        masks = (q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr)
        q_at_row, k_at_row, q_segment_row, k_segment_row, ends_row = masks_of(masks, b, O)
        for n in range(n_begin, n_end):
            head = n // (O.N // O.K)
            dense, bias = dense_ptr, bias_ptr + b64 * O.BIAS_BATCH + n * O.BIAS_HEAD
            slope, seed = None, None
            if dense_ptr is not None:
                dense = dense_ptr + b64 * O.DENSE_BATCH + n * O.DENSE_HEAD
            if slope_ptr is not None:
                slope = tl.load(slope_ptr + b * O.SLOPE_BATCH + n).to(tl.float32)
            if seed_ptr is not None:
                seed = tl.load(seed_ptr + b * O.SEED_BATCH + n * O.SEED_HEAD)
            for i in range(q_begin, q_end):
                span = spans_ptr + b * O.SPAN_BATCH + i * 4
                begin, end = tl.maximum(tl.load(span), k_begin), tl.minimum(tl.load(span + 3), k_end)
                qi = i * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
                q_at = positions_of(q_at_row, qi, O.S - O.T, O.T)[:, None]
                q_segment = segments_of(q_segment_row, qi, O.T)[:, None]
                ends = ends_of(ends_row, qi[:, None], O)
                q = rows_of(q_ptr + b64 * (O.T * O.N * O.H), qi, O.N, n, O.H, O.T, O.BLOCK_H)
                d_out = rows_of(d_out_ptr + b64 * (O.T * O.N * O.HV), qi, O.N, n, O.HV, O.T, O.BLOCK_V)
                lse, delta = statistics(lse_ptr + b64 * (O.T * O.N), delta_ptr + b64 * (O.T * O.N), qi, n, O)
                for j in range(begin, end):
                    kj = j * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
                    k = rows_of(k_ptr + b64 * (O.S * O.K * O.H), kj, O.K, head, O.H, O.S, O.BLOCK_H)
                    v = rows_of(v_ptr + b64 * (O.S * O.K * O.HV), kj, O.K, head, O.HV, O.S, O.BLOCK_V)
                    k_at = positions_of(k_at_row, kj, 0, O.S)[None, :]
                    k_segment = segments_of(k_segment_row, kj, O.S)[None, :]
                    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
                    x, _ = scores(qk, qi[:, None], kj[None, :], q_at, k_at, q_segment, k_segment, ends, dense, bias, slope,
                                   O, True)  # fmt: skip
                    dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
                    if seed is not None:
                        dp *= dropout_factor(seed, q_at, k_at, O.THRESHOLD, O.FACTOR)
                    acc += tl.exp2(x - lse[:, None]) * (dp - delta[:, None])
    where = d_bias_ptr + b_begin * O.BIAS_BATCH + n_begin * O.BIAS_HEAD
    rows = q_begin * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
    cols = k_begin * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
    if O.BIAS_ROW == 0:
        by_column = tl.sum(acc, axis=0)
        if O.BIAS_COLUMN == 0:
            tl.store(where, tl.sum(by_column, axis=0))
        else:
            tl.store(where + cols, by_column, mask=cols < O.S)
    else:
        if O.BIAS_COLUMN == 0:
            tl.store(where + rows * O.BIAS_ROW, tl.sum(acc, axis=1), mask=rows < O.T)
        else:
            inside = (rows < O.T)[:, None] & (cols < O.S)[None, :]
            tl.store(where + rows.to(tl.int64)[:, None] * O.BIAS_ROW + cols[None, :], acc, mask=inside)
