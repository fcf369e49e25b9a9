"""Pages: where a position of a request lies, what a quantised slot means, and how new keys and values get into slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_quantised(cache: Any) -> bool:
    """Returns whether the cache holds int8 or an 8-bit float: numbers that mean themselves times a scale."""
    return np.dtype(cache.dtype).itemsize == 1


def dequantised(slots: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns what slots mean: their numbers times the scale, multiplied in float32 and rounded to `dtype` once.

    Args:
      slots: [..., K, H]. scale: [..., K], or what broadcasts to it; None is 1.
    """
    if scale is None:
        return slots.astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (slots.astype(wide) * scale.astype(wide)[..., None]).astype(dtype)


def quantised(rows: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns rows as the cache keeps them: divided by the scale, rounded to nearest even, and at most the largest number that
    `dtype` has, where it would overflow."""
    if jnp.dtype(dtype).itemsize > 1:
        return rows.astype(dtype)
    x = rows.astype(jnp.float32)
    x = x if scale is None else x / scale.astype(jnp.float32)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(x), limits.min, limits.max).astype(dtype)
    largest = float(jnp.finfo(dtype).max)  # a cast alone would make NaN of what is larger
    return jnp.clip(x, -largest, largest).astype(dtype)


def requests_of_rows(query_start_loc: jax.Array, num_rows: Any) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [M] twice: which request each row is of, and its place in it; rows before the first and after the last
    request have request -1.

    Args:
      query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...].
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    cuts = query_start_loc.astype(jnp.int32)
    # How many requests begin at or before each row, without comparing every row with every request.
    begun = jnp.zeros((num_rows,), jnp.int32).at[jnp.maximum(cuts[:-1], 0)].add(1, mode="drop")
    request = jnp.cumsum(begun, dtype=jnp.int32) - 1
    at = jnp.maximum(request, 0)
    inside = (request >= 0) & (row < cuts[at + 1])
    return jnp.where(inside, request, -1), row - cuts[at]


def slots_of_new(
    query_start_loc: jax.Array, kv_lens: jax.Array, block_tables: jax.Array, block_size: Any, num_rows: Any
) -> jax.Array:
    """Returns int32 [M]: the slot of each new token, which are the last of their request; negative where there is none.

    A slot is counted through all pages: slot s is entry s % block_size of page s // block_size.
    """
    request, place = requests_of_rows(query_start_loc, num_rows)
    r = jnp.maximum(request, 0)
    cuts = query_start_loc.astype(jnp.int32)
    position = kv_lens.astype(jnp.int32)[r] - (cuts[r + 1] - cuts[r]) + place
    page, last = position // block_size, block_tables.shape[1] - 1
    number = block_tables.astype(jnp.int32)[r, jnp.clip(page, 0, last)]
    # The slots of what is no page may be past an int32, and come out as those of one.
    known = (number >= 0) & (number < 2**31 // block_size)
    there = (request >= 0) & (position >= 0) & (page <= last) & known
    return jnp.where(there, number * block_size + position % block_size, -1)


def written(cache: jax.Array, rows: jax.Array, slots: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the cache with row m in slot slots[m], and every other slot as it was, bit for bit.

    Args:
      cache: [pages, C, K, H]. rows: [M, K, H]. slots: int [M]; one that is negative or past the end is not written. No two
        rows may have the same.
      scale: what slots are multiplied by, [pages|1, C|1, K|1].
    """
    pages, C, K = cache.shape[:3]
    if scale is not None and scale.shape[:2] != (1, 1):
        scale = jnp.broadcast_to(scale, (pages, C, scale.shape[2])).reshape(pages * C, -1)
        scale = scale[jnp.clip(slots, 0, pages * C - 1)]
    elif scale is not None:
        scale = scale[0]
    new = quantised(rows, scale, cache.dtype)
    # Dropped is what lies past the end, and a negative index would count from there.
    slots = jnp.where(slots < 0, pages * C, slots)
    return cache.reshape(pages * C, K, -1).at[slots].set(new, mode="drop").reshape(cache.shape)
