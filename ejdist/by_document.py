"""Chunks of a row dealt out to ranks by documents: as few as possible are cut into pieces for several ranks, so that a rank
needs few keys of others. NumPy, on the host.

By halves: documents are dealt to two groups of ranks, the one with most attention first and each to the group that has least so
far (Graham, Bounds on multiprocessing timing anomalies, 1969), and then within each group. Where that is not even, the largest
documents are cut, a zigzag of chunks for each group, until it is. Every rank has as many chunks.
Few cuts as in ByteScale (Ge et al., 2025, arXiv:2502.21231) and MagiAttention (Sand.ai, 2025, arXiv:2505.13211).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

EVEN = 0.012  # the busiest rank over the mean, less 1, at which no further document is cut
_SMALL = 16  # neighbouring documents are dealt together up to this part of a rank's chunks
_SWAPS = 8  # exchanges of chunks between two groups, at most


@dataclass(frozen=True)
class Piece:
    """Chunks of a document, or of small neighbouring ones: int64 [n], ascending, and the attention of each, float [n]."""

    document: int
    chunks: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.chunks)

    def cut(self, some: np.ndarray) -> tuple[Piece, Piece]:
        """Returns the piece of these chunks, bool [n], and that of the others."""
        return tuple(replace(self, chunks=self.chunks[x], weights=self.weights[x]) for x in (some, ~some))  # pyrefly: ignore


Group = list[Piece]


def dealt(weights: np.ndarray, begins: np.ndarray, ranks: int) -> np.ndarray:
    """Returns int64 [ranks, chunks / ranks]: the chunks of each rank, ascending. A pure function of its arguments, so that any
    number of hosts deals alike.

    Args:
      weights: float [chunks], the attention of the queries of each.
      begins: bool [chunks], whether a document begins there: one that has the middle of the chunk, see `chunks.begins`.
    """
    each = len(weights) // ranks
    parts = _of_ranks(_pieces(weights, begins, each // _SMALL), ranks, each, EVEN / max(1, math.log2(ranks)))
    return np.stack([np.sort(np.concatenate([piece.chunks for piece in part])) for part in parts])


def _pieces(weights: np.ndarray, begins: np.ndarray, most: int) -> Group:
    """Returns the documents; neighbouring ones together while they are `most` chunks or fewer."""
    cuts = [0]
    ends = [*(np.flatnonzero(begins[1:]) + 1).tolist(), len(weights)]
    for end, following in zip(ends, [*ends[1:], math.inf], strict=True):
        if following - cuts[-1] > most:
            cuts.append(end)
    return [Piece(i, np.arange(a, b), weights[a:b]) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def _of_ranks(pieces: Group, ranks: int, each: int, even: float) -> list[Group]:
    if ranks == 1:
        return [pieces]
    first = ranks // 2
    one, other = _halved(pieces, first / ranks, first * each, even)
    return _of_ranks(one, first, each, even) + _of_ranks(other, ranks - first, each, even)


def _halved(pieces: Group, share: float, number: int, even: float) -> list[Group]:
    """Returns two groups: the first has `number` chunks and about this share of the attention."""
    pieces = sorted(pieces, key=lambda piece: -piece.weights.sum())
    least, best, cut = math.inf, None, 0
    while best is None or (least > 1 + even and cut <= len(pieces)):
        groups = _tried(pieces, cut, share, number)
        off = _uneven(groups, share) if groups else math.inf
        if off < least:
            least, best = off, groups
        cut += 1 + cut // 4
        if best is None and cut > len(pieces):
            raise AssertionError("every document is cut, and no group has the right number of chunks")
    return best


def _uneven(groups: list[Group], share: float) -> float:
    load = [sum(float(piece.weights.sum()) for piece in group) for group in groups]
    return max(load[0] / share, load[1] / (1 - share)) / (sum(load) or 1)


def _tried(pieces: Group, cut: int, share: float, number: int) -> list[Group] | None:
    """Returns the groups where so many of the largest are cut; None where no other can be cut so that the number is right."""
    shares, numbers = (share, 1 - share), (number, sum(map(len, pieces)) - number)
    whole = sum(float(piece.weights.sum()) for piece in pieces) or 1.0
    groups: list[Group] = [[], []]
    load, count = [0.0, 0.0], [0, 0]

    def put(i: int, piece: Piece) -> None:
        if len(piece):
            groups[i].append(piece)
            load[i] += float(piece.weights.sum())
            count[i] += len(piece)

    for piece in pieces[:cut]:
        for i, part in enumerate(piece.cut(_outside(len(piece), share))):
            put(i, part)
    for piece in pieces[cut:]:
        weight = float(piece.weights.sum())
        full = [max((load[i] + weight) / whole / shares[i], (count[i] + len(piece)) / numbers[i]) for i in range(2)]
        put(int(full[1] < full[0]), piece)
    over = int(count[1] > numbers[1])
    if not _moved(groups, over, count[over] - numbers[over], load[over] - whole * shares[over]):
        return None
    _exchange(groups, share)
    return groups


def _outside(length: int, share: float) -> np.ndarray:
    """Returns bool [length]: the first and the last chunks, of which the work of a causal document is this share too."""
    number = round(length * share)
    some = np.zeros(length, bool)
    some[: number // 2] = some[length - (number - number // 2) :] = True
    return some if number else np.zeros(length, bool)


def _moved(groups: list[Group], over: int, number: int, weight: float) -> bool:
    """Moves so many chunks out of a group: a run of the document in which the attention of one is nearest to that weight."""
    if number == 0:
        return True
    runs = []
    for i, piece in enumerate(groups[over]):
        if len(piece) >= number:
            sums = np.concatenate([[0.0], np.cumsum(piece.weights)])
            off = np.abs(sums[number:] - sums[:-number] - weight)
            runs.append((float(off.min()), i, int(off.argmin())))
    if not runs:
        return False
    _, i, start = min(runs)
    some = np.zeros(len(groups[over][i]), bool)
    some[start : start + number] = True
    moved, stay = groups[over][i].cut(some)
    groups[over][i : i + 1] = [stay] if len(stay) else []
    groups[1 - over].append(moved)
    return True


def _exchange(groups: list[Group], share: float) -> None:
    """Exchanges chunks of documents that both groups have, while that makes them more even."""
    for _ in range(_SWAPS):
        load = [sum(float(piece.weights.sum()) for piece in group) for group in groups]
        gap = load[0] - sum(load) * share  # what the first has too much
        best, chosen = abs(gap) * 0.999, None
        for i, one in enumerate(groups[0]):
            for j, other in enumerate(groups[1]):
                if one.document == other.document:
                    off = np.abs(one.weights[:, None] - other.weights - gap)
                    k, m = np.unravel_index(off.argmin(), off.shape)
                    if off[k, m] < best:
                        best, chosen = off[k, m], (i, j, k, m)
        if chosen is None:
            return
        i, j, k, m = chosen
        one, other = groups[0][i], groups[1][j]
        groups[0][i], groups[1][j] = _with(one, k, other, m), _with(other, m, one, k)


def _with(piece: Piece, at: int, other: Piece, of: int) -> Piece:
    """Returns the piece with a chunk of another in the place of one of its chunks."""
    chunks, weights = piece.chunks.copy(), piece.weights.copy()
    chunks[at], weights[at] = other.chunks[of], other.weights[of]
    order = np.argsort(chunks)
    return replace(piece, chunks=chunks[order], weights=weights[order])
