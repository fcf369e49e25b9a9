"""Triton kernels of recurrences in which each channel of a key decays by its own factor:

    S_t = diag(exp a_t) S_{t-1} + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

The decays go into queries and keys, once for all chunks: with them the walk over chunks is that of one decay per head. Between
two tokens of a chunk no such split exists that is safe for every decay, as exp(G_t) k_s exp(-G_s) overflows. Instead the pairs
are taken by levels. At the level of `half` tokens a chunk is blocks of 2 `half`; a pair belongs to it if t is in the second
half of a block and s in the first. The beginning of the second half lies between them, so both are referred to it: exp(the sum
from there to t) and exp(the sum from s to there), neither above 1. A level is one matrix product, and there are log2(C).
"""

from __future__ import annotations

import triton
import triton.language as tl

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
)


@triton.jit
def interval_sums(a, begin, end, BLOCK_C: tl.constexpr):
    """Returns the sums of a [C, H] over tokens begin <= u < end, both [C], for each token: each summed by itself."""
    u = tl.arange(0, BLOCK_C)[None, :]
    return tl.dot(
        tl.where((u >= begin[:, None]) & (u < end[:, None]), 1.0, 0.0).to(a.dtype), a, input_precision="ieee"
    )


@triton.jit
def sums_over_intervals(z, begin, end, BLOCK_C: tl.constexpr):
    """Returns for each token u the sum of z_t over the tokens t whose interval has it: the transpose of `interval_sums`."""
    u = tl.arange(0, BLOCK_C)[:, None]
    return tl.dot(tl.where((u >= begin[None, :]) & (u < end[None, :]), 1.0, 0.0), z, input_precision="ieee")


@triton.jit
def level(half, BLOCK_C: tl.constexpr):
    """Returns (whether a token is in the second half of its block [C], the first token of that half, the level's pairs [t, s])."""
    i = tl.arange(0, BLOCK_C)
    middle = i // (2 * half) * (2 * half) + half
    late = i >= middle
    return late, middle, late[:, None] & (i < middle)[None, :] & (middle[:, None] == middle[None, :])


@triton.jit
def level_decay(
    sums_at, here, h, late, middle, READS: tl.constexpr, BEFORE: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, EXACT: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns the decay between each token and the middle of its block [C, H]: at most 1.

    Args:
      sums_at: what `channel_pairs_kernel` stores at the chunk: log decays if EXACT, else their sums since its beginning.
      READS: of late tokens, that until they read; if BEFORE it is without their own.
    """
    i = tl.arange(0, BLOCK_C)
    own = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        to = i if READS and BEFORE else i + 1
        e = interval_sums(own, tl.where(late, middle, i + 1), tl.where(late, to, middle), BLOCK_C)
    else:
        at = sums_at + (middle - 1)[:, None] * (N * H) + h[None, :]
        count = tl.sum(here.to(tl.int32))
        at_middle = tl.load(at, mask=(middle <= count)[:, None] & (h < H)[None, :], other=0.0)
        if READS and BEFORE:
            own = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C)
        e = tl.where(late[:, None], own - at_middle, at_middle - own)
    return tl.exp(tl.minimum(e, 0.0))


@triton.jit
def channel_pairs_kernel(
    q_ptr,  # [B, T, KQ, H]
    k_ptr,  # [B, T, KK, H]
    a_ptr,  # [B, T, N, H] float32 log decays
    beta_ptr,  # [B, N, T], for a delta rule, or None
    bonus_ptr,  # [N, H] float32: outputs read the state before their token, and k_t v_tᵀ weighed by it; or None
    runs_ptr,
    table_ptr,
    pairs_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of the write at s
    sums_ptr,  # [B, T, N, H] float32: see `level_decay`
    reads_ptr,  # [B, T, N, H]: queries, as they read the state before the chunk
    leaves_ptr,  # [B, T, N, H]: keys, as they write the state after it
    whole_ptr,  # [B, N, CHUNKS, H] float32: the decay over the chunk
    keeps_ptr,  # [B, T, N, H]: keys, as they read the state before the chunk; this and what follows with beta_ptr
    solve_ptr,  # [B, N, CHUNKS, C, C]: the inverse
    scratch_ptr,  # [B, N, CHUNKS, C, 16] float32
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORGETS: tl.constexpr,  # the least log decay: its exponential underflows to 0
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    dtype = pairs_ptr.dtype.element_ty
    q_at = tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    q = load_rows(q_at, valid, h, KQ, H, BLOCK_C)
    k = load_rows(k_at, valid, h, KK, H, BLOCK_C)
    a = load_rows(tokens_by_channels(a_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C)
    a = tl.where(a < FORGETS, FORGETS, a)
    since, zeros = tl.cumsum(a, 0), tl.zeros([BLOCK_C], tl.int32)
    if EXACT:
        store_rows(sums_at, a, here, h, N, H, BLOCK_C)
        until_end = interval_sums(a, i + 1, zeros + BLOCK_C, BLOCK_C)
        reading = interval_sums(a, zeros, i, BLOCK_C) if bonus_ptr is not None else since
    else:
        store_rows(sums_at, since, here, h, N, H, BLOCK_C)
        until_end = tl.sum(a, 0)[None, :] - since
        reading = since - a if bonus_ptr is not None else since
    whole = tl.where((h < H) & (before == last), tl.exp(tl.sum(a, 0)), 0.0)
    tl.store(whole_ptr + (head.to(tl.int64) * CHUNKS + c) * H + h, whole, mask=h < H)
    enters, leaves = (run == before)[:, None], (run == last)[:, None]
    read = tl.where(enters, q.to(tl.float32) * tl.exp(reading) * SCALE, 0.0)
    store_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), read, here, h, N, H, BLOCK_C)
    left = tl.where(leaves, k.to(tl.float32) * tl.exp(tl.minimum(until_end, 0.0)), 0.0)
    store_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), left, here, h, N, H, BLOCK_C)
    own = q.to(tl.float32) * k.to(tl.float32)
    if bonus_ptr is not None:
        own *= tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0)[None, :]
    weights = tl.where(i[:, None] == i[None, :], tl.sum(own, 1)[:, None], 0.0)
    A = tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    if beta_ptr is not None:
        keep = tl.where(enters, k.to(tl.float32) * tl.exp(since), 0.0)
        store_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), keep, here, h, N, H, BLOCK_C)
    tl.debug_barrier()  # sums that other threads have stored are read below
    for number in tl.range(0, LEVELS, num_stages=1):
        half = 1 << number
        late, middle, wanted = level(half, BLOCK_C)
        f = level_decay(sums_at, here, h, late, middle, False, False, N, H, EXACT, BLOCK_C)
        key = (load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32) * f).to(dtype)
        if bonus_ptr is not None:
            f = level_decay(sums_at, here, h, late, middle, True, True, N, H, EXACT, BLOCK_C)
        query = (load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * f).to(dtype)
        weights = tl.where(wanted, tl.dot(query, tl.trans(key), input_precision=PRECISION), weights)
        if beta_ptr is not None:
            A = tl.where(wanted, tl.dot(key, tl.trans(key), input_precision=PRECISION), A)
    same = run[:, None] == run[None, :]
    at = square_at(pairs_ptr, tl.program_id(0), BLOCK_C)
    tl.store(at, (tl.where(same, weights, 0.0) * SCALE).to(dtype))
    if beta_ptr is not None:
        A = tl.where(same, A * per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)[:, None], 0.0)
        solve = inverse(A, scratch_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_C * 16), BLOCK_C)
        tl.store(square_at(solve_ptr, tl.program_id(0), BLOCK_C), solve.to(dtype))


@triton.jit
def channel_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,  # [B, T, KV, Hv]
    bonus_ptr,
    sums_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    dq_ptr,  # [B, T, N, H]
    da_ptr,  # [B, T, N, H] float32: of what passes to the reads of queries
    d_own_ptr,  # [B, N, T] float32: gradients of q_t · bonus k_t, or None
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of the queries of one chunk and head, and of the decays until they read.

    A sum over decays is a difference of two here unless EXACT: the reads of late tokens less the writes of early ones, in
    `channel_dk_kernel`. What passes no decay cancels to the last bits, as both sums have the same rounded factors.
    """
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h, zeros = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H), tl.zeros([BLOCK_C], tl.int32)
    BEFORE: tl.constexpr = bonus_ptr is not None
    x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
    d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
    d_pairs, d_read = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(x_at, valid, v, KV, Hv, BLOCK_C)
        d_out = load_rows(d_out_at, valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, True, H, Hv)
        d_pairs = tl.dot(d_out, tl.trans(x), d_pairs, input_precision=PRECISION)
        d_read = tl.dot(d_out, tl.trans(state), d_read, input_precision=PRECISION)
    q_at = tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    q = load_rows(q_at, valid, h, KQ, H, BLOCK_C)
    k = load_rows(k_at, valid, h, KK, H, BLOCK_C)
    sums = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        sums = interval_sums(sums, zeros, i if BEFORE else i + 1, BLOCK_C)
    elif BEFORE:
        sums = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C)
    dq = tl.where((run == before)[:, None], d_read * tl.exp(tl.minimum(sums, 0.0)) * SCALE, 0.0)
    z = q.to(tl.float32) * dq
    da = sums_over_intervals(z, zeros, i if BEFORE else i + 1, BLOCK_C) if EXACT else z
    d_pairs = tl.where(run[:, None] == run[None, :], d_pairs * SCALE, 0.0)
    own = tl.sum(tl.where(i[:, None] == i[None, :], d_pairs, 0.0), 1)
    weighed = k.to(tl.float32)
    if BEFORE:
        tl.store(d_own_ptr + head.to(tl.int64) * T + first + i, own, mask=here)
        weighed *= tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0)[None, :]
    dq += own[:, None] * weighed
    for number in tl.range(0, LEVELS, num_stages=1):
        half = 1 << number
        late, middle, wanted = level(half, BLOCK_C)
        f = level_decay(sums_at, here, h, late, middle, False, False, N, H, EXACT, BLOCK_C)
        key = (load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32) * f).to(k.dtype)
        if BEFORE:
            f = level_decay(sums_at, here, h, late, middle, True, True, N, H, EXACT, BLOCK_C)
        query = (load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * f).to(k.dtype)
        through = tl.dot(tl.where(wanted, d_pairs, 0.0).to(k.dtype), key, input_precision=PRECISION)
        dq += through * f
        z = through * query.to(tl.float32)
        if EXACT:
            to = i if BEFORE else i + 1
            z = sums_over_intervals(z, tl.where(late, middle, i), tl.where(late, to, i), BLOCK_C)
        da += z
    if not EXACT:
        da = tl.cumsum(da, 0, reverse=True) - da if BEFORE else tl.cumsum(da, 0, reverse=True)
    store_rows(tokens_by_channels(da_ptr, row, first, n, T, N, H), da, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dq_ptr, row, first, n, T, N, H), dq, here, h, N, H, BLOCK_C)


@triton.jit
def channel_dk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,  # [B, T, KV, Hv]
    bonus_ptr,
    sums_ptr,
    whole_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: gradients of the states after each chunk
    d_reads_ptr,  # [B, T, N, H] float32: da of `channel_dq_kernel`, to which the rest is added
    dk_ptr,  # [B, T, N, H]
    da_ptr,  # [B, T, N, H] float32
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products of states are the diagonal of a matrix product
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of the keys of one chunk and head, and of the decays after they write."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h, zeros = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H), tl.zeros([BLOCK_C], tl.int32)
    index = head.to(tl.int64) * CHUNKS + c
    x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
    d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
    d_pairs, d_write = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    passed = tl.zeros([BLOCK_H, BLOCK_H] if DIAGONAL else [BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(x_at, valid, v, KV, Hv, BLOCK_C)
        d_out = load_rows(d_out_at, valid, v, N, Hv, BLOCK_C)
        d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
        state = load_state(states_ptr, index, h, v, True, H, Hv)
        d_pairs = tl.dot(x, tl.trans(d_out), d_pairs, input_precision=PRECISION)  # [s, t]: it need not be transposed
        d_write = tl.dot(x, tl.trans(d_state), d_write, input_precision=PRECISION)
        if DIAGONAL:  # loads for products overlap them, and loads for sums would not
            passed = tl.dot(state, tl.trans(d_state), passed, input_precision=PRECISION)
        else:
            passed += state.to(tl.float32) * d_state.to(tl.float32)
    if DIAGONAL:
        passed = tl.where(h[:, None] == h[None, :], passed, 0.0)
    whole = tl.load(whole_ptr + index * H + h, mask=h < H, other=0.0) * tl.sum(passed, 1)
    q_at = tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    q = load_rows(q_at, valid, h, KQ, H, BLOCK_C)
    k = load_rows(k_at, valid, h, KK, H, BLOCK_C)
    sums = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        until_end = interval_sums(sums, i + 1, zeros + BLOCK_C, BLOCK_C)
    else:
        until_end = tl.sum(tl.where((i == count - 1)[:, None], sums, 0.0), 0)[None, :] - sums
    dk = tl.where((run == last)[:, None], d_write * tl.exp(tl.minimum(until_end, 0.0)), 0.0)
    z = k.to(tl.float32) * dk
    earlier = sums_over_intervals(z, i + 1, zeros + BLOCK_C, BLOCK_C) if EXACT else tl.cumsum(z, 0) - z
    da = load_rows(tokens_by_channels(d_reads_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    da += earlier + whole[None, :]
    d_pairs = tl.where(run[:, None] == run[None, :], d_pairs * SCALE, 0.0)
    own = tl.sum(tl.where(i[:, None] == i[None, :], d_pairs, 0.0), 1)
    weighed = q.to(tl.float32)
    if bonus_ptr is not None:
        weighed *= tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0)[None, :]
    dk += own[:, None] * weighed
    less = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for number in tl.range(0, LEVELS, num_stages=1):
        half = 1 << number
        late, middle, wanted = level(half, BLOCK_C)
        f = level_decay(sums_at, here, h, late, middle, False, False, N, H, EXACT, BLOCK_C)
        key = (load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32) * f).to(k.dtype)
        g = f
        if bonus_ptr is not None:
            g = level_decay(sums_at, here, h, late, middle, True, True, N, H, EXACT, BLOCK_C)
        query = (load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32) * g).to(k.dtype)
        through = tl.dot(tl.where(tl.trans(wanted), d_pairs, 0.0).to(k.dtype), query, input_precision=PRECISION)
        dk += through * f
        z = through * key.to(tl.float32)
        if EXACT:
            da += sums_over_intervals(z, i + 1, tl.where(late, i + 1, middle), BLOCK_C)
        else:
            less += z
    if not EXACT:
        da -= tl.cumsum(less, 0, reverse=True)
    store_rows(tokens_by_channels(da_ptr, row, first, n, T, N, H), da, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
