"""Triton kernels of the gated delta rule, whose state decays by one factor per head and token:

    S' = exp(a_t) S_{t-1},  S_t = S' + beta_t k_t (v_t - S'ᵀ k_t)ᵀ,  out_t = scale · S_tᵀ q_t

In a chunk, what is written at token t is u = solve · (beta (v - enters · k S)), with S the state before the chunk and solve
the inverse of I + A, A[t, s] = beta_t (k_t · k_s) (decay from s to t) for s < t. The inverses and the weights of pairs are
computed for all chunks at once; then a program walks the chunks of one row and head with the state in its registers. The
backward walks from the end with the gradient of the state. What is left is parallel over chunks: given what is written, the
recurrence is that of `triton_scalar.py` with u as values, whose gradients those kernels have; and what is written depends
on keys, values, beta and decays, whose gradients are here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_inverse import inverse
from kernels.engines.scan.triton_parts import (
    channels_whole,
    chunk_of,
    fades,
    interval_gradient,
    load_columns,
    load_fades,
    load_rows,
    load_state,
    load_walk_fades,
    pairs,
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
def delta_pairs_kernel(
    q_ptr,  # [B, T, K, H]
    k_ptr,  # [B, T, K, H]
    beta_ptr,  # [B, N, T]
    a_ptr,  # [B, N, T] log decays, or None
    runs_ptr,
    table_ptr,
    pairs_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of the write at s
    solve_ptr,  # [B, N, CHUNKS, C, C]: the inverse
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
    scratch_ptr,  # [B, N, CHUNKS, C, 16] float32
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
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
    k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
    q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
    decay = pairs(a_ptr, per_token(a_ptr, row, n, first, here, T, N, BLOCK_C), run, BLOCK_C)
    weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * SCALE
    tl.store(square_at(pairs_ptr, tl.program_id(0), BLOCK_C), weights.to(pairs_ptr.dtype.element_ty))
    beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
    A = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_C * 16)
    solve = inverse(A, scratch, BLOCK_C)
    tl.store(square_at(solve_ptr, tl.program_id(0), BLOCK_C), solve.to(solve_ptr.dtype.element_ty))
    fading = fades(a_ptr, row, n, first, count, here, run, before, last, T, N, BLOCK_C)
    store_fades(enters_ptr, leaves_ptr, whole_ptr, fading, row, n, c, first, here, T, N, CHUNKS, BLOCK_C)


@triton.jit
def delta_walk_kernel(
    q_ptr,  # None with out_ptr
    k_ptr,
    k_writes_ptr,  # keys as they write the state, if decays of channels are in both and in q; None if they are k
    v_ptr,  # [B, T, N, Hv]
    pairs_ptr,  # None with out_ptr
    solve_ptr,
    beta_ptr,
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns; None with k_writes_ptr
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32, or [B, N, CHUNKS, H]
    runs_ptr,
    table_ptr,
    entries_ptr,  # [B, G, N, H, Hv]: states that sequences start from, or None for 0
    starts_ptr,  # [B, N, SPLITS, H, Hv]: states that parts start from; None for one part, or where their maps are wanted
    out_ptr,  # [B, T, N, Hv], or None
    written_ptr,  # [B, T, N, Hv]: what is written at each token, or None
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk, or None
    exits_ptr,  # [B, G, N, H, Hv]: after each sequence, or None
    maps_ptr,  # [B, N, SPLITS, H, COLUMNS * BLOCK_V + H]: after each part, from a state of 0 and from that of 1, or None
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,  # tiles of columns of a state; with maps_ptr, programs past them have no values
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    PER: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    part, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row, n = head // N, head % N
    h, v = tl.arange(0, BLOCK_H), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    i, begin, end = tl.arange(0, BLOCK_C), part * PER, tl.minimum(CHUNKS, (part + 1) * PER)
    of_values = tl.program_id(1) < COLUMNS
    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    if maps_ptr is not None:
        state = tl.where(h[:, None] == (v - COLUMNS * BLOCK_V)[None, :], 1.0, state)
    if starts_ptr is not None:
        state = load_state(starts_ptr, head * SPLITS + part, h, v, True, H, Hv)
    if table_ptr is None and entries_ptr is not None:
        state += load_state(entries_ptr, head, h, v, part == tl.where(of_values, 0, -1), H, Hv)
    next_whole = channels_whole(whole_ptr, row, n, begin, h, N, H, CHUNKS) if k_writes_ptr is not None else 1.0
    for step in range(0, end - begin):
        c = begin + step
        first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
        here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
        if k_writes_ptr is None:
            enters, leaves, whole = load_fades(
                enters_ptr, leaves_ptr, whole_ptr, row, n, c, first, here, T, N, CHUNKS, BLOCK_C
            )
        else:  # loaded a step ahead: the compiler does so only with operands of products
            enters, leaves, whole = tl.full([BLOCK_C], 1.0, tl.float32), tl.full([BLOCK_C], 1.0, tl.float32), next_whole
            next_whole = channels_whole(whole_ptr, row, n, tl.minimum(c + 1, end - 1), h, N, H, CHUNKS)
        beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
        slot = (row.to(tl.int64) * G + owner) * N + n
        if table_ptr is not None:
            state = tl.where(begins, 0.0, state)
            if entries_ptr is not None:
                state += load_state(entries_ptr, slot, h, v, begins & of_values, H, Hv)
        if states_ptr is not None:
            store_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, state, True, H, Hv)
        k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
        with_values = valid
        if maps_ptr is not None:
            with_values = valid & (i < tl.where(of_values, BLOCK_C, 0))
        x = load_rows(tokens_by_channels(v_ptr, row, first, n, T, N, Hv), with_values, v, N, Hv, BLOCK_C)
        solve = tl.load(square_at(solve_ptr, head * CHUNKS + c, BLOCK_C))
        old = tl.dot(k, state.to(k.dtype), input_precision=PRECISION)
        if k_writes_ptr is None:
            old *= enters[:, None]
        x = (x.to(tl.float32) - old) * beta[:, None]
        written = tl.dot(solve, x.to(k.dtype), input_precision=PRECISION)
        if written_ptr is not None:
            store_rows(tokens_by_channels(written_ptr, row, first, n, T, N, Hv), written, here, v, N, Hv, BLOCK_C)
        if out_ptr is not None:
            q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
            weights = tl.load(square_at(pairs_ptr, head * CHUNKS + c, BLOCK_C))
            out = tl.dot(q, state.to(q.dtype), input_precision=PRECISION)
            if k_writes_ptr is None:
                out *= (enters * SCALE)[:, None]
            out = tl.dot(weights, written.to(k.dtype), out, input_precision=PRECISION)
            store_rows(tokens_by_channels(out_ptr, row, first, n, T, N, Hv), out, here, v, N, Hv, BLOCK_C)
        if k_writes_ptr is None:
            written *= leaves[:, None]
        else:
            k = load_rows(tokens_by_channels(k_writes_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C)
        written = written.to(k.dtype)
        state = tl.dot(tl.trans(k), written, state * whole, input_precision=PRECISION)
        if table_ptr is not None and exits_ptr is not None:
            store_state(exits_ptr, slot, h, v, state, ends, H, Hv)
    if table_ptr is None and exits_ptr is not None:
        store_state(exits_ptr, head, h, v, state, part == SPLITS - 1, H, Hv)
    if maps_ptr is not None:
        store_state(maps_ptr, head * SPLITS + part, h, v, state, True, H, COLUMNS * BLOCK_V + H)


@triton.jit
def delta_reverse_kernel(
    q_ptr,
    k_ptr,
    k_writes_ptr,  # see `delta_walk_kernel`
    pairs_ptr,
    solve_ptr,
    beta_ptr,
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns; None with k_writes_ptr
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32, or [B, N, CHUNKS, H]
    runs_ptr,
    table_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    d_exits_ptr,  # [B, G, N, H, Hv]
    starts_ptr,  # [B, N, SPLITS, H, Hv]: gradients of the states after each part; None for one part, or with added_ptr
    du_ptr,  # [B, T, N, Hv]: gradient of beta (v - what the state has for k); None with added_ptr
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: of the states after each chunk; None with added_ptr
    d_entries_ptr,  # [B, G, N, H, Hv]; None with added_ptr
    added_ptr,  # [B, N, SPLITS, H, Hv]: of the state before each part, from 0 after it, or None
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Walks the gradient of the state from the end of the rows to their beginning."""
    PER: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    part, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row, n = head // N, head % N
    h, v = tl.arange(0, BLOCK_H), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end = part * PER, tl.minimum(CHUNKS, (part + 1) * PER)
    d_state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    if starts_ptr is not None:
        d_state = load_state(starts_ptr, head * SPLITS + part, h, v, True, H, Hv)
    if table_ptr is None:
        d_state += load_state(d_exits_ptr, head, h, v, part == SPLITS - 1, H, Hv)
    first, count, owner, begins, ends = chunk_of(table_ptr, row, end - 1, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    next_enters, next_leaves, next_whole = load_walk_fades(
        enters_ptr, leaves_ptr, whole_ptr, row, n, end - 1, first, here, h, T, N, H, CHUNKS, BLOCK_C
    )
    next_beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
    for step in range(0, end - begin):
        c = end - 1 - step
        first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
        here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
        enters, leaves, whole, beta = next_enters, next_leaves, next_whole, next_beta
        # Those of the next chunk are loaded a step ahead: the compiler does so only with operands of products.
        next_c = tl.maximum(begin, c - 1)
        next_first, next_count, _, _, _ = chunk_of(table_ptr, row, next_c, T, CHUNKS, BLOCK_C)
        next_here, _ = tokens_of(None, table_ptr, row, next_first, next_count, T, BLOCK_C)
        next_enters, next_leaves, next_whole = load_walk_fades(
            enters_ptr, leaves_ptr, whole_ptr, row, n, next_c, next_first, next_here, h, T, N, H, CHUNKS, BLOCK_C
        )
        next_beta = per_token(beta_ptr, row, n, next_first, next_here, T, N, BLOCK_C)
        slot = (row.to(tl.int64) * G + owner) * N + n
        if table_ptr is not None:
            d_state += load_state(d_exits_ptr, slot, h, v, ends, H, Hv)
        if d_states_ptr is not None:
            store_state(d_states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, d_state, True, H, Hv)
        k = load_rows(tokens_by_channels(k_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
        q = load_rows(tokens_by_channels(q_ptr, row, first, n // (N // K), T, K, H), valid, h, K, H, BLOCK_C)
        d_out = load_rows(tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        weights = tl.load(tl.trans(square_at(pairs_ptr, head * CHUNKS + c, BLOCK_C)))
        solve = tl.load(tl.trans(square_at(solve_ptr, head * CHUNKS + c, BLOCK_C)))
        if k_writes_ptr is None:
            d_written = tl.dot(k, d_state.to(k.dtype), input_precision=PRECISION) * leaves[:, None]
        else:
            w = load_rows(tokens_by_channels(k_writes_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C)
            d_written = tl.dot(w, d_state.to(k.dtype), input_precision=PRECISION)
        d_written = tl.dot(weights, d_out, d_written, input_precision=PRECISION)
        du = tl.dot(solve, d_written.to(k.dtype), input_precision=PRECISION)
        if du_ptr is not None:
            store_rows(tokens_by_channels(du_ptr, row, first, n, T, N, Hv), du, here, v, N, Hv, BLOCK_C)
        du *= -beta[:, None]
        if k_writes_ptr is None:
            d_out = (d_out.to(tl.float32) * (enters * SCALE)[:, None]).to(k.dtype)
            du *= enters[:, None]
        d_state = tl.dot(tl.trans(q), d_out, d_state * whole, input_precision=PRECISION)
        d_state = tl.dot(tl.trans(k), du.to(k.dtype), d_state, input_precision=PRECISION)
        if table_ptr is not None:
            if d_entries_ptr is not None:
                store_state(d_entries_ptr, slot, h, v, d_state, begins, H, Hv)
            d_state = tl.where(begins, 0.0, d_state)
    if table_ptr is None and d_entries_ptr is not None:
        store_state(d_entries_ptr, head, h, v, d_state, part == 0, H, Hv)
    if added_ptr is not None:
        store_state(added_ptr, head * SPLITS + part, h, v, d_state, True, H, Hv)


@triton.jit
def delta_bwd_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    a_ptr,
    enters_ptr,
    runs_ptr,
    table_ptr,
    written_ptr,  # [B, T, N, Hv]
    du_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    read_ptr,  # [B, T, N / HEADS, H] float32: gradients of keys by what outputs read, to which those of writes are added
    dk_ptr,  # [B, T, N / HEADS, H]
    dv_ptr,  # [B, T, N, Hv]
    dbeta_ptr,  # [B, N, T]
    da_ptr,  # [B, N, T], or None
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,  # consecutive heads of a program, of one group
    DIAGONAL: tl.constexpr,  # whether sums of products of du and v are the diagonal of a matrix product
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and HEADS heads through what is written: through beta (v - enters · k S), and through A.

    The gradient of A is -du · writtenᵀ, without its inverse.
    """
    PROGRAMS: tl.constexpr = N // HEADS
    c, rest = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, group = rest // PROGRAMS, rest % PROGRAMS
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    k = load_rows(tokens_by_channels(k_ptr, row, first, group // (PROGRAMS // K), T, K, H), valid, h, K, H, BLOCK_C)
    dk = load_rows(tokens_by_channels(read_ptr, row, first, group, T, PROGRAMS, H), here, h, PROGRAMS, H, BLOCK_C)
    for j in tl.range(0, HEADS, flatten=True):  # see `scalar_dq_kernel`
        n = group * HEADS + j
        enters = per_token(enters_ptr, row, n, first, here, T, N, BLOCK_C)
        a = per_token(a_ptr, row, n, first, here, T, N, BLOCK_C)
        beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
        v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
        dv_at = tokens_by_channels(dv_ptr, row, first, n, T, N, Hv)
        written_at = tokens_by_channels(written_ptr, row, first, n, T, N, Hv)
        du_at = tokens_by_channels(du_ptr, row, first, n, T, N, Hv)
        square, wide = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        of_values = tl.zeros([BLOCK_C, BLOCK_C] if DIAGONAL else [BLOCK_C, BLOCK_V], tl.float32)
        head = row.to(tl.int64) * N + n
        for start in range(0, Hv, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            du = load_rows(du_at, valid, v, N, Hv, BLOCK_C)
            written = load_rows(written_at, valid, v, N, Hv, BLOCK_C)
            state = load_state(states_ptr, head * CHUNKS + c, h, v, True, H, Hv)
            square = tl.dot(du, tl.trans(written), square, input_precision=PRECISION)
            wide = tl.dot(du, tl.trans(state), wide, input_precision=PRECISION)
            if DIAGONAL:  # loads for products overlap them, and loads for sums would not
                x = load_columns(v_at, valid, v, N, Hv, BLOCK_C)
                of_values = tl.dot(du, x, of_values, input_precision=PRECISION)
            else:
                of_values += du.to(tl.float32) * load_rows(v_at, valid, v, N, Hv, BLOCK_C).to(tl.float32)
            store_rows(dv_at, du.to(tl.float32) * beta[:, None], here, v, N, Hv, BLOCK_C)
        if DIAGONAL:
            of_values = tl.where(i[:, None] == i[None, :], of_values, 0.0)
        square *= tl.where(i[:, None] > i[None, :], pairs(a_ptr, a, run, BLOCK_C), 0.0)
        through = tl.dot(k, tl.trans(k), input_precision=PRECISION) * square
        old = tl.sum(k.to(tl.float32) * wide, 1) * enters
        at = head * T + first + i
        tl.store(dbeta_ptr + at, tl.sum(of_values, 1) - old - tl.sum(through, 1), mask=here)
        if da_ptr is not None:
            da = interval_gradient(through * -beta[:, None], old * -beta, BLOCK_C)
            tl.store(da_ptr + at, da, mask=here)
        square *= -beta[:, None]
        dk += wide * (-beta * enters)[:, None]
        dk = tl.dot((square + tl.trans(square)).to(k.dtype), k, dk, input_precision=PRECISION)
    store_rows(tokens_by_channels(dk_ptr, row, first, group, T, PROGRAMS, H), dk, here, h, PROGRAMS, H, BLOCK_C)
