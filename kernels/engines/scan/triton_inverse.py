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
def inverse(A, C: tl.constexpr):
    """Returns (I + A)⁻¹ for A [C, C] strictly lower triangular.

    Blocks of 16 on the diagonal by forward substitution in float32, all blocks at once; then pairs of blocks P, Q with A21
    below: [[P, 0], [-Q A21 P, Q]]. A power series is no substitute: its terms grow with correlated keys.
    """
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    diagonal = _blocks(A, C, 16, False)
    result = tl.where(i == j, 1.0, 0.0) + tl.zeros([C // 16, 16, 16], tl.float32)
    for r in range(1, 16):
        row = tl.sum(tl.where(i == r, diagonal, 0.0), 1)
        known = tl.sum(tl.expand_dims(row, 2) * result, 1, keep_dims=True)
        result = tl.where(i == r, result - known, result)
    if C > 16:
        result = _joined(result, A, C, 16)
    if C > 32:
        result = _joined(result, A, C, 32)
    if C > 64:
        result = _joined(result, A, C, 64)
    return tl.reshape(result, [C, C])
