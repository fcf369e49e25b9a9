"""Triton kernels that quantise an array along both of its dims, a tile of 128 by 128 at a time: it is read once, or twice where
a scale is of a whole row.

Values are written as bytes: no pointer of 8-bit floats is needed. Conversions are the device's, to nearest even.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_activations import activation

LEAST = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


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
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def bytes_of(x, E5M2: tl.constexpr):
    """Returns the bytes of numbers in e4m3, or e5m2."""
    return (x.to(tl.float8e5) if E5M2 else x.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)


@triton.jit
def _write_tile(
    x, of_rows, of_columns, values_ptr, turned_ptr, i, j, M: tl.constexpr, D: tl.constexpr, E5M2: tl.constexpr
):
    """Writes the values of tile (i, j), of 128 rows and columns, as they are and turned, and returns the scales of its rows and
    columns, given the bits of the largest magnitudes that these are of."""
    MOST: tl.constexpr = 57344.0 if E5M2 else 448.0
    inside = tl.arange(0, 128)
    rows, columns, matrix = i * 128 + inside, j * 128 + inside, i // (M // 128)
    scale, reciprocal = scales_of(of_rows, MOST)
    tl.store(values_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], bytes_of(x * reciprocal[:, None], E5M2))
    turned_scale, reciprocal = scales_of(of_columns, MOST)
    turned = tl.trans(bytes_of(x * reciprocal[None, :], E5M2))
    # The columns of each matrix one below the other.
    places = (matrix * D + columns).to(tl.int64)[:, None] * M + (rows - matrix * M)[None, :]
    tl.store(turned_ptr + places, turned)
    return scale, turned_scale


@triton.jit
def quantise_tile(x, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M: tl.constexpr, D: tl.constexpr,
                  ROWS: tl.constexpr, TURNED_ROWS: tl.constexpr, E5M2: tl.constexpr):  # fmt: skip
    """Writes tile (i, j), of 128 rows and columns, of matrices [M, D], one below the other, as operands that are summed over
    their columns and, turned, over their rows. `ROWS`, `TURNED_ROWS`: rows of an operand that share a scale, 1 or 128."""
    inside = tl.arange(0, 128)
    of_rows, of_columns = largest(x, 1), largest(x, 0)
    of_tile = tl.zeros([128], tl.int32) + tl.max(of_rows, axis=0)
    of_rows, of_columns = of_rows if ROWS == 1 else of_tile, of_columns if TURNED_ROWS == 1 else of_tile
    scale, turned_scale = _write_tile(x, of_rows, of_columns, values_ptr, turned_ptr, i, j, M, D, E5M2)
    matrix = i // (M // 128)
    if ROWS == 1:
        tl.store(scale_ptr + (i * 128 + inside) * (D // 128) + j, scale)
    else:
        tl.store(scale_ptr + i * (D // 128) + j + inside, scale, mask=inside < 1)
    down = i - matrix * (M // 128)
    if TURNED_ROWS == 1:
        tl.store(turned_scale_ptr + (matrix * D + j * 128 + inside) * (M // 128) + down, turned_scale)
    else:
        place = (matrix * (D // 128) + j) * (M // 128) + down
        tl.store(turned_scale_ptr + place + inside, turned_scale, mask=inside < 1)


@triton.jit
def _tile(tile, M: tl.constexpr, D: tl.constexpr):
    """Returns a tile's place. Programs that run together have about as many rows of tiles as columns, so that what they write,
    and what they write turned, are long runs of memory."""
    TALL: tl.constexpr = 16
    band = tile // (TALL * (D // 128))
    height = tl.minimum(M // 128 - band * TALL, TALL)
    inside = tile % (TALL * (D // 128))
    return band * TALL + inside % height, inside // height


@triton.jit
def _entries(i, j, D: tl.constexpr):
    inside = tl.arange(0, 128)
    return (i * 128 + inside).to(tl.int64)[:, None] * D + (j * 128 + inside)[None, :]


@triton.jit
def _loaded(x_ptr, weight_ptr, rstd_ptr, i, j, D: tl.constexpr):
    """Returns a tile in float32: of x, or of its norm, rounded as where it is written."""
    x = tl.load(x_ptr + _entries(i, j, D)).to(tl.float32)
    if weight_ptr is not None:
        inside = tl.arange(0, 128)
        rstd, weight = tl.load(rstd_ptr + i * 128 + inside), tl.load(weight_ptr + j * 128 + inside).to(tl.float32)
        x = (x * rstd[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def quantize_both_ways_kernel(
    x_ptr,  # [E, M, D]
    weight_ptr,  # [D], of the norm of x; None: of x itself
    rstd_ptr,  # [E, M]
    values_ptr,  # [E, M, D]
    scale_ptr,  # [E, M / ROWS, D / 128]
    turned_ptr,  # [E, D, M]
    turned_scale_ptr,  # [E, D / TURNED_ROWS, M / 128]
    M: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TURNED_ROWS: tl.constexpr,
    E5M2: tl.constexpr,
):
    i, j = _tile(tl.program_id(0), E * M, D)
    x = _loaded(x_ptr, weight_ptr, rstd_ptr, i, j, D)
    quantise_tile(x, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M, D, ROWS, TURNED_ROWS, E5M2)


# -- one scale for a whole row: of all of its tiles, so x is read once for the scales and once for the values -------------


@triton.jit
def largest_both_ways_kernel(
    x_ptr,  # [M, D]
    weight_ptr,  # [D], of the norm of x; None: of x itself
    rstd_ptr,  # [M]
    of_rows_ptr,  # [D / 128, M]: the bits of the largest magnitude of each row, in each 128 columns
    of_columns_ptr,  # [M / 128, D]
    M: tl.constexpr,
    D: tl.constexpr,
):
    i, j = _tile(tl.program_id(0), M, D)
    inside = tl.arange(0, 128)
    x = _loaded(x_ptr, weight_ptr, rstd_ptr, i, j, D)
    tl.store(of_rows_ptr + j.to(tl.int64) * M + i * 128 + inside, largest(x, 1))
    tl.store(of_columns_ptr + i.to(tl.int64) * D + j * 128 + inside, largest(x, 0))


@triton.jit
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
    M: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    E5M2: tl.constexpr,
):
    i, j = _tile(tl.program_id(0), E * M, D)
    inside = tl.arange(0, 128)
    rows, columns, matrix = i * 128 + inside, j * 128 + inside, i // (M // 128)
    x = _loaded(x_ptr, weight_ptr, rstd_ptr, i, j, D)
    of_rows, of_columns = tl.load(of_rows_ptr + rows), tl.load(of_columns_ptr + matrix * D + columns)
    scale, turned_scale = _write_tile(x, of_rows, of_columns, values_ptr, turned_ptr, i, j, M, D, E5M2)
    tl.store(scale_ptr + rows, scale, mask=inside + j * 128 < 128)
    first = i - matrix * (M // 128) == 0
    tl.store(turned_scale_ptr + matrix * D + columns, turned_scale, mask=(inside >= 0) & first)


@triton.jit
def activate_both_ways_kernel(
    gate_ptr,  # [M, F]
    up_ptr,
    values_ptr,  # as above
    scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
):
    i, j = _tile(tl.program_id(0), M, F)
    offsets = _entries(i, j, F)
    gate, up = tl.load(gate_ptr + offsets).to(tl.float32), tl.load(up_ptr + offsets).to(tl.float32)
    act, _ = activation(gate, NAME)
    x = (act * up).to(gate_ptr.dtype.element_ty).to(tl.float32)
    quantise_tile(x, values_ptr, scale_ptr, turned_ptr, turned_scale_ptr, i, j, M, F, 1, 1, False)


@triton.jit
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
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
):
    i, j = _tile(tl.program_id(0), M, F)
    offsets = _entries(i, j, F)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    gate, d = tl.load(gate_ptr + offsets).to(tl.float32), tl.load(d_ptr + offsets).to(tl.float32)
    act, slope = activation(gate, NAME)
    # Rounded, both fit into registers side by side.
    d_gate, d_up = (d * tl.load(up_ptr + offsets).to(tl.float32) * slope).to(dtype), (d * act).to(dtype)
    quantise_tile(d_gate.to(tl.float32), gate_values_ptr, gate_scale_ptr, gate_turned_ptr, gate_turned_scale_ptr, i, j, M, F, 1,
                  128, False)  # fmt: skip
    quantise_tile(d_up.to(tl.float32), up_values_ptr, up_scale_ptr, up_turned_ptr, up_turned_scale_ptr, i, j, M, F, 1, 128,
                  False)  # fmt: skip
