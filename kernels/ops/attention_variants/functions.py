"""Public functions: variants of attention, with arguments checked and converted to the contracts' form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.framework import segments
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.attention_variants.contract import (
    check_heads,
    check_mask_of_experts,
    check_square,
    differential_op,
    linformer_op,
    mixture_op,
    performer_op,
    quantized_op,
)


def _check(name: str, arrays: dict[str, tuple[Any, str]]) -> None:
    """Raises ValueError unless each is a float array with the given dims, none of size 0."""
    for what, (x, dims) in arrays.items():
        if not is_array(x) or not is_float_array(x) or x.ndim != len(dims.split()):
            got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
            raise ValueError(f"{name}: argument {what!r} must be a float array [{', '.join(dims.split())}], got {got}")
        if any(isinstance(n, int) and n == 0 for n in x.shape):
            raise ValueError(f"{name}: argument {what!r} of shape {x.shape} is empty; skip the call")


def _mask(
    name: str, query: Any, keys: int, heads: int, causal: Any, sliding_window: Any, segment_ids: Any, mask_info: Any
) -> dict[str, MaskInfo]:
    """Returns the conjunction of all masks, or None if nothing is masked."""
    if is_array(causal):
        raise ValueError(f"{name}: argument 'causal' is compiled into the program and must be a Python value")
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise ValueError(f"{name}: argument 'mask_info' must be a MaskInfo, got {type(mask_info).__name__}")
    mask = MaskInfo(causal=bool(causal), window=window_of(sliding_window))
    batch, queries = query.shape[:2]
    parts = [] if mask_info is None else [mask_info]
    if segment_ids is not None:
        if queries != keys:
            raise ValueError(
                f"{name}: argument 'segment_ids' applies to queries and keys alike, but there are {queries} queries "
                f"and {keys} keys; pass 'mask_info'"
            )
        parts.append(MaskInfo.from_segments(segments.integers(segment_ids, "segment_ids")))
    for part in parts:
        part.check(batch, queries, keys, heads)
        mask = mask.combine(part)
    return {"mask": mask} if parts or mask.used else {}


def _options(name: str, *, softmax_scale: Any, **options: Any) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {n: x for n, x in {"softmax_scale": softmax_scale, **options}.items() if x is not None}


@public(differential_op)
def differential_attention(
    query: jax.Array,
    key: jax.Array,
    query_2: jax.Array,
    key_2: jax.Array,
    value: jax.Array,
    lambda_: Any,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    mask_info: MaskInfo | None = None,
) -> Prepared:
    """Returns (softmax(query key^T) - lambda_ softmax(query_2 key_2^T)) value, [B, T, N, Hv]: differential attention.

    The difference of two softmaxes cancels what both attend to. Gradients flow to every float, including lambda_.

    Args:
      query, query_2: [B, T, N, H]. key, key_2: [B, S, K, H]. value: [B, S, K, Hv], with Hv = 2 H in the paper.
      lambda_: a number or [N]. The paper's exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init is up to the caller, as are
        the norm of each head's output and the factor 1 - lambda_init.
      softmax_scale: default 1/sqrt(H).
      causal, sliding_window, mask_info: as in `flash_attention`. segment_ids: int [B, T], T = S; -1 is padding.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Ye et al., Differential Transformer, 2024, equation 1.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> float(differential_attention(x, x, x, x, x, 0.25, causal=True)[0, 0, 0, 0])
    0.75
    """
    name = "differential_attention"
    heads = {"query": query, "query_2": query_2}, {"key": key, "key_2": key_2}
    _check(name, {n: (x, "B T N H") for n, x in heads[0].items()} | {n: (x, "B S K H") for n, x in heads[1].items()})
    _check(name, {"value": (value, "B S K Hv")})
    N = query.shape[2]
    check_heads(name, N, key.shape[2])
    weight = jnp.asarray(lambda_)
    if not is_float_array(weight) or weight.shape not in ((), (N,)):
        raise ValueError(
            f"{name}: argument 'lambda_' must be a float, or a float array [N] with N = {N}, got {weight.dtype} of shape "
            f"{weight.shape}"
        )
    mask = _mask(name, query, key.shape[1], N, causal, sliding_window, segment_ids, mask_info)
    arrays = (query, key, query_2, key_2, value, jnp.broadcast_to(weight, (N,)))
    return Prepared(differential_op.bind(*arrays, **mask, **_options(name, softmax_scale=softmax_scale)))


def _key_mask(name: str, key_mask: Any, batch: int, keys: int) -> dict[str, jax.Array]:
    if key_mask is None:
        return {}
    mask = jnp.asarray(key_mask)
    if jnp.issubdtype(mask.dtype, jnp.inexact) or mask.shape != (batch, keys):
        raise ValueError(
            f"{name}: argument 'key_mask' must be bool or 0/1 integers [B, S] = ({batch}, {keys}), true where a key is valid, "
            f"got {mask.dtype} of shape {mask.shape}"
        )
    return {"key_mask": mask if mask.dtype == jnp.bool_ else mask != 0}


@public(linformer_op)
def linformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_projection: jax.Array,
    value_projection: jax.Array | None = None,
    *,
    key_mask: Any = None,
    softmax_scale: float | None = None,
) -> Prepared:
    """Returns attention [B, T, N, Hv] over P projections of the keys and values along the sequence: O(S P) pairs.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv].
      key_projection: E, [P, S], shared by all heads. value_projection: F, [P, S]; default: E.
      key_mask: bool [B, S], true where a token is valid; others are excluded from the projections.
      softmax_scale: default 1/sqrt(H).

    There is no causal form: a projection mixes tokens of all positions.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Wang et al., Linformer: Self-Attention with Linear Complexity, 2020, equation 7.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 6, 2, 4))
    >>> linformer_attention(x, x, x, jnp.ones((3, 6)) / 6).shape
    (1, 6, 2, 4)
    """
    name = "linformer_attention"
    projections = key_projection, key_projection if value_projection is None else value_projection
    arrays = {"query": (query, "B T N H"), "key": (key, "B S K H"), "value": (value, "B S K Hv")}
    arrays |= {"key_projection": (projections[0], "P S"), "value_projection": (projections[1], "P S")}
    _check(name, arrays)
    check_heads(name, query.shape[2], key.shape[2])
    mask = _key_mask(name, key_mask, *key.shape[:2])
    return Prepared(
        linformer_op.bind(query, key, value, *projections, **mask, **_options(name, softmax_scale=softmax_scale))
    )


def orthogonal_features(key: jax.Array, num_features: int, width: int) -> jax.Array:
    """Returns random features [num_features, width], float32: with the norms of normal vectors, orthogonal in each
    block of `width` rows.

    Source: Choromanski et al., 2021, section 2.4: orthogonal rows reduce the variance of the estimate.

    Args:
      key: a `jax.random` key.
    """
    blocks = -(-num_features // width)
    of_directions, of_lengths = jax.random.split(key)
    rows = jax.random.orthogonal(of_directions, width, (blocks,)).reshape(-1, width)[:num_features]
    lengths = jnp.linalg.norm(jax.random.normal(of_lengths, (num_features, width)), axis=-1)
    return rows * lengths[:, None]


@public(performer_op)
def performer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    features: jax.Array,
    causal: bool = False,
    *,
    key_mask: Any = None,
    softmax_scale: float | None = None,
) -> Prepared:
    """Returns attention [B, T, N, Hv] whose weights are estimated by positive random features, FAVOR+: linear in the
    length.

    A weight is phi(q) . phi(k) with phi(x)_p = exp(features_p . x' - |x'|^2 / 2) / sqrt(P), x' = sqrt(softmax_scale) x;
    for normal features its mean is exp(softmax_scale q . k). Gradients flow to every float, including the features.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv].
      features: [P, H], see `orthogonal_features`; redrawn from time to time in training.
      causal: a query sees keys up to its own position; T = S.
      key_mask: bool [B, S], true where a token is valid.
      softmax_scale: default 1/sqrt(H).

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Choromanski et al., Rethinking Attention with Performers, 2021, equations 4 to 7.

    >>> import jax, jax.numpy as jnp
    >>> from ejdist import orthogonal_features
    >>> features = orthogonal_features(jax.random.key(0), 16, 4)
    >>> x = jnp.ones((1, 6, 2, 4))
    >>> performer_attention(x, x, x, features, causal=True).shape
    (1, 6, 2, 4)
    """
    name = "performer_attention"
    arrays = {"query": (query, "B T N H"), "key": (key, "B S K H"), "value": (value, "B S K Hv")}
    _check(name, arrays | {"features": (features, "P H")})
    check_heads(name, query.shape[2], key.shape[2])
    if is_array(causal):
        raise ValueError(f"{name}: argument 'causal' is compiled into the program and must be a Python value")
    check_square(query.shape[1], key.shape[1], causal)
    if isinstance(softmax_scale, (int, float, np.number)) and softmax_scale < 0:
        raise ValueError(f"{name}: argument 'softmax_scale' must be at least 0, got {softmax_scale}")
    mask = _key_mask(name, key_mask, *key.shape[:2])
    options = _options(name, softmax_scale=softmax_scale, causal=True if causal else None)
    return Prepared(performer_op.bind(query, key, value, features, **mask, **options))


@public(mixture_op)
def mixture_of_attention_heads(
    x: jax.Array,
    key: jax.Array,
    value: jax.Array,
    router_logits: jax.Array,
    w_query: jax.Array,
    w_out: jax.Array,
    top_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    mask_info: MaskInfo | None = None,
) -> Prepared:
    """Returns a mixture of attention heads, [B, T, D]: each token chooses top_k of E experts. An expert is a head with
    its own query and output projections; all experts share keys and values.

    out = sum_e g_e attention(x w_query[e], key, value) w_out[e], where g is softmax(router_logits) over the chosen
    experts, renormalised by their sum, which has no gradient. Only the chosen experts are computed.

    Args:
      x: [B, T, D]. key: [B, S, H]. value: [B, S, Hv]. router_logits: [B, T, E].
      w_query: [E, D, H]. w_out: [E, Hv, D].
      top_k: experts per token, at most E.
      softmax_scale: default 1/sqrt(H).
      causal, sliding_window, mask_info: as in `flash_attention`. segment_ids: int [B, T], T = S; -1 is padding.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Zhang et al., Mixture of Attention Heads: Selecting Attention Heads Per Token, 2022, equations 4 to 8. Its
    load-balancing losses are functions of router_logits alone, and up to the caller.

    >>> import jax.numpy as jnp
    >>> x, weights = jnp.ones((1, 4, 8)), jnp.ones((3, 8, 8)) / 8
    >>> mixture_of_attention_heads(x, x, x, jnp.zeros((1, 4, 3)), weights, weights, top_k=2, causal=True).shape
    (1, 4, 8)
    """
    name = "mixture_of_attention_heads"
    arrays = {"x": (x, "B T D"), "key": (key, "B S H"), "value": (value, "B S Hv")}
    arrays |= {"router_logits": (router_logits, "B T E"), "w_query": (w_query, "E D H"), "w_out": (w_out, "E Hv D")}
    _check(name, arrays)
    if not isinstance(top_k, int) or not 1 <= top_k <= router_logits.shape[-1]:
        raise ValueError(
            f"{name}: argument 'top_k' must be an integer from 1 to E = {router_logits.shape[-1]}, got {top_k!r}"
        )
    check_mask_of_experts(mask_info)
    mask = _mask(name, x, key.shape[1], 1, causal, sliding_window, segment_ids, mask_info)
    options = _options(name, softmax_scale=softmax_scale)
    return Prepared(mixture_op.bind(x, key, value, router_logits, w_query, w_out, **mask, **options, top_k=top_k))


@public(quantized_op)
def quantized_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    block_size: int = 64,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    mask_info: MaskInfo | None = None,
) -> Prepared:
    """Returns attention [B, T, N, Hv] whose logits are int8 products, with one scale per block of tokens and head.

    The mean of the keys over the sequence is subtracted first, which changes no weight and makes rounding more
    accurate. Weights and values are not quantised. The backward is straight-through: it differentiates attention on the
    original arrays.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv].
      block_size: tokens that share a scale; it affects the result.
      softmax_scale: default 1/sqrt(H).
      causal, sliding_window, mask_info: as in `flash_attention`, except for dense masks. segment_ids: int [B, T], T =
        S; -1 is padding. The mean of the keys and the scales include all tokens, so padding must be finite.

    Raises:
      ValueError: names the argument. Unsupported: a dense mask.

    Source: Zhang et al., SageAttention, 2024, sections 4.2 and 4.3.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 6, 2, 4))
    >>> quantized_attention(x, x, x, causal=True).shape
    (1, 6, 2, 4)
    """
    name = "quantized_attention"
    _check(name, {"query": (query, "B T N H"), "key": (key, "B S K H"), "value": (value, "B S K Hv")})
    check_heads(name, query.shape[2], key.shape[2])
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{name}: argument 'block_size' must be a positive number of tokens, got {block_size!r}")
    mask = _mask(name, query, key.shape[1], query.shape[2], causal, sliding_window, segment_ids, mask_info)
    options = _options(name, softmax_scale=softmax_scale, block_size=None if block_size == 64 else block_size)
    return Prepared(quantized_op.bind(query, key, value, **mask, **options))
