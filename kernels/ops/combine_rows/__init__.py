"""Combine: the weighted sum of each token's rows, which lie anywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.combine_rows.contract import CombineRowsConfig, op

__all__ = ["CombineRowsConfig", "combine_rows", "op"]


def _got(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"combine_rows: argument {argument!r} {what}")


def _integers(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)


@public(op)
def combine_rows(rows: jax.Array, slots: Any, pairs: Any = None, weights: jax.Array | None = None) -> Prepared:
    """Returns out[t] = sum over j of weights[t, j] * rows[slots[t, j]], [tokens, D] in the dtype of rows, added in float32 in
    the order of j.

    Args:
      rows: [M, D], as an expert computed them, say.
      slots: int [tokens, k], the rows of each token; -1 for none. No row may be in two of them.
      pairs: int [M], the inverse: pairs[slots[t, j]] = t * k + j; -1 for a row that no token has. Computed if it is not passed.
      weights: float [tokens, k]; None for a plain sum.

    rows and weights have gradients, which are gathers: nothing is added in an order that is not fixed.

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
    slots = jnp.asarray(slots).astype(jnp.int32)
    if pairs is None:
        flat = jnp.where(slots < 0, rows.shape[0], slots).reshape(-1)
        index = jnp.arange(slots.size, dtype=jnp.int32)
        pairs = jnp.full(rows.shape[:1], -1, jnp.int32).at[flat].set(index, mode="drop")
    return Prepared(op.bind(rows, slots, jnp.asarray(pairs).astype(jnp.int32), weights))
