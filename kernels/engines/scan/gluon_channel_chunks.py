"""Gluon kernel for Hopper of all that a delta rule's chunks with decays of channels need before the walk: decays in queries and
keys, pairs, and the matrix whose inverse the rule needs. It is `channel_decays_kernel` and `gluon_channel_pairs.py` in one.

Every exponent is a sum of log decays over an interval of tokens: a product with a matrix of zeros and ones, or of halves for
what is referred to the middle of a block. Log decays in bfloat16 are taken at once, others in three parts, exact to 24 bits. So
no sum is loaded from where it lies, and none is a difference of two.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from kernels.engines.scan.gluon_channel_pairs import seen_pairs
from kernels.engines.scan.gluon_channel_parts import (
    LEVELS,
    LOG2E,
    SUMS,
    clear_padding,
    run_of,
    square_of,
    store_tile,
    wide,
)
from kernels.engines.scan.gluon_tiles import HALVES, WIDTH, C, again, product_of
from kernels.toolchains.gluon import SWIZZLED

# Tiles of 64 by 64: queries and keys of each half of the channels, and three operands.
QUERY, KEY, READER, TILES = (gl.constexpr(i) for i in (4, 5, 6, 7))


@gluon.jit
def _load(item, half: gl.constexpr, descs, buffers, N: gl.constexpr, KQ: gl.constexpr, KK: gl.constexpr):
    q_desc, k_desc, a_desc = descs
    tiles, decays, full = buffers
    token, n = item // N * C, item % N
    arrived = full.index(half)
    mbarrier.expect(arrived, 2 * q_desc.nbytes_per_cta + a_desc.nbytes_per_cta)
    tma.async_load(a_desc, [token, n * WIDTH + half * C], arrived, decays.index(half))
    tma.async_load(q_desc, [token, n // (N // KQ) * WIDTH + half * C], arrived, tiles.index(2 * half))
    tma.async_load(k_desc, [token, n // (N // KK) * WIDTH + half * C], arrived, tiles.index(2 * half + 1))


@gluon.jit
def _kept(tile, runs_ptr, t, FORGETS: gl.constexpr):
    """Returns log decays [tokens, channels] of a tile in float32, none below FORGETS, and 0 at padding."""
    a = wide(tile)
    a = gl.where(a < FORGETS, FORGETS, a)
    if runs_ptr is not None:
        a = gl.where((gl.load(runs_ptr + t) >= 0)[:, None], a, 0.0)
    return a


@gluon.jit
def _sums(of, parts, PARTS: gl.constexpr):
    """Returns the products of a matrix [t, u] with log decays [u, channels] that lie in parts."""
    sums = gl.zeros([C, C], gl.float32, square_of(gl.num_warps()))
    for i in gl.static_range(PARTS):
        sums = product_of(of.to(gl.bfloat16), parts.index(i), sums, i > 0)
    return warpgroup_mma_wait(0, (sums,))


@gluon.jit
def _level_of(total, t, u, parts, PARTS: gl.constexpr, REACH: gl.constexpr):
    """Returns the least level of a chunk, given sums over it: see `triton_channel_steps.first_level`."""
    found = 0
    if REACH > 0:
        if gl.min(total, axis=0) >= -REACH:
            found = LEVELS
        elif _least(t, u, parts, PARTS, 32) >= -REACH:
            found = 5
        elif _least(t, u, parts, PARTS, 16) >= -REACH:
            found = 4
    return found


@gluon.jit
def _least(t, u, parts, PARTS: gl.constexpr, size: gl.constexpr):
    """Returns the least sum over a block of `size` tokens of a channel."""
    return gl.min(
        gl.min(_sums(gl.where((again(t)[:, None] ^ u[None, :]) < size, 1.0, 0.0), parts, PARTS), axis=1), axis=0
    )


@gluon.jit
def _factors(t, u, number, at_level, parts, PARTS: gl.constexpr):
    """Returns what `gluon_channel_parts.factors` does."""
    t = again(t)
    distance, before = t[:, None] ^ u[None, :], t[:, None] >= u[None, :]
    if number < at_level:
        of = gl.where(distance < (2 << number), gl.where(before, 0.5, -0.5), 0.0)
        since = _sums(of, parts, PARTS) * LOG2E
        reads, writes = gl.exp2(since), gl.exp2(-since)
    else:
        late = (t & (1 << number)) > 0
        of = gl.where((distance < (1 << number)) & (before == late[:, None]), 1.0, 0.0)
        reads = gl.exp2(_sums(of, parts, PARTS) * LOG2E)
        writes = reads
    return reads, writes


@gluon.jit
def channel_chunks_hopper_kernel(
    q_desc,  # [B * T, KQ * 128] in blocks of 64 by 64, as all that follow
    k_desc,  # [B * T, KK * 128]
    a_desc,  # [B * T, N * 128] bfloat16 or float32: log decays
    beta_ptr,  # [B, N, T]
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    sums_ptr,  # as `triton_channels.channel_decays_kernel` writes them, as the next five; None where no gradient needs them
    reads_ptr,
    leaves_ptr,
    whole_ptr,
    first_ptr,
    keeps_ptr,
    pairs_ptr,  # [B, N, CHUNKS, 64, 64]; None, as the next, where a forward has kept them
    a_ptr,  # [B, N, CHUNKS, 64, 64] float32: what is on the diagonal and above is 0
    B: gl.constexpr,
    T: gl.constexpr,  # a multiple of 64
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALE: gl.constexpr,
    FORGETS: gl.constexpr,  # the least log decay
    REACH: gl.constexpr,  # the widest sum of log decays that is taken from its middle; 0: none is
):
    ROW: gl.constexpr = N * WIDTH
    ITEMS: gl.constexpr = B * CHUNKS * N
    SQUARE: gl.constexpr = square_of(gl.num_warps())
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    PARTS: gl.constexpr = 1 if a_desc.dtype == gl.bfloat16 else 3
    dtype: gl.constexpr = q_desc.dtype
    tiles = gl.allocate_shared_memory(dtype, [TILES, C, C], SWIZZLED)
    decays = gl.allocate_shared_memory(a_desc.dtype, [HALVES, C, C], SWIZZLED if PARTS == 1 else SUMS)
    parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, C, C], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    descs, buffers = (q_desc, k_desc, a_desc), (tiles, decays, full)
    for half in gl.static_range(HALVES):
        mbarrier.init(full.index(half), count=1)
    for half in gl.static_range(HALVES):
        _load(gl.program_id(0), half, descs, buffers, N, KQ, KK)
    t, s = gl.arange(0, C, BY_ROW), gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    row, u = gl.arange(0, C, gl.SliceLayout(1, LEFT)), gl.arange(0, C, gl.SliceLayout(0, LEFT))
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    query, key, reader = tiles.index(QUERY), tiles.index(KEY), tiles.index(READER)
    phase = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        chunk, n = item // N, item % N
        token, index = chunk * C, (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS
        beta = gl.load(beta_ptr + index * C + t)
        weights, of_keys, own = zeros, zeros, gl.zeros([C], gl.float32, BY_ROW)
        for half in gl.static_range(HALVES):
            mbarrier.wait(full.index(half), phase)
            q, k = tiles.index(2 * half), tiles.index(2 * half + 1)
            runs = runs_ptr
            if runs_ptr is not None:
                runs = runs_ptr + token
                if gl.max(gl.where(gl.load(runs + t) < 0, 1, 0), axis=0) > 0:
                    clear_padding(tiles, 2 * half, runs)
            a = _kept(decays.index(half), runs, t, FORGETS)
            for i in gl.static_range(PARTS):
                near = a
                if PARTS > 1:
                    near = (a.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
                parts.index(i).store(near.to(gl.bfloat16))
                a -= near
            fence_async_shared()
            column = n * WIDTH + half * C
            row, t = again(row), again(t)  # so that no matrix of zeros and ones is kept in registers
            since = _sums(gl.where(row[:, None] >= u[None, :], 1.0, 0.0), parts, PARTS)
            if sums_ptr is not None:
                store_tile(sums_ptr, since, query, token, column, ROW)
            total = gl.sum(gl.where(t[:, None] == C - 1, since, 0.0), axis=0)
            whole, reading = gl.exp2(total * LOG2E), gl.exp2(since * LOG2E)
            leaving = gl.exp2(_sums(gl.where(again(row)[:, None] < u[None, :], 1.0, 0.0), parts, PARTS) * LOG2E)
            if runs_ptr is not None:
                before = gl.where(token % T > 0, run_of(runs_ptr + gl.maximum(token - 1, 0)), 0)
                run, last = run_of(runs + t), run_of(runs + (C - 1))
                reading = gl.where((run == before)[:, None], reading, 0.0)
                leaving = gl.where((run == last)[:, None], leaving, 0.0)
                whole = gl.where(before == last, whole, 0.0)
            store_tile(reads_ptr, wide(q) * reading * SCALE, query, token, column, ROW)
            store_tile(keeps_ptr, wide(k) * reading, key, token, column, ROW)
            store_tile(leaves_ptr, wide(k) * leaving, reader, token, column, ROW)
            gl.store(whole_ptr + index * WIDTH + half * C + s, whole)
            at_level = _level_of(total, row, u, parts, PARTS, REACH)
            gl.store(first_ptr + index * 2 + half, at_level)
            if pairs_ptr is not None:
                # Pairs of a token with itself have no decay.
                own += gl.sum(wide(q) * wide(k), axis=1)
                for number in range(gl.maximum(at_level - 1, 0), LEVELS):
                    reads, writes = _factors(row, u, number, at_level, parts, PARTS)
                    keys = wide(k)
                    key.store((keys * writes).to(dtype))
                    reader.store((keys * reads).to(dtype))
                    query.store((wide(q) * reads).to(dtype))
                    fence_async_shared()
                    more = product_of(query, key.permute((1, 0)), zeros, False)
                    more_of_keys = product_of(reader, key.permute((1, 0)), zeros, False)
                    seen = seen_pairs(t, s, number, at_level)
                    more, more_of_keys = warpgroup_mma_wait(0, (more, more_of_keys))
                    # Pairs that a step does not have may overflow.
                    weights += gl.where(seen, more, 0.0)
                    of_keys += gl.where(seen, more_of_keys, 0.0)
            if item + gl.num_programs(0) < ITEMS:
                _load(item + gl.num_programs(0), half, descs, buffers, N, KQ, KK)
        phase ^= 1
        if pairs_ptr is not None:
            weights += gl.where(t[:, None] == s[None, :], own[:, None], 0.0)
            if runs_ptr is not None:
                same = run_of(runs_ptr + token + t)[:, None] == run_of(runs_ptr + token + s)[None, :]
                weights, of_keys = gl.where(same, weights, 0.0), gl.where(same, of_keys, 0.0)
            store_tile(pairs_ptr, weights * SCALE, query, index * C, 0, C)
            store_tile(a_ptr, of_keys * beta[:, None], query, index * C, 0, C)
