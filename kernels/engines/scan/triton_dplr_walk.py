"""Walks over the chunks of a recurrence of diagonal plus low rank, and gradients of what they read, in Triton.

See `triton_dplr.py`, whose kernel has what they need of each chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import (
    channels_whole,
    chunk_of,
    load_rows,
    load_state,
    square_at,
    store_rows,
    store_state,
    tokens_by_channels,
    tokens_of,
)


@triton.jit
def _of_chunk(
    local_ptr, beside_ptr, added_ptr, whole_ptr, row, n, c, first, here, h, v, of_values,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, Hv: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns what a step of `dplr_walk_kernel` adds: local, beside [C, v], added [h, v], 0 unless `of_values`; and a decay."""
    i = tl.arange(0, BLOCK_C)
    there = here & (i < tl.where(of_values, BLOCK_C, 0))
    local = load_rows(tokens_by_channels(local_ptr, row, first, n, T, N, Hv), there, v, N, Hv, BLOCK_C)
    beside = local
    if beside_ptr is not None:
        beside = load_rows(tokens_by_channels(beside_ptr, row, first, n, T, N, Hv), there, v, N, Hv, BLOCK_C)
    index = (row.to(tl.int64) * N + n) * CHUNKS + c
    added = load_state(added_ptr, index, h, v, of_values, H, Hv)
    return local, beside, added, channels_whole(whole_ptr, row, n, c, h, N, H, CHUNKS)


@triton.jit
def dplr_walk_kernel(
    keeps_ptr,  # [B, T, N, H]: what reads the state
    writes_ptr,  # [B, T, N, H]: what writes it
    local_ptr,  # [B, T, N, Hv]: what is written beside what is read
    added_ptr,  # [B, N, CHUNKS, H, Hv]: what is added to the state
    whole_ptr,  # [B, N, CHUNKS, H] float32: its decays
    reads_ptr,  # [B, T, N, H]: what outputs read; None, as the next, without out_ptr
    beside_ptr,  # [B, T, N, Hv]
    table_ptr,
    entries_ptr,  # [B, G, N, H, Hv]: states that sequences start from, or None for 0
    starts_ptr,  # [B, N, SPLITS, H, Hv]: states that parts start from; None for one part, or where their maps are wanted
    out_ptr,  # [B, T, N, Hv], or None
    written_ptr,  # [B, T, N, Hv]: what is written at each token, or None
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk, or None
    exits_ptr,  # [B, G, N, H, Hv]: after each sequence, or None
    parts_ptr,  # [B, N, SPLITS, H, PART]: after each part, from a state of 0, and past the COLUMNS from that of 1; or None
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,  # tiles of columns of a state: programs past them have no values
    PART: tl.constexpr,
    REVERSE: tl.constexpr,  # from the end of the rows to their beginning
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Walks the chunks of a part of a row and head with BLOCK_V columns of the state in registers."""
    PER: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    FIRST: tl.constexpr = tl.constexpr(SPLITS - 1 if REVERSE else 0)
    part, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row, n = head // N, head % N
    h, v = tl.arange(0, BLOCK_H), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end = part * PER, tl.minimum(CHUNKS, (part + 1) * PER)
    of_values = tl.program_id(1) < COLUMNS
    dtype = keeps_ptr.dtype.element_ty
    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    if parts_ptr is not None:
        state = tl.where(h[:, None] == (v - COLUMNS * BLOCK_V)[None, :], 1.0, state)
    if starts_ptr is not None:
        state = load_state(starts_ptr, head * SPLITS + part, h, v, True, H, Hv)
    if table_ptr is None and entries_ptr is not None:
        state += load_state(entries_ptr, head, h, v, part == tl.where(of_values, FIRST, -1), H, Hv)
    c = end - 1 if REVERSE else begin
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, _ = tokens_of(None, table_ptr, row, first, count, T, BLOCK_C)
    next_local, next_beside, next_added, next_whole = _of_chunk(
        local_ptr,
        beside_ptr,
        added_ptr,
        whole_ptr,
        row,
        n,
        c,
        first,
        here,
        h,
        v,
        of_values,
        T,
        N,
        H,
        Hv,
        CHUNKS,
        BLOCK_C,
    )
    for step in range(0, end - begin):
        c = end - 1 - step if REVERSE else begin + step
        first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
        here, _ = tokens_of(None, table_ptr, row, first, count, T, BLOCK_C)
        local, beside, added, whole = next_local, next_beside, next_added, next_whole
        # Those of the next chunk are loaded a step ahead: the compiler does so only with operands of products.
        next_c = tl.maximum(begin, c - 1) if REVERSE else tl.minimum(end - 1, c + 1)
        next_first, next_count, _, _, _ = chunk_of(table_ptr, row, next_c, T, CHUNKS, BLOCK_C)
        next_here, _ = tokens_of(None, table_ptr, row, next_first, next_count, T, BLOCK_C)
        next_local, next_beside, next_added, next_whole = _of_chunk(
            local_ptr, beside_ptr, added_ptr, whole_ptr, row, n, next_c, next_first, next_here, h, v, of_values,
            T, N, H, Hv, CHUNKS, BLOCK_C,
        )  # fmt: skip
        slot = (row.to(tl.int64) * G + owner) * N + n
        if table_ptr is not None:
            enters = ends if REVERSE else begins
            state = tl.where(enters, 0.0, state)
            if entries_ptr is not None:
                state += load_state(entries_ptr, slot, h, v, enters & of_values, H, Hv)
        if states_ptr is not None:
            store_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, state, True, H, Hv)
        keeps = load_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
        rounded = state.to(dtype)
        written = tl.dot(keeps, rounded, input_precision=PRECISION) + local.to(tl.float32)
        if written_ptr is not None:
            store_rows(tokens_by_channels(written_ptr, row, first, n, T, N, Hv), written, here, v, N, Hv, BLOCK_C)
        if out_ptr is not None:
            reads = load_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
            out = tl.dot(reads, rounded, input_precision=PRECISION) + beside.to(tl.float32)
            store_rows(tokens_by_channels(out_ptr, row, first, n, T, N, Hv), out, here, v, N, Hv, BLOCK_C)
        writes = load_rows(tokens_by_channels(writes_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
        state = state * whole + added.to(tl.float32)
        state = tl.dot(tl.trans(writes), written.to(dtype), state, input_precision=PRECISION)
        if table_ptr is not None and exits_ptr is not None:
            store_state(exits_ptr, slot, h, v, state, begins if REVERSE else ends, H, Hv)
    if table_ptr is None and exits_ptr is not None:
        store_state(exits_ptr, head, h, v, state, part == SPLITS - 1 - FIRST, H, Hv)
    if parts_ptr is not None:
        store_state(parts_ptr, head * SPLITS + part, h, v, state, True, H, PART)


@triton.jit
def dplr_written_kernel(
    v_ptr,  # [B, T, N, Hv]
    leaves_ptr,  # see `dplr_chunks_kernel`, as of the next three squares
    runs_ptr,
    table_ptr,
    solve_ptr,
    product_ptr,
    qk_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    written_ptr,  # [B, T, N, Hv]: u
    du_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: of the states after each chunk
    d_qk_ptr,  # [B, N, CHUNKS, C, C]: gradients of what out_t reads of k at s
    d_ab_ptr,  # [B, N, CHUNKS, C, C]: of what a_t reads of b at s
    d_ak_ptr,  # [B, N, CHUNKS, C, C]: of what a_t reads of k at s
    d_entering_ptr,  # [B, T, N, H]: of a, as it reads the state before the chunk
    d_leaves_ptr,  # [B, T, N, H]: of keys, as they write the state after it
    dv_ptr,  # [B, T, N, Hv]
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and head of what `channel_states_kernel` does not have, given u as what b writes; before decays.

    That of u before its product with the inverse is solveᵀ du, and with it come those of pairs that a reads: the inverse is not
    differentiated.
    """
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    h, index = tl.arange(0, BLOCK_H), head.to(tl.int64) * CHUNKS + c
    d_qk, d_ab = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    d_ak, d_entering = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    d_leaves = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    left = load_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C)
    solve = tl.load(tl.trans(square_at(solve_ptr, index, BLOCK_C)))
    product = tl.load(tl.trans(square_at(product_ptr, index, BLOCK_C)))
    weights = tl.load(tl.trans(square_at(qk_ptr, index, BLOCK_C)))
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(tokens_by_channels(v_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        d_out = load_rows(tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        u = load_rows(tokens_by_channels(written_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        du = load_rows(tokens_by_channels(du_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, index, h, v, True, H, Hv)
        d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
        y = tl.dot(solve, du, input_precision=PRECISION).to(du.dtype)
        d_qk = tl.dot(d_out, tl.trans(x), d_qk, input_precision=PRECISION)
        d_ab = tl.dot(y, tl.trans(u), d_ab, input_precision=PRECISION)
        d_ak = tl.dot(y, tl.trans(x), d_ak, input_precision=PRECISION)
        d_entering = tl.dot(y, tl.trans(state), d_entering, input_precision=PRECISION)
        d_leaves = tl.dot(x, tl.trans(d_state), d_leaves, input_precision=PRECISION)
        dv = tl.dot(left, d_state, input_precision=PRECISION)
        dv = tl.dot(weights, d_out, dv, input_precision=PRECISION)
        dv = tl.dot(product, du, dv, input_precision=PRECISION)
        store_rows(tokens_by_channels(dv_ptr, row, first, n, T, N, Hv), dv, here, v, N, Hv, BLOCK_C)
    tl.store(square_at(d_qk_ptr, index, BLOCK_C), d_qk.to(d_qk_ptr.dtype.element_ty))
    tl.store(square_at(d_ab_ptr, index, BLOCK_C), d_ab.to(d_ab_ptr.dtype.element_ty))
    tl.store(square_at(d_ak_ptr, index, BLOCK_C), d_ak.to(d_ak_ptr.dtype.element_ty))
    store_rows(tokens_by_channels(d_entering_ptr, row, first, n, T, N, H), d_entering, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(d_leaves_ptr, row, first, n, T, N, H), d_leaves, here, h, N, H, BLOCK_C)
