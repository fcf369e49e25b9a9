"""The contracts of the variants of attention, and their metadata as operations."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels.engines.attention.masks import MaskInfo, by_positions
from kernels.framework.contract import Op
from kernels.framework.padding import Padding
from kernels.ops.attention_variants import cases, work
from kernels.ops.attention_variants.dense import attention, check_heads, dot, softmax, visible_of
from kernels.ops.attention_variants.quantize import dequantized


def differential_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    query_2: Float[Array, "B T N H"],
    key_2: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    lambda_: Float[Array, " N"],
    mask: MaskInfo | None = None,
    *,
    softmax_scale: float | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N Hv"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Returns (out, out_2, lse, lse_2): out = softmax(query key^T) value - lambda_ out_2, out_2 = softmax(query_2
    key_2^T) value.

    softmax_scale defaults to 1/sqrt(H). Every backend calls the public function `flash_attention` twice.
    """
    first, lse = attention(query, key, value, mask, softmax_scale)
    second, lse_2 = attention(query_2, key_2, value, mask, softmax_scale)
    out = first - lambda_.astype(first.dtype)[:, None] * second
    return out.astype(query.dtype), second.astype(query.dtype), lse, lse_2


def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    key_projection: Float[Array, "P S"],
    value_projection: Float[Array, "P S"],
    key_mask: Bool[Array, "B S"] | None = None,
    *,
    softmax_scale: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Returns attention over P projected keys and values: key_projection key and value_projection value, along the
    sequence.

    Keys and values where `key_mask` is false count as 0 in the projections. The XLA backend calls the public function
    `flash_attention`.
    """
    if key_mask is not None:
        key, value = (jnp.where(key_mask[:, :, None, None], x, 0) for x in (key, value))
    keys = dot("ps,bskh->bpkh", key_projection, key).astype(key.dtype)
    values = dot("ps,bskv->bpkv", value_projection, value).astype(value.dtype)
    return attention(query, keys, values, None, softmax_scale)[0].astype(query.dtype)


def performer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    features: Float[Array, "P H"],
    key_mask: Bool[Array, "B S"] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Returns sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j), whose mean over normal features is
    exp(softmax_scale * q_i . k_j).

    phi(x)_p = exp(features_p . x' - |x'|^2 / 2) / sqrt(P) with x' = sqrt(softmax_scale) x; softmax_scale defaults to
    1/sqrt(H). With `causal`, T = S, and a query sees keys up to its own position. A query that sees no key has out = 0.
    """
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    check_heads("performer_attention", N, K)
    check_square(T, S, causal)
    q = log_features(query, features, softmax_scale)
    k = jnp.repeat(log_features(key, features, softmax_scale), N // K, axis=2)
    logits = jax.nn.logsumexp(q[:, :, None] + k[:, None], axis=-1)  # [B, T, S, N]
    visible = visible_of(MaskInfo(causal=causal), B, N, T, S)
    visible = visible if key_mask is None else visible & key_mask[:, None, None]
    weights, _ = softmax(jnp.moveaxis(logits, 3, 1), visible)
    return dot("bnts,bsnv->btnv", weights, jnp.repeat(value, N // K, axis=2)).astype(query.dtype)


def log_features(x: jax.Array, features: jax.Array, softmax_scale: float | None) -> jax.Array:
    """Returns the logarithms of phi(x) sqrt(P), [..., P], in at least float32; the factor cancels in every quotient."""
    scale = 1 / math.sqrt(x.shape[-1]) if softmax_scale is None else softmax_scale
    scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * math.sqrt(scale)
    return dot("...h,ph->...p", scaled, features) - jnp.sum(scaled * scaled, axis=-1, keepdims=True) / 2


def check_square(queries: int, keys: int, causal: bool) -> None:
    """Raises ValueError for a causal call with different numbers of queries and keys."""
    if causal and queries != keys:
        raise ValueError(
            f"performer_attention: argument 'causal' requires T = S, but there are {queries} queries and {keys} keys"
        )


def mixture_of_attention_heads(
    x: Float[Array, "B T D"],
    key: Float[Array, "B S H"],
    value: Float[Array, "B S Hv"],
    router_logits: Float[Array, "B T E"],
    w_query: Float[Array, "E D H"],
    w_out: Float[Array, "E Hv D"],
    mask: MaskInfo | None = None,
    *,
    top_k: int,
    softmax_scale: float | None = None,
) -> Float[Array, "B T D"]:
    """Returns sum_e g_e attention(x w_query[e], key, value) w_out[e] over the top_k experts of each token.

    p = softmax(router_logits), and g_e = p_e / sum of p over the chosen experts, where the sum has no gradient. All
    experts share one head of keys and values. Every backend calls the public functions `grouped_matmul` and
    `flash_attention`.
    """
    check_mask_of_experts(mask)
    gates, chosen = routed(router_logits, top_k)
    E = router_logits.shape[-1]
    slots = jax.nn.one_hot(chosen, E, dtype=gates.dtype)
    gates, seen = jnp.sum(slots * gates[..., None], axis=-2), jnp.any(slots != 0, axis=-2)  # [B, T, E]
    query = dot("btd,edh->bteh", x, w_query).astype(x.dtype)
    heads = attention(query, key[:, :, None], value[:, :, None], mask, softmax_scale)[0].astype(x.dtype)
    each = dot("btev,evd->bted", heads, w_out)
    # Excludes experts that a token did not choose, even if their weights are NaN.
    return jnp.sum(jnp.where(seen[..., None], gates[..., None] * each, 0), axis=2).astype(x.dtype)


def check_mask_of_experts(mask: Any) -> None:
    """Raises ValueError for a dense mask with heads: the heads of a token are its experts, in the order of their
    gates."""
    dense = mask.attention_mask if isinstance(mask, MaskInfo) else None
    if dense is not None and dense.ndim == 4 and dense.shape[1] != 1:
        raise ValueError(
            f"mixture_of_attention_heads: mask field 'attention_mask' of shape {dense.shape} has a mask for each of "
            f"{dense.shape[1]} heads, but the heads of a token are its chosen experts; pass one for all heads, [B, 1, "
            "T, S]"
        )


def routed(router_logits: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns (gates, experts) of each token, both [B, T, top_k]."""
    if not 1 <= top_k <= router_logits.shape[-1]:
        raise ValueError(
            f"mixture_of_attention_heads: argument 'top_k' must be from 1 to E = {router_logits.shape[-1]}, got {top_k}"
        )
    accumulate = jnp.promote_types(router_logits.dtype, jnp.float32)
    best, chosen = jax.lax.top_k(jax.nn.softmax(router_logits.astype(accumulate), axis=-1), top_k)
    return best / jax.lax.stop_gradient(jnp.sum(best, axis=-1, keepdims=True)), chosen


def quantized_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: MaskInfo | None = None,
    *,
    softmax_scale: float | None = None,
    block_size: int = 64,
) -> Float[Array, "B T N Hv"]:
    """Returns attention whose logits are int8 products: queries, and keys minus their mean over the sequence, are
    rounded to multiples of max |x| / 127 in each block of `block_size` tokens of a head.

    Subtracting one vector from every key changes no weight. Weights and values are not quantised. The gradients are
    those of attention on the original arrays (straight-through); the XLA backend calls the public function
    `flash_attention` for them.
    """
    exact = attention(query, key, value, mask, softmax_scale)[0]
    q, k = dequantized(query, block_size), dequantized(centred(key), block_size)
    rounded = attention(q, k, value, mask, softmax_scale)[0]
    return (exact + jax.lax.stop_gradient(rounded - exact)).astype(query.dtype)


def centred(key: jax.Array) -> jax.Array:
    """Returns the keys minus their mean over the sequence, in at least float32."""
    upcast = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    return upcast - jnp.mean(upcast, axis=1, keepdims=True)


_HEADS: Any = {"local_dims": {"B", "N", "K"}, "tied_dims": (("N", "K"),)}


def _of_key_mask(key_mask: jax.Array | None, **others: Any) -> dict[str, Any]:
    return {} if key_mask is None else {"S": key_mask.astype(jnp.int32) - 1}


differential_op = Op(
    differential_attention,
    outputs=("out", "out_2", "lse", "lse_2"),
    residuals=("out", "out_2", "lse", "lse_2"),
    padding=Padding(("value",)),
    same_dtype=("query", "key", "query_2", "key_2", "value"),
    priority=("composed", "xla"),
    cases=cases.DIFFERENTIAL,
    work=work.differential,
    ordered=by_positions,
    **_HEADS,
)
linformer_op = Op(
    linformer_attention,
    padding=Padding(("key", "value"), _of_key_mask),
    weights=("key_projection", "value_projection"),
    same_dtype=("query", "key", "value", "key_projection", "value_projection"),
    cases=cases.LINFORMER,
    work=work.linformer,
    ordered=True,  # a projection has one column per position
    **_HEADS,
)
performer_op = Op(
    performer_attention,
    padding=Padding(("key", "value"), _of_key_mask),
    same_dtype=("query", "key", "value", "features"),
    cases=cases.PERFORMER,
    work=work.performer,
    ordered=lambda call: call.causal,
    **_HEADS,
)
mixture_op = Op(
    mixture_of_attention_heads,
    padding=Padding(("x", "router_logits", "value")),
    local_dims={"B"},
    weights=("w_query", "w_out"),
    same_dtype=("x", "key", "value", "w_query", "w_out"),
    priority=("composed", "xla"),
    cases=cases.MIXTURE,
    work=work.mixture,
    ordered=by_positions,
)
quantized_op = Op(
    quantized_attention,
    padding=Padding(("query", "key", "value")),  # a block shares one scale
    same_dtype=("query", "key", "value"),
    cases=cases.QUANTIZED,
    work=work.quantized,
    ordered=True,  # adjacent tokens share a scale
    **_HEADS,
)
