"""Kernels of RWKV-4's time mix: two sums of weights e^k that fade by e^decay per token, both divided by their largest weight.

The state of a channel is (a, b, p), for sums e^p a and e^p b, and of a gradient (da, db, m), for e^m da and e^m db: whatever
exponents are, only powers of differences are taken, none of them positive. Rows are cut into chunks, joined and walked as those
of `triton_diagonal.py`. What does not count has the exponent -inf and lets nothing fade; before a document FORGETS fades all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_diagonal import LOG2E, chunk_at, code_of, offset

FORGETS = tl.constexpr(-1e30)  # a decay that leaves nothing; the sum over a row is finite
SUMS, GRADIENTS = tl.constexpr(3), tl.constexpr(4)  # parts of what a chunk passes on
EMPTY = tl.constexpr(-1e38)  # the exponent of an empty sum


@triton.jit
def _power(x):
    """Returns e^x. What is too small for a float32 is 0, which `tl.exp` takes three operations more to tell from the least."""
    return tl.exp2(x * LOG2E)


@triton.jit
def _weights(first, second):
    """Returns (e^(first - top), e^(second - top), top), where top is the larger one."""
    less = _power(-tl.abs(first - second))
    return tl.where(first >= second, 1.0, less), tl.where(first >= second, less, 1.0), tl.maximum(first, second)


@triton.jit
def _join(a, b, p, c, d, q):
    """Returns the sums (a, b, p) plus (c, d, q)."""
    first, second, top = _weights(p, q)
    return first * a + second * c, first * b + second * d, top


@triton.jit
def _fade(base, count, decay, counts, new):
    """Returns (base, count, their exponent) once a token has passed: those of an empty sum where it begins a document.

    An exponent is kept as base + count · decay. Added up token by token, a slow decay rounds once a token: 459 of them put
    gradients off by 3e-6.
    """
    base, count = tl.where(new, EMPTY, base), tl.where(counts, count + 1.0, count)
    return base, count, base + count * decay


@triton.jit
def _add(a, b, base, count, p, c, d, q):
    """Returns (a, b, base, count, p) of the sums (a, b, p), whose exponent is kept as base and count, plus (c, d, q)."""
    kept = p >= q
    a, b, p = _join(a, b, p, c, d, q)
    return a, b, tl.where(kept, base, q), tl.where(kept, count, 0.0), p


@triton.jit
def _load(ptr, index, part, cols, F: tl.constexpr, PARTS: tl.constexpr):
    """Returns one of PARTS parts of a state; it must be given."""
    return tl.load(ptr + offset(index * PARTS + part, F) + cols, mask=cols < F, other=0.0)


@triton.jit
def _put(ptr, index, part, x, cols, wanted, F: tl.constexpr, PARTS: tl.constexpr):
    tl.store(ptr + offset(index * PARTS + part, F) + cols, x, mask=wanted & (cols < F))


@triton.jit
def _begin(ptr, index, cols, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns the sums of a state; empty ones for None."""
    if ptr is None:
        zero = tl.zeros([BLOCK_F], tl.float32)
        a, b, p = zero, zero, zero + EMPTY
    else:
        a, b, p = (
            _load(ptr, index, 0, cols, F, SUMS),
            _load(ptr, index, 1, cols, F, SUMS),
            _load(ptr, index, 2, cols, F, SUMS),
        )
    return a, b, p


@triton.jit
def _constants(w_ptr, u_ptr, cols, F: tl.constexpr):
    """Returns the decay of a token, finite, and the bonus of its own."""
    w = tl.load(w_ptr + cols, mask=cols < F, other=0.0).to(tl.float32)
    return tl.maximum(-tl.exp(w), FORGETS), tl.load(u_ptr + cols, mask=cols < F, other=0.0).to(tl.float32)


@triton.jit
def _tokens(k_ptr, v_ptr, codes_ptr, token, at, left, inside, F: tl.constexpr, TOKENS: tl.constexpr):
    """Returns k and v of the next tokens, tuples in their own dtype."""
    ks, vs = (), ()
    for i in tl.static_range(TOKENS):
        counts, new = code_of(codes_ptr, token + i, i < left)
        ks = ks + (tl.load(k_ptr + at + i * F, mask=counts & inside, other=float("-inf")),)
        vs = vs + (tl.load(v_ptr + at + i * F, mask=counts & inside, other=0.0),)
    return ks, vs


@triton.jit
def _marks(codes_ptr, token, left, TOKENS: tl.constexpr):
    """Returns whether each of the next tokens counts, and whether it begins a document, tuples."""
    valid, begins = (), ()
    for i in tl.static_range(TOKENS):
        counts, new = code_of(codes_ptr, token + i, i < left)
        valid, begins = valid + (counts,), begins + (new,)
    return valid, begins


@triton.jit
def _read(a, b, p, k, v, u, counts, new):
    """Returns (out, the weight of the token itself, the denominator, its exponent) of a token, given the sums before it."""
    before, own, top = _weights(tl.where(new, EMPTY, p), u + k)
    den = tl.where(counts, before * b + own, 1.0)
    out = tl.where(counts, (before * a + own * v) / den, 0.0)
    return out, own, den, top


@triton.jit
def mix_fwd_kernel(
    w_ptr,  # [F]
    u_ptr,  # [F]
    k_ptr,  # [B, T, F]
    v_ptr,  # [B, T, F]
    codes_ptr,  # int32 [B, T], or None
    table_ptr,  # int32 [B, CHUNKS, 4], or None
    starts_ptr,  # the sums before each chunk, or None: empty
    out_ptr,  # [B, T, F], or None
    finals_ptr,  # [B, G, 3, F] float32, or None
    sums_ptr,  # [B, CHUNKS, 3, F] float32, the sums after each chunk, or None
    T: tl.constexpr,
    F: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    JOINED: tl.constexpr,  # whether starts are [B, CHUNKS, 3, F], else [B, G, 3, F]
    TOKENS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, c = (part // CHUNKS).to(tl.int64), part % CHUNKS
    first, count, owner, begins, ends = chunk_at(table_ptr, row, c, T, CHUNKS, SIZE)
    inside = cols < F
    decay, u = _constants(w_ptr, u_ptr, cols, F)
    a, b, p = _begin(starts_ptr, row * CHUNKS + c if JOINED else row * G + owner, cols, F, BLOCK_F)
    base, passed = p, tl.zeros([BLOCK_F], tl.float32)
    token = row * T + first
    ks, vs = _tokens(k_ptr, v_ptr, codes_ptr, token, offset(token, F) + cols, count, inside, F, TOKENS)
    for start in range(0, count, TOKENS):
        token, left = row * T + first + start, count - start
        at = offset(token, F) + cols
        # Loaded ahead: what follows needs all of the tokens before.
        later_ks, later_vs = _tokens(
            k_ptr, v_ptr, codes_ptr, token + TOKENS, at + TOKENS * F, left - TOKENS, inside, F, TOKENS
        )
        valid, news = _marks(codes_ptr, token, left, TOKENS)
        for i in tl.static_range(TOKENS):
            k, v = ks[i].to(tl.float32), vs[i].to(tl.float32)
            if out_ptr is not None:
                out, own, den, top = _read(a, b, p, k, v, u, valid[i], news[i])
                tl.store(out_ptr + at + i * F, out.to(out_ptr.dtype.element_ty), mask=inside & (start + i < count))
            base, passed, p = _fade(base, passed, decay, valid[i], news[i])
            a, b, base, passed, p = _add(a, b, base, passed, p, v, 1.0, k)
        ks, vs = later_ks, later_vs
    if finals_ptr is not None:
        _put(finals_ptr, row * G + owner, 0, a, cols, ends, F, SUMS)
        _put(finals_ptr, row * G + owner, 1, b, cols, ends, F, SUMS)
        _put(finals_ptr, row * G + owner, 2, p, cols, ends, F, SUMS)
    if sums_ptr is not None:
        _put(sums_ptr, row * CHUNKS + c, 0, a, cols, True, F, SUMS)
        _put(sums_ptr, row * CHUNKS + c, 1, b, cols, True, F, SUMS)
        _put(sums_ptr, row * CHUNKS + c, 2, p, cols, True, F, SUMS)


@triton.jit
def mix_join_kernel(
    w_ptr,
    sums_ptr,  # [B, CHUNKS, PARTS, F] float32: what a chunk passes on if nothing enters it; in reverse, PARTS = 4
    lengths_ptr,  # float32 [B, CHUNKS]: how many tokens fade what passes a chunk; -1: a document begins in it
    table_ptr,
    entries_ptr,  # [B, G, PARTS, F] float32, or None: empty
    starts_ptr,  # [B, CHUNKS, PARTS, F] float32: what enters each chunk
    finals_ptr,  # [B, G, PARTS, F] float32: what leaves the last chunk of each sequence
    F: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Joins chunks from the first to the last; with the 4 parts of gradients, from the last to the first. The fourth is what
    reaches the exponent p: of a chunk, the share of it that passes."""
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    REVERSE: tl.constexpr = PARTS == 4
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, inside = (tl.program_id(0) // COLUMNS).to(tl.int64), cols < F
    decay = tl.maximum(-tl.exp(tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)), FORGETS)
    zero = tl.zeros([BLOCK_F], tl.float32)
    a, b, p, r = zero, zero, zero + EMPTY, zero
    for start in range(0, CHUNKS, AHEAD):
        sums = ()
        for i in tl.static_range(AHEAD):
            k = start + i
            c = CHUNKS - 1 - k if REVERSE else k
            at, there = sums_ptr + offset((row * CHUNKS + c) * PARTS, F) + cols, inside & (k < CHUNKS)
            rest = zero
            if REVERSE:
                rest = tl.load(at + 3 * F, mask=there, other=0.0)
            sums = sums + (tl.load(at, mask=there, other=0.0),)
            sums = sums + (tl.load(at + F, mask=there, other=0.0), tl.load(at + 2 * F, mask=there, other=EMPTY), rest)
        for i in tl.static_range(AHEAD):
            k = start + i
            c = CHUNKS - 1 - k if REVERSE else k
            there = k < CHUNKS
            owner, begins, ends = 0, c == 0, c == CHUNKS - 1
            if table_ptr is not None:
                entry = table_ptr + (row * CHUNKS + c) * 4
                owner, flags = tl.load(entry + 2, mask=there, other=0), tl.load(entry + 3, mask=there, other=0)
                begins, ends = flags % 2 == 1, flags >= 2
            if REVERSE:
                begins, ends = ends, begins
            state, enters = row * G + owner, there & begins
            e_a, e_b, e_p, e_r = zero, zero, zero + EMPTY, zero
            if entries_ptr is not None:
                at = entries_ptr + offset(state * PARTS, F) + cols
                e_a = tl.load(at, mask=enters & inside, other=0.0)
                e_b = tl.load(at + F, mask=enters & inside, other=0.0)
                e_p = tl.load(at + 2 * F, mask=enters & inside, other=0.0)
                if REVERSE:
                    e_r = tl.load(at + 3 * F, mask=enters & inside, other=0.0)
            a, b = tl.where(enters, e_a, a), tl.where(enters, e_b, b)
            p, r = tl.where(enters, e_p, p), tl.where(enters, e_r, r)
            index = row * CHUNKS + c
            _put(starts_ptr, index, 0, a, cols, there, F, PARTS)
            _put(starts_ptr, index, 1, b, cols, there, F, PARTS)
            _put(starts_ptr, index, 2, p, cols, there, F, PARTS)
            length = tl.load(lengths_ptr + index, mask=there, other=0.0)
            fall = tl.where(length < 0, FORGETS, tl.maximum(decay * length, FORGETS))
            if REVERSE:
                _put(starts_ptr, index, 3, r, cols, there, F, PARTS)
                r = r * sums[4 * i + 3]
            a, b, p = _join(a, b, p + fall, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2])
            leaves = there & ends
            _put(finals_ptr, state, 0, a, cols, leaves, F, PARTS)
            _put(finals_ptr, state, 1, b, cols, leaves, F, PARTS)
            _put(finals_ptr, state, 2, p, cols, leaves, F, PARTS)
            if REVERSE:
                _put(finals_ptr, state, 3, r, cols, leaves, F, PARTS)
