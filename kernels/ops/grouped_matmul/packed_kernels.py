"""Triton kernel of a grouped matmul with packed matrices: a tile of rows of one group times columns of its matrix."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_codes import arranged, gathered, joined, offset_of, scale_of, unit_of


@triton.jit
def packed_matmul_kernel(
    x_ptr,  # [M, D]
    sums_ptr,  # [M, D / BLOCK_D]: of the entries of a step; None without biases, or where entries are unpacked one by one
    w_ptr,  # [E, PACKED, F]
    s_ptr,  # [E, D / GROUP, F]
    b_ptr,
    table_ptr,
    tiles_ptr,  # as `tile_map_kernel` writes them
    out_ptr,  # [M, F]
    D: tl.constexpr,
    F: tl.constexpr,
    BOUND: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    JOINED: tl.constexpr,  # whether words are unpacked where they lie; a step then has one scale
    STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PACKED: tl.constexpr = D * BITS // 32
    WORDS: tl.constexpr = BLOCK_D * BITS // 32
    STEPS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    which = tl.program_id(1)
    expert = tl.load(tiles_ptr + which)
    row, end = tl.load(tiles_ptr + BOUND + which), tl.load(tiles_ptr + 2 * BOUND + which)
    if row >= end:  # past the last tile
        return
    rows, cols = row + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside, here = rows < end, cols < F
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * D
    matrix = tl.maximum(expert, 0).to(tl.int64)
    w_ptr += matrix * PACKED * F
    s_ptr += matrix * (D // GROUP) * F
    if MODE == "affine":
        b_ptr += matrix * (D // GROUP) * F
    acc = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for step in tl.range(0, tl.where(expert < 0, 0, STEPS), num_stages=STAGES):  # rows of no group are zero
        d = step * BLOCK_D + tl.arange(0, BLOCK_D)
        x = tl.load(x_rows + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        if JOINED:
            word = step * WORDS + tl.arange(0, WORDS)
            words = tl.load(w_ptr + word[:, None] * F + cols[None, :], mask=here[None, :], other=0)
            of = step * BLOCK_D // GROUP * F + cols
            scale = scale_of(tl.load(s_ptr + of, mask=here, other=0), MODE)
            acc += tl.dot(arranged(x, BITS), joined(words, table_ptr, MODE, BITS, dtype)) * scale[None, :]
            if MODE == "affine":
                bias = tl.load(b_ptr + of, mask=here, other=0.0).to(tl.float32) - offset_of(MODE, BITS, dtype) * scale
                sums = tl.load(sums_ptr + rows * STEPS + step, mask=inside, other=0.0)
                acc += sums[:, None] * bias[None, :]
        else:
            mask = (d < D)[:, None] & here[None, :]
            weights = gathered(w_ptr, s_ptr, b_ptr, table_ptr, d, cols, mask, F, MODE, BITS, GROUP)
            # Past the end of D there may be no scale, and zero times anything but a number is no zero.
            acc = tl.dot(x, tl.where(mask, weights, 0.0).to(dtype), acc, input_precision="ieee")
    if JOINED:
        acc *= unit_of(MODE)
    out = out_ptr + rows.to(tl.int64)[:, None] * F + cols[None, :]
    tl.store(out, acc.to(dtype), mask=inside[:, None] & here[None, :])
