"""The pairs of blocks that Pallas' grid of flash attention goes over: a list for each row of the batch, made of the spans of
its mask. Each pair is one integer, which kernels and index maps take apart again."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.tiles import FIRST, FULL_FIRST, FULL_LAST, LAST

__all__ = ["ACTIVE", "BEGINS", "ENDS", "FULL", "Step", "Visits", "decoded", "united", "visits_of"]

# A visit is one integer: block that stays, block that changes, flags.
ACTIVE, FULL, BEGINS, ENDS = 1, 2, 4, 8
_FLAG_BITS, _BLOCK_BITS = 4, 13


class Visits(NamedTuple):
    """The pairs of blocks of each row, in the order in which the grid goes over them.

    What a row has less than the longest is filled with its last visit, which then fetches and does nothing.
    """

    packed: Any  # int32 [rows * length]
    rows: int  # 1, or the batch
    length: int  # entries of a row
    steps: Any  # how many of them the longest row has; may be traced
    by_keys: bool  # whether it is the block of keys that stays


def visits_of(span: Any, inner: int, most: int, by_keys: bool) -> Visits:
    """Returns the visits of spans [R, n, 4] over `inner` blocks. Rows have `most` visits at most, if they are traced."""
    xp: Any = np if isinstance(span, np.ndarray) else jnp
    first, last = span[..., FIRST], span[..., LAST]
    # A block with no active partner still gets one step: its output must be written.
    ends = xp.cumsum(xp.maximum(last - first, 1), axis=1)
    total = ends[:, -1:]
    length = int(total.max()) if xp is np else most
    step = np.arange(length, dtype=np.int32)
    at = xp.minimum(step, total - 1)
    if xp is np:
        outer = np.stack([np.searchsorted(e, a, side="right") for e, a in zip(ends, at)])
    else:
        outer = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(ends, at)

    def of(x: Any) -> Any:
        return xp.take_along_axis(x, outer, axis=1)

    begin = of(ends) - xp.maximum(of(last) - of(first), 1)
    other = of(first) + at - begin
    there = step < total
    active = there & (other < of(last))
    full = active & (other >= of(span[..., FULL_FIRST])) & (other < of(span[..., FULL_LAST]))
    flags = ACTIVE * active + FULL * full + BEGINS * (there & (at == begin)) + ENDS * (there & (at == of(ends) - 1))
    blocks = (outer << _BLOCK_BITS) + xp.minimum(other, inner - 1)
    packed = ((blocks << _FLAG_BITS) + flags).astype(np.int32)
    return Visits(packed.reshape(-1), span.shape[0], length, length if xp is np else total.max(), by_keys)


def united(span: Any) -> Any:
    """Returns the span [1, n, 4] of all rows together: from the first block of any to the last, full where all are."""
    xp: Any = np if isinstance(span, np.ndarray) else jnp
    some = span[..., FIRST] < span[..., LAST]
    first = xp.where(some, span[..., FIRST], 2**30).min(0)
    last = span[..., LAST].max(0)
    full_first, full_last = span[..., FULL_FIRST].max(0), span[..., FULL_LAST].min(0)
    return xp.stack([xp.minimum(first, last), full_first, full_last, last], axis=-1)[None]


class Step(NamedTuple):
    """Where in a call a step of the grid is."""

    b: Any
    n: Any
    i: Any
    j: Any
    flags: Any

    def has(self, flag: int) -> Any:
        return (self.flags & flag) > 0


def decoded(visits: Visits, packed: Any, b: Any, n: Any, step: Any) -> Step:
    """Returns where a head of a row is at a step of its list."""
    word = packed[(b * visits.length if visits.rows > 1 else 0) + step]
    outer = word >> (_BLOCK_BITS + _FLAG_BITS)
    inner = (word >> _FLAG_BITS) & ((1 << _BLOCK_BITS) - 1)
    i, j = (inner, outer) if visits.by_keys else (outer, inner)
    return Step(b, n, i, j, word & ((1 << _FLAG_BITS) - 1))
