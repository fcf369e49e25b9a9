"""Lengths of documents, and the rows cut from them, which decide how evenly ranks share the work of attention."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ONE = "one"
SPREAD = 1.0  # standard deviation of the logarithm of drawn lengths
_DRAWN = 4096  # lengths drawn for a given mean
_ROWS = 4  # sampled rows


@dataclass(frozen=True)
class Documents:
    """Lengths of documents. Rows are cut from them one after another, as by `data.packing=cut`.

    Attributes:
      lengths: of a sample of documents. Empty: every row is one document.
      words: their name on a command line.
    """

    lengths: tuple[int, ...] = ()
    words: str = ONE

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.words))

    @classmethod
    def of(cls, segment_ids: np.ndarray) -> Documents:
        """Returns the documents in some rows, given the segment ids [rows, T]; without lengths if each row is one document."""
        begins = places(segment_ids) == 0
        lengths = [n for row in begins for n in np.diff([*np.flatnonzero(row), row.size])]
        return cls(tuple(map(int, lengths)), "of the data") if len(lengths) > len(begins) else cls()

    def rows(self, length: int, step: int = 1) -> list[np.ndarray]:
        """Returns an int64 array [length // step] for each sampled row: the position of every step-th token in its document,
        starting in the middle of a step."""
        steps = np.arange(step // 2, length // step * step, step, dtype=np.int64)
        if not self.lengths:
            return [steps]
        rng, sizes = np.random.default_rng(0), np.asarray(self.lengths, np.int64)
        times = -(-_ROWS * length // int(sizes.sum()))
        starts = np.concatenate([[0], *(np.cumsum(rng.permutation(sizes)) for _ in range(times))])
        starts = starts + np.repeat(np.arange(times + 1) - 1, [1, *[len(sizes)] * times]).clip(0) * int(sizes.sum())
        cut = np.union1d(starts, np.arange(_ROWS) * length)  # a row's end cuts a document in two
        return [
            row + steps - cut[np.searchsorted(cut, row + steps, side="right") - 1]
            for row in range(0, _ROWS * length, length)
        ]


ONE_DOCUMENT = Documents()


def documents_of(words: str) -> Documents:
    """Returns the documents that a command line names: `one` document per row, a mean length (lognormal), or a file of lengths.

    Raises:
      ValueError: the file cannot be read.
    """
    if words == ONE:
        return ONE_DOCUMENT
    if words.isdigit() and int(words) > 0:
        return Documents(tuple(drawn(int(words), _DRAWN, np.random.default_rng(0)).tolist()), words)
    return Documents(tuple(read_lengths(words, f"a mean length, {ONE!r}").tolist()), words)


def drawn(mean: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns int64 [count]: lognormal lengths with this mean, at least 1 each."""
    return np.maximum(np.rint(rng.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)), 1).astype(np.int64)


def read_lengths(path: str | Path, others: str) -> np.ndarray:
    """Returns the lengths in a file, one per line; lines that begin with # are comments.

    Args:
      others: the alternatives to a file, for the error message.

    Raises:
      ValueError: the file cannot be read, or a line is not a positive integer.
    """
    remedy = f"use {others}, or a file with one length per line"
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"documents = {str(path)!r} cannot be read ({error}); {remedy}") from None
    lines = [line for line in lines if line and not line.startswith("#")]
    wrong = next((line for line in lines if not line.isdigit() or int(line) < 1), None)
    if wrong is not None or not lines:
        what = "has no lengths" if wrong is None else f"has the line {wrong!r}"
        raise ValueError(f"documents = {str(path)!r} {what}; {remedy}")
    return np.array([int(line) for line in lines])


def places(segment_ids: np.ndarray) -> np.ndarray:
    """Returns int64 [..., T]: the position of each token in its document, given the segment ids of rows. A document is a run of
    equal ids; padding is one too."""
    index = np.arange(segment_ids.shape[-1])
    begins = np.ones(segment_ids.shape, bool)
    begins[..., 1:] = segment_ids[..., 1:] != segment_ids[..., :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=-1)


def busiest(pairs: np.ndarray) -> float:
    """Returns the pairs of the busiest rank over the mean of all ranks, given int64 [..., ranks]; 1 if there are none. Both are
    sums over the leading dims, in each of which ranks wait for their busiest."""
    total = pairs.sum()
    return float(pairs.max(-1).sum() / pairs.mean(-1).sum()) if total else 1.0
