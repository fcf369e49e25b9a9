"""Gluon kernel for Hopper of what decays do to the gradients of a delta rule's chunks with decays of channels.

It takes the steps of `triton_channel_steps.py`, whatever the decays: blocks if they are narrow enough, then levels. Both kinds
are one loop here: a token is referred to a sum of log decays, the middle of a block's or that before the later half of a
level's, and reads and writes by the exponentials of what is between. A program takes 64 channels of a chunk and head at a time,
and loads the next while it computes; two programs share a multiprocessor.

The gradients of a rate need no matrix of pairs: with `through` the product of the gradients of A and keys, they are sums of
reading keys times `through`. Sums over tokens to the end are products with a matrix of ones, exact to 24 bits.
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
    LOG2E,
    SQUARE,
    SUMS,
    WARPS,
    clear_padding,
    factors,
    run_of,
    store_tile,
    wide,
)
from kernels.engines.scan.gluon_tiles import WIDTH, C, again, product_of
from kernels.toolchains.gluon import SWIZZLED

LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
# Tiles of 64 by 64: four of tokens and pairs, three of gradients, and five of operands.
Q, K, PAIRS, SOLVED, OF_TOKENS = (gl.constexpr(i) for i in (0, 1, 2, 3, 4))
READS, LEAVES, KEEPS, LOADED = (gl.constexpr(i) for i in (4, 5, 6, 7))
QUERY, KEY, READER, SEEN, SEEN_SOLVED, TILES = (gl.constexpr(i) for i in (7, 8, 9, 10, 11, 12))
# Pairs as words of two columns, of which a mask keeps both or the first.
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
OF_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0]))
FIRST = gl.constexpr(0xFFFF)


@gluon.jit
def _place(item, N: gl.constexpr, CHUNKS: gl.constexpr):
    """Returns (half of the channels, head, first token of all rows, index of a chunk of a head) of an item."""
    chunk, n = item // 2 // N, item // 2 % N
    return item % 2, n, chunk * C, (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS


@gluon.jit
def _load_gradients(item, descs, buffers, N: gl.constexpr, CHUNKS: gl.constexpr):
    """Loads the gradients of products with states, and announces all that an item needs."""
    half, n, token, index = _place(item, N, CHUNKS)
    tiles, sums, full = buffers
    mbarrier.expect(full, LOADED * descs[0].nbytes_per_cta + descs[7].nbytes_per_cta)
    for i in gl.static_range(3):
        tma.async_load(descs[OF_TOKENS + i], [token, n * WIDTH + half * C], full, tiles.index(OF_TOKENS + i))


@gluon.jit
def _load_tokens(item, descs, buffers, N: gl.constexpr, KQ: gl.constexpr, KK: gl.constexpr, CHUNKS: gl.constexpr):
    half, n, token, index = _place(item, N, CHUNKS)
    tiles, sums, full = buffers
    tma.async_load(descs[7], [token, n * WIDTH + half * C], full, sums)
    tma.async_load(descs[Q], [token, n // (N // KQ) * WIDTH + half * C], full, tiles.index(Q))
    tma.async_load(descs[K], [token, n // (N // KK) * WIDTH + half * C], full, tiles.index(K))
    tma.async_load(descs[PAIRS], [index * C, 0], full, tiles.index(PAIRS))
    tma.async_load(descs[SOLVED], [index * C, 0], full, tiles.index(SOLVED))


@gluon.jit
def _wide(tiles, tile: gl.constexpr):
    return wide(tiles.index(tile))


@gluon.jit
def _of_level(rows, columns, number):
    """Returns the pairs [t, s] with t in the later half of 2 << number tokens and s in the other, as words of two columns."""
    distance = rows[:, None] ^ columns[None, :]
    wanted = (distance < (2 << number)) & (distance >= (1 << number)) & ((rows & (1 << number)) > 0)[:, None]
    return gl.where(wanted, gl.where(number > 0, -1, FIRST), 0)


@gluon.jit
def _of_blocks(rows, columns, most):
    """Returns the pairs [t, s] of one block with t > s, as words of two columns."""
    later = gl.where(rows[:, None] > columns[None, :] + 1, -1, gl.where(rows[:, None] > columns[None, :], FIRST, 0))
    return gl.where((rows[:, None] ^ columns[None, :]) < most, later, 0)


@gluon.jit
def _masked(words, tile: gl.constexpr, to: gl.constexpr, wanted):
    """Copies the pairs of a tile that are wanted to another, and 0 for the others."""
    words.index(to).store(words.index(tile).load(OF_WORDS) & wanted)


@gluon.jit
def _through_pairs(tiles, words, sums, sums_ptr, token, column, at_level, t, rows, columns, rate, dq, dk, of_sums, d_beta,
                  STRIDE: gl.constexpr):  # fmt: skip
    """Adds what passes through pairs of the chunk to the gradients of queries, keys, sums of log decays, and rates."""
    dtype: gl.constexpr = tiles.dtype
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    for number in range(gl.maximum(at_level - 1, 0), LEVELS):
        reads, writes = factors(sums, sums_ptr, token, column, number, at_level, STRIDE)
        if number < at_level:
            wanted = _of_blocks(rows, columns, 2 << number)
            _masked(words, PAIRS, SEEN, wanted)
            _masked(words, SOLVED, SEEN_SOLVED, wanted)
        elif number >= 3:  # the eight columns of a thread are alike
            wanted = _of_level(rows, columns & -8, number)
            _masked(words, PAIRS, SEEN, wanted)
            _masked(words, SOLVED, SEEN_SOLVED, wanted)
        else:
            wanted = _of_level(rows, columns, number)
            _masked(words, PAIRS, SEEN, wanted)
            _masked(words, SOLVED, SEEN_SOLVED, wanted)
        k = _wide(tiles, K)
        tiles.index(KEY).store((k * writes).to(dtype))
        tiles.index(QUERY).store((_wide(tiles, Q) * reads).to(dtype))
        tiles.index(READER).store((k * reads * rate[:, None]).to(dtype))
        fence_async_shared()
        seen, seen_solved, key = tiles.index(SEEN), tiles.index(SEEN_SOLVED), tiles.index(KEY)
        # Both factors of a pair are rounded alike, so that what reads and writes have in common cancels to the last bits.
        of_key = product_of(seen.permute((1, 0)), tiles.index(QUERY), zeros, False)
        of_key = product_of(seen_solved.permute((1, 0)), tiles.index(READER), of_key, True)
        of_key = warpgroup_mma_wait(0, (of_key,))
        dk += of_key * writes
        of_sums -= of_key * _wide(tiles, KEY)
        of_query = product_of(seen, key, zeros, False)
        of_reader = product_of(seen_solved, key, zeros, False)
        of_query, of_reader = warpgroup_mma_wait(1, (of_query, of_reader))
        dq += of_query * reads
        of_sums += of_query * _wide(tiles, QUERY)
        of_reader = warpgroup_mma_wait(0, (of_reader,))
        of_sums += of_reader * _wide(tiles, READER)
        of_reader *= reads
        d_beta -= gl.sum(of_reader * _wide(tiles, K), axis=1)
        dk += of_reader * rate[:, None]
    return dq, dk, of_sums, d_beta


@gluon.jit
def _store_gradients(tiles, token, column, t, h, dq, dk, of_sums, total, dq_ptr, dk_ptr, da_ptr,
                    SCALE: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    """Stores the gradients of queries, keys and log decays."""
    parts = tiles.reinterpret(gl.bfloat16, [TILES, C, C], SWIZZLED)
    for i in gl.static_range(3):
        near = (of_sums.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        parts.index(QUERY + i).store(near.to(gl.bfloat16))
        of_sums -= near
    fence_async_shared()
    u, later = again(gl.arange(0, C, gl.SliceLayout(1, LEFT))), gl.arange(0, C, gl.SliceLayout(0, LEFT))
    later = gl.where(u[:, None] <= later[None, :], 1.0, 0.0).to(gl.bfloat16)
    da = gl.zeros([C, C], gl.float32, SQUARE)
    for i in gl.static_range(3):
        da = product_of(later, parts.index(QUERY + i), da, i > 0)
    store_tile(dq_ptr, dq * SCALE, tiles.index(SEEN), token, column, ROW)
    store_tile(dk_ptr, dk * SCALE, tiles.index(SEEN_SOLVED), token, column, ROW)
    da = warpgroup_mma_wait(0, (da,))
    store_tile(da_ptr, da * SCALE + total[None, :], tiles.index(SEEN), token, column, ROW)


@gluon.jit
def channel_gradients_hopper_kernel(
    q_desc,  # [B * T, KQ * 128] in blocks of 64 by 64, as all that follow
    k_desc,  # [B * T, KK * 128]
    d_pairs_desc,  # [B * N * CHUNKS * 64, 64]: this, and gradients below, as `channel_products_kernel` writes them
    d_solved_desc,
    d_reads_desc,  # [B * T, N * 128], as all that follow
    d_leaves_desc,
    d_keeps_desc,
    sums_desc,  # float32: log decays since the beginning of the chunk
    d_pairs_ptr,
    sums_ptr,  # [B, T, N, 128]
    beta_ptr,  # [B, N, T]
    whole_ptr,  # [B, N, CHUNKS, 128] float32: the decay over the chunk
    d_whole_ptr,
    first_ptr,  # int32 [B, N, CHUNKS, 2]: see `triton_channel_steps.first_level`
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    dq_ptr,  # [B, T, N, 128]
    dk_ptr,
    da_ptr,
    d_beta_ptr,  # [2, B, N, T] float32: of each half of the channels
    B: gl.constexpr,
    T: gl.constexpr,  # a multiple of 64
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALE: gl.constexpr,
    UNSCALED: gl.constexpr,  # log2(1 / SCALE)
):
    ROW: gl.constexpr = N * WIDTH
    ITEMS: gl.constexpr = B * CHUNKS * N * 2
    descs = q_desc, k_desc, d_pairs_desc, d_solved_desc, d_reads_desc, d_leaves_desc, d_keeps_desc, sums_desc
    tiles = gl.allocate_shared_memory(q_desc.dtype, [TILES, C, C], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [C, C], SUMS)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    buffers = tiles, sums, full
    _load_gradients(gl.program_id(0), descs, buffers, N, CHUNKS)
    _load_tokens(gl.program_id(0), descs, buffers, N, KQ, KK, CHUNKS)
    t, h = gl.arange(0, C, BY_ROW), gl.arange(0, C, BY_COLUMN)
    words = tiles.reinterpret(gl.int32, [TILES, C, C // 2], WORDS)
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, OF_WORDS)), 2 * gl.arange(0, C // 2, gl.SliceLayout(0, OF_WORDS))
    phase = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        half, n, token, index = _place(item, N, CHUNKS)
        following = item + gl.num_programs(0)
        column, at = n * WIDTH + half * C, index * C
        # All gradients are without SCALE, until they are stored.
        rate = gl.load(beta_ptr + at + t) * (-1.0 / SCALE)
        own = gl.load(d_pairs_ptr + (at + t).to(gl.int64) * C + t).to(gl.float32)
        end = gl.load(sums_ptr + (token + C - 1 + 0 * h).to(gl.int64) * ROW + column + h) * LOG2E + UNSCALED
        whole_at = index * WIDTH + half * C + h
        total = gl.load(whole_ptr + whole_at) * gl.load(d_whole_ptr + whole_at)
        at_level = gl.load(first_ptr + index * 2 + half)
        mbarrier.wait(full, phase)
        phase ^= 1
        # Through the states before and after the chunk, with no decay to the power of 2 yet.
        since = sums.load(SQUARE) * LOG2E
        reading, leaving = gl.exp2(since), gl.exp2(end[None, :] - since)
        if runs_ptr is not None:
            runs = runs_ptr + token
            before = gl.where(token % T > 0, run_of(runs_ptr + gl.maximum(token - 1, 0)), 0)
            run, last = run_of(runs + t), run_of(runs + (C - 1))
            reading = gl.where((run == before)[:, None], reading, 0.0)
            leaving = gl.where((run == last)[:, None], leaving, 0.0)
            if gl.max(gl.where(gl.load(runs + t) < 0, 1, 0), axis=0) > 0:
                clear_padding(tiles, Q, runs)
            of_rows = run_of(runs + rows)[:, None]
            same = gl.where(of_rows == run_of(runs + columns)[None, :], FIRST, 0)
            same |= gl.where(of_rows == run_of(runs + (columns + 1))[None, :], -1 - FIRST, 0)
            _masked(words, PAIRS, PAIRS, same)
            _masked(words, SOLVED, SOLVED, same)
        k = _wide(tiles, K)
        through = _wide(tiles, KEEPS) * reading
        d_beta = -gl.sum(through * k, axis=1)
        dk = through * rate[:, None]
        of_sums = dk * k
        dq = _wide(tiles, READS) * reading
        of_sums += _wide(tiles, Q) * dq
        through = _wide(tiles, LEAVES) * leaving
        dk += through
        through *= k
        of_sums -= through
        # What is written until the end passes the decays after it: all, less those until then.
        total += gl.sum(through, axis=0) * SCALE
        # Pairs of a token with itself have no decay.
        dq += own[:, None] * k
        dk += own[:, None] * _wide(tiles, Q)
        fence_async_shared()
        if following < ITEMS:
            _load_gradients(following, descs, buffers, N, CHUNKS)
        dq, dk, of_sums, d_beta = _through_pairs(
            tiles, words, sums, sums_ptr, token, column, at_level, t, rows, columns, rate, dq, dk, of_sums, d_beta, ROW
        )
        if following < ITEMS:
            _load_tokens(following, descs, buffers, N, KQ, KK, CHUNKS)
        gl.store(d_beta_ptr + half * (B * N * T) + at + t, d_beta)
        _store_gradients(tiles, token, column, t, h, dq, dk, of_sums, total, dq_ptr, dk_ptr, da_ptr, SCALE, ROW)
