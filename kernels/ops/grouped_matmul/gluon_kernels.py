"""Gluon kernels of grouped_matmul for Hopper: one warp loads, two warpgroups multiply.

They are the plain products of `triton_kernels.py`, over the same map of tiles. A program has a multiprocessor to itself and takes
one tile after another. Its warp that loads fills a ring of stages through TMA, and is ahead of the others by as many stages as
there are, across the ends of tiles. Each warpgroup that multiplies has half of a tile's rows and all of its columns: so one of them
writes its result while the other one still keeps the matrix units busy.
"""

# Gluon declares tensors where its compiler takes constants and integers too: shapes and offsets of descriptors, arguments.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Of a block of 16-bit entries in shared memory, as both TMA and the matrix units read it. Rows are of 64 entries or more.
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


# -- what both kernels do ----------------------------------------------------------------------------------------------


@gluon.jit
def _sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """Returns the stage after this one, and its phase: how often the ring has been gone round, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """Returns the stage before this one. (A name that holds it would have to be carried by a loop, and one that begins as
    another name of `stage` is not: the compiler takes it for one value.)"""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _multiply(acc, a_tiles, b_tiles, full, free, stage, phase, steps, WHICH: gl.constexpr, COLUMNS: gl.constexpr,
              A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Adds so many steps to a tile's sums; a stage is given back when the product after its own has been begun."""
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a, b = a_tiles.index(2 * stage + WHICH), b_tiles.index(stage)
        if A_TURNED:
            a = a.permute((1, 0))
        if B_TURNED:
            b = b.slice(0, COLUMNS, 0).permute((1, 0))
        else:
            b = b.slice(0, COLUMNS, 1)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        mbarrier.arrive(free.index(_before(stage, STAGES)), pred=k > 0)
        stage, phase = _after(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(free.index(_before(stage, STAGES)), pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def _parts(x, PARTS: gl.constexpr):
    """Returns the columns of sums in so many parts. A thread has entries of each, so nothing moves."""
    if PARTS == 1:
        return (x,)
    else:
        ROWS: gl.constexpr = x.shape[0]
        HALF: gl.constexpr = x.shape[1] // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        left, right = x.reshape((ROWS, 2, HALF)).permute(0, 2, 1).split()
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        return _parts(left, PARTS // 2) + _parts(right, PARTS // 2)


@gluon.jit
def _hand_over(acc, buffers, filled, drained, handed, WHICH: gl.constexpr):
    """Gives sums to the warp that writes them, 64 columns at a time through shared memory; returns how many it has had."""
    BUFFERS: gl.constexpr = buffers.shape[0] // 2
    PARTS: gl.constexpr = acc.shape[1] // 64
    parts = _parts(acc, PARTS)
    for i in gl.static_range(PARTS):
        at = WHICH * BUFFERS + handed % BUFFERS
        mbarrier.wait(drained.index(at), (handed // BUFFERS & 1) ^ 1)
        buffers.index(at).store(parts[i].to(buffers.dtype))
        mbarrier.arrive(filled.index(at))
        handed += 1
    return handed


@gluon.jit
def _write(buffers, filled, drained, handed, out_ptr, row, end, column, columns, N: gl.constexpr, WHICH: gl.constexpr):
    """Writes the rows before `end` of a tile of so many columns, whose first row is `row`, to a matrix of N columns."""
    BUFFERS: gl.constexpr = buffers.shape[0] // 2
    ROWS: gl.constexpr = buffers.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))
    inside = gl.arange(0, 64, gl.SliceLayout(0, layout))
    lanes = rows[:, None] * N + inside[None, :]
    for first in range(column, column + columns, 64):
        at = WHICH * BUFFERS + handed % BUFFERS
        mbarrier.wait(filled.index(at), handed // BUFFERS & 1)
        # 16 rows are what a warp has in its registers at a time.
        buffer = buffers.index(at).reinterpret(shape=[ROWS // 16, 16, 64], layout=SWIZZLED)
        for i in range(ROWS // 16):
            top = row + 16 * i
            mask = (rows < end - top)[:, None] & (inside < N - first)[None, :]
            gl.store(out_ptr + (top.to(gl.int64) * N + first) + lanes, buffer.index(i).load(layout), mask=mask)
        mbarrier.arrive(drained.index(at))
        handed += 1
    return handed


@gluon.jit
def _take(turn_ptr, slots, told, read, turn):
    """Returns the next tile from the queue, for the warp that loads, which tells it to the others."""
    tile = gl.num_programs(0) + gl.atomic_add(turn_ptr, 1, sem="relaxed")
    mbarrier.wait(read.index(turn % 2), (turn // 2 & 1) ^ 1)
    slots.index(turn % 2).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile)
    mbarrier.arrive(told.index(turn % 2))
    return tile


@gluon.jit
def _hear(slots, told, read, turn):
    """Returns that tile, for those that multiply."""
    mbarrier.wait(told.index(turn % 2), turn // 2 & 1)
    tile = gl.max(slots.index(turn % 2).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    mbarrier.arrive(read.index(turn % 2))
    return tile


# -- rows by the matrix of their group ---------------------------------------------------------------------------------


@gluon.jit
def _tile_of(tile, tiles_m, tiles_ptr, BOUND: gl.constexpr, TILES_N: gl.constexpr, BAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns a tile's matrix, first row, end of its group and first column. Bands of row tiles go over the columns."""
    band = tile // (BAND * TILES_N)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * TILES_N)
    which = band * BAND + inside % height
    column = inside // height * BLOCK_N
    expert = gl.load(tiles_ptr + which)
    row = gl.load(tiles_ptr + BOUND + which)
    end = gl.load(tiles_ptr + 2 * BOUND + which)
    return expert, row, end, column


@gluon.jit
def _load_products(a_desc, b_desc, tiles_ptr, bounds_ptr, turn_ptr, a_tiles, b_tiles, full, free, slots, told, read,
                   K: gl.constexpr, N: gl.constexpr, E: gl.constexpr, BOUND: gl.constexpr, TRANSPOSED: gl.constexpr,
                   QUEUE: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
                   BLOCK_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, stage, phase = gl.program_id(0), 0, 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _tile_of(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        if QUEUE:
            tile = _take(turn_ptr, slots, told, read, turn)
            turn += 1
        else:
            tile += gl.num_programs(0)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(a_desc, [row, k], arrived, a_tiles.index(2 * stage))
            tma.async_load(a_desc, [row + ROWS, k], arrived, a_tiles.index(2 * stage + 1))
            if TRANSPOSED:
                tma.async_load(b_desc, [expert * N + column, k], arrived, b_tiles.index(stage))
            else:
                tma.async_load(b_desc, [expert * K + k, column], arrived, b_tiles.index(stage))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _make_products(out_ptr, tiles_ptr, bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read, buffers, filled, drained,
                   K: gl.constexpr, N: gl.constexpr, E: gl.constexpr, BOUND: gl.constexpr, TRANSPOSED: gl.constexpr,
                   QUEUE: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
                   BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # The last tile of a row may have half of the columns.
    HALF: gl.constexpr = 0 < N % BLOCK_N and N % BLOCK_N <= BLOCK_N // 2
    STEPS: gl.constexpr = K // BLOCK_K
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, stage, phase, handed = gl.program_id(0), 0, 0, 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _tile_of(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        if row + WHICH * ROWS >= end:  # all of the rows are the other one's
            for _ in range(STEPS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(free.index(stage))
                stage, phase = _after(stage, phase, STAGES)
        elif HALF and N - column <= BLOCK_N // 2:
            left, stage, phase = _multiply(_sums(ROWS, BLOCK_N // 2), a_tiles, b_tiles, full, free, stage, phase, STEPS,
                                           WHICH, BLOCK_N // 2, False, TRANSPOSED, STAGES)  # fmt: skip
            handed = _hand_over(left, buffers, filled, drained, handed, WHICH)
        else:
            acc, stage, phase = _multiply(_sums(ROWS, BLOCK_N), a_tiles, b_tiles, full, free, stage, phase, STEPS,
                                          WHICH, BLOCK_N, False, TRANSPOSED, STAGES)  # fmt: skip
            handed = _hand_over(acc, buffers, filled, drained, handed, WHICH)
        if QUEUE:
            tile = _hear(slots, told, read, turn)
            turn += 1
        else:
            tile += gl.num_programs(0)
    # Rows of no group.
    empty = gl.load(bounds_ptr + 2 * E + 1) - tiles_m
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zeros = gl.zeros([ROWS, BLOCK_N], out_ptr.dtype.element_ty, layout)
    for tile in range(gl.program_id(0), empty * TILES_N, gl.num_programs(0)):
        which = tiles_m + tile // TILES_N
        rows = gl.load(tiles_ptr + BOUND + which) + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = tile % TILES_N * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        mask = (rows < gl.load(tiles_ptr + 2 * BOUND + which))[:, None] & (columns < N)[None, :]
        gl.store(out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :], zeros, mask=mask)


@gluon.jit
def _write_products(out_ptr, tiles_ptr, bounds_ptr, slots, told, read, buffers, filled, drained, N: gl.constexpr,
                    E: gl.constexpr, BOUND: gl.constexpr, QUEUE: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr,
                    BLOCK_N: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: gl.constexpr = 0 < N % BLOCK_N and N % BLOCK_N <= BLOCK_N // 2
    tiles_m = gl.load(bounds_ptr + 2 * E)
    tile, turn, handed = gl.program_id(0), 0, 0
    while tile < tiles_m * TILES_N:
        expert, row, end, column = _tile_of(tile, tiles_m, tiles_ptr, BOUND, TILES_N, BAND, BLOCK_N)
        row += WHICH * ROWS
        if row < end:
            columns = gl.where(HALF and N - column <= BLOCK_N // 2, BLOCK_N // 2, BLOCK_N)
            handed = _write(buffers, filled, drained, handed, out_ptr, row, end, column, columns, N, WHICH)
        if QUEUE:
            tile = _hear(slots, told, read, turn)
            turn += 1
        else:
            tile += gl.num_programs(0)


@gluon.jit
def _ring(STAGES: gl.constexpr, dtype: gl.constexpr, A_SHAPE: gl.constexpr, B_SHAPE: gl.constexpr, ROWS: gl.constexpr,
          BUFFERS: gl.constexpr):  # fmt: skip
    """Returns the stages of a (of each, one for either warpgroup) and of b, their barriers, two places for a tile that is told,
    with theirs, and the buffers that results go through."""
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, A_SHAPE[0], A_SHAPE[1]], SWIZZLED)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, B_SHAPE[0], B_SHAPE[1]], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    buffers = gl.allocate_shared_memory(dtype, [2 * BUFFERS, ROWS, 64], SWIZZLED)
    filled = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(read.index(i), count=4)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(drained.index(i), count=1)
    return a_tiles, b_tiles, full, free, slots, told, read, buffers, filled, drained


@gluon.jit
def specialised_matmul_kernel(
    a_desc,  # [M, K] in blocks [ROWS, BLOCK_K]
    b_desc,  # [E * K, N] in blocks [BLOCK_K, BLOCK_N], or transposed [E * N, K] in blocks [BLOCK_N, BLOCK_K]
    tiles_ptr,
    bounds_ptr,
    turn_ptr,
    out_ptr,  # [M, N]
    K: gl.constexpr,
    N: gl.constexpr,
    E: gl.constexpr,
    BOUND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    QUEUE: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,  # of either warpgroup
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # of either warpgroup
    REGISTERS: gl.constexpr,  # of a thread that multiplies, and of one that loads
):
    a_tiles, b_tiles, full, free, slots, told, read, buffers, filled, drained = _ring(
        STAGES, a_desc.dtype, a_desc.block_type.shape, b_desc.block_type.shape, ROWS, BUFFERS
    )
    gl.warp_specialize(
        [
            (_make_products, (out_ptr, tiles_ptr, bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read,
                              buffers, filled, drained, K, N, E, BOUND, TRANSPOSED, QUEUE, BAND,
                              ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_make_products, (out_ptr, tiles_ptr, bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read,
                              buffers, filled, drained, K, N, E, BOUND, TRANSPOSED, QUEUE, BAND,
                              ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load_products, (a_desc, b_desc, tiles_ptr, bounds_ptr, turn_ptr, a_tiles, b_tiles, full, free, slots, told,
                              read, K, N, E, BOUND, TRANSPOSED, QUEUE, BAND, ROWS, BLOCK_N, BLOCK_K, STAGES)),
            (_write_products, (out_ptr, tiles_ptr, bounds_ptr, slots, told, read, buffers, filled,
                               drained, N, E, BOUND, QUEUE, BAND, ROWS, BLOCK_N, 0)),
            (_write_products, (out_ptr, tiles_ptr, bounds_ptr, slots, told, read, buffers, filled,
                               drained, N, E, BOUND, QUEUE, BAND, ROWS, BLOCK_N, 1)),
        ],
        [4, 1, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1], REGISTERS[1]],
    )  # fmt: skip


# -- the gradient of the matrices --------------------------------------------------------------------------------------


@gluon.jit
def _matrix_tile_of(tile, bounds_ptr, E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr,
                    BLOCK_P: gl.constexpr, BLOCK_Q: gl.constexpr):  # fmt: skip
    """Returns a tile's matrix, first row and column in it, and the rows of its group; matrices of the longest groups first."""
    expert = gl.load(bounds_ptr + 2 * E + 2 + tile // (TILES_P * TILES_Q))
    inside = tile % (TILES_P * TILES_Q)
    band = inside // (BAND * TILES_Q)
    height = gl.minimum(TILES_P - band * BAND, BAND)
    p = (band * BAND + inside % (BAND * TILES_Q) % height) * BLOCK_P
    q = inside % (BAND * TILES_Q) // height * BLOCK_Q
    return expert, p, q, gl.load(bounds_ptr + expert), gl.load(bounds_ptr + E + expert)


@gluon.jit
def _load_contractions(a_desc, b_desc, bounds_ptr, turn_ptr, a_tiles, b_tiles, full, free, slots, told, read,
                       E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr,
                       ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr):  # fmt: skip
    tile, turn, stage, phase = gl.program_id(0), 0, 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _matrix_tile_of(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, 2 * ROWS, BLOCK_Q)
        tile = _take(turn_ptr, slots, told, read, turn)
        turn += 1
        for row in range(begin, end, BLOCK_K):
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(a_desc, [row, p], arrived, a_tiles.index(2 * stage))
            tma.async_load(a_desc, [row, p + ROWS], arrived, a_tiles.index(2 * stage + 1))
            tma.async_load(b_desc, [row, q], arrived, b_tiles.index(stage))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _keep_rows(rows, count):
    """Makes the rows of a block in shared memory after the first ones zero."""
    WIDTH: gl.constexpr = rows.shape[1]
    LANES: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    inner = gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout)) < count
    x = rows.load(layout)
    rows.store(gl.where(inner[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _multiply_rows(acc, a, b, count, COLUMNS: gl.constexpr):
    """Adds the products of the first rows of a step, which are fewer than all: those that follow are of the next group, or of
    none, and may hold anything. Either warpgroup does the same to b, which is right whoever is first."""
    for i in gl.static_range(a.shape[0] // 16):
        if count > 16 * i:
            a_rows, b_rows = a.slice(16 * i, 16, 0), b.slice(16 * i, 16, 0)
            if count < 16 * (i + 1):
                _keep_rows(a_rows, count - 16 * i)
                _keep_rows(b_rows, count - 16 * i)
                fence_async_shared()
            acc = warpgroup_mma(a_rows.permute((1, 0)), b_rows.slice(0, COLUMNS, 1), acc)
    return acc


@gluon.jit
def _contract(a_tiles, b_tiles, full, free, stage, phase, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
              BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    acc, stage, phase = _multiply(_sums(ROWS, COLUMNS), a_tiles, b_tiles, full, free, stage, phase, rows // BLOCK_K,
                                  WHICH, COLUMNS, True, False, STAGES)  # fmt: skip
    if rows % BLOCK_K > 0:
        mbarrier.wait(full.index(stage), phase)
        acc = _multiply_rows(acc, a_tiles.index(2 * stage + WHICH), b_tiles.index(stage), rows % BLOCK_K, COLUMNS)
        fence_async_shared()
        mbarrier.arrive(free.index(stage))
        stage, phase = _after(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _make_contractions(bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read, buffers, filled, drained,
                       E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, Q: gl.constexpr,
                       BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = 0 < Q % BLOCK_Q and Q % BLOCK_Q <= BLOCK_Q // 2
    tile, turn, stage, phase, handed = gl.program_id(0), 0, 0, 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _matrix_tile_of(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, 2 * ROWS, BLOCK_Q)
        if HALF and Q - q <= BLOCK_Q // 2:
            left, stage, phase = _contract(a_tiles, b_tiles, full, free, stage, phase, end - begin, ROWS, BLOCK_Q // 2,
                                           BLOCK_K, STAGES, WHICH)  # fmt: skip
            handed = _hand_over(left, buffers, filled, drained, handed, WHICH)
        else:
            acc, stage, phase = _contract(a_tiles, b_tiles, full, free, stage, phase, end - begin, ROWS, BLOCK_Q,
                                          BLOCK_K, STAGES, WHICH)  # fmt: skip
            handed = _hand_over(acc, buffers, filled, drained, handed, WHICH)
        tile = _hear(slots, told, read, turn)
        turn += 1


@gluon.jit
def _write_contractions(out_ptr, bounds_ptr, slots, told, read, buffers, filled, drained, P: gl.constexpr, Q: gl.constexpr,
                        E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr,
                        ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = 0 < Q % BLOCK_Q and Q % BLOCK_Q <= BLOCK_Q // 2
    tile, turn, handed = gl.program_id(0), 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _matrix_tile_of(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, 2 * ROWS, BLOCK_Q)
        out = out_ptr + expert.to(gl.int64) * (P * Q)
        columns = gl.where(HALF and Q - q <= BLOCK_Q // 2, BLOCK_Q // 2, BLOCK_Q)
        handed = _write(buffers, filled, drained, handed, out, p + WHICH * ROWS, P, q, columns, Q, WHICH)
        tile = _hear(slots, told, read, turn)
        turn += 1


@gluon.jit
def specialised_contraction_kernel(
    a_desc,  # [M, P] in blocks [BLOCK_K, ROWS]
    b_desc,  # [M, Q] in blocks [BLOCK_K, BLOCK_Q]
    bounds_ptr,
    turn_ptr,
    out_ptr,  # [E, P, Q]
    P: gl.constexpr,
    Q: gl.constexpr,
    E: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # of either warpgroup
    REGISTERS: gl.constexpr,
):
    TILES_P: gl.constexpr = (P + 2 * ROWS - 1) // (2 * ROWS)
    TILES_Q: gl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    a_tiles, b_tiles, full, free, slots, told, read, buffers, filled, drained = _ring(
        STAGES, a_desc.dtype, a_desc.block_type.shape, b_desc.block_type.shape, ROWS, BUFFERS
    )
    gl.warp_specialize(
        [
            (_make_contractions, (bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read, buffers,
                                  filled, drained, E, TILES_P, TILES_Q, Q, BAND, ROWS, BLOCK_Q, BLOCK_K, STAGES,
                                  0)),
            (_make_contractions, (bounds_ptr, a_tiles, b_tiles, full, free, slots, told, read, buffers,
                                  filled, drained, E, TILES_P, TILES_Q, Q, BAND, ROWS, BLOCK_Q, BLOCK_K, STAGES,
                                  1)),
            (_load_contractions, (a_desc, b_desc, bounds_ptr, turn_ptr, a_tiles, b_tiles, full, free, slots, told, read,
                                  E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q, BLOCK_K, STAGES)),
            (_write_contractions, (out_ptr, bounds_ptr, slots, told, read, buffers, filled,
                                   drained, P, Q, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q, 0)),
            (_write_contractions, (out_ptr, bounds_ptr, slots, told, read, buffers, filled,
                                   drained, P, Q, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q, 1)),
        ],
        [4, 1, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1], REGISTERS[1]],
    )  # fmt: skip
