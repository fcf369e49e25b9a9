"""Triton kernels of recurrences whose state decays by one factor per head and token:

    S_t = exp(a_t) S_{t-1} + w_t k_t v_tᵀ,  out_t = scale · S_tᵀ q_t + skip · v_t

Weights of pairs of a chunk are computed for all chunks at once. Then a program walks the chunks of one row and head with
the state in its registers. The gradient of the values is the same walk from the end, with queries and keys exchanged, and
the pairs transposed; those of queries, keys and decays follow from the states before and after each chunk, for all
chunks at once. A row may be split: its parts are walked at once from a state of 0, their maps S -> fade S + added are
composed, and each is walked again from the state that is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import (
    chunk_of,
    fades,
    interval_gradient,
    load_columns,
    load_fades,
    load_rows,
    load_state,
    load_walk_fades,
    pairs,
    pairs_from,
    per_token,
    runs_of,
    square_at,
    store_fades,
    store_rows,
    store_state,
    tokens_by_channels,
    tokens_of,
)


@triton.jit
def scalar_pairs_kernel(
    q_ptr,  # [B, T, KQ, H]
    k_ptr,  # [B, T, KK, H]
    a_ptr,  # [B, N, T] log decays, or None
    w_ptr,  # [B, N, T] weights of the writes, or None
    runs_ptr,
    table_ptr,
    pairs_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of v_s
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,  # consecutive heads of a program, which share queries and keys
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    PROGRAMS: tl.constexpr = N // HEADS
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, group = rest // PROGRAMS, rest % PROGRAMS
    n = group * HEADS
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
    k = load_columns(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
    products = tl.dot(q, k, input_precision=PRECISION) * SCALE
    for j in range(HEADS):
        n = group * HEADS + j
        weights = products * pairs(a_ptr, per_token(a_ptr, row, n, first, here, T, N, BLOCK_C), run, BLOCK_C)
        if w_ptr is not None:
            weights *= per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)[None, :]
        at = square_at(pairs_ptr, (row.to(tl.int64) * N + n) * CHUNKS + c, BLOCK_C)
        tl.store(at, weights.to(pairs_ptr.dtype.element_ty))
        fading = fades(a_ptr, row, n, first, count, here, run, before, last, T, N, BLOCK_C)
        store_fades(enters_ptr, leaves_ptr, whole_ptr, fading, row, n, c, first, here, T, N, CHUNKS, BLOCK_C)


@triton.jit
def scalar_walk_kernel(
    r_ptr,  # [B, T, KR, H], what reads the state: queries, or keys if REVERSE; None with out_ptr
    k_ptr,  # [B, T, KK, H], what writes it: keys, or queries
    x_ptr,  # [B, T, KX, Hv], what is written: values, or cotangents of the outputs
    pairs_ptr,  # [B, N, CHUNKS, C, C]; None with out_ptr
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns; None if decays of channels are in r and k
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32, or [B, N, CHUNKS, H]
    w_ptr,  # [B, N, T] weights of the writes, or None
    skip_ptr,  # [N] float32, or None
    runs_ptr,
    table_ptr,
    entries_ptr,  # [B, G, N, H, Hv]: states that sequences start from, None for 0; gradients of the final ones if REVERSE
    starts_ptr,  # [B, N, SPLITS, H, Hv]: states that parts start from; None for one part, or where their maps are wanted
    out_ptr,  # [B, T, N, Hv], or None
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk of the walk, or None
    exits_ptr,  # [B, G, N, H, Hv]: after each sequence, or None
    added_ptr,  # [B, N, SPLITS, H, Hv]: after each part, or None
    fade_ptr,  # [B, N, SPLITS], or [B, N, SPLITS, H]
    T: tl.constexpr,
    N: tl.constexpr,
    KR: tl.constexpr,
    KK: tl.constexpr,
    KX: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    PER: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    part, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row, n = head // N, head % N
    h, v = tl.arange(0, BLOCK_H), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end = part * PER, tl.minimum(CHUNKS, (part + 1) * PER)
    opening, closing = (SPLITS - 1, 0) if REVERSE else (0, SPLITS - 1)
    CHANNELS: tl.constexpr = tl.constexpr(enters_ptr is None)
    state, passing = tl.zeros([BLOCK_H, BLOCK_V], tl.float32), 1.0
    if CHANNELS:
        passing = tl.full([BLOCK_H, 1], 1.0, tl.float32)
    if starts_ptr is not None:
        state = load_state(starts_ptr, head * SPLITS + part, h, v, True, H, Hv)
    if table_ptr is None and entries_ptr is not None:
        state += load_state(entries_ptr, head, h, v, part == opening, H, Hv)
    c = end - 1 if REVERSE else begin
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    next_enters, next_leaves, next_whole = load_walk_fades(
        enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, h, T, N, H, CHUNKS, BLOCK_C
    )
    next_w = per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)
    for step in range(0, end - begin):
        c = end - 1 - step if REVERSE else begin + step
        first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
        here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
        enters, leaves, whole, w = next_enters, next_leaves, next_whole, next_w
        # Those of the next chunk are loaded a step ahead: the compiler does so only with operands of products.
        next_c = tl.maximum(begin, c - 1) if REVERSE else tl.minimum(end - 1, c + 1)
        next_first, next_count, _, _, _ = chunk_of(table_ptr, row, next_c, T, CHUNKS, BLOCK_C)
        next_here, _ = tokens_of(None, table_ptr, row, next_first, next_count, T, BLOCK_C)
        next_enters, next_leaves, next_whole = load_walk_fades(
            enters_ptr, leaves_ptr, whole_ptr, row, n, next_c, next_first, next_here, h, T, N, H, CHUNKS, BLOCK_C
        )
        next_w = per_token(w_ptr, row, n, next_first, next_here, T, N, BLOCK_C)
        enters *= SCALE
        if w_ptr is not None:
            leaves *= w
        reading, writing = (leaves, enters) if REVERSE else (enters, leaves)
        opens, closes = (ends, begins) if REVERSE else (begins, ends)
        slot = (row.to(tl.int64) * G + owner) * N + n
        if table_ptr is not None:
            state, passing = tl.where(opens, 0.0, state), tl.where(opens, 0.0, passing)
            if entries_ptr is not None:
                state += load_state(entries_ptr, slot, h, v, opens, H, Hv)
        if states_ptr is not None:
            store_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, state, True, H, Hv)
        k = load_columns(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
        x = load_rows(tokens_by_channels(x_ptr, row, first, n // (N // KX), T, KX, Hv), valid, v, KX, Hv, BLOCK_C)
        if out_ptr is not None:
            r = load_rows(tokens_by_channels(r_ptr, row, first, n // (N // KR), T, KR, H), valid, h, KR, H, BLOCK_C)
            at = square_at(pairs_ptr, head * CHUNKS + c, BLOCK_C)
            weights = tl.load(tl.trans(at) if REVERSE else at)
            out = tl.dot(r, state.to(r.dtype), input_precision=PRECISION)
            if not CHANNELS:
                out *= reading[:, None]
            out = tl.dot(weights, x, out, input_precision=PRECISION)
            if skip_ptr is not None:
                out += tl.load(skip_ptr + n) * x.to(tl.float32)
            store_rows(tokens_by_channels(out_ptr, row, first, n, T, N, Hv), out, here, v, N, Hv, BLOCK_C)
        if not CHANNELS:
            x = (x.to(tl.float32) * writing[:, None]).to(k.dtype)
        state = tl.dot(k, x, state * whole, input_precision=PRECISION)
        passing *= whole
        if table_ptr is not None and exits_ptr is not None:
            store_state(exits_ptr, slot, h, v, state, closes, H, Hv)
    if table_ptr is None and exits_ptr is not None:
        store_state(exits_ptr, head, h, v, state, part == closing, H, Hv)
    if added_ptr is not None:
        store_state(added_ptr, head * SPLITS + part, h, v, state, True, H, Hv)
        if tl.program_id(1) == 0:
            if CHANNELS:
                tl.store(fade_ptr + ((head * SPLITS + part) * H + h)[:, None], passing, mask=(h < H)[:, None])
            else:
                tl.store(fade_ptr + head * SPLITS + part, passing)


@triton.jit
def scalar_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,  # [B, T, KV, Hv]
    a_ptr,
    w_ptr,
    enters_ptr,
    leaves_ptr,
    whole_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    dq_ptr,  # [B, T, N or N / HEADS, H]: summed over the heads of a program if they share queries
    da_ptr,  # [B, N, T]: of what passes from writes and states to outputs, or None
    dw_ptr,  # [B, N, T]: of what outputs read of the writes of their chunk, or None
    dskip_ptr,  # [B, N, CHUNKS], or None
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,  # consecutive heads of a program, of one group
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of the queries of one chunk and HEADS heads, and of what decays and weights do to its outputs."""
    PROGRAMS: tl.constexpr = N // HEADS
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, group = rest // PROGRAMS, rest % PROGRAMS
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    n = group * HEADS
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
    k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
    dq = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for j in tl.range(
        0, HEADS, flatten=True
    ):  # one loop over heads and columns: loads of the next head overlap the end of this
        n = group * HEADS + j
        # Heads that share neither: a program has one of them.
        if HEADS > 1 and KQ == N:
            q = load_rows(tokens_by_channels(q_ptr, row, first, n, T, KQ, H), valid, h, KQ, H, BLOCK_C)
        if HEADS > 1 and KK == N:
            k = load_rows(tokens_by_channels(k_ptr, row, first, n, T, KK, H), valid, h, KK, H, BLOCK_C)
        enters, leaves, whole = load_fades(
            enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, T, N, CHUNKS, BLOCK_C
        )
        a = per_token(a_ptr, row, n, first, here, T, N, BLOCK_C)
        enters *= SCALE
        w = tl.full([BLOCK_C], 1.0, tl.float32)
        if w_ptr is not None:
            w = per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)
        index = (row.to(tl.int64) * N + n) * CHUNKS + c
        x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
        d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
        d_pairs, d_read = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        for start in range(0, Hv, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = load_columns(x_at, valid, v, KV, Hv, BLOCK_C)
            d_out = load_rows(d_out_at, valid, v, N, Hv, BLOCK_C)
            state = load_state(states_ptr, index, h, v, True, H, Hv)
            d_pairs = tl.dot(d_out, x, d_pairs, input_precision=PRECISION)
            d_read = tl.dot(d_out, tl.trans(state), d_read, input_precision=PRECISION)
        if dskip_ptr is not None:
            tl.store(dskip_ptr + index, tl.sum(tl.where(i[:, None] == i[None, :], d_pairs, 0.0)))
        d_pairs *= pairs(a_ptr, a, run, BLOCK_C) * SCALE
        at = (row.to(tl.int64) * N + n) * T + first + i
        if da_ptr is not None or dw_ptr is not None:
            between = tl.dot(q, tl.trans(k), input_precision=PRECISION) * d_pairs
            if dw_ptr is not None:
                tl.store(dw_ptr + at, tl.sum(between, 0), mask=here)
            if da_ptr is not None:
                reading = tl.sum(q.to(tl.float32) * d_read, 1) * enters
                tl.store(da_ptr + at, interval_gradient(between * w[None, :], reading, BLOCK_C), mask=here)
        if w_ptr is not None:
            d_pairs *= w[None, :]
        dq = dq + d_read * enters[:, None] if KQ < N else d_read * enters[:, None]
        dq = tl.dot(d_pairs.to(k.dtype), k, dq, input_precision=PRECISION)
        if KQ == N:
            store_rows(tokens_by_channels(dq_ptr, row, first, n, T, N, H), dq, here, h, N, H, BLOCK_C)
    if KQ < N:
        store_rows(tokens_by_channels(dq_ptr, row, first, group, T, PROGRAMS, H), dq, here, h, PROGRAMS, H, BLOCK_C)


@triton.jit
def scalar_dk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,  # [B, T, KV, Hv]
    a_ptr,
    w_ptr,
    enters_ptr,
    leaves_ptr,
    whole_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk; None with da_ptr
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: gradients of the states after each chunk
    dk_ptr,  # as dq_ptr
    da_ptr,  # [B, N, T]: of what passes from writes to the state after the chunk, or None
    dw_ptr,  # [B, N, T]: of what is written to it, or None
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products of states are the diagonal of a matrix product
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of the keys of one chunk and HEADS heads, and of what decays and weights do to the state after it."""
    PROGRAMS: tl.constexpr = N // HEADS
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, group = rest // PROGRAMS, rest % PROGRAMS
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    n = group * HEADS
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
    k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
    dk = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for j in tl.range(0, HEADS):
        n = group * HEADS + j
        if HEADS > 1 and KQ == N:
            q = load_rows(tokens_by_channels(q_ptr, row, first, n, T, KQ, H), valid, h, KQ, H, BLOCK_C)
        if HEADS > 1 and KK == N:
            k = load_rows(tokens_by_channels(k_ptr, row, first, n, T, KK, H), valid, h, KK, H, BLOCK_C)
        enters, leaves, whole = load_fades(
            enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, T, N, CHUNKS, BLOCK_C
        )
        a = per_token(a_ptr, row, n, first, here, T, N, BLOCK_C)
        index = (row.to(tl.int64) * N + n) * CHUNKS + c
        x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
        d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
        d_pairs, d_write = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        u = tl.arange(0, BLOCK_V)
        passed = tl.zeros([BLOCK_V, BLOCK_V] if DIAGONAL else [BLOCK_H, BLOCK_V], tl.float32)
        for start in range(0, Hv, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = load_rows(x_at, valid, v, KV, Hv, BLOCK_C)
            d_out = load_columns(d_out_at, valid, v, N, Hv, BLOCK_C)
            d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
            d_pairs = tl.dot(x, d_out, d_pairs, input_precision=PRECISION)  # [s, t]: it need not be transposed
            d_write = tl.dot(x, tl.trans(d_state), d_write, input_precision=PRECISION)
            if da_ptr is not None:
                state = load_state(states_ptr, index, h, v, True, H, Hv)
                if DIAGONAL:  # loads for products overlap them, and loads for sums would not
                    passed = tl.dot(tl.trans(state), d_state, passed, input_precision=PRECISION)
                else:
                    passed += state.to(tl.float32) * d_state.to(tl.float32)
        at = (row.to(tl.int64) * N + n) * T + first + i
        written = tl.sum(k.to(tl.float32) * d_write, 1) * leaves
        if dw_ptr is not None:
            tl.store(dw_ptr + at, written, mask=here)
        if w_ptr is not None:
            w = per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)
            written, leaves = written * w, leaves * w
            d_pairs *= w[:, None]
        if da_ptr is not None:
            earlier = tl.sum(tl.where(i[:, None] > i[None, :], written[None, :], 0.0), 1)
            if DIAGONAL:
                passed = tl.where(u[:, None] == u[None, :], passed, 0.0)
            tl.store(da_ptr + at, earlier + whole * tl.sum(passed), mask=here)
        d_pairs *= pairs_from(a_ptr, a, run, BLOCK_C) * SCALE
        dk = dk + d_write * leaves[:, None] if KK < N else d_write * leaves[:, None]
        dk = tl.dot(d_pairs.to(q.dtype), q, dk, input_precision=PRECISION)
        if KK == N:
            store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
    if KK < N:
        store_rows(tokens_by_channels(dk_ptr, row, first, group, T, PROGRAMS, H), dk, here, h, PROGRAMS, H, BLOCK_C)
