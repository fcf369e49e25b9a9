"""Gluon kernel for Hopper of the pairs of a delta rule's chunks with decays of channels: what outputs read of writes, and the
matrix whose inverse with ones on its diagonal the rule needs, in float32.

The steps are those of `gluon_channel_parts.factors`. A program takes the two halves of the channels of a chunk and head one
after another, and loads those of the next while it computes.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from kernels.engines.scan.gluon_channel_parts import (
    BY_COLUMN,
    BY_ROW,
    LEVELS,
    SQUARE,
    SUMS,
    clear_padding,
    factors,
    run_of,
    store_tile,
    wide,
)
from kernels.engines.scan.gluon_tiles import HALVES, WIDTH, C, product_of
from kernels.toolchains.gluon import SWIZZLED

# Tiles of 64 by 64: queries and keys of each half of the channels, and three operands.
QUERY, KEY, READER, TILES = (gl.constexpr(i) for i in (4, 5, 6, 7))


@gluon.jit
def _load(item, half: gl.constexpr, descs, buffers, N: gl.constexpr, KQ: gl.constexpr, KK: gl.constexpr):
    q_desc, k_desc, sums_desc = descs
    tiles, sums, full = buffers
    token, n = item // N * C, item % N
    arrived = full.index(half)
    mbarrier.expect(arrived, 2 * q_desc.nbytes_per_cta + sums_desc.nbytes_per_cta)
    tma.async_load(sums_desc, [token, n * WIDTH + half * C], arrived, sums.index(half))
    tma.async_load(q_desc, [token, n // (N // KQ) * WIDTH + half * C], arrived, tiles.index(2 * half))
    tma.async_load(k_desc, [token, n // (N // KK) * WIDTH + half * C], arrived, tiles.index(2 * half + 1))


@gluon.jit
def _of_level(t, s, number):
    """Returns the pairs [t, s] with t in the later half of 2 << number tokens and s in the other."""
    distance = t[:, None] ^ s[None, :]
    return (distance < (2 << number)) & (distance >= (1 << number)) & ((t & (1 << number)) > 0)[:, None]


@gluon.jit
def _seen(t, s, number, at_level):
    """Returns which pairs [t, s] a step has."""
    if number < at_level:
        seen = (t[:, None] > s[None, :]) & ((t[:, None] ^ s[None, :]) < (2 << number))
    elif number >= 3:  # eight columns are alike
        seen = _of_level(t, s & -8, number)
    else:
        seen = _of_level(t, s, number)
    return seen


@gluon.jit
def channel_pairs_hopper_kernel(
    q_desc,  # [B * T, KQ * 128] in blocks of 64 by 64, as all that follow
    k_desc,  # [B * T, KK * 128]
    sums_desc,  # [B * T, N * 128] float32
    sums_ptr,
    beta_ptr,  # [B, N, T]
    first_ptr,  # int32 [B, N, CHUNKS, 2]: see `triton_channel_steps.first_level`
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    pairs_ptr,  # [B, N, CHUNKS, 64, 64]
    a_ptr,  # [B, N, CHUNKS, 64, 64] float32: what is on the diagonal and above is 0
    B: gl.constexpr,
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALE: gl.constexpr,
):
    ITEMS: gl.constexpr = B * CHUNKS * N
    dtype: gl.constexpr = q_desc.dtype
    tiles = gl.allocate_shared_memory(dtype, [TILES, C, C], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [HALVES, C, C], SUMS)
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    descs, buffers = (q_desc, k_desc, sums_desc), (tiles, sums, full)
    for half in gl.static_range(HALVES):
        mbarrier.init(full.index(half), count=1)
    for half in gl.static_range(HALVES):
        _load(gl.program_id(0), half, descs, buffers, N, KQ, KK)
    t, s = gl.arange(0, C, BY_ROW), gl.arange(0, C, BY_COLUMN)
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    query, key, reader = tiles.index(QUERY), tiles.index(KEY), tiles.index(READER)
    phase = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        chunk, n = item // N, item % N
        token, index = chunk * C, (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS
        beta = gl.load(beta_ptr + index * C + t)
        weights, of_keys, own = zeros, zeros, gl.zeros([C], gl.float32, BY_ROW)
        for half in gl.static_range(HALVES):
            at_level = gl.load(first_ptr + index * 2 + half)
            mbarrier.wait(full.index(half), phase)
            if runs_ptr is not None:
                if gl.max(gl.where(gl.load(runs_ptr + token + t) < 0, 1, 0), axis=0) > 0:
                    clear_padding(tiles, 2 * half, runs_ptr + token)
            q, k = tiles.index(2 * half), tiles.index(2 * half + 1)
            # Pairs of a token with itself have no decay.
            own += gl.sum(wide(q) * wide(k), axis=1)
            for number in range(gl.maximum(at_level - 1, 0), LEVELS):
                reads, writes = factors(
                    sums.index(half), sums_ptr, token, n * WIDTH + half * C, number, at_level, N * WIDTH
                )
                keys = wide(k)
                key.store((keys * writes).to(dtype))
                reader.store((keys * reads).to(dtype))
                query.store((wide(q) * reads).to(dtype))
                fence_async_shared()
                more = product_of(query, key.permute((1, 0)), zeros, False)
                more_of_keys = product_of(reader, key.permute((1, 0)), zeros, False)
                seen = _seen(t, s, number, at_level)
                more, more_of_keys = warpgroup_mma_wait(0, (more, more_of_keys))
                # Pairs that a step does not have may overflow.
                weights += gl.where(seen, more, 0.0)
                of_keys += gl.where(seen, more_of_keys, 0.0)
            if item + gl.num_programs(0) < ITEMS:
                _load(item + gl.num_programs(0), half, descs, buffers, N, KQ, KK)
        phase ^= 1
        weights += gl.where(t[:, None] == s[None, :], own[:, None], 0.0)
        if runs_ptr is not None:
            same = run_of(runs_ptr + token + t)[:, None] == run_of(runs_ptr + token + s)[None, :]
            weights, of_keys = gl.where(same, weights, 0.0), gl.where(same, of_keys, 0.0)
        store_tile(pairs_ptr, weights * SCALE, query, index * C, 0, C)
        store_tile(a_ptr, of_keys * beta[:, None], query, index * C, 0, C)
