"""The Triton kernel of scaled_matmul for any GPU: 8-bit operands are multiplied as 16-bit numbers, exactly.

For Hopper, whose tensor cores multiply them as they are, there is `gluon_kernels.py`.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_codes import upcast


@triton.jit
def _scales_of(scale_ptr, rows, size: tl.constexpr, step, STEPS: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr,
               EXPONENTS: tl.constexpr):  # fmt: skip
    """Returns the scales of rows in a step, of [COUNT, BLOCKS]."""
    row = rows // (size // COUNT)
    scale = tl.load(scale_ptr + row * BLOCKS + step // (STEPS // BLOCKS), mask=rows < size, other=0)
    if EXPONENTS:
        code = scale.to(tl.float32)
        scale = tl.where(code == 255, float("nan"), tl.exp2(code - 127))
    return scale


@triton.jit
def scaled_matmul_kernel(
    a_ptr,  # [M, K], bytes
    b_ptr,  # [N, K], bytes
    a_scale_ptr,  # [A_ROWS, A_BLOCKS]
    b_scale_ptr,  # [B_ROWS, B_BLOCKS]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_CODE: tl.constexpr,
    B_CODE: tl.constexpr,
    A_ROWS: tl.constexpr,
    A_BLOCKS: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    STEP: tl.constexpr,  # entries of K that share scales
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides STEP, or covers it
):
    TILES_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) // (BAND * TILES_N)
    height = tl.minimum(TILES_M - band * BAND, BAND)
    inside = tl.program_id(0) % (BAND * TILES_N)
    rows = (band * BAND + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(K // STEP):
        p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, STEP, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + rows.to(tl.int64)[:, None] * K + (step * STEP + k)[None, :],
                        mask=(rows < M)[:, None] & (k < STEP)[None, :], other=0)  # fmt: skip
            b = tl.load(b_ptr + columns.to(tl.int64)[None, :] * K + (step * STEP + k)[:, None],
                        mask=(columns < N)[None, :] & (k < STEP)[:, None], other=0)  # fmt: skip
            p = tl.dot(upcast(a, A_CODE, tl.bfloat16), upcast(b, B_CODE, tl.bfloat16), p)
        of_rows = _scales_of(a_scale_ptr, rows, M, step, K // STEP, A_ROWS, A_BLOCKS, EXPONENTS)
        of_columns = _scales_of(b_scale_ptr, columns, N, step, K // STEP, B_ROWS, B_BLOCKS, EXPONENTS)
        acc += p * of_rows[:, None] * of_columns[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])
