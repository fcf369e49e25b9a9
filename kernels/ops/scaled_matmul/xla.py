"""A product of 8-bit floats with scales in plain XLA, any device.

The products of the entries that share scales are summed in float32 and then scaled, so no operand is rounded; scales that are
powers of two multiply the operands, exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.ops.grouped_matmul import grouped_matmul
from kernels.ops.scaled_matmul.contract import op
from kernels.ops.scaled_matmul.formats import column, spread, step_of
from kernels.ops.scaled_matmul.grouped import check_scales, grouped_op
from kernels.ops.scaled_matmul.quantizing import (
    activate_both_ways,
    activate_op,
    activation_cotangents,
    both_ways_op,
    cotangents_op,
    norm_both_ways_op,
    normalize_both_ways,
    quantize_both_ways,
)
from kernels.ops.scaled_matmul.quantizing_rows import (
    activate_rows,
    activate_rows_op,
    activated_row_cotangents,
    quantize_rows,
    row_cotangents_op,
    rows_op,
)


def _product(a: jax.Array, b: jax.Array, narrow: bool) -> jax.Array:
    """Returns a b^T in float32. Numbers of 8 bits are numbers of bfloat16 and of tf32 too, so that a device may multiply them
    as such: on TPUs in one pass."""
    precision = lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST
    left, right = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision, jnp.float32)


def forward(a, b, a_scale, b_scale, dtype, fast_accumulation):  # in float32, whether it may be less or not
    (M, D), F = a.shape, b.shape[0]
    narrow = a.dtype.itemsize == b.dtype.itemsize == 1
    if a_scale.dtype == b_scale.dtype == jnp.uint8:
        left, right = (x.astype(jnp.float32) * spread(s, x.shape) for x, s in ((a, a_scale), (b, b_scale)))
        return _product(left, right, narrow).astype(dtype)
    width = step_of(D, a_scale, b_scale)
    steps = D // width

    def step(i, out):
        left, right = (lax.dynamic_slice_in_dim(x, i * width, width, 1) for x in (a, b))
        of_rows, of_columns = column(a_scale, i, steps, M), column(b_scale, i, steps, F)
        return out + _product(left, right, narrow) * of_rows[:, None] * of_columns[None, :]

    start = jnp.zeros((M, F), jnp.float32)
    return (step(0, start) if steps == 1 else lax.fori_loop(0, steps, step, start)).astype(dtype)


op.register(
    forward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float8_e4m3fn", "float8_e5m2", "float32", "bfloat16", "float16"},
)


def grouped(a, b, a_scale, b_scale, group_sizes, dtype):
    """Operands are made wide: exactly, in float32."""
    check_scales(a, b, a_scale, b_scale)
    left = a.astype(jnp.float32) * spread(a_scale, a.shape)
    right = b.astype(jnp.float32) * jax.vmap(lambda s: spread(s, b.shape[1:]))(b_scale)
    return grouped_matmul(left, right, group_sizes, transpose_rhs=True).astype(dtype)


grouped_op.register(
    grouped,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float8_e4m3fn", "float8_e5m2", "float32", "bfloat16", "float16"},
)


def both_ways(x, rows, turned_rows, entries, matrices, dtype):
    return quantize_both_ways(x, rows=rows, turned_rows=turned_rows, entries=entries, matrices=matrices, dtype=dtype)


def normalised(x, weight, eps, entries):
    return normalize_both_ways(x, weight, eps=eps, entries=entries)


def activate(gate, up, activation, entries):
    return activate_both_ways(gate, up, activation=activation, entries=entries)


def cotangents(gate, up, d, activation, entries):
    return activation_cotangents(gate, up, d, activation=activation, entries=entries)


def rows(x):
    return quantize_rows(x)


def pairs(pair, activation):
    return activate_rows(pair, activation=activation)


def pair_cotangents(pair, d, activation):
    return activated_row_cotangents(pair, d, activation=activation)


for _op, _function in (
    (both_ways_op, both_ways),
    (norm_both_ways_op, normalised),
    (activate_op, activate),
    (cotangents_op, cotangents),
    (rows_op, rows),
    (activate_rows_op, pairs),
    (row_cotangents_op, pair_cotangents),
):
    _op.register(_function, platforms={"cpu", "cuda", "rocm", "tpu"}, dtypes={"float32", "bfloat16", "float16"})
