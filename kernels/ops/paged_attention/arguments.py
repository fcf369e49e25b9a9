"""Checks serving arguments and converts them to the contracts' form. Every message names the function and the
argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_array
from kernels.framework.requests import check_cuts, check_tables, known
from kernels.framework.segments import indices
from kernels.ops.paged_attention.cache import is_quantised

PAGES = "[num_blocks, block_size, kv_heads, head_dim]"


class Named(NamedTuple):
    """An argument with the name that the caller used."""

    name: str
    value: Any


def wrong(function: str, name: str, message: str) -> ValueError:
    return ValueError(f"{function}: argument {name!r} {message}")


def array(function: str, name: str, x: Any, *ndims: int, form: str) -> Any:
    """Returns the value. Raises ValueError unless it is an array with `ndims` dims, none of size 0."""
    if not is_array(x) or x.ndim not in ndims:
        got = f"shape {x.shape}" if is_array(x) else type(x).__name__
        raise wrong(function, name, f"must be an array {form}, got {got}")
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        raise wrong(function, name, f"of shape {x.shape} is empty; skip the call")
    return x


def integers(function: str, name: str, x: Any, *ndims: int, form: str) -> jax.Array:
    """Returns an array or list of integers as int32."""
    if x is None:
        raise ValueError(f"{function}: argument {name!r} is missing")
    x = x if is_array(x) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise wrong(function, name, f"must hold integers, got {x.dtype}")
    return indices(array(function, name, x, *ndims, form=form))


def either(function: str, *, needed: bool = True, **arguments: Any) -> Named:
    """Returns the argument that is given, of several names for it."""
    passed = [Named(name, x) for name, x in arguments.items() if x is not None]
    if len(passed) > 1:
        names = " and ".join(map(repr, arguments))
        raise ValueError(f"{function}: arguments {names} are names for the same argument; pass only one")
    first = next(iter(arguments))
    if not passed and needed:
        raise ValueError(f"{function}: argument {first!r} is missing")
    return passed[0] if passed else Named(first, None)


def check_caches(function: str, key_cache: Any, value_cache: Any) -> None:
    """Raises ValueError unless the caches are pages `PAGES` that agree in all but the width of a head."""
    for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
        array(function, name, x, 4, form=PAGES)
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise wrong(
            function,
            "value_cache",
            f"must have the num_blocks, block_size, kv_heads {key_cache.shape[:3]} and the dtype {key_cache.dtype} of "
            f"'key_cache', got {value_cache.shape[:3]} and {value_cache.dtype}",
        )


def check_pages(function: str, query: Any, key_cache: Any, value_cache: Any, block_size: int | None = None) -> None:
    """Raises ValueError unless the caches are pages `PAGES` that fit the queries. If they fit another layout, the
    message says how to convert it."""
    check_caches(function, key_cache, value_cache)
    N, H = query.shape[-2:]
    a, b, c, width = key_cache.shape
    subject = f"of shape {key_cache.shape} must be {PAGES}"
    heads_first = "; it looks like [num_blocks, kv_heads, block_size, head_dim]: pass {0}.swapaxes(1, 2)"
    heads_outermost = "; it looks like [kv_heads, num_blocks, block_size, head_dim]: pass {0}.transpose(1, 2, 0, 3)"
    hint = ""
    if N % c and N % b == 0:
        hint = heads_first
    elif N % c and N % a == 0:
        hint = heads_outermost
    if block_size is not None and b != block_size:
        hint = heads_first if c == block_size and N % b == 0 else heads_outermost if c == block_size else ""
        raise wrong(function, "key_cache", f"{subject} with block_size = {block_size}{hint.format('key_cache')}")
    if width != H:
        raise wrong(function, "key_cache", f"{subject} with head_dim = {H}, that of 'query'")
    if N % c:
        raise wrong(
            function,
            "key_cache",
            f"{subject}, its kv_heads = {c} a divisor of the {N} heads of 'query'{hint.format('key_cache')}",
        )


def of_requests(
    function: str,
    rows: Any,
    cache: Any,
    query_start_loc: Named,
    kv_lens: Named,
    block_tables: Named,
    num_seqs: Any = None,
) -> dict[str, jax.Array]:
    """Returns query_start_loc, kv_lens and block_tables; requests from `num_seqs` on get no queries.

    Args:
      rows: number of packed queries. cache: the pages.
    """
    cuts = integers(function, *query_start_loc, 1, form="[0, n1, n1 + n2, ...], with one more entry than requests")
    lens = integers(function, *kv_lens, 1, form="[requests]")
    tables = integers(function, *block_tables, 2, form="[requests, pages of the longest]")
    for name, size, more in (
        (query_start_loc.name, cuts.shape[0] - 1, " (its length minus 1)"),
        (block_tables.name, tables.shape[0], ""),
    ):
        if size != lens.shape[0]:
            raise wrong(function, name, f"has {size} requests{more}, but {kv_lens.name!r} has {lens.shape[0]}")
    if num_seqs is not None:
        count = jnp.asarray(num_seqs)
        if not jnp.issubdtype(count.dtype, jnp.integer) or count.size != 1:
            raise wrong(function, "num_seqs", f"must be one integer, got {count.dtype} of shape {count.shape}")
        known_count = known(num_seqs)
        if known_count is not None and not 0 <= int(known_count.reshape(())) <= lens.shape[0]:
            raise wrong(function, "num_seqs", f"must be between 0 and the {lens.shape[0]} requests, got {known_count}")
        last = cuts[jnp.clip(count.reshape(()), 0, lens.shape[0])]
        cuts = jnp.where(jnp.arange(cuts.shape[0]) <= count.reshape(()), cuts, last)
    check_cuts(function, query_start_loc.name, query_start_loc.value, rows, num_seqs)
    check_tables(function, kv_lens, block_tables, cache.shape[0], cache.shape[1], num_seqs)
    return {"query_start_loc": cuts, "kv_lens": lens, "block_tables": tables}


def lengths(function: str, name: str, x: Any, batch: Any) -> jax.Array:
    """Returns lengths as int32 [B]."""
    x = integers(function, name, x, 1, form="[B]")
    if x.shape[0] != batch:
        raise wrong(function, name, f"has {x.shape[0]} lengths, but 'query' has {batch} rows")
    return x


def check_new(function: str, key: Any, value: Any, key_cache: Any, value_cache: Any, rows: Any) -> None:
    """Raises ValueError unless `key` and `value` are `rows` new tokens that fit the caches."""
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        expected = (rows, *cache.shape[2:])
        array(function, name, x, 3, form=f"[M, kv_heads, head_dim] = {expected}; pass 'key' and 'value' together")
        if x.shape != expected:
            raise wrong(function, name, f"must be [M, kv_heads, head_dim] = {expected}, got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise wrong(
                function, name, f"must be floats, got {x.dtype}; the cache's scale converts them to {cache.dtype}"
            )
        if not is_quantised(cache) and x.dtype != cache.dtype:
            raise wrong(
                function, name, f"is {x.dtype}, but the cache is {cache.dtype}; cast it, {name}.astype({cache.dtype})"
            )
