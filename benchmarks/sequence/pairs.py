"""How many pairs each rank of a split sequence computes, and at which hop: exact, from the mask and the documents."""

from __future__ import annotations

import jax
import numpy as np

from benchmarks.sequence.calls import NO_IDS, Attention, index_of, segment_ids
from ejdist.documents import ONE
from ejdist.order import NAMES, Order, order_for
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import visible_pairs


def of_ranks(seen: np.ndarray, order: Order) -> np.ndarray:
    """Returns int64 [ranks]: the pairs of each rank, from the keys that each token sees."""
    return order.of_ranks(seen)


def tokens_of(call: Attention, ids: np.ndarray, order: Order) -> np.ndarray:
    """Returns int32 [ranks, tokens]: which tokens of a row of these segment ids each rank has."""
    index = index_of(call, ids, order)
    return (order.indices(len(ids)) if index is None else index[0]).reshape(order.shards, -1)


def of_hop(call: Attention, ids: np.ndarray, order: Order, rank: int, hop: int) -> int:
    """Returns the pairs of a rank's queries with the keys that are there at a hop, of one head."""
    own, kept = tokens_of(call, ids, order)[[rank, (rank - hop) % order.shards]]
    segments = MaskInfo(q_segment_ids=ids[own][None], kv_segment_ids=ids[kept][None])
    at = MaskInfo(q_positions=own[None], kv_positions=kept[None])
    return visible_pairs(call.rules.combine(segments).combine(at), 1, 1, len(own), len(kept))


def order_named(name: str, ranks: int, length: int, stripe: int = 0) -> Order:
    """Returns the order of a row of that length, with stripes of so many tokens; 0: as a recipe has them by default."""
    return order_for(name, ranks, length, stripe or None, jax.default_backend())


def busiest(seen: np.ndarray, order: Order) -> tuple[int, float]:
    """Returns (the rank with the most pairs, its pairs over the mean of all)."""
    pairs = of_ranks(seen, order)
    return int(pairs.argmax()), float(pairs.max() / pairs.mean())


def imbalances(
    call: Attention, documents: str, length: int, ranks: int, seed: int, rows: int, stripe: int = 0
) -> dict[str, list[float]]:
    """Returns order -> the pairs of the busiest rank over the mean, in each of several rows of such documents; of every order
    that divides the length."""
    found: dict[str, list[float]] = {}
    for number in range(1 if documents in (ONE, NO_IDS) else rows):
        seen = call.keys_seen(segment_ids(documents, length, seed + number))
        for name in NAMES:
            order = order_named(name, ranks, length, stripe)
            if length % order.multiple == 0:
                found.setdefault(name, []).append(busiest(seen, order)[1])
    return found
