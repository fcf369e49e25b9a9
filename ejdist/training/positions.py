"""The loss by position: where in a document, and where in a row, tokens are well predicted.

An octave k holds what is at places 2^k to 2^(k+1) - 1, counted from 1. In a document the place of a token is how many tokens
of it the model has seen when it predicts the next, itself included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.training.forward import Evaluator

PLACES = ("document", "row")


@dataclass
class Octaves:
    """Sums over counted tokens by octave, float64, and their numbers.

    Attributes:
      sums: float64 [octaves], cross entropy in nats.
      counts: int64 [octaves].
    """

    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def empty(cls, length: int) -> Octaves:
        """Returns empty sums for rows of that length."""
        size = octave_of(np.array([length]))[0] + 1
        return cls(np.zeros(size, np.float64), np.zeros(size, np.int64))

    def add(self, losses: np.ndarray, places: np.ndarray, counted: np.ndarray) -> None:
        """Adds tokens: their losses, their places from 1 on, and which of them count; arrays of one shape."""
        bins, size = octave_of(places[counted]), len(self.counts)
        self.sums += np.bincount(bins, losses[counted].astype(np.float64), minlength=size)
        self.counts += np.bincount(bins, minlength=size)

    @property
    def mean(self) -> float:
        """Cross entropy in nats a token, over all octaves; NaN where there is no token."""
        return float(self.sums.sum()) / int(self.counts.sum()) if self.counts.any() else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each octave: its first and last place, tokens, sum and mean; mean is None without tokens."""
        return [
            {
                "from": 2**k,
                "to": 2 ** (k + 1) - 1,
                "tokens": int(n),
                "sum": float(s),
                "loss": float(s / n) if n else None,
            }
            for k, (s, n) in enumerate(zip(self.sums, self.counts, strict=True))
        ]


def octave_of(places: np.ndarray) -> np.ndarray:
    """Returns floor(log2) of places, which count from 1; exact for every int32."""
    return np.frexp(np.asarray(places, np.float64))[1].astype(np.int64) - 1


def batches_once(data: Any, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the first `count` batches of `ejdist.training.data.Data`, fewer where it has fewer rows: past the last row its
    first come again, and would be counted once more."""
    rows, left = data.global_batch, data.rows_before_again
    for number in range(math.ceil(min(count, left / rows))):
        batch, new = data.batch(number), np.arange(rows) < left - number * rows
        yield batch | {"targets": np.where(new[:, None], batch["targets"], -1)}


def loss_by_octave(evaluator: Evaluator, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, Octaves]:
    """Returns "document" and "row" -> the losses of all tokens of the batches that have a target."""
    octaves = {name: Octaves.empty(evaluator.length) for name in PLACES}
    for batch in batches:
        losses = evaluator.token_losses(dict(batch))
        counted = (batch["targets"] >= 0) & (batch["segment_ids"] >= 0)
        in_row = np.broadcast_to(np.arange(1, evaluator.length + 1), losses.shape)
        octaves["document"].add(losses, batch["positions"] + 1, counted)
        octaves["row"].add(losses, in_row, counted)
    return octaves
