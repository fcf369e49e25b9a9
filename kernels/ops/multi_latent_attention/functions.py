"""Public functions: latent attention with the field's usual arguments, converted to the contract's form."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo, is_integer, window_of
from kernels.framework import segments
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.framework.requests import check_cuts, check_lengths, check_tables
from kernels.ops.multi_latent_attention.contract import check_rope, decode_op, op, paged_op
from kernels.ops.multi_latent_attention.heads import absorbed, values_of


def _check_array(name: str, what: str, x: Any, dims: str) -> None:
    """Raises ValueError unless x is a float array with these dims, none of size 0."""
    if not is_array(x) or not is_float_array(x) or x.ndim != len(dims.split()):
        got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
        raise ValueError(f"{name}: argument {what!r} must be a float array [{', '.join(dims.split())}], got {got}")
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        raise ValueError(f"{name}: argument {what!r} of shape {x.shape} is empty; skip the call")


def _integers(name: str, what: str, x: Any) -> jax.Array:
    """Returns an array of integers as int32, because narrow and unsigned ones could overflow later. Raises ValueError
    if it is missing or empty."""
    if x is None:
        raise ValueError(f"{name}: argument {what!r} is missing")
    x = x if is_array(x) else jnp.asarray(x)
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        raise ValueError(f"{name}: argument {what!r} of shape {x.shape} is empty; skip the call")
    return segments.indices(x)


def _options(name: str, softmax_scale: Any, logits_soft_cap: Any) -> dict[str, float]:
    """Returns the options that are set, checked."""
    for what, x in (("softmax_scale", softmax_scale), ("logits_soft_cap", logits_soft_cap)):
        if is_array(x):
            raise ValueError(f"{name}: argument {what!r} is compiled into the program and must be a Python number")
        if x is not None and not (isinstance(x, numbers.Real) and math.isfinite(x)):
            raise ValueError(f"{name}: argument {what!r} must be a finite number, got {x!r}")
    if logits_soft_cap is not None and logits_soft_cap <= 0:
        raise ValueError(
            f"{name}: argument 'logits_soft_cap' must be positive, got {logits_soft_cap}; use None for no cap"
        )
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap}
    return {n: float(x) for n, x in options.items() if x is not None}


@public(op)
def flash_mla(
    query: jax.Array,
    key_value: jax.Array,
    w_kc: jax.Array,
    w_vc: jax.Array,
    query_rope: jax.Array | None = None,
    key_rope: jax.Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    cum_seqlens: Any = None,
    *,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Prepared:
    """Returns multi-head latent attention [B, T, N, Hv] for training and prefill; with `return_lse` also the
    log-sum-exp, float32 [B, T, N].

    key = key_value w_kc and value = key_value w_vc, for each head; logits = softmax_scale * (query . key + query_rope .
    key_rope). Memory is O(S): keys and values of all heads are computed, and recomputed in the backward; no pairs are
    stored. All floats have gradients, including the up-projections.

    Args:
      query: [B, T, N, H], the non-positional part of a head. key_value: the latent c, [B, S, R].
      w_kc: [R, K, H]. w_vc: [R, K, Hv]. Up-projections; N must be a multiple of K. In DeepSeek's models they are equal.
      query_rope: [B, T, N, Hr]. key_rope: [B, S, Hr], shared by all heads. Rotated by the caller; both or neither.
      softmax_scale: default 1/sqrt(H + Hr).
      causal, sliding_window, logits_soft_cap, softmax_aux, mask_info, deterministic: as in `flash_attention`. All given
        masks apply.
      cum_seqlens (or cu_seqlens): [0, n1, n1 + n2, ...], cumulative lengths along a packed axis, B = 1 and T = S.
      segment_ids: int [B, T], T = S: pairs with equal ids >= 0 attend, -1 is padding.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: DeepSeek-V2, 2024, equations 9 to 19.

    >>> import jax.numpy as jnp
    >>> q, latent, up = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 6)), jnp.ones((6, 2, 4))
    >>> flash_mla(q, latent, up, up, jnp.ones((1, 8, 2, 2)), jnp.ones((1, 8, 2)), causal=True).shape
    (1, 8, 2, 4)
    """
    needed = (("query", query, "B T N H"), ("key_value", key_value, "B S R"))
    needed += (("w_kc", w_kc, "R K H"), ("w_vc", w_vc, "R K Hv"))
    for what, x, dims in needed:
        _check_array("flash_mla", what, x, dims)
    check_rope(query_rope, key_rope)
    arguments: dict[str, Any] = {"query": query, "key_value": key_value, "w_kc": w_kc, "w_vc": w_vc}
    for what, x, dims in (("query_rope", query_rope, "B T N Hr"), ("key_rope", key_rope, "B S Hr")):
        if x is not None:
            _check_array("flash_mla", what, x, dims)
            arguments[what] = x
    B, T, N, _ = query.shape
    S, K = key_value.shape[1], w_kc.shape[1]
    if N % K:
        raise ValueError(
            f"flash_mla: argument 'query' has N = {N} heads and 'w_kc' has K = {K}: N must be a multiple of K"
        )
    if softmax_aux is not None:
        if not is_array(softmax_aux) or softmax_aux.ndim not in (1, 2) or softmax_aux.shape[0] != N:
            shape = getattr(softmax_aux, "shape", type(softmax_aux).__name__)
            raise ValueError(f"flash_mla: argument 'softmax_aux' must be [N] or [N, sinks] with N = {N}, got {shape}")
        arguments["softmax_aux"] = softmax_aux[:, None] if softmax_aux.ndim == 1 else softmax_aux
    mask = MaskInfo(causal=bool(causal), window=window_of(sliding_window))
    parts = _masks(mask_info, segment_ids, cum_seqlens, cu_seqlens, B, T, S)
    for part in parts:
        part.check(B, T, S, N)
        mask = mask.combine(part)
    if parts or mask.used:
        arguments["mask"] = mask
    if deterministic:
        arguments["deterministic"] = deterministic
    call = op.bind(**arguments, **_options("flash_mla", softmax_scale, logits_soft_cap))
    cuts = "" if cum_seqlens is None and cu_seqlens is None else "cum_seqlens"
    return Prepared(call, returns=("out", "lse") if return_lse else "out", cuts=cuts)


def _masks(
    mask_info: Any, segment_ids: Any, cum_seqlens: Any, cu_seqlens: Any, batch: int, queries: int, keys: int
) -> list[MaskInfo]:
    """Returns the mask from all arguments about sequences."""
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise ValueError(f"flash_mla: argument 'mask_info' must be a MaskInfo, got {type(mask_info).__name__}")
    if cum_seqlens is not None and cu_seqlens is not None:
        raise ValueError(
            "flash_mla: arguments 'cum_seqlens' and 'cu_seqlens' are two names for the same argument; pass only one"
        )
    cuts = cum_seqlens if cu_seqlens is None else cu_seqlens
    passed = "cum_seqlens" if cu_seqlens is None else "cu_seqlens"
    for name, x in ((passed, cuts), ("segment_ids", segment_ids)):
        if x is not None and queries != keys:
            raise ValueError(
                f"flash_mla: argument {name!r} applies to queries and keys alike, but there are {queries} queries and "
                f"{keys} keys; pass 'mask_info'"
            )
    if cuts is not None and batch != 1:
        raise ValueError(
            f"flash_mla: argument {passed!r} splits one packed axis, so the batch must be 1, got {batch}; use 'segment_ids'"
        )
    parts = [] if mask_info is None else [mask_info]
    if segment_ids is not None:
        parts.append(MaskInfo.from_segments(segments.integers(segment_ids, "segment_ids")))
    return parts + ([] if cuts is None else [MaskInfo.from_cu_seqlens(cuts, queries)])


def in_latent_space(
    name: str, query: Any, query_rope: Any, w_kc: Any, w_vc: Any, rows: str, softmax_scale: Any
) -> tuple[jax.Array, float]:
    """Returns (absorbed queries, scale of the logits): absorbed with w_kc, or unchanged without it.

    Args:
      rows: the dims before the heads.
    """
    _check_array(name, "query", query, f"{rows} N H")
    _check_array(name, "query_rope", query_rope, f"{rows} N Hr")
    if (w_kc is None) != (w_vc is None):
        raise ValueError(
            f"{name}: arguments 'w_kc' and 'w_vc' must be given together; without both, 'query' must be absorbed "
            "already, and the result is in the latent space"
        )
    if w_kc is None:
        if softmax_scale is None:
            raise ValueError(
                f"{name}: argument 'softmax_scale' is required for an absorbed 'query', whose width R does not "
                "determine it; pass 1/sqrt(H + Hr)"
            )
        return query, softmax_scale
    N, H = query.shape[-2:]
    for what, w, dims in (("w_kc", w_kc, "R N H"), ("w_vc", w_vc, "R N Hv")):
        _check_array(name, what, w, dims)
    if w_kc.shape[1:] != (N, H) or w_vc.shape[:2] != (w_kc.shape[0], N):
        raise ValueError(
            f"{name}: arguments 'w_kc' {w_kc.shape} and 'w_vc' {w_vc.shape} must be [R, N, H] and [R, N, Hv] with N, H = {N}, "
            f"{H} of 'query'"
        )
    scale = (H + query_rope.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale
    return absorbed(query, w_kc), scale


def check_window(name: str, sliding_window: Any) -> None:
    """Raises ValueError unless the window is a number of entries, or None."""
    if sliding_window is not None and (not is_integer(sliding_window) or sliding_window < 1):
        raise ValueError(
            f"{name}: argument 'sliding_window' must be a number of entries of at least 1, got {sliding_window!r}; a cache "
            "holds nothing after a query, so a right side has no meaning"
        )


@public(decode_op, module="MLADecode")
def mla_decode(
    query: jax.Array,
    query_rope: jax.Array,
    kv_cache: jax.Array,
    kv_lens: Any,
    w_kc: jax.Array | None = None,
    w_vc: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Prepared:
    """Returns latent attention of the last tokens over a cache of latents, [B, T, N, Hv]; with `return_lse` also the
    log-sum-exp, float32 [B, T, N].

    The work follows the longest of the rows, and the window. Keys and values of heads are never computed: w_kc is
    absorbed into the queries, and w_vc is applied to the weighted sum of latents, so an entry of the cache is read once
    for all heads.

    Args:
      query: [B, T, N, H]: the T newest tokens of each row; T = 1 in plain decoding. query_rope: [B, T, N, Hr], rotated.
      kv_cache: [B, S, R + Hr]: entry j is the latent of token j followed by its rotated key; it already has those of
        `query`.
      kv_lens: int [B]: number of valid entries in each row, including the T newest. Later entries, even NaN, have no
        effect.
      w_kc: [R, N, H]. w_vc: [R, N, Hv]. Without both, `query` must be absorbed already, [B, T, N, R], and so is the
        result.
      softmax_scale: default 1/sqrt(H + Hr); required for absorbed queries.
      sliding_window: W for the last W entries, including a query's own.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: DeepSeek-V2, 2024, section 2.1.2.

    >>> import jax.numpy as jnp
    >>> up, cache = jnp.ones((6, 2, 4)), jnp.ones((1, 16, 6 + 2))
    >>> mla_decode(jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 2, 2)), cache, jnp.array([9]), up, up)[0, 0, 0]
    Array([6., 6., 6., 6.], dtype=float32)
    """
    name = "mla_decode"
    absorbed_query, scale = in_latent_space(name, query, query_rope, w_kc, w_vc, "B T", softmax_scale)
    _check_array(name, "kv_cache", kv_cache, "B S R+Hr")
    check_window(name, sliding_window)
    options: dict[str, Any] = {} if sliding_window is None else {"sliding_window": sliding_window}
    options |= _options(name, scale, logits_soft_cap)
    lens = _integers(name, "kv_lens", kv_lens)
    call = decode_op.bind(absorbed_query, query_rope, kv_cache, lens, **options)
    check_lengths(name, "kv_lens", kv_lens, kv_cache.shape[1], "a row of 'kv_cache'")
    if w_vc is None:
        return Prepared(call, returns=("out", "lse") if return_lse else "out")

    def finish(out: jax.Array, lse: jax.Array) -> Any:
        values = values_of(out, w_vc)
        return (values, lse) if return_lse else values

    return Prepared(call, finish=finish, dims=("B", "T", "N", "Hv"))


@public(paged_op)
def multi_latent_ragged_page_attention(
    query: jax.Array,
    query_rope: jax.Array,
    kv_cache: jax.Array,
    kv_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    w_kc: jax.Array | None = None,
    w_vc: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Prepared:
    """Returns latent attention of the newest tokens of many requests over a paged cache, [M, N, Hv]. Forward only.

    Supports prefill, decoding and mixtures of both: a request may have any number of new tokens, including none. The
    cost follows `kv_lens`, not the width of the tables.

    Args:
      query: [M, N, H], the new tokens of all requests, concatenated. query_rope: [M, N, Hr], rotated. Rows past the
        last request give 0.
      kv_cache: [num_blocks, block_size, R + Hr], the latent of a token followed by its rotated key; it has those of
        `query`.
      kv_lens: int [requests], number of entries of each request, including its new tokens.
      block_tables: int [requests, blocks per request]: entry j of request r is kv_cache[block_tables[r, j //
        block_size], j % block_size].
      query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...].
      w_kc: [R, N, H]. w_vc: [R, N, Hv]. Without both, `query` must be absorbed already, [M, N, R], and so is the
        result.
      softmax_scale: default 1/sqrt(H + Hr); required for absorbed queries.
      sliding_window: W for the last W entries, including a query's own.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call, or a gradient is requested.

    Sources: DeepSeek-V2, 2024, section 2.1.2; Kwon et al., PagedAttention, 2023.

    >>> import jax.numpy as jnp
    >>> up, cache = jnp.ones((6, 2, 4)), jnp.ones((8, 4, 6 + 2))
    >>> lens, tables, starts = jnp.array([5, 2]), jnp.array([[3, 1], [0, 0]]), jnp.array([0, 2, 3])
    >>> q, q_rope = jnp.ones((3, 2, 4)), jnp.ones((3, 2, 2))
    >>> multi_latent_ragged_page_attention(q, q_rope, cache, lens, tables, starts, up, up).shape
    (3, 2, 4)
    """
    name = "multi_latent_ragged_page_attention"
    absorbed_query, scale = in_latent_space(name, query, query_rope, w_kc, w_vc, "M", softmax_scale)
    _check_array(name, "kv_cache", kv_cache, "num_blocks block_size R+Hr")
    check_window(name, sliding_window)
    options: dict[str, Any] = {} if sliding_window is None else {"sliding_window": sliding_window}
    options |= _options(name, scale, logits_soft_cap)
    named = {"kv_lens": kv_lens, "block_tables": block_tables, "query_start_loc": query_start_loc}
    indices = (_integers(name, n, x) for n, x in named.items())
    call = paged_op.bind(absorbed_query, query_rope, kv_cache, *indices, **options)
    check_cuts(name, "query_start_loc", query_start_loc, query.shape[0])
    check_tables(name, ("kv_lens", kv_lens), ("block_tables", block_tables), *kv_cache.shape[:2])
    if w_vc is None:
        return Prepared(call)
    return Prepared(call, finish=lambda out: values_of(out, w_vc), dims=("M", "N", "Hv"))
