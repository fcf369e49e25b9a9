"""Parts of the Gluon kernels of walks: rings of tiles that one warp loads ahead, and tiles that a warpgroup hands to another,
which stores them."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.engines.scan.gluon_tiles import WIDE, WIDTH, C
from kernels.toolchains.gluon import SWIZZLED, after

COLUMNS = gl.constexpr(2)  # programs of a head
# Tiles of keys and queries, and of 64 by 64, that are loaded ahead: more than two chunks of each.
KEYS, SMALL = gl.constexpr(7), gl.constexpr(8)
# What the walking warpgroup hands to the one that stores: a state, and one or two tiles of tokens.
OF_STATE, FIRST, SECOND, HANDS = (gl.constexpr(i) for i in range(4))


@gluon.jit
def ring_of(dtype: gl.constexpr, SLOTS: gl.constexpr, COUNT: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, C, COUNT], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return tiles, full, free


@gluon.jit
def hands_of(dtype: gl.constexpr):
    of_states = gl.allocate_shared_memory(dtype, [1, WIDTH, C], SWIZZLED)
    of_tokens = gl.allocate_shared_memory(dtype, [2, C, C], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [HANDS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HANDS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(HANDS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return of_states, of_tokens, ready, free


@gluon.jit
def place(CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr):
    """Returns (head of all rows, its number in a row, first column, part of the row, first token, first chunk of all heads,
    chunks) of a program."""
    PER: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    here = gl.program_id(0) // COLUMNS
    head, part, count = here, 0, CHUNKS
    if SPLITS > 1:
        head, part = here // SPLITS, here % SPLITS
        count = gl.minimum(PER, CHUNKS - part * PER)
    first = head * CHUNKS + part * PER
    return head, head % N, gl.program_id(0) % COLUMNS * C, part, (head // N * CHUNKS + part * PER) * C, first, count


@gluon.jit
def _load_keys(desc, token, head, ring, slot, phase):
    tiles, full, free = ring
    mbarrier.wait(free.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.nbytes_per_cta)
    tma.async_load(desc, [token, head * WIDTH], full.index(slot), tiles.index(slot))
    return after(slot, phase, KEYS)


@gluon.jit
def _load_small(desc, row, column, ring, slot, phase):
    tiles, full, free = ring
    mbarrier.wait(free.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.nbytes_per_cta)
    tma.async_load(desc, [row, column], full.index(slot), tiles.index(slot))
    return after(slot, phase, SMALL)


@gluon.jit
def load_chunks(descs, rings, CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr, KQ: gl.constexpr,
                KK: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Loads the tiles of chunks in the order in which they are needed."""
    q_desc, k_desc, writes_desc, tokens_desc, pairs_desc, solve_desc = descs
    keys, small = rings
    head, n, column, part, begin, first, count = place(CHUNKS, N, SPLITS)
    slot, phase, small_slot, small_phase = 0, 0, 0, 0
    for step in range(count):
        c = count - 1 - step if REVERSE else step
        token, square, at = begin + c * C, (first + c) * C, n * WIDTH + column
        if REVERSE and writes_desc is not None:
            slot, phase = _load_keys(writes_desc, token, n, keys, slot, phase)
        else:
            slot, phase = _load_keys(k_desc, token, n // (N // KK), keys, slot, phase)
        small_slot, small_phase = _load_small(tokens_desc, token, at, small, small_slot, small_phase)
        if REVERSE:
            small_slot, small_phase = _load_small(pairs_desc, square, 0, small, small_slot, small_phase)
        elif q_desc is not None:
            slot, phase = _load_keys(q_desc, token, n // (N // KQ), keys, slot, phase)
        small_slot, small_phase = _load_small(solve_desc, square, 0, small, small_slot, small_phase)
        if REVERSE:
            slot, phase = _load_keys(q_desc, token, n // (N // KQ), keys, slot, phase)
        if writes_desc is not None:
            if REVERSE:
                slot, phase = _load_keys(k_desc, token, n // (N // KK), keys, slot, phase)
            else:
                slot, phase = _load_keys(writes_desc, token, n, keys, slot, phase)
        if not REVERSE and q_desc is not None:
            small_slot, small_phase = _load_small(pairs_desc, square, 0, small, small_slot, small_phase)


@gluon.jit
def _store_rows(ptr, tile, hand, which: gl.constexpr, phase, row, column, STRIDE: gl.constexpr):
    """Stores a tile [rows, 64] that was handed over at rows and a column of an array, and gives it back."""
    ready, free = hand
    mbarrier.wait(ready.index(which), phase)
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
    for i in gl.static_range(tile.shape[0] // C):
        where = (row + C * i + rows).to(gl.int64)[:, None] * STRIDE + (column + columns)[None, :]
        gl.store(ptr + where, tile.slice(C * i, C, 0).load(WIDE))
    mbarrier.arrive(free.index(which))


@gluon.jit
def store_results(outputs, hands, CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr):
    states_ptr, first_ptr, second_ptr = outputs
    of_states, of_tokens, ready, free = hands
    head, n, column, part, begin, first, count = place(CHUNKS, N, SPLITS)
    hand = ready, free
    for step in range(count):
        c = count - 1 - step if REVERSE else step
        phase = step & 1
        if states_ptr is not None:
            _store_rows(states_ptr, of_states.index(0), hand, OF_STATE, phase, (first + c) * WIDTH, column, WIDTH)
        token, at = begin + c * C, n * WIDTH + column
        if first_ptr is not None:
            _store_rows(first_ptr, of_tokens.index(0), hand, FIRST, phase, token, at, N * WIDTH)
        if second_ptr is not None:
            _store_rows(second_ptr, of_tokens.index(1), hand, SECOND, phase, token, at, N * WIDTH)


@gluon.jit
def hand_over(tile, hand, which: gl.constexpr, phase, x):
    """Hands x [columns, rows] over as a tile [rows, columns]."""
    ready, free = hand
    mbarrier.wait(free.index(which), phase ^ 1)
    tile.permute((1, 0)).store(x)
    mbarrier.arrive(ready.index(which))


@gluon.jit
def arrived(ring, slot, phase, SLOTS: gl.constexpr):
    """Waits for the next tile; returns (it, its barrier for when it is read, the next slot, its phase)."""
    tiles, full, free = ring
    mbarrier.wait(full.index(slot), phase)
    following, next_phase = after(slot, phase, SLOTS)
    return tiles.index(slot), free.index(slot), following, next_phase
