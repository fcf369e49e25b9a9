"""Gluon kernel for Hopper of all gradients of a gated delta rule's chunks, given what its two walks wrote.

Chunks do not depend on each other. Those of `triton_delta.py` and `triton_scalar.py` are three kernels, which read states,
values and keys two or three times and pass gradients of keys on in float32; this one reads each array once. A program has a
multiprocessor to itself and takes the heads of one group after another: a warp loads tiles of 64 by 64 through TMA, half of the
columns of a head at a time, and two warpgroups each have half of the key dim. Of the four matrices of pairs a warpgroup
computes two, and both read the two that are gradients: that of the pairs, and that of the matrix whose inverse is `solve`.

Sums over intervals of tokens are products with a matrix of zeros and ones, exact to bfloat16 in three parts for log decays
(24 bits), and in two for their gradients (16 bits): none is a difference of two sums.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from kernels.engines.scan.gluon_tiles import (
    HALVES,
    SQUARE,
    TILES,
    WIDE,
    WIDTH,
    C,
    again,
    clear,
    load_half,
    load_tokens,
    of_values,
    place_of,
    product_of,
    store_half,
    store_tokens,
)
from kernels.toolchains.gluon import SWIZZLED

SLOTS = gl.constexpr(HALVES * TILES)
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))


@gluon.jit
def _load(of_keys, descs, table_ptr, common, stages, B: gl.constexpr, T: gl.constexpr, CHUNKS: gl.constexpr,
          GROUPS: gl.constexpr, HEADS: gl.constexpr, RAGGED: gl.constexpr):  # fmt: skip
    """Loads queries and keys of each item into one of two slots, and what each head has of columns into two stages."""
    q_desc, k_desc = of_keys
    keys, keys_full, keys_free = common
    tiles, full, free = stages
    turn, visit = 0, 0
    for item in range(gl.program_id(0), B * CHUNKS * GROUPS, gl.num_programs(0)):
        chunk, group = item // GROUPS, item % GROUPS  # chunk of all rows
        token, count = place_of(table_ptr, chunk, T, CHUNKS, RAGGED)
        slot = turn % 2
        mbarrier.wait(keys_free.index(slot), (turn // 2 & 1) ^ 1)
        mbarrier.expect(keys_full.index(slot), 4 * q_desc.nbytes_per_cta)
        for half in gl.static_range(HALVES):
            at = group * WIDTH + half * C
            tma.async_load(q_desc, [token, at], keys_full.index(slot), keys.index(4 * slot + half))
            tma.async_load(k_desc, [token, at], keys_full.index(slot), keys.index(4 * slot + 2 + half))
        turn += 1
        for j in range(HEADS):
            n = group * HEADS + j
            state = ((chunk // CHUNKS * (GROUPS * HEADS) + n) * CHUNKS + chunk % CHUNKS) * WIDTH
            for half in gl.static_range(HALVES):
                mbarrier.wait(free.index(half), (visit & 1) ^ 1)
                load_half(descs, tiles, half, full.index(half), token, n, state, half)
            visit += 1


@gluon.jit
def _rounded(x):
    """Returns (x in bfloat16, what is left of it)."""
    near = x.to(gl.bfloat16)
    return near, x - near.to(gl.float32)


@gluon.jit
def _run(ptr, i, count, RAGGED: gl.constexpr):
    """Returns the documents of tokens: see `layout.Layout`."""
    coded = load_tokens(ptr, i, count, -1, RAGGED)
    return gl.where(coded < 0, -1 - coded, coded)


@gluon.jit
def _decays(a_ptr, at, runs_ptr, t, s, later, count, RAGGED: gl.constexpr, STRICT: gl.constexpr):
    """Returns the decay from each token s to each t >= s, or t > s, [t, s]; 0 for other pairs, and across documents."""
    decay = gl.zeros([C, C], gl.float32, SQUARE)
    if a_ptr is not None:
        left = load_tokens(a_ptr + at, s, count, 0.0, RAGGED)
        for i in gl.static_range(3):
            near, left = _rounded(left)
            t = again(t)  # parts one after another: there are no registers for three
            part = gl.where(t[:, None] >= s[None, :], near[None, :], gl.zeros([C, C], gl.bfloat16, SQUARE))
            decay = product_of(gl.convert_layout(part, LEFT), later, decay, i > 0)
            decay = warpgroup_mma_wait(0, (decay,))
    seen = t[:, None] > s[None, :] if STRICT else t[:, None] >= s[None, :]
    if runs_ptr is not None:
        seen = seen & (_run(runs_ptr, t, count, RAGGED)[:, None] == _run(runs_ptr, s, count, RAGGED)[None, :])
    return gl.where(seen, gl.exp(decay), 0.0)


@gluon.jit
def _passing(between, later):
    """Returns sums over s < u of pairs [t, s], [t, u]."""
    sums = gl.zeros([C, C], gl.float32, SQUARE)
    for i in gl.static_range(2):
        near, between = _rounded(between)
        sums = product_of(gl.convert_layout(near, LEFT), later.permute((1, 0)), sums, i > 0)
        sums = warpgroup_mma_wait(0, (sums,))
    return sums


@gluon.jit
def _folded(tile, product, sums, total, weights):
    """Returns (sums of the product of a tile with each row, added to `sums`; the weighed product, added to `total`)."""
    sums += gl.sum(tile.load(SQUARE).to(gl.float32) * product, axis=1)
    return sums, total + product * weights[:, None]


@gluon.jit
def _differentiate(inputs, outputs, common, stages, shared, B: gl.constexpr, T: gl.constexpr, CHUNKS: gl.constexpr,
                   GROUPS: gl.constexpr, HEADS: gl.constexpr, SCALE: gl.constexpr, RAGGED: gl.constexpr,
                   WHICH: gl.constexpr):  # fmt: skip
    """WHICH of the two halves of the key dim a warpgroup has. The first has the pairs of queries and keys, the second those of
    keys."""
    a_ptr, beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, table_ptr = inputs
    dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, da_ptr = outputs
    keys, keys_full, keys_free = common
    tiles, full, free = stages
    squares, later, ready, read = shared
    N: gl.constexpr = GROUPS * HEADS
    ROW: gl.constexpr = 32 * WHICH
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    dtype: gl.constexpr = keys.dtype
    t, u = gl.arange(0, C, BY_ROW), gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    rows = gl.arange(0, 16, gl.SliceLayout(1, WIDE))
    turn, visit = 0, 0
    for item in range(gl.program_id(0), B * CHUNKS * GROUPS, gl.num_programs(0)):
        chunk, group = item // GROUPS, item % GROUPS
        slot = turn % 2
        mbarrier.wait(keys_full.index(slot), turn // 2 & 1)
        token, count = place_of(table_ptr, chunk, T, CHUNKS, RAGGED)
        runs, padded = runs_ptr, False
        if runs_ptr is not None:
            runs = runs_ptr + token
            padded = gl.max(gl.where(load_tokens(runs, t, count, -1, RAGGED) < 0, 1, 0), axis=0) > 0
        elif RAGGED:
            padded = count < C
        if runs_ptr is not None or RAGGED:
            if padded:
                clear(keys, 4 * slot, runs, count, 4, RAGGED)
                fence_async_shared()
        dq, dk = gl.zeros([C, C], gl.float32, SQUARE), gl.zeros([C, C], gl.float32, SQUARE)
        for j in range(HEADS):
            n = group * HEADS + j
            index = (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS
            at = index * C
            if RAGGED:
                at = (chunk // CHUNKS * (N - 1) + n) * T + token  # [B, N, T]
            phase = visit & 1
            zero = visit - again(visit)
            first_square, second_square, one_later = squares.index(zero), squares.index(zero + 1), later.index(zero)
            mine = first_square if WHICH == 0 else second_square
            t = again(t)
            enters = load_tokens(enters_ptr + at, t, count, 0.0, RAGGED)
            leaves = load_tokens(leaves_ptr + at, t, count, 0.0, RAGGED)
            beta = load_tokens(beta_ptr + at, t, count, 0.0, RAGGED)
            whole = gl.load(whole_ptr + index)
            zeros = gl.zeros([C, C], gl.float32, SQUARE)
            none = gl.zeros([C], gl.float32, BY_ROW)
            reading, writing, old = none, none, none
            passed = gl.zeros([16, C], gl.float32, WIDE)
            upper, lower = gl.zeros([16], gl.float32, rows.type.layout), gl.zeros([16], gl.float32, rows.type.layout)
            pairs = zeros
            # How many halves there are is known at run time only: else addresses of all tiles would be registers.
            for half in range(HALVES * gl.num_programs(1)):
                first = half * TILES
                keys_of = 4 * again(slot) + WHICH
                q, k = keys.index(keys_of), keys.index(keys_of + 2)
                mbarrier.wait(full.index(half), phase)
                if runs_ptr is not None or RAGGED:
                    if padded:
                        clear(tiles, first, runs, count, 4, RAGGED)
                        fence_async_shared()
                d_out, written, du = tiles.index(first), tiles.index(first + 1), tiles.index(first + 2)
                state, d_state = tiles.index(first + 4 + WHICH), tiles.index(first + 6 + WHICH)
                d_write = product_of(written, d_state.permute((1, 0)), zeros, False)
                pairs = product_of(d_out if WHICH == 0 else du, written.permute((1, 0)), pairs, half > 0)
                d_read = product_of(d_out, state.permute((1, 0)), zeros, False)
                d_write, pairs = warpgroup_mma_wait(1, (d_write, pairs))
                writing, dk = _folded(k, d_write, writing, dk, leaves)
                if a_ptr is not None:
                    for i in gl.static_range(4):
                        x, y = state.slice(16 * i, 16, 0).load(WIDE), d_state.slice(16 * i, 16, 0).load(WIDE)
                        passed += x.to(gl.float32) * y.to(gl.float32)
                wide = product_of(du, state.permute((1, 0)), zeros, False)
                d_read = warpgroup_mma_wait(1, (d_read,))
                reading, dq = _folded(q, d_read, reading, dq, enters * SCALE)
                value = tiles.index(first + 3)
                column = n * WIDTH + half * C
                upper = of_values(du, value, beta_ptr + at, dv_ptr, token, column, upper, count, ROW, N * WIDTH, RAGGED)
                lower = of_values(
                    du, value, beta_ptr + at, dv_ptr, token, column, lower, count, ROW + 16, N * WIDTH, RAGGED
                )
                wide = warpgroup_mma_wait(0, (wide,))
                old, dk = _folded(k, wide, old, dk, enters * -beta)
                mbarrier.arrive(free.index(half))
            through_states = whole * gl.sum(gl.sum(passed, axis=1), axis=0)
            store_tokens(dbeta_ptr + 2 * B * N * T + at, ROW + rows, upper, count, RAGGED)
            store_tokens(dbeta_ptr + 2 * B * N * T + at, ROW + 16 + rows, lower, count, RAGGED)
            reading, writing, back = reading * (enters * SCALE), writing * leaves, enters * -beta
            # What passes through pairs of the chunk.
            pairs *= _decays(a_ptr, at, runs, t, u, one_later, count, RAGGED, WHICH == 1)
            base = 4 * again(slot)
            products = zeros
            for side in gl.static_range(2):
                left, right = keys.index(base + 2 * WHICH + side), keys.index(base + 2 + side)
                products = product_of(left, right.permute((1, 0)), products, side > 0)
            mbarrier.wait(read, phase ^ 1)
            if WHICH == 0:
                pairs *= SCALE
                mine.store(pairs.to(dtype))
            else:
                mine.store((pairs * -beta[:, None]).to(dtype))
            fence_async_shared()
            mbarrier.arrive(ready)
            between = warpgroup_mma_wait(0, (products,)) * pairs
            d_beta = -old * enters
            if WHICH == 1:
                d_beta -= gl.sum(between, axis=1)
                between *= -beta[:, None]
            store_tokens(dbeta_ptr + WHICH * (B * N * T) + at, t, d_beta, count, RAGGED)
            if a_ptr is not None:
                ends = _passing(between, one_later) + (reading + old * back)[:, None]
                t = again(t)
                sums = gl.sum(gl.where(t[:, None] >= u[None, :], ends, writing[:, None]), axis=0)
                store_tokens(da_ptr + WHICH * (B * N * T) + at, u, sums + through_states, count, RAGGED)
            mbarrier.wait(ready, phase)
            keys_of = 4 * again(slot) + WHICH
            q, k = keys.index(keys_of), keys.index(keys_of + 2)
            dq = product_of(first_square, k, dq, True)
            dk = product_of(first_square.permute((1, 0)), q, dk, True)
            dk = product_of(second_square, k, dk, True)
            dk = product_of(second_square.permute((1, 0)), k, dk, True)
            dq, dk = warpgroup_mma_wait(0, (dq, dk))
            mbarrier.arrive(read)
            visit += 1
        mbarrier.arrive(keys_free.index(slot))
        turn += 1
        mbarrier.wait(read, (visit & 1) ^ 1)  # both are done with the last squares: their tiles are free
        mine = squares.index(WHICH)
        store_half(dq_ptr, dq, mine, token, group * WIDTH + WHICH * C, count, GROUPS * WIDTH, RAGGED)
        store_half(dk_ptr, dk, mine, token, group * WIDTH + WHICH * C, count, GROUPS * WIDTH, RAGGED)


@gluon.jit
def delta_gradients_kernel(
    q_desc,  # [B * T, K * 128] in blocks of 64 by 64, as all that follow
    k_desc,
    d_out_desc,  # [B * T, N * 128], as the next three
    written_desc,
    du_desc,
    v_desc,
    states_desc,  # [B * N * CHUNKS * 128, 128]: before each chunk
    d_states_desc,  # of the states after each chunk
    a_ptr,  # [B, N, T] log decays, or None
    beta_ptr,  # [B, N, T]
    enters_ptr,  # [B, N, T] float32, as leaves: what `triton_parts.fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
    runs_ptr,  # int32 as in `layout.Layout`, or None, as the next
    table_ptr,
    dq_ptr,  # [B, T, K, 128]
    dk_ptr,
    dv_ptr,  # [B, T, N, 128]
    dbeta_ptr,  # [3, B, N, T] float32, of which the sum is the gradient
    da_ptr,  # [2, B, N, T] float32, as dbeta_ptr, or None
    B: gl.constexpr,
    T: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,  # heads of keys
    HEADS: gl.constexpr,  # heads of a group
    SCALE: gl.constexpr,
    RAGGED: gl.constexpr,  # whether some chunks have fewer than 64 tokens
    CONSUMER_REGISTERS: gl.constexpr,  # registers per thread of the second warpgroup; the first gets the rest
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    keys = gl.allocate_shared_memory(dtype, [8, C, C], SWIZZLED)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, C, C], SWIZZLED)
    squares = gl.allocate_shared_memory(dtype, [2, C, C], SWIZZLED)
    later = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SWIZZLED)  # [u, s]: 1 where u > s
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
    later.index(0).store(gl.where(rows[:, None] > columns[None, :], 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    keys_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(ready, count=2)
    mbarrier.init(read, count=2)
    of_keys, descs = (q_desc, k_desc), (d_out_desc, written_desc, du_desc, v_desc, states_desc, d_states_desc)
    inputs = a_ptr, beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, table_ptr
    outputs = dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, da_ptr
    common, stages, shared = (keys, keys_full, keys_free), (tiles, full, free), (squares, later, ready, read)
    gl.warp_specialize(
        [
            (_differentiate, (inputs, outputs, common, stages, shared, B, T, CHUNKS, GROUPS, HEADS, SCALE, RAGGED, 0)),
            (_differentiate, (inputs, outputs, common, stages, shared, B, T, CHUNKS, GROUPS, HEADS, SCALE, RAGGED, 1)),
            (_load, (of_keys, descs, table_ptr, common, stages, B, T, CHUNKS, GROUPS, HEADS, RAGGED)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
