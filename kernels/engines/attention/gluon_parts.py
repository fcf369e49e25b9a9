"""Parts shared by the Gluon kernels of flash attention: tile layouts, which pairs attend, and with which
weights."""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.attention import triton_parts
from kernels.engines.attention.triton_parts import LOG2E

# Layouts of the block of an array [batch, tokens, heads, width] that is a tile [tokens, width] in shared memory.
BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
TILE_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BLOCK_OF_SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))
ROW = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))

# The same source as in the Triton kernels, so that the meaning of a pair is defined once.
visible = gluon.jit(triton_parts.visible.fn)
in_range = gluon.jit(triton_parts.in_range.fn)
in_one_segment = gluon.jit(triton_parts.in_one_segment.fn)
ends_of = gluon.jit(triton_parts.ends_of.fn)
exact_tanh = gluon.jit(triton_parts.tanh.fn)
masks_of = gluon.jit(triton_parts.masks_of.fn)
positions_of = gluon.jit(triton_parts.positions_of.fn)
positions_in = gluon.jit(triton_parts.positions_in.fn)
segments_of = gluon.jit(triton_parts.segments_of.fn)
tile_of = gluon.jit(triton_parts.tile_of.fn)
list_of = gluon.jit(triton_parts.list_of.fn)
limits_of = gluon.jit(triton_parts.limits_of.fn)
nth = gluon.jit(triton_parts.nth.fn)


@gluon.jit
def range_of(rows_ptr, b, O: gl.constexpr):
    """Returns (first row, number of rows) of batch row b, where rows of all lie side by side: T each, or as the array says."""
    if rows_ptr is None:
        first, count = b * O.T, O.T
    else:
        first, count = gl.load(rows_ptr + 2 * b + 2), gl.load(rows_ptr + 2 * b + 3)
    return first, count


@gluon.constexpr_function
def heads_of(O):
    """Returns how many query heads a launch has."""
    return O.PART or O.N


@gluon.jit
def first_head(first_ptr):
    """Returns the first query head of a launch."""
    if first_ptr is None:
        head = 0
    else:
        head = gl.load(first_ptr)
    return head


@gluon.jit
def first_key_head(first_ptr):
    """Returns the first head of keys of a launch, in their array."""
    if first_ptr is None:
        head = 0
    else:
        head = gl.load(first_ptr + 1)
    return head


@gluon.jit
def span_of(spans_ptr, b, block, O: gl.constexpr):
    """Returns (first, first full, end of full, end): the range of blocks that a block is paired with."""
    span = spans_ptr + b * O.SPAN_BATCH + block * 4
    return gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3)


@gluon.jit
def one_after_the_other(x, index):
    """Returns both as they are. What is loaded at the index is loaded after x is computed, where the compiler would load
    all it can at first, and run out of registers."""
    same: gl.constexpr = "mov.b32 $0, $1;"
    # Threads of a warp meet, which keeps loads behind it from moving ahead, and costs nothing.
    behind: gl.constexpr = "{ bar.warp.sync 0xffffffff; mov.b32 $0, $1; }"
    x = gl.inline_asm_elementwise(same, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    index = gl.inline_asm_elementwise(behind, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)
    return x, index


@gluon.jit
def tanh(x, O: gl.constexpr):
    """Returns tanh. Unless it must be exact, uses the GPU's single instruction, with an error of at most 2^-11."""
    if O.EXACT:
        y = exact_tanh(x)
    else:
        asm: gl.constexpr = "tanh.approx.f32 $0, $1;"
        y = gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return y


@gluon.jit
def weights_of(
    s, j, list_ptr, masked, row_max, row_sum, q_at, q_segment, k_at_ptr, k_segment_ptr, ends, O: gl.constexpr
):
    """Returns (weights of block j of keys, or of entry j of a list, relative to the row maximum so far; that maximum,
    in units of the (capped) products; the row sum; the factor to rescale earlier sums)."""
    if O.CAP is None:
        UNIT: gl.constexpr = O.SCALE * LOG2E
    else:
        UNIT: gl.constexpr = O.CAP * LOG2E
        s = tanh(s * (O.SCALE / O.CAP), O)
    if masked:
        layout: gl.constexpr = gl.SliceLayout(0, s.type.layout)
        first = nth(list_ptr, j) * O.BLOCK_K
        kj = first + gl.arange(0, O.BLOCK_K, layout)
        k_at = positions_in(k_at_ptr, kj, first, 0, O.S, O)[None, :]
        k_segment = segments_of(k_segment_ptr, kj, O.S)[None, :]
        seen = visible(kj[None, :], q_at[:, None], k_at, q_segment[:, None], k_segment, ends, O)
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(row_max, gl.max(s, axis=1))
    anchor = gl.where(new == float("-inf"), 0.0, new * UNIT)  # a row that has not seen any key yet
    p = gl.exp2(s * UNIT - anchor[:, None])
    rescale = gl.exp2(row_max * UNIT - anchor)
    return p, new, row_sum * rescale + gl.sum(p, axis=1), rescale
