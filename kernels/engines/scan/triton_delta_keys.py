"""Triton kernel of what `triton_scalar.scalar_dk_kernel` and `triton_delta.delta_bwd_kernel` compute of a gated delta rule, in
one: what the second reads again of the first is then in the cache, and no gradient of keys is in memory between them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import (
    chunk_of,
    interval_gradient,
    load_columns,
    load_fades,
    load_rows,
    load_state,
    pairs,
    pairs_from,
    per_token,
    runs_of,
    store_rows,
    tokens_by_channels,
)


@triton.jit
def delta_keys_kernel(
    q_ptr,  # [B, T, K, H]
    k_ptr,
    v_ptr,  # [B, T, N, Hv]
    beta_ptr,  # [B, N, T]
    a_ptr,  # [B, N, T], or None
    enters_ptr,
    leaves_ptr,
    whole_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv], as what follows
    written_ptr,
    du_ptr,
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: gradients of the states after each chunk
    dk_ptr,  # [B, T, N, H]
    dv_ptr,  # [B, T, N, Hv]
    dbeta_ptr,  # [B, N, T]
    da_ptr,  # [B, N, T], or None: of all but what outputs read
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products are the diagonal of a matrix product
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and one head, for a sum over two would not fit the registers: of keys, values, beta, and of decays
    but for what outputs read."""
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = rest // N, rest % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h, u = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    shared = n // (N // K)
    q_at = tokens_by_channels(q_ptr, row, first, shared, T, K, H)
    k_at = tokens_by_channels(k_ptr, row, first, shared, T, K, H)
    enters, leaves, whole = load_fades(enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, T, N, CHUNKS, BLOCK_C)
    a = per_token(a_ptr, row, n, first, here, T, N, BLOCK_C)
    beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
    head = row.to(tl.int64) * N + n
    index, at = head * CHUNKS + c, head * T + first + i
    written_at = tokens_by_channels(written_ptr, row, first, n, T, N, Hv)
    # What outputs and the state after the chunk have of the keys that write.
    d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
    d_pairs, d_write = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    passed = tl.zeros([BLOCK_V, BLOCK_V] if DIAGONAL else [BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(written_at, valid, v, N, Hv, BLOCK_C)
        d_out = load_columns(d_out_at, valid, v, N, Hv, BLOCK_C)
        d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
        d_pairs = tl.dot(x, d_out, d_pairs, input_precision=PRECISION)  # [s, t]
        d_write = tl.dot(x, tl.trans(d_state), d_write, input_precision=PRECISION)
        if da_ptr is not None:
            state = load_state(states_ptr, index, h, v, True, H, Hv)
            if DIAGONAL:
                passed = tl.dot(tl.trans(state), d_state, passed, input_precision=PRECISION)
            else:
                passed += state.to(tl.float32) * d_state.to(tl.float32)
    # Queries and keys are loaded where they are used: the registers of a program have no place for them.
    da = tl.zeros([BLOCK_C], tl.float32)
    if da_ptr is not None:
        k = load_rows(k_at, valid, h, K, H, BLOCK_C)
        writes = tl.sum(k.to(tl.float32) * d_write, 1) * leaves
        if DIAGONAL:
            passed = tl.where(u[:, None] == u[None, :], passed, 0.0)
        da = tl.sum(tl.where(i[:, None] > i[None, :], writes[None, :], 0.0), 1) + whole * tl.sum(passed)
    d_pairs *= pairs_from(a_ptr, a, run, BLOCK_C) * SCALE
    dk = d_write * leaves[:, None]
    q = load_rows(q_at, valid, h, K, H, BLOCK_C)
    dk = tl.dot(d_pairs.to(q.dtype), q, dk, input_precision=PRECISION)
    # What is written has of them: of beta (v - enters · k S), and of A.
    v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
    dv_at = tokens_by_channels(dv_ptr, row, first, n, T, N, Hv)
    du_at = tokens_by_channels(du_ptr, row, first, n, T, N, Hv)
    square, wide = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    of_values = tl.zeros([BLOCK_C, BLOCK_C] if DIAGONAL else [BLOCK_C, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        du = load_rows(du_at, valid, v, N, Hv, BLOCK_C)
        written = load_rows(written_at, valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, index, h, v, True, H, Hv)
        square = tl.dot(du, tl.trans(written), square, input_precision=PRECISION)
        wide = tl.dot(du, tl.trans(state), wide, input_precision=PRECISION)
        if DIAGONAL:
            x = load_columns(v_at, valid, v, N, Hv, BLOCK_C)
            of_values = tl.dot(du, x, of_values, input_precision=PRECISION)
        else:
            of_values += du.to(tl.float32) * load_rows(v_at, valid, v, N, Hv, BLOCK_C).to(tl.float32)
        store_rows(dv_at, du.to(tl.float32) * beta[:, None], here, v, N, Hv, BLOCK_C)
    if DIAGONAL:
        of_values = tl.where(i[:, None] == i[None, :], of_values, 0.0)
    square *= tl.where(i[:, None] > i[None, :], pairs(a_ptr, a, run, BLOCK_C), 0.0)
    k = load_rows(k_at, valid, h, K, H, BLOCK_C)
    through = tl.dot(k, tl.trans(k), input_precision=PRECISION) * square
    old = tl.sum(k.to(tl.float32) * wide, 1) * enters
    tl.store(dbeta_ptr + at, tl.sum(of_values, 1) - old - tl.sum(through, 1), mask=here)
    if da_ptr is not None:
        da += interval_gradient(through * -beta[:, None], old * -beta, BLOCK_C)
        tl.store(da_ptr + at, da, mask=here)
    square *= -beta[:, None]
    dk += wide * (-beta * enters)[:, None]
    dk = tl.dot((square + tl.trans(square)).to(k.dtype), k, dk, input_precision=PRECISION)
    store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
