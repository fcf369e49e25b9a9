"""What the Pallas kernels of delta rules share: heads out of a block and back, products, sums of decays, the inverse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
CHUNK = LANES  # tokens of a chunk: a square of them fills the lanes
TILE = 16  # tokens whose block of the inverse is forward substitution
SIDE_BY_SIDE = LANES // TILE  # heads whose blocks fill the lanes
# A log decay at which nothing is left: e^-1000 is 0 in float32, and a sum of a chunk of them has digits to spare.
FORGETS = -1000.0
NT, TN = ((1,), (1,)), ((0,), (0,))  # contractions: of the last dims, of the first dims
_HIGH, _HALF = -(1 << 16), 1 << 15  # the bits of a float32 that a bfloat16 has, and half of the last of them


def product(a: jax.Array, b: jax.Array, over: Any = ((1,), (0,))) -> jax.Array:
    """Returns a matrix product in float32: exact for float32, of operands in bfloat16 else."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (over, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (high, low), bfloat16, whose sum has 16 bits of the float32 x.

    By bits, to the nearest: a conversion there and back may be dropped by the compiler, as it is more precise without.
    """
    high = lax.bitcast_convert_type((lax.bitcast_convert_type(x, jnp.int32) + _HALF) & _HIGH, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def close_product(a: jax.Array, b: jax.Array, exact: bool) -> jax.Array:
    """Returns a product of float32 matrices: exact, or in three passes of bfloat16, off by 2^-16."""
    if exact:
        return product(a, b)
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    both = product(jnp.concatenate([a_high, a_low]), b_high)  # the second operand is loaded once
    return both[: a.shape[0]] + both[a.shape[0] :] + product(a_high, b_low)


# -- heads -------------------------------------------------------------------------------------------------------------


def in_words(dtype: Any, heads: int) -> bool:
    """Returns whether two heads of a token lie in one word of 32 bits each, so that a stride over words picks them."""
    return jnp.dtype(dtype).itemsize == 2 and heads % 2 == 0


def _whole_lanes(width: int) -> list[slice]:
    return [slice(i, i + LANES) for i in range(0, width, LANES)]


def load_heads(ref: Any, heads: Any, words: Any, valid: jax.Array | None) -> None:
    """Copies a block [1, C, heads, D] to `heads` [heads, C, D], with 0 for tokens that are not valid.

    Args:
      words: int32 [D / LANES, C * heads / 2, LANES], to pass through: a stride is taken over rows of LANES.
      valid: bool [C, 1]; None: all are.
    """
    _, C, N, D = ref.shape

    def put(h: int, lanes: slice, x: jax.Array) -> None:
        heads[h, :, lanes] = (x if valid is None else jnp.where(valid, x, 0)).astype(heads.dtype)

    if not in_words(ref.dtype, N):
        for h in range(N):
            put(h, slice(None), ref[0, :, h, :].astype(jnp.float32))
        return
    for i, lanes in enumerate(_whole_lanes(D)):
        words[i] = pltpu.bitcast(ref[0, :, :, lanes], jnp.int32).reshape(C * N // 2, LANES)
        for h in range(N // 2):
            pair = words[i, pl.ds(h, C, stride=N // 2), :]
            put(2 * h, lanes, lax.bitcast_convert_type(pair << 16, jnp.float32))
            put(2 * h + 1, lanes, lax.bitcast_convert_type(pair & _HIGH, jnp.float32))


def store_heads(ref: Any, heads: Any, words: Any, more: Any = None) -> None:
    """Copies `heads` [heads, C, D] to a block [1, C, heads, D].

    Args:
      words: as in `load_heads`.
      more: a bool: whether to add to what the block has.
    """
    _, C, N, D = ref.shape
    if in_words(ref.dtype, N):
        for i, lanes in enumerate(_whole_lanes(D)):
            for h in range(N // 2):
                even, odd = (
                    lax.bitcast_convert_type(heads[n, :, lanes].astype(ref.dtype).astype(jnp.float32), jnp.int32)
                    for n in (2 * h, 2 * h + 1)
                )
                words[i, pl.ds(h, C, stride=N // 2), :] = lax.shift_right_logical(even, 16) | (odd & _HIGH)
            block = pltpu.bitcast(words[i].reshape(C, N // 2, LANES), ref.dtype)
            ref[0, :, :, lanes] = block if more is None else jnp.where(more, ref[0, :, :, lanes] + block, block)
        return
    for h in range(N):
        x = heads[h].astype(ref.dtype)
        ref[0, :, h, :] = x if more is None else jnp.where(more, ref[0, :, h, :] + x, x)


# -- decays ------------------------------------------------------------------------------------------------------------


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """Returns x moved by a number of lanes, with 0 in their place."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    here = lane >= by if by > 0 else lane < x.shape[1] + by
    return jnp.where(here, pltpu.roll(x, by % x.shape[1], 1), 0)


def running_sums(x: jax.Array, reverse: bool = False) -> jax.Array:
    """Returns the sums until each lane, or from each lane on."""
    step = 1
    while step < x.shape[1]:
        x = x + _shifted(x, -step if reverse else step)
        step *= 2
    return x


def precise_sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums until each lane as two numbers, whose differences are exact.

    A difference of two single numbers would have lost the digits of a short interval after a large decay.
    """
    high, low, step = x, jnp.zeros_like(x), 1
    while step < x.shape[1]:
        other = _shifted(high, step)
        total = high + other
        part = total - high
        low = low + _shifted(low, step) + ((high - (total - part)) + (other - part))
        high, step = total, 2 * step
    total = high + low
    return total, low - (total - high)


def columns(rows: jax.Array) -> jax.Array:
    """Returns the transpose [C, LANES] of up to LANES rows of C tokens; the other columns are arbitrary."""
    rest = LANES - rows.shape[0]
    return jnp.transpose(jnp.concatenate([rows, jnp.zeros((rest, rows.shape[1]), rows.dtype)]) if rest else rows)


def rows_of(parts: list[jax.Array]) -> jax.Array:
    """Returns columns [C, 1] as rows [LANES, C]."""
    lane = lax.broadcasted_iota(jnp.int32, (parts[0].shape[0], LANES), 1)
    x = jnp.zeros(lane.shape, jnp.float32)
    for i, column in enumerate(parts):
        x = jnp.where(lane == i, column, x)
    return jnp.transpose(x)


# -- inverse -----------------------------------------------------------------------------------------------------------


def _tiles_of_inverses(matrices: list[jax.Array]) -> list[list[jax.Array]]:
    """Returns for each matrix its tiles [TILE, LANES]: the inverse of the tile on the diagonal, in its place, else 0.

    Forward substitution, in float32, of all tiles of all matrices at once: those of one matrix below, those of another beside
    one another.
    """
    lane = lax.broadcasted_iota(jnp.int32, (TILE, LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, (TILE, LANES), 0)
    own, count = lax.div(lane, TILE), CHUNK // TILE
    packed, solved = [], []
    for t in range(count):
        tile = jnp.zeros((TILE, LANES), jnp.float32)
        for j, a in enumerate(matrices):
            here = a[t * TILE : (t + 1) * TILE]
            tile = jnp.where(own == j, pltpu.roll(here, (j - t) * TILE % LANES, 1), tile)
        packed.append(tile)
        solved.append(jnp.where(lax.rem(lane, TILE) == row, 1.0, 0.0))
    for i in range(TILE - 1):
        index = own * TILE + i
        for t in range(count):
            factor = jnp.take_along_axis(packed[t], index, axis=1, mode="promise_in_bounds")
            solved[t] = solved[t] - factor * solved[t][i : i + 1]
    return [
        [jnp.where(own == t, pltpu.roll(solved[t], (t - j) * TILE % LANES, 1), 0) for t in range(count)]
        for j in range(len(matrices))
    ]


def _even(x: jax.Array, size: int) -> jax.Array:
    """Returns every other block of `size` rows, from the first on."""
    return jnp.concatenate([x[i : i + size] for i in range(0, x.shape[0], 2 * size)])


def _odd(x: jax.Array, size: int) -> jax.Array:
    """Returns every other block of `size` rows, from the second on."""
    return _even(x[size:], size)


def _between(even: jax.Array, odd: jax.Array, size: int) -> jax.Array:
    """Returns the array of which these are the blocks."""
    parts = [x[i : i + size] for i in range(0, even.shape[0], size) for x in (even, odd)]
    return jnp.concatenate(parts)


def inverses(matrices: list[jax.Array], exact: bool) -> list[jax.Array]:
    """Returns the inverses of I + A for up to SIDE_BY_SIDE strictly lower triangular A [CHUNK, CHUNK] in float32.

    Tiles on the diagonal by substitution, then pairs of blocks are joined: `[[P, 0], [-Q A P, Q]]`, of which only the rows of Q
    are computed. Not a power series, which diverges with correlated keys.

    Args:
      exact: whether products are in full float32.
    """
    row = lax.broadcasted_iota(jnp.int32, (CHUNK // 2, CHUNK), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK // 2, CHUNK), 1)
    found, size = [jnp.concatenate(tiles) for tiles in _tiles_of_inverses(matrices)], TILE
    while size < CHUNK:
        left = lax.div(column, size) == 2 * lax.div(row, size)  # the block beside that on the diagonal
        # Step by step for all matrices: the products of one follow one another, those of others fill the time between.
        below = [
            close_product(jnp.where(left, _odd(a, size), 0), x, exact) for a, x in zip(matrices, found, strict=True)
        ]
        lower = [
            _odd(x, size) - close_product(_odd(x, size), _between(jnp.zeros_like(y), y, size), exact)
            for x, y in zip(found, below, strict=True)
        ]
        found = [_between(_even(x, size), y, size) for x, y in zip(found, lower, strict=True)]
        size *= 2
    return found
