"""What users call with as many queries in every request: decode steps and chunks of prompts, over pages and dense caches.

Pages are [num_blocks, block_size, kv_heads, head_dim], in every function; no other layout is guessed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels._core.public import Prepared, public
from kernels.ops.paged_attention import arguments as given
from kernels.ops.paged_attention.contract import decode_op, page_op

_ROWS = "[B, N, H] or [B, T, N, H]"


def _of_pages(
    function, query, key_cache, value_cache, lens, tables, scales, options, name, block_size=None
) -> Prepared:
    """Returns the call of B requests with T queries each; a query without T gives an output without it."""
    given.array(function, "query", query, 3, 4, form=_ROWS)
    given.check_pages(function, query, key_cache, value_cache, block_size)
    rows = query[:, None] if query.ndim == 3 else query
    B = rows.shape[0]
    tables = given.integers(function, "block_tables", tables, 2, form="[B, pages of the longest]")
    if tables.shape[0] != B:
        raise given.wrong(function, "block_tables", f"has {tables.shape[0]} rows, and 'query' {B}")
    call = page_op.bind(
        rows,
        key_cache,
        given.lengths(function, name, lens, B),
        tables,
        value_cache,
        **given.scales(function, query, key_cache, *scales),
        **given.options(function, query, *options),
    )
    if query.ndim == 4:
        return Prepared(call)
    return Prepared(call, finish=lambda out: out[:, 0], dims=("B", "N", "Hv"))


@public(page_op)
def page_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Any = None,
    block_tables: Any = None,
    *,
    kv_lens: Any = None,
    softmax_scale: float | None = None,
    scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    block_size: int | None = None,
) -> Prepared:
    """Returns the attention of each request's last tokens over its pages, in the shape of `query`: the decode step.

    Everything means what it means in `flash_attention(causal=True)`. There is no gradient.

    Args:
      query: [B, N, H], one token of each request, or [B, T, N, H], its T last ones (speculative decoding).
      key_cache, value_cache: [num_blocks, block_size, K, H], in the dtype of query, or int8 or an 8-bit float. What lies in
        slots that are no key of a request, NaN too, is in no output of it. Requests may share pages.
      context_lens, or kv_lens: int [B], how many keys a request has, those of its queries included; 0 gives the output 0.
      block_tables: int [B, pages of the longest]: position p lies in entry p % block_size of page
        block_tables[b, p // block_size]. Entries past the last page that is used may be anything.
      softmax_scale, or scale: default 1/sqrt(H).
      sliding_window: W for exactly W keys i - W < j <= i, or (left, right), None for an open side.
      logits_soft_cap: c in c * tanh(logits / c).
      softmax_aux: sinks, [N] or [N, n]: logits that join the denominator and have no value.
      alibi_slopes: [N]; slope * |i - j| is subtracted from the logits.
      k_scale, v_scale: what a quantised cache is multiplied by: a number, one for each head [K], or one for each slot and head
        [num_blocks, block_size, K]. Needed for int8; 1 by default for 8-bit floats.
      block_size: checked, where given, against the cache's.
      cfg: `PagedAttentionConfig`.

    Raises:
      ValueError: an argument is wrong; the message names it. Unsupported: the platform cannot, or a gradient was asked for.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((8, 4, 2, 16))
    >>> tables = jnp.array([[5, 0], [1, 7]])
    >>> page_attention(jnp.ones((2, 4, 16)), pages, pages, jnp.array([7, 2]), tables).shape
    (2, 4, 16)
    """
    f = "page_attention"
    lens = given.either(f, ("context_lens", context_lens), ("kv_lens", kv_lens))
    softmax_scale = given.either(f, ("softmax_scale", softmax_scale), ("scale", scale), needed=False)
    name = "context_lens" if kv_lens is None else "kv_lens"
    tables = given.either(f, ("block_tables", block_tables))
    options = (softmax_scale, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes)
    return _of_pages(f, query, key_cache, value_cache, lens, tables, (k_scale, v_scale), options, name, block_size)


@public(page_op)
def prefill_page_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Any,
    block_tables: Any,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Prepared:
    """Returns the causal attention of a chunk of a prompt over the pages that hold the prompt up to its end.

    Args:
      query: [T, N, H], a chunk of one request, or [B, T, N, H], chunks as long of several.
      context_lens: int, or [1], or [B]: how many keys a request has, those of the chunk included, which are in the pages.
      block_tables: int [pages] of the one request, or [B, pages].
      The others are as in `page_attention`.

    Raises:
      ValueError: an argument is wrong; the message names it. Unsupported: the platform cannot, or a gradient was asked for.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((8, 4, 2, 16))
    >>> prefill_page_attention(jnp.ones((5, 4, 16)), pages, pages, 7, jnp.array([5, 0])).shape
    (5, 4, 16)
    """
    f = "prefill_page_attention"
    given.array(f, "query", query, 3, 4, form="[T, N, H] or [B, T, N, H]")
    lens, tables = jnp.asarray(context_lens), jnp.asarray(block_tables)
    rows = query[None] if query.ndim == 3 else query
    lens = lens[None] if lens.ndim == 0 else lens
    tables = tables[None] if tables.ndim == 1 else tables
    options = (softmax_scale, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes)
    prepared = _of_pages(f, rows, key_cache, value_cache, lens, tables, (k_scale, v_scale), options, "context_lens")
    if query.ndim == 4:
        return prepared
    return Prepared(prepared.call, finish=lambda out: out[0], dims=("T", "N", "Hv"))


def _of_rows(function, query, caches, names, lens, starts, scales, options) -> Prepared:
    """Returns the call of B rows of a dense cache; `names` are those of keys, values, lengths and starts."""
    given.array(function, "query", query, 3, 4, form=_ROWS)
    form = "[B, S, kv_heads, head_dim]"
    for name, x in zip(names, caches, strict=False):
        given.array(function, name, x, 4, form=form)
        if x.shape[0] != query.shape[0] or x.shape[:3] != caches[0].shape[:3] or x.dtype != caches[0].dtype:
            raise given.wrong(
                function,
                name,
                f"must be {form} of {query.shape[0]} rows, keys and values alike, got {x.shape} of {x.dtype}",
            )
    if caches[0].shape[3] != query.shape[-1]:
        raise given.wrong(
            function, names[0], f"of shape {caches[0].shape} must have the head_dim {query.shape[-1]} of 'query'"
        )
    N, K = query.shape[-2], caches[0].shape[2]
    if N % K:
        hint = f"; it looks like [B, kv_heads, S, head_dim]: give {names[0]}.swapaxes(1, 2)"
        hint = hint if N % caches[0].shape[1] == 0 else ""
        raise given.wrong(function, names[0], f"has {K} heads, no divisor of the {N} of 'query'{hint}")
    B = query.shape[0]
    call = decode_op.bind(
        query[:, None] if query.ndim == 3 else query,
        *caches,
        given.lengths(function, names[2], lens, B),
        None if starts is None else given.lengths(function, names[3], starts, B),
        **given.scales(function, query, caches[0], *scales),
        **given.options(function, query, *options),
    )
    if query.ndim == 4:
        return Prepared(call)
    return Prepared(call, finish=lambda out: out[:, 0], dims=("B", "N", "Hv"))


@public(decode_op)
def decode_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    kv_lens: Any,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Prepared:
    """Returns the attention of each row's last tokens over a dense cache, in the shape of `query`: the decode step.

    The work follows the lengths, not the size of the cache.

    Args:
      query: [B, N, H], one token of each row, or [B, T, N, H], its T last ones.
      key_cache, value_cache: [B, S, K, H]; what lies past a row's length, NaN too, is in no output.
      kv_lens: int [B], how many keys a row has, those of its queries included; 0 gives the output 0.
      k_scale, v_scale: a number, or one for each head [K], or one for each slot and head [B, S, K].
      The others are as in `page_attention`.

    Raises:
      ValueError: an argument is wrong; the message names it. Unsupported: the platform cannot, or a gradient was asked for.

    >>> import jax.numpy as jnp
    >>> cache = jnp.ones((2, 32, 2, 16))
    >>> decode_attention(jnp.ones((2, 4, 16)), cache, cache, jnp.array([7, 32])).shape
    (2, 4, 16)
    """
    options = (softmax_scale, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes)
    names = ("key_cache", "value_cache", "kv_lens", "")
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    return _of_rows("decode_attention", query, caches, names, kv_lens, None, scales, options)


@public(decode_op)
def ragged_decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_start: Any,
    sequence_end: Any,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Prepared:
    """Returns the attention of each row's last tokens over the keys sequence_start[b] ... sequence_end[b] - 1 of its row.

    Args:
      query: [B, N, H] or [B, T, N, H]; the last query is at position sequence_end[b] - 1.
      key, value: [B, S, K, H].
      sequence_start, sequence_end: int [B]. Where they are equal the output is 0.
      The others are as in `decode_attention`.

    Raises:
      ValueError: an argument is wrong; the message names it. Unsupported: the platform cannot, or a gradient was asked for.

    >>> import jax.numpy as jnp
    >>> cache = jnp.ones((2, 32, 2, 16))
    >>> ragged_decode_attention(jnp.ones((2, 4, 16)), cache, cache, jnp.array([0, 3]), jnp.array([7, 32])).shape
    (2, 4, 16)
    """
    options = (softmax_scale, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes)
    names = ("key", "value", "sequence_end", "sequence_start")
    scales = (k_scale, v_scale)
    return _of_rows(
        "ragged_decode_attention", query, (key, value), names, sequence_end, sequence_start, scales, options
    )
