"""Dense softmax attention, with all T x S pairs: the contracts of this folder are built from it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo


def dot(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """Returns the einsum in at least float32."""
    upcast = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
    return jnp.einsum(subscripts, *upcast, precision=jax.lax.Precision.HIGHEST)


def check_heads(name: str, heads: int, key_heads: int) -> None:
    """Raises ValueError unless the query heads are a multiple of the key heads."""
    if heads % key_heads:
        raise ValueError(
            f"{name}: argument 'query' has N = {heads} heads and 'key' has K = {key_heads}: the query heads must be a multiple "
            "of the key heads"
        )


def visible_of(mask: MaskInfo | None, batch: int, heads: int, queries: int, keys: int) -> jax.Array:
    """Returns bool [B, N, T, S]."""
    mask = MaskInfo() if mask is None else mask
    mask.check(batch, queries, keys, heads)
    return jnp.broadcast_to(mask.visible(queries, keys), (batch, heads, queries, keys))


def softmax(logits: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (weights [..., T, S], lse [..., T]) over the visible keys; a query without a key has 0 and -inf."""
    largest = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total != 0  # true for NaN too, so that lse becomes NaN
    total = jnp.where(some, total, 1)
    return weights / total, jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: MaskInfo | None, softmax_scale: float | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv], lse [B, T, N]) in at least float32."""
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    check_heads("attention", N, K)
    logits = dot("btnh,bsnh->bnts", query, jnp.repeat(key, N // K, axis=2))
    logits = logits * (1 / math.sqrt(H) if softmax_scale is None else softmax_scale)
    weights, lse = softmax(logits, visible_of(mask, B, N, T, S))
    weights = weights.astype(value.dtype)  # as in every flash attention kernel
    return dot("bnts,bsnv->btnv", weights, jnp.repeat(value, N // K, axis=2)), lse.swapaxes(1, 2)
