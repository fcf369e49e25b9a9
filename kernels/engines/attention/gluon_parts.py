"""What the Gluon kernels of flash attention have in common: how their tiles lie, and which pairs attend."""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.attention import triton_parts

# Of the block of an array [batch, tokens, heads, width] that a tile [tokens, width] in shared memory is.
BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
TILE_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BLOCK_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))
ROW = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))

# The same source as in Triton's kernels: what a pair means is said once.
visible = gluon.jit(triton_parts.visible.fn)
ends_of = gluon.jit(triton_parts.ends_of.fn)
_exact_tanh = gluon.jit(triton_parts.tanh.fn)
positions_of = gluon.jit(triton_parts.positions_of.fn)
segments_of = gluon.jit(triton_parts.segments_of.fn)
tile_of = gluon.jit(triton_parts.tile_of.fn)
list_of = gluon.jit(triton_parts.list_of.fn)
limits_of = gluon.jit(triton_parts.limits_of.fn)
nth = gluon.jit(triton_parts.nth.fn)


@gluon.jit
def span_of(spans_ptr, b, block, O: gl.constexpr):
    """Returns (first, first that attends wholly, end of those, end) of the blocks that a block meets."""
    span = spans_ptr + b * O.SPAN_BATCH + block * 4
    return gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3)


@gluon.jit
def tanh(x, O: gl.constexpr):
    """Returns tanh, by the one instruction that a GPU has for it unless it is to be exact: that is off by 2^-11 at most."""
    if O.EXACT:
        y = _exact_tanh(x)
    else:
        asm: gl.constexpr = "tanh.approx.f32 $0, $1;"
        y = gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return y
