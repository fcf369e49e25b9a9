"""Parts shared by Gluon kernels: layouts of tiles in shared memory, rings of stages, and a tile scheduler.

A persistent program starts with the tile of its own number, and then takes the next free one. A `queue` is (two slots
for the number of a tile, and per slot barriers for "is published" and "is read"): the producer warp takes tiles and
publishes them to the consumers.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unsupported-operation]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Layout of a block of 16-bit entries in shared memory, as TMA and the tensor cores read it. Rows have at least 64
# entries.
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage and its phase: the number of completed rounds of the ring, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def make_tile_queue(CONSUMERS: gl.constexpr):
    """Allocates a queue for CONSUMERS warpgroups."""
    tiles = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    published = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(published.index(i), count=1)
        mbarrier.init(read.index(i), count=CONSUMERS)
    return tiles, published, read


@gluon.jit
def claim_tile(queue, turn_ptr, turn):
    """Takes the next tile from the counter at `turn_ptr`, which starts at zero, publishes it to the consumers, and
    returns it."""
    tiles, published, read = queue
    tile = gl.num_programs(0) + gl.atomic_add(turn_ptr, 1, sem="relaxed")
    mbarrier.wait(read.index(turn % 2), (turn // 2 & 1) ^ 1)
    tiles.index(turn % 2).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + tile)
    mbarrier.arrive(published.index(turn % 2))
    return tile


@gluon.jit
def next_tile(queue, turn):
    """Returns the tile that was published in a turn."""
    tiles, published, read = queue
    mbarrier.wait(published.index(turn % 2), turn // 2 & 1)
    tile = gl.max(tiles.index(turn % 2).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    mbarrier.arrive(read.index(turn % 2))
    return tile
