"""Which (rank, hop) pairs of a ring have work, from the description of the mask. NumPy, before anything is traced.

At hop h rank r holds the keys of rank r - h. A hop that no rank needs is left out: the ring jumps over it. Segments are
known only at run time; they skip blocks inside the local operation.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from ejdist.documents import ONE_DOCUMENT, Documents, busiest
from ejdist.order import Order
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import causal_pairs, keys_at
from kernels.engines.attention.ranges import ends_at, interval_of
from kernels.engines.attention.tiles import active_tiles

# Runs of a rank that are looked at one by one at most. Of more, all of its tokens count as one run.
_RUNS = 256
# A run of tokens is cut into chunks of a tile of kernels, into as many at most; a shorter one into a few.
_TILE, _CHUNKS, _FEW = 128, 128, 8
# Chunks of a rank at most, where each is stripes.
_MOST_CHUNKS = 512


def run_length(order: Order, length: int) -> int:
    """Returns how many tokens of a rank are looked at together: those that follow one another in one place, unless these are
    too many runs."""
    run, tokens = length // order.multiple if order.in_parts else order.stripe, length // order.shards
    return run if tokens <= _RUNS * run else tokens


def chunk_of(order: Order, tokens: int) -> int:
    """Returns how many tokens of a rank's `own` make a chunk, which another rank needs or does not: a part of a run of the
    text, or stripes."""
    if order.in_parts:
        run = tokens * order.shards // order.multiple
        tiles = run // _TILE if run % _TILE == 0 and run > _TILE else run  # chunks are of whole tiles
        most = min(run // _TILE, _CHUNKS) if run >= 2 * _TILE else _FEW
        return run // max(parts for parts in range(1, most + 1) if tiles % parts == 0)
    stripes = tokens // order.stripe
    return order.stripe * next(k for k in range(1, stripes + 1) if stripes % k == 0 and stripes <= k * _MOST_CHUNKS)


def needed(order: Order, length: int, mask: MaskInfo) -> np.ndarray:
    """Returns bool [shards, shards]: whether any query of rank r (row) may see any key of rank s (column).

    The rules of `mask` count; its arrays are not read. What a query sees moves with its position, so its ends bound it.
    """
    order.check(length)
    if order.carried:  # the batch says which rank has what
        return np.ones((order.shards, order.shards), bool)
    rules = mask.replace(**dict.fromkeys(mask.data_fields))
    return _of_parts(order, length, rules) if order.in_parts else _of_stripes(order, length, rules)


def _of_parts(order: Order, length: int, rules: MaskInfo) -> np.ndarray:
    """Returns `needed` where a rank has one run of tokens, or two."""
    n, runs = order.shards, order.multiple
    first = order.indices(runs).astype(np.int64) * (length // runs)
    positions: Any = np.stack([first, first + length // runs - 1], axis=1).reshape(1, -1)
    rules = rules.replace(q_positions=positions, kv_positions=positions)
    blocks = active_tiles(rules.key_range(positions.size, positions.size), 2, 2)
    return blocks.reshape(n, runs // n, n, runs // n).any((1, 3))


def _of_stripes(order: Order, length: int, rules: MaskInfo) -> np.ndarray:
    """Returns `needed` where every rank has stripes, dealt out in turn: what a stripe sees is one run of stripes, or two."""
    n, stripe = order.shards, order.stripe
    number = np.arange(length // stripe, dtype=np.int64)
    back = np.zeros((n, 2 * n + 1), np.int64)  # [rank, hops back to the rank that has the keys], as differences
    for first, last in _seen_by_runs(rules, length, stripe):
        some = last >= first
        start, hops_seen = (number - last) % n, np.minimum(last - first + 1, n)
        np.add.at(back, (number[some] % n, start[some]), 1)
        np.add.at(back, (number[some] % n, (start + hops_seen)[some]), -1)
    at_hop = np.cumsum(back, axis=1)[:, : 2 * n].reshape(n, 2, n).any(1)
    rank = np.arange(n)
    return at_hop[rank[:, None], (rank[:, None] - rank) % n]


def _seen_by_runs(rules: MaskInfo, length: int, run: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns two (first, last) int64 [runs]: which runs of so many tokens of the text the queries of each see by the rules,
    before the gap that these leave and after it. A range whose last is before its first is empty."""
    number = np.arange(length // run, dtype=np.int64)
    ends: Any = np.stack([number * run, (number + 1) * run - 1], axis=1)
    interval = interval_of(rules, ends)

    def at(end: Any, missing: int) -> np.ndarray:
        return np.broadcast_to(missing if end is None else ends_at(end, ends), ends.shape)

    low, high = at(interval.low, 0), at(interval.high, length - 1)
    gap_low, gap_high = at(interval.gap_low, length), at(interval.gap_high, -1)
    low, high = np.maximum(low[:, 0], 0) // run, np.minimum(high[:, 1], length - 1) // run
    # Keys before the gap and after it; without one, all and none.
    before, after = np.minimum(high, (gap_low[:, 1] - 1) // run), np.maximum(low, (gap_high[:, 0] + 1) // run)
    gapped = gap_low[:, 1] <= gap_high[:, 0]
    return [(low, np.where(gapped, before, high)), (np.where(gapped, after, high + 1), high)]


def needed_of_rows(order: Order, first: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """Returns bool [rows, shards]: at which hops some rank needs a key, by the documents of rows.

    Args:
      first: int [rows, T], the first key that each token of a row sees, in the order of the text; it sees all from there to
        itself.
      index: int [rows, T], of a `carried` order: which token of the text lies at each place.
    """
    n, (rows, length) = order.shards, first.shape
    run, tokens = run_length(order, length), length // n
    run = order.stripe if order.carried else run
    owner = np.empty((rows, length), np.int64)
    places = np.broadcast_to(np.arange(length) // tokens, first.shape)
    np.put_along_axis(owner, np.broadcast_to(order.indices(length), first.shape) if index is None else index, places, 1)
    if (owner.reshape(rows, -1, run) != owner[:, ::run, None]).any():
        run = 1  # a rank has other tokens between
    owner, first, number = owner[:, ::run], first[:, ::run] // run, np.arange(length // run)
    hop_needed = np.zeros((rows, n), bool)
    for rank in range(n):
        # The last run of this rank's up to each run, if there is one that is seen from there.
        last = np.maximum.accumulate(np.where(owner == rank, number, -1), axis=1)
        row, place = np.nonzero((last >= first) & (last >= 0))
        hop_needed[row, (owner[row, place] - rank) % n] = True
    return hop_needed


def chunks_by_rules(order: Order, length: int, mask: MaskInfo) -> np.ndarray | None:
    """Returns bool [shards, shards, chunks]: whether any query of rank r may see a key of a chunk of rank s, by the rules of a
    mask, whose arrays are not read; none of its own. None where a chunk is several runs of the text, or the batch says which
    rank has what."""
    chunk = chunk_of(order, length // order.shards)
    placed, rules = _placed(order, length, chunk), mask.replace(**dict.fromkeys(mask.data_fields))
    return None if placed is None else _chunks(order.shards, placed, _seen_by_runs(rules, length, chunk))


def chunks_of_rows(order: Order, first: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """Returns int64 [rows]: how many chunks of another rank a rank needs at most, of each row; arguments as of
    `needed_of_rows`."""
    rows, length = first.shape
    chunk, most = chunk_of(order, length // order.shards), np.zeros(rows, np.int64)
    for row in range(rows):
        placed = _placed(order, length, chunk, None if index is None else index[row])
        if placed is None:
            most[row] = length // order.shards // chunk
            continue
        seen = first[row].reshape(-1, chunk).min(1) // chunk, np.arange(length // chunk)
        most[row] = _chunks(order.shards, placed, [seen]).sum(-1).max()
    return most


def _placed(order: Order, length: int, chunk: int, index: np.ndarray | None = None) -> np.ndarray | None:
    """Returns int64 [chunks]: which chunk of the text lies at each place, see `chunks_by_rules`."""
    if not order.in_parts and chunk != order.stripe:
        return None
    if order.carried:
        return None if index is None else index[::chunk].astype(np.int64) // chunk
    return replace(order, stripe=1).indices(length // chunk)


def _chunks(ranks: int, placed: np.ndarray, seen: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns the table of `chunks_by_rules`, of the (first, last) chunks of the text that each sees."""
    owner = np.empty(len(placed), np.int64)
    owner[placed] = np.arange(len(placed)) // (len(placed) // ranks)
    ends = np.zeros((ranks, len(placed) + 1), np.int64)  # [rank, chunk], as differences
    for first, last in seen:
        some = last >= first
        np.add.at(ends, (owner[some], first[some]), 1)
        np.add.at(ends, (owner[some], last[some] + 1), -1)
    table = (np.cumsum(ends, axis=1)[:, placed] > 0).reshape(ranks, ranks, -1)
    table[np.arange(ranks), np.arange(ranks)] = False
    return table


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


@functools.lru_cache(maxsize=1024)
def pairs_of_row(length: int, mask: MaskInfo, documents: Documents) -> float:
    """Returns the pairs of a row of such documents, see `imbalance`; the mean over some rows."""
    if documents is ONE_DOCUMENT:
        return causal_pairs(mask, length)
    return float(np.mean([keys_at(mask, row).sum() for row in documents.rows(length)]))


# Queries of a row that are counted at most: of longer rows these are taken at even distances.
_COUNTED = 2**20


@functools.lru_cache(maxsize=1024)
def imbalance(order: Order, length: int, mask: MaskInfo, documents: Documents = ONE_DOCUMENT) -> float:
    """Returns the pairs of the rank that has the most over those of an even split: a ring waits for that rank.

    Args:
      mask: causal, without arrays: the rules inside a document.
      documents: of the rows, over which the result is the mean.
    """
    order.check(length)
    if order.shards == 1:
        return 1.0
    step, thin = 1, order
    while length // step > _COUNTED and length % (2 * step * order.shards) == 0:
        thinner = replace(order, stripe=max(1, order.stripe // (2 * step)))
        if (length // (2 * step)) % thinner.multiple:
            break
        step, thin = 2 * step, thinner
    return float(np.mean([busiest(thin.of_ranks(keys_at(mask, row))) for row in documents.rows(length, step)]))
