"""How the Hopper forward leaves its output: rounded, in float32, or merged with attention over other keys."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.attention.gluon_parts import range_of
from kernels.engines.attention.triton_parts import LN2, LOG2E

ROWS = gl.constexpr(64)  # rows of a warpgroup: the minimum of one instruction


@gluon.jit
def _store(out_ptr, out, tile, place, n, row, O: gl.constexpr, FIRST: gl.constexpr):
    """Stores the output of a warpgroup, or its columns from FIRST on, through a tile that held its queries, so that
    each thread writes 16 contiguous bytes."""
    WIDTH: gl.constexpr = out.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile.store(out)
    out = tile.load(WIDE)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    cols = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    where = ((place[0] + rows).to(gl.int64) * O.N + n) * O.HV
    gl.store(out_ptr + where[:, None] + cols[None, :], out, mask=(rows < place[1])[:, None] & (cols < O.HV)[None, :])


@gluon.jit
def _places(out, place, n, row, O: gl.constexpr, FIRST: gl.constexpr):
    """Returns where the output of a warpgroup lies, or its columns from FIRST on, and which of it is inside the array."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
    cols = FIRST + gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    where = ((place[0] + rows).to(gl.int64) * O.N + n) * O.HV
    return where[:, None] + cols[None, :], (rows < place[1])[:, None] & (cols < O.HV)[None, :]


@gluon.jit
def _merged(sofar, lse, out, place, n, qi, row, O: gl.constexpr):
    """Returns (lse, out) over these keys and those of `sofar`, (out, lse) in memory; lse is in units of log 2 here."""
    sofar_out_ptr, sofar_lse_ptr = sofar
    before = gl.load(sofar_lse_ptr + (place[0] + qi) * O.N + n, mask=qi < place[1], other=float("-inf")) * LOG2E
    most = gl.maximum(before, lse)
    most = gl.where(most == float("-inf"), 0.0, most)  # rows that have not seen any key yet
    both = most + gl.log2(gl.exp2(before - most) + gl.exp2(lse - most))
    anchor = gl.where(both == float("-inf"), 0.0, both)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, out[0].type.layout)
    kept = gl.convert_layout(gl.exp2(before - anchor), BY_ROW)
    added = gl.convert_layout(gl.exp2(lse - anchor), BY_ROW)
    merged = ()
    for i in gl.static_range(len(out)):
        at, inside = _places(out[i], place, n, row, O, i * out[i].shape[1])
        before_out = gl.load(sofar_out_ptr + at, mask=inside, other=0.0).to(gl.float32)
        merged = merged + (before_out * kept[:, None] + out[i] * added[:, None],)
    return both, merged


@gluon.jit
def leave(lse_ptr, out_ptr, sofar, rows_ptr, lse, out, q, b, n, qi, row, O: gl.constexpr):
    """Stores lse, given in units of log 2, and the output of a warpgroup, in tiles of columns, merged with `sofar` if O.MERGE
    says so: in float32 four threads write 32 contiguous bytes, in fewer bits it goes through the tiles that held the queries.
    """
    place = range_of(rows_ptr, b, O)
    if O.MERGE:
        lse, out = _merged(sofar, lse, out, place, n, qi, row, O)
    gl.store(lse_ptr + (place[0] + qi) * O.N + n, lse * LN2, mask=qi < place[1])
    if out_ptr.dtype.element_ty == gl.float32:
        for i in gl.static_range(len(out)):
            at, inside = _places(out[i], place, n, row, O, i * out[i].shape[1])
            gl.store(out_ptr + at, out[i], mask=inside)
    elif out[0].shape[1] <= q[0].shape[1]:
        for i in gl.static_range(len(out)):
            tile = q[i].slice(0, out[i].shape[1], 1)
            _store(out_ptr, out[i].to(q[0].dtype), tile, place, n, row, O, i * out[i].shape[1])
    else:
        left, right = out[0].to(q[0].dtype).reshape([ROWS, 2, O.BLOCK_V // 2]).permute((0, 2, 1)).split()
        _store(out_ptr, left, q[0], place, n, row, O, 0)
        _store(out_ptr, right, q[1], place, n, row, O, O.BLOCK_V // 2)
