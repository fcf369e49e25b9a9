"""The two forms of a latent head: explicit keys and values computed from the latent, and queries that absorb the
up-projection."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot


def up_projected(key_value: jax.Array, w_kc: jax.Array, w_vc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the non-positional part of keys [B, S, K, H], values [B, S, K, Hv])."""
    key = dot("bsr,rkh->bskh", key_value, w_kc).astype(key_value.dtype)
    return key, dot("bsr,rkv->bskv", key_value, w_vc).astype(key_value.dtype)


def joined_heads(
    query: jax.Array,
    key_value: jax.Array,
    w_kc: jax.Array,
    w_vc: jax.Array,
    query_rope: jax.Array | None,
    key_rope: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (query, key, value) of plain attention: each head is its non-positional part followed by its rotary
    part."""
    key, value = up_projected(key_value, w_kc, w_vc)
    if query_rope is not None and key_rope is not None:
        shared = jnp.broadcast_to(key_rope[:, :, None], (*key.shape[:3], key_rope.shape[-1]))
        query, key = jnp.concatenate([query, query_rope], -1), jnp.concatenate([key, shared], -1)
    return query, key, value


def absorbed(query: jax.Array, w_kc: jax.Array) -> jax.Array:
    """Returns queries in the latent space, [..., N, R]: q . (c w_kc) = (q w_kc^T) . c."""
    return dot("...nh,rnh->...nr", query, w_kc).astype(query.dtype)


def values_of(out: jax.Array, w_vc: jax.Array) -> jax.Array:
    """Returns sum_j p_j (c_j w_vc) = (sum_j p_j c_j) w_vc, [..., N, Hv]."""
    return dot("...nr,rnv->...nv", out, w_vc).astype(out.dtype)
