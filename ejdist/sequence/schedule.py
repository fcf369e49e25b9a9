"""Which (rank, hop) pairs of a ring have work, from the description of the mask. NumPy, before anything is traced.

At hop h rank r holds the keys of rank r - h. A hop that no rank needs is left out: the ring jumps over it. Segments are
known only at run time; they skip blocks inside the local operation.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ejdist.order import Order
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import keys_at
from kernels.engines.attention.tiles import active_tiles


def _runs(order: Order, length: int) -> tuple[np.ndarray, int]:
    """Returns (the first token of each run of a rank's tokens, in the order of the ranks; the step from one to the next). A
    rank's tokens are one run, or two in a zigzag."""
    parts = order.indices(order.multiple).astype(np.int64)
    if order.in_parts:
        return parts * (length // order.multiple), 1
    return parts, order.shards


def run_length(order: Order, length: int) -> int:
    """Returns how many tokens that follow one another a rank has in one place; all of its tokens where no two do."""
    return length // (order.multiple if order.in_parts else order.shards)


def needed(order: Order, length: int, mask: MaskInfo) -> np.ndarray:
    """Returns bool [shards, shards]: whether any query of rank r (row) may see any key of rank s (column).

    The rules of `mask` count; its arrays are not read. What a query sees moves with its position, so its ends bound it.
    """
    n = order.shards
    order.check(length)
    first, step = _runs(order, length)
    positions: Any = np.stack([first, first + step * (length // order.multiple - 1)], axis=1).reshape(1, -1)
    rules = mask.replace(**dict.fromkeys(mask.data_fields), q_positions=positions, kv_positions=positions)
    blocks = active_tiles(rules.key_range(positions.size, positions.size), 2, 2)
    per = order.multiple // n
    return blocks.reshape(n, per, n, per).any((1, 3))


def hops(order: Order, length: int, mask: MaskInfo, *, known: bool = True) -> tuple[int, ...]:
    """Returns the hops at which some rank has work, ascending; hop 0 is the rank's own keys.

    With `known` False (the caller brings positions of its own, or a prefix), every hop is needed.
    """
    n = order.shards
    if not known:
        return tuple(range(n))
    pairs = needed(order, length, mask)
    ranks = np.arange(n)
    needed_hops = [h for h in range(n) if pairs[ranks, (ranks - h) % n].any()]
    return tuple(needed_hops) or (0,)


# Queries of a run that are counted at most: of longer ones these are taken at even distances.
_COUNTED = 2**16


@functools.lru_cache(maxsize=1024)
def imbalance(order: Order, length: int, mask: MaskInfo) -> float:
    """Returns the pairs of the rank that has the most over those of an even split: a ring waits for that rank.

    Args:
      mask: causal, without arrays, of one document a row.
    """
    order.check(length)
    first, step = _runs(order, length)
    run = length // order.multiple
    counted = min(run, _COUNTED)
    inside = ((2 * np.arange(counted, dtype=np.int64) + 1) * run) // (2 * counted)  # all, or the middles of even parts
    pairs = keys_at(mask, (first[:, None] + step * inside).reshape(-1)).reshape(order.shards, -1).sum(1)
    return float(pairs.max() / pairs.mean())
