"""The matmul of operations that leave it to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the einsum of two arrays, accumulated in float32; float32 inputs use true float32 on every device."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
