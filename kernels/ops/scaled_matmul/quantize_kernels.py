"""Kernels that quantise an array along both of its dims, a tile of 128 by 128 at a time: it is read once, or twice where a
scale is of a whole row.

A tile is four arrays of 32 by 128, its rows 4 q, 4 q + 1 and so on, of one layout: a thread holds four rows of its columns, and
their bytes are a word of the transpose. So words move between threads, where bytes would, one at a time, each by a read of
shared memory. That is why they are in Gluon, which alone says what threads hold; nothing in them is of one GPU.

Values are written as bytes: no pointer of 8-bit floats is needed. Conversions are the device's, to nearest even.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.matmul.triton_activations import activation

LEAST = tl.constexpr(1.1754943508222875e-38)  # the least normal float32
_WORD = (
    "{{ .reg .b16 lo, hi; cvt.rn.satfinite.{0}x2.f32 lo, $2, $1; "
    "cvt.rn.satfinite.{0}x2.f32 hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
)
E4M3_WORD, E5M2_WORD = (gl.constexpr(_WORD.format(name)) for name in ("e4m3", "e5m2"))


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Returns the bits of the largest magnitudes. As integers NaN and infinities are larger than all numbers, and not lost."""
    return tl.max((x.to(tl.int32, bitcast=True)) & 0x7FFFFFFF, axis=AXIS)


@triton.jit
def scales_of(bits, MOST: tl.constexpr):
    """Returns the scales of blocks from the bits of their largest magnitudes, and their reciprocals."""
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bits > 0, tl.maximum(largest * (1.0 / MOST), LEAST), 1.0)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def bytes_of(x, E5M2: tl.constexpr):
    """Returns the bytes of numbers in e4m3, or e5m2."""
    return (x.to(tl.float8e5) if E5M2 else x.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)


@triton.jit
def _tile(tile, M: tl.constexpr, D: tl.constexpr):
    """Returns a tile's place. Programs that run together have about as many rows of tiles as columns, so that what they write,
    and what they write turned, are long runs of memory."""
    TALL: tl.constexpr = 16
    band = tile // (TALL * (D // 128))
    height = tl.minimum(M // 128 - band * TALL, TALL)
    inside = tile % (TALL * (D // 128))
    return band * TALL + inside % height, inside // height


# -- four arrays, rows 4 q + k of a tile ------------------------------------------------------------------------------------


@gluon.jit
def _places():
    """Returns the rows of the first array in a tile, and the columns."""
    # Sixteen threads read a row, eight columns each.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    return gl.arange(0, 32, gl.SliceLayout(1, layout)) * 4, gl.arange(0, 128, gl.SliceLayout(0, layout))


@gluon.jit
def _first(i, j, D: gl.constexpr):
    return i.to(gl.int64) * (128 * D) + j * 128


@gluon.jit
def _load(ptr, i, j, D: gl.constexpr):
    rows, columns = _places()
    offsets, tile = rows[:, None] * D + columns[None, :], ()
    for k in gl.static_range(4):
        tile = tile + (gl.load(ptr + _first(i, j, D) + k * D + offsets),)
    return tile


@gluon.jit
def _load_normed(x_ptr, weight_ptr, rstd_ptr, i, j, D: gl.constexpr):
    """Returns a tile of x, or, with a weight, of its norm, rounded as where it is written."""
    tile = _load(x_ptr, i, j, D)
    if weight_ptr is not None:
        rows, columns = _places()
        weight, normed = gl.load(weight_ptr + j * 128 + columns).to(gl.float32), ()
        for k in gl.static_range(4):
            rstd = gl.load(rstd_ptr + i * 128 + rows + k)
            out = tile[k].to(gl.float32) * rstd[:, None] * weight[None, :]
            normed = normed + (out.to(x_ptr.dtype.element_ty),)
        tile = normed
    return tile


@gluon.jit
def _largest(tile):
    """Returns the bits of the largest magnitudes of the rows of each array, and of the columns of the tile."""
    of_rows, most = (), gl.zeros_like(tile[0].to(gl.int32))
    for k in gl.static_range(4):
        bits = tile[k].to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
        of_rows, most = of_rows + (gl.max(bits, 1),), gl.maximum(most, bits)
    return of_rows, gl.max(most, 0)


@gluon.jit
def _words(a, b, c, d, E5M2: gl.constexpr):
    """Returns the bytes of four numbers in a word, the first lowest."""
    if E5M2:
        ASM: gl.constexpr = E5M2_WORD
    else:
        ASM: gl.constexpr = E4M3_WORD
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _write_tile(
    tile, of_rows, of_columns, values_ptr, turned_ptr, i, j, M: gl.constexpr, D: gl.constexpr, E5M2: gl.constexpr
):
    """Writes the values of tile (i, j), of 128 rows and columns, as they are and turned, and returns the scales of its rows and
    columns, given the bits of the largest magnitudes that these are of."""
    MOST: gl.constexpr = 57344.0 if E5M2 else 448.0
    rows, columns = _places()
    offsets, scales, scaled = rows[:, None] * D + columns[None, :], (), ()
    for k in gl.static_range(4):
        scale, reciprocal = scales_of(of_rows[k], MOST)
        values = bytes_of(tile[k].to(gl.float32) * reciprocal[:, None], E5M2)
        gl.store(values_ptr + _first(i, j, D) + k * D + offsets, values)
        scales = scales + (scale,)
    turned_scale, reciprocal = scales_of(of_columns, MOST)
    for k in gl.static_range(4):
        scaled = scaled + (tile[k].to(gl.float32) * reciprocal[None, :],)
    # Eight threads write 128 bytes of a row of the transpose.
    turned: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    words = gl.convert_layout(_words(scaled[0], scaled[1], scaled[2], scaled[3], E5M2), turned)
    down, across = gl.arange(0, 32, gl.SliceLayout(1, turned)), gl.arange(0, 128, gl.SliceLayout(0, turned))
    # The columns of each matrix one below the other.
    matrix = i // (M // 128)
    first = (matrix * D + j * 128).to(gl.int64) * (M // 4) + (i * 32 - matrix * (M // 4))
    words_ptr = turned_ptr.to(gl.pointer_type(gl.int32))
    gl.store(words_ptr + first + across[None, :] * (M // 4) + down[:, None], words)
    return scales, turned_scale


@gluon.jit
def _quantise_tile(tile, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M: gl.constexpr, D: gl.constexpr,
                   ROWS: gl.constexpr, TURNED_ROWS: gl.constexpr, E5M2: gl.constexpr):  # fmt: skip
    """Writes tile (i, j), of 128 rows and columns, of matrices [M, D], one below the other, as operands that are summed over
    their columns and, turned, over their rows. `ROWS`, `TURNED_ROWS`: rows of an operand that share a scale, 1 or 128."""
    rows, columns = _places()
    of_rows, of_columns = _largest(tile)
    of_tile = gl.max(of_columns, 0)
    if ROWS == 128:
        one = gl.zeros_like(rows) + of_tile
        of_rows = one, one, one, one
    if TURNED_ROWS == 128:
        of_columns = gl.zeros_like(columns) + of_tile
    scales, turned_scale = _write_tile(tile, of_rows, of_columns, values_ptr, turned_ptr, i, j, M, D, E5M2)
    if ROWS == 1:
        for k in gl.static_range(4):
            gl.store(scale_ptr + i * D + j + (rows + k) * (D // 128), scales[k])
    else:
        gl.store(scale_ptr + i * (D // 128) + j + rows, scales[0], mask=rows < 1)
    matrix = i // (M // 128)
    down = i - matrix * (M // 128)
    if TURNED_ROWS == 1:
        gl.store(turned_scale_ptr + (matrix * D + j * 128 + columns) * (M // 128) + down, turned_scale)
    else:
        place = (matrix * (D // 128) + j) * (M // 128) + down
        gl.store(turned_scale_ptr + place + columns, turned_scale, mask=columns < 1)


@gluon.jit
def quantize_both_ways_kernel(
    x_ptr,  # [E, M, D]
    weight_ptr,  # [D], of the norm of x; None: of x itself
    rstd_ptr,  # [E, M]
    values_ptr,  # [E, M, D]
    scale_ptr,  # [E, M / ROWS, D / 128]
    turned_ptr,  # [E, D, M]
    turned_scale_ptr,  # [E, D / TURNED_ROWS, M / 128]
    M: gl.constexpr,
    E: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    TURNED_ROWS: gl.constexpr,
    E5M2: gl.constexpr,
):
    i, j = _tile(gl.program_id(0), E * M, D)
    tile = _load_normed(x_ptr, weight_ptr, rstd_ptr, i, j, D)
    _quantise_tile(tile, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M, D, ROWS, TURNED_ROWS, E5M2)


# -- one scale for a whole row: of all of its tiles, so x is read once for the scales and once for the values -------------


@gluon.jit
def largest_both_ways_kernel(
    x_ptr,  # [M, D]
    weight_ptr,  # [D], of the norm of x; None: of x itself
    rstd_ptr,  # [M]
    of_rows_ptr,  # [D / 128, M]: the bits of the largest magnitude of each row, in each 128 columns
    of_columns_ptr,  # [M / 128, D]
    M: gl.constexpr,
    D: gl.constexpr,
):
    i, j = _tile(gl.program_id(0), M, D)
    rows, columns = _places()
    of_rows, of_columns = _largest(_load_normed(x_ptr, weight_ptr, rstd_ptr, i, j, D))
    for k in gl.static_range(4):
        gl.store(of_rows_ptr + j.to(gl.int64) * M + i * 128 + rows + k, of_rows[k])
    gl.store(of_columns_ptr + i.to(gl.int64) * D + j * 128 + columns, of_columns)


@gluon.jit
def quantize_rows_both_ways_kernel(
    x_ptr,  # [E, M, D]
    weight_ptr,  # [D], of the norm of x; None: of x itself
    rstd_ptr,  # [E, M]
    of_rows_ptr,  # [E, M]: the bits of the largest magnitudes
    of_columns_ptr,  # [E, D]
    values_ptr,  # [E, M, D]
    scale_ptr,  # [E, M]
    turned_ptr,  # [E, D, M]
    turned_scale_ptr,  # [E, D]
    M: gl.constexpr,
    E: gl.constexpr,
    D: gl.constexpr,
    E5M2: gl.constexpr,
):
    i, j = _tile(gl.program_id(0), E * M, D)
    rows, columns = _places()
    matrix, of_rows = i // (M // 128), ()
    for k in gl.static_range(4):
        of_rows = of_rows + (gl.load(of_rows_ptr + i * 128 + rows + k),)
    of_columns = gl.load(of_columns_ptr + matrix * D + j * 128 + columns)
    tile = _load_normed(x_ptr, weight_ptr, rstd_ptr, i, j, D)
    scales, turned_scale = _write_tile(tile, of_rows, of_columns, values_ptr, turned_ptr, i, j, M, D, E5M2)
    for k in gl.static_range(4):
        gl.store(scale_ptr + i * 128 + rows + k, scales[k], mask=rows + j * 128 < 128)
    first = i - matrix * (M // 128) == 0
    gl.store(turned_scale_ptr + matrix * D + j * 128 + columns, turned_scale, mask=(columns >= 0) & first)


@gluon.jit
def activate_both_ways_kernel(
    gate_ptr,  # [M, F]
    up_ptr,
    values_ptr,  # as above
    scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    M: gl.constexpr,
    F: gl.constexpr,
    NAME: gl.constexpr,
):
    i, j = _tile(gl.program_id(0), M, F)
    gate, up, tile = _load(gate_ptr, i, j, F), _load(up_ptr, i, j, F), ()
    for k in gl.static_range(4):
        act, _ = activation(gate[k].to(gl.float32), NAME)
        tile = tile + ((act * up[k].to(gl.float32)).to(gate_ptr.dtype.element_ty),)
    _quantise_tile(tile, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M, F, 1, 1, False)


@gluon.jit
def activation_cotangents_kernel(
    gate_ptr,  # [M, F]
    up_ptr,
    d_ptr,
    gate_values_ptr,  # the cotangent of gate, as above
    gate_scale_ptr,
    gate_turned_ptr,
    gate_turned_scale_ptr,
    up_values_ptr,  # and that of up
    up_scale_ptr,
    up_turned_ptr,
    up_turned_scale_ptr,
    M: gl.constexpr,
    F: gl.constexpr,
    NAME: gl.constexpr,
):
    i, j = _tile(gl.program_id(0), M, F)
    dtype: gl.constexpr = gate_ptr.dtype.element_ty
    gate, up, d = _load(gate_ptr, i, j, F), _load(up_ptr, i, j, F), _load(d_ptr, i, j, F)
    d_gate, d_up = (), ()
    for k in gl.static_range(4):
        act, slope = activation(gate[k].to(gl.float32), NAME)
        wide = d[k].to(gl.float32)
        # Rounded, both fit into registers side by side.
        d_gate, d_up = d_gate + ((wide * up[k].to(gl.float32) * slope).to(dtype),), d_up + ((wide * act).to(dtype),)
    _quantise_tile(
        d_gate, gate_values_ptr, gate_scale_ptr, gate_turned_ptr, gate_turned_scale_ptr, i, j, M, F, 1, 128, False
    )
    _quantise_tile(d_up, up_values_ptr, up_scale_ptr, up_turned_ptr, up_turned_scale_ptr, i, j, M, F, 1, 128, False)
