"""A warp-specialized Gluon kernel of quantized_matmul for Hopper: words are unpacked in the registers from which its tensor
cores read weights.

A program multiplies a tile of columns of the weights by a tile of rows of x, over a part of D. It computes the transposed
product, weights^T times x^T: then the weights are the operand that may lie in registers. Its warps unpack one half of their
columns while the tensor cores multiply the other. A few more warps feed them, as far ahead as there are stages: one starts the
copies by TMA, and one or two put x into the order of the codes in the registers of a warp.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.ops.quantized_matmul.gluon_weights import in_order, is_small, layout_of_sums, unpacked
from kernels.toolchains.gluon import SWIZZLED, after

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 16, 2))
EXPONENTS = gl.constexpr(gl.NVMMASharedLayout(0, 8, 2))


@gluon.jit
def _make_ring(w_desc, s_desc, P: gl.constexpr, dtype: gl.constexpr):
    """Allocates tiles of words, scales, biases and x, and barriers: x has been copied; a stage is full; it is free."""
    COUNT: gl.constexpr = w_desc.block_type.shape[0]
    CHUNKS: gl.constexpr = s_desc.block_type.shape[0]
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [P.STAGES, COUNT, P.BLOCK_F], w_desc.layout)
    s_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES, CHUNKS, P.BLOCK_F], s_desc.layout)
    b_tiles = s_tiles
    if P.MODE == "affine":
        b_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES, CHUNKS, P.BLOCK_F], s_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [P.STAGES, P.BLOCK_M, P.BLOCK_D], SWIZZLED)
    there = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.STAGES
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(full.index(i), count=2)  # words have been copied; x is in order
        mbarrier.init(free.index(i), count=P.TEAMS)
    return w_tiles, s_tiles, b_tiles, x_tiles, there, full, free


@gluon.jit
def _place(P: gl.constexpr):
    """Returns a program's row of x, its tile of columns, its part of D, and the first step of that and their number."""
    ROWS: gl.constexpr = (P.M + P.BLOCK_M - 1) // P.BLOCK_M
    EACH: gl.constexpr = P.STEPS // P.SPLITS
    REST: gl.constexpr = P.STEPS % P.SPLITS
    program = gl.program_id(0)
    part = program // ROWS % P.SPLITS
    # In this form the compiler knows that there is a step: after a loop that may have none it lets no products overlap.
    count = EACH
    if REST > 0:
        count += (part < REST).to(gl.int32)
    first = part * EACH + gl.minimum(part, REST)
    return program % ROWS * P.BLOCK_M, program // (ROWS * P.SPLITS), part, first, count


@gluon.jit
def _copy(x_desc, w_desc, s_desc, b_desc, ring, P: gl.constexpr):
    """Starts the copies of each step, of x and of words, scales and biases, as soon as its stage is free."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    BYTES: gl.constexpr = w_desc.nbytes_per_cta + s_desc.nbytes_per_cta * (2 if P.MODE == "affine" else 1)
    row, tile, part, first, count = _place(P)
    column = tile * P.BLOCK_F
    stage, phase = 0, 1
    for step in range(first, first + count):
        mbarrier.wait(free.index(stage), phase)
        arrived = full.index(stage)
        mbarrier.expect(arrived, BYTES)
        tma.async_load(w_desc, [step * w_desc.block_type.shape[0], column], arrived, w_tiles.index(stage))
        mbarrier.expect(there.index(stage), x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [row, step * P.BLOCK_D], there.index(stage), x_tiles.index(stage))
        tma.async_load(s_desc, [step * P.BLOCK_D // P.GROUP, column], arrived, s_tiles.index(stage))
        if P.MODE == "affine":
            tma.async_load(b_desc, [step * P.BLOCK_D // P.GROUP, column], arrived, b_tiles.index(stage))
        stage, phase = after(stage, phase, P.STAGES)


@gluon.constexpr_function
def _layout_of_x(rows, P):
    """Returns a layout in which a thread has 32 columns, of those that are put in another order, or fewer of few rows."""
    each = min(32, rows * P.BLOCK_D // (32 * P.ORDERING))
    # Eight threads side by side have as many rows, whose swizzled places are in other banks.
    return gl.BlockedLayout([1, each], [32 * each // P.BLOCK_D, P.BLOCK_D // each], [P.ORDERING, 1], [0, 1])


@gluon.jit
def _order(ring, P: gl.constexpr):
    """Puts x into the order of the codes, as soon as it is there."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    row, tile, part, first, count = _place(P)
    # As many rows at once as a thread has registers for.
    ROWS: gl.constexpr = min(P.BLOCK_M, 2048 * P.ORDERING // P.BLOCK_D)
    layout: gl.constexpr = _layout_of_x(ROWS, P)
    stage, phase = 0, 0
    for _ in range(count):
        mbarrier.wait(there.index(stage), phase)
        for i in gl.static_range(P.BLOCK_M // ROWS):
            rows = x_tiles.index(stage).slice(i * ROWS, ROWS, 0)
            rows.store(in_order(rows.load(layout), P))
        fence_async_shared()
        mbarrier.arrive(full.index(stage))
        stage, phase = after(stage, phase, P.STAGES)


@gluon.jit
def _store(out_ptr, acc, row, column, part, P: gl.constexpr):
    layout: gl.constexpr = layout_of_sums(P)
    columns = column + gl.arange(0, P.COLUMNS, gl.SliceLayout(1, layout))
    rows = row + gl.arange(0, P.BLOCK_M, gl.SliceLayout(0, layout))
    out = out_ptr + (part * P.M + rows)[None, :] * P.F + columns[:, None]
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(columns < P.F)[:, None] & (rows < P.M)[None, :])


@gluon.jit
def _multiply(out_ptr, ring, TEAM: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    row, tile, part, first, count = _place(P)
    zero = gl.num_programs(1) >> 1  # there is one
    layout: gl.constexpr = layout_of_sums(P)
    left = gl.zeros([P.COLUMNS, P.BLOCK_M], gl.float32, layout)
    right = warpgroup_mma_init(gl.zeros([P.COLUMNS, P.BLOCK_M], gl.float32, layout))
    stage, phase, last = 0, 0, 0
    for step in range(count):
        mbarrier.wait(full.index(stage), phase)
        x = x_tiles.index(stage).permute((1, 0))
        weights = unpacked(ring, stage, zero, 2 * TEAM, P, dtype)
        left = warpgroup_mma(weights, x, left, is_async=True)
        right = warpgroup_mma_wait(1, (right,))
        mbarrier.arrive(free.index(last), pred=step > 0)
        weights = unpacked(ring, stage, zero, 2 * TEAM + 1, P, dtype)
        right = warpgroup_mma(weights, x, right, is_async=True)
        left = warpgroup_mma_wait(1, (left,))
        last = stage
        stage, phase = after(stage, phase, P.STAGES)
    right = warpgroup_mma_wait(0, (right,))
    if is_small(P.MODE, dtype):
        left, right = left * 2.0**60, right * 2.0**60
    column = tile * P.BLOCK_F + 2 * TEAM * P.COLUMNS
    _store(out_ptr, left, row, column, part, P)
    _store(out_ptr, right, row, column + P.COLUMNS, part, P)


@gluon.jit
def unpacked_matmul_kernel(
    x_desc,  # [M, D] in blocks [BLOCK_M, BLOCK_D]
    w_desc,  # [D * BITS / 32, F] in blocks [BLOCK_D * BITS / 32, BLOCK_F]
    s_desc,  # [D / GROUP, F] in blocks of BLOCK_D / GROUP rows, or 1
    b_desc,  # likewise, or None
    out_ptr,  # [SPLITS, M, F]
    P: gl.constexpr,  # `Product`
    MULTIPLYING: gl.constexpr,  # registers per thread of the second team
    FEEDING: gl.constexpr,  # registers per thread that does not multiply
):
    dtype: gl.constexpr = x_desc.dtype
    ring = _make_ring(w_desc, s_desc, P, dtype)
    if P.TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, 0, P, dtype)),
                (_order, (ring, P)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, P)),
            ],
            [P.ORDERING, 1],
            [FEEDING, FEEDING],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, 0, P, dtype)),
                (_multiply, (out_ptr, ring, 1, P, dtype)),
                (_order, (ring, P)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, P)),
            ],
            [P.WARPS, P.ORDERING, 1],
            [MULTIPLYING, FEEDING, FEEDING],
        )
