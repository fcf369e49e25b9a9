"""Triton kernels of products with quantised weights."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_codes import arranged, joined, offset_of, scale_of, unit_of


@triton.jit
def _tile(ptr, desc, row, col, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
          TMA: tl.constexpr):  # fmt: skip
    """Returns [HEIGHT, WIDTH] of a matrix [ROWS, COLUMNS] at (row, col); zeros past its end."""
    if TMA:
        tile = desc.load([row, col])
    else:
        rows, cols = row + tl.arange(0, HEIGHT), col + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (cols < COLUMNS)[None, :]
        tile = tl.load(ptr + rows.to(tl.int64)[:, None] * COLUMNS + cols[None, :], mask=mask, other=0)
    return tile


@triton.jit
def _chunk(acc, x, words, scale, bias, table_ptr, MODE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns acc plus x [BLOCK_M, BLOCK_D] times weights with one scale, and one bias, for each column."""
    values = joined(words, table_ptr, MODE, BITS, x.dtype)
    acc += tl.dot(arranged(x, BITS), values) * scale[None, :]
    if MODE == "affine":
        BLOCK_M: tl.constexpr = acc.shape[0]
        BLOCK_F: tl.constexpr = acc.shape[1]
        # The sum of x on tensor cores too: adding up what each thread holds takes longer than the rest. Each warp has it in 8
        # columns, which are some of those that it has of the result.
        sums = tl.dot(x, tl.full([x.shape[1], WIDTH], 1.0, x.dtype))
        term = sums.reshape(BLOCK_M, 1, WIDTH) * bias.reshape(1, BLOCK_F // WIDTH, WIDTH)
        acc += term.reshape(BLOCK_M, BLOCK_F)
    return acc


@triton.jit
def _halves(x, words, scale, bias):
    """Returns the first and the second half, along D, of each."""
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1] // 2
    WORDS: tl.constexpr = words.shape[0] // 2
    CHUNKS: tl.constexpr = scale.shape[0] // 2
    F: tl.constexpr = words.shape[1]
    xs = x.reshape(M, 2, D).permute(0, 2, 1).split()
    ws = words.reshape(2, WORDS, F).permute(1, 2, 0).split()
    scales = scale.reshape(2, CHUNKS, F).permute(1, 2, 0).split()
    return xs, ws, scales, bias.reshape(2, CHUNKS, F).permute(1, 2, 0).split()


@triton.jit
def _two_chunks(acc, x, words, scale, bias, table_ptr, MODE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    F: tl.constexpr = words.shape[1]
    xs, ws, scales, biases = _halves(x, words, scale, bias)
    acc = _chunk(acc, xs[0], ws[0], scales[0].reshape(F), biases[0].reshape(F), table_ptr, MODE, BITS, WIDTH)
    return _chunk(acc, xs[1], ws[1], scales[1].reshape(F), biases[1].reshape(F), table_ptr, MODE, BITS, WIDTH)


@triton.jit
def quantized_matmul_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    b_ptr,
    table_ptr,
    x_desc,  # for TMA; None if the kernel creates them
    w_desc,
    s_desc,
    b_desc,
    out_ptr,  # [SPLITS, M, F]
    M: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks of a step
    BLOCK_D: tl.constexpr,  # entries of D of a chunk
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of the sums of x: 8 for each warp
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = BLOCK_D * BITS // 32
    PACKED: tl.constexpr = D * BITS // 32
    if TMA and w_desc is None:
        x_desc = tl.make_tensor_descriptor(x_ptr, [M, D], [D, 1], [BLOCK_M, CHUNKS * BLOCK_D])
        w_desc = tl.make_tensor_descriptor(w_ptr, [PACKED, F], [F, 1], [CHUNKS * WORDS, BLOCK_F])
        s_desc = tl.make_tensor_descriptor(s_ptr, [D // GROUP, F], [F, 1], [CHUNKS, BLOCK_F])
        if MODE == "affine":
            b_desc = tl.make_tensor_descriptor(b_ptr, [D // GROUP, F], [F, 1], [CHUNKS, BLOCK_F])
    col, part, row = tl.program_id(0) * BLOCK_F, tl.program_id(1), tl.program_id(2) * BLOCK_M
    STEPS: tl.constexpr = (D + CHUNKS * BLOCK_D - 1) // (CHUNKS * BLOCK_D)
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    acc = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for step in tl.range(part * EACH, tl.minimum(part * EACH + EACH, STEPS), num_stages=STAGES):
        d = step * CHUNKS * BLOCK_D
        x = _tile(x_ptr, x_desc, row, d, M, D, BLOCK_M, CHUNKS * BLOCK_D, TMA)
        words = _tile(w_ptr, w_desc, d * BITS // 32, col, PACKED, F, CHUNKS * WORDS, BLOCK_F, TMA)
        scale = scale_of(_tile(s_ptr, s_desc, d // GROUP, col, D // GROUP, F, CHUNKS, BLOCK_F, TMA), MODE)
        bias = scale
        if MODE == "affine":
            bias = _tile(b_ptr, b_desc, d // GROUP, col, D // GROUP, F, CHUNKS, BLOCK_F, TMA).to(tl.float32)
            bias -= offset_of(MODE, BITS, dtype) * scale
        if CHUNKS == 1:
            acc = _chunk(acc, x, words, scale.reshape(BLOCK_F), bias.reshape(BLOCK_F), table_ptr, MODE, BITS, WIDTH)
        elif CHUNKS == 2:
            acc = _two_chunks(acc, x, words, scale, bias, table_ptr, MODE, BITS, WIDTH)
        else:
            xs, ws, scales, biases = _halves(x, words, scale, bias)
            acc = _two_chunks(acc, xs[0], ws[0], scales[0], biases[0], table_ptr, MODE, BITS, WIDTH)
            acc = _two_chunks(acc, xs[1], ws[1], scales[1], biases[1], table_ptr, MODE, BITS, WIDTH)
    acc *= unit_of(MODE)
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_F)
    out = out_ptr + (part * M + rows).to(tl.int64)[:, None] * F + cols[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < F)[None, :])
