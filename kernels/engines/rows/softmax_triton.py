"""Parts of kernels for the softmax of rows too long for the registers: each lane has a largest entry and a sum of its own."""

from __future__ import annotations

import triton
import triton.language as tl

# A thread takes the largest of so many neighbours before it rescales its sums: 16 bytes of float32.
LANE = 4
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, by an exponential that may overflow and no quotient that can."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def finite(x):
    """Returns x, 0 where it is the logarithm of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def exp(x):
    """Returns e^x; what would be denormal is 0. Triton's own takes three instructions more, to keep what is denormal."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exp_of(x, base):
    """Returns e^x / 2^base, by a multiply-add and an exponential."""
    return tl.exp2(x * LOG2_E - base)


@triton.jit
def joined(x, largest):
    """Returns the largest entries of lanes that have a tile [lanes, LANE] more, in units of log 2, and what their sums so far
    are rescaled by."""
    new = tl.maximum(largest, tl.max(x, axis=1) * LOG2_E)
    return new, tl.exp2(largest - finite(new))


@triton.jit
def log2_of_lanes(largest, total):
    """Returns the base-2 logarithm of what the lanes have together; times `LN_2` it is a log-sum-exp."""
    top = tl.max(largest, axis=0)
    return top + tl.log2(tl.sum(total * tl.exp2(largest - finite(top)), axis=0))
