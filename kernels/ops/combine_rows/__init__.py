"""Combine: the weighted sum of each token's rows, which lie anywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.framework.requests import check_slots, known
from kernels.ops.combine_rows.contract import CombineRowsConfig, op

__all__ = ["CombineRowsConfig", "combine_rows", "op"]


def _got(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"combine_rows: argument {argument!r} {what}")


def _integers(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)


def _check_places(slots: Any, pairs: Any, rows: Any) -> None:
    """Raises ValueError if slots are known and name a row that is not there, or one twice, or are not the inverse of pairs."""
    slot, pair = check_slots("combine_rows", slots, rows), None if pairs is None else known(pairs)
    if slot is None or pair is None:
        return
    inverse = np.full(pair.shape, -1)
    inverse[slot[slot >= 0]] = np.flatnonzero(slot >= 0)
    if (wrong := inverse != pair.astype(np.int64).clip(-1)).any():
        m = wrong.argmax()
        raise _refuse(
            "pairs", f"is not the inverse of 'slots': pairs[{m}] is {pair[m]} and must be {inverse[m]}; or leave it out"
        )


@public(op)
def combine_rows(
    rows: jax.Array,
    slots: Any,
    pairs: Any = None,
    weights: jax.Array | None = None,
    total: jax.Array | None = None,
) -> Prepared:
    """Returns out[t] = sum over j of weights[t, j] * rows[slots[t, j]], [tokens, D] in the dtype of rows, added in float32 in
    the order of j.

    Args:
      rows: [M, D], as an expert computed them, say.
      slots: int [tokens, k], the rows of each token; -1 for none. No row may be in two of them.
      pairs: int [M], the inverse: pairs[slots[t, j]] = t * k + j; -1 for a row that no token has. Computed if it is not passed.
      weights: float [tokens, k]; None for a plain sum.
      total: [tokens, D] in the dtype of rows, to which the first row is added. On NVIDIA GPUs the result is written over it, if
        nothing else reads it, and tokens without a row are not touched.

    rows, weights and total have gradients, which are gathers: nothing is added in an order that is not fixed. Slots and pairs
    that are traced, or on an accelerator, are not checked: a slot past the last row then reads the last one, and a row in
    two slots, or pairs that are not the inverse, get a wrong gradient.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[1.0], [10.0], [100.0], [jnp.nan]])
    >>> print(combine_rows(rows, jnp.array([[2, 0], [1, -1]]), weights=jnp.array([[1.0, 2.0], [3.0, 4.0]])))
    [[102.]
     [ 30.]]
    """
    if not is_float_array(rows) or rows.ndim != 2:
        raise _refuse("rows", f"must be a float array [M, D], got {_got(rows)}")
    if not _integers(slots) or slots.ndim != 2:
        raise _refuse("slots", f"must be integers [tokens, k], the rows of each token, got {_got(slots)}")
    if pairs is not None and (not _integers(pairs) or pairs.shape != rows.shape[:1]):
        raise _refuse("pairs", f"must be integers [M] = {rows.shape[:1]}, the inverse of 'slots', got {_got(pairs)}")
    if weights is not None and (not is_float_array(weights) or weights.shape != slots.shape):
        raise _refuse("weights", f"must be a float array of the shape {slots.shape} of 'slots', got {_got(weights)}")
    if total is not None and (
        not is_float_array(total) or (total.shape, total.dtype) != ((slots.shape[0], rows.shape[1]), rows.dtype)
    ):
        raise _refuse(
            "total",
            f"must be an array of {rows.dtype} of shape {(slots.shape[0], rows.shape[1])}, [tokens, D], got {_got(total)}",
        )
    _check_places(slots, pairs, rows.shape[0])
    slots = jnp.asarray(slots).astype(jnp.int32)
    if pairs is None:
        flat = jnp.where(slots < 0, rows.shape[0], slots).reshape(-1)
        index = jnp.arange(slots.size, dtype=jnp.int32)
        pairs = jnp.full(rows.shape[:1], -1, jnp.int32).at[flat].set(index, mode="drop")
    return Prepared(op.bind(rows, slots, jnp.asarray(pairs).astype(jnp.int32), weights, total))
