"""Parts of kernels for the softmax of rows too long for the registers: each lane has a largest entry and a sum of its own."""

from __future__ import annotations

import triton
import triton.language as tl

# A thread takes the largest of so many neighbours before it rescales its sums: 16 bytes of float32.
LANE = 4


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, by an exponential that may overflow and no quotient that can."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def finite(x):
    """Returns x, 0 where it is the logarithm of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def lse_of_lanes(largest, total):
    """Returns the log-sum-exp of what the lanes have."""
    top = tl.max(largest, axis=0)
    return top + tl.log(tl.sum(total * tl.exp(largest - finite(top)), axis=0))
