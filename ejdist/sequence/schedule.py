"""Which (rank, hop) pairs of a ring have work, from the description of the mask. NumPy, before anything is traced.

At hop h rank r holds the keys of rank r - h. A hop that no rank needs is not made: the ring jumps over it. Segments are
known only at run time; they skip blocks inside the local operation.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ejdist.order import Order
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import keys_of_causal
from kernels.engines.attention.tiles import active_tiles


def needed(order: Order, length: int, mask: MaskInfo) -> np.ndarray:
    """Returns bool [shards, shards]: whether any query of rank r (row) may see any key of rank s (column).

    The rules of `mask` count; its arrays are not read.
    """
    n = order.shards
    at: Any = order.indices(length)[None]
    # A rank's tokens are one run, or two in a zigzag; bounds are exact within a run.
    run = length // order.multiple
    rules = mask.replace(**dict.fromkeys(mask.data_fields), q_positions=at, kv_positions=at)
    blocks = active_tiles(rules.key_range(length, length), run, run)
    per = order.multiple // n
    return blocks.reshape(n, per, n, per).any((1, 3))


def hops(order: Order, length: int, mask: MaskInfo, *, known: bool = True) -> tuple[int, ...]:
    """Returns the hops at which some rank has work, ascending; hop 0 is the rank's own keys.

    With `known` False (the caller brings positions of its own, or a prefix), every hop is made.
    """
    n = order.shards
    if not known:
        return tuple(range(n))
    pairs = needed(order, length, mask)
    ranks = np.arange(n)
    found = [h for h in range(n) if pairs[ranks, (ranks - h) % n].any()]
    return tuple(found) or (0,)


@functools.lru_cache(maxsize=1024)
def imbalance(order: Order, length: int, mask: MaskInfo) -> float:
    """Returns the pairs of the rank that has the most over those of an even split: a ring waits for that rank.

    Args:
      mask: causal, without arrays, of one document a row.
    """
    pairs = keys_of_causal(mask, length)[order.indices(length)].reshape(order.shards, -1).sum(1)
    return float(pairs.max() / pairs.mean())
