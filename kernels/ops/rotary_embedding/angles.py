"""Angles of rotary embedding: in float32, and exact at any position.

A float32 product of position and frequency has 24 bits for the whole turns and the rest, so that the rest, which alone
matters, loses a bit with every doubling of the position; from 2^24 on neighbours are one number. Here a frequency is a
number of turns in fixed point, 32 bits after the point, and a float32 for what these leave. The product of an int32
position and the fixed-point part wraps around at whole turns, exactly; that with the remainder is at most a quarter of
a turn, in float32.
"""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

EXACT_FROM = 131_072
_UNIT = 2.0**-32
_TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")  # in radians


def turns(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32 in units of 2^-32 turns, modulo a turn; float32 remainder in turns), of frequencies in radians per
    position, float64. Their sum is a frequency, modulo one turn per position, to 2^-57 turns."""
    units = [Fraction(float(w)) / _TURN * 2**32 for w in frequencies]
    fixed = [round(u) for u in units]
    whole = np.array([n % 2**32 for n in fixed], np.uint32).view(np.int32)
    return whole, np.array([float(u - n) * _UNIT for u, n in zip(units, fixed, strict=True)], np.float32)


def is_far(index: jax.Array, exact_from: int) -> jax.Array:
    """Returns whether int32 positions have exact angles. Negative ones have those of their absolute value, negated."""
    return (index >= exact_from) | (index <= -exact_from)


def exact_angle(positions: jax.Array, fixed: jax.Array, rest: jax.Array) -> jax.Array:
    """Returns float32 angles modulo 2 pi, at most 3 pi / 2 in size, of integer positions; fixed and rest: see `turns`.

    The error is at most 6e-7 radians at any int32 position: roundings to float32 of a number of this size.
    """
    whole = (positions.astype(jnp.int32) * fixed).astype(jnp.float32) * jnp.float32(_UNIT)
    return (whole + positions.astype(jnp.float32) * rest) * jnp.float32(2 * math.pi)


def angles(positions: jax.Array, frequencies: np.ndarray, exact_from: int | None, dtype: jnp.dtype) -> jax.Array:
    """Returns the angles of integer positions [..., 1], one for each frequency; exact ones modulo 2 pi. In float64 the
    plain product is as exact."""
    plain = positions.astype(dtype) * jnp.asarray(frequencies, dtype)
    if exact_from is None or dtype == jnp.float64:
        return plain
    exact = exact_angle(positions, *(jnp.asarray(x) for x in turns(frequencies)))
    return exact if exact_from == 0 else jnp.where(is_far(positions.astype(jnp.int32), exact_from), exact, plain)
