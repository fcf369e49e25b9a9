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
    pairs,
    per_token,
    runs_of,
    square_at,
    store_fades,
    store_rows,
    store_state,
    tokens_by_channels,
)


@triton.jit
def scan_join_kernel(
    added_ptr,  # [B * N, SPLITS, SIZE]
    fade_ptr,  # [B * N, SPLITS]
    starts_ptr,  # [B * N, SPLITS, SIZE]
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Composes the maps of the parts of a row to the state before each; from the last part on if REVERSE."""
    head = tl.program_id(0).to(tl.int64) * SPLITS
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    for step in range(SPLITS):
        part = SPLITS - 1 - step if REVERSE else step
        tl.store(starts_ptr + (head + part) * SIZE + i, state, mask=i < SIZE)
        added = tl.load(added_ptr + (head + part) * SIZE + i, mask=i < SIZE, other=0.0)
        state = tl.load(fade_ptr + head + part) * state + added


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
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
    k = load_columns(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
    weights = tl.dot(q, k, input_precision=PRECISION) * SCALE
    weights *= pairs(a_ptr, row, n, first, here, run, T, N, BLOCK_C)
    if w_ptr is not None:
        weights *= per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)[None, :]
    tl.store(square_at(pairs_ptr, tl.program_id(0), BLOCK_C), weights.to(pairs_ptr.dtype.element_ty))
    fading = fades(a_ptr, row, n, first, count, here, run, before, last, T, N, BLOCK_C)
    store_fades(enters_ptr, leaves_ptr, whole_ptr, fading, row, n, c, first, here, T, N, CHUNKS, BLOCK_C)


@triton.jit
def scalar_walk_kernel(
    r_ptr,  # [B, T, KR, H], what reads the state: queries, or keys if REVERSE; None with out_ptr
    k_ptr,  # [B, T, KK, H], what writes it: keys, or queries
    x_ptr,  # [B, T, KX, Hv], what is written: values, or cotangents of the outputs
    pairs_ptr,  # [B, N, CHUNKS, C, C]; None with out_ptr
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
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
    fade_ptr,  # [B, N, SPLITS]
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
    state, passing = tl.zeros([BLOCK_H, BLOCK_V], tl.float32), 1.0
    if starts_ptr is not None:
        state = load_state(starts_ptr, head * SPLITS + part, h, v, True, H, Hv)
    if table_ptr is None and entries_ptr is not None:
        state += load_state(entries_ptr, head, h, v, part == opening, H, Hv)
    for step in range(0, end - begin):
        c = end - 1 - step if REVERSE else begin + step
        first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
        here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
        enters, leaves, whole = load_fades(
            enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, T, N, CHUNKS, BLOCK_C
        )
        enters *= SCALE
        if w_ptr is not None:
            leaves *= per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)
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
            out = tl.dot(r, state.to(r.dtype), input_precision=PRECISION) * reading[:, None]
            out = tl.dot(weights, x, out, input_precision=PRECISION)
            if skip_ptr is not None:
                out += tl.load(skip_ptr + n) * x.to(tl.float32)
            store_rows(tokens_by_channels(out_ptr, row, first, n, T, N, Hv), out, here, v, N, Hv, BLOCK_C)
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
            tl.store(fade_ptr + head * SPLITS + part, passing)


@triton.jit
def scalar_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,  # [B, T, KV, Hv]
    a_ptr,
    w_ptr,
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: gradients of the states after each chunk
    dq_ptr,  # [B, T, N or N / HEADS, H]: summed over the heads of a program if they share queries
    dk_ptr,  # the same
    da_ptr,  # [B, N, T], or None
    dw_ptr,  # [B, N, T], or None
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
    """Gradients of the queries, keys and decays of one chunk and HEADS heads."""
    PROGRAMS: tl.constexpr = N // HEADS
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, group = rest // PROGRAMS, rest % PROGRAMS
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    dq, dk = tl.zeros([BLOCK_C, BLOCK_H], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for j in tl.range(0, HEADS, num_stages=1):
        n = group * HEADS + j
        if KQ == N:
            dq = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        if KK == N:
            dk = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        enters, leaves, whole = fades(a_ptr, row, n, first, count, here, run, before, last, T, N, BLOCK_C)
        decay = pairs(a_ptr, row, n, first, here, run, T, N, BLOCK_C) * SCALE
        w = tl.full([BLOCK_C], 1.0, tl.float32)
        if w_ptr is not None:
            w = per_token(w_ptr, row, n, first, here, T, N, BLOCK_C)
        state_index = (row.to(tl.int64) * N + n) * CHUNKS + c
        x_at = tokens_by_channels(v_ptr, row, first, n // (N // KV), T, KV, Hv)
        d_out_at = tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv)
        q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H), valid, h, KQ, H, BLOCK_C)
        k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H), valid, h, KK, H, BLOCK_C)
        at = (row.to(tl.int64) * N + n) * T + first + i

        # Of the queries. Transposed products are computed as such: no accumulator is transposed for another product.
        d_pairs, d_read = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        for start in range(0, Hv, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = load_columns(x_at, valid, v, KV, Hv, BLOCK_C)
            d_out = load_rows(d_out_at, valid, v, N, Hv, BLOCK_C)
            state = load_state(states_ptr, state_index, h, v, True, H, Hv)
            d_pairs = tl.dot(d_out, x, d_pairs, input_precision=PRECISION)
            d_read = tl.dot(d_out, tl.trans(state), d_read, input_precision=PRECISION)
        if dskip_ptr is not None:
            tl.store(dskip_ptr + state_index, tl.sum(tl.where(i[:, None] == i[None, :], d_pairs, 0.0)))
        d_pairs *= decay
        between = tl.dot(q, tl.trans(k), input_precision=PRECISION) * d_pairs
        reading = tl.sum(q.to(tl.float32) * d_read, 1) * enters * SCALE
        dq += d_read * (enters * SCALE)[:, None]
        dq = tl.dot((d_pairs * w[None, :]).to(k.dtype), k, dq, input_precision=PRECISION)
        if KQ == N:
            store_rows(tokens_by_channels(dq_ptr, row, first, n, T, N, H), dq, here, h, N, H, BLOCK_C)

        # Of the keys.
        turned, written = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        passed = tl.zeros([BLOCK_H], tl.float32)
        for start in range(0, Hv, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = load_rows(x_at, valid, v, KV, Hv, BLOCK_C)
            d_out = load_columns(d_out_at, valid, v, N, Hv, BLOCK_C)
            d_state = load_state(d_states_ptr, state_index, h, v, True, H, Hv)
            turned = tl.dot(x, d_out, turned, input_precision=PRECISION)
            written = tl.dot(x, tl.trans(d_state), written, input_precision=PRECISION)
            if da_ptr is not None:
                state = load_state(states_ptr, state_index, h, v, True, H, Hv)
                passed += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        writing = tl.sum(k.to(tl.float32) * written, 1) * leaves
        turned = turned * tl.trans(decay) * w[:, None]
        dk = tl.dot(turned.to(q.dtype), q, dk + written * (leaves * w)[:, None], input_precision=PRECISION)
        if KK == N:
            store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
        if da_ptr is not None:
            da = interval_gradient(between * w[None, :], reading, writing * w, BLOCK_C) + whole * tl.sum(passed, 0)
            tl.store(da_ptr + at, da, mask=here)
        if dw_ptr is not None:
            tl.store(dw_ptr + at, tl.sum(between, 0) + writing, mask=here)
    if KQ < N:
        store_rows(tokens_by_channels(dq_ptr, row, first, group, T, PROGRAMS, H), dq, here, h, PROGRAMS, H, BLOCK_C)
    if KK < N:
        store_rows(tokens_by_channels(dk_ptr, row, first, group, T, PROGRAMS, H), dk, here, h, PROGRAMS, H, BLOCK_C)
