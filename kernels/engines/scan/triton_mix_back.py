"""Kernels of the gradients of RWKV-4's time mix (`triton_mix.py`), chunk by chunk.

The gradients of the two sums after a token are sums of the same kind from the end: what a later output passes back fades by
the decays between, and has its own exponent, minus that of the output's denominator. The gradient of the last exponent p, a
maximum, goes to its largest term, and half to each of two equal ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_diagonal import chunk_at, offset
from kernels.engines.scan.triton_mix import (
    EMPTY,
    FORGETS,
    GRADIENTS,
    SUMS,
    _add,
    _begin,
    _constants,
    _fade,
    _join,
    _load,
    _marks,
    _power,
    _put,
    _read,
    _tokens,
)


@triton.jit
def _share(k, fallen):
    """Returns which share of the gradient of the larger exponent goes to k."""
    return tl.where(k > fallen, 1.0, tl.where(k == fallen, 0.5, 0.0))


@triton.jit
def _passed(out, den, top, dy, counts, new):
    """Returns the gradient (da, db, m) of the sums before a token by its output: none where it begins a document."""
    r = dy / den
    return r, -r * out, tl.where(counts & (new == 0), -top, EMPTY)


@triton.jit
def mix_sums_kernel(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    codes_ptr,
    table_ptr,
    starts_ptr,  # [B, CHUNKS, 3, F]
    d_out_ptr,
    d_sums_ptr,  # [B, CHUNKS, 4, F]: (da, db, m) before a chunk by its outputs, and the share of d_p that passes it
    T: tl.constexpr,
    F: tl.constexpr,
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
    inside, zero = cols < F, tl.zeros([BLOCK_F], tl.float32)
    decay, u = _constants(w_ptr, u_ptr, cols, F)
    index = row * CHUNKS + c
    a, b, p = _begin(starts_ptr, index, cols, F, BLOCK_F)
    base, passed, faded = p, zero, zero
    d_a, d_b, m, share, forgets = zero, zero, zero + EMPTY, zero + 1.0, zero
    for start in range(0, count, TOKENS):
        token = row * T + first + start
        at = offset(token, F) + cols
        ks, vs = _tokens(k_ptr, v_ptr, codes_ptr, token, at, count - start, inside, F, TOKENS)
        valid, news = _marks(codes_ptr, token, count - start, TOKENS)
        dys = ()
        for i in tl.static_range(TOKENS):
            dys = dys + (tl.load(d_out_ptr + at + i * F, mask=valid[i] & inside, other=0.0),)
        for i in tl.static_range(TOKENS):
            k, v = ks[i].to(tl.float32), vs[i].to(tl.float32)
            out, own, den, top = _read(a, b, p, k, v, u, valid[i], news[i])
            r, s, q = _passed(out, den, top, dys[i].to(tl.float32), valid[i], news[i])
            d_a, d_b, m = _join(d_a, d_b, m, r, s, q + (forgets + faded * decay))
            base, passed, fallen = _fade(base, passed, decay, valid[i], news[i])
            share *= 1.0 - _share(k, fallen)
            forgets, faded = tl.where(news[i], FORGETS, forgets), tl.where(valid[i], faded + 1.0, faded)
            a, b, base, passed, p = _add(a, b, base, passed, fallen, v, 1.0, k)
    _put(d_sums_ptr, index, 0, d_a, cols, True, F, GRADIENTS)
    _put(d_sums_ptr, index, 1, d_b, cols, True, F, GRADIENTS)
    _put(d_sums_ptr, index, 2, m, cols, True, F, GRADIENTS)
    _put(d_sums_ptr, index, 3, share, cols, True, F, GRADIENTS)


@triton.jit
def mix_bwd_kernel(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    codes_ptr,
    table_ptr,
    starts_ptr,
    d_out_ptr,
    d_ends_ptr,  # [B, CHUNKS, 4, F] with JOINED, else d_final [B, G, 3, F]
    dk_ptr,
    dv_ptr,
    d_decay_ptr,  # [B, CHUNKS, F] float32: a partial sum over the tokens of each chunk
    d_bonus_ptr,  # [B, CHUNKS, F] float32
    d_starts_ptr,  # [B, CHUNKS, 3, F] float32: of the state (a, b, p) before each chunk
    inner_ptr,  # [B, CHUNKS, SIZE // TOKENS, 3, F] float32: the sums before every TOKENS tokens
    T: tl.constexpr,
    F: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    JOINED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    PARTS: tl.constexpr = SIZE // TOKENS
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, c = (part // CHUNKS).to(tl.int64), part % CHUNKS
    first, count, owner, begins, ends = chunk_at(table_ptr, row, c, T, CHUNKS, SIZE)
    inside, zero = cols < F, tl.zeros([BLOCK_F], tl.float32)
    decay, u = _constants(w_ptr, u_ptr, cols, F)
    index = row * CHUNKS + c
    first_a, first_b, first_p = _begin(starts_ptr, index if JOINED else row * G + owner, cols, F, BLOCK_F)
    a, b, p = first_a, first_b, first_p
    base, passed = p, zero
    token = row * T + first
    ks, vs = _tokens(k_ptr, v_ptr, codes_ptr, token, offset(token, F) + cols, count, inside, F, TOKENS)
    for start in range(0, count, TOKENS):
        inner = index * PARTS + start // TOKENS
        _put(inner_ptr, inner, 0, a, cols, True, F, SUMS)
        _put(inner_ptr, inner, 1, b, cols, True, F, SUMS)
        _put(inner_ptr, inner, 2, p, cols, True, F, SUMS)
        token, left = row * T + first + start, count - start
        at = offset(token, F) + cols
        later_ks, later_vs = _tokens(
            k_ptr, v_ptr, codes_ptr, token + TOKENS, at + TOKENS * F, left - TOKENS, inside, F, TOKENS
        )
        valid, news = _marks(codes_ptr, token, left, TOKENS)
        for i in tl.static_range(TOKENS):
            base, passed, p = _fade(base, passed, decay, valid[i], news[i])
            a, b, base, passed, p = _add(a, b, base, passed, p, vs[i].to(tl.float32), 1.0, ks[i].to(tl.float32))
        ks, vs = later_ks, later_vs
    if JOINED:
        d_a, d_b = _load(d_ends_ptr, index, 0, cols, F, GRADIENTS), _load(d_ends_ptr, index, 1, cols, F, GRADIENTS)
        m, d_p = _load(d_ends_ptr, index, 2, cols, F, GRADIENTS), _load(d_ends_ptr, index, 3, cols, F, GRADIENTS)
    else:
        state = row * G + owner
        d_a, d_b = _load(d_ends_ptr, state, 0, cols, F, SUMS), _load(d_ends_ptr, state, 1, cols, F, SUMS)
        m, d_p = -p, _load(d_ends_ptr, state, 2, cols, F, SUMS) - a * d_a - b * d_b
    d_decay, d_bonus, of_end, faded = zero, zero, m, zero
    parts = (count + TOKENS - 1) // TOKENS
    for j in range(parts):
        # What this program stored above, it reads here.
        tl.debug_barrier()
        start = (parts - 1 - j) * TOKENS
        inner = index * PARTS + start // TOKENS
        a, b, p = _begin(inner_ptr, inner, cols, F, BLOCK_F)
        token = row * T + first + start
        at = offset(token, F) + cols
        ks, vs = _tokens(k_ptr, v_ptr, codes_ptr, token, at, count - start, inside, F, TOKENS)
        valid, news = _marks(codes_ptr, token, count - start, TOKENS)
        base, passed = p, zero
        dys, sums, bases, tops = (), (), (), ()
        for i in tl.static_range(TOKENS):
            dys = dys + (tl.load(d_out_ptr + at + i * F, mask=valid[i] & inside, other=0.0),)
            sums, bases, tops = sums + (a,), bases + (b,), tops + (p,)
            base, passed, p = _fade(base, passed, decay, valid[i], news[i])
            a, b, base, passed, p = _add(a, b, base, passed, p, vs[i].to(tl.float32), 1.0, ks[i].to(tl.float32))
        for i in tl.static_range(TOKENS - 1, -1, -1):
            k, v, dy = ks[i].to(tl.float32), vs[i].to(tl.float32), dys[i].to(tl.float32)
            out, own, den, top = _read(sums[i], bases[i], tops[i], k, v, u, valid[i], news[i])
            r, s, q = _passed(out, den, top, dy, valid[i], news[i])
            fallen, weight = tl.where(news[i], EMPTY, tops[i] + tl.where(valid[i], decay, 0.0)), _power(k + m)
            mine = own * (r * (v - out))
            share = _share(k, fallen)
            dv = weight * d_a + own * r
            dk = weight * (d_a * v + d_b) + mine + d_p * share
            d_p *= 1.0 - share
            through = _power(fallen + m) * (d_a * sums[i] + d_b * bases[i]) + d_p
            d_decay += tl.where(valid[i] & (news[i] == 0), through, 0.0)
            d_bonus += tl.where(valid[i], mine, 0.0)
            of_end, faded, m = _fade(of_end, faded, decay, valid[i], news[i])
            d_a, d_b, of_end, faded, m = _add(d_a, d_b, of_end, faded, m, r, s, q)
            there = inside & (start + i < count)
            dk, dv = tl.where(valid[i], dk, 0.0), tl.where(valid[i], dv, 0.0)
            tl.store(dk_ptr + at + i * F, dk.to(dk_ptr.dtype.element_ty), mask=there)
            tl.store(dv_ptr + at + i * F, dv.to(dv_ptr.dtype.element_ty), mask=there)
    tl.store(d_decay_ptr + offset(index, F) + cols, d_decay, mask=inside)
    tl.store(d_bonus_ptr + offset(index, F) + cols, d_bonus, mask=inside)
    scale = _power(first_p + m)
    d_a, d_b = scale * d_a, scale * d_b
    _put(d_starts_ptr, index, 0, d_a, cols, True, F, SUMS)
    _put(d_starts_ptr, index, 1, d_b, cols, True, F, SUMS)
    _put(d_starts_ptr, index, 2, d_p + first_a * d_a + first_b * d_b, cols, True, F, SUMS)
