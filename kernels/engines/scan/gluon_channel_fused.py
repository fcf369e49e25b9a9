"""Gluon kernel for Hopper of all gradients of a delta rule's chunks with decays of channels, given what its two walks wrote.

The products with states and values of `gluon_channel.py` and what decays do to them, of `gluon_channel_gradients.py`, in one:
gradients of queries, keys and pairs between the two stay on chip, in float32 but for pairs. A program takes 64 channels of a
chunk and head at a time, so that two programs share a multiprocessor, and pairs are taken once for each half of the channels.
Tiles that the first half of the work has read have the operands of the second.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from kernels.engines.scan.gluon_channel_gradients import (
    FIRST,
    OF_WORDS,
    PAIRS,
    SOLVED,
    TILES,
    WORDS,
    K,
    Q,
    store_gradients,
    through_pairs,
)
from kernels.engines.scan.gluon_channel_parts import BY_COLUMN, BY_ROW, LOG2E, SUMS, run_of, wide
from kernels.engines.scan.gluon_tiles import HALVES, SQUARE, WIDE, WIDTH, C, clear, product_of
from kernels.toolchains.gluon import SWIZZLED

# What is loaded: of columns of values two tiles each, those of the state not side by side. `through_pairs` and
# `store_gradients` write tiles 2, 3, and from 7 on.
D_OUT, D_STATE, WRITTEN, DU = (gl.constexpr(i) for i in (2, 4, 7, 9))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _state(tiles, part: gl.constexpr):
    return tiles.index(11 if part == 0 else 6)


@gluon.jit
def _place(item, N: gl.constexpr, CHUNKS: gl.constexpr):
    """Returns (half of the channels, head, first token of all rows, index of a chunk of a head) of an item."""
    chunk, n = item // 2 // N, item // 2 % N
    return item % 2, n, chunk * C, (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS


@gluon.jit
def _load_first(item, descs, buffers, N: gl.constexpr, CHUNKS: gl.constexpr):
    """Announces an item, and loads what no operand of the one before lies in: gradients of states, and half of a state."""
    half, n, token, index = _place(item, N, CHUNKS)
    tiles, sums, full = buffers
    mbarrier.expect(full, TILES * descs[0].nbytes_per_cta + descs[7].nbytes_per_cta)
    row = index * WIDTH + half * C
    tma.async_load(descs[6], [row, 0], full, tiles.index(D_STATE))
    tma.async_load(descs[6], [row, C], full, tiles.index(D_STATE + 1))
    tma.async_load(descs[5], [row, C], full, _state(tiles, 1))


@gluon.jit
def _load_tokens(item, descs, buffers, N: gl.constexpr, KQ: gl.constexpr, KK: gl.constexpr, CHUNKS: gl.constexpr):
    """Loads what the item before has read with its last pairs."""
    half, n, token, index = _place(item, N, CHUNKS)
    tiles, sums, full = buffers
    tma.async_load(descs[7], [token, n * WIDTH + half * C], full, sums)
    tma.async_load(descs[0], [token, n // (N // KQ) * WIDTH + half * C], full, tiles.index(Q))
    tma.async_load(descs[1], [token, n // (N // KK) * WIDTH + half * C], full, tiles.index(K))
    for part in gl.static_range(HALVES):
        tma.async_load(descs[2], [token, n * WIDTH + part * C], full, tiles.index(D_OUT + part))


@gluon.jit
def _load_last(item, descs, buffers, N: gl.constexpr, CHUNKS: gl.constexpr):
    half, n, token, index = _place(item, N, CHUNKS)
    tiles, sums, full = buffers
    for part in gl.static_range(HALVES):
        tma.async_load(descs[3], [token, n * WIDTH + part * C], full, tiles.index(WRITTEN + part))
        tma.async_load(descs[4], [token, n * WIDTH + part * C], full, tiles.index(DU + part))
    tma.async_load(descs[5], [index * WIDTH + half * C, 0], full, _state(tiles, 0))


@gluon.jit
def channel_fused_kernel(
    q_desc,  # [B * T, KQ * 128] in blocks of 64 by 64, as all that follow
    k_desc,  # [B * T, KK * 128]
    d_out_desc,  # [B * T, N * 128], as the next two
    written_desc,
    du_desc,
    states_desc,  # [B * N * CHUNKS * 128, 128]: before each chunk
    d_states_desc,  # of the states after each chunk
    sums_desc,  # [B * T, N * 128] float32: log decays since the beginning of the chunk
    sums_ptr,
    v_ptr,  # [B, T, N, 128]
    beta_ptr,  # [B, N, T]
    whole_ptr,  # [B, N, CHUNKS, 128] float32: the decay over the chunk
    first_ptr,  # int32 [B, N, CHUNKS, 2]: see `triton_channel_steps.first_level`
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    dq_ptr,  # [B, T, N, 128]
    dk_ptr,
    da_ptr,
    d_beta_ptr,  # [4, B, N, T] float32, of which the sum is the gradient
    dv_ptr,  # [B, T, N, 128]
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
    descs = q_desc, k_desc, d_out_desc, written_desc, du_desc, states_desc, d_states_desc, sums_desc
    dtype: gl.constexpr = q_desc.dtype
    tiles = gl.allocate_shared_memory(dtype, [TILES, C, C], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [C, C], SUMS)
    passes = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    buffers = tiles, sums, full
    _load_first(gl.program_id(0), descs, buffers, N, CHUNKS)
    _load_tokens(gl.program_id(0), descs, buffers, N, KQ, KK, CHUNKS)
    _load_last(gl.program_id(0), descs, buffers, N, CHUNKS)
    t, h = gl.arange(0, C, BY_ROW), gl.arange(0, C, BY_COLUMN)
    words = tiles.reinterpret(gl.int32, [TILES, C, C // 2], WORDS)
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, OF_WORDS)), 2 * gl.arange(0, C // 2, gl.SliceLayout(0, OF_WORDS))
    of_values, i = gl.arange(0, C, gl.SliceLayout(0, WIDE)), gl.arange(0, C, gl.SliceLayout(1, WIDE))
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    phase = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        half, n, token, index = _place(item, N, CHUNKS)
        following = item + gl.num_programs(0)
        column, at = n * WIDTH + half * C, index * C
        # All gradients are without SCALE, until they are stored.
        rate = gl.load(beta_ptr + at + t) * (-1.0 / SCALE)
        end = gl.load(sums_ptr + (token + C - 1 + 0 * h).to(gl.int64) * ROW + column + h) * LOG2E + UNSCALED
        whole = gl.load(whole_ptr + index * WIDTH + half * C + h)
        at_level = gl.load(first_ptr + index * 2 + half)
        values_at = (token + i).to(gl.int64)[:, None] * ROW + (column + of_values)[None, :]
        v, rates = gl.load(v_ptr + values_at), gl.load(beta_ptr + at + i)
        mbarrier.wait(full, phase)
        phase ^= 1
        padded = False
        if runs_ptr is not None:
            runs = runs_ptr + token
            padded = gl.max(gl.where(gl.load(runs + t) < 0, 1, 0), axis=0) > 0
            v = gl.where((gl.load(runs + i) >= 0)[:, None], v, gl.zeros_like(v))
            if padded:
                clear(tiles, Q, runs, C, 2, False)
                clear(tiles, D_OUT, runs, C, 2, False)
                fence_async_shared()
        d_read, pairs, solved, d_leave, d_keep = zeros, zeros, zeros, zeros, zeros
        for part in gl.static_range(HALVES):
            d_out, written, du = tiles.index(D_OUT + part), tiles.index(WRITTEN + part), tiles.index(DU + part)
            pairs = product_of(d_out, written.permute((1, 0)), pairs, part > 0)
            d_read = product_of(d_out, _state(tiles, part).permute((1, 0)), d_read, part > 0)
            solved = product_of(du, written.permute((1, 0)), solved, part > 0)
            d_keep = product_of(du, _state(tiles, part).permute((1, 0)), d_keep, part > 0)
            d_leave = product_of(written, tiles.index(D_STATE + part).permute((1, 0)), d_leave, part > 0)
        for j in gl.static_range(4):
            passed = gl.zeros([16], gl.float32, gl.SliceLayout(1, WIDE))
            for part in gl.static_range(HALVES):
                x = _state(tiles, part).slice(16 * j, 16, 0).load(WIDE)
                y = tiles.index(D_STATE + part).slice(16 * j, 16, 0).load(WIDE)
                passed += gl.sum(x.to(gl.float32) * y.to(gl.float32), axis=1)
            passes.slice(16 * j, 16, 0).store(passed)
        d = tiles.index(DU + half).load(WIDE).to(gl.float32)
        gl.store(dv_ptr + values_at, (d * rates[:, None]).to(dtype))
        gl.store(d_beta_ptr + (2 + half) * (B * N * T) + at + i, gl.sum(d * v.to(gl.float32), axis=1))
        d_read, pairs, solved, d_leave, d_keep = warpgroup_mma_wait(0, (d_read, pairs, solved, d_leave, d_keep))
        tiles.index(PAIRS).store(pairs.to(dtype))
        tiles.index(SOLVED).store(solved.to(dtype))
        # Pairs of a token with itself have no decay.
        own = gl.sum(gl.where(t[:, None] == h[None, :], pairs, 0.0), axis=1)
        since = sums.load(SQUARE) * LOG2E
        reading = gl.exp2(since)
        if runs_ptr is not None:
            before = gl.where(token % T > 0, run_of(runs_ptr + gl.maximum(token - 1, 0)), 0)
            run, last = run_of(runs + t), run_of(runs + (C - 1))
            reading = gl.where((run == before)[:, None], reading, 0.0)
            of_rows = run_of(runs + rows)[:, None]
            same = gl.where(of_rows == run_of(runs + columns)[None, :], FIRST, 0)
            same |= gl.where(of_rows == run_of(runs + (columns + 1))[None, :], -1 - FIRST, 0)
            words.index(PAIRS).store(words.index(PAIRS).load(OF_WORDS) & same)
            words.index(SOLVED).store(words.index(SOLVED).load(OF_WORDS) & same)
        k = wide(tiles.index(K))
        d_keep *= reading
        d_beta = -gl.sum(d_keep * k, axis=1)
        dk = d_keep * rate[:, None]
        of_sums = dk * k
        dq = d_read * reading
        of_sums += wide(tiles.index(Q)) * dq
        leaving = gl.exp2(end[None, :] - sums.load(SQUARE) * LOG2E)
        if runs_ptr is not None:
            leaving = gl.where((run == last)[:, None], leaving, 0.0)
        d_leave *= leaving
        dk += d_leave
        d_leave *= k
        of_sums -= d_leave
        # What is written until the end passes the decays after it: all, less those until then.
        total = gl.sum(d_leave, axis=0) * SCALE + whole * passes.load(BY_COLUMN)
        dq += own[:, None] * k
        dk += own[:, None] * wide(tiles.index(Q))
        fence_async_shared()
        if following < ITEMS:
            _load_first(following, descs, buffers, N, CHUNKS)
        dq, dk, of_sums, d_beta = through_pairs(
            tiles, words, sums, sums_ptr, token, column, at_level, t, rows, columns, rate, dq, dk, of_sums, d_beta, ROW
        )
        if following < ITEMS:
            _load_tokens(following, descs, buffers, N, KQ, KK, CHUNKS)
        gl.store(d_beta_ptr + half * (B * N * T) + at + t, d_beta)
        store_gradients(tiles, token, column, t, h, dq, dk, of_sums, total, dq_ptr, dk_ptr, da_ptr, SCALE, ROW)
        fence_async_shared()
        gl.barrier()  # a warp waits for its own part of the last products only
        if following < ITEMS:
            _load_last(following, descs, buffers, N, CHUNKS)
