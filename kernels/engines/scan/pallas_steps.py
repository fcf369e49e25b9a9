"""What decays of channels leave of a chunk, and the weights of its pairs: parts of Pallas kernels, differentiated there.

The weight of a pair is Σ q_t k_s exp(a_{s+1} + ... + a_t) over channels. Chunks are halved again and again (*levels*): of
blocks of 2 h tokens, t is in the second half and s in the first, and both are referred to the middle. The sums from there to t
and from s to there have only their own terms, so they are exact for any decays, and neither exponential is above 1.

In bfloat16 the four levels of 16 tokens are one product where no channel's sum over 16 tokens is wider than REACH: both tokens
are referred to the middle of that sum, so that neither exponential is above exp(REACH / 2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.scan.pallas_delta_parts import CHUNK, FORGETS, NT, product

REACH = 140.0  # the widest sum of log decays whose middle is taken: exp(70) is far from the largest number
NARROW = 16  # tokens of such a sum
TILE = 8  # rows of a register: blocks of as many, or more, are moved and left out for nothing


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(x: jax.Array, y: jax.Array, over: Any, dtype: Any) -> jax.Array:
    """Returns the product of float32 matrices over a dim of each, of operands in `dtype`; so are those of its gradients."""
    return product(x.astype(dtype), y.astype(dtype), over)


def _dot_fwd(x: jax.Array, y: jax.Array, over: Any, dtype: Any) -> Any:
    x, y = x.astype(dtype), y.astype(dtype)
    return product(x, y, over), (x, y)


def _dot_bwd(over: Any, dtype: Any, saved: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, y), ((i,), (j,)), d = saved, over, d.astype(dtype)
    dx = product(d, y, ((1,), (1 - j,))) if i else product(y, d, ((1 - j,), (1,)))
    return dx, product(d, x, ((0,), (1 - i,))) if j else product(x, d, ((1 - i,), (0,)))


dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def swapped(x: jax.Array, size: int) -> jax.Array:
    """Returns x with every two neighbouring blocks of `size` rows in each other's place, which is its own derivative."""
    if size >= 8:
        return jnp.concatenate([x[(i ^ 1) * size : ((i ^ 1) + 1) * size] for i in range(x.shape[0] // size)])
    late = lax.broadcasted_iota(jnp.int32, x.shape, 0) & size > 0
    return jnp.where(late, pltpu.roll(x, size, 0), pltpu.roll(x, x.shape[0] - size, 0))


swapped.defvjp(lambda x, size: (swapped(x, size), None), lambda size, _, d: (swapped(d, size),))


def _blocks(x: jax.Array, size: int, first: int) -> jax.Array:
    """Returns every other block of `size` rows, from that number on."""
    return jnp.concatenate([x[i : i + size] for i in range(first * size, x.shape[0], 2 * size)])


def _between(early: jax.Array, late: jax.Array, size: int) -> jax.Array:
    """Returns the array of which these are every other block."""
    return jnp.concatenate([x[i : i + size] for i in range(0, late.shape[0], size) for x in (early, late)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def late_rows(x: jax.Array, size: int) -> jax.Array:
    """Returns the second of every two neighbouring blocks of `size` rows."""
    return _blocks(x, size, 1)


late_rows.defvjp(
    lambda x, size: (_blocks(x, size, 1), None), lambda size, _, d: (_between(jnp.zeros_like(d), d, size),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def laid(total: jax.Array, x: jax.Array, here: jax.Array, size: int | None) -> jax.Array:
    """Returns total + x where `here`, where total is still 0, and else total: x may be anything there.

    Args:
      size: x has `late_rows` of that many rows; None: all rows.
    """
    if size is None:
        return jnp.where(here, x, total)
    return _between(_blocks(total, size, 0), jnp.where(here, x, _blocks(total, size, 1)), size)


def _laid_bwd(size: int | None, here: jax.Array, d: jax.Array) -> Any:
    return d, jnp.where(here, d if size is None else _blocks(d, size, 1), 0.0), None


laid.defvjp(lambda total, x, here, size: (laid(total, x, here, size), here), _laid_bwd)


class Step(NamedTuple):
    """Pairs that are taken at once.

    Attributes:
      reads, writes: decays [C, H] from a point between two tokens to the later one, and from the earlier one there.
      before: as `reads`, of what is read before the later token's own decay.
      late: the tokens of a block that alone read, of which `reads` and `before` then are; None: all of the chunk.
      middle: whether the pairs are those of blocks of NARROW tokens; else those of a level of `half` tokens.
    """

    reads: jax.Array
    before: jax.Array
    writes: jax.Array
    late: int | None
    half: int
    middle: bool


class Decays(NamedTuple):
    """What decays leave.

    Attributes:
      steps: all pairs of two tokens.
      enters: [C, H], from the start of the chunk until a token is read; before: without the token's own decay.
      leaves: from a token to the end.
      whole: [C, H], over the chunk, in every row.
    """

    steps: list[Step]
    enters: jax.Array
    before: jax.Array
    leaves: jax.Array
    whole: jax.Array


def decays(a: jax.Array, narrow: bool) -> Decays:
    """Returns what log decays leave.

    Args:
      narrow: whether no sum of NARROW tokens exceeds REACH.
    """
    row = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    # The first token of a document, which alone has less than FORGETS, reads nothing from before it either way.
    before, until, after, total = jnp.where(a < FORGETS, FORGETS, 0.0), a, jnp.zeros_like(a), a
    steps, half = [], 1
    while half < a.shape[0]:
        late = row & half > 0
        if narrow and half == NARROW:
            middle = 0.5 * total
            reads = jnp.exp(until - middle), jnp.exp(before - middle)
            steps.append(Step(*reads, jnp.exp(middle - until), None, half, True))
        if not narrow or half >= NARROW:
            writes = jnp.exp(jnp.where(late, until, after))
            if half < TILE:
                steps.append(Step(writes, jnp.exp(before), writes, None, half, False))
            else:
                steps.append(Step(late_rows(writes, half), jnp.exp(late_rows(before, half)), writes, half, half, False))
        other = swapped(total, half)
        earlier = jnp.where(late, other, 0.0)
        until, after, total = until + earlier, after + (other - earlier), total + other
        before = before + earlier
        half *= 2
    return Decays(steps, jnp.exp(until), jnp.exp(before), jnp.exp(after), jnp.exp(total))


class Reader(NamedTuple):
    """What reads the state: x [C, H]; whether before the token's own decay; whether it reads what its own token writes."""

    x: jax.Array
    before: bool
    own: bool = False


def pairs(readers: Sequence[Reader], writers: Sequence[jax.Array], d: Decays, dtype: Any) -> list[list[jax.Array]]:
    """Returns the weights [C, C] of what each reader, and of it each writer [C, H], has of a token and an earlier one.

    A step is one product, of all readers with all writers.
    """
    t, s = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    total = [[zero] * len(writers) for _ in readers]

    def add(rows: list[jax.Array], columns: list[jax.Array], of: list[int], masks: list[jax.Array], late: Any) -> None:
        each, size = dot(jnp.concatenate(rows), jnp.concatenate(columns), NT, dtype), rows[0].shape[0]
        for place, i in enumerate(of):
            for j in range(len(writers)):
                block = each[place * size : (place + 1) * size, j * CHUNK : (j + 1) * CHUNK]
                total[i][j] = laid(total[i][j], block, masks[place], late)

    for z in d.steps:
        reader, writer = (t, s) if z.late is None else (_blocks(t, z.late, 1), _blocks(s, z.late, 1))
        apart = lax.div(reader ^ writer, z.half)  # 0 in one block of `half` tokens, 1 in neighbours that make a block
        here = (reader > writer) & (apart == (0 if z.middle else 1))
        own = (reader >= writer) & (apart == 0) if z.middle else here
        rows = [
            (r.x if z.late is None else late_rows(r.x, z.late)) * (z.before if r.before else z.reads) for r in readers
        ]
        masks = [own if r.own else here for r in readers]
        add(rows, [w * z.writes for w in writers], list(range(len(readers))), masks, z.late)
    own = [i for i, r in enumerate(readers) if r.own]
    if own and not any(z.middle for z in d.steps):
        add([readers[i].x for i in own], list(writers), own, [t == s] * len(own), None)
    return total
