"""How many (query, key) pairs a mask lets through: what attention has to compute."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kernels.engines.attention.masks import MaskInfo


def visible_pairs(mask: MaskInfo | None, batch: int, num_heads: int, q_length: int, kv_length: int) -> int:
    """Returns the visible (query, key) pairs of all rows and heads. O(S log S) without a dense mask.

    Whatever a query sees by position is one interval of positions, within one segment: keys are sorted by segment and
    position, and an interval's ends are looked up. A dense mask is counted row by row. Fields that are tracers or mere
    shapes cannot be read: they count as absent, so the number is then an upper bound.
    """
    with jax.ensure_compile_time_eval():  # concrete fields stay readable under a trace
        mask = _readable(MaskInfo() if mask is None else mask).resolved()
        q, k = (np.asarray(p, np.int64) for p in mask.positions(q_length, kv_length))
        if mask.q_segment_ids is None:
            q_ids, k_ids = np.zeros_like(q), np.zeros_like(k)
        else:
            q_ids, k_ids = np.asarray(mask.q_segment_ids, np.int64), np.asarray(mask.kv_segment_ids, np.int64)
        prefix = None if mask.prefix_lengths is None else np.asarray(mask.prefix_lengths, np.int64)
        dense = None if mask.attention_mask is None else np.asarray(mask.attention_mask)
    rows = max(x.shape[0] for x in (q, k, q_ids, k_ids, prefix, dense) if x is not None)
    heads = 1 if dense is None else dense.shape[1]
    of = {"q": q, "k": k, "q_ids": q_ids, "k_ids": k_ids, "prefix": prefix, "dense": dense}
    total = 0
    for row in range(rows):
        one: dict[str, Any] = {name: None if x is None else x[row % x.shape[0]] for name, x in of.items()}
        low, high = _interval(mask, one["q"], one["prefix"])
        total += _count(one, low, high) if dense is None else _count_dense(one, low, high)
    return total * (batch // rows) * (num_heads // heads)


def _readable(mask: MaskInfo) -> MaskInfo:
    """Returns the mask without the fields whose values are not known."""
    unknown = {
        name for name in mask.data_fields if isinstance(getattr(mask, name), (jax.core.Tracer, jax.ShapeDtypeStruct))
    }
    for pair in ({"q_segment_ids", "kv_segment_ids"}, {"q_positions", "kv_positions"}):
        unknown |= pair if unknown & pair else set()
    if not unknown:
        return mask
    # Positions may be in any order, and a prefix may be as long as the row, so rules about them rule out nothing.
    loose: dict[str, Any] = {}
    if unknown & {"q_positions", "prefix_lengths"}:
        loose["causal"] = False
    if "q_positions" in unknown:
        loose |= {"window": None, "chunk_size": None, "prefix_lengths": None}
    if "q_segment_ids" in unknown and mask.chunks_in_segments:
        loose["chunk_size"] = None  # counted from the starts of segments
    return mask.replace(**dict.fromkeys(unknown), **loose)


def _interval(mask: MaskInfo, at: np.ndarray, prefix: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the greatest key position that a query at each position sees, both included."""
    far = np.int64(2**31)
    low, high = np.full_like(at, -far), np.full_like(at, far)
    if mask.causal:
        high = np.minimum(high, at if prefix is None else np.maximum(at, prefix - 1))
    left, right = mask.window or (None, None)
    if left is not None:
        low = np.maximum(low, at - left)
    if right is not None:
        high = np.minimum(high, at + right)
    if mask.chunk_size is not None:
        start = at // mask.chunk_size * mask.chunk_size
        low, high = np.maximum(low, start), np.minimum(high, start + mask.chunk_size - 1)
    return low, high


def _count(one: dict[str, Any], low: np.ndarray, high: np.ndarray) -> int:
    span = np.int64(2**33)  # wider than any two positions are apart, so that segments do not meet

    def place(ids: np.ndarray, at: np.ndarray) -> np.ndarray:
        return ids * span + at + span // 2

    keys = np.sort(place(one["k_ids"], one["k"])[one["k_ids"] >= 0])
    real = one["q_ids"] >= 0
    ids, low, high = one["q_ids"][real], low[real], high[real]
    first = np.searchsorted(keys, place(ids, low), side="left")
    last = np.searchsorted(keys, place(ids, high), side="right")
    return int(np.maximum(last - first, 0).sum())


def _count_dense(one: dict[str, Any], low: np.ndarray, high: np.ndarray) -> int:
    total = 0
    for i in range(len(low)):
        seen = (one["k"] >= low[i]) & (one["k"] <= high[i]) & (one["k_ids"] == one["q_ids"][i]) & (one["q_ids"][i] >= 0)
        allowed = one["dense"][:, i if one["dense"].shape[1] > 1 else 0]
        total += int((allowed & seen).sum())
    return total
