"""Grouped matmul in plain XLA, any device: a loop over the groups that have rows, and within each over tiles of its
rows.

The work is that of the actual rows, rounded up to the smallest tile for each group. A row tile is a slice, because rows
of a group are contiguous; the end of a group's last tile overlaps later groups, which overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.engines.matmul.formats import dequantized
from kernels.ops.combine_rows import combine_rows
from kernels.ops.grouped_matmul.contract import activated, gathered_op, op, quantized_op
from kernels.ops.grouped_matmul.groups import bounds, gathered_rows
from kernels.ops.grouped_matmul.packed import packed_op

# Rows per tile, largest first. Few sizes keep the number of products per group small; a small last one wastes little.
TILES = (128, 32, 8)


class _Groups(NamedTuple):
    """The rows [begin[e], end[e]) of each matrix, and `order`: the indices of matrices with rows first, `count` of
    them."""

    begin: jax.Array
    end: jax.Array
    order: jax.Array
    count: jax.Array


def _groups(group_sizes: jax.Array, group_offset: jax.Array | None, experts: int, rows: Any) -> _Groups:
    begin, end = bounds(group_sizes, group_offset, experts, rows)
    return _Groups(begin, end, jnp.argsort(begin == end, stable=True), jnp.sum(begin < end))


def _each_group(groups: _Groups, body: Callable, carry: Any) -> Any:
    """Returns the carry after body(e, carry) for each matrix that has rows, in the order of their rows."""
    return lax.fori_loop(0, groups.count, lambda i, carry: body(groups.order[i], carry), carry)


def _each_tile(rows: Any, begin: jax.Array, end: jax.Array, body: Callable, carry: Any) -> Any:
    """Returns the carry after body(size, first row, carry) for each tile; only the last tile of a group may extend past
    its end."""
    for size in _tiles(rows):
        count = (end - begin + (size - 1 if size == TILES[-1] else 0)) // size
        carry = lax.fori_loop(0, count, lambda i, c, b=begin, size=size: body(size, b + i * size, c), carry)
        begin = begin + count * size
    return carry


def _tiles(rows: Any) -> tuple[int, ...]:
    return tuple(size for size in TILES if not isinstance(rows, int) or size <= rows or size == TILES[-1])


def _padded(x: jax.Array) -> jax.Array:
    """Returns x with padding rows at the end, so that the slice of any tile is within bounds."""
    more = TILES[-1] if isinstance(x.shape[0], int) else TILES[0]
    return jnp.pad(x, ((0, more), (0, 0)))


def _rows(x: jax.Array, first: jax.Array, size: int, end: jax.Array | None = None) -> jax.Array:
    """Returns rows of x, with zeros from `end` on, where rows belong to another group."""
    tile = lax.dynamic_slice_in_dim(x, first, size)
    return tile if end is None else jnp.where((first + jnp.arange(size) < end)[:, None], tile, 0)


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), precision, jnp.float32)


class _Weights(NamedTuple):
    """The matrices of a call. `matrix`: e -> that of group e, [D, width] or [width, D], with gate and up concatenated, in the
    dtype of lhs; `d_dim`, the dim of D in it, is 0 or, transposed, 1."""

    matrix: Callable[[jax.Array], jax.Array]
    arrays: jax.Array
    bias: jax.Array | None
    d_dim: int
    width: int

    def products(self, e: jax.Array, matrix: jax.Array, tile: jax.Array) -> jax.Array:
        """Returns the products of rows, in float32, [rows, F] or, gated, [rows, 2, F]."""
        y = _dot(tile, matrix, (1, self.d_dim))
        y = y if self.bias is None else y + self.bias[e].reshape(1, -1).astype(jnp.float32)
        return y.reshape(y.shape[0], 2, -1) if self.arrays.ndim == 4 else y


def _weights(lhs: jax.Array, rhs: Any, rhs_transposed: Any, rhs_bias: Any, rhs_scale: Any = None) -> _Weights:
    arrays, d_dim = (rhs, 0) if rhs_transposed is None else (rhs_transposed, 1)
    _, *rest = arrays.shape
    width = rest[-1 - d_dim] * (rest[1 - d_dim] if len(rest) == 3 else 1)

    def matrix(e: jax.Array) -> jax.Array:
        w = arrays[e]
        if rhs_scale is not None:
            scale = jnp.repeat(rhs_scale[e], w.shape[0 if d_dim == 0 else -1] // rhs_scale.shape[1], axis=0)
            scale = jnp.moveaxis(scale, 0, -1) if d_dim else scale
            w = (w.astype(jnp.float32) * scale.astype(jnp.float32)).astype(lhs.dtype)
        return w.reshape((-1, width) if d_dim == 0 else (width, -1))

    return _Weights(matrix, arrays, rhs_bias, d_dim, width)


def _unpacked(x: jax.Array, w: jax.Array, scales: jax.Array, biases: Any, **how: Any) -> _Weights:
    """Returns matrices that are unpacked one at a time, where the rows of their group are multiplied."""

    def matrix(e: jax.Array) -> jax.Array:
        return dequantized(w[e], scales[e], None if biases is None else biases[e], **how).astype(x.dtype)

    return _Weights(matrix, w, None, 0, w.shape[-1])


def _forward(lhs: jax.Array, w: _Weights, group_sizes: Any, group_offset: Any, activation: str | None) -> jax.Array:
    finish, rows = activated(activation, w.arrays.ndim == 4), lhs.shape[0]
    groups = _groups(group_sizes, group_offset, w.arrays.shape[0], rows)
    padded = _padded(lhs)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        matrix = w.matrix(e)

        def tile(size: int, first: jax.Array, out: jax.Array) -> jax.Array:
            y = finish(w.products(e, matrix, _rows(padded, first, size))).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, y, first, 0)

        return _each_tile(rows, groups.begin[e], groups.end[e], tile, out)

    features = w.width // (2 if w.arrays.ndim == 4 else 1)
    out = _each_group(groups, group, jnp.zeros((padded.shape[0], features), lhs.dtype))
    return _inside(groups, out, rows)


def _inside(groups: _Groups, x: jax.Array, rows: Any) -> jax.Array:
    """Returns the first rows of x, with zeros for rows without a group, since the last tile wrote past the end of its
    group."""
    row = jnp.arange(rows)
    return jnp.where(((row >= groups.begin[0]) & (row < groups.end[-1]))[:, None], x[:rows], 0)


def _backward(
    d_out: jax.Array,
    lhs: jax.Array,
    w: _Weights,
    group_sizes: Any,
    group_offset: Any,
    activation: str | None,
    of_weights: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the gradients of lhs, of the matrices, and of the bias."""
    finish, rows = activated(activation, w.arrays.ndim == 4), lhs.shape[0]
    groups = _groups(group_sizes, group_offset, w.arrays.shape[0], rows)
    padded, d_padded = _padded(lhs), _padded(d_out.astype(lhs.dtype))

    def group(e: jax.Array, carry: Any) -> Any:
        d_lhs, d_arrays, d_bias = carry
        matrix, end = w.matrix(e), groups.end[e]

        def tile(size: int, first: jax.Array, carry: Any) -> Any:
            d_lhs, d_matrix, d_row = carry
            x, d = _rows(padded, first, size, end), _rows(d_padded, first, size, end)
            if activation is not None:  # the products are not stored, so recompute them
                _, pull = jax.vjp(finish, w.products(e, matrix, x))
                d = pull(d.astype(jnp.float32))[0].reshape(size, w.width).astype(lhs.dtype)
            d_x = _dot(d, matrix, (1, 1 - w.d_dim)).astype(lhs.dtype)
            d_lhs = lax.dynamic_update_slice_in_dim(d_lhs, d_x, first, 0)
            if d_matrix is not None:
                d_matrix = d_matrix + (_dot(x, d, (0, 0)) if w.d_dim == 0 else _dot(d, x, (0, 0)))
            if d_row is not None:
                d_row = d_row + jnp.sum(d.astype(jnp.float32), axis=0)
            return d_lhs, d_matrix, d_row

        start = (
            d_lhs,
            None if d_arrays is None else jnp.zeros(matrix.shape, jnp.float32),
            None if d_bias is None else jnp.zeros((w.width,), jnp.float32),
        )
        d_lhs, d_matrix, d_row = _each_tile(rows, groups.begin[e], end, tile, start)
        if d_arrays is not None:
            d_arrays = d_arrays.at[e].set(d_matrix.reshape(d_arrays.shape[1:]).astype(d_arrays.dtype))
        if d_bias is not None:
            d_bias = d_bias.at[e].set(d_row.reshape(d_bias.shape[1:]).astype(d_bias.dtype))
        return d_lhs, d_arrays, d_bias

    start = (
        jnp.zeros(padded.shape, lhs.dtype),
        jnp.zeros_like(w.arrays) if of_weights else None,
        None if w.bias is None else jnp.zeros_like(w.bias),
    )
    d_lhs, d_arrays, d_bias = _each_group(groups, group, start)
    return _inside(groups, d_lhs, rows), d_arrays, d_bias


def forward(lhs, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation):
    return _forward(lhs, _weights(lhs, rhs, rhs_transposed, rhs_bias), group_sizes, group_offset, activation)


def backward(saved, lhs, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation):
    w = _weights(lhs, rhs, rhs_transposed, rhs_bias)
    d_lhs, d_rhs, d_bias = _backward(saved.d_out, lhs, w, group_sizes, group_offset, activation, of_weights=True)
    gradients = {"lhs": d_lhs, "rhs" if rhs_transposed is None else "rhs_transposed": d_rhs}
    return gradients if rhs_bias is None else gradients | {"rhs_bias": d_bias}


def quantized_forward(lhs, rhs, rhs_transposed, group_sizes, rhs_scale, group_offset, rhs_bias, activation):
    return _forward(lhs, _weights(lhs, rhs, rhs_transposed, rhs_bias, rhs_scale), group_sizes, group_offset, activation)


def quantized_backward(saved, lhs, rhs, rhs_transposed, group_sizes, rhs_scale, group_offset, rhs_bias, activation):
    w = _weights(lhs, rhs, rhs_transposed, rhs_bias, rhs_scale)
    d_lhs, _, d_bias = _backward(saved.d_out, lhs, w, group_sizes, group_offset, activation, of_weights=False)
    return {"lhs": d_lhs} if rhs_bias is None else {"lhs": d_lhs, "rhs_bias": d_bias}


def packed_forward(x, w, scales, biases, group_sizes, mode, bits, group_size):
    weights = _unpacked(x, w, scales, biases, mode=mode, bits=bits, group_size=group_size)
    return _forward(x, weights, group_sizes, None, None)


def packed_backward(saved, x, w, scales, biases, group_sizes, mode, bits, group_size):
    weights = _unpacked(x, w, scales, biases, mode=mode, bits=bits, group_size=group_size)
    return {"x": _backward(saved.d_out, x, weights, group_sizes, None, None, of_weights=False)[0]}


def gathered_forward(lhs, rhs, rhs_transposed, group_sizes, rows, slots, group_offset, rhs_bias, activation):
    return forward(gathered_rows(lhs, rows), rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation)


def gathered_backward(saved, lhs, rhs, rhs_transposed, group_sizes, rows, slots, group_offset, rhs_bias, activation):
    x = gathered_rows(lhs, rows)
    gradients = backward(saved, x, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation)
    return gradients | {"lhs": combine_rows(gradients["lhs"], slots)}


_WHERE: Any = {"platforms": {"cpu", "cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}
op.register(forward, backward, symbolic={"M"}, **_WHERE)
quantized_op.register(quantized_forward, quantized_backward, symbolic={"M"}, **_WHERE)
packed_op.register(packed_forward, packed_backward, symbolic={"M"}, **_WHERE)
gathered_op.register(gathered_forward, gathered_backward, symbolic={"M", "tokens"}, **_WHERE)
