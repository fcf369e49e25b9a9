"""What Gluon kernels have in common, whatever they compute: tiles in shared memory, stages that go round, and a queue of tiles.

Programs that stay take a tile each, the one of their own number first, and then the next that nobody has. A `queue` is (two
places for the number of a tile, and barriers of each for "is told" and "is read"): one warp takes, and tells the others.
"""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unsupported-operation]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Of a block of 16-bit entries in shared memory, as TMA and the matrix units read it. Rows are of 64 entries or more.
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Returns the stage after this one, and its phase: how often the ring has been gone round, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def make_queue(HEARING: gl.constexpr):
    """Returns a queue that so many groups of warps hear of."""
    tiles = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(read.index(i), count=HEARING)
    return tiles, told, read


@gluon.jit
def take(queue, turn_ptr, turn):
    """Returns the next tile, which the warp that takes it tells the others. `turn_ptr` is of a counter that was zero before."""
    tiles, told, read = queue
    tile = gl.num_programs(0) + gl.atomic_add(turn_ptr, 1, sem="relaxed")
    mbarrier.wait(read.index(turn % 2), (turn // 2 & 1) ^ 1)
    tiles.index(turn % 2).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile)
    mbarrier.arrive(told.index(turn % 2))
    return tile


@gluon.jit
def hear(queue, turn):
    """Returns the tile that was told at a turn."""
    tiles, told, read = queue
    mbarrier.wait(told.index(turn % 2), turn // 2 & 1)
    tile = gl.max(tiles.index(turn % 2).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    mbarrier.arrive(read.index(turn % 2))
    return tile
