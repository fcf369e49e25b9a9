"""Which tiles of keys a tile of queries visits, per batch row, from the bounds of a `KeyRange` over the tile: a
kernel's schedule.

In full tiles every pair attends, so a kernel need not evaluate the mask; in the others it compares entry by entry.
Bounds may therefore be loose, but only in one direction: a tile is skipped only if no pair attends, and full only if
every pair does. A kernel that keeps a tile of keys visits tiles of queries in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo, key_range
from kernels.engines.attention.ranges import Edge, KeyRange, ends_at

__all__ = [
    "FIRST",
    "FULL_FIRST",
    "FULL_LAST",
    "LAST",
    "active_tiles",
    "listed",
    "meetings",
    "spans",
]

# The entries of a span: a range of tiles, with the full ones in the middle.
FIRST, FULL_FIRST, FULL_LAST, LAST = range(4)
_FAR = 2**30


class _Queries(NamedTuple):
    """Bounds of each tile of queries [#B, n], over tokens that are not padding."""

    some: Any  # whether any query is valid (not padding)
    whole: Any  # whether all queries are valid
    ends: dict[str, tuple[Any, Any]]  # (min, max) of each bounded end
    segments: tuple[Any, Any] | None


class _Keys(NamedTuple):
    """Bounds of each tile of keys [#B, n], over tokens that are not padding."""

    some: Any
    whole: Any
    position: tuple[Any, Any]
    segments: tuple[Any, Any] | None


def _extremes(x: Any, valid: Any, tile: int, xp: Any) -> tuple[Any, Any]:
    """Returns (min, max) of the valid entries of x [#B, length] in each tile; if none is valid, values that match
    nothing.

    Args:
      valid: bool [#B, n, tile], see `_valid`.
    """
    x = xp.pad(x, ((0, 0), (0, valid.shape[1] * tile - x.shape[1]))).reshape(x.shape[0], *valid.shape[1:])
    return xp.where(valid, x, _FAR).min(-1), xp.where(valid, x, -_FAR).max(-1)


def _library(keys: KeyRange) -> Any:
    arrays = (*keys.of_queries().values(), *keys.of_keys().values())
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _valid(segments: Any, length: int, tile: int, xp: Any) -> tuple[Any, Any, Any]:
    """Returns which tokens are valid (not padding, nor past the last) [#B, n, tile], whether any in a tile is, and
    whether all are that are not past the last."""
    valid = xp.ones((1, length), bool) if segments is None else segments >= 0
    pad = ((0, 0), (0, -length % tile))
    tiles = (valid.shape[0], -(-length // tile), tile)
    whole = xp.pad(valid, pad, constant_values=True).reshape(tiles).all(-1)
    valid = xp.pad(valid, pad).reshape(tiles)
    return valid, valid.any(-1), whole


def _of_queries(keys: KeyRange, tile: int, xp: Any) -> _Queries:
    q, ids = keys.q_positions, keys.q_segments
    valid, some, whole = _valid(ids, q.shape[1], tile, xp)
    position = _extremes(q, valid, tile, xp)
    ends = {}
    for name in ("low", "high", "gap_low", "gap_high"):
        end = getattr(keys, name)
        if isinstance(end, Edge):  # monotonic in the position
            ends[name] = ends_at(end, position[0]), ends_at(end, position[1])
        elif end is not None:
            ends[name] = _extremes(end, valid, tile, xp)
    return _Queries(some, whole, ends, None if ids is None else _extremes(ids, valid, tile, xp))


def _of_keys(keys: KeyRange, tile: int, xp: Any) -> _Keys:
    k, ids = keys.k_positions, keys.k_segments
    valid, some, whole = _valid(ids, k.shape[1], tile, xp)
    return _Keys(some, whole, _extremes(k, valid, tile, xp), None if ids is None else _extremes(ids, valid, tile, xp))


def _met(keys: KeyRange, q_tile: int, kv_tile: int, xp: Any) -> tuple[Any, Any]:
    """Returns two bool [#B, query tiles, key tiles]: whether any pair may attend, and whether all do; ignores
    `dense`."""
    q, k = _of_queries(keys, q_tile, xp), _of_keys(keys, kv_tile, xp)
    first, last = [x[:, None] for x in k.position]

    def end(name: str) -> tuple[Any, Any]:
        least, greatest = [x if isinstance(x, int) else x[:, :, None] for x in q.ends[name]]
        return least, greatest

    some = q.some[:, :, None] & k.some[:, None]
    every = some & q.whole[:, :, None] & k.whole[:, None]
    if "low" in q.ends:
        least, greatest = end("low")
        some, every = some & (last >= least), every & (first >= greatest)
    if "high" in q.ends:
        least, greatest = end("high")
        some, every = some & (first <= greatest), every & (last <= least)
    if "gap_low" in q.ends:
        (low, low_most), (high_least, high) = end("gap_low"), end("gap_high")
        some &= (first < low_most) | (last > high_least)
        every &= (last < low) | (first > high) | (high < low)  # the tile is outside the gap, or the gap is empty
    if q.segments is not None and k.segments is not None:
        (a, b), (c, d) = [x[:, :, None] for x in q.segments], [x[:, None] for x in k.segments]
        some, every = some & (a <= d) & (c <= b), every & (a == d) & (c == b)
    return some, every


def active_tiles(keys: KeyRange, q_tile: int, kv_tile: int) -> Any:
    """Returns bool [query tiles, key tiles]: False only where, in every row, no query of the tile sees any key of the
    tile.

    A NumPy array if the range has only NumPy arrays, so that the pattern is a constant of the program; otherwise
    traced, from the bounds of each tile: O(S) work, no S x S array.
    """
    some, _ = _met(keys, q_tile, kv_tile, _library(keys))
    active = some.any(0)
    if keys.dense is not None:
        lengths = keys.q_positions.shape[1], keys.k_positions.shape[1]
        dense = keys.dense.any((0, 1))
        dense = jnp.broadcast_to(dense, [max(n, m) for n, m in zip(dense.shape, lengths, strict=True)])
        pad = [(0, n * b - m) for n, b, m in zip(active.shape, (q_tile, kv_tile), dense.shape, strict=True)]
        dense = jnp.pad(dense, pad).reshape(active.shape[0], q_tile, active.shape[1], kv_tile)
        active = active & dense.any((1, 3))
    return active


def meetings(keys: KeyRange, q_tile: int, kv_tile: int) -> tuple[Any, Any]:
    """Returns two bool arrays [#B, query tiles, key tiles]: whether any pair of the two tiles may attend, and whether
    all do. A tile that extends past the last key is never full. With a dense mask, which is not examined, none is.
    NumPy arrays if the range has only NumPy arrays, so that what is derived from them is a constant of the program."""
    xp, kv_length = _library(keys), keys.k_positions.shape[1]
    some, every = _met(keys, q_tile, kv_tile, xp)
    if kv_length % kv_tile:
        every = every & (np.arange(every.shape[2]) < every.shape[2] - 1)
    return some, every if keys.dense is None else xp.zeros_like(every)


def spans(mask: MaskInfo | None, q_length: int, kv_length: int, q_tile: int, kv_tile: int) -> tuple[Any, Any]:
    """Returns int32 ([#B, query tiles, 4], [#B, key tiles, 4]): for each tile of queries the range of key tiles, and
    for each tile of keys the range of query tiles, as (FIRST, FULL_FIRST, FULL_LAST, LAST).

    FIRST <= FULL_FIRST <= FULL_LAST <= LAST; FIRST = LAST if nothing attends. NumPy arrays if the mask has no arrays,
    so that the ranges are constants of the program.
    """
    keys = key_range(mask, q_length, kv_length)
    (some, every), xp = meetings(keys, q_tile, kv_tile), _library(keys)
    return _span(some, every, xp), _span(some.swapaxes(1, 2), every.swapaxes(1, 2), xp)


def _span(some: Any, every: Any, xp: Any) -> Any:
    """Returns int32 [#B, n, 4] for bool [#B, n, m]: the hull of `some`, and the first run of `every`."""
    n = some.shape[-1]
    index = np.arange(n, dtype=np.int32)
    first = xp.where(some, index, n).min(-1)
    last = xp.where(some, index + 1, 0).max(-1)
    first = xp.minimum(first, last)
    full = xp.where(every, index, n).min(-1)
    end = xp.where(~every & (index > full[..., None]), index, n).min(-1)
    none = full == n
    full, end = xp.where(none, first, full), xp.where(none, first, end)
    return xp.stack([first, full, end, last], axis=-1).astype(np.int32)


def listed(some: Any) -> tuple[Any, Any]:
    """Returns (int32 [..., tiles, n], int32 [..., tiles]) for bool [..., tiles, n]: the indices of set entries in
    ascending order, followed by the others; and the number of set entries."""
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    return xp.argsort(~some, axis=-1, stable=True).astype(np.int32), some.sum(-1, dtype=np.int32)
