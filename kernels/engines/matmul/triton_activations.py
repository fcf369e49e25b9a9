"""Activations of gated MLPs and their derivatives in Triton."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation]

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    """Returns 1 / (1 + exp(-x)) within 2 units in the last place, in 4 instructions: an exponential and a division of the whole
    range, numbers below the least normal one among them, are 14, of which kernels have one for each number that they read."""
    e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -1.4426950408889634], dtype=tl.float32,
                                  is_pure=True, pack=1)  # fmt: skip
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=tl.float32, is_pure=True,
                                     pack=1)  # fmt: skip


@triton.jit
def activation(x, NAME: tl.constexpr):
    """Returns (activation of x, its derivative), float32."""
    if NAME == "silu":
        s = _sigmoid(x)
        act, slope = x * s, s * (1.0 + x * (1.0 - s))
    elif NAME == "gelu":
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        act, slope = x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif NAME == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which is exact where tanh is near -1.
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        act, slope = x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(NAME == "relu")
        # A maximum would turn NaN into 0.
        act, slope = tl.where(x < 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    return act, slope
