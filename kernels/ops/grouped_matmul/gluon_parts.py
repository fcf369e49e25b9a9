"""Parts shared by the Gluon kernels of grouped_matmul: a ring of stages, and the handover of sums.

A `ring` is (stages of a, one for each consumer warpgroup; stages of b; and per stage a barrier for "is full" and one
for "is free"). `hands` are (buffers for 64 columns of sums, those of the first warpgroup and then of the second, and
barriers for "is filled" and "is drained"). `WHICH` of the two consumer warpgroups is 0 or 1.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.ops.grouped_matmul.triton_kernels import activated, slope
from kernels.toolchains.gluon import SWIZZLED, after


@gluon.jit
def make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, A: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr):
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, A[0], A[1]], SWIZZLED)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, B0, B1], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    return a_tiles, b_tiles, full, free


@gluon.jit
def make_hands(BUFFERS: gl.constexpr, dtype: gl.constexpr, ROWS: gl.constexpr):
    buffers = gl.allocate_shared_memory(dtype, [2 * BUFFERS, ROWS, 64], SWIZZLED)
    filled = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(drained.index(i), count=1)
    return buffers, filled, drained


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
              STAGES: gl.constexpr):  # fmt: skip
    """Adds steps to the sums of a tile's first columns; a stage is freed once the following step has started."""
    a_tiles, b_tiles, full, free = ring
    COLUMNS: gl.constexpr = acc.shape[1]
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
        stage, phase = after(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(free.index(_before(stage, STAGES)), pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def _parts(x, PARTS: gl.constexpr):
    """Splits the columns of sums into parts. A thread has entries of each, so nothing moves."""
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
def _slabs(x):
    """Splits the rows of sums into blocks of 64. A thread has entries of each."""
    ROWS: gl.constexpr = x.shape[0]
    if ROWS == 64:
        return (x,)
    else:
        upper, lower = x.reshape((2, ROWS // 2, x.shape[1])).permute(1, 2, 0).split()
        upper = gl.convert_layout(upper, x.type.layout, assert_trivial=True)
        lower = gl.convert_layout(lower, x.type.layout, assert_trivial=True)
        return _slabs(upper) + _slabs(lower)


@gluon.jit
def _hand_part(slabs, hands, handed, WHICH: gl.constexpr):
    buffers, filled, drained = hands
    BUFFERS: gl.constexpr = buffers.shape[0] // 2
    slot = WHICH * BUFFERS + handed % BUFFERS
    mbarrier.wait(drained.index(slot), (handed // BUFFERS & 1) ^ 1)
    ROWS: gl.constexpr = slabs[0].shape[0]
    for i in gl.static_range(len(slabs)):
        buffers.index(slot).slice(ROWS * i, ROWS, 0).store(slabs[i].to(buffers.dtype))
    mbarrier.arrive(filled.index(slot))
    return handed + 1


@gluon.jit
def hand_over(acc, hands, handed, WHICH: gl.constexpr):
    """Hands sums to the storing warp; returns the number of parts handed over so far."""
    PARTS: gl.constexpr = acc.shape[1] // 64
    parts = _parts(acc, PARTS)
    for i in gl.static_range(PARTS):
        handed = _hand_part((parts[i],), hands, handed, WHICH)
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
                        ACTIVATION: gl.constexpr, COTANGENT: gl.constexpr, STAGES: gl.constexpr,
                        WHICH: gl.constexpr):  # fmt: skip
    """Hands over the activation of sums and their bias; for a gate and an up projection, multiplied by the up
    projection.

    Given the cotangent of the result, 64 columns in each of the following stages instead of a, hands over the cotangents of
    the sums: those of the gate and of the up projection in turn."""
    a_tiles, b_tiles, full, free = ring
    SIDES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = acc.shape[1] // 64 // SIDES
    parts = _parts(acc, SIDES * PARTS)
    for i in gl.static_range(PARTS):
        z = _with_bias(parts[i], bias_ptr, column + 64 * i, N)
        if COTANGENT:
            mbarrier.wait(full.index(stage), phase)
            z_slabs, gates, ups = _slabs(z), (), ()
            if GATED:
                up = _with_bias(parts[PARTS + i], None if bias_ptr is None else bias_ptr + N, column + 64 * i, N)
                up_slabs = _slabs(up)
            for j in gl.static_range(len(z_slabs)):
                d = a_tiles.index(2 * stage + WHICH).slice(64 * j, 64, 0).load(z.type.layout).to(gl.float32)
                if GATED:
                    gates += ((d * up_slabs[j] * slope(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
                    ups += ((d * activated(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
                else:
                    gates += ((d * slope(z_slabs[j], ACTIVATION)).to(a_tiles.dtype),)
            mbarrier.arrive(free.index(stage))
            stage, phase = after(stage, phase, STAGES)
            handed = _hand_part(gates, hands, handed, WHICH)
            if GATED:
                handed = _hand_part(ups, hands, handed, WHICH)
        else:
            y = activated(z, ACTIVATION)
            if GATED:
                y *= _with_bias(parts[PARTS + i], None if bias_ptr is None else bias_ptr + N, column + 64 * i, N)
            handed = _hand_part((y,), hands, handed, WHICH)
    return handed, stage, phase


@gluon.jit
def write(hands, handed, out_ptr, row, end, column, columns, N: gl.constexpr, SIDES: gl.constexpr, WHICH: gl.constexpr):
    """Stores the rows before `end` of a tile whose first row is `row` to a matrix of N columns; or of SIDES times N
    columns, with one such tile for every N."""
    buffers, filled, drained = hands
    BUFFERS: gl.constexpr = buffers.shape[0] // 2
    ROWS: gl.constexpr = buffers.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))
    inside = gl.arange(0, 64, gl.SliceLayout(0, layout))
    entries = rows[:, None] * (SIDES * N) + inside[None, :]
    for turn in range(column, column + SIDES * columns, 64):
        first, side = turn, 0
        if SIDES == 2:
            first, side = column + (turn - column) // 128 * 64, (turn - column) // 64 % 2
        slot = WHICH * BUFFERS + handed % BUFFERS
        mbarrier.wait(filled.index(slot), handed // BUFFERS & 1)
        # A warp holds 16 rows in registers at a time.
        buffer = buffers.index(slot).reinterpret(shape=[ROWS // 16, 16, 64], layout=SWIZZLED)
        for i in range(ROWS // 16):
            top = row + 16 * i
            mask = (rows < end - top)[:, None] & (inside < N - first)[None, :]
            out = out_ptr + (top.to(gl.int64) * (SIDES * N) + (first + side * N)) + entries
            gl.store(out, buffer.index(i).load(layout), mask=mask)
        mbarrier.arrive(drained.index(slot))
        handed += 1
    return handed


@gluon.jit
def has_half(N: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns whether the last columns of a matrix take at most half of a tile, so that only half is multiplied."""
    return 0 < N % BLOCK_N and N % BLOCK_N <= BLOCK_N // 2
