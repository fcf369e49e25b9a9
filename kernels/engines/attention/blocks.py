"""Which blocks of keys a block of queries meets, row by row of the batch, in O(S) data: what a kernel's grid goes over.

A kernel that has a block of queries goes over the blocks of keys from `first` to `last`; from `full_first` to `full_last`
every pair attends, and no mask needs to be looked at. The rest is compared entry by entry, so that the bounds may be wide,
never narrow: what is skipped is only what nobody sees, and what is taken as full is only what everybody sees. A kernel that
has a block of keys goes over the blocks of queries likewise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo

__all__ = ["FIRST", "FULL_FIRST", "FULL_LAST", "LAST", "spans"]

# The entries of a span.
FIRST, FULL_FIRST, FULL_LAST, LAST = range(4)
_FAR = 2**30


class _Bounds(NamedTuple):
    """Of each block [B|1, n]: the least and greatest position and segment of its tokens that are no padding, and whether no
    token of it is padding. A block of nothing but padding has bounds that meet nothing."""

    low: Any
    high: Any
    segment_low: Any
    segment_high: Any
    whole: Any


def _bounds(positions: Any, segments: Any, block: int, xp: Any) -> _Bounds:
    valid = xp.ones_like(positions, bool) if segments is None else segments >= 0
    positions, valid = xp.broadcast_arrays(positions, valid)
    segments = xp.zeros_like(positions) if segments is None else xp.broadcast_to(segments, positions.shape)
    batch, length = positions.shape
    blocks = -(-length // block)
    pad = ((0, 0), (0, blocks * block - length))

    def reduce(values: Any, fill: int, smallest: bool) -> Any:
        values = xp.pad(xp.where(valid, values, fill), pad, constant_values=fill).reshape(batch, blocks, block)
        return values.min(-1) if smallest else values.max(-1)

    return _Bounds(
        reduce(positions, _FAR, True),
        reduce(positions, -_FAR, False),
        reduce(segments, _FAR, True),
        reduce(segments, -_FAR, False),
        xp.pad(valid, pad, constant_values=True).reshape(batch, blocks, block).all(-1),
    )


def _met(mask: MaskInfo, q: _Bounds, k: _Bounds) -> tuple[Any, Any]:
    """Returns (some pair attends, every pair attends) of blocks whose bounds broadcast. Where the first is True none may."""
    some = (q.low <= q.high) & (k.low <= k.high)
    every = some & q.whole & k.whole
    if mask.causal:
        below, all_below = k.low <= q.high, k.high <= q.low
        if mask.prefix_lengths is not None:
            prefix = mask.prefix_lengths[:, None, None]
            below, all_below = below | (k.low < prefix), all_below | (k.high < prefix)
        some, every = some & below, every & all_below
    if mask.window is not None:
        left, right = mask.window
        if left is not None:
            some, every = some & (k.high >= q.low - left), every & (k.low >= q.high - left)
        if right is not None:
            some, every = some & (k.low <= q.high + right), every & (k.high <= q.low + right)
    if mask.chunk_size is not None:
        size = mask.chunk_size
        some &= (k.high // size >= q.low // size) & (k.low // size <= q.high // size)
        every &= (k.high // size == q.low // size) & (k.low // size == q.high // size)
    if mask.q_segment_ids is not None:
        some &= (q.segment_low <= k.segment_high) & (k.segment_low <= q.segment_high)
        every &= (q.segment_low == k.segment_high) & (k.segment_low == q.segment_high)
    return some, every


def spans(mask: MaskInfo | None, q_length: int, kv_length: int, q_block: int, kv_block: int) -> tuple[Any, Any]:
    """Returns int32 ([B|1, query blocks, 4], [B|1, key blocks, 4]): of each block of queries the span of key blocks, and of
    each block of keys that of query blocks, as (FIRST, FULL_FIRST, FULL_LAST, LAST).

    FIRST <= FULL_FIRST <= FULL_LAST <= LAST; FIRST = LAST where nothing attends. A block of keys that ends past the last key
    is never full. NumPy where the mask has no arrays, so that the spans are constants of the program. A dense
    `attention_mask` is not looked at, but where there is one nothing is full.
    """
    mask = MaskInfo() if mask is None else mask.resolved()
    arrays = (mask.q_positions, mask.kv_positions, mask.q_segment_ids, mask.kv_segment_ids, mask.prefix_lengths)
    xp: Any = np if all(x is None or isinstance(x, np.ndarray) for x in arrays) else jnp
    q_positions, k_positions = (xp.asarray(p) for p in mask.positions(q_length, kv_length))
    q = _bounds(q_positions, mask.q_segment_ids, q_block, xp)
    k = _bounds(k_positions, mask.kv_segment_ids, kv_block, xp)
    if kv_length % kv_block:
        last = np.arange(k.whole.shape[1]) < k.whole.shape[1] - 1
        k = k._replace(whole=k.whole & last)
    some, every = _met(mask, _Bounds(*(x[:, :, None] for x in q)), _Bounds(*(x[:, None] for x in k)))
    if mask.attention_mask is not None:
        every = xp.zeros_like(every)
    return _span(some, every, xp), _span(some.swapaxes(1, 2), every.swapaxes(1, 2), xp)


def _span(some: Any, every: Any, xp: Any) -> Any:
    """Returns int32 [B|1, n, 4] of bool [B|1, n, m]: the hull of `some`, and the first run of `every`."""
    n = some.shape[-1]
    at = np.arange(n, dtype=np.int32)
    first = xp.where(some, at, n).min(-1)
    last = xp.where(some, at + 1, 0).max(-1)
    first = xp.minimum(first, last)
    full = xp.where(every, at, n).min(-1)
    end = xp.where(~every & (at > full[..., None]), at, n).min(-1)
    none = full == n
    full, end = xp.where(none, first, full), xp.where(none, first, end)
    return xp.stack([first, full, end, last], axis=-1).astype(np.int32)
