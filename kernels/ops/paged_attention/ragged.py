"""Public functions for packed requests of any lengths, and for writing into pages.

Pages are [num_blocks, block_size, kv_heads, head_dim] in every function; other layouts are never guessed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.public import Prepared, public
from kernels.framework.requests import known
from kernels.ops.paged_attention import arguments as check
from kernels.ops.paged_attention.cache import slots_of_new
from kernels.ops.paged_attention.contract import append_and_attend_op, append_op, op
from kernels.ops.paged_attention.options import attending, options, scales

_TOKENS = "[M, N, H], the concatenated tokens of all requests"


@attending(op)
def ragged_page_attention_v2(
    query: jax.Array,
    kv_pages: jax.Array,
    context_lens: Any = None,
    block_tables: Any = None,
    query_start_loc: Any = None,
    num_seqs: Any = None,
    *,
    kv_lens: Any = None,
    page_indices: Any = None,
    cu_q_lens: Any = None,
    **how: Any,
) -> Prepared:
    """Returns attention [M, N, H] of prompts, chunks of prompts and decodes together, over pages that hold keys and
    values.

    Args:
      query: [M, N, H], the concatenated tokens of all requests; tokens without a request get 0.
      kv_pages: [num_blocks, block_size, 2 * K, H], keys at the even heads and values at the odd ones: head 2 k is the
        key of head k, and 2 k + 1 its value.
      context_lens, or kv_lens: int [requests], number of keys of a request, including those of its queries.
      block_tables, or page_indices: int [requests, pages of the longest].
      query_start_loc, or cu_q_lens: int [requests + 1], [0, n1, n1 + n2, ...].
      num_seqs: number of valid requests, an int or an array of one; default: all.

    >>> import jax.numpy as jnp
    >>> pages, tables = jnp.ones((8, 4, 2 * 2, 16)), jnp.array([[5, 0], [1, 7]])
    >>> ragged_page_attention_v2(jnp.ones((6, 4, 16)), pages, [7, 2], tables, [0, 5, 6]).shape
    (6, 4, 16)
    """
    f = "ragged_page_attention_v2"
    lens = check.either(f, context_lens=context_lens, kv_lens=kv_lens)
    tables = check.either(f, block_tables=block_tables, page_indices=page_indices)
    cuts = check.either(f, query_start_loc=query_start_loc, cu_q_lens=cu_q_lens)
    check.array(f, "query", query, 3, form=_TOKENS)
    form = "[num_blocks, block_size, 2 * kv_heads, head_dim], keys at the even heads and values at the odd ones"
    check.array(f, "kv_pages", kv_pages, 4, form=form)
    pages, C, both, H = kv_pages.shape
    N = query.shape[1]
    if both % 2 or N % (both // 2) or H != query.shape[2]:
        raise check.wrong(
            f,
            "kv_pages",
            f"must be {form}, its kv_heads a divisor of {N} and its head_dim {query.shape[2]}, those of 'query', got "
            f"{kv_pages.shape}",
        )
    # The key and the value of a head are adjacent, so this moves nothing.
    cache = kv_pages.reshape(pages, C, both // 2, 2 * H)
    requests = check.of_requests(f, query.shape[0], cache, cuts, lens, tables, num_seqs)
    return Prepared(op.bind(query, cache, **requests, **options(f, query, cache, **how)))


@attending(op, append_and_attend_op)
def ragged_page_attention_v3(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    page_indices: Any = None,
    query_start_loc: Any = None,
    kv_lens: Any = None,
    block_tables: Any = None,
    num_seqs: Any = None,
    **how: Any,
) -> Prepared:
    """Returns attention [M, N, H] as `ragged_page_attention_v2`, with keys and values in separate pages; with `key` and
    `value`, which are written into the pages first, `(out, key_pages, value_pages)`.

    Args:
      query: [M, N, H], the concatenated tokens of all requests; tokens without a request get 0.
      key_pages, value_pages: [num_blocks, block_size, K, H]. Slots that are not written are returned bit for bit.
        Donate them to the jitted step to update them in place.
      key, value: [M, K, H], for the same tokens: token t of the n of a request goes to position kv_lens - n + t. No
        slot may be written twice. For a quantised cache they are divided by its scale, rounded and saturated, and
        attention reads them so.
      cu_seqlens_q, or query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...].
      cu_seqlens_k: the same for the keys, including those of the queries; or kv_lens: int [requests].
      page_indices, or block_tables: int [requests, pages of the longest].
      num_seqs: number of valid requests; default: all.

    >>> import jax.numpy as jnp
    >>> pages, tables, new = jnp.zeros((8, 4, 2, 16)), jnp.array([[5, 0], [1, 7]]), jnp.ones((6, 2, 16))
    >>> lengths = {"cu_seqlens_q": [0, 5, 6], "cu_seqlens_k": [0, 7, 9], "page_indices": tables}
    >>> ragged_page_attention_v3(jnp.ones((6, 4, 16)), pages, pages, **lengths).shape
    (6, 4, 16)
    >>> out, keys, values = ragged_page_attention_v3(jnp.ones((6, 4, 16)), pages, pages, new, new, **lengths)
    >>> print(keys[0, :, 0, 0], keys[5, :, 0, 0], keys[1, :, 0, 0])
    [1. 1. 1. 0.] [0. 0. 1. 1.] [0. 1. 0. 0.]
    """
    f = "ragged_page_attention_v3"
    cuts = check.either(f, cu_seqlens_q=cu_seqlens_q, query_start_loc=query_start_loc)
    lens = check.either(f, kv_lens=kv_lens, cu_seqlens_k=cu_seqlens_k)
    tables = check.either(f, page_indices=page_indices, block_tables=block_tables)
    if lens.name == "cu_seqlens_k":
        lens = lens._replace(value=jnp.diff(check.integers(f, *lens, 1, form="[0, n1, n1 + n2, ...]")))
    return _ragged(f, query, key, value, key_pages, value_pages, (cuts, lens, tables, num_seqs), how)


def _named(query_start_loc: Any, kv_lens: Any, block_tables: Any) -> list[check.Named]:
    """Returns the requests as arguments of `arguments.of_requests`, under the names that most functions use."""
    arguments = {"query_start_loc": query_start_loc, "kv_lens": kv_lens, "block_tables": block_tables}
    return [check.Named(*x) for x in arguments.items()]


def _check_once(f: str, name: str, values: np.ndarray | None) -> None:
    """Raises ValueError, naming the argument that gives the destinations of new rows, if known slots contain
    duplicates."""
    unique_values, times = np.unique([] if values is None else values[values >= 0], return_counts=True)
    if np.any(times > 1):
        raise check.wrong(f, name, f"has slot {unique_values[times > 1][0]} twice; slots must be distinct")


def _ragged(
    f: str, query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, requests: Any, how: Any
) -> Prepared:
    """Returns the call of ragged queries; with new keys and values, the one that writes them first."""
    check.array(f, "query", query, 3, form=_TOKENS)
    check.check_pages(f, query, key_cache, value_cache)
    more = check.of_requests(f, query.shape[0], key_cache, *requests) | options(f, query, key_cache, **how)
    if key is None and value is None:
        return Prepared(op.bind(query, key_cache, value_cache=value_cache, **more))
    check.check_new(f, key, value, key_cache, value_cache, query.shape[0])
    where = {name: more[name] for name in ("query_start_loc", "kv_lens", "block_tables")}
    if all(known(x) is not None for x in where.values()):  # otherwise the slots are unknown
        slots = slots_of_new(**where, block_size=key_cache.shape[1], num_rows=query.shape[0])
        _check_once(f, requests[2].name, known(slots))
    call = append_and_attend_op.bind(query, key, value, key_cache, value_cache, **more)
    return Prepared(call, returns=append_and_attend_op.outputs, op=append_and_attend_op)


@attending(op)
def unified_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    kv_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    *,
    causal: bool = True,
    **how: Any,
) -> Prepared:
    """Returns attention [M, N, H] of prompts, chunks of prompts and decodes together, over pages.

    Args:
      query: [M, N, H], the concatenated tokens of all requests; tokens without a request get 0.
      key_cache, value_cache: [num_blocks, block_size, K, H], which already have the keys of the queries.
      kv_lens: int [requests], number of keys of a request, including those of its queries.
      block_tables: int [requests, pages of the longest].
      query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...].
      causal: False lets a query see later keys too.

    >>> import jax.numpy as jnp
    >>> pages, tables = jnp.ones((8, 4, 2, 16)), jnp.array([[5, 0], [1, 7]])
    >>> unified_attention(jnp.ones((6, 4, 16)), pages, pages, [7, 2], tables, [0, 5, 6]).shape
    (6, 4, 16)
    """
    f = "unified_attention"
    requests = _named(query_start_loc, kv_lens, block_tables)
    return _ragged(f, query, None, None, key_cache, value_cache, requests, how | {"causal": causal})


@attending(append_and_attend_op)
def chunked_prefill_paged_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    kv_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    **how: Any,
) -> Prepared:
    """Returns `(out, key_cache, value_cache)`: writes the new keys and values into their pages, and computes the
    attention [M, N, H] of prompts, chunks of prompts and decodes together over the result.

    Args:
      query, key, value: [M, N, H], [M, K, H], [M, K, H], the concatenated new tokens of all requests.
      kv_lens: int [requests], number of keys of a request, including the new ones.
      For the others, and for what is written where, see `unified_attention` and `ragged_page_attention_v3`.

    >>> import jax.numpy as jnp
    >>> pages, tables, new = jnp.zeros((8, 4, 2, 16)), jnp.array([[5, 0], [1, 7]]), jnp.ones((6, 2, 16))
    >>> step = chunked_prefill_paged_decode(jnp.ones((6, 4, 16)), new, new, pages, pages, [7, 2], tables, [0, 5, 6])
    >>> [x.shape for x in step]
    [(6, 4, 16), (8, 4, 2, 16), (8, 4, 2, 16)]
    """
    f = "chunked_prefill_paged_decode"
    check.either(f, key=key)
    check.either(f, value=value)
    requests = _named(query_start_loc, kv_lens, block_tables)
    return _ragged(f, query, key, value, key_cache, value_cache, requests, how)


@public(append_op)
def append_to_cache(
    key: jax.Array,
    value: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    slots: Any = None,
    *,
    kv_lens: Any = None,
    block_tables: Any = None,
    query_start_loc: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Prepared:
    """Returns `(key_cache, value_cache)` with the new keys and values in their slots, and all other slots unchanged,
    bit for bit.

    Args:
      key, value: [M, K, H].
      key_cache, value_cache: [num_blocks, block_size, K, H]. Donate them to the jitted step to update them in place.
      slots: int [M], destination of each row: entry s % block_size of page s // block_size. Rows with a negative slot
        are not written, and slots must be distinct.
      kv_lens, block_tables, query_start_loc: instead of slots, as in `unified_attention`: the rows of request r are its
        last.
      k_scale, v_scale: as in `page_attention`; for a quantised cache rows are divided by them, rounded and saturated.

    Raises:
      ValueError: names the invalid argument. Unsupported: no backend can run the call, or a gradient is requested.

    >>> import jax.numpy as jnp
    >>> pages, new = jnp.zeros((2, 4, 1, 8)), jnp.ones((3, 1, 8))
    >>> keys, values = append_to_cache(new, new, pages, pages, [6, -1, 1])
    >>> print(keys[..., 0, 0])
    [[0. 1. 0. 0.]
     [0. 0. 1. 0.]]
    """
    f = "append_to_cache"
    check.check_caches(f, key_cache, value_cache)
    check.check_new(f, key, value, key_cache, value_cache, getattr(key, "shape", (0,))[0])
    where = (query_start_loc, kv_lens, block_tables)
    # Exactly one of the two: `slots`, or all of the others.
    if any((x is None) == (slots is None) for x in where):
        raise check.wrong(
            f, "slots", "or all of 'query_start_loc', 'kv_lens' and 'block_tables' determine the slots; pass either"
        )
    name = "block_tables" if slots is None else "slots"
    if slots is None:
        requests = check.of_requests(f, key.shape[0], key_cache, *_named(*where))
        slots = slots_of_new(**requests, block_size=key_cache.shape[1], num_rows=key.shape[0])
    values = known(slots)  # before the cast to int32, in which a large slot could wrap
    slots = check.integers(f, "slots", slots, 1, form="[M]")
    if slots.shape != key.shape[:1]:
        raise check.wrong(
            f, "slots", f"must have one slot for each of the {key.shape[0]} rows of 'key', got {slots.shape}"
        )
    _check_once(f, name, values)
    destinations = () if values is None else values[values >= 0]
    if len(destinations) and np.max(destinations) >= key_cache.shape[0] * key_cache.shape[1]:
        raise check.wrong(
            f, "slots", f"has slot {np.max(destinations)}, past the {key_cache.shape[0]} pages; -1 writes nothing"
        )
    scale_options = scales(f, key, key_cache, k_scale, v_scale, rows="key")
    return Prepared(
        append_op.bind(key, value, slots, key_cache, value_cache, **scale_options), returns=append_op.outputs
    )
