"""8-bit floats with scales: how they are made of wider numbers, and what they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Significant bits 4 and 3: "e4m3" for activations and weights, "e5m2" for gradients of a wide range.
DTYPES = ("float8_e4m3fn", "float8_e5m2")
LEAST = float(jnp.finfo(jnp.float32).tiny)  # devices flush smaller scales to zero


@dataclass(frozen=True)
class Scaling:
    """How many rows, and how many entries of the contracted dim, share a scale; None: all of them.

    `a` and `b` are those of the two operands. `exponents`: scales are powers of two, uint8 codes 2 ** (code - 127).
    """

    a: tuple[int | None, int | None]
    b: tuple[int | None, int | None]
    exponents: bool = False


SCALINGS = {
    "tensor": Scaling((None, None), (None, None)),
    "row": Scaling((1, None), (1, None)),
    "block": Scaling((1, 128), (128, 128)),
    "mx": Scaling((1, 32), (1, 32), exponents=True),
}


def powers(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of scales: themselves, or of uint8 codes 2 ** (code - 127), NaN for 255."""
    if codes.dtype != jnp.uint8:
        return codes.astype(jnp.float32)
    values = jnp.ldexp(jnp.float32(1), codes.astype(jnp.int32) - 127)
    return jnp.where(codes == 255, jnp.nan, values)


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the scale of each entry of an array of this shape, float32, broadcast along dims of one scale."""
    scale = powers(scale)
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[dim], axis=dim)
    return scale


def _in_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    rows, width = block
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // width, width)


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scales of blocks, float32, given their largest magnitudes: infinity for those with an infinity or NaN."""
    # A product: XLA turns a division by a constant into one, on some devices.
    inverse = jnp.float32(1 / float(jnp.finfo(dtype).max))
    scale = jnp.where(largest > 0, jnp.maximum(largest * inverse, LEAST), 1.0)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def quantized(x: jax.Array, block: tuple[int, int], dtype: Any, exponents: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (values, scales) of x [M, D] in blocks of that many rows and entries; see `quantize_scaled`."""
    largest_value = float(jnp.finfo(dtype).max)
    parts = _in_blocks(x.astype(jnp.float32), block)
    largest = jnp.max(jnp.abs(parts), axis=(1, 3))
    # XLA's maximum on CPUs may ignore NaN (openxla/xla#21461).
    whole = jnp.isfinite(largest) & ~jnp.any(jnp.isnan(parts), axis=(1, 3))
    if exponents:
        power = jnp.frexp(largest)[1] - 1 - (math.frexp(largest_value)[1] - 1)
        scale = jnp.where(largest > 0, jnp.clip(power + 127, 1, 254), 127)
        scale = jnp.where(whole, scale, 255).astype(jnp.uint8)
    else:
        scale = scale_of(jnp.where(whole, largest, jnp.inf), dtype)
    # One division a block instead of one a number.
    ratio = jnp.clip(parts * (1 / powers(scale))[:, None, :, None], -largest_value, largest_value)
    return ratio.astype(dtype).reshape(x.shape), scale


def step_of(D: int, *scales: jax.Array) -> int:
    """Returns how many consecutive entries of the contracted dim have one scale in each of the arrays."""
    return D // math.lcm(*(s.shape[-1] for s in scales))


def column(scale: jax.Array, step: Any, steps: int, rows: int) -> jax.Array:
    """Returns the scales of the rows of an operand in a step, [rows] or [1], float32."""
    of_step = lax.dynamic_index_in_dim(scale, step // (steps // scale.shape[1]), 1, keepdims=False)
    return spread(of_step, (rows,))
