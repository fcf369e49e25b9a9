"""Arguments of serving, checked and brought to the contracts' form. Every message begins with the function and the argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels._core.binding import is_array
from kernels._core.masks import window_of
from kernels.ops.paged_attention.cache import is_quantised

PAGES = "[num_blocks, block_size, kv_heads, head_dim]"


def wrong(function: str, name: str, message: str) -> ValueError:
    return ValueError(f"{function}: argument {name!r} {message}")


def array(function: str, name: str, x: Any, *ndims: int, form: str) -> Any:
    """Returns the array. Raises ValueError unless it is one with so many dims, none of them empty."""
    if not is_array(x) or x.ndim not in ndims:
        got = f"shape {x.shape}" if is_array(x) else type(x).__name__
        raise wrong(function, name, f"must be an array {form}, got {got}")
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        raise wrong(function, name, f"of shape {x.shape} is empty; leave the call out where there is nothing to do")
    return x


def integers(function: str, name: str, x: Any, *ndims: int, form: str) -> jax.Array:
    """Returns int32 of an array or list of integers."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise wrong(function, name, f"must hold integers, got {x.dtype}")
    return array(function, name, x, *ndims, form=form).astype(jnp.int32)


def either(function: str, *given: tuple[str, Any], needed: bool = True) -> Any:
    """Returns the one value that is given, of names for the same thing."""
    found = [(name, x) for name, x in given if x is not None]
    names = " and ".join(repr(name) for name, _ in given)
    if len(found) > 1:
        raise ValueError(f"{function}: arguments {names} say the same; give one of them")
    if not found and needed:
        raise ValueError(f"{function}: argument {given[0][0]!r} is missing")
    return found[0][1] if found else None


def check_caches(function: str, key_cache: Any, value_cache: Any) -> None:
    """Raises ValueError unless the caches are pages `PAGES`, alike but for the width of a head."""
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
    """Raises ValueError unless the caches are pages `PAGES` that fit the queries; where another layout fits, says how to get
    from that to this one."""
    check_caches(function, key_cache, value_cache)
    N, H = query.shape[-2:]
    a, b, c, width = key_cache.shape
    said = f"of shape {key_cache.shape} must be {PAGES}"
    heads_first = "; it looks like [num_blocks, kv_heads, block_size, head_dim]: give {0}.swapaxes(1, 2)"
    heads_outermost = "; it looks like [kv_heads, num_blocks, block_size, head_dim]: give {0}.transpose(1, 2, 0, 3)"
    hint = ""
    if N % c and N % b == 0:
        hint = heads_first
    elif N % c and N % a == 0:
        hint = heads_outermost
    if block_size is not None and b != block_size:
        hint = heads_first if c == block_size and N % b == 0 else heads_outermost if c == block_size else ""
        raise wrong(function, "key_cache", f"{said} with block_size = {block_size}{hint.format('key_cache')}")
    if width != H:
        raise wrong(function, "key_cache", f"{said} with head_dim = {H}, that of 'query'")
    if N % c:
        raise wrong(
            function,
            "key_cache",
            f"{said}, its kv_heads = {c} a divisor of the {N} heads of 'query'{hint.format('key_cache')}",
        )


def scales(function: str, query: Any, cache: Any, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """Returns the scales of a cache [pages, C, K, H] by name, each [#pages, #C, #K]."""
    dims = tuple(cache.shape[:3])
    found: dict[str, Any] = {}
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is None:
            continue
        x = jnp.asarray(x, None if is_array(x) else jnp.float32)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise wrong(function, name, f"must be a float, or floats, got {x.dtype}")
        shapes = {(): (1, 1, 1), (1,): (1, 1, 1), dims[2:]: (1, 1, dims[2]), dims: dims}
        if x.shape not in shapes:
            raise wrong(
                function,
                name,
                f"must be one number, one for each head {dims[2:]}, or one for each slot and head {dims}, got {x.shape}",
            )
        found[name] = x.reshape(shapes[x.shape])
    if np.dtype(cache.dtype) == np.int8 and len(found) < 2:
        missing = next(n for n in ("k_scale", "v_scale") if n not in found)
        raise wrong(function, missing, "is missing: what is in an int8 cache means itself times a scale")
    if not is_quantised(cache):
        if found:
            name = next(iter(found))
            raise wrong(
                function, name, f"is for an int8 or 8-bit float cache, and this one is {cache.dtype}; leave it out"
            )
        if cache.dtype != query.dtype:
            raise ValueError(
                f"{function}: the cache is {cache.dtype} and 'query' is {query.dtype}; cast the query, "
                f"query.astype(key_cache.dtype), or give a cache of int8 or 8-bit floats"
            )
    elif np.dtype(cache.dtype) != np.int8 and not jnp.issubdtype(cache.dtype, jnp.floating):
        raise ValueError(f"{function}: the cache is {cache.dtype}; it must be int8, an 8-bit float, or {query.dtype}")
    return found


def options(
    function: str,
    query: Any,
    softmax_scale: Any,
    sliding_window: Any,
    logits_soft_cap: Any,
    softmax_aux: Any,
    alibi_slopes: Any,
    causal: Any = True,
) -> dict[str, Any]:
    """Returns the options that are used, by the contracts' names."""
    N = query.shape[-2]
    found: dict[str, Any] = {}
    numbers = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal}
    for name, x in numbers.items():
        if isinstance(x, jax.Array):
            raise wrong(function, name, "is compiled into the program and must be a Python value, not an array")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise wrong(function, "logits_soft_cap", f"must be positive, got {logits_soft_cap}; None for no cap")
    for name in ("softmax_scale", "logits_soft_cap"):
        if numbers[name] is not None:
            found[name] = float(numbers[name])
    try:
        window = window_of(sliding_window)
    except ValueError as error:
        raise ValueError(f"{function}: {error}") from None
    if window is not None:
        found["window"] = window
    if not causal:
        found["causal"] = False
    if softmax_aux is not None:
        x = array(function, "softmax_aux", softmax_aux, 1, 2, form=f"[{N}] or [{N}, sinks]")
        if x.shape[0] != N:
            raise wrong(function, "softmax_aux", f"must be [N] or [N, sinks] with N = {N}, got {x.shape}")
        found["softmax_aux"] = x[:, None] if x.ndim == 1 else x
    if alibi_slopes is not None:
        x = array(function, "alibi_slopes", alibi_slopes, 1, form=f"[{N}]")
        if x.shape[0] != N:
            raise wrong(function, "alibi_slopes", f"must be [N] with N = {N}, got {x.shape}")
        found["alibi_slopes"] = x
    return found


def of_requests(
    function: str,
    query_start_loc: Any,
    kv_lens: Any,
    block_tables: Any,
    names: tuple[str, str, str],
    num_seqs: Any = None,
) -> dict[str, jax.Array]:
    """Returns query_start_loc, kv_lens and block_tables; requests from `num_seqs` on have no queries.

    Args:
      names: of the three, as the caller calls them.
    """
    cuts = integers(
        function, names[0], query_start_loc, 1, form="[0, n1, n1 + n2, ...], one more than there are requests"
    )
    lens = integers(function, names[1], kv_lens, 1, form="[requests]")
    tables = integers(function, names[2], block_tables, 2, form="[requests, pages of the longest]")
    for name, size in ((names[0], cuts.shape[0] - 1), (names[2], tables.shape[0])):
        if size != lens.shape[0]:
            more = " + 1" if name == names[0] else ""
            raise wrong(
                function,
                name,
                f"is for {size} requests{more and ' (its length less 1)'} and {names[1]!r} for {lens.shape[0]}",
            )
    if num_seqs is not None:
        count = jnp.asarray(num_seqs)
        if not jnp.issubdtype(count.dtype, jnp.integer) or count.size != 1:
            raise wrong(function, "num_seqs", f"must be one integer, got {count.dtype} of shape {count.shape}")
        cuts = jnp.where(
            jnp.arange(cuts.shape[0]) <= count.reshape(()), cuts, cuts[jnp.clip(count.reshape(()), 0, lens.shape[0])]
        )
    return {"query_start_loc": cuts, "kv_lens": lens, "block_tables": tables}


def lengths(function: str, name: str, x: Any, batch: Any) -> jax.Array:
    """Returns int32 [B]."""
    x = integers(function, name, x, 1, form="[B]")
    if x.shape[0] != batch:
        raise wrong(function, name, f"has {x.shape[0]} lengths, and 'query' {batch} rows")
    return x
