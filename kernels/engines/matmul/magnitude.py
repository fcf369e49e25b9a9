"""The largest magnitude of a block, which determines its quantization scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Returns max |x| over the last dim, [..., 1]; NaN if any entry is NaN, so that quantization cannot hide it.

    On CPUs XLA's maximum over the last of three or more dims ignores NaN (openxla/xla#21461).
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(jnp.any(jnp.isnan(x), axis=-1, keepdims=True), jnp.nan, largest)
