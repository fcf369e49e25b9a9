"""Public functions with the same number of queries in every request: decode steps and chunks of prompts, over pages and
dense caches.

Pages are [num_blocks, block_size, kv_heads, head_dim] in every function; other layouts are never guessed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.public import Prepared
from kernels.framework.requests import check_lengths, check_tables
from kernels.ops.paged_attention import arguments as check
from kernels.ops.paged_attention.arguments import Named
from kernels.ops.paged_attention.contract import decode_op, lse_op, page_op
from kernels.ops.paged_attention.options import attending, options

_ROWS = "[B, N, H] or [B, T, N, H]"
_DENSE = "[B, S, kv_heads, head_dim]"


def _of_rows(query: jax.Array, op: Any, *arguments: Any, **more: Any) -> Prepared:
    """Returns the call of B requests with T queries each; if `query` has no dim T, neither has the output."""
    call = op.bind(query if query.ndim == 4 else query[:, None], *arguments, **more)
    if op is lse_op and query.ndim == 3:
        return Prepared(
            call, finish=lambda *both: tuple(x[:, 0] for x in both), dims=(("B", "N", "Hv"), ("B", "N")), op=op
        )
    if query.ndim == 3:
        return Prepared(call, finish=lambda out: out[:, 0], dims=("B", "N", "Hv"), op=op)
    return Prepared(call, returns=op.outputs if op is lse_op else "out", op=op)


def _over_pages(
    f: str,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    lens: Named,
    block_tables: Any,
    how: Any,
    block_size: Any = None,
    op: Any = page_op,
) -> Prepared:
    check.array(f, "query", query, 3, 4, form=_ROWS)
    check.check_pages(f, query, key_cache, value_cache, block_size)
    B = query.shape[0]
    tables = check.integers(f, "block_tables", block_tables, 2, form="[B, pages of the longest]")
    if tables.shape[0] != B:
        raise check.wrong(f, "block_tables", f"has {tables.shape[0]} rows, but 'query' has {B}")
    lengths = check.lengths(f, *lens, B)
    check_tables(f, lens, ("block_tables", block_tables), *key_cache.shape[:2])
    return _of_rows(query, op, key_cache, lengths, tables, value_cache, **options(f, query, key_cache, **how))


def _over_rows(f: str, query: Any, key: Named, value: Named, lens: Named, starts: Named | None, how: Any) -> Prepared:
    check.array(f, "query", query, 3, 4, form=_ROWS)
    B, N, H = query.shape[0], *query.shape[-2:]
    cache = key.value
    for name, x in (key, value):
        check.array(f, name, x, 4, form=_DENSE)
        if x.shape[0] != B or x.shape[:3] != cache.shape[:3] or x.dtype != cache.dtype:
            message = f"must be {_DENSE} of {B} rows, keys and values alike, got {x.shape} of {x.dtype}"
            raise check.wrong(f, name, message)
    if cache.shape[3] != H:
        raise check.wrong(f, key.name, f"of shape {cache.shape} must have the head_dim {H} of 'query'")
    K = cache.shape[2]
    if N % K:
        hint = f"; it looks like [B, kv_heads, S, head_dim]: pass {key.name}.swapaxes(1, 2)"
        hint = hint if N % cache.shape[1] == 0 else ""
        raise check.wrong(f, key.name, f"has {K} heads, which must divide the {N} of 'query'{hint}")
    lengths = [None if x is None else check.lengths(f, *x, B) for x in (lens, starts)]
    check_lengths(f, *lens, cache.shape[1], f"a row of {key.name!r}", starts)
    return _of_rows(query, decode_op, cache, value.value, *lengths, **options(f, query, cache, **how))


@attending(page_op, lse_op)
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
    block_size: int | None = None,
    return_lse: bool = False,
    **how: Any,
) -> Prepared:
    """Returns the attention of each request's last tokens over its pages, in the shape of `query`: the decode step; with
    `return_lse` also the log-sum-exp of each query's logits and sinks, float32.

    It is causal: a query sees the keys up to its own. There is no gradient.

    Args:
      query: [B, N, H], one token per request, or [B, T, N, H], its last T tokens (speculative decoding).
      key_cache, value_cache: [num_blocks, block_size, K, H], in the dtype of query, or int8 or an 8-bit float. Slots
        that are not keys of a request do not affect its output, even if they contain NaN. Requests may share pages.
      context_lens, or kv_lens: int [B], number of keys of a request, including those of its queries; 0 gives output 0.
      block_tables: int [B, pages of the longest]: position p is entry p % block_size of page
        block_tables[b, p // block_size]. Entries past the last page in use may be anything.
      scale: another name for softmax_scale.
      block_size: if given, must match the cache's.
      return_lse: to merge the result with attention to other keys of the same queries.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((8, 4, 2, 16))
    >>> tables = jnp.array([[5, 0], [1, 7]])
    >>> page_attention(jnp.ones((2, 4, 16)), pages, pages, jnp.array([7, 2]), tables).shape
    (2, 4, 16)
    """
    f = "page_attention"
    lens = check.either(f, context_lens=context_lens, kv_lens=kv_lens)
    how["softmax_scale"] = check.either(f, softmax_scale=softmax_scale, scale=scale, needed=False).value
    tables = check.either(f, block_tables=block_tables).value
    op = lse_op if return_lse else page_op
    return _over_pages(f, query, key_cache, value_cache, lens, tables, how, block_size, op)


@attending(page_op)
def prefill_page_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Any,
    block_tables: Any,
    **how: Any,
) -> Prepared:
    """Returns the causal attention of a chunk of a prompt over the pages that hold the prompt up to the end of the
    chunk.

    Args:
      query: [T, N, H], a chunk of one request, or [B, T, N, H], chunks of several requests of the same length.
      key_cache, value_cache: as in `page_attention`.
      context_lens: int, or [1], or [B]: number of keys of a request, including those of the chunk, which are already in
        the pages.
      block_tables: int [pages] for one request, or [B, pages].

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((8, 4, 2, 16))
    >>> prefill_page_attention(jnp.ones((5, 4, 16)), pages, pages, 7, jnp.array([5, 0])).shape
    (5, 4, 16)
    """
    f = "prefill_page_attention"
    check.array(f, "query", query, 3, 4, form="[T, N, H] or [B, T, N, H]")
    lens = check.integers(f, "context_lens", context_lens, 0, 1, form="of one number, or [B]")
    tables = check.integers(f, "block_tables", block_tables, 1, 2, form="[pages], or [B, pages]")
    rows = query[None] if query.ndim == 3 else query
    lens = Named("context_lens", jnp.atleast_1d(lens))
    tables = jnp.atleast_2d(tables)
    prepared = _over_pages(f, rows, key_cache, value_cache, lens, tables, how)
    if query.ndim == 4:
        return prepared
    return Prepared(prepared.call, finish=lambda out: out[0], dims=("T", "N", "Hv"))


@attending(decode_op)
def decode_attention(
    query: jax.Array, key_cache: jax.Array, value_cache: jax.Array, kv_lens: Any, **how: Any
) -> Prepared:
    """Returns the attention of each row's last tokens over a dense cache, in the shape of `query`: the decode step.

    The work follows the lengths, not the size of the cache.

    Args:
      query: [B, N, H], one token per row, or [B, T, N, H], its last T tokens.
      key_cache, value_cache: [B, S, K, H]; entries past a row's length do not affect the output, even if they contain
        NaN.
      kv_lens: int [B], number of keys of a row, including those of its queries; 0 gives output 0.

    >>> import jax.numpy as jnp
    >>> cache = jnp.ones((2, 32, 2, 16))
    >>> decode_attention(jnp.ones((2, 4, 16)), cache, cache, jnp.array([7, 32])).shape
    (2, 4, 16)
    """
    caches = Named("key_cache", key_cache), Named("value_cache", value_cache)
    return _over_rows("decode_attention", query, *caches, Named("kv_lens", kv_lens), None, how)


@attending(decode_op)
def ragged_decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_start: Any,
    sequence_end: Any,
    softmax_aux: jax.Array | None = None,
    **how: Any,
) -> Prepared:
    """Returns the attention of each row's last tokens over the keys sequence_start[b] ... sequence_end[b] - 1 of its row.

    Args:
      query: [B, N, H] or [B, T, N, H]; the last query is at position sequence_end[b] - 1.
      key, value: [B, S, K, H].
      sequence_start, sequence_end: int [B]. If they are equal, the output is 0.

    >>> import jax.numpy as jnp
    >>> cache = jnp.ones((2, 32, 2, 16))
    >>> ragged_decode_attention(jnp.ones((2, 4, 16)), cache, cache, jnp.array([0, 3]), jnp.array([7, 32])).shape
    (2, 4, 16)
    """
    ends = Named("sequence_end", sequence_end), Named("sequence_start", sequence_start)
    caches = Named("key", key), Named("value", value)
    return _over_rows("ragged_decode_attention", query, *caches, *ends, how | {"softmax_aux": softmax_aux})
