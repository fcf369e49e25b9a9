"""How warps of a Gluon kernel that multiply hand their sums to warps that store them, 64 columns at a time.

`hands` are (buffers for 64 columns of sums, those of the first warpgroup and then of the second, and barriers for "is filled"
and "is drained"). `WHICH` of the two multiplying warpgroups is 0 or 1.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.toolchains.gluon import SWIZZLED

NOT = gl.constexpr(False)


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
def parts_of(x, PARTS: gl.constexpr):
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
        return parts_of(left, PARTS // 2) + parts_of(right, PARTS // 2)


@gluon.jit
def slabs_of(x):
    """Splits the rows of sums into blocks of 64. A thread has entries of each."""
    ROWS: gl.constexpr = x.shape[0]
    if ROWS == 64:
        return (x,)
    else:
        upper, lower = x.reshape((2, ROWS // 2, x.shape[1])).permute(1, 2, 0).split()
        upper = gl.convert_layout(upper, x.type.layout, assert_trivial=True)
        lower = gl.convert_layout(lower, x.type.layout, assert_trivial=True)
        return slabs_of(upper) + slabs_of(lower)


@gluon.jit
def hand_part(slabs, hands, handed, WHICH: gl.constexpr):
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
def write(hands, handed, out_ptr, row, end, column, columns, N: gl.constexpr, SIDES: gl.constexpr, WHICH: gl.constexpr,
          COUNTED: gl.constexpr = NOT):  # fmt: skip
    """Stores the rows before `end` of a tile whose first row is `row` to a matrix of N columns; or of SIDES times N
    columns, with one such tile for every N. COUNTED: in a loop that ends with the rows, which the compiler does not unroll,
    where a warp stores to two matrices and has not the registers."""
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
        for i in range(gl.cdiv(gl.minimum(end - row, ROWS), 16) if COUNTED else ROWS // 16):
            top = row + 16 * i
            mask = (rows < end - top)[:, None] & (inside < N - first)[None, :]
            out = out_ptr + (top.to(gl.int64) * (SIDES * N) + (first + side * N)) + entries
            gl.store(out, buffer.index(i).load(layout), mask=mask)
        mbarrier.arrive(drained.index(slot))
        handed += 1
    return handed
