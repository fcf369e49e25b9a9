"""int8 quantisation in blocks of tokens, defined once for the contract of quantised attention and its backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.matmul.magnitude import largest_magnitude


def quantized(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns (int8 with x's shape, the scale of each token, float32 [B, T, N]): x is approximately int8 * scale.

    Tokens of a block and head share the scale max |x| / 127; the scale of a block of zeros is 1, and of one with NaN it
    is NaN.
    """
    B, T, N, H = x.shape
    upcast = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    whole = jnp.pad(largest_magnitude(upcast)[..., 0], ((0, 0), (0, -T % block), (0, 0)))
    largest = jnp.max(whole.reshape(B, -1, block, N), axis=2)
    scale = jnp.repeat(jnp.where(largest == 0, 1, largest / 127), block, axis=1)[:, :T]
    return jnp.round(upcast / scale[..., None]).astype(jnp.int8), scale


def dequantized(x: jax.Array, block: int) -> jax.Array:
    """Returns x rounded to multiples of its scales, in at least float32."""
    integers, scale = quantized(x, block)
    return integers.astype(scale.dtype) * scale[..., None]
