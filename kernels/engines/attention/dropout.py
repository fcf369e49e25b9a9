"""Counter-based attention dropout: the same mask on every backend, under every sharding, in forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def mix(x: jax.Array) -> jax.Array:
    """Returns a bijective hash of uint32 (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def expand_dropout_seed(seed: Any, batch: int, num_heads: int) -> jax.Array:
    """Returns uint32 [B, N]: one stream per batch row and head, derived from a scalar seed that may be traced.

    Expanding before the arrays are sharded gives every shard the streams of its own rows and heads.
    """
    if isinstance(seed, (int, np.integer)):
        seed = np.uint32(int(seed) % 2**32)
    seed = jnp.asarray(seed)
    if seed.ndim != 0 or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ValueError(f"argument 'dropout_seed' must be one integer, got {seed.dtype} of shape {seed.shape}")
    seed = seed.astype(jnp.uint32)
    row = jnp.arange(batch, dtype=jnp.uint32)[:, None]
    head = jnp.arange(num_heads, dtype=jnp.uint32)[None, :]
    return mix(mix(mix(seed + jnp.uint32(0x9E3779B9)) ^ row) + head * jnp.uint32(0x9E3779B1))


def dropout_scale(seed: jax.Array, q: jax.Array, k: jax.Array, probability: float) -> jax.Array:
    """Returns float32 [B, N, t, s]: 0 where a weight is dropped, 1 / (1 - probability) elsewhere.

    It depends only on (seed[b, n], query position, key position), so any block can be computed anywhere.

    Args:
      seed: uint32 [B|1, N|1]. q: int [B|1, t] positions. k: int [B|1, s] positions.
    """
    row = mix(seed[:, :, None] ^ mix(q.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))[:, None])
    bits = mix(row[..., None] ^ (k.astype(jnp.uint32) * jnp.uint32(0x85EBCA77))[:, None, None])
    keep = bits >= jnp.uint32(min(round(probability * 2**32), 2**32 - 1))
    return jnp.where(keep, jnp.float32(1 / (1 - probability)), jnp.float32(0))
