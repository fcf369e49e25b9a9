"""Counts the (query, key) pairs that a mask lets through: the work of attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from kernels.engines.attention.masks import MaskInfo, map_data
from kernels.engines.attention.ranges import Interval, ends_at, interval_of

# Beyond every position, and beyond every distance between two of them.
_FAR = np.int64(2**31)


def visible_pairs(mask: MaskInfo | None, batch: int, num_heads: int, q_length: int, kv_length: int) -> int:
    """Returns the number of visible (query, key) pairs over all rows and heads. O(S log S) without a dense mask.

    What a query sees is an interval of positions, minus a gap, within one segment. Keys are sorted by segment and
    position, and the ends of the interval are looked up. A dense mask is counted row by row. Fields that are tracers or
    mere shapes cannot be read and are ignored, so the result is then an upper bound.
    """
    with jax.ensure_compile_time_eval():  # concrete fields stay readable under a trace
        mask = _readable(MaskInfo() if mask is None else mask).resolved()
        q, k = (np.asarray(p, np.int64) for p in mask.positions(q_length, kv_length))
        if mask.q_segment_ids is None:
            q_ids, k_ids = np.zeros_like(q), np.zeros_like(k)
        else:
            q_ids, k_ids = np.asarray(mask.q_segment_ids, np.int64), np.asarray(mask.kv_segment_ids, np.int64)
        interval = _positions(interval_of(map_data(mask, lambda _, x: np.asarray(x)), q), q)
        dense = None if mask.attention_mask is None else np.asarray(mask.attention_mask)
    of = {"q": q, "k": k, "q_ids": q_ids, "k_ids": k_ids, "dense": dense, **interval._asdict()}
    rows = max(x.shape[0] for x in of.values() if x is not None)
    heads = 1 if dense is None else dense.shape[1]
    total = 0
    for row in range(rows):
        one: dict[str, Any] = {name: None if x is None else x[row % x.shape[0]] for name, x in of.items()}
        total += _count(one) if dense is None else _count_dense(one)
    return total * (batch // rows) * (num_heads // heads)


@functools.lru_cache(maxsize=64)
def keys_of_causal(mask: MaskInfo, length: int) -> np.ndarray:
    """Returns int64 [length] (read-only): the number of keys that each query of one document sees under `causal` and
    the rules of a mask without arrays. An entry does not depend on later tokens."""
    count = keys_at(mask, np.arange(length, dtype=np.int64))
    count.setflags(write=False)
    return count


def keys_at(mask: MaskInfo, positions: np.ndarray) -> np.ndarray:
    """Returns int64: the number of keys that queries at these positions see, as in `keys_of_causal`."""
    q = np.asarray(positions, np.int64)[None]
    low, high, gap_low, gap_high = _positions(interval_of(mask.combine(MaskInfo(causal=True)), q), q)
    low = np.maximum(low, 0)
    hidden = np.minimum(high, gap_high) - np.maximum(low, gap_low) + 1
    return (np.maximum(high - low + 1, 0) - np.maximum(hidden, 0))[0]


# The maximum number of queries to count; in longer sequences, that many are sampled at equal distances.
_COUNTED = 2**22


@functools.lru_cache(maxsize=1024)
def causal_pairs(mask: MaskInfo, length: int) -> float:
    """Returns the number of pairs of one document of that length, counted as in `keys_of_causal`; an estimate past 4M
    tokens."""
    counted = min(length, _COUNTED)
    middles = ((2 * np.arange(counted, dtype=np.int64) + 1) * length) // (2 * counted)
    return float(keys_at(mask, middles).sum()) * length / counted


def _readable(mask: MaskInfo) -> MaskInfo:
    """Returns the mask without the fields whose values are unknown."""
    return mask.loosened(
        {name for name in mask.data_fields if isinstance(getattr(mask, name), (jax.core.Tracer, jax.ShapeDtypeStruct))}
    )


def _positions(interval: Interval, q: np.ndarray) -> Interval:
    """Returns the interval with every end as int64 [#B, T]; a missing gap becomes an empty one."""
    fill = Interval(-_FAR, _FAR, np.int64(0), np.int64(-1))
    ends = (fill if end is None else ends_at(end, q) for end, fill in zip(interval, fill, strict=True))
    return Interval(
        *(np.broadcast_to(np.asarray(end, np.int64), np.broadcast_shapes(np.shape(end), q.shape)) for end in ends)
    )


def _count(one: dict[str, Any]) -> int:
    span = np.int64(2**33)  # larger than any distance between positions, so that segments cannot overlap

    def place(ids: np.ndarray, position: np.ndarray) -> np.ndarray:
        return ids * span + position + span // 2

    keys = np.sort(place(one["k_ids"], one["k"])[one["k_ids"] >= 0])
    real = one["q_ids"] >= 0
    ids, low, high, gap_low, gap_high = (one[name][real] for name in ("q_ids", *Interval._fields))

    def between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        first = np.searchsorted(keys, place(ids, low), side="left")
        last = np.searchsorted(keys, place(ids, high), side="right")
        return np.maximum(last - first, 0)

    return int((between(low, high) - between(np.maximum(low, gap_low), np.minimum(high, gap_high))).sum())


def _count_dense(one: dict[str, Any]) -> int:
    total = 0
    for i, (low, high, gap_low, gap_high) in enumerate(zip(*(one[name] for name in Interval._fields), strict=True)):
        seen = (one["k"] >= low) & (one["k"] <= high) & ((one["k"] < gap_low) | (one["k"] > gap_high))
        seen &= (one["k_ids"] == one["q_ids"][i]) & (one["q_ids"][i] >= 0)
        allowed = one["dense"][:, i if one["dense"].shape[1] > 1 else 0]
        total += int((allowed & seen).sum())
    return total
