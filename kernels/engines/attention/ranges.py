"""`KeyRange`: the keys that a query sees under any conjunction of mask rules, and the one table that defines each rule.

A rule is a function from positions of queries to an `Interval` of positions of the keys they see. Nothing else knows
what a rule means: backends compare keys with a `KeyRange`, and the tiles that a kernel visits, the pairs that FLOPs
count, the steps of a ring and the planner are all derived from its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework import segments

__all__ = ["EXAMPLES", "RULES", "Edge", "Interval", "KeyRange", "Rule", "ends_at", "interval_of", "visible"]


# Beyond every position.
_BEYOND = 2**30


class Edge(NamedTuple):
    """An end that is known at trace time: an offset from the query's own position, or (moves=False) an absolute
    position."""

    offset: int
    moves: bool = True


class Interval(NamedTuple):
    """Positions of the keys that a query sees: low to high inclusive, except gap_low to gap_high inclusive.

    Each end is an `Edge`, which kernels compile in; an integer array with one position per query; or None if unbounded.
    Either both ends of the gap are set, or neither.
    """

    low: Any = None
    high: Any = None
    gap_low: Any = None
    gap_high: Any = None


class KeyRange(NamedTuple):
    """What a mask means: the interval of its rules, and the conditions that do not depend on positions. The arrays may
    be slices for a block of queries or keys.

    Attributes:
      q_positions, k_positions: int32 [#B, T] and [#B, S]; NumPy arrays if the mask has none.
      low, high, gap_low, gap_high: as in `Interval`; arrays are [#B, T].
      q_segments, k_segments: int32 [#B, T] and [#B, S], or None: a pair attends only if they are equal and not negative.
      dense: bool [#B, #N, #T, #S] or None.
    """

    q_positions: Any
    k_positions: Any
    low: Any = None
    high: Any = None
    gap_low: Any = None
    gap_high: Any = None
    q_segments: Any = None
    k_segments: Any = None
    dense: Any = None

    def of_queries(self) -> dict[str, Any]:
        """Returns the arrays with one entry per query, by field."""
        names = ("q_positions", *Interval._fields, "q_segments")
        return {n: x for n in names if (x := getattr(self, n)) is not None and not isinstance(x, Edge)}

    def of_keys(self) -> dict[str, Any]:
        """Returns the arrays with one entry per key, by field."""
        return {n: x for n in ("k_positions", "k_segments") if (x := getattr(self, n)) is not None}

    @property
    def is_open(self) -> bool:
        """Whether every query sees every key."""
        return all(x is None for x in self[2:])


class Rule(NamedTuple):
    """A rule of a mask.

    fields: fields of `MaskInfo` that it reads; the rule is inactive unless the first one is set.
    interval: (mask, integer positions of queries of any shape [#B, ...]) -> `Interval`. Its low and high never decrease with
      the position.
    counts: mask -> whether the rule counts tokens from the start of a segment, if there are segments and no positions.
    resolved: (mask, order) -> the mask with arrays in place of such counts, see `MaskInfo.resolved`.
    """

    fields: tuple[str, ...]
    interval: Callable[[Any, Any], Interval]
    counts: Callable[[Any], bool] = lambda mask: False
    resolved: Callable[[Any, Any], Any] = lambda mask, order: mask

    def is_active(self, mask: Any) -> bool:
        """Returns whether the rule is active in a mask."""
        return getattr(mask, self.fields[0]) not in (None, False)


def _of_rows(x: Any, q: Any) -> Any:
    """Reshapes a value per batch row, [#B], to broadcast against the positions of queries."""
    return x.reshape(-1, *(1,) * (q.ndim - 1))


def _causal(mask: Any, q: Any) -> Interval:
    if mask.prefix_lengths is None:
        return Interval(high=Edge(0))
    prefix = _of_rows(mask.prefix_lengths, q)
    return Interval(high=_library(q, prefix).maximum(q, prefix - 1))


def _window(mask: Any, q: Any) -> Interval:
    left, right = mask.window
    high = None if right is None else Edge(right)
    if left is None:
        return Interval(high=high)
    if mask.sink_tokens is None:
        return Interval(Edge(-left), high)
    sinks = Edge(mask.sink_tokens, moves=False) if mask.q_sink_ends is None else mask.q_sink_ends
    return Interval(high=high, gap_low=sinks, gap_high=Edge(-left - 1))


def _sinks_of_segments(mask: Any, order: Any) -> Any:
    """Sets `q_sink_ends`: the sink tokens of a segment end at the position of its first key that is not one."""
    q, k = mask.q_segment_ids, mask.kv_segment_ids
    positions = jnp.arange(k.shape[1], dtype=jnp.int32) if order is None else jnp.asarray(order)
    positions = positions[None] if mask.kv_positions is None else mask.kv_positions
    rows = max(x.shape[0] for x in (q, k, positions))
    q, k, positions = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (q, k, positions))
    by = jnp.lexsort((positions, k), axis=1)
    k, positions = jnp.take_along_axis(k, by, 1), jnp.take_along_axis(positions, by, 1)
    index = jax.vmap(segments.searchsorted)(k, q) + mask.sink_tokens
    same_segment = jnp.take_along_axis(k, jnp.minimum(index, k.shape[1] - 1), 1) == q
    ends = jnp.take_along_axis(positions, jnp.minimum(index, k.shape[1] - 1), 1)
    return mask.replace(q_sink_ends=jnp.where(same_segment & (index < k.shape[1]), ends, _BEYOND))


def _counts_sinks(mask: Any) -> bool:
    return mask.window is not None and mask.sink_tokens is not None and mask.q_sink_ends is None


def _chunk(mask: Any, q: Any) -> Interval:
    start = q // mask.chunk_size * mask.chunk_size
    return Interval(start, start + (mask.chunk_size - 1))


def _chunks_of_segments(mask: Any, order: Any) -> Any:
    """Turns chunks into segments."""
    q, k = mask.q_segment_ids, mask.kv_segment_ids
    # Aligned bottom-right within a segment: its last query is at its last key. A query before the first key has no
    # chunk.
    q_at = segments.rank(q, order) + segments.occurrences(q, k) - segments.occurrences(q, q)
    q, k = segments.joint(q, k, q_at // mask.chunk_size, segments.rank(k, order) // mask.chunk_size)
    return mask.replace(q_segment_ids=q, kv_segment_ids=k, chunk_size=None)


RULES: tuple[Rule, ...] = (
    Rule(("causal", "prefix_lengths"), _causal),
    Rule(("window", "sink_tokens", "q_sink_ends"), _window, _counts_sinks, _sinks_of_segments),
    Rule(("chunk_size",), _chunk, lambda mask: mask.chunk_size is not None, _chunks_of_segments),
)
# Example rules without arrays, by case name: every operation that takes a mask is tested with them.
EXAMPLES: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": (7, 0)},
    "sink_window": {"causal": True, "window": (7, 0), "sink_tokens": 3},
    "chunk": {"causal": True, "chunk_size": 8},
}


def _library(*arrays: Any) -> Any:
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def ends_at(end: Any, q: Any) -> Any:
    """Returns a bounded end as positions: one per query, given their positions q, or one for all of them."""
    if not isinstance(end, Edge):
        return end
    return q + end.offset if end.moves else end.offset


def _joined(a: Any, b: Any, q: Any, name: str) -> Any:
    """Returns the tighter of two ends: the greater of two low ends, the smaller of two high ends."""
    if a is None or b is None:
        return b if a is None else a
    greater = name == "low"
    if isinstance(a, Edge) and isinstance(b, Edge) and a.moves == b.moves:
        return Edge(max(a.offset, b.offset) if greater else min(a.offset, b.offset), a.moves)
    a, b = ends_at(a, q), ends_at(b, q)
    xp = _library(a, b, q)
    return xp.maximum(a, b) if greater else xp.minimum(a, b)


def _static(end: Any, q: Any) -> Any:
    """Returns the end as an `Edge` if its array has a constant offset or is constant; else unchanged."""
    if not isinstance(end, np.ndarray) or not isinstance(q, np.ndarray):
        return end
    offset, fixed = (end - q).ravel(), end.ravel()
    if (offset == offset[0]).all():
        return Edge(int(offset[0]))
    return Edge(int(fixed[0]), moves=False) if (fixed == fixed[0]).all() else end


def interval_of(mask: Any, q: Any) -> Interval:
    """Returns the intersection of the intervals of all rules of a resolved `MaskInfo`, for queries at positions q.

    Args:
      q: integers [#B, ...]; a NumPy array if the mask has no positions, so that ends can be constants of the program.
    """
    whole = Interval()
    for rule in RULES:
        if not rule.is_active(mask):
            continue
        one = rule.interval(mask, q)
        if one.gap_low is not None:
            assert whole.gap_low is None, "two rules leave a gap, but a range can have only one"
            whole = whole._replace(gap_low=one.gap_low, gap_high=one.gap_high)
        whole = whole._replace(low=_joined(whole.low, one.low, q, "low"), high=_joined(whole.high, one.high, q, "high"))
    return Interval(*[_static(end, q) if isinstance(end, np.ndarray) else end for end in whole])


def visible(keys: KeyRange) -> jax.Array:
    """Returns bool [#B, T, S]: which pairs of queries and keys attend. Ignores `dense`, which has a dim of heads."""
    # Not NumPy's comparisons: even while a program is traced, they would allocate an array of all pairs.
    q, j = keys.q_positions, jnp.asarray(keys.k_positions)[:, None, :]

    def positions(end: Any) -> Any:
        end = ends_at(end, q)
        return end if isinstance(end, int) else end[:, :, None]

    seen = jnp.ones((1, q.shape[1], j.shape[2]), bool)
    if keys.high is not None:
        seen &= j <= positions(keys.high)
    if keys.low is not None:
        seen &= j >= positions(keys.low)
    if keys.gap_low is not None:
        seen &= (j < positions(keys.gap_low)) | (j > positions(keys.gap_high))
    if keys.q_segments is not None:
        a, b = jnp.asarray(keys.q_segments)[:, :, None], keys.k_segments[:, None, :]
        seen &= (a == b) & (a >= 0)
    return seen
