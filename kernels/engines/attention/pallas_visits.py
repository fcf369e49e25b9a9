"""Lists of the pairs of tiles that the Pallas grid of attention visits: one per batch row, from the spans of its mask, or one
per row and head, from the active pairs. Each pair is packed in one integer, which kernels and index maps decode."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.engines.attention.tiles import FIRST, FULL_FIRST, FULL_LAST, LAST

__all__ = [
    "ACTIVE",
    "BEGINS",
    "ENDS",
    "FULL",
    "MOST_INNER",
    "MOST_OUTER",
    "Step",
    "Visits",
    "decoded",
    "listed_visits",
    "united",
    "visits_of",
]

# A visit is one integer: resident block, streamed block, flags.
ACTIVE, FULL, BEGINS, ENDS = 1, 2, 4, 8
_FLAG_BITS, _BLOCK_BITS = 4, 13
_NONE = np.iinfo(np.int32).max  # no visit: sorts after all others
# The maximum numbers of resident and of streamed blocks that fit in such an integer.
MOST_OUTER, MOST_INNER = 1 << (31 - _FLAG_BITS - _BLOCK_BITS), 1 << _BLOCK_BITS


class Visits(NamedTuple):
    """The visited pairs of blocks of each row, in grid order.

    Rows shorter than the longest are padded with their last visit, without flags: such steps fetch and do nothing.
    """

    packed: Any  # int32 [rows * heads * length]
    rows: int  # 1, or the batch
    length: int  # entries per row
    steps: Any  # entries in use in the longest row; may be traced
    by_keys: bool  # whether key blocks are resident
    heads: int = 1  # heads with separate lists: query heads, or key heads if `by_keys`
    # If `by_keys` and query heads have separate lists: query blocks per head. Streamed blocks are then numbered over all
    # query heads of the key head. Otherwise 0.
    per_head: int = 0
    # Number of launches that share the resident blocks. With several, `packed` stores the lists of one launch after another,
    # and `steps` has an entry for each.
    parts: int = 1


def visits_of(span: Any, inner: int, most: int, by_keys: bool) -> Visits:
    """Returns the visits for spans [R, n, 4] over `inner` streamed blocks. `most` bounds the visits per row of traced spans."""
    xp: Any = np if isinstance(span, np.ndarray) else jnp
    first, last = span[..., FIRST], span[..., LAST]
    # A block with no active partner still gets one step: its output must be written.
    ends = xp.cumsum(xp.maximum(last - first, 1), axis=1)
    total = ends[:, -1:]
    length = int(total.max()) if xp is np else most
    step = np.arange(length, dtype=np.int32)
    visit = xp.minimum(step, total - 1)
    if xp is np:
        outer = np.stack([np.searchsorted(e, a, side="right") for e, a in zip(ends, visit)])
    else:
        outer = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(ends, visit)

    def of(x: Any) -> Any:
        return xp.take_along_axis(x, outer, axis=1)

    begin = of(ends) - xp.maximum(of(last) - of(first), 1)
    other = of(first) + visit - begin
    real = step < total
    active = real & (other < of(last))
    full = active & (other >= of(span[..., FULL_FIRST])) & (other < of(span[..., FULL_LAST]))
    flags = ACTIVE * active + FULL * full + BEGINS * (real & (visit == begin)) + ENDS * (real & (visit == of(ends) - 1))
    blocks = (outer << _BLOCK_BITS) + xp.minimum(other, inner - 1)
    packed = ((blocks << _FLAG_BITS) + flags).astype(np.int32)
    return Visits(packed.reshape(-1), span.shape[0], length, length if xp is np else total.max(), by_keys)


def listed_visits(
    some: jax.Array, every: jax.Array, most: int, by_keys: bool, per_head: int = 0, parts: int = 1
) -> Visits:
    """Returns the visits for the pairs of blocks set in `some`, bool [rows, heads, n, inner]. In those also set in `every`, all
    pairs attend. Rows and heads that share a list store it once.

    The integers of pairs ascend in grid order, so one sort moves the visits of a list to its front, in that order.

    Args:
      most: maximum number of visits per list.
      parts: number of launches that share the n resident blocks.
    """
    rows, heads, n, inner = some.shape
    if n > MOST_OUTER or inner > MOST_INNER:
        raise ValueError(
            f"{n} resident and {inner} streamed blocks exceed the maximum of {MOST_OUTER} and {MOST_INNER}"
        )
    outer, other = (np.arange(size, dtype=np.int32) for size in (n, inner))
    # A block without active partners is visited once: its output must be written.
    visited = some | (~some.any(-1, keepdims=True) & (other == 0))
    first = jnp.where(visited, other, inner).min(-1, keepdims=True)
    last = jnp.where(visited, other, -1).max(-1, keepdims=True)
    flags = ACTIVE * some + FULL * (some & every) + BEGINS * (other == first) + ENDS * (other == last)
    words = (((outer[:, None] << _BLOCK_BITS) + other) << _FLAG_BITS) + flags.astype(jnp.int32)
    each = -(-n // parts)
    words = jnp.pad(
        jnp.where(visited, words, _NONE), ((0, 0), (0, 0), (0, parts * each - n), (0, 0)), constant_values=_NONE
    )
    words = words.reshape(rows * heads, parts, each * inner).swapaxes(0, 1)
    total = (words != _NONE).sum(-1, keepdims=True, dtype=jnp.int32)
    length = min(most, each * inner)
    packed = lax.sort(words, is_stable=False)[..., :length]
    rest = jnp.where(words != _NONE, words, -1).max(-1, keepdims=True) >> _FLAG_BITS << _FLAG_BITS
    packed = jnp.where(np.arange(length, dtype=np.int32) < total, packed, rest)
    steps = total.max((1, 2))
    return Visits(packed.reshape(-1), rows, length, steps[0] if parts == 1 else steps, by_keys, heads, per_head, parts)


def united(span: Any) -> Any:
    """Returns the union [1, n, 4] of the rows' spans: from the first block of any row to the last; full where all rows are."""
    xp: Any = np if isinstance(span, np.ndarray) else jnp
    some = span[..., FIRST] < span[..., LAST]
    first = xp.where(some, span[..., FIRST], 2**30).min(0)
    last = span[..., LAST].max(0)
    full_first, full_last = span[..., FULL_FIRST].max(0), span[..., FULL_LAST].min(0)
    return xp.stack([xp.minimum(first, last), full_first, full_last, last], axis=-1)[None]


class Step(NamedTuple):
    """The position of a grid step: batch row, query head, query block, key block, and flags."""

    b: Any
    n: Any
    i: Any
    j: Any
    flags: Any

    def has(self, flag: int) -> Any:
        return (self.flags & flag) > 0


def decoded(visits: Visits, packed: Any, b: Any, n: Any, step: Any, head: Any = 0) -> Step:
    """Returns the position of a step in a list.

    Args:
      n: the query head; for a list over several query heads, the first of them.
      head: the head whose list to read, if heads have separate lists.
    """
    row = b if visits.rows > 1 else 0
    row = row * visits.heads + head if visits.heads > 1 else row
    word = packed[(row * visits.length if visits.rows * visits.heads > 1 else 0) + step]
    outer = word >> (_BLOCK_BITS + _FLAG_BITS)
    inner = (word >> _FLAG_BITS) & ((1 << _BLOCK_BITS) - 1)
    if visits.per_head:
        n, inner = n + lax.div(inner, visits.per_head), lax.rem(inner, visits.per_head)
    i, j = (inner, outer) if visits.by_keys else (outer, inner)
    return Step(b, n, i, j, word & ((1 << _FLAG_BITS) - 1))
