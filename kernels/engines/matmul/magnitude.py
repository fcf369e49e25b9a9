"""The largest magnitude of a block, from which the scale follows with which it is rounded to few bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Returns max |x| over the last dim, [..., 1]; NaN where one is NaN, so that rounding makes no number of it.

    On CPUs XLA's maximum over the last of three dims or more leaves NaN out (openxla/xla#21461).
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(jnp.any(jnp.isnan(x), axis=-1, keepdims=True), jnp.nan, largest)
