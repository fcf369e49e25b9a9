"""Chunks of a row dealt out to ranks so that every rank has as many tokens and as much attention. NumPy, on the host.

In rounds: of every `ranks` neighbouring chunks each rank gets one, the largest goes to the rank that has least so far, as list
scheduling does (Graham, Bounds on multiprocessing timing anomalies, 1969). Largest first over the whole row would be as even in
sum, but not at each hop of a ring: ranks would have their tokens in other parts of the text. Chunks of one size for every rank
as in MagiAttention (2025).
"""

from __future__ import annotations

import numpy as np

ENOUGH = 1.002  # the busiest rank over the mean, at which no more chunks are exchanged
_TRIES = 8  # exchanges for each rank, at most


def assigned(weights: np.ndarray, ranks: int) -> np.ndarray:
    """Returns int64 [ranks, chunks / ranks]: the chunks of each rank, ascending, one of each round. A pure function of the
    weights, so that any number of hosts deals alike.

    Args:
      weights: float [chunks], the attention of the queries of each.
    """
    rounds = weights.reshape(-1, ranks)
    load, number = np.zeros(ranks), np.empty(rounds.shape, np.int64)  # [round, rank] -> which chunk of the round
    # Rounds whose chunks differ most come first, so that the others make up for them.
    for i in np.argsort(rounds.min(1) - rounds.max(1), kind="stable"):
        heavy, light = np.argsort(-rounds[i], kind="stable"), np.argsort(load, kind="stable")
        number[i, light] = heavy
        load[light] += rounds[i, heavy]
    _exchange(rounds, load, number)
    return (number + np.arange(len(rounds))[:, None] * ranks).T


def _exchange(rounds: np.ndarray, load: np.ndarray, number: np.ndarray) -> None:
    """Exchanges chunks of a round between the heaviest and the lightest rank, while that makes both nearer to the mean."""
    at, mean = np.arange(len(rounds)), load.mean()
    for _ in range(_TRIES * len(load)):
        most, least = load.argmax(), load.argmin()
        if load[most] <= ENOUGH * mean:
            return
        less = rounds[at, number[:, most]] - rounds[at, number[:, least]]
        gap = load[most] - load[least]
        best = np.abs(less - gap / 2).argmin()
        if not 0 < less[best] < gap:
            return
        number[best, [most, least]] = number[best, [least, most]]
        load[most] -= less[best]
        load[least] += less[best]


def text_indices(seen: np.ndarray, ranks: int, chunk: int) -> np.ndarray:
    """Returns int32 [..., T]: which token of the row lies at each place, of ranks one after another.

    Args:
      seen: [..., T], the attention of each token, in the order of the text.
    """
    rows, inside = seen.reshape(-1, seen.shape[-1]), np.arange(chunk, dtype=np.int32)
    weights, found = rows.reshape(len(rows), -1, chunk).sum(-1, dtype=np.float64), np.empty(rows.shape, np.int32)
    for i, row in enumerate(weights):
        found[i] = (assigned(row, ranks).reshape(-1, 1) * chunk + inside).reshape(-1)
    return found.reshape(seen.shape)
