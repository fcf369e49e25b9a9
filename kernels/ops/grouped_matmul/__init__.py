"""Grouped matmul: the rows of each group times the group's own matrix, as in mixtures of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.matmul.formats import packing
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.framework.requests import check_groups, check_slots, known
from kernels.framework.segments import indices, searchsorted
from kernels.ops.grouped_matmul.contract import ACTIVATIONS, activated, gathered_op, op, quantized_op
from kernels.ops.grouped_matmul.packed import packed_op

__all__ = [
    "ACTIVATIONS",
    "gathered_op",
    "grouped_matmul",
    "op",
    "packed_op",
    "quantized_grouped_matmul",
    "quantized_op",
]

QUANTIZED = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"grouped_matmul: argument {argument!r} {what}")


def _shape(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


def _check_arrays(lhs: Any, rhs: Any, transposed: bool, bias: Any) -> tuple[tuple[int, ...], bool]:
    """Returns (experts, D, *columns) of rhs, and whether it is quantised."""
    expected = "[E, F, D] or, with a gate, [E, 2, F, D]" if transposed else "[E, D, F] or, with a gate, [E, D, 2, F]"
    if not is_array(rhs) or rhs.ndim not in (3, 4):
        raise _refuse("rhs", f"must be an array {expected}, got {_shape(rhs)}")
    if not is_float_array(lhs) or lhs.ndim != 2:
        several = "; flatten several sequences with lhs.reshape(-1, D); for a batch of equal products use jnp.matmul"
        raise _refuse("lhs", f"must be a float array [M, D], got {_shape(lhs)}" + (several if is_array(lhs) else ""))
    experts, *rest = rhs.shape
    columns, width = (rest[:-1], rest[-1]) if transposed else (rest[1:], rest[0])
    if len(columns) == 2 and columns[0] != 2:
        raise _refuse("rhs", f"must be {expected}, a gate and an up projection, got {_shape(rhs)}")
    if any(isinstance(n, int) and n == 0 for n in (experts, *columns)):
        raise _refuse("rhs", f"of shape {rhs.shape} has no elements; every dim of it but D must be at least 1")
    if width != lhs.shape[1]:
        hint = (
            "; 'transpose_rhs' must be " + str(not transposed) if rest[0 if transposed else -1] == lhs.shape[1] else ""
        )
        raise _refuse("rhs", f"must be {expected} with D = {lhs.shape[1]} of 'lhs', got {_shape(rhs)}{hint}")
    quantised = str(rhs.dtype) in QUANTIZED
    if not quantised and rhs.dtype != lhs.dtype:
        kinds = f"that dtype, or with 'rhs_scale' one of {', '.join(QUANTIZED)}"
        raise _refuse("rhs", f"is {rhs.dtype} but 'lhs' is {lhs.dtype}; cast it to {kinds}")
    if bias is not None and (not is_array(bias) or bias.shape != (experts, *columns)):
        raise _refuse("rhs_bias", f"must have the shape {(experts, *columns)}, got {_shape(bias)}")
    return (experts, width, *columns), quantised


def _scale(scale: Any, shape: tuple[int, ...], transposed: bool) -> jax.Array:
    """Returns the scales as [E, blocks, *columns]."""
    experts, width, *columns = shape
    if not is_float_array(scale):
        raise _refuse("rhs_scale", f"must be a float array, got {_shape(scale)}")
    blocks = scale.shape[-1 if transposed else 1] if scale.ndim == len(shape) else 1
    per_block = (experts, *columns, blocks) if transposed else (experts, blocks, *columns)
    if scale.shape == (experts, *columns):
        return scale[:, None]
    if scale.shape != per_block or not blocks or width % blocks:
        form = "[E, F, blocks]" if transposed else "[E, blocks, F]"
        raise _refuse(
            "rhs_scale",
            f"must have the shape {(experts, *columns)}, one per column, or be {form}: the shape of 'rhs', with a "
            f"number of blocks that divides D = {width} in place of D; got {scale.shape}",
        )
    return jnp.moveaxis(scale, -1, 1) if transposed else scale


def _check_sizes(sizes: Any, experts: int, rows: Any, offset: Any) -> None:
    if not is_array(sizes) or sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise _refuse("group_sizes", f"must be integers [G], the number of rows of each group, got {_shape(sizes)}")
    count = sizes.shape[0]
    if count == experts or (offset is not None and count > experts):
        return
    what = f"has {count} groups, but 'rhs' has E = {experts} matrices"
    if count == rows:
        raise _refuse("group_sizes", what + "; to give the group of each row, use group_ids=")
    raise _refuse(
        "group_sizes", what + "; if 'rhs' has the matrices of some groups only, pass 'group_offset', the first of them"
    )


def _check_inverse(rows: Any, slots: Any, tokens: Any) -> None:
    """Raises ValueError if `rows` and `slots` are known, and name rows that are not there or are not each other's inverse,
    which would make a wrong gradient."""
    token, slot = known(rows), check_slots("grouped_matmul", slots, rows.shape[0])
    if token is None or not isinstance(tokens, int):
        return
    if token.size and token.max() >= tokens:
        last = f"the last of the {tokens} rows of 'lhs' is {tokens - 1}"
        raise _refuse("rows", f"has row {token.max()}, but {last}; use -1 for a row of zeros")
    if slot is None:
        return
    inverse = np.full(token.shape, -1)
    inverse[slot[slot >= 0]] = np.nonzero(slot >= 0)[0]
    if (wrong := inverse != token.astype(np.int64).clip(-1)).any():
        m = int(wrong.argmax())
        where = f"in slots[{inverse[m]}]" if inverse[m] >= 0 else "in no slot"
        raise _refuse(
            "slots",
            f"is not the inverse of 'rows': rows[{m}] = {token[m]}, but {m} is {where}; slots[t] must have each m with "
            "rows[m] = t, and no other but -1",
        )


def _check_gathered(lhs: Any, rows: Any, slots: Any, group_ids: Any, quantised: bool) -> dict[str, jax.Array] | None:
    """Returns `rows` and `slots` by name, or None if there are none."""
    if rows is None and slots is None:
        return None
    if rows is None or slots is None:
        missing, other = ("rows", "slots") if rows is None else ("slots", "rows")
        raise _refuse(
            missing, f"is missing: {other!r} is passed, and each is the inverse of the other; pass both or none"
        )
    if group_ids is not None or quantised:
        what = "'group_ids', which sort rows" if group_ids is not None else "a quantised 'rhs'"
        raise _refuse("rows", f"cannot be combined with {what}; pass lhs[rows] instead of 'lhs'")
    for name, value, ndim, dims in (("rows", rows, 1, "[M]"), ("slots", slots, 2, "[tokens, k]")):
        if not is_array(value) or not jnp.issubdtype(value.dtype, jnp.integer) or value.ndim != ndim:
            raise _refuse(name, f"must be integers {dims}, got {_shape(value)}")
    if slots.shape[0] != lhs.shape[0]:
        raise _refuse("slots", f"must have a row for each of the {lhs.shape[0]} rows of 'lhs', got {_shape(slots)}")
    _check_inverse(rows, slots, lhs.shape[0])
    return {"rows": rows.astype(jnp.int32), "slots": slots.astype(jnp.int32)}


@public(op, quantized_op, gathered_op)
def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Any = None,
    group_offset: Any = None,
    transpose_rhs: bool = False,
    rhs_bias: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    activation: str | None = None,
    *,
    group_ids: Any = None,
    rows: Any = None,
    slots: Any = None,
) -> Prepared:
    """Returns [M, F] in lhs's dtype: each row of lhs times the matrix of its group, accumulated in float32.

    Rows of a group are contiguous (`group_sizes`), or in any order (`group_ids`). Groups may be empty. Rows of a group
    without a matrix in `rhs`, and rows past the last group, are zero.

    Args:
      lhs: [M, D].
      rhs: [E, D, F], a matrix per group; or [E, D, 2, F], a gate and an up projection, with the result
        activation(lhs gate) * (lhs up). A checkpoint's [E, D, 2F] is reshaped to the latter if the gate comes first; if
        they alternate, by `.reshape(E, D, F, 2).swapaxes(2, 3)`.
      group_sizes: int [G], number of rows of each group. G = E, or more with `group_offset`.
      group_offset: int, the group of rhs[0]: the matrices belong to groups group_offset, ..., group_offset + E - 1.
      transpose_rhs: rhs is [E, F, D], or [E, 2, F, D].
      rhs_bias: [E, F], or [E, 2, F], added to the products.
      rhs_scale: float, scales of an rhs of int8, int4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn: [E, F] or [E, 2,
        F], one per column; or the shape of rhs with a number of blocks in place of D, each for D / blocks entries.
        Neither of the two has a gradient.
      activation: "silu" (SwiGLU with a gate), "gelu", "gelu_tanh" or "relu"; None for no activation.
      group_ids: int [M], the group of each row, instead of group_sizes. Rows are sorted by group, and the result is
        unsorted. An id without a matrix, such as -1, gives a row of zeros.
      rows: int [M], the row of lhs [tokens, D] of each row of the result; a negative one is a row of zeros. No copy of these
        rows is made on Hopper. With `group_sizes`, and `slots`.
      slots: int [tokens, k], the inverse of `rows`: where each row of lhs is used, all of them once, and -1 for none. The
        gradient of lhs is summed over k in that order. Values that are traced, or on an accelerator, are not checked: an index
        past the last row then reads the last one, and of slots that are not the inverse the gradient of lhs is wrong.

    lhs, rhs and rhs_bias have gradients. The backward stores only the inputs, and recomputes what the activation needs.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Sources: Gale et al., MegaBlocks, 2022; the functions of this kind in megablox and tokamax.

    >>> import jax.numpy as jnp
    >>> lhs, rhs = jnp.ones((4, 2)), jnp.array([1.0, 2.0, 3.0])[:, None, None] * jnp.ones((3, 2, 1))
    >>> print(grouped_matmul(lhs, rhs, jnp.array([1, 0, 2]))[:, 0])
    [2. 6. 6. 0.]
    >>> print(grouped_matmul(lhs, rhs, group_ids=jnp.array([2, 0, -1, 1]))[:, 0])
    [6. 2. 0. 4.]
    """
    if not isinstance(transpose_rhs, bool):
        raise _refuse("transpose_rhs", f"must be True or False, got {transpose_rhs!r}")
    shape, quantised = _check_arrays(lhs, rhs, transpose_rhs, rhs_bias)
    if quantised != (rhs_scale is not None):
        raise _refuse(
            "rhs_scale",
            f"is required for an rhs of {rhs.dtype}"
            if quantised
            else f"applies to a quantised rhs; multiply the {rhs.dtype} rhs by it",
        )
    if (group_sizes is None) == (group_ids is None):
        passed = "neither is" if group_sizes is None else "both are"
        raise _refuse("group_sizes", f"or 'group_ids' assigns rows to groups, but {passed} given; pass exactly one")
    sizes, order = group_sizes, None
    if group_ids is not None:
        lhs, sizes, order = _sorted(lhs, group_ids, shape[0], group_offset)
        group_offset = None
    sizes = jnp.asarray(sizes) if isinstance(sizes, (list, tuple)) else sizes
    gathered = _check_gathered(lhs, rows, slots, group_ids, quantised)
    count = lhs.shape[0] if gathered is None else gathered["rows"].shape[0]
    _check_sizes(sizes, shape[0], count, group_offset)
    if order is None:
        check_groups("grouped_matmul", group_sizes, count, "lhs" if gathered is None else "rows")
    sizes = sizes.astype(jnp.int32)  # their sums may not fit in a narrower dtype
    activated(activation, len(shape) == 4)
    arguments = {"rhs": None, "rhs_transposed": None, "rhs_transposed" if transpose_rhs else "rhs": rhs}
    arguments |= {"group_sizes": sizes, "group_offset": group_offset, "rhs_bias": rhs_bias, "activation": activation}
    if quantised:
        arguments["rhs_scale"] = _scale(rhs_scale, shape, transpose_rhs)
    chosen = quantized_op if quantised else op
    if gathered is not None:
        chosen = gathered_op
        arguments |= gathered
    call = chosen.bind(lhs, **arguments)
    if order is None:
        return Prepared(call, op=chosen)
    back = jnp.argsort(order)
    return Prepared(call, finish=lambda out: _permuted(out, back), dims=("M", "F"), op=chosen)


def _sorted(lhs: jax.Array, group_ids: Any, experts: int, offset: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (rows sorted by group, sizes of the groups that have matrices, the original index of each row)."""
    ids = indices(group_ids, -1)
    if ids.shape != (lhs.shape[0],) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise _refuse("group_ids", f"must be integers [M] = [{lhs.shape[0]}], the group of each row, got {_shape(ids)}")
    local_ids = ids - (0 if offset is None else offset)
    local_ids = jnp.where((local_ids >= 0) & (local_ids < experts), local_ids, experts)
    order = jnp.argsort(local_ids, stable=True)
    edges = searchsorted(local_ids[order], jnp.arange(experts + 1, dtype=jnp.int32))
    return _permuted(lhs, order), jnp.diff(edges).astype(jnp.int32), order


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns the rows of x permuted by `order`. Since it is a permutation, the gradient is a gather, not a
    scatter-add."""
    return jnp.asarray(x).at[order].get(unique_indices=True, mode="promise_in_bounds")


@public(packed_op)
def quantized_grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None,
    group_sizes: Any,
    *,
    zeros: jax.Array | None = None,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
) -> Prepared:
    """Returns [M, F] in x's dtype: each row of x times the packed matrix of its group, accumulated in float32.

    Rows of a group are contiguous. Groups may be empty; rows past the last group are zero.

    Args:
      x: [M, D].
      w, scales, biases: as `quantize` returns them of [E, D, F]: uint32 [E, D * bits / 32, F], and [E, D / group_size, F];
        biases are None unless the mode is affine.
      group_sizes: int [E], rows of each group. Sizes that are traced, or on an accelerator, are not checked: a group then ends
        at the last row.
      zeros, mode, bits, group_size: as in `quantized_matmul`.

    x has a gradient; the weights have none.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> from kernels import quantize
    >>> w = jnp.array([1.0, 2.0])[:, None, None] * (jnp.arange(32.0)[:, None] % 16)
    >>> print(quantized_grouped_matmul(jnp.ones((3, 32)), *quantize(w, bits=4, group_size=32), jnp.array([2, 1]))[:, 0])
    [240. 240. 480.]
    """
    name = "quantized_grouped_matmul"
    if not is_float_array(x) or x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"{name}: argument 'x' must be a float array [M, D], got {_shape(x)}")
    if not is_array(w) or w.ndim != 3:
        raise ValueError(f"{name}: argument 'w' must be words [E, D * bits / 32, F] from `quantize`, got {_shape(w)}")
    how, biases = packing(name, x.shape[1], w, scales, biases, zeros=zeros, mode=mode, bits=bits, group_size=group_size)
    sizes = jnp.asarray(group_sizes) if isinstance(group_sizes, (list, tuple)) else group_sizes
    if not is_array(sizes) or sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{name}: argument 'group_sizes' must be integers [E] with E = {w.shape[0]} of 'w', the number of rows of each "
            f"group, got {_shape(sizes)}"
        )
    check_groups(name, sizes, x.shape[0], "x")
    return Prepared(packed_op.bind(x, w, scales, biases, sizes.astype(jnp.int32), **how))
