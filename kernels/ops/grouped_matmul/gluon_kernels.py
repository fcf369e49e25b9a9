"""Warp-specialized Gluon kernels of grouped_matmul for Hopper: warps that load, warps that multiply, and warps that
store.

They compute the same products as `triton_kernels.py`, except those of 8-bit weights, over the same map of tiles. A
program has a multiprocessor to itself and takes tiles from a queue. One producer warp loads through TMA into a ring of
stages, and runs ahead of the others by the depth of the ring, across tiles. Two consumer warpgroups multiply: each has
half of a tile's rows and all of its columns, and hands its sums to its own storing warp. So the tensor cores continue
with the next tile while the last one is stored, and while one warpgroup finishes its tile the other one has them to
itself. `gluon_parts.py` describes what is passed between them; the gradient of the matrices is in `gluon_contractions.py`.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.engines.matmul.gluon_sums import make_hands, write
from kernels.ops.grouped_matmul.gluon_parts import (
    GATHERING,
    gather,
    hand_over_activated,
    has_half,
    indices,
    make_ring,
    multiply,
    skip,
    sums,
)
from kernels.toolchains.gluon import SWIZZLED, after, claim_tile, make_tile_queue, next_tile

MATRIX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # of a block of one matrix among [E, K, WIDTH]

# -- rows by the matrix of their group ---------------------------------------------------------------------------------


@gluon.jit
def _product_tile(tile, tiles_m, tiles_ptr, BOUND: gl.constexpr, TILES_N: gl.constexpr, BAND: gl.constexpr,
                  BLOCK_N: gl.constexpr):  # fmt: skip
    """Returns a tile's matrix, first row, end of its group and first column. Bands of row tiles sweep the columns."""
    band = tile // (BAND * TILES_N)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * TILES_N)
    which = band * BAND + inside % height
    expert = gl.load(tiles_ptr + which)
    row = gl.load(tiles_ptr + BOUND + which)
    return expert, row, gl.load(tiles_ptr + 2 * BOUND + which), inside // height * BLOCK_N


@gluon.jit
def _columns(column, N: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """Returns how many columns of a tile are multiplied: half of them if that suffices. With a gate and an up
    projection all: they are one block of a stage, with the up projection in its second half."""
    HALF: gl.constexpr = has_half(N, BLOCK_N) and not GATED
    return gl.where(HALF and N - column <= BLOCK_N // 2, BLOCK_N // 2, BLOCK_N)


@gluon.jit
def _load_products(a_desc, a_ptr, rows_ptr, b_desc, d_desc, tiles_ptr, bounds_ptr, turn_ptr, ring, queue,
                   K: gl.constexpr, N: gl.constexpr, E: gl.constexpr, BOUND: gl.constexpr, GATED: gl.constexpr,
                   TRANSPOSED: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
                   BLOCK_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SIDES: gl.constexpr = 2 if GATED else 1
    SIDE: gl.constexpr = b_desc.block_type.shape[-2:]
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, stage, phase = gl.program_id(0), 0, 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _product_tile(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        tile = claim_tile(queue, turn_ptr, turn)
        turn += 1
        if rows_ptr is not None:  # read once for a tile: behind copies, the loads of each step would wait
            upper = indices(rows_ptr, row, end, a_tiles.index(0))
            lower = indices(rows_ptr, row + ROWS, end, a_tiles.index(0))
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            if rows_ptr is None:
                mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + SIDES * b_desc.nbytes_per_cta)
                tma.async_load(a_desc, [row, k], arrived, a_tiles.index(2 * stage))
                tma.async_load(a_desc, [row + ROWS, k], arrived, a_tiles.index(2 * stage + 1))
            else:
                mbarrier.expect(arrived, SIDES * b_desc.nbytes_per_cta)
            sides = b_tiles.index(stage).reinterpret(shape=[SIDES, SIDE[0], SIDE[1]], layout=SWIZZLED)
            for i in gl.static_range(SIDES):
                if TRANSPOSED:
                    tma.async_load(b_desc, [(SIDES * expert + i) * N + column, k], arrived, sides.index(i))
                else:
                    side = sides.index(i).reinterpret(shape=[1, SIDE[0], SIDE[1]], layout=MATRIX)
                    tma.async_load(b_desc, [expert, k, i * N + column], arrived, side)
            if rows_ptr is not None:
                gather(a_tiles.index(2 * stage), a_ptr, upper, k, K)
                gather(a_tiles.index(2 * stage + 1), a_ptr, lower, k, K)
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            stage, phase = after(stage, phase, STAGES)
        if d_desc is not None:
            for first in range(column, column + _columns(column, N, BLOCK_N, GATED), 64):
                mbarrier.wait(free.index(stage), phase ^ 1)
                arrived = full.index(stage)
                mbarrier.expect(arrived, 2 * d_desc.nbytes_per_cta)
                tma.async_load(d_desc, [row, first], arrived, a_tiles.index(2 * stage))
                tma.async_load(d_desc, [row + ROWS, first], arrived, a_tiles.index(2 * stage + 1))
                if rows_ptr is not None:
                    async_copy.mbarrier_arrive(arrived, increment_count=False)
                stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _multiply_products(bias_ptr, out_ptr, tiles_ptr, bounds_ptr, ring, queue, hands, K: gl.constexpr, N: gl.constexpr,
                       E: gl.constexpr, BOUND: gl.constexpr, GATED: gl.constexpr, TRANSPOSED: gl.constexpr,
                       ACTIVATION: gl.constexpr, COTANGENT: gl.constexpr, KEEP: gl.constexpr, GATHERED: gl.constexpr,
                       BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SIDES: gl.constexpr = 2 if GATED else 1
    HALF: gl.constexpr = has_half(N, BLOCK_N) and not GATED
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, stage, phase, handed = gl.program_id(0), 0, 0, 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _product_tile(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        bias = None if bias_ptr is None else bias_ptr + expert * (SIDES * N)
        if row + WHICH * ROWS >= end:
            rest = _columns(column, N, BLOCK_N, GATED) // 64 if COTANGENT else 0
            stage, phase = skip(ring, stage, phase, STEPS + rest, STAGES)
        elif HALF and N - column <= BLOCK_N // 2:
            half, stage, phase = multiply(sums(ROWS, BLOCK_N // 2), ring, stage, phase, STEPS, WHICH, False, TRANSPOSED,
                                          GATHERED, STAGES)  # fmt: skip
            handed, stage, phase = hand_over_activated(half, ring, stage, phase, hands, handed, bias, column, N, GATED,
                                                       ACTIVATION, COTANGENT, KEEP, STAGES, WHICH)  # fmt: skip
        else:
            acc, stage, phase = multiply(sums(ROWS, SIDES * BLOCK_N), ring, stage, phase, STEPS, WHICH, False, TRANSPOSED,
                                         GATHERED, STAGES)  # fmt: skip
            handed, stage, phase = hand_over_activated(acc, ring, stage, phase, hands, handed, bias, column, N, GATED,
                                                       ACTIVATION, COTANGENT, KEEP, STAGES, WHICH)  # fmt: skip
        tile = next_tile(queue, turn)
        turn += 1
    # Rows without a group.
    WRITTEN: gl.constexpr = SIDES * N if COTANGENT else N
    TILES_WRITTEN: gl.constexpr = (WRITTEN + BLOCK_N - 1) // BLOCK_N
    empty = gl.load(bounds_ptr + 2 * E + 1) - tiles_m
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zeros = gl.zeros([ROWS, BLOCK_N], out_ptr.dtype.element_ty, layout)
    for tile in range(gl.program_id(0), empty * TILES_WRITTEN, gl.num_programs(0)):
        which = tiles_m + tile // TILES_WRITTEN
        rows = gl.load(tiles_ptr + BOUND + which) + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = tile % TILES_WRITTEN * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        mask = (rows < gl.load(tiles_ptr + 2 * BOUND + which))[:, None] & (columns < WRITTEN)[None, :]
        gl.store(out_ptr + rows.to(gl.int64)[:, None] * WRITTEN + columns[None, :], zeros, mask=mask)


@gluon.jit
def _write_products(out_ptr, kept_ptr, tiles_ptr, bounds_ptr, queue, hands, N: gl.constexpr, E: gl.constexpr,
                    BOUND: gl.constexpr, GATED: gl.constexpr, COTANGENT: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr,
                    BLOCK_N: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, handed = gl.program_id(0), 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _product_tile(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        row += WHICH * ROWS
        if row < end:
            columns = _columns(column, N, BLOCK_N, GATED)
            if kept_ptr is None:
                handed = write(
                    hands, handed, out_ptr, row, end, column, columns, N, 2 if GATED and COTANGENT else 1, WHICH
                )
            else:
                for first in range(column, column + columns, 64):
                    handed = write(hands, handed, kept_ptr, row, end, first, 64, N, 2 if GATED else 1, WHICH, True)
                    handed = write(hands, handed, out_ptr, row, end, first, 64, N, 1, WHICH, True)
        tile = next_tile(queue, turn)
        turn += 1


@gluon.jit
def warp_specialized_matmul_kernel(
    a_desc,  # [M, K] in blocks [ROWS, BLOCK_K]; None if its rows are gathered
    a_ptr,  # [*, K], and the index there of each row [M], which may be negative, of zeros; or None
    rows_ptr,
    # [E, K, WIDTH] in blocks [1, BLOCK_K, BLOCK_N], or transposed [E * WIDTH, K] in blocks [BLOCK_N, BLOCK_K]; WIDTH is N, or
    # 2 N of a gate and an up projection. Past K, TMA fills with zeros, never with the next matrix.
    b_desc,
    d_desc,  # [M, N] in blocks [ROWS, 64]: the cotangent of the result, or None
    bias_ptr,  # [E, WIDTH] or None
    tiles_ptr,  # as in `grouped_matmul_kernel`, for 2 * ROWS rows
    bounds_ptr,
    turn_ptr,
    out_ptr,  # [M, N]; with a cotangent, that of the products, [M, WIDTH]
    kept_ptr,  # [M, WIDTH]: the products too, for a backward; or None
    K: gl.constexpr,
    N: gl.constexpr,
    E: gl.constexpr,
    BOUND: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,  # rows per warpgroup
    BLOCK_N: gl.constexpr,  # columns of the result
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # per warpgroup
    MULTIPLYING: gl.constexpr,  # registers per multiplying thread
    OTHERS: gl.constexpr,  # registers per other thread
):
    COTANGENT: gl.constexpr = d_desc is not None
    GATHERED: gl.constexpr = rows_ptr is not None
    KEEP: gl.constexpr = kept_ptr is not None
    LOADING: gl.constexpr = GATHERING if GATHERED else 1
    # A gate's block of a matrix and that of its up projection are adjacent, and one block to the tensor cores.
    COLUMNS: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ring = make_ring(STAGES, b_desc.dtype, (ROWS, BLOCK_K), COLUMNS if TRANSPOSED else BLOCK_K,
                     BLOCK_K if TRANSPOSED else COLUMNS, 32 * GATHERING if GATHERED else 0)  # fmt: skip
    queue, hands = make_tile_queue(4), make_hands(BUFFERS, b_desc.dtype, ROWS)
    gl.warp_specialize(
        [
            (_multiply_products, (bias_ptr, out_ptr, tiles_ptr, bounds_ptr, ring, queue, hands, K, N, E, BOUND, GATED,
                                  TRANSPOSED, ACTIVATION, COTANGENT, KEEP, GATHERED, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_multiply_products, (bias_ptr, out_ptr, tiles_ptr, bounds_ptr, ring, queue, hands, K, N, E, BOUND, GATED,
                                  TRANSPOSED, ACTIVATION, COTANGENT, KEEP, GATHERED, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load_products, (a_desc, a_ptr, rows_ptr, b_desc, d_desc, tiles_ptr, bounds_ptr, turn_ptr, ring, queue, K, N, E,
                              BOUND, GATED, TRANSPOSED, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES)),
            (_write_products, (out_ptr, kept_ptr, tiles_ptr, bounds_ptr, queue, hands, N, E, BOUND, GATED, COTANGENT, BAND,
                               ROWS, BLOCK_N, 0)),
            (_write_products, (out_ptr, kept_ptr, tiles_ptr, bounds_ptr, queue, hands, N, E, BOUND, GATED, COTANGENT, BAND,
                               ROWS, BLOCK_N, 1)),
        ],
        [4, LOADING, 1, 1],
        [MULTIPLYING, OTHERS, OTHERS, OTHERS],
    )  # fmt: skip
