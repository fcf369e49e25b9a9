"""Triton kernels of recurrences in which each channel of a key decays by its own factor:

    S_t = diag(exp a_t) S_{t-1} + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

The decays go into queries and keys, once for all chunks: with them the walk over chunks is that of one decay per head. The
pairs of a chunk are taken by steps; `triton_channel_steps.py` says how. In the backward, what the states before and after a
chunk give is computed first, with no decay; then the decays are applied, to queries, keys and for delta rules what is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_channel_steps import (
    first_level,
    interval_sums,
    level,
    level_decay,
    middle_decay,
    within_blocks,
)
from kernels.engines.scan.triton_inverse import inverse
from kernels.engines.scan.triton_parts import (
    chunk_of,
    load_rows,
    load_state,
    per_token,
    runs_of,
    square_at,
    store_rows,
    tokens_by_channels,
    tokens_of,
)


@triton.jit
def channel_decays_kernel(
    q_ptr,  # [B, T, KQ, H]
    k_ptr,  # [B, T, KK, H]
    a_ptr,  # [B, T, N, H] log decays
    runs_ptr,
    table_ptr,
    sums_ptr,  # [B, T, N, H] float32: log decays if EXACT, else their sums since the beginning of their chunk
    reads_ptr,  # [B, T, N, H]: queries, as they read the state before the chunk
    leaves_ptr,  # [B, T, N, H]: keys, as they write the state after it
    whole_ptr,  # [B, N, CHUNKS, H] float32: the decay over the chunk
    first_ptr,  # int32 [B, N, CHUNKS, BLOCKS]: what `first_level` returns
    keeps_ptr,  # [B, T, N, H]: keys, as they read the state before the chunk, or None
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORGETS: tl.constexpr,  # the least log decay
    BEFORE: tl.constexpr,  # whether outputs read the state before the decay of their token
    REACH: tl.constexpr,  # the widest sum of log decays that is taken from its middle; 0: none is
    SCALE: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BLOCK_H channels
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """What decays do to BLOCK_H channels of the queries and keys of one chunk and head."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, zeros = tl.arange(0, BLOCK_C), tl.zeros([BLOCK_C], tl.int32)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    enters, leaves = (run == before)[:, None], (run == last)[:, None]
    a = load_rows(tokens_by_channels(a_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C).to(tl.float32)
    a = tl.where(a < FORGETS, FORGETS, a)
    since, total = tl.cumsum(a, 0), tl.sum(a, 0)
    index = head.to(tl.int64) * CHUNKS + c
    tl.store(first_ptr + index * BLOCKS + tl.program_id(1), first_level(a, total, REACH, LEVELS, BLOCK_C, BLOCK_H))
    tl.store(whole_ptr + index * H + h, tl.where(before == last, tl.exp(total), 0.0), mask=h < H)
    if EXACT:
        until_end = interval_sums(a, i + 1, zeros + BLOCK_C, BLOCK_C)
        reading = interval_sums(a, zeros, i, BLOCK_C) if BEFORE else since
    else:
        until_end = tl.sum(a, 0, keep_dims=True) - since
        reading = since - a if BEFORE else since
    sums = a if EXACT else since
    store_rows(tokens_by_channels(sums_ptr, row, first, n, T, N, H), sums, here, h, N, H, BLOCK_C)
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
    read = tl.where(enters, q.to(tl.float32) * tl.exp(reading) * SCALE, 0.0)
    store_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), read, here, h, N, H, BLOCK_C)
    k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
    left = tl.where(leaves, k.to(tl.float32) * tl.exp(tl.minimum(until_end, 0.0)), 0.0)
    store_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), left, here, h, N, H, BLOCK_C)
    if keeps_ptr is not None:
        keep = tl.where(enters, k.to(tl.float32) * tl.exp(since), 0.0)
        store_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), keep, here, h, N, H, BLOCK_C)


@triton.jit
def channel_pairs_kernel(
    q_ptr,  # [B, T, KQ, H]
    k_ptr,  # [B, T, KK, H]
    beta_ptr,  # [B, N, T], for a delta rule, or None
    bonus_ptr,  # [N, H] float32: outputs read the state before their token, and k_t v_tᵀ weighed by it; or None
    sums_ptr,  # see `channel_decays_kernel`
    first_ptr,
    runs_ptr,
    table_ptr,
    pairs_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of the write at s
    solve_ptr,  # [B, N, CHUNKS, C, C]: the inverse; this and the next with beta_ptr
    scratch_ptr,  # [B, N, CHUNKS, C, 16] float32
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    REACH: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i = tl.arange(0, BLOCK_C)
    BEFORE: tl.constexpr = tl.constexpr(bonus_ptr is not None)
    # Blocks have each token's own write. A delta rule has no registers for that, and a bonus weighs it.
    OWN: tl.constexpr = tl.constexpr(bonus_ptr is None and beta_ptr is None)
    dtype = pairs_ptr.dtype.element_ty
    q_at = tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    first_at, own = first_ptr + tl.program_id(0) * BLOCKS, tl.zeros([BLOCK_C], tl.float32)
    weights, A = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h, at_level = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.load(first_at + block)
        if (not OWN) or at_level == 0:
            weighed = load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32)
            if BEFORE:
                weighed *= tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0)[None, :]
            own += tl.sum(load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * weighed, 1)
        if REACH > 0:
            if at_level > 0:
                size = 1 << at_level
                wanted = within_blocks(size, OWN, BLOCK_C)
                reads, writes = middle_decay(sums_at, here, h, size, count, BEFORE, N, H, REACH, BLOCK_C)
                query = (load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
                keys = load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32)
                written = tl.trans((keys * writes).to(dtype))
                weights += tl.where(wanted, tl.dot(query, written, input_precision=PRECISION), 0.0)
                if beta_ptr is not None:
                    A += tl.where(wanted, tl.dot((keys * reads).to(dtype), written, input_precision=PRECISION), 0.0)
        for number in tl.range(at_level, LEVELS, num_stages=1):
            late, middle, wanted = level(1 << number, BLOCK_C)
            f = level_decay(sums_at, here, h, late, middle, False, N, H, EXACT, BLOCK_C)
            key = (load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32) * f).to(dtype)
            if BEFORE:
                f = level_decay(sums_at, here, h, late, middle, True, N, H, EXACT, BLOCK_C)
            query = (load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * f).to(dtype)
            weights += tl.where(wanted, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
            if beta_ptr is not None:
                A += tl.where(wanted, tl.dot(key, tl.trans(key), input_precision=PRECISION), 0.0)
    weights += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
    same = run[:, None] == run[None, :]
    at = square_at(pairs_ptr, tl.program_id(0), BLOCK_C)
    tl.store(at, (tl.where(same, weights, 0.0) * SCALE).to(dtype))
    if beta_ptr is not None:
        A = tl.where(same, A * per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)[:, None], 0.0)
        solve = inverse(A, scratch_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_C * 16), BLOCK_C)
        tl.store(square_at(solve_ptr, tl.program_id(0), BLOCK_C), solve.to(dtype))


@triton.jit
def channel_solve_kernel(
    a_ptr,  # [B, N, CHUNKS, C, C] float32
    solve_ptr,  # [B, N, CHUNKS, C, C]: what `triton_inverse.inverse` returns
    scratch_ptr,  # [B, N, CHUNKS, C, 16] float32
    BLOCK_C: tl.constexpr,
):
    index = tl.program_id(0)
    A = tl.load(square_at(a_ptr, index, BLOCK_C))
    solve = inverse(A, scratch_ptr + index.to(tl.int64) * (BLOCK_C * 16), BLOCK_C)
    tl.store(square_at(solve_ptr, index, BLOCK_C), solve.to(solve_ptr.dtype.element_ty))


@triton.jit
def channel_states_kernel(
    v_ptr,  # [B, T, KV, Hv]: what is written
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: gradients of the states after each chunk
    d_pairs_ptr,  # [B, N, CHUNKS, C, C]
    d_reads_ptr,  # [B, T, N, H]
    d_leaves_ptr,  # [B, T, N, H]
    d_whole_ptr,  # [B, N, CHUNKS, H] float32
    T: tl.constexpr,
    N: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products of states are the diagonal of a matrix product
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of what `channel_pairs_kernel` returns for one chunk and head."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    h, index = tl.arange(0, BLOCK_H), head.to(tl.int64) * CHUNKS + c
    x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
    d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
    d_pairs, d_reads = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    d_leaves = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    passed = tl.zeros([BLOCK_H, BLOCK_H] if DIAGONAL else [BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(x_at, valid, v, KV, Hv, BLOCK_C)
        d_out = load_rows(d_out_at, valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, index, h, v, True, H, Hv)
        d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
        d_pairs = tl.dot(d_out, tl.trans(x), d_pairs, input_precision=PRECISION)
        d_reads = tl.dot(d_out, tl.trans(state), d_reads, input_precision=PRECISION)
        d_leaves = tl.dot(x, tl.trans(d_state), d_leaves, input_precision=PRECISION)
        if DIAGONAL:  # loads for products overlap them, and loads for sums would not
            passed = tl.dot(state, tl.trans(d_state), passed, input_precision=PRECISION)
        else:
            passed += state.to(tl.float32) * d_state.to(tl.float32)
    tl.store(square_at(d_pairs_ptr, tl.program_id(0), BLOCK_C), d_pairs.to(d_pairs_ptr.dtype.element_ty))
    store_rows(tokens_by_channels(d_reads_ptr, row, first, n, T, N, H), d_reads, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(d_leaves_ptr, row, first, n, T, N, H), d_leaves, here, h, N, H, BLOCK_C)
    if DIAGONAL:
        passed = tl.where(h[:, None] == h[None, :], passed, 0.0)
    tl.store(d_whole_ptr + index * H + h, tl.sum(passed, 1), mask=h < H)


@triton.jit
def channel_written_kernel(
    v_ptr,  # [B, T, N, Hv]
    beta_ptr,  # [B, N, T]
    runs_ptr,
    table_ptr,
    written_ptr,  # [B, T, N, Hv]
    du_ptr,  # [B, T, N, Hv]: gradients of beta (v - what the state has for k)
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_solved_ptr,  # [B, N, CHUNKS, C, C]: du · writtenᵀ, which is that of A, without its sign
    d_keeps_ptr,  # [B, T, N, H]: du · S, which is that of keys as they read the state, without -beta
    d_beta_ptr,  # [B, N, T] float32: du · v
    dv_ptr,  # [B, T, N, Hv]
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products of du and v are the diagonal of a matrix product
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and head through what a delta rule writes, before decays."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
    dv_at = tokens_by_channels(dv_ptr, row, first, n, T, N, Hv)
    written_at = tokens_by_channels(written_ptr, row, first, n, T, N, Hv)
    du_at = tokens_by_channels(du_ptr, row, first, n, T, N, Hv)
    beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
    square, wide = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    of_values = tl.zeros([BLOCK_C, BLOCK_C] if DIAGONAL else [BLOCK_C, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        du = load_rows(du_at, valid, v, N, Hv, BLOCK_C)
        written = load_rows(written_at, valid, v, N, Hv, BLOCK_C)
        x = load_rows(v_at, valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, True, H, Hv)
        square = tl.dot(du, tl.trans(written), square, input_precision=PRECISION)
        wide = tl.dot(du, tl.trans(state), wide, input_precision=PRECISION)
        if DIAGONAL:  # loads for products overlap them, and loads for sums would not
            of_values = tl.dot(du, tl.trans(x), of_values, input_precision=PRECISION)
        else:
            of_values += du.to(tl.float32) * x.to(tl.float32)
        store_rows(dv_at, du.to(tl.float32) * beta[:, None], here, v, N, Hv, BLOCK_C)
    if DIAGONAL:
        of_values = tl.where(i[:, None] == i[None, :], of_values, 0.0)
    tl.store(square_at(d_solved_ptr, tl.program_id(0), BLOCK_C), square.to(d_solved_ptr.dtype.element_ty))
    store_rows(tokens_by_channels(d_keeps_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
    tl.store(d_beta_ptr + head.to(tl.int64) * T + first + i, tl.sum(of_values, 1), mask=here)
