"""Pages: where the positions of a request are stored, the values of quantised slots, and writes of new keys and
values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_quantised(cache: Any) -> bool:
    """Returns whether the cache holds int8 or an 8-bit float, so that its values are its numbers times a scale."""
    return np.dtype(cache.dtype).itemsize == 1


def dequantised(slots: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the values of slots: their numbers times the scale, multiplied in float32 and rounded to `dtype` once.

    Args:
      slots: [..., K, H]. scale: [..., K], or broadcastable to it; None is 1.
    """
    if scale is None:
        return slots.astype(dtype)
    compute_dtype = jnp.promote_types(dtype, jnp.float32)
    return (slots.astype(compute_dtype) * scale.astype(compute_dtype)[..., None]).astype(dtype)


def quantised(rows: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns rows in the form that the cache stores: divided by the scale, rounded to nearest even, and clipped to the
    range of `dtype` where it would overflow."""
    if jnp.dtype(dtype).itemsize > 1:
        return rows.astype(dtype)
    x = rows.astype(jnp.float32)
    x = x if scale is None else x / scale.astype(jnp.float32)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(x), limits.min, limits.max).astype(dtype)
    largest = float(jnp.finfo(dtype).max)  # a plain cast would turn larger values into NaN
    return jnp.clip(x, -largest, largest).astype(dtype)


def requests_of_rows(query_start_loc: jax.Array, num_rows: Any) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [M] twice: the request of each row, and its index within the request. Rows before the first and
    after the last request have request -1.

    Args:
      query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...].
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    cuts = query_start_loc.astype(jnp.int32)
    # Counts the requests that begin at or before each row, without comparing each row with each request.
    begun = jnp.zeros((num_rows,), jnp.int32).at[jnp.maximum(cuts[:-1], 0)].add(1, mode="drop")
    request = jnp.cumsum(begun, dtype=jnp.int32) - 1
    r = jnp.maximum(request, 0)
    inside = (request >= 0) & (row < cuts[r + 1])
    return jnp.where(inside, request, -1), row - cuts[r]


def slots_of_new(
    query_start_loc: jax.Array, kv_lens: jax.Array, block_tables: jax.Array, block_size: Any, num_rows: Any
) -> jax.Array:
    """Returns int32 [M]: the slot of each new token, the new ones being the last of their request; negative without a
    slot.

    Slots are numbered through all pages: slot s is entry s % block_size of page s // block_size.
    """
    request, place = requests_of_rows(query_start_loc, num_rows)
    r = jnp.maximum(request, 0)
    cuts = query_start_loc.astype(jnp.int32)
    position = kv_lens.astype(jnp.int32)[r] - (cuts[r + 1] - cuts[r]) + place
    page, last = position // block_size, block_tables.shape[1] - 1
    number = block_tables.astype(jnp.int32)[r, jnp.clip(page, 0, last)]
    # The slot of an invalid page could overflow int32 and wrap to that of a valid one.
    page_exists = (number >= 0) & (number < 2**31 // block_size)
    valid = (request >= 0) & (position >= 0) & (page <= last) & page_exists
    return jnp.where(valid, number * block_size + position % block_size, -1)


def scale_of_slots(scale: jax.Array | None, slots: jax.Array, pages: Any, block_size: Any) -> jax.Array | None:
    """Returns the scale of each of some slots, [M|1, K|1], of scales [pages|1, C|1, K|1]."""
    if scale is None:
        return None
    if scale.shape[:2] == (1, 1):
        return scale[0]
    every = jnp.broadcast_to(scale, (pages, block_size, scale.shape[2])).reshape(pages * block_size, -1)
    return every[jnp.clip(slots, 0, pages * block_size - 1)]


def written(cache: jax.Array, rows: jax.Array, slots: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the cache with row m in slot slots[m], and all other slots unchanged, bit for bit.

    Args:
      cache: [pages, C, K, H]. rows: [M, K, H]. slots: int [M]; rows with a negative slot, or one past the end, are not
        written. Slots must be distinct.
      scale: scale of the slots, [pages|1, C|1, K|1].
    """
    pages, C, K = cache.shape[:3]
    new = quantised(rows, scale_of_slots(scale, slots, pages, C), cache.dtype)
    # Indices past the end are dropped; negative ones would count from the end.
    slots = jnp.where(slots < 0, pages * C, slots)
    return cache.reshape(pages * C, K, -1).at[slots].set(new, mode="drop").reshape(cache.shape)


def append_and_attend_of(append: Callable[..., Any], attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the backend of `append_and_attend` from those of `append_to_cache` and `paged_attention`."""

    def append_and_attend(
        query, key, value, key_cache, value_cache, query_start_loc, kv_lens, block_tables, k_scale, v_scale, softmax_aux,
        alibi_slopes, softmax_scale, logits_soft_cap, causal, window, cfg,
    ):  # fmt: skip
        slots = slots_of_new(query_start_loc, kv_lens, block_tables, key_cache.shape[1], key.shape[0])
        caches = append(key, value, slots, key_cache, value_cache, k_scale, v_scale)
        where = (query_start_loc, kv_lens, block_tables, caches[1], k_scale, v_scale, softmax_aux, alibi_slopes)
        out = attend(query, caches[0], *where, softmax_scale, logits_soft_cap, causal, window, cfg)
        return (out, *caches)

    append_and_attend.__module__ = attend.__module__  # a backend has the name of its module
    return append_and_attend
