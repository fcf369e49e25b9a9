"""Kernels for TPUs that quantise an array along both of its dims, with one scale for each whole row and each whole column.

One reads the array, or computes it, and writes the largest magnitudes of its rows and columns; XLA makes scales of these, and a
second kernel reads the array and writes it twice, multiplied by the scales of its rows and of its columns. Neither transposes:
matrix units sum over either dim, so the operand that is summed over rows stays as it lies, and XLA reads it as a transpose.

Magnitudes are compared as integers, in which NaN and infinities are larger than all numbers, until there are few of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.matmul.pallas_activations import activation_in_vmem
from kernels.framework.work import Work, nbytes
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig
from kernels.ops.scaled_matmul.formats import scale_of
from kernels.toolchains.pallas import pallas_launch

LANES, SUBLANES = 128, 8
INFINITY = 0x7F800000  # its bits: those of NaN are larger
E4M3 = "float8_e4m3fn"

Operand = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


# -- kernels -----------------------------------------------------------------------------------------------------------


def _put_largest(x: jax.Array, of_rows: Any, of_columns: Any) -> None:
    """Writes the largest magnitudes, float32, of the columns of a tile [rows, columns], and with those of the tiles left of it
    of its rows; infinity where one is no number."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF

    def numbers(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(jnp.minimum(bits, INFINITY), jnp.float32)

    rows, columns = bits.shape
    tall = jnp.max(bits.reshape(rows // SUBLANES, SUBLANES, columns), 0)
    of_columns[0] = jnp.max(numbers(tall), 0, keepdims=True)
    # A maximum of registers, and one across the lanes of the last.
    parts = [bits[:, i : i + LANES] for i in range(0, columns, LANES)]
    most = jnp.max(numbers(functools.reduce(jnp.maximum, parts)), 1, keepdims=True)
    of_rows[...] = jnp.where(pl.program_id(1) == 0, most, jnp.maximum(of_rows[...], most))


def _normed(x_ref: Any, norm: Sequence[Any]) -> jax.Array:
    """Returns a tile in float32, or its norm, rounded as it would be written. `norm`: nothing, or rstd [rows, 1] and the weight
    [1, columns]."""
    x = x_ref[...].astype(jnp.float32)
    for factor in norm:
        x = x * factor[...].astype(jnp.float32)
    return x.astype(x_ref.dtype).astype(jnp.float32) if norm else x


def largest_of_rows_and_columns_kernel(x_ref, *refs):
    """Writes the largest magnitudes of a tile, or of its norm."""
    *norm, of_rows, of_columns = refs
    _put_largest(_normed(x_ref, norm), of_rows, of_columns)


def quantize_rows_and_columns_kernel(x_ref, by_row, by_column, *refs):
    """Writes both operands, x times `by_row` and `by_column`.

    Nothing is clipped: a product past the largest number of the dtype is so by a rounding, and is rounded to it."""
    *norm, values, turned = refs
    x = _normed(x_ref, norm)
    values[...] = (x * by_row[...]).astype(values.dtype)
    turned[...] = (x * by_column[0]).astype(turned.dtype)


def activate_and_largest_kernel(gate_ref, up_ref, out_ref, of_rows, of_columns, *, activation):
    """Writes activation(gate) * up, and its largest magnitudes."""
    act = activation_in_vmem(activation)(gate_ref[...].astype(jnp.float32))
    out = (act * up_ref[...].astype(jnp.float32)).astype(out_ref.dtype)
    out_ref[...] = out
    _put_largest(out, of_rows, of_columns)


def cotangents_and_largest_kernel(gate_ref, up_ref, d_ref, *refs, activation):
    """Writes the cotangents of gate and of up, each with its largest magnitudes."""
    act, pull = jax.vjp(activation_in_vmem(activation), gate_ref[...].astype(jnp.float32))
    d = d_ref[...].astype(jnp.float32)
    for wide, (out_ref, *largest) in zip(
        (pull(d * up_ref[...].astype(jnp.float32))[0], d * act), (refs[:3], refs[3:]), strict=True
    ):
        out = wide.astype(out_ref.dtype)
        out_ref[...] = out
        _put_largest(out, *largest)


# -- launches ----------------------------------------------------------------------------------------------------------


def _tile(rows: int, columns: int, cfg: ScaledMatmulConfig) -> tuple[int, int]:
    """Returns the rows and columns of a tile: as many as the configuration has, 128 at least, of those that divide these."""
    tall, wide = (max(LANES, size or LANES) for size in (cfg.block_m, cfg.block_n))
    return math.gcd(rows, tall), max(n for n in range(LANES, wide + 1, LANES) if columns % n == 0)


def _spec(bm: int, bn: int) -> pl.BlockSpec:
    return pl.BlockSpec((bm, bn), lambda i, j: (i, j))


def _of_norm(norm: Sequence[jax.Array], bm: int, bn: int) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """Returns rstd [M] and the weight [D] of a norm, if there is one, as kernels read them."""
    if not norm:
        return [], []
    rstd, weight = norm
    specs = [pl.BlockSpec((bm, 1), lambda i, j: (i, 0)), pl.BlockSpec((1, bn), lambda i, j: (0, j))]
    return [rstd[:, None], weight[None]], specs


def _largest(
    kernel: Callable,
    arrays: Sequence[jax.Array],
    made: int,
    flops: int,
    cfg: ScaledMatmulConfig,
    rows: int,
    norm: Sequence[jax.Array] = (),
    **named: Any,
) -> list[jax.Array]:
    """Returns what a kernel writes: for each array that it makes of these, or for the one that it reads, the largest magnitudes
    of rows, [M, 1], and of the columns of each tile, [M / its rows, 1, D], after the array itself if it makes it.

    Args:
      made: how many arrays it makes, 0 if it reads one. flops: for each number. rows: those of a matrix, which tiles divide.
    """
    (M, D), x = arrays[0].shape, arrays[0]
    bm, bn = _tile(rows, D, cfg)
    more, more_specs = _of_norm(norm, bm, bn)
    largest = jax.ShapeDtypeStruct((M, 1), jnp.float32), jax.ShapeDtypeStruct((M // bm, 1, D), jnp.float32)
    specs = pl.BlockSpec((bm, 1), lambda i, j: (i, 0)), pl.BlockSpec((1, 1, bn), lambda i, j: (i, 0, j))
    out = (jax.ShapeDtypeStruct((M, D), x.dtype), *largest) * made or largest
    return pallas_launch(
        functools.partial(kernel, **named),
        *arrays,
        *more,
        out_shape=out,
        grid=(M // bm, D // bn),
        in_specs=[*[_spec(bm, bn)] * len(arrays), *more_specs],
        out_specs=(_spec(bm, bn), *specs) * made or specs,
        dimension_semantics=("parallel", "arbitrary"),
        work=Work(flops * M * D, nbytes(*arrays, *more, *out)),
        name=kernel.__name__,
    )


def _quantised(
    x: jax.Array,
    largest: Sequence[jax.Array],
    cfg: ScaledMatmulConfig,
    dtype: str = E4M3,
    matrices: int = 1,
    norm: Sequence[jax.Array] = (),
) -> Operand:
    """Returns the operands of x [M, D], or of its norm, given its largest magnitudes."""
    (M, D), (of_rows, of_columns) = x.shape, largest
    rows = M // matrices
    bm, bn = _tile(rows, D, cfg)
    more, more_specs = _of_norm(norm, bm, bn)
    scale = scale_of(of_rows, dtype)
    turned_scale = scale_of(jnp.max(of_columns.reshape(matrices, -1, D), 1), dtype)
    inverse = 1 / scale, (1 / turned_scale)[:, None]
    out = (jax.ShapeDtypeStruct((M, D), dtype),) * 2
    values, turned = pallas_launch(
        quantize_rows_and_columns_kernel,
        x,
        *inverse,
        *more,
        out_shape=out,
        grid=(M // bm, D // bn),
        in_specs=[
            _spec(bm, bn),
            pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
            pl.BlockSpec((1, 1, bn), lambda i, j: (lax.div(i, rows // bm), 0, j)),
            *more_specs,
        ],
        out_specs=(_spec(bm, bn),) * 2,
        dimension_semantics=("parallel", "parallel"),
        work=Work(2 * M * D, nbytes(x, *inverse, *more, *out)),
        name="quantize_rows_and_columns_kernel",
    )
    turned = turned.reshape(matrices, rows, D).swapaxes(1, 2).reshape(-1, rows)
    return values, scale, turned, turned_scale.reshape(-1, 1)


def both_ways(
    x: jax.Array, dtype: str, cfg: ScaledMatmulConfig, matrices: int = 1, norm: Sequence[jax.Array] = ()
) -> Operand:
    """Returns the operands of x [M, D], with a scale for each row: `quantize_both_ways` with entries=None; or those of the norm
    of x, given rstd [M] and the weight [D]."""
    largest = _largest(largest_of_rows_and_columns_kernel, [x], 0, 2, cfg, x.shape[0] // matrices, norm)
    return _quantised(x, largest, cfg, dtype, matrices, norm)


def activated(gate: jax.Array, up: jax.Array, activation: str, cfg: ScaledMatmulConfig) -> Operand:
    """Returns the operands of activation(gate) * up."""
    how = {"activation": activation}
    product, *largest = _largest(activate_and_largest_kernel, [gate, up], 1, 8, cfg, gate.shape[0], **how)
    return _quantised(product, largest, cfg)


def cotangents(
    gate: jax.Array, up: jax.Array, d: jax.Array, activation: str, cfg: ScaledMatmulConfig
) -> tuple[jax.Array, ...]:
    """Returns the operands of the cotangents of gate and of up."""
    how = {"activation": activation}
    made = _largest(cotangents_and_largest_kernel, [gate, up, d], 2, 18, cfg, gate.shape[0], **how)
    return *_quantised(made[0], made[1:3], cfg), *_quantised(made[3], made[4:], cfg)
