"""Stochastic rounding to bfloat16, with random bits that depend on the step, the array and the global index alone: every mesh,
and a run that resumes, draws the same.

bfloat16 keeps 8 bits of a number. Rounded to the nearest, a moving average loses every change below 1/256 of it: with
b2 = 0.999 a second moment could never fall. Rounded up with the probability of what is cut off, it is right on average (Gupta
et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1).
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp

_SPREAD = 0x9E3779B1  # 2^32 over the golden ratio, odd


def mixed(x: jax.Array) -> jax.Array:
    """Returns a hash of each uint32: the finalizer of MurmurHash3 (Appleby), which is a bijection."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def seed_of(name: str, *counts: jax.Array) -> jax.Array:
    """Returns a uint32 seed for an array at a step. counts: whole numbers, such as the step and the microbatch."""
    seed = jnp.uint32(zlib.crc32(name.encode()))
    for count in counts:
        seed = mixed(seed ^ (jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(_SPREAD)))
    return seed


def random_bits(seed: jax.Array, shape: tuple[int, ...], row: jax.Array | None = None) -> jax.Array:
    """Returns uint32 random bits for each element, a function of the seed and the index.

    Args:
      row: the array is this row of a larger one, whose bits it gets there.
    """
    bits = jnp.broadcast_to(seed, shape)
    if row is not None:
        bits = mixed(bits ^ (row.astype(jnp.uint32) * jnp.uint32(_SPREAD)))
    for dim in range(len(shape)):
        bits = mixed(bits ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(_SPREAD)))
    return bits


def rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns float32 numbers as bfloat16: one of the two neighbours, with an expectation of x. Infinities and NaN stay.

    Args:
      bits: uint32, of which the lower 16 are used.
    """
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & jnp.uint32(0xFFFF))
    cut = jax.lax.bitcast_convert_type((raw >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), cut, x.astype(jnp.bfloat16))
