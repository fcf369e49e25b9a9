"""The inverse of a unit triangular matrix in the registers of a Triton program, for the delta rules."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _blocks(A, C: tl.constexpr, SIZE, BELOW):
    """Returns blocks of A [C, C], [C / SIZE, SIZE, SIZE]: those on the diagonal, or each left of it in odd rows if BELOW."""
    n: tl.constexpr = C // SIZE
    block, other = tl.arange(0, n)[:, None, None, None], tl.arange(0, n)[None, :, None, None]
    wanted = (block == other + 1) & (block % 2 == 1) if BELOW else block == other
    square = tl.permute(tl.reshape(A, [n, SIZE, n, SIZE]), (0, 2, 1, 3))
    return tl.sum(tl.where(wanted, square, 0.0), 1)


@triton.jit
def _joined(inverted, A, C: tl.constexpr, SIZE):
    """Returns the inverses of the diagonal blocks of 2 SIZE tokens of I + A, given those of the blocks of SIZE."""
    m: tl.constexpr = C // (2 * SIZE)
    first, second = tl.split(tl.permute(tl.reshape(inverted, [m, 2, SIZE, SIZE]), (0, 2, 3, 1)))
    below = tl.sum(tl.reshape(_blocks(A, C, SIZE, True), [m, 2, SIZE, SIZE]), 1)
    # Three products of TF32: with one, keys at cosine 0.9 have an error of 8e-3, and as bfloat16 the result one of 1e-3.
    below = tl.dot(second, below, input_precision="tf32x3")
    below = -tl.dot(below, first, input_precision="tf32x3")
    left, right = tl.join(first, below), tl.join(tl.zeros([m, SIZE, SIZE], tl.float32), second)
    joined = tl.permute(tl.join(left, right), (0, 3, 1, 4, 2))
    return tl.reshape(joined, [m, 2 * SIZE, 2 * SIZE])


@triton.jit
def _diagonal_inverses(A, scratch_ptr, C: tl.constexpr):
    """Returns the inverses of the diagonal blocks of 16 of I + A, [C / 16, 16, 16], by forward substitution in float32.

    A thread has one column of them. The coefficients of a row are the same for all columns of a block, and come through
    memory: among threads each row would need two sums.

    Args:
      scratch_ptr: float32 [C, 16] of this program's own.
    """
    n: tl.constexpr = C // 16
    block, i, j = tl.arange(0, n)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    at = scratch_ptr + (block * 16 + i) * 16 + j
    tl.store(at, _blocks(A, C, 16, False))
    tl.debug_barrier()  # what other threads have stored is read below
    column = tl.arange(0, C)
    begin = scratch_ptr + (column // 16) * 256
    rows = (tl.where(column % 16 == 0, 1.0, 0.0),)
    for r in tl.static_range(1, 16):
        row = tl.where(column % 16 == r, 1.0, 0.0)
        for s in tl.static_range(0, r):
            row -= tl.load(begin + r * 16 + s) * rows[s]
        rows = rows + (row,)
    tl.debug_barrier()  # all have read
    for r in tl.static_range(0, 16):
        tl.store(begin + r * 16 + column % 16, rows[r])
    tl.debug_barrier()
    return tl.load(at)


@triton.jit
def inverse(A, scratch_ptr, C: tl.constexpr):
    """Returns (I + L)⁻¹ for the part L of A [C, C] below its diagonal; what is on the diagonal and above has no effect.

    Blocks of 16 on the diagonal by forward substitution in float32, all blocks at once; then pairs of blocks P, Q with A21
    below: [[P, 0], [-Q A21 P, Q]]. A power series is no substitute: its terms grow with correlated keys.

    Args:
      scratch_ptr: float32 [C, 16] of this program's own.
    """
    result = _diagonal_inverses(A, scratch_ptr, C)
    if C > 16:
        result = _joined(result, A, C, 16)
    if C > 32:
        result = _joined(result, A, C, 32)
    if C > 64:
        result = _joined(result, A, C, 64)
    return tl.reshape(result, [C, C])
