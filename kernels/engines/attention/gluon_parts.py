"""Parts shared by the Gluon kernels of flash attention: tile layouts, and which pairs attend."""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.attention import triton_parts

# Layouts of the block of an array [batch, tokens, heads, width] that is a tile [tokens, width] in shared memory.
BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
TILE_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BLOCK_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))
ROW = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))

# The same source as in the Triton kernels, so that the meaning of a pair is defined once.
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
    """Returns (first, first full, end of full, end): the range of blocks that a block is paired with."""
    span = spans_ptr + b * O.SPAN_BATCH + block * 4
    return gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3)


@gluon.jit
def tanh(x, O: gl.constexpr):
    """Returns tanh. Unless it must be exact, uses the GPU's single instruction, with an error of at most 2^-11."""
    if O.EXACT:
        y = _exact_tanh(x)
    else:
        asm: gl.constexpr = "tanh.approx.f32 $0, $1;"
        y = gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return y
