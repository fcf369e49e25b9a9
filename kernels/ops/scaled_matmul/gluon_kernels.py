"""Warp-specialized Gluon kernels of scaled_matmul for Hopper: products of 8-bit rows on its tensor cores.

A program has a multiprocessor to itself. One warp loads blocks of 128 entries of D through TMA into a ring of stages, two
warpgroups multiply half of a tile's rows each, and a warp for each of them stores (`engines/matmul/gluon_sums.py`), so that the
tensor cores continue with the next tile meanwhile. Where blocks have scales one more warp loads these into the ring.

The tensor cores' own sums of 8-bit products have about 14 bits. So a step's products are summed by themselves, scaled if blocks
of 128 entries have scales, and added in float32: 64 rows at a time, while the tensor cores multiply for the other warpgroup.
With `fast_accumulation` the sums of all of D stay in the tensor cores.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.engines.matmul.gluon_sums import hand_part, make_hands, parts_of, write
from kernels.toolchains.gluon import after

# A block of 8-bit entries in shared memory: rows of 128.
NARROW = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _make_ring(STAGES: gl.constexpr, a_dtype: gl.constexpr, b_dtype: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
               BLOCK_K: gl.constexpr, LOADERS: gl.constexpr):  # fmt: skip
    a_tiles = gl.allocate_shared_memory(a_dtype, [2 * STAGES, ROWS, BLOCK_K], NARROW)
    b_tiles = gl.allocate_shared_memory(b_dtype, [STAGES, BLOCK_N, BLOCK_K], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=LOADERS)
        mbarrier.init(free.index(i), count=2)
    return a_tiles, b_tiles, full, free


@gluon.jit
def _rows_of_tiles(tiles_ptr, M: gl.constexpr, BLOCK_M: gl.constexpr, BOUND: gl.constexpr):
    """Returns how many rows of tiles there are: those of M, or as many as groups of rows have."""
    if tiles_ptr is None:
        return (M + BLOCK_M - 1) // BLOCK_M
    else:
        return gl.load(tiles_ptr + 3 * BOUND)


@gluon.jit
def _place(tile, tiles_ptr, M: gl.constexpr, N: gl.constexpr, BOUND: gl.constexpr, BAND: gl.constexpr, BLOCK_M: gl.constexpr,
           BLOCK_N: gl.constexpr):  # fmt: skip
    """Returns a tile's first row and column, its matrix, and the end of its rows. Bands of row tiles sweep the columns, so that
    both are read from the L2 cache."""
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tile // (BAND * TILES_N)
    height = gl.minimum(_rows_of_tiles(tiles_ptr, M, BLOCK_M, BOUND) - band * BAND, BAND)
    inside = tile % (BAND * TILES_N)
    which, column = band * BAND + inside % height, inside // height * BLOCK_N
    if tiles_ptr is None:
        return which * BLOCK_M, column, 0, M
    else:
        matrix, row = gl.load(tiles_ptr + which), gl.load(tiles_ptr + BOUND + which)
        return row, column, matrix, gl.load(tiles_ptr + 2 * BOUND + which)


@gluon.jit
def _load(a_desc, b_desc, tiles_ptr, ring, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BOUND: gl.constexpr,
          BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    stage, phase = 0, 0
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = _rows_of_tiles(tiles_ptr, M, 2 * ROWS, BOUND) * TILES_N
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, matrix, end = _place(tile, tiles_ptr, M, N, BOUND, BAND, 2 * ROWS, BLOCK_N)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(a_desc, [row, k], arrived, a_tiles.index(2 * stage))
            tma.async_load(a_desc, [row + ROWS, k], arrived, a_tiles.index(2 * stage + 1))
            tma.async_load(b_desc, [matrix * N + column, k], arrived, b_tiles.index(stage))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _sums(ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    return gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32]))


@gluon.jit
def _of_rows(part, a_scale_ptr, b_scale_ptr, row, column, matrix, M: gl.constexpr, N: gl.constexpr, A_ROWS: gl.constexpr,
             B_ROWS: gl.constexpr):  # fmt: skip
    """Returns sums scaled, where each row of a and of b has one scale, or all have."""
    rows = row + gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
    columns = column + gl.arange(0, 64, gl.SliceLayout(0, part.type.layout))
    of_rows = gl.load(a_scale_ptr + (rows if A_ROWS else gl.zeros_like(rows)), mask=rows < M, other=0.0)
    of_columns = gl.load(
        b_scale_ptr + (matrix * N + columns if B_ROWS else gl.zeros_like(columns)), mask=columns < N, other=0.0
    )
    return part * of_rows[:, None] * of_columns[None, :]


# -- sums in the tensor cores --------------------------------------------------------------------------------------------


@gluon.jit
def _multiply(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, hands, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
              BOUND: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr,
              BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS: gl.constexpr = BLOCK_N // 64
    stage, phase, handed = 0, 0, 0
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = _rows_of_tiles(tiles_ptr, M, 2 * ROWS, BOUND) * TILES_N
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, matrix, end = _place(tile, tiles_ptr, M, N, BOUND, BAND, 2 * ROWS, BLOCK_N)
        acc = _sums(ROWS, BLOCK_N)
        for k in range(STEPS):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                a_tiles.index(2 * stage + WHICH), b_tiles.index(stage).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=k > 0)
            stage, phase = after(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        parts = parts_of(acc, PARTS)
        for i in gl.static_range(PARTS):
            part = _of_rows(
                parts[i], a_scale_ptr, b_scale_ptr, row + WHICH * ROWS, column + 64 * i, matrix, M, N, A_ROWS, B_ROWS
            )
            handed = hand_part((part,), hands, handed, WHICH)


# -- sums in float32 ------------------------------------------------------------------------------------------------------


@gluon.jit
def _make_scales(STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, B_ROWS: gl.constexpr):
    """Allocates room for the scales of a stage: of the rows of a tile and, if each row of b has its own, of its columns."""
    of_rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], FLAT)
    if B_ROWS:
        return of_rows, gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], FLAT)
    else:
        return of_rows, None


@gluon.jit
def _load_scales(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
                 BOUND: gl.constexpr, B_ROWS: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
                 BLOCK_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fills the scales of each stage: those of rows, multiplied by that of 128 columns where they share one."""
    a_tiles, b_tiles, full, free = ring
    of_rows, of_columns = scales
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS_N: gl.constexpr = N // 128
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage, phase = 0, 0
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = _rows_of_tiles(tiles_ptr, M, 2 * ROWS, BOUND) * TILES_N
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, matrix, end = _place(tile, tiles_ptr, M, N, BOUND, BAND, 2 * ROWS, BLOCK_N)
        rows = row + gl.arange(0, ROWS, flat)
        columns = column + gl.arange(0, BLOCK_N, flat)
        for k in range(STEPS):
            # Loaded before the stage is free, so that they arrive while it is waited for.
            upper = gl.load(a_scale_ptr + k * M + rows, mask=rows < M, other=0.0)
            lower = gl.load(a_scale_ptr + k * M + ROWS + rows, mask=rows + ROWS < M, other=0.0)
            if B_ROWS:
                of_b = gl.load(b_scale_ptr + k * N + columns, mask=columns < N, other=0.0)
            else:
                of_b = gl.load(b_scale_ptr + (matrix * BLOCKS_N + column // 128) * STEPS + k)
                upper, lower = upper * of_b, lower * of_b
            mbarrier.wait(free.index(stage), phase ^ 1)
            of_rows.index(2 * stage).store(upper)
            of_rows.index(2 * stage + 1).store(lower)
            if B_ROWS:
                of_columns.index(stage).store(of_b)
            mbarrier.arrive(full.index(stage))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _read_scales(scales, stage, BLOCKS: gl.constexpr, B_ROWS: gl.constexpr, layout: gl.constexpr, WHICH: gl.constexpr):
    """Returns the scales of a stage: of each 64 rows, and of columns. Read before products begin, they are there at the end."""
    of_rows, of_columns = (None, None), None
    if BLOCKS:
        rows = scales[0].index(2 * stage + WHICH)
        upper = rows.slice(0, 64, 0).load(gl.SliceLayout(1, layout))
        if rows.shape[0] == 128:
            of_rows = upper, rows.slice(64, 64, 0).load(gl.SliceLayout(1, layout))
        else:
            of_rows = upper, None
        if B_ROWS:
            of_columns = scales[1].index(stage).load(gl.SliceLayout(0, layout))
    return of_rows, of_columns


@gluon.jit
def _added(acc, p, of_rows, of_columns, BLOCKS: gl.constexpr, B_ROWS: gl.constexpr):
    if not BLOCKS:
        return acc + p
    elif B_ROWS:
        return acc + p * of_rows[:, None] * of_columns[None, :]
    else:
        return acc + p * of_rows[:, None]


@gluon.jit
def _multiply_by_steps(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, hands, M: gl.constexpr, N: gl.constexpr,
                       K: gl.constexpr, BOUND: gl.constexpr, BLOCKS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
                       BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TALL: gl.constexpr = ROWS == 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    stage, phase, handed = 0, 0, 0
    # The sums of a step replace those of the last one in the same registers, after these were added: if products did not name
    # their old value, the assembler would begin them earlier, in registers that a tall tile does not have. So whether they
    # are added to it is known at run time only: never, as there is one program in the second dim.
    never = gl.num_programs(1) > 1
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = _rows_of_tiles(tiles_ptr, M, 2 * ROWS, BOUND) * TILES_N
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, matrix, end = _place(tile, tiles_ptr, M, N, BOUND, BAND, 2 * ROWS, BLOCK_N)
        row += WHICH * ROWS
        upper, lower, p = _sums(64, BLOCK_N), _sums(64, BLOCK_N), _sums(64, BLOCK_N)
        for _ in range(STEPS):
            mbarrier.wait(full.index(stage), phase)
            a, b = a_tiles.index(2 * stage + WHICH), b_tiles.index(stage).permute((1, 0))
            of_rows, of_columns = _read_scales(scales, stage, BLOCKS, B_ROWS, layout, WHICH)
            p = warpgroup_mma(a.slice(0, 64, 0), b, p, use_acc=never, is_async=True)
            p = warpgroup_mma_wait(0, (p,))
            if TALL:
                upper = _added(upper, p, of_rows[0], of_columns, BLOCKS, B_ROWS)
                p = warpgroup_mma(a.slice(64, 64, 0), b, p, use_acc=never, is_async=True)
                p = warpgroup_mma_wait(0, (p,))
                mbarrier.arrive(free.index(stage))
                lower = _added(lower, p, of_rows[1], of_columns, BLOCKS, B_ROWS)
            else:
                mbarrier.arrive(free.index(stage))
                upper = _added(upper, p, of_rows[0], of_columns, BLOCKS, B_ROWS)
            stage, phase = after(stage, phase, STAGES)
        PARTS: gl.constexpr = BLOCK_N // 64
        uppers, lowers = parts_of(upper, PARTS), parts_of(lower, PARTS)
        for i in gl.static_range(PARTS):
            slabs = (uppers[i], lowers[i]) if TALL else (uppers[i],)
            if not BLOCKS:
                first = _of_rows(
                    uppers[i], a_scale_ptr, b_scale_ptr, row, column + 64 * i, matrix, M, N, A_ROWS, B_ROWS
                )
                slabs = (first,)
                if TALL:
                    second = _of_rows(
                        lowers[i], a_scale_ptr, b_scale_ptr, row + 64, column + 64 * i, matrix, M, N, A_ROWS, B_ROWS
                    )
                    slabs = (first, second)
            handed = hand_part(slabs, hands, handed, WHICH)


@gluon.jit
def _consume(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, hands, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
             BOUND: gl.constexpr, FAST: gl.constexpr, BLOCKS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
             BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    if FAST:
        _multiply(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, hands, M, N, K, BOUND, A_ROWS, B_ROWS, BAND, ROWS, BLOCK_N,
                  BLOCK_K, STAGES, WHICH)  # fmt: skip
    else:
        _multiply_by_steps(a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, hands, M, N, K, BOUND, BLOCKS, A_ROWS, B_ROWS,
                           BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, WHICH)  # fmt: skip


@gluon.jit
def _store(out_ptr, tiles_ptr, hands, M: gl.constexpr, N: gl.constexpr, BOUND: gl.constexpr, BAND: gl.constexpr,
           ROWS: gl.constexpr, BLOCK_N: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    handed = 0
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = _rows_of_tiles(tiles_ptr, M, 2 * ROWS, BOUND) * TILES_N
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, matrix, end = _place(tile, tiles_ptr, M, N, BOUND, BAND, 2 * ROWS, BLOCK_N)
        handed = write(hands, handed, out_ptr, row + WHICH * ROWS, end, column, BLOCK_N, N, 1, WHICH)
    if tiles_ptr is not None:  # rows past the last group
        layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
        entries = gl.arange(0, 256, layout)
        zeros = gl.zeros([256], out_ptr.dtype.element_ty, layout)
        first = gl.load(tiles_ptr + 3 * BOUND + 1).to(gl.int64) * N
        for at in range(first + (2 * gl.program_id(0) + WHICH) * 256, M * N, 2 * gl.num_programs(0) * 256):
            gl.store(out_ptr + at + entries, zeros, mask=at + entries < M * N)


@gluon.jit
def warp_specialized_scaled_kernel(
    a_desc,  # [M, K] in blocks [ROWS, BLOCK_K]
    b_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    a_scale_ptr,  # [M] or one; of blocks [K / 128, M]
    b_scale_ptr,  # [N] or one; of blocks [K / 128, N] or, for 128 rows of b together, [N / 128, K / 128]; of each matrix
    tiles_ptr,  # None; or of groups of rows matrices, first rows and ends of BOUND tiles, their number, and the end of all
    out_ptr,  # [M, N]
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    FAST: gl.constexpr,  # whether sums of all of K stay in the tensor cores
    BLOCKS: gl.constexpr,  # whether there is a scale for each 128 entries of K
    A_ROWS: gl.constexpr,  # whether there is one for each row of a
    B_ROWS: gl.constexpr,
    BOUND: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,  # rows per warpgroup
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # per warpgroup
    MULTIPLYING: gl.constexpr,  # registers per multiplying thread
    OTHERS: gl.constexpr,  # registers per other thread
):
    ring = _make_ring(STAGES, a_desc.dtype, b_desc.dtype, ROWS, BLOCK_N, BLOCK_K, 2 if BLOCKS else 1)
    hands = make_hands(BUFFERS, out_ptr.dtype.element_ty, ROWS)
    if BLOCKS:
        scales = _make_scales(STAGES, ROWS, BLOCK_N, B_ROWS)
        gl.warp_specialize(
            [
                (_consume, (a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, hands, M, N, K, BOUND, FAST, BLOCKS, A_ROWS,
                            B_ROWS, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
                (_consume, (a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, hands, M, N, K, BOUND, FAST, BLOCKS, A_ROWS,
                            B_ROWS, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
                (_load, (a_desc, b_desc, tiles_ptr, ring, M, N, K, BOUND, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES)),
                (_load_scales, (a_scale_ptr, b_scale_ptr, tiles_ptr, ring, scales, M, N, K, BOUND, B_ROWS, BAND, ROWS, BLOCK_N,
                                BLOCK_K, STAGES)),
                (_store, (out_ptr, tiles_ptr, hands, M, N, BOUND, BAND, ROWS, BLOCK_N, 0)),
                (_store, (out_ptr, tiles_ptr, hands, M, N, BOUND, BAND, ROWS, BLOCK_N, 1)),
            ],
            [4, 1, 1, 1, 1],
            [MULTIPLYING, OTHERS, OTHERS, OTHERS, OTHERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (a_scale_ptr, b_scale_ptr, tiles_ptr, ring, (), hands, M, N, K, BOUND, FAST, BLOCKS, A_ROWS, B_ROWS,
                            BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
                (_consume, (a_scale_ptr, b_scale_ptr, tiles_ptr, ring, (), hands, M, N, K, BOUND, FAST, BLOCKS, A_ROWS, B_ROWS,
                            BAND, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
                (_load, (a_desc, b_desc, tiles_ptr, ring, M, N, K, BOUND, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES)),
                (_store, (out_ptr, tiles_ptr, hands, M, N, BOUND, BAND, ROWS, BLOCK_N, 0)),
                (_store, (out_ptr, tiles_ptr, hands, M, N, BOUND, BAND, ROWS, BLOCK_N, 1)),
            ],
            [4, 1, 1, 1],
            [MULTIPLYING, OTHERS, OTHERS, OTHERS],
        )  # fmt: skip
