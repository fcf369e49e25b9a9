"""Gluon kernel for Hopper of the products with states and values in the gradients of a delta rule with decays of channels.

Two kernels of `triton_channels.py` in one, which reads what is written and states once: 536 MB of `kimi_linear`, not 737.
What decays do to these gradients follows in `gluon_channel_gradients.py`. Roles are as in `gluon_delta.py`, without keys.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

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
    of_values,
    product_of,
    store_half,
)
from kernels.toolchains.gluon import SWIZZLED, after


@gluon.jit
def _load(descs, stages, ITEMS: gl.constexpr, CHUNKS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    tiles, full, free = stages
    stage, phase = 0, 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        chunk, n = item // N, item % N  # chunk of all rows
        state = ((chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS) * WIDTH
        for half in range(HALVES):
            mbarrier.wait(free.index(stage), phase ^ 1)
            load_half(descs, tiles, stage, full.index(stage), chunk * C, n, state, half)
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _store_square(ptr, x, tile, index):
    """Stores a matrix of pairs of an array [..., 64, 64]."""
    tile.store(x.to(tile.dtype))
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
    where = (index * C + rows).to(gl.int64)[:, None] * C + columns[None, :]
    gl.store(ptr + where, tile.load(WIDE))


@gluon.jit
def _multiply(inputs, outputs, stages, hands, B: gl.constexpr, T: gl.constexpr, CHUNKS: gl.constexpr, N: gl.constexpr,
              STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """WHICH of the two halves of the key dim a warpgroup has. The first has the gradients of pairs, the second those of A."""
    beta_ptr, runs_ptr = inputs
    d_pairs_ptr, d_reads_ptr, d_leaves_ptr, d_whole_ptr, d_solved_ptr, d_keeps_ptr, d_beta_ptr, dv_ptr = outputs
    tiles, full, free = stages
    mine = hands.index(WHICH)
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    rows = gl.arange(0, 16, gl.SliceLayout(1, WIDE))
    stage, phase = 0, 0
    for item in range(gl.program_id(0), B * CHUNKS * N, gl.num_programs(0)):
        chunk, n = item // N, item % N
        index = (chunk // CHUNKS * N + n) * CHUNKS + chunk % CHUNKS
        at = index * C  # [B, N, T]: chunks have 64 tokens
        runs, padded = runs_ptr, False
        if runs_ptr is not None:
            runs = runs_ptr + chunk * C
            padded = gl.max(gl.where(gl.load(runs + gl.arange(0, C, gl.SliceLayout(1, SQUARE))) < 0, 1, 0), axis=0) > 0
        d_reads, d_leaves, d_keeps, pairs = zeros, zeros, zeros, zeros
        none = gl.zeros([16], gl.float32, rows.type.layout)
        upper, lower, passed = none, none, (none, none, none, none)
        # How many halves there are is known at run time only: else addresses of all tiles would be registers.
        for half in range(HALVES * gl.num_programs(1)):
            first = stage * TILES
            mbarrier.wait(full.index(stage), phase)
            if runs_ptr is not None:
                if padded:
                    clear(tiles, first, runs, C, 1, False)
                    clear(tiles, first + 3, runs, C, 1, False)
                    fence_async_shared()
            d_out, written, du = tiles.index(first), tiles.index(first + 1), tiles.index(first + 2)
            state, d_state = tiles.index(first + 4 + WHICH), tiles.index(first + 6 + WHICH)
            d_reads = product_of(d_out, state.permute((1, 0)), d_reads, half > 0)
            d_leaves = product_of(written, d_state.permute((1, 0)), d_leaves, half > 0)
            d_keeps = product_of(du, state.permute((1, 0)), d_keeps, half > 0)
            pairs = product_of(d_out if WHICH == 0 else du, written.permute((1, 0)), pairs, half > 0)
            both = ()
            for i in gl.static_range(4):
                x, y = state.slice(16 * i, 16, 0).load(WIDE), d_state.slice(16 * i, 16, 0).load(WIDE)
                both = both + (passed[i] + gl.sum(x.to(gl.float32) * y.to(gl.float32), axis=1),)
            passed = both
            value, column = tiles.index(first + 3), n * WIDTH + half * C
            upper = of_values(
                du, value, beta_ptr + at, dv_ptr, chunk * C, column, upper, C, 32 * WHICH, N * WIDTH, False
            )
            lower = of_values(
                du, value, beta_ptr + at, dv_ptr, chunk * C, column, lower, C, 32 * WHICH + 16, N * WIDTH, False
            )
            d_reads, d_leaves, d_keeps, pairs = warpgroup_mma_wait(0, (d_reads, d_leaves, d_keeps, pairs))
            mbarrier.arrive(free.index(stage))
            stage, phase = after(stage, phase, STAGES)
        rows = again(rows)
        gl.store(d_beta_ptr + at + 32 * WHICH + rows, upper)
        gl.store(d_beta_ptr + at + 32 * WHICH + 16 + rows, lower)
        for i in gl.static_range(4):
            gl.store(d_whole_ptr + index * WIDTH + WHICH * C + 16 * i + rows, passed[i])
        column = n * WIDTH + WHICH * C
        store_half(d_reads_ptr, d_reads, mine, chunk * C, column, C, N * WIDTH, False)
        store_half(d_leaves_ptr, d_leaves, mine, chunk * C, column, C, N * WIDTH, False)
        store_half(d_keeps_ptr, d_keeps, mine, chunk * C, column, C, N * WIDTH, False)
        _store_square(d_pairs_ptr if WHICH == 0 else d_solved_ptr, pairs, mine, index)


@gluon.jit
def channel_products_kernel(
    d_out_desc,  # [B * T, N * 128] in blocks of 64 by 64, as all that follow
    written_desc,
    du_desc,
    v_desc,
    states_desc,  # [B * N * CHUNKS * 128, 128]: before each chunk
    d_states_desc,  # of the states after each chunk
    beta_ptr,  # [B, N, T]
    runs_ptr,  # [B, T] int32 as in `layout.Layout`, or None
    d_pairs_ptr,  # as `channel_states_kernel` writes them
    d_reads_ptr,
    d_leaves_ptr,
    d_whole_ptr,
    d_solved_ptr,  # as `channel_written_kernel` does
    d_keeps_ptr,
    d_beta_ptr,
    dv_ptr,
    B: gl.constexpr,
    T: gl.constexpr,  # a multiple of 64
    CHUNKS: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,  # registers per thread of the second warpgroup; the first gets the rest
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = v_desc.dtype
    tiles = gl.allocate_shared_memory(dtype, [STAGES * TILES, C, C], SWIZZLED)
    hands = gl.allocate_shared_memory(dtype, [2, C, C], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    descs = d_out_desc, written_desc, du_desc, v_desc, states_desc, d_states_desc
    inputs = beta_ptr, runs_ptr
    outputs = d_pairs_ptr, d_reads_ptr, d_leaves_ptr, d_whole_ptr, d_solved_ptr, d_keeps_ptr, d_beta_ptr, dv_ptr
    stages = tiles, full, free
    gl.warp_specialize(
        [
            (_multiply, (inputs, outputs, stages, hands, B, T, CHUNKS, N, STAGES, 0)),
            (_multiply, (inputs, outputs, stages, hands, B, T, CHUNKS, N, STAGES, 1)),
            (_load, (descs, stages, B * CHUNKS * N, CHUNKS, N, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
