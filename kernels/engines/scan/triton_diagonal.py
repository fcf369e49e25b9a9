"""Kernels of a diagonal recurrence with H numbers per channel, h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, out_t = C_t^T h_t.

A thread has whole channels: their H numbers lie in its registers, so a sum over them needs no other thread. A program has one
chunk of a row and walks over its tokens; B_t and C_t are numbers that all of its threads share. Three passes make chunks
independent of each other: the states that chunks would leave if they began from 0 (out_ptr is None), the states with which they
begin (`diagonal_join_kernel`), and the outputs. A row that is one chunk needs the last alone.

An exponential is one operation of few that a multiprocessor can start at once, and there is one for every number of a state and
token: it is what bounds these kernels. Decays are computed where they are used and never lie in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEXT = tl.constexpr(1)  # a stride
FORGETS = tl.constexpr(-1e30)  # 2 to this power is 0, and times 0 it is 0, where -inf would be NaN


@triton.jit
def chunk_at(table_ptr, row, c, T: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """Returns (first token, tokens, state, whether a sequence begins here, whether it ends here) of chunk c of a row."""
    first, count, owner, begins, ends = c * SIZE, tl.minimum(SIZE, T - c * SIZE), 0, c == 0, c == CHUNKS - 1
    if table_ptr is not None:
        entry = table_ptr + (row * CHUNKS + c) * 4
        first, count, owner = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        begins, ends = tl.load(entry + 3) % 2 == 1, tl.load(entry + 3) >= 2
    return first, count, owner, begins, ends


@triton.jit
def offset(index, F: tl.constexpr):
    """Returns where the channels of a token (or state) begin, in 64 bits."""
    return index.to(tl.int64) * F


@triton.jit
def code_of(codes_ptr, token, inside):
    """Returns (whether a token counts, whether it begins a document), which the codes 0, 1 and, of padding, -1 say."""
    counts, begins = inside, False
    if codes_ptr is not None:
        code = tl.load(codes_ptr + token, mask=inside, other=-1)
        counts, begins = code >= 0, code > 0
    return counts, begins


@triton.jit
def rate_of(a_ptr, n, cols, F: tl.constexpr, H: tl.constexpr):
    """Returns A of number n of each channel; finite, so that a step of 0 keeps a state whatever A is."""
    a = tl.load(a_ptr + cols * H + n, mask=cols < F, other=0.0).to(tl.float32)
    return tl.maximum(a, FORGETS)


@triton.jit
def pair_at(bc_ptr, at):
    """Returns B and C of one number of a token: neighbours, which one load of 64 bits brings and `halves` parts."""
    return tl.load((bc_ptr + at).to(tl.pointer_type(tl.int64)))


@triton.jit
def halves(pair):
    """Returns (B, C): registers of their own already."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def pairs_at(bc_ptr, token, H: tl.constexpr):
    """Returns the pairs of all H numbers of a token, a tuple."""
    pairs, at = (), offset(token, 2 * H)
    for n in tl.static_range(H):
        pairs = pairs + (pair_at(bc_ptr, at + n * 2),)
    return pairs


@triton.jit
def load_numbers(ptr, begin, cols, F: tl.constexpr, H: tl.constexpr, OF_F: tl.constexpr, OF_H: tl.constexpr):
    """Returns the H numbers of each channel of a state, a tuple; zeros for None."""
    state = ()
    for n in tl.static_range(H):
        if ptr is None:
            state = state + (tl.zeros([cols.shape[0]], tl.float32),)
        else:
            state = state + (tl.load(ptr + begin + cols * OF_F + n * OF_H, mask=cols < F, other=0.0),)
    return state


@triton.jit
def store_numbers(
    ptr, begin, state, cols, wanted, F: tl.constexpr, H: tl.constexpr, OF_F: tl.constexpr, OF_H: tl.constexpr
):
    for n in tl.static_range(H):
        tl.store(ptr + begin + cols * OF_F + n * OF_H, state[n], mask=wanted & (cols < F))


@triton.jit
def rates_of(a_ptr, cols, F: tl.constexpr, H: tl.constexpr):
    """Returns A of all H numbers of each channel, a tuple, for powers of 2."""
    rates = ()
    for n in tl.static_range(H):
        rates = rates + (rate_of(a_ptr, n, cols, F, H) * LOG2E,)
    return rates


@triton.jit
def tokens_at(x_ptr, dt_ptr, codes_ptr, token, at, left, inside, F: tl.constexpr, TOKENS: tl.constexpr):
    """Returns x and dt of the next tokens, of which `left` are the chunk's, tuples in their own dtypes: 0 where one does not
    count."""
    xs, dts = (), ()
    for i in tl.static_range(TOKENS):
        counts, new = code_of(codes_ptr, token + i, i < left)
        xs = xs + (tl.load(x_ptr + at + i * F, mask=counts & inside, other=0.0),)
        dts = dts + (tl.load(dt_ptr + at + i * F, mask=counts & inside, other=0.0),)
    return xs, dts


@triton.jit
def marks_at(codes_ptr, token, left, TOKENS: tl.constexpr):
    """Returns what is added to the exponents of the next tokens, and whether they count, tuples."""
    falls, valid = (), ()
    for i in tl.static_range(TOKENS):
        counts, new = code_of(codes_ptr, token + i, i < left)
        falls, valid = falls + (tl.where(new, FORGETS, 0.0),), valid + (counts,)
    return falls, valid


@triton.jit
def advance(h, dt, u, fall, rates, pairs, H: tl.constexpr):
    """Returns (the state after a token, the sum of its numbers times C)."""
    out, after = tl.zeros([dt.shape[0]], tl.float32), ()
    for n in tl.static_range(H):
        b, c = halves(pairs[n])
        state = tl.exp2(dt * rates[n] + fall) * h[n] + u * b
        out += c * state
        after = after + (state,)
    return after, out


@triton.jit
def diagonal_fwd_kernel(
    x_ptr,  # [B, T, F]
    dt_ptr,  # [B, T, F]
    a_ptr,  # [F, H]
    bc_ptr,  # [B, T, H, 2] float32
    skip_ptr,  # [F], or None
    codes_ptr,  # int32 [B, T], or None
    table_ptr,  # int32 [B, CHUNKS, 4], or None
    starts_ptr,  # the state before each chunk, or None for 0
    out_ptr,  # [B, T, F], or None
    finals_ptr,  # [B, G, F, H] float32, or None
    sums_ptr,  # [B, CHUNKS, H, F] float32, the state after each chunk, or None
    steps_ptr,  # [B, CHUNKS, F] float32, the sum of the steps of each chunk, or None
    T: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    WALKED: tl.constexpr,  # chunks of a row that have a program
    JOINED: tl.constexpr,  # whether starts are [B, CHUNKS, H, F], else [B, G, F, H]
    TOKENS: tl.constexpr,  # loaded at once
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, c = (part // WALKED).to(tl.int64), part % WALKED
    first, count, owner, begins, ends = chunk_at(table_ptr, row, c, T, CHUNKS, SIZE)
    inside = cols < F
    if JOINED:
        h = load_numbers(starts_ptr, offset(row * CHUNKS + c, H * F), cols, F, H, NEXT, F)
    else:
        h = load_numbers(starts_ptr, offset(row * G + owner, H * F), cols, F, H, H, NEXT)
    rates = rates_of(a_ptr, cols, F, H)
    skip, steps = tl.zeros([BLOCK_F], tl.float32), tl.zeros([BLOCK_F], tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    # Everything is loaded ahead of its use: x and dt by TOKENS tokens, and B and C, which come from afar too, by one.
    begin, last = row * T + first, tl.maximum(count - 1, 0)
    pairs = pairs_at(bc_ptr, begin, H)
    xs, dts = tokens_at(x_ptr, dt_ptr, codes_ptr, begin, offset(begin, F) + cols, count, inside, F, TOKENS)
    for start in range(0, count, TOKENS):
        token, left = begin + start, count - start
        at = offset(token, F) + cols
        later_xs, later_dts = tokens_at(
            x_ptr, dt_ptr, codes_ptr, token + TOKENS, at + TOKENS * F, left - TOKENS, inside, F, TOKENS
        )
        falls, valid = marks_at(codes_ptr, token, left, TOKENS)
        for i in tl.static_range(TOKENS):
            later_pairs = pairs_at(bc_ptr, begin + tl.minimum(start + i + 1, last), H)
            x, dt = xs[i].to(tl.float32), dts[i].to(tl.float32)
            h, out = advance(h, dt, dt * x, falls[i], rates, pairs, H)
            out, steps, pairs = out + skip * x, steps + dt, later_pairs
            if out_ptr is not None:
                if codes_ptr is not None:
                    out = tl.where(valid[i], out, 0.0)
                tl.store(out_ptr + at + i * F, out.to(out_ptr.dtype.element_ty), mask=inside & (start + i < count))
        xs, dts = later_xs, later_dts
    if finals_ptr is not None:
        store_numbers(finals_ptr, offset(row * G + owner, H * F), h, cols, ends, F, H, H, NEXT)
    if sums_ptr is not None:
        store_numbers(sums_ptr, offset(row * CHUNKS + c, H * F), h, cols, True, F, H, NEXT, F)
        tl.store(steps_ptr + offset(row * CHUNKS + c, F) + cols, steps, mask=inside)


@triton.jit
def diagonal_join_kernel(
    a_ptr,  # [F, H]
    sums_ptr,  # [B, CHUNKS, H, F] float32: what a chunk passes on if nothing enters it
    steps_ptr,  # [B, CHUNKS, F] float32
    resets_ptr,  # bool [B, CHUNKS]: whether a document begins in a chunk, or None
    table_ptr,
    entries_ptr,  # [B, G, F, H] float32, or None for 0
    starts_ptr,  # [B, CHUNKS, H, F] float32: what enters each chunk
    F: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    REVERSE: tl.constexpr,  # from the last chunk to the first
    AHEAD: tl.constexpr,  # chunks that are loaded at once
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    n, row = tl.program_id(0) // COLUMNS % H, (tl.program_id(0) // COLUMNS // H).to(tl.int64)
    inside = cols < F
    rate = rate_of(a_ptr, n, cols, F, H) * LOG2E
    h = tl.zeros([BLOCK_F], tl.float32)
    if table_ptr is None and entries_ptr is not None:
        h = tl.load(entries_ptr + offset(row * G, H * F) + cols * H + n, mask=inside, other=0.0)
    for start in range(0, CHUNKS, AHEAD):
        sums, fades, begun, begins = (), (), (), ()
        for i in tl.static_range(AHEAD):
            k = start + i
            c = CHUNKS - 1 - k if REVERSE else k
            there = inside & (k < CHUNKS)
            # Nothing needs what leaves the last chunk, and nothing may have been stored there.
            passes = inside & (k < CHUNKS - 1)
            sums = sums + (tl.load(sums_ptr + offset((row * CHUNKS + c) * H + n, F) + cols, mask=passes, other=0.0),)
            fade = rate * tl.load(steps_ptr + offset(row * CHUNKS + c, F) + cols, mask=passes, other=0.0)
            if resets_ptr is not None:
                new = tl.load(resets_ptr + row * CHUNKS + c, mask=k < CHUNKS, other=0) != 0
                fade = tl.where(new, FORGETS, fade)
            fades = fades + (tl.exp2(fade),)
            if table_ptr is not None:
                entry = table_ptr + (row * CHUNKS + c) * 4
                owner, flags = (
                    tl.load(entry + 2, mask=k < CHUNKS, other=0),
                    tl.load(entry + 3, mask=k < CHUNKS, other=0),
                )
                new = flags >= 2 if REVERSE else flags % 2 == 1
                begins = begins + (new,)
                enters = tl.zeros([BLOCK_F], tl.float32)
                if entries_ptr is not None:
                    at = offset(row * G + owner, H * F) + cols * H + n
                    enters = tl.load(entries_ptr + at, mask=there & new, other=0.0)
                begun = begun + (enters,)
        for i in tl.static_range(AHEAD):
            k = start + i
            c = CHUNKS - 1 - k if REVERSE else k
            if table_ptr is not None:
                h = tl.where(begins[i], begun[i], h)
            tl.store(starts_ptr + offset((row * CHUNKS + c) * H + n, F) + cols, h, mask=inside & (k < CHUNKS))
            h = fades[i] * h + sums[i]
