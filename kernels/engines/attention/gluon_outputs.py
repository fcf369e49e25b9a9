"""How the Hopper forward leaves its output: rounded, in float32, or merged with attention over other keys."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.attention.triton_parts import LN2, LOG2E

ROWS = gl.constexpr(64)  # rows of a warpgroup: the minimum of one instruction


@gluon.jit
def store(out_ptr, out, tile, b, n, row, O: gl.constexpr, FIRST: gl.constexpr):
    """Stores the output of a warpgroup, or its columns from FIRST on, through a tile that held its queries, so that
    each thread writes 16 contiguous bytes."""
    WIDTH: gl.constexpr = out.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile.store(out)
    out = tile.load(WIDE)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    cols = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    where = ((b * O.T + rows).to(gl.int64) * O.N + n) * O.HV
    gl.store(out_ptr + where[:, None] + cols[None, :], out, mask=(rows < O.T)[:, None] & (cols < O.HV)[None, :])


@gluon.jit
def _places(out, b, n, row, O: gl.constexpr):
    """Returns where the output of a warpgroup lies, and which of it is inside the array."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
    cols = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    where = ((b * O.T + rows).to(gl.int64) * O.N + n) * O.HV
    return where[:, None] + cols[None, :], (rows < O.T)[:, None] & (cols < O.HV)[None, :]


@gluon.jit
def store_sums(out_ptr, out, b, n, row, O: gl.constexpr):
    """Stores the output of a warpgroup in float32, of which four threads write 32 contiguous bytes."""
    at, inside = _places(out, b, n, row, O)
    gl.store(out_ptr + at, out, mask=inside)


@gluon.jit
def merge(lse_ptr, out_ptr, lse, out, b, n, qi, row, O: gl.constexpr):
    """Merges attention over more keys, its lse in units of log 2, with what is in memory: both in float32, in its place."""
    lse_ptr += (b * O.T + qi) * O.N + n
    before = gl.load(lse_ptr, mask=qi < O.T, other=float("-inf")) * LOG2E
    most = gl.maximum(before, lse)
    most = gl.where(most == float("-inf"), 0.0, most)  # rows that have not seen any key yet
    both = most + gl.log2(gl.exp2(before - most) + gl.exp2(lse - most))
    gl.store(lse_ptr, both * LN2, mask=qi < O.T)
    anchor = gl.where(both == float("-inf"), 0.0, both)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    kept = gl.convert_layout(gl.exp2(before - anchor), BY_ROW)
    added = gl.convert_layout(gl.exp2(lse - anchor), BY_ROW)
    at, inside = _places(out, b, n, row, O)
    out_before = gl.load(out_ptr + at, mask=inside, other=0.0)
    gl.store(out_ptr + at, out_before * kept[:, None] + out * added[:, None], mask=inside)
