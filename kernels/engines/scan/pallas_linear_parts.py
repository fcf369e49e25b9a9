"""Parts of the Pallas kernels of a recurrence with one decay per head: heads of arrays [B, T, N, D] where they lie, and decays.

XLA stores an array whose D fills whole lanes as [B, T, N, D], and others as [B, N, D, T], which wastes no memory. So a head of
a block is [C, D] or [D, C], and products take either (`product`).

A block [1, C, heads, D] has the heads of a token beside each other in sublanes. A head is a strided load of it; two heads of 16
bits share 32, so both are shifted out of one load, and a store writes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.framework.interpret import interpreting

LANES = 128
UPPER_HALF = -65536  # the upper 16 bits of 32
# Log decays that are smaller count as this, as exp(-100) is 0 beside anything; a document's first token has another FORGETS.
LEAST_DECAY = -100.0
FORGETS = -512.0
# Sums of log decays are added up in two parts: multiples of STEP, whose sums are exact, and what is left of each.
STEP = 2.0**-6


def product(x: jax.Array, dim_x: int, y: jax.Array, dim_y: int, swap: int = 0) -> jax.Array:
    """Returns the product of two matrices over a dim of each, float32, with the rest of x first, or last if `swap`.

    That of float32 is exact, and not rounded to bfloat16.
    """
    if swap:
        x, dim_x, y, dim_y = y, dim_y, x, dim_x
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((dim_x,), (dim_y,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def divided(x: Any, by: int) -> tuple[Any, Any]:
    """Returns quotient and remainder of a number that is not negative, in the kernel or before it is compiled."""
    return divmod(x, by) if isinstance(x, int) else (lax.div(x, by), lax.rem(x, by))


# -- heads ------------------------------------------------------------------------------------------------------------


def tokens_last(D: int) -> bool:
    """Returns whether an array with this last dim lies as [B, N, D, T]."""
    return D % LANES != 0


def load_head(ref: Any, h: Any, last: bool, valid: Any) -> jax.Array:
    """Returns head h of a block [1, heads, D, C] if `last`, otherwise of [1, C, heads, D], or [1, C, D] with one head.

    It is [D, C] or [C, D], with 0 where tokens are not valid.

    Args:
      valid: bool [C, 1] and [1, C], or None.
    """
    x = ref[0, h] if last else _loaded(ref, h)
    if valid is None:
        return x
    return jnp.where(valid[last], x.astype(jnp.float32), 0.0).astype(x.dtype)


def _loaded(ref: Any, h: Any) -> jax.Array:
    if len(ref.shape) == 3:
        return ref[0]
    _, C, heads, D = ref.shape
    if not _whole(ref):
        return ref[0, :, h, :] if isinstance(h, int) else _chosen(lambda i: ref[0, :, i, :], h, heads)
    if ref.dtype == jnp.float32:
        if interpreting():  # which has no view of a reference in another shape
            return ref[0, :, pl.ds(h, 1), :].reshape(C, D)
        return ref.reshape(C * heads, D)[pl.ds(h, C, heads), :]

    def two(pair: int) -> jax.Array:
        if interpreting():
            return pltpu.bitcast(ref[0, :, 2 * pair : 2 * pair + 2, :], jnp.int32).reshape(C, D)
        return ref.bitcast(jnp.int32).reshape(C * heads // 2, D)[pl.ds(pair, C, heads // 2), :]

    pair, second = divided(h, 2)
    bits = two(pair) if isinstance(h, int) else _chosen(two, pair, heads // 2)
    bits = (bits << (16 - 16 * second)) & UPPER_HALF
    return pltpu.bitcast(bits, jnp.float32).astype(ref.dtype)  # bfloat16 is the upper half of float32


def _chosen(load: Callable[[int], jax.Array], index: Any, many: int) -> jax.Array:
    """Returns `load(index)`, for an index that is only known in the kernel: strided loads of 16 bits take none."""
    x = load(0)
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    for i in range(1, many):
        wide = jnp.where(index == i, load(i).astype(wide.dtype), wide)
    return wide.astype(x.dtype)


def _whole(ref: Any) -> bool:
    """Returns whether heads can be loaded by a stride: they are as wide as a register, and no rows lie between their tiles."""
    heads, D = ref.shape[2:]
    return D == LANES and (heads in (2, 4) or heads % 8 == 0)


def store_heads(ref: Any, heads: Sequence[jax.Array], last: bool) -> None:
    """Writes all heads of a block, as `load_head` returns them."""
    if last:
        for h, x in enumerate(heads):
            ref[0, h] = x.astype(ref.dtype)
        return
    if len(ref.shape) == 3:
        ref[0] = heads[0].astype(ref.dtype)
        return
    _, C, _, D = ref.shape
    if ref.dtype == jnp.float32 or not _whole(ref):
        for i, x in enumerate(heads):
            if interpreting() or not _whole(ref):
                ref[0, :, i, :] = x.astype(ref.dtype)
            else:
                ref.reshape(C * len(heads), D)[pl.ds(i, C, len(heads)), :] = x.astype(ref.dtype)
        return
    pairs = len(heads) // 2
    for pair in range(pairs):
        low, high = (
            pltpu.bitcast(x.astype(ref.dtype).astype(jnp.float32), jnp.int32) for x in heads[2 * pair : 2 * pair + 2]
        )
        bits = lax.shift_right_logical(low, 16) | high
        if interpreting():
            ref[0, :, 2 * pair : 2 * pair + 2, :] = pltpu.bitcast(bits[:, None], ref.dtype)
        else:
            ref.bitcast(jnp.int32).reshape(C * pairs, D)[pl.ds(pair, C, pairs), :] = bits


# -- decays -----------------------------------------------------------------------------------------------------------


class Fades(NamedTuple):
    """What decays leave of a chunk's tokens, for several heads. Pairs of [C, heads] and [heads, C] have the same numbers.

    Attributes:
      coarse, fine: sums of log decays up to each token, in two parts.
      enters: what a token sees of the state before the chunk. leaves: what the state after the chunk has of a token.
      whole: [1, heads], what is left of a state over the chunk.
    """

    coarse: tuple[jax.Array, jax.Array]
    fine: tuple[jax.Array, jax.Array]
    enters: tuple[jax.Array, jax.Array]
    leaves: tuple[jax.Array, jax.Array]
    whole: jax.Array


def of_head(x: tuple[jax.Array, jax.Array], i: int, last: int) -> jax.Array:
    """Returns head i of a pair [C, heads] and [heads, C], as a row if `last`, otherwise as a column."""
    return x[1][i : i + 1, :] if last else x[0][:, i : i + 1]


def triangle(C: int, strict: bool = False) -> jax.Array:
    """Returns [C, C] with 1 where the first index is not above the second, or is below it if `strict`."""
    first, second = (lax.broadcasted_iota(jnp.int32, (C, C), dim) for dim in (0, 1))
    return jnp.where(first < second if strict else first <= second, 1.0, 0.0)


def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an array [heads, C] as a pair [C, heads] and [heads, C]."""
    return x.T, x


def fades(a: jax.Array) -> Fades:
    """Returns what log decays [heads, C] of tokens leave, with heads a multiple of 8."""
    heads, C = a.shape
    coarse = jnp.round(a * (1 / STEP)) * STEP
    rows = product(jnp.concatenate([coarse, a - coarse], axis=0), 1, triangle(C), 0)
    columns = rows.T
    (coarse, fine), end = ((columns[:, :heads], rows[:heads]), (columns[:, heads:], rows[heads:])), rows[:, C - 1 :]
    enters = jnp.exp(coarse[0] + fine[0]), jnp.exp(coarse[1] + fine[1])
    last = columns[C - 1 :, :heads], columns[C - 1 :, heads:]
    leaves = (
        jnp.exp((last[0] - coarse[0]) + (last[1] - fine[0])),
        jnp.exp((end[:heads] - coarse[1]) + (end[heads:] - fine[1])),
    )
    return Fades(coarse, fine, enters, leaves, jnp.exp(last[0] + last[1]))


def between(f: Fades, i: int) -> jax.Array:
    """Returns [C, C]: what a token (rows) has of one before it or of itself (columns), for head i; 0 for later ones."""
    coarse, fine = (of_head(x, i, 0) - of_head(x, i, 1) for x in (f.coarse, f.fine))
    C = coarse.shape[0]
    reader, writer = (lax.broadcasted_iota(jnp.int32, (C, C), dim) for dim in (0, 1))
    return jnp.where(reader >= writer, jnp.exp(coarse + fine), 0.0)
