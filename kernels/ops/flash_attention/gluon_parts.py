"""What the Gluon kernels of flash attention have in common: tiles of heads in shared memory, and which pairs attend.

A `ring` is (tiles, a barrier of each for "is full", and one for "is free").
"""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.ops.flash_attention import triton_parts

# Of a tile in shared memory, [tokens, width], as TMA and the matrix units have it; and of the block of an array that it is.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
TILE_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BLOCK_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))
ROW = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))

# The same source as in Triton's kernels: what a pair means is said once.
visible = gluon.jit(triton_parts.visible.fn)
tanh = gluon.jit(triton_parts.tanh.fn)
positions_of = gluon.jit(triton_parts.positions_of.fn)
segments_of = gluon.jit(triton_parts.segments_of.fn)


@gluon.jit
def make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, READERS: gl.constexpr):
    """Returns the ring of tiles [ROWS, WIDTH] that so many partitions read."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return tiles, full, free


@gluon.jit
def load_tile(desc, batch, row, head, ring, stage, phase):
    """Loads the rows of a head from `row` on into a stage, once it is free; rows past the last are zeros."""
    tiles, full, free = ring
    ROWS: gl.constexpr = desc.block_type.shape[1]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), desc.nbytes_per_cta)
    block = tiles.index(stage).reinterpret(shape=[1, ROWS, 1, WIDTH], layout=BLOCK)
    tma.async_load(desc, [batch, row, head, 0], full.index(stage), block)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Returns the stage after this one, and its phase: how often the ring has been gone round, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
