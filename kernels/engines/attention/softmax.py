"""Attention's softmax in parts: weights follow from one number of each row, and by it two sets of keys merge."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def backward_inputs(residuals: dict, cotangents: dict) -> dict:
    """Returns d_out, lse and delta = rowsum(d_out * out) - d_lse, float32 [B, T, N], from the residuals out and lse.

    With ds = p * (dp - delta), the two cotangents need no separate terms; a ring computes delta once, from its global
    out. A missing cotangent, of an unused output, counts as zero.
    """
    out = residuals["out"]
    d_out = cotangents.get("d_out")
    if d_out is None:
        d_out = jnp.zeros_like(out)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return {"d_out": d_out, "lse": residuals["lse"], "delta": delta - cotangents.get("d_lse", 0)}


def sink_gradient(softmax_aux: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns d softmax_aux [N, M]: a sink has weight exp(sink - lse) and value zero, so ds = -weight * delta."""
    some = (lse != -jnp.inf)[..., None]  # lse = -inf means no keys and no finite sink: weight 0
    weight = jnp.exp(softmax_aux.astype(jnp.float32)[None, None] - jnp.where(some, lse[..., None], 0))
    return -jnp.sum(jnp.where(some, weight * delta[..., None], 0), axis=(0, 1))


def merge(out: jax.Array, lse: jax.Array, new_out: jax.Array, new_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns attention over two disjoint sets of keys from that over each: (out [..., H], lse [...]), float32.

    lse = -inf is a set in which a row sees no key; two of them give 0 and -inf.
    """
    both = jnp.logaddexp(lse, new_lse)
    anchor = jnp.where(both == -jnp.inf, 0, both)
    a, b = jnp.exp(lse - anchor), jnp.exp(new_lse - anchor)
    return out * a[..., None] + new_out.astype(jnp.float32) * b[..., None], both
