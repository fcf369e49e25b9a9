"""Gluon kernel for Hopper of the walk over the chunks of a row whose state decays by one factor per head and token.

It does what `scalar_walk_kernel` of `triton_scalar.py` does for rows of whole chunks of 64 tokens with one state each and heads
of 128 channels, and computes the weights of pairs itself: no kernel writes them for it. A program has a head, or a part of its
row. Two warpgroups walk, with the state transposed in their registers, [columns, channels], so that the left operand of every
product is what registers hold; a third computes the weights of the pairs of the chunks ahead and stores results, and one warp
loads. States between kernels are transposed too, [Hv, H]: a thread reads and writes what it has.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from kernels.engines.scan.gluon_tiles import SQUARE, WIDTH, C, product_of
from kernels.toolchains.gluon import SWIZZLED, after

SLOTS = gl.constexpr(3)  # chunks that are loaded ahead
AHEAD = gl.constexpr(2)  # chunks whose weights are computed ahead
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))  # [columns, channels]
OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # [columns, tokens]
LEFT = gl.constexpr(gl.DotOperandLayout(0, OUT, 2))
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a number a thread of a warpgroup, and of two
EACH_OF_TWO = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 contiguous bytes a thread
ROWS_OF_TWO = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _ring_of(dtype: gl.constexpr, CONSUMERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, C, WIDTH], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return tiles, full, free


@gluon.jit
def _hand_of(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS_OF: gl.constexpr, WIDE: gl.constexpr):
    """Returns tiles that one warpgroup hands to another, with barriers for "is ready" and "is free"."""
    tiles = gl.allocate_shared_memory(dtype, [COUNT, ROWS_OF, WIDE], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return tiles, ready, free


@gluon.jit
def _place(CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr):
    """Returns (head of all rows, its number in a row, part of the row, first token, first chunk of all heads, chunks)."""
    PER: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    head, part = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    count = gl.minimum(PER, CHUNKS - part * PER)
    return head, head % N, part, (head // N * CHUNKS + part * PER) * C, head * CHUNKS + part * PER, count


@gluon.jit
def _runs_of(runs_ptr, token, t, other):
    """Returns the numbers of documents of the tokens of a chunk, anything for None."""
    if runs_ptr is not None:
        other = gl.load(runs_ptr + token + t)
    return other


@gluon.jit
def _clean(tile, runs, rows: gl.constexpr):
    """Sets tokens of padding to zero in a tile: they may hold anything, even NaN. Each reader does it for itself: what the
    other writes is the same."""
    padded = gl.max(gl.where(runs < 0, 1, 0), axis=0) > 0
    if padded:
        there = gl.convert_layout(runs, gl.SliceLayout(1, rows)) >= 0
        x = tile.load(rows)
        tile.store(gl.where(there[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def _load(descs, rings, N: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr, KR: gl.constexpr, KK: gl.constexpr,
          KX: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Loads the tiles of chunks ahead."""
    r_desc, k_desc, x_desc = descs
    of_r, of_k, of_x = rings
    head, n, part, begin, first, count = _place(CHUNKS, N, SPLITS)
    slot, phase = 0, 0
    for step in range(count):
        c = count - 1 - step if REVERSE else step
        token = begin + c * C
        if r_desc is not None:
            mbarrier.wait(of_r[2].index(slot), phase ^ 1)
            mbarrier.expect(of_r[1].index(slot), r_desc.nbytes_per_cta)
            tma.async_load(r_desc, [token, n // (N // KR) * WIDTH], of_r[1].index(slot), of_r[0].index(slot))
        mbarrier.wait(of_k[2].index(slot), phase ^ 1)
        mbarrier.expect(of_k[1].index(slot), k_desc.nbytes_per_cta)
        tma.async_load(k_desc, [token, n // (N // KK) * WIDTH], of_k[1].index(slot), of_k[0].index(slot))
        mbarrier.wait(of_x[2].index(slot), phase ^ 1)
        mbarrier.expect(of_x[1].index(slot), x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [token, n // (N // KX) * WIDTH], of_x[1].index(slot), of_x[0].index(slot))
        slot, phase = after(slot, phase, SLOTS)


@gluon.jit
def _weights(sums, r, k, zeros, SCALE: gl.constexpr, REVERSE: gl.constexpr):
    """Returns what each token of a chunk reads of what each writes, [read, written]."""
    between = product_of(r, k.permute((1, 0)), zeros, False)
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, SQUARE)), gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    of_reads = gl.convert_layout(sums, gl.SliceLayout(1, SQUARE))[:, None]
    of_writes = gl.convert_layout(sums, gl.SliceLayout(0, SQUARE))[None, :]
    if REVERSE:
        apart, there = of_writes - of_reads, rows[:, None] <= columns[None, :]
    else:
        apart, there = of_reads - of_writes, rows[:, None] >= columns[None, :]
    fading = gl.where(there, gl.exp2(apart.to(gl.float32) * (LOG2E / 65536)) * SCALE, 0.0)
    return warpgroup_mma_wait(0, (between,)) * fading


@gluon.jit
def _store(ptr, hand, phase, row, column, STRIDE: gl.constexpr):
    """Stores a tile that was handed over at rows and a column of an array, and gives it back."""
    tiles, ready, free = hand
    mbarrier.wait(ready.index(0), phase)
    rows, columns = gl.arange(0, 16, gl.SliceLayout(1, ROWS)), gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    for i in gl.static_range(tiles.shape[1] // 16):
        where = (row + 16 * i + rows).to(gl.int64)[:, None] * STRIDE + (column + columns)[None, :]
        gl.store(ptr + where, tiles.index(0).slice(16 * i, 16, 0).load(ROWS))
    mbarrier.arrive(free.index(0))


@gluon.jit
def _serve(of_chunks, outputs, rings, weights, hands, N: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr,
           SCALE: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Computes the weights of pairs of each chunk ahead of the walk, and stores what it hands over."""
    sums_ptr, runs_ptr = of_chunks
    out_ptr, states_ptr = outputs
    of_r, of_k, of_x = rings
    tiles, ready, free = weights
    of_out, of_states = hands
    head, n, part, begin, first, count = _place(CHUNKS, N, SPLITS)
    t = gl.arange(0, C, EACH)
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    slot, phase, now, round = 0, 0, 0, 0
    c = count - 1 if REVERSE else 0
    next_sums, next_runs = t, t
    if out_ptr is not None:
        next_sums, next_runs = gl.load(sums_ptr + (first + c) * C + t), _runs_of(runs_ptr, begin + c * C, t, t)
    # The walk gives a tile of weights back as it begins the next chunk: what it hands over then is two chunks before.
    for step in range(count + AHEAD):
        if out_ptr is not None:
            if step < count:
                sums, runs = next_sums, next_runs
                later = gl.minimum(step + 1, count - 1)
                c = count - 1 - later if REVERSE else later
                next_sums, next_runs = gl.load(sums_ptr + (first + c) * C + t), _runs_of(runs_ptr, begin + c * C, t, t)
                r, k = of_r[0].index(slot), of_k[0].index(slot)
                mbarrier.wait(of_r[1].index(slot), phase)
                mbarrier.wait(of_k[1].index(slot), phase)
                if runs_ptr is not None:
                    _clean(r, runs, ROWS)
                    _clean(k, runs, ROWS)
                x = _weights(sums, r, k, zeros, SCALE, REVERSE).to(tiles.dtype)
                mbarrier.arrive(of_r[2].index(slot))
                mbarrier.arrive(of_k[2].index(slot))
                mbarrier.wait(free.index(now), round ^ 1)
                tiles.index(now).store(x)
                fence_async_shared()
                mbarrier.arrive(ready.index(now))
                slot, phase = after(slot, phase, SLOTS)
                now, round = after(now, round, AHEAD)
        if states_ptr is not None:
            if (step >= 1) & (step <= count):
                c = count - step if REVERSE else step - 1
                _store(states_ptr, of_states, step - 1 & 1, (first + c) * WIDTH, 0, WIDTH)
        if out_ptr is not None:
            if step >= AHEAD:
                c = count + AHEAD - 1 - step if REVERSE else step - AHEAD
                _store(out_ptr, of_out, step & 1, begin + c * C, n * WIDTH, N * WIDTH)


@gluon.jit
def _hand_over(hand, phase, x):
    """Hands x [columns, rows] over as a tile [rows, columns]."""
    tiles, ready, free = hand
    mbarrier.wait(free.index(0), phase ^ 1)
    tiles.index(0).permute((1, 0)).store(x)
    mbarrier.arrive(ready.index(0))


@gluon.jit
def _state_at(ptr, index):
    """Returns pointers to a state [columns, channels] of an array [..., 128, 128] of transposed ones."""
    v, h = gl.arange(0, WIDTH, gl.SliceLayout(1, STATE)), gl.arange(0, WIDTH, gl.SliceLayout(0, STATE))
    return ptr + index.to(gl.int64) * (WIDTH * WIDTH) + v[:, None] * WIDTH + h[None, :]


@gluon.jit
def _ahead(of_chunks, index, token):
    """Returns (decays until tokens and after them, the decay over the chunk, documents) of a chunk, loaded before they are
    needed."""
    enters_ptr, leaves_ptr, whole_ptr, runs_ptr = of_chunks
    t = gl.arange(0, C, EACH_OF_TWO)
    enters, leaves = gl.load(enters_ptr + index * C + t), gl.load(leaves_ptr + index * C + t)
    return enters, leaves, gl.load(whole_ptr + index), _runs_of(runs_ptr, token, t, t)


@gluon.jit
def _walk(of_chunks, inputs, wanted, rings, weights, hands, N: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr,
          SCALE: gl.constexpr, READS: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    entries_ptr, starts_ptr = inputs
    states_ptr, exits_ptr, added_ptr, fade_ptr = wanted
    of_r, of_k, of_x = rings
    tiles, ready, free = weights
    of_out, of_states = hands
    PADDED: gl.constexpr = of_chunks[3] is not None
    dtype: gl.constexpr = tiles.dtype
    head, n, part, begin, first, count = _place(CHUNKS, N, SPLITS)
    opening, closing = (SPLITS - 1, 0) if REVERSE else (0, SPLITS - 1)
    zeros = gl.zeros([WIDTH, C], gl.float32, OUT)
    state, passing = gl.zeros([WIDTH, WIDTH], gl.float32, STATE), 1.0
    if starts_ptr is not None:
        state = gl.load(_state_at(starts_ptr, head * SPLITS + part))
    if entries_ptr is not None:
        if part == opening:
            state += gl.load(_state_at(entries_ptr, head))
    slot, phase, now, round = 0, 0, 0, 0
    near_out = zeros.to(dtype)
    c = count - 1 if REVERSE else 0
    following = _ahead(of_chunks, first + c, begin + c * C)
    for step in range(count):
        enters, leaves, whole, runs = following
        later = gl.minimum(step + 1, count - 1)
        c = count - 1 - later if REVERSE else later
        following = _ahead(of_chunks, first + c, begin + c * C)
        near = state.to(dtype)
        r, k, values = of_r[0].index(slot), of_k[0].index(slot), of_x[0].index(slot)
        reading, writing = (leaves, enters * SCALE) if REVERSE else (enters * SCALE, leaves)
        out = zeros
        mbarrier.wait(of_k[1].index(slot), phase)
        if READS:
            mbarrier.wait(of_r[1].index(slot), phase)
        mbarrier.wait(of_x[1].index(slot), phase)
        if PADDED:  # before all products: none is under way beside a branch
            _clean(values, runs, ROWS_OF_TWO)
            _clean(k, runs, ROWS_OF_TWO)
            if READS:
                _clean(r, runs, ROWS_OF_TWO)
        if READS:
            out = product_of(gl.convert_layout(near, LEFT), r.permute((1, 0)), zeros, False)
            if step > 0:  # of the chunk before: now a product hides it
                _hand_over(of_out, step & 1 ^ 1, near_out)
        if states_ptr is not None:
            _hand_over(of_states, step & 1, near)
        x = values.permute((1, 0)).load(LEFT)
        written = (x.to(gl.float32) * gl.convert_layout(writing, gl.SliceLayout(0, LEFT))[None, :]).to(dtype)
        state *= whole
        passing *= whole
        state = product_of(written, k, state, True)
        if READS:
            out = warpgroup_mma_wait(1, (out,))
            out *= gl.convert_layout(reading, gl.SliceLayout(0, OUT))[None, :]
            mbarrier.wait(ready.index(now), round)
            out = product_of(x, tiles.index(now).permute((1, 0)), out, True)
            state, out = warpgroup_mma_wait(0, (state, out))
            near_out = out.to(dtype)
            mbarrier.arrive(of_r[2].index(slot))
            mbarrier.arrive(free.index(now))
            now, round = after(now, round, AHEAD)
        else:
            state = warpgroup_mma_wait(0, (state,))
        mbarrier.arrive(of_x[2].index(slot))
        mbarrier.arrive(of_k[2].index(slot))
        slot, phase = after(slot, phase, SLOTS)
    if READS:
        _hand_over(of_out, count - 1 & 1, near_out)
    if exits_ptr is not None:
        if part == closing:
            gl.store(_state_at(exits_ptr, head), state)
    if added_ptr is not None:
        gl.store(_state_at(added_ptr, head * SPLITS + part), state)
        gl.store(fade_ptr + head * SPLITS + part, passing)


@gluon.jit
def scalar_walk_hopper_kernel(
    r_desc,  # [B * T, KR * 128] in blocks of 64 by 128, as the next two: what reads the state; None with out_ptr
    k_desc,  # [B * T, KK * 128]: what writes it
    x_desc,  # [B * T, KX * 128]: what is written
    sums_ptr,  # int32 [B, N, T]: what `triton_sums.sums_of` returns
    enters_ptr,  # [B, N, T] float32, as leaves: what `triton_parts.fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    entries_ptr,  # [B, 1, N, Hv, H] float32, transposed as all states of float32 here: what rows start from, or None for 0
    starts_ptr,  # [B, N, SPLITS, Hv, H] float32: what parts start from; None for one part, or where their maps are wanted
    out_ptr,  # as in `triton_scalar.scalar_walk_kernel`; each may be None
    states_ptr,
    exits_ptr,  # [B, 1, N, Hv, H]
    added_ptr,  # [B, N, SPLITS, Hv, H]
    fade_ptr,
    N: gl.constexpr,
    KR: gl.constexpr,
    KK: gl.constexpr,
    KX: gl.constexpr,
    CHUNKS: gl.constexpr,
    SPLITS: gl.constexpr,
    SCALE: gl.constexpr,
    REVERSE: gl.constexpr,
    SERVER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    READS: gl.constexpr = out_ptr is not None
    dtype: gl.constexpr = k_desc.dtype
    BOTH: gl.constexpr = 2 if READS else 1
    rings = _ring_of(dtype, BOTH), _ring_of(dtype, BOTH), _ring_of(dtype, 1)
    weights = _hand_of(dtype, AHEAD, C, C)
    hands = _hand_of(dtype, 1, C, WIDTH), _hand_of(dtype, 1, WIDTH, WIDTH)
    of_chunks, of_pairs = (enters_ptr, leaves_ptr, whole_ptr, runs_ptr), (sums_ptr, runs_ptr)
    inputs, wanted = (entries_ptr, starts_ptr), (states_ptr, exits_ptr, added_ptr, fade_ptr)
    descs = r_desc, k_desc, x_desc
    gl.warp_specialize(
        [
            (_walk, (of_chunks, inputs, wanted, rings, weights, hands, N, CHUNKS, SPLITS, SCALE, READS, REVERSE)),
            (_serve, (of_pairs, (out_ptr, states_ptr), rings, weights, hands, N, CHUNKS, SPLITS, SCALE, REVERSE)),
            (_load, (descs, rings, N, CHUNKS, SPLITS, KR, KK, KX, REVERSE)),
        ],
        [4, 1],
        [SERVER_REGISTERS, PRODUCER_REGISTERS],
    )
