"""Products of 8-bit floats with scales, and the quantisation of their operands."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_array, is_float_array
from kernels.framework.options import checked
from kernels.framework.public import Prepared, public, public_as_declared
from kernels.framework.requests import check_groups
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig, check_result, op
from kernels.ops.scaled_matmul.formats import DTYPES, SCALINGS, Scaling, quantized
from kernels.ops.scaled_matmul.grouped import check_scales, grouped_op
from kernels.ops.scaled_matmul.quantizing import OPERANDS, activate_op, both_ways_op, cotangents_op, norm_both_ways_op
from kernels.ops.scaled_matmul.quantizing_rows import activate_rows_op, row_cotangents_op, rows_op

__all__ = [
    "SCALINGS",
    "ScaledMatmulConfig",
    "Scaling",
    "activate_both_ways",
    "activate_op",
    "activate_rows",
    "activate_rows_op",
    "activated_row_cotangents",
    "activation_cotangents",
    "both_ways_op",
    "cotangents_op",
    "grouped_op",
    "norm_both_ways_op",
    "normalize_both_ways",
    "op",
    "quantize_both_ways",
    "quantize_rows",
    "quantize_scaled",
    "row_cotangents_op",
    "rows_op",
    "scaled_grouped_matmul",
    "scaled_matmul",
]

# Jitted, because in an eager call each step would be a separate program.
_quantized = functools.partial(jax.jit, static_argnames=("block", "dtype", "exponents"))(quantized)


def _got(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


@checked
def quantize_scaled(
    x: jax.Array,
    block: tuple[int | None, int | None] = (1, None),
    *,
    dtype: str = "float8_e4m3fn",
    exponents: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (values, scales), an operand of `scaled_matmul`: x is about values * scales.

    The scale of a block is its largest magnitude divided by the largest number of the dtype, so none of its values is
    clipped (current scaling). The scale of a block of zeros is 1. The scale of a block with an infinity or NaN is NaN, and so
    is every product with it: neither is hidden.

    Args:
      x: float [M, D], D the contracted dim.
      block: (rows, entries of D) that share a scale, which must divide M and D; None: all of them. (None, None) is one scale
        for all of x, (1, None) one for each row, (1, 128) and (128, 128) those of activations and weights in DeepSeek-V3.
      dtype: "float8_e4m3fn" (4 significant bits, up to 448) or "float8_e5m2" (3, up to 57344). Rounded to nearest even.
      exponents: scales are powers of two, uint8 codes 2 ** (code - 127): the power of two below the largest magnitude, divided
        by that of the largest number of the dtype; values past the end of the dtype are clipped to it. Of blocks (1, 32)
        this is MXFP8.

    Returns:
      values: [M, D] in `dtype`. scales: [M / rows, D / entries], float32 or uint8.

    Raises:
      ValueError: names the argument.

    Sources: Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433; DeepSeek-AI, DeepSeek-V3, 2024,
    arXiv:2412.19437, section 3.3; OCP Microscaling Formats (MX) Specification 1.0, 2023.

    >>> import jax.numpy as jnp
    >>> values, scales = quantize_scaled(jnp.array([[1.0, -448.0], [0.0, 2.0]]))
    >>> print(values.astype(jnp.float32), scales.shape)
    [[   1. -448.]
     [   0.  448.]] (2, 1)
    """
    if not is_float_array(x) or x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"quantize_scaled: argument 'x' must be a float array [M, D], got {_got(x)}")
    if dtype not in DTYPES:
        raise ValueError(f"quantize_scaled: argument 'dtype' = {dtype!r} is unknown; use {' or '.join(DTYPES)}")
    sizes = []
    for name, size, count in zip("MD", x.shape, block):
        part = size if count is None else count
        if part < 1 or size % part:
            raise ValueError(
                f"quantize_scaled: argument 'block' = {block}: {count} does not divide {name} = {size}; pad x with zeros, "
                "which change no scale, or use None for one scale"
            )
        sizes.append(part)
    return _quantized(jnp.asarray(x), block=tuple(sizes), dtype=dtype, exponents=exponents)


def _check_scale(name: str, scale: Any, of: str, x: jax.Array) -> None:
    if not is_array(scale) or scale.dtype not in (jnp.float32, jnp.uint8) or scale.ndim != 2:
        raise ValueError(
            f"scaled_matmul: argument {name!r} must be float32, or uint8 codes of powers of two, [rows, blocks], as "
            f"returned by `quantize_scaled`, got {_got(scale)}"
        )
    divides = 0 not in scale.shape and not any(size % count for size, count in zip(x.shape, scale.shape))
    if not divides or (of == "a" and scale.shape[0] not in (1, x.shape[0])):
        raise ValueError(
            f"scaled_matmul: argument {name!r} of shape {scale.shape} must have a number of rows and of blocks that divide "
            f"those of {of!r}, {x.shape}" + (", and a scale for each row or one for all" if of == "a" else "")
        )


def _check_operand(function: str, name: str, x: Any, dims: str) -> None:
    if not is_array(x) or str(x.dtype) not in DTYPES or x.ndim != dims.count(",") + 1:
        raise ValueError(
            f"{function}: argument {name!r} must be {' or '.join(DTYPES)}, {dims}, got {_got(x)}; `quantize_scaled` makes it "
            "of wider numbers"
        )


@public(op)
def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    dtype: str = "bfloat16",
    fast_accumulation: bool = False,
) -> Prepared:
    """Returns (a * a_scale) (b * b_scale)^T, [M, F] in `dtype`, accumulated in float32.

    Args:
      a: float8_e4m3fn or float8_e5m2, [M, D].
      b: the same, [F, D]: both have the contracted dim last, as tensor cores read 8-bit operands.
      a_scale: [M, blocks] or [1, blocks], as returned by `quantize_scaled`: each for D / blocks consecutive entries of D of
        one row, or of all. Float32, or powers of two, uint8 codes 2 ** (code - 127).
      b_scale: [rows, blocks], each for F / rows consecutive rows.
      dtype: "bfloat16", "float16" or "float32".
      fast_accumulation: leave the sums to the tensor cores where rows have one scale. On Hopper these have about 14 bits: over
        D = 8192 a sum is about 1% off, and as a rule too small.
      cfg: `ScaledMatmulConfig`.

    It has no gradient: 8-bit operands have none. `ejdist.projection` has the products of a layer and their gradients.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> from kernels import quantize_scaled
    >>> a, a_scale = quantize_scaled(jnp.ones((2, 32)))
    >>> b, b_scale = quantize_scaled(jnp.full((3, 32), 2.0))
    >>> print(scaled_matmul(a, b, a_scale, b_scale))
    [[64 64 64]
     [64 64 64]]
    """
    check_result("scaled_matmul", dtype)
    _check_operand("scaled_matmul", "a", a, "[M, D]")
    _check_operand("scaled_matmul", "b", b, "[F, D]")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"scaled_matmul: argument 'b' of shape {b.shape} must be [F, D] with D = {a.shape[1]} of 'a': the contracted dim "
            "is the last one of both"
        )
    _check_scale("a_scale", a_scale, "a", a)
    _check_scale("b_scale", b_scale, "b", b)
    return Prepared(op.bind(a, b, a_scale, b_scale, dtype=dtype, fast_accumulation=fast_accumulation))


quantize_both_ways = public_as_declared(
    both_ways_op,
    """Returns (values, scale, turned, turned_scale), two operands of `scaled_matmul` from one array: x in blocks of `rows` by
    128, summed over D, and x^T in blocks of `turned_rows` by 128, summed over M.

    Each is as `quantize_scaled` returns it. On GPUs that have 8-bit floats x is read once for both; twice with `entries=None`.

    Args:
      x: float [M, D], of sizes that 128 divides.
      rows, turned_rows: 1, or 128: how many rows of an operand share a scale. Blocks of 128 by 128 of a matrix are the same
        both ways, and (1, 128) those of activations and their gradients (DeepSeek-V3).
      entries: 128, or None: one scale for each whole row of an operand.
      matrices: the number of matrices of equal size that are stacked along M in x; `turned` stacks their transposes,
        [matrices * D, M / matrices]. 128 divides the rows of each.
      dtype: "float8_e4m3fn" or "float8_e5m2".

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> values, scale, turned, turned_scale = quantize_both_ways(jnp.ones((128, 256)), turned_rows=128)
    >>> values.shape, scale.shape, turned.shape, turned_scale.shape
    ((128, 256), (128, 2), (256, 128), (2, 1))
    """,
    returns=OPERANDS,
)

normalize_both_ways = public_as_declared(
    norm_both_ways_op,
    """Returns `quantize_both_ways` of rms_norm(x, weight), first rounded to the dtype of x; and also rstd, float32 [M], which
    `rms_norm_cotangents` takes.

    On GPUs that have 8-bit floats the norm is not written: x is read for rstd, and once more for both operands. With
    `entries=None` it is read a third time, for the largest magnitudes of rows and columns.

    Args:
      x: float [M, D], of sizes that 128 divides.
      weight: [D], a scale per feature, in any float dtype.
      eps: added to the mean square.
      entries: 128, or None: one scale for each whole row of an operand.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> [y.shape for y in normalize_both_ways(jnp.ones((128, 256)), jnp.ones(256))]
    [(128, 256), (128, 2), (256, 128), (256, 1), (128,)]
    """,
    returns=norm_both_ways_op.outputs,
)

activate_both_ways = public_as_declared(
    activate_op,
    """Returns `quantize_both_ways` of activation(gate) * up, which is rounded to the dtype of gate before.

    On GPUs that have 8-bit floats gate and up are read once, and the product is not written. With `entries=None` it is
    written together with the largest magnitudes of its rows and columns, and read once.

    Args:
      gate, up: float [M, F], of sizes that 128 divides.
      activation: "silu", "gelu", "gelu_tanh" or "relu".
      entries: 128, or None: one scale for each whole row of an operand.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> values, scale, turned, turned_scale = activate_both_ways(jnp.ones((128, 256)), jnp.ones((128, 256)))
    >>> values.shape, scale.shape, turned.shape, turned_scale.shape
    ((128, 256), (128, 2), (256, 128), (256, 1))
    """,
    returns=OPERANDS,
)

activation_cotangents = public_as_declared(
    cotangents_op,
    """Returns `quantize_both_ways` of the cotangents of gate and then of up, given that of activation(gate) * up; in blocks,
    with `turned_rows=128`.

    On GPUs that have 8-bit floats the three are read once, and the cotangents are written in 8 bits alone. With `entries=None`
    they are written together with the largest magnitudes of their rows and columns, and read once.

    Args:
      gate, up, d: float [M, F], of sizes that 128 divides; d is the cotangent of the product.
      activation: "silu", "gelu", "gelu_tanh" or "relu".
      entries: 128, or None: one scale for each whole row of an operand.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((128, 256))
    >>> [y.shape for y in activation_cotangents(x, x, x)][:4]
    [(128, 256), (128, 2), (256, 128), (2, 1)]
    """,
    returns=cotangents_op.outputs,
)

quantize_rows = public_as_declared(
    rows_op,
    """Returns (values, scale) of x in e4m3, `quantize_scaled` with blocks of (1, 128); on GPUs that have 8-bit floats x is read
    once.

    Args:
      x: float [M, D], D of a size that 128 divides.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> [y.shape for y in quantize_rows(jnp.ones((3, 256)))]
    [(3, 256), (3, 2)]
    """,
    returns=("values", "scale"),
)

activate_rows = public_as_declared(
    activate_rows_op,
    """Returns `quantize_rows` of activation(gate) * up, which is rounded to the dtype of `pair` before.

    On GPUs that have 8-bit floats `pair` is read once, and the product is not written.

    Args:
      pair: float [M, 2, F], gate and up side by side; 128 divides F.
      activation: "silu", "gelu", "gelu_tanh" or "relu".

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> [y.shape for y in activate_rows(jnp.ones((3, 2, 256)))]
    [(3, 256), (3, 2)]
    """,
    returns=("values", "scale"),
)

activated_row_cotangents = public_as_declared(
    row_cotangents_op,
    """Returns (d_pair [M, 2, F], its values [M, 2 F] and scale as of `quantize_rows`, activation(gate) * up [M, F]).

    What a gradient of rows takes is in 8 bits, and what gradients of matrices take as it is. On GPUs that have 8-bit floats
    `pair` and `d` are read once for all of it.

    Args:
      pair: float [M, 2, F], gate and up side by side; 128 divides F.
      d: float [M, F], the cotangent of activation(gate) * up.
      activation: "silu", "gelu", "gelu_tanh" or "relu".

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> [y.shape for y in activated_row_cotangents(jnp.ones((3, 2, 128)), jnp.ones((3, 128)))]
    [(3, 2, 128), (3, 256), (3, 2), (3, 128)]
    """,
    returns=row_cotangents_op.outputs,
)


@public(grouped_op)
def scaled_grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: Any,
    *,
    dtype: str = "bfloat16",
) -> Prepared:
    """Returns [M, F]: each row of a * a_scale times the matrix of its group, b * b_scale [F, D] transposed, accumulated in
    float32. Rows of a group are contiguous; rows past the last group are zero.

    Args:
      a: float8_e4m3fn or float8_e5m2, [M, D]. b: the same, [E, F, D], a matrix for each group.
      a_scale, b_scale: float32, as `quantize_scaled` returns them of a and of each matrix. Hopper has a kernel for those of
        rows, [M, 1] and [E, F, 1], and of blocks of 128, [M, D / 128] and [E, F / 128, D / 128], where 128 divides D and F;
        other calls are XLA's.
      group_sizes: int [E], rows of each group. Sizes that are traced, or on an accelerator, are not checked: a group then ends
        at the last row.
      dtype: "bfloat16", "float16" or "float32".

    It has no gradient. The gradient of the rows is such a product of their cotangents [M, F] with the matrices [E, D, F].

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax, jax.numpy as jnp
    >>> from kernels import quantize_scaled
    >>> a, a_scale = quantize_scaled(jnp.ones((3, 128)), (1, 128))
    >>> b, b_scale = jax.vmap(lambda w: quantize_scaled(w, (128, 128)))(jnp.ones((2, 128, 128)) * jnp.array([[[1.0]], [[2.0]]]))
    >>> print(scaled_grouped_matmul(a, b, a_scale, b_scale, jnp.array([1, 2]))[:, 0])
    [128 256 256]
    """
    check_result(name := "scaled_grouped_matmul", dtype)
    _check_operand(name, "a", a, "[M, D]")
    _check_operand(name, "b", b, "[E, F, D]")
    for argument, scale, dims in (("a_scale", a_scale, "[M, blocks]"), ("b_scale", b_scale, "[E, rows, blocks]")):
        if not is_array(scale) or scale.dtype != jnp.float32 or scale.ndim != dims.count(",") + 1:
            raise ValueError(
                f"{name}: argument {argument!r} must be float32, {dims}, as returned by `quantize_scaled` with "
                f"exponents=False, got {_got(scale)}"
            )
    check_scales(a, b, a_scale, b_scale)
    call = grouped_op.bind(a, b, a_scale, b_scale, group_sizes, dtype=dtype)
    check_groups(name, call.group_sizes, a.shape[0], "a")
    return Prepared(call)
