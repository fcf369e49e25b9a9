"""Options shared by all functions here that attend: those of attention, and the scales of the cache."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import window_of
from kernels.framework.binding import is_array
from kernels.framework.contract import Op
from kernels.framework.public import Prepared, PublicFunction, public
from kernels.ops.paged_attention.arguments import array, wrong
from kernels.ops.paged_attention.cache import is_quantised

_DOC = """
    Keyword arguments of every attention function here, with the same meaning as in `flash_attention`:
      softmax_scale: default 1/sqrt(H).
      sliding_window: W for exactly W keys i - W < j <= i, or (left, right), None for an unbounded side.
      logits_soft_cap: c in c * tanh(logits / c).
      softmax_aux: attention sinks, [N] or [N, n]: logits that contribute to the denominator and have no value.
      alibi_slopes: [N]; slope * |i - j| is subtracted from the logits.
      k_scale, v_scale: scales of a quantised cache: a number, one per head [K], or one per slot and head, in the shape of
        the cache without its last dim. Required for int8; 1 by default for 8-bit floats.
      cfg: `PagedAttentionConfig`.

    Raises:
      ValueError: names the invalid argument. Unsupported: no backend can run the call, or a gradient is requested.
"""


def scales(function: str, query: Any, cache: Any, k_scale: Any, v_scale: Any, rows: str = "query") -> dict[str, Any]:
    """Returns the scales of a cache [pages, C, K, H] by name, each [#pages, #C, #K].

    Args:
      rows: the argument name of the queries, for messages.
    """
    dims = tuple(cache.shape[:3])
    scale_options: dict[str, Any] = {}
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is None:
            continue
        try:
            x = jnp.asarray(x, None if is_array(x) else jnp.float32)
        except (TypeError, ValueError):
            raise wrong(function, name, f"must be a float, or floats, got {x!r}") from None
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise wrong(function, name, f"must be a float, or floats, got {x.dtype}")
        shapes = {(): (1, 1, 1), (1,): (1, 1, 1), dims[2:]: (1, 1, dims[2]), dims: dims}
        if x.shape not in shapes:
            raise wrong(
                function,
                name,
                f"must be one number, one per head {dims[2:]}, or one per slot and head {dims}, got {x.shape}",
            )
        scale_options[name] = x.reshape(shapes[x.shape])
    if np.dtype(cache.dtype) == np.int8 and len(scale_options) < 2:
        missing = next(n for n in ("k_scale", "v_scale") if n not in scale_options)
        raise wrong(function, missing, "is missing: an int8 cache needs a scale")
    if not is_quantised(cache):
        if scale_options:
            name = next(iter(scale_options))
            raise wrong(
                function, name, f"applies to an int8 or 8-bit float cache, but this one is {cache.dtype}; omit it"
            )
        if cache.dtype != query.dtype:
            raise wrong(
                function,
                rows,
                f"is {query.dtype}, but the cache is {cache.dtype}; cast it, {rows}.astype(key_cache.dtype), or "
                "pass a cache of int8 or 8-bit floats",
            )
    elif np.dtype(cache.dtype) != np.int8 and not jnp.issubdtype(cache.dtype, jnp.floating):
        raise wrong(
            function,
            rows,
            f"is {query.dtype}, but the cache is {cache.dtype}; it must be int8, 8-bit floats, or the same",
        )
    return scale_options


def options(
    function: str,
    query: Any,
    cache: Any,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Returns the options and scales that are set, by the contracts' names."""
    N = query.shape[-2]
    op_options = scales(function, query, cache, k_scale, v_scale)
    plain: dict[str, Any] = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal}
    for name, x in plain.items():
        if isinstance(x, jax.Array):
            raise wrong(function, name, "is compiled into the program and must be a Python value, not an array")
        if name != "causal" and x is not None and not (isinstance(x, numbers.Real) and math.isfinite(x)):
            raise wrong(function, name, f"must be a finite number, got {x!r}")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise wrong(function, "logits_soft_cap", f"must be positive, got {logits_soft_cap}; use None for no cap")
    for name in ("softmax_scale", "logits_soft_cap"):
        if plain[name] is not None:
            op_options[name] = float(plain[name])
    try:
        window = window_of(sliding_window)
    except ValueError as error:
        raise ValueError(f"{function}: {error}") from None
    if window is not None:
        op_options["window"] = window
    if not causal:
        op_options["causal"] = False
    if softmax_aux is not None:
        x = array(function, "softmax_aux", softmax_aux, 1, 2, form=f"[{N}] or [{N}, sinks]")
        if x.shape[0] != N:
            raise wrong(function, "softmax_aux", f"must be [N] or [N, sinks] with N = {N}, got {x.shape}")
        op_options["softmax_aux"] = x[:, None] if x.ndim == 1 else x
    if alibi_slopes is not None:
        x = array(function, "alibi_slopes", alibi_slopes, 1, form=f"[{N}]")
        if x.shape[0] != N:
            raise wrong(function, "alibi_slopes", f"must be [N] with N = {N}, got {x.shape}")
        op_options["alibi_slopes"] = x
    return op_options


_SHARED = [
    p
    for p in inspect.signature(options, eval_str=True).parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.name != "causal"
]


def attending(*ops: Op) -> Callable[[Callable[..., Prepared]], PublicFunction]:
    """Returns `public(*ops)` for a function that takes the options of attention as `**how`: adds their names to its signature
    and their documentation to its docstring."""

    def declare(prepare: Callable[..., Prepared]) -> PublicFunction:
        declared = inspect.signature(prepare)
        own_parameters = {n: p for n, p in declared.parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters = [*own_parameters.values(), *(p for p in _SHARED if p.name not in own_parameters)]
        accepted = {p.name for p in parameters}

        @functools.wraps(prepare)
        def prepared(*args: Any, **arguments: Any) -> Prepared:
            for name in arguments.keys() - accepted:
                raise TypeError(f"{prepare.__name__}() got an unexpected keyword argument {name!r}")
            return prepare(*args, **arguments)

        vars(prepared)["__signature__"] = declared.replace(parameters=parameters)
        head, mark, examples = (prepare.__doc__ or "").partition(">>>")
        prepared.__doc__ = f"{head.rstrip()}\n{_DOC}\n    {mark}{examples}"
        return public(*ops)(prepared)

    return declare
