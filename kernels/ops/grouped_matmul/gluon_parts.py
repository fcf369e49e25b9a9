"""Parts shared by the Gluon kernels of grouped_matmul: a ring of stages, and what is handed over of sums.

A `ring` is (stages of a, one for each consumer warpgroup; stages of b; and per stage a barrier for "is full" and one
for "is free"). `hands` are those of engines/matmul/gluon_sums.py. `WHICH` of the two consumer warpgroups is 0 or 1.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.engines.matmul.gluon_sums import hand_part, parts_of, slabs_of
from kernels.ops.grouped_matmul.triton_kernels import activated, slope
from kernels.toolchains.gluon import SWIZZLED, after

GATHERING = gl.constexpr(2)  # warps that load where rows are gathered by index; TMA needs one


@gluon.jit
def make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, A: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr,
              GATHERING: gl.constexpr):  # fmt: skip
    """GATHERING: threads that copy rows into a stage, each of which arrives when its copies have; 0 if TMA alone copies."""
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, A[0], A[1]], SWIZZLED)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, B0, B1], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + GATHERING)
        mbarrier.init(free.index(i), count=2)
    return a_tiles, b_tiles, full, free


@gluon.jit
def indices(rows_ptr, first, end, tile):
    """Returns what is in an array of indices for the rows `first`, ... before `end` of a tile; -1 for the rest."""
    COLUMNS: gl.constexpr = tile.shape[1]
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    rows = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    return gl.load(rows_ptr + rows, mask=rows < end, other=-1)


@gluon.jit
def gather(tile, x_ptr, index, column, WIDTH: gl.constexpr):
    """Starts copying columns of the rows `index` of x [*, WIDTH] into a tile; zeros for a negative index. By instructions: on
    Hopper, TMA has no list of rows."""
    COLUMNS: gl.constexpr = tile.shape[1]
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    # Opaque, so that the compiler holds indices around a loop over columns, and not addresses, which do not fit.
    index = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    mask = (index >= 0)[:, None] & (columns < WIDTH)[None, :]
    async_copy.async_load(tile, x_ptr + (index.to(gl.int64)[:, None] * WIDTH + columns[None, :]), mask=mask)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """Returns the previous stage. (Computed, because a loop may not carry a second name that starts as an alias of
    `stage`: the compiler would treat the two as one value, and not carry it.)"""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def skip(ring, stage, phase, steps, STAGES: gl.constexpr):
    """Frees stages for a warpgroup that has no rows in a tile."""
    a_tiles, b_tiles, full, free = ring
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(free.index(stage))
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def multiply(acc, ring, stage, phase, steps, WHICH: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
             GATHERED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Adds steps to the sums of a tile's first columns; a stage is freed once the following step has started."""
    a_tiles, b_tiles, full, free = ring
    COLUMNS: gl.constexpr = acc.shape[1]
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:  # rows that instructions copied
            fence_async_shared()
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
        stage, phase = after(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(free.index(_before(stage, STAGES)), pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def hand_over(acc, hands, handed, WHICH: gl.constexpr):
    """Hands sums to the storing warp; returns the number of parts handed over so far."""
    PARTS: gl.constexpr = acc.shape[1] // 64
    parts = parts_of(acc, PARTS)
    for i in gl.static_range(PARTS):
        handed = hand_part((parts[i],), hands, handed, WHICH)
    return handed


@gluon.jit
def _with_bias(part, bias_ptr, column, N: gl.constexpr):
    if bias_ptr is None:
        return part
    else:
        columns = column + gl.arange(0, 64, gl.SliceLayout(0, part.type.layout))
        bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        return part + bias.to(gl.float32)[None, :]


@gluon.jit
def hand_over_activated(acc, ring, stage, phase, hands, handed, bias_ptr, column, N: gl.constexpr, GATED: gl.constexpr,
                        ACTIVATION: gl.constexpr, COTANGENT: gl.constexpr, KEEP: gl.constexpr,
                        STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Hands over the activation of sums and their bias; for a gate and an up projection, multiplied by the up
    projection. With KEEP, after what is activated: the gate and the up projection in turn.

    Given the cotangent of the result, 64 columns in each of the following stages instead of a, hands over the cotangents of
    the sums: those of the gate and of the up projection in turn."""
    a_tiles, b_tiles, full, free = ring
    SIDES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = acc.shape[1] // 64 // SIDES
    parts = parts_of(acc, SIDES * PARTS)
    for i in gl.static_range(PARTS):
        z = _with_bias(parts[i], bias_ptr, column + 64 * i, N)
        if COTANGENT:
            mbarrier.wait(full.index(stage), phase)
            z_slabs, gates, ups = slabs_of(z), (), ()
            if GATED:
                up = _with_bias(parts[PARTS + i], None if bias_ptr is None else bias_ptr + N, column + 64 * i, N)
                up_slabs = slabs_of(up)
            for j in gl.static_range(len(z_slabs)):
                d = a_tiles.index(2 * stage + WHICH).slice(64 * j, 64, 0).load(z.type.layout).to(gl.float32)
                if GATED:
                    gates += ((d * up_slabs[j] * slope(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
                    ups += ((d * activated(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
                else:
                    gates += ((d * slope(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
            mbarrier.arrive(free.index(stage))
            stage, phase = after(stage, phase, STAGES)
            handed = hand_part(gates, hands, handed, WHICH)
            if GATED:
                handed = hand_part(ups, hands, handed, WHICH)
        else:
            # What is kept goes first: held longer, it would not fit beside the activation.
            if KEEP:
                handed = hand_part((z,), hands, handed, WHICH)
            y = z
            if GATED:
                y = _with_bias(parts[PARTS + i], None if bias_ptr is None else bias_ptr + N, column + 64 * i, N)
                if KEEP:
                    handed = hand_part((y,), hands, handed, WHICH)
                y *= activated(z, ACTIVATION)
            else:
                y = activated(z, ACTIVATION)
            handed = hand_part((y,), hands, handed, WHICH)
    return handed, stage, phase


@gluon.jit
def has_half(N: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns whether the last columns of a matrix take at most half of a tile, so that only half is multiplied."""
    return 0 < N % BLOCK_N and N % BLOCK_N <= BLOCK_N // 2
