"""Kernels of the gradients of a diagonal recurrence (`triton_diagonal.py`), chunk by chunk.

With g_t the gradient of the state after token t, g_t = C_t dout_t + exp(dt_{t+1} A) g_{t+1}: the same recurrence from the end.
So chunks are made independent as in the forward, of states and of gradients in one pass. Then a program walks over its chunk
once more, stores the state before every few tokens, and goes back through these from the last: the states of a few tokens and
one number of each channel lie in its registers, never those of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_diagonal import (
    LOG2E,
    NEXT,
    advance,
    chunk_at,
    halves,
    load_numbers,
    marks_at,
    offset,
    pair_at,
    pairs_at,
    rate_of,
    rates_of,
    store_numbers,
    tokens_at,
)


@triton.jit
def diagonal_sums_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    bc_ptr,
    codes_ptr,
    table_ptr,
    d_out_ptr,
    sums_ptr,  # [B, CHUNKS, H, F] float32: the state after each chunk, from 0
    d_sums_ptr,  # the gradient of the state before each chunk, of its own outputs
    steps_ptr,  # [B, CHUNKS, F] float32
    T: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, c = (part // CHUNKS).to(tl.int64), part % CHUNKS
    first, count, owner, begins, ends = chunk_at(table_ptr, row, c, T, CHUNKS, SIZE)
    inside, rates = cols < F, rates_of(a_ptr, cols, F, H)
    h, d, fades, steps = (), (), (), tl.zeros([BLOCK_F], tl.float32)
    for _ in tl.static_range(H):
        zero = tl.zeros([BLOCK_F], tl.float32)
        h, d, fades = h + (zero,), d + (zero,), fades + (zero + 1.0,)
    begin, last = row * T + first, tl.maximum(count - 1, 0)
    pairs = pairs_at(bc_ptr, begin, H)
    for start in range(0, count, TOKENS):
        token = begin + start
        at = offset(token, F) + cols
        xs, dts = tokens_at(x_ptr, dt_ptr, codes_ptr, token, at, count - start, inside, F, TOKENS)
        falls, valid = marks_at(codes_ptr, token, count - start, TOKENS)
        dys = ()
        for i in tl.static_range(TOKENS):
            dys = dys + (tl.load(d_out_ptr + at + i * F, mask=valid[i] & inside, other=0.0),)
        for i in tl.static_range(TOKENS):
            dt, dy = dts[i].to(tl.float32), dys[i].to(tl.float32)
            u = dt * xs[i].to(tl.float32)
            later_pairs = pairs_at(bc_ptr, begin + tl.minimum(start + i + 1, last), H)
            after, d_before, faded = (), (), ()
            for n in tl.static_range(H):
                b, c_n = halves(pairs[n])
                fade = tl.exp2(dt * rates[n] + falls[i])
                after = after + (fade * h[n] + u * b,)
                fade = fade * fades[n]
                d_before, faded = d_before + (d[n] + fade * (c_n * dy),), faded + (fade,)
            h, d, fades, steps, pairs = after, d_before, faded, steps + dt, later_pairs
    begin = offset(row * CHUNKS + c, H * F)
    store_numbers(sums_ptr, begin, h, cols, True, F, H, NEXT, F)
    store_numbers(d_sums_ptr, begin, d, cols, True, F, H, NEXT, F)
    tl.store(steps_ptr + offset(row * CHUNKS + c, F) + cols, steps, mask=inside)


@triton.jit
def of_number(bc_ptr, at, start, count, H: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the pairs of B and C of one number of TOKENS tokens, a tuple; of those past the chunk anything."""
    pairs = ()
    for i in tl.static_range(TOKENS):
        pairs = pairs + (pair_at(bc_ptr, at + tl.where(start + i < count, i, 0) * (2 * H)),)
    return pairs


@triton.jit
def diagonal_bwd_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    bc_ptr,
    skip_ptr,
    codes_ptr,
    table_ptr,
    starts_ptr,  # the state before each chunk, or None for 0
    d_out_ptr,
    d_ends_ptr,  # the gradient of the state after each chunk
    dx_ptr,
    d_dt_ptr,
    d_bc_ptr,  # [B, COLUMNS, H, 2, T] float32: of B and C, a partial sum over the channels of each program
    d_a_ptr,  # [B, CHUNKS, H, F] float32: a partial sum over the tokens of each chunk
    d_starts_ptr,  # [B, CHUNKS, H, F] float32
    inner_ptr,  # [B, CHUNKS, SIZE // TOKENS, H, F] float32: the states before every TOKENS tokens
    d_skip_ptr,  # [B, CHUNKS, F] float32, or None
    T: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    JOINED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    PARTS: tl.constexpr = SIZE // TOKENS
    part, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    cols = column * BLOCK_F + tl.arange(0, BLOCK_F)
    row, c = (part // CHUNKS).to(tl.int64), part % CHUNKS
    first, count, owner, begins, ends = chunk_at(table_ptr, row, c, T, CHUNKS, SIZE)
    inside, zero = cols < F, tl.zeros([BLOCK_F], tl.float32)
    skip, d_skip = zero, zero
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    chunk = row * CHUNKS + c
    carried = offset(chunk, H * F)
    if JOINED:
        h = load_numbers(starts_ptr, carried, cols, F, H, NEXT, F)
        d = load_numbers(d_ends_ptr, carried, cols, F, H, NEXT, F)
    else:
        entry = offset(row * G + owner, H * F)
        h = load_numbers(starts_ptr, entry, cols, F, H, H, NEXT)
        d = load_numbers(d_ends_ptr, entry, cols, F, H, H, NEXT)
    store_numbers(d_starts_ptr, carried, d, cols, True, F, H, NEXT, F)
    for number in range(H):
        tl.store(d_a_ptr + carried + number * F + cols, zero, mask=inside)
    rates = rates_of(a_ptr, cols, F, H)
    begin, last = row * T + first, tl.maximum(count - 1, 0)
    pairs = pairs_at(bc_ptr, begin, H)
    for start in range(0, count, TOKENS):
        store_numbers(inner_ptr, offset(chunk * PARTS + start // TOKENS, H * F), h, cols, True, F, H, NEXT, F)
        token = begin + start
        at = offset(token, F) + cols
        xs, dts = tokens_at(x_ptr, dt_ptr, codes_ptr, token, at, count - start, inside, F, TOKENS)
        falls, valid = marks_at(codes_ptr, token, count - start, TOKENS)
        for i in tl.static_range(TOKENS):
            later_pairs = pairs_at(bc_ptr, begin + tl.minimum(start + i + 1, last), H)
            dt = dts[i].to(tl.float32)
            h, unread = advance(h, dt, dt * xs[i].to(tl.float32), falls[i], rates, pairs, H)
            pairs = later_pairs
    lanes = tl.arange(0, 2 * TOKENS)
    parts = (count + TOKENS - 1) // TOKENS
    for k in range(parts):
        # What this program stored below and above, it reads here.
        tl.debug_barrier()
        start = (parts - 1 - k) * TOKENS
        token = begin + start
        at, bc_at = offset(token, F) + cols, offset(token, 2 * H)
        xs, dts = tokens_at(x_ptr, dt_ptr, codes_ptr, token, at, count - start, inside, F, TOKENS)
        falls, valid = marks_at(codes_ptr, token, count - start, TOKENS)
        steps, us, dys, d_us, d_dts = (), (), (), (), ()
        for i in tl.static_range(TOKENS):
            dt, x = dts[i].to(tl.float32), xs[i].to(tl.float32)
            dy = tl.load(d_out_ptr + at + i * F, mask=valid[i] & inside, other=0.0).to(tl.float32)
            d_skip += dy * x
            steps, us, dys = steps + (dt,), us + (dt * x,), dys + (dy,)
            d_us, d_dts = d_us + (zero,), d_dts + (zero,)
        states = inner_ptr + offset(chunk * PARTS + start // TOKENS, H * F) + cols
        sums_at = d_bc_ptr + offset((row * COLUMNS + column) * H, 2 * T) + first + start
        sums_at += lanes // TOKENS * T + lanes % TOKENS
        here, number_pairs = carried + cols, of_number(bc_ptr, bc_at, start, count, H, TOKENS)
        state = tl.load(states, mask=inside, other=0.0)
        g, d_a = tl.load(d_starts_ptr + here, mask=inside, other=0.0), tl.load(d_a_ptr + here, mask=inside, other=0.0)
        rate = rate_of(a_ptr, 0, cols, F, H)
        for number in range(H):
            # What the next number needs is loaded ahead.
            later = tl.minimum(number + 1, H - 1)
            later_pairs = of_number(bc_ptr, bc_at + later * 2, start, count, H, TOKENS)
            later_rate, there = rate_of(a_ptr, later, cols, F, H), here + (later - number) * F
            later_state = tl.load(states + later * F, mask=inside, other=0.0)
            later_g = tl.load(d_starts_ptr + there, mask=inside, other=0.0)
            later_d_a = tl.load(d_a_ptr + there, mask=inside, other=0.0)
            # The last token comes first in these: so they are read.
            sums, bs, cs, fades, kept = tl.zeros([2 * TOKENS], tl.float32), (), (), (), ()
            for i in tl.static_range(TOKENS):
                b, c_n = halves(number_pairs[i])
                fade = tl.exp2(steps[i] * (rate * LOG2E) + falls[i])
                before = fade * state
                state = before + us[i] * b
                sums = tl.where(lanes == TOKENS + i, tl.sum(dys[i] * state), sums)
                bs, cs, fades, kept = (b,) + bs, (c_n,) + cs, (fade,) + fades, (before,) + kept
            d_u, d_dt = (), ()
            for j in tl.static_range(TOKENS):
                g += cs[j] * dys[TOKENS - 1 - j]
                sums = tl.where(lanes == TOKENS - 1 - j, tl.sum(g * us[TOKENS - 1 - j]), sums)
                through = g * kept[j]
                d_u = (d_us[TOKENS - 1 - j] + g * bs[j],) + d_u
                d_dt = (d_dts[TOKENS - 1 - j] + through * rate,) + d_dt
                d_a += through * steps[TOKENS - 1 - j]
                g = g * fades[j]
            d_us, d_dts = d_u, d_dt
            tl.store(d_starts_ptr + here, g, mask=inside)
            tl.store(d_a_ptr + here, d_a, mask=inside)
            tl.store(sums_at + number * (2 * T), sums, mask=start + lanes % TOKENS < count)
            rate, state, g, d_a, number_pairs, here = later_rate, later_state, later_g, later_d_a, later_pairs, there
        for i in tl.static_range(TOKENS):
            there = inside & (start + i < count)
            # Read again: it was not needed meanwhile, and the registers were.
            x = tl.load(x_ptr + at + i * F, mask=valid[i] & inside, other=0.0).to(tl.float32)
            dx, d_dt_i = d_us[i] * steps[i] + skip * dys[i], d_us[i] * x + d_dts[i]
            if codes_ptr is not None:
                d_dt_i = tl.where(valid[i], d_dt_i, 0.0)
            tl.store(dx_ptr + at + i * F, dx.to(dx_ptr.dtype.element_ty), mask=there)
            tl.store(d_dt_ptr + at + i * F, d_dt_i.to(d_dt_ptr.dtype.element_ty), mask=there)
    if d_skip_ptr is not None:
        tl.store(d_skip_ptr + offset(chunk, F) + cols, d_skip, mask=inside)
