"""Lengths of documents, and the rows that are cut of them: what decides how even the work of attention is over ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ONE = "one"
SPREAD = 1.0  # standard deviation of the logarithm of drawn lengths
_DRAWN = 4096  # lengths of which a mean length is made
_ROWS = 4  # rows that stand for all


@dataclass(frozen=True)
class Documents:
    """Lengths of documents, of which rows are cut one after another, as `data.packing=cut` cuts them.

    Attributes:
      lengths: of a sample. Empty: every row is one document.
      words: how a command line names them.
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
        """Returns those of some rows, from the segment ids [rows, T]; none where each is one document."""
        begins = places(segment_ids) == 0
        lengths = [n for row in begins for n in np.diff([*np.flatnonzero(row), row.size])]
        return cls(tuple(map(int, lengths)), "of the data") if len(lengths) > len(begins) else cls()

    def rows(self, length: int, step: int = 1) -> list[np.ndarray]:
        """Returns int64 [length // step] for each of some rows: the place in its document of every step-th token, beginning in
        the middle of a step."""
        at = np.arange(step // 2, length // step * step, step, dtype=np.int64)
        if not self.lengths:
            return [at]
        rng, sizes = np.random.default_rng(0), np.asarray(self.lengths, np.int64)
        times = -(-_ROWS * length // int(sizes.sum()))
        starts = np.concatenate([[0], *(np.cumsum(rng.permutation(sizes)) for _ in range(times))])
        starts = starts + np.repeat(np.arange(times + 1) - 1, [1, *[len(sizes)] * times]).clip(0) * int(sizes.sum())
        cut = np.union1d(starts, np.arange(_ROWS) * length)  # a document goes on in the next row as one of its own
        return [
            row + at - cut[np.searchsorted(cut, row + at, side="right") - 1] for row in range(0, _ROWS * length, length)
        ]


ONE_DOCUMENT = Documents()


def documents_of(words: str) -> Documents:
    """Returns the documents that a command line names: `one` document a row, a mean length (lognormal), or a file of lengths.

    Raises:
      ValueError: it is none of these; names the remedy.
    """
    if words == ONE:
        return ONE_DOCUMENT
    if words.isdigit() and int(words) > 0:
        return Documents(tuple(drawn(int(words), _DRAWN, np.random.default_rng(0)).tolist()), words)
    return Documents(tuple(read_lengths(words, f"a mean length, {ONE!r}").tolist()), words)


def drawn(mean: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns int64 [count]: lognormal lengths of that mean, at least 1."""
    return np.maximum(np.rint(rng.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)), 1).astype(np.int64)


def read_lengths(path: str | Path, others: str) -> np.ndarray:
    """Returns the lengths in a file, one a line; lines that begin with # are comments.

    Args:
      others: what else a caller may be given, for the error.

    Raises:
      ValueError: the file cannot be read, or a line is no length; names the remedy.
    """
    remedy = f"use {others}, or a file with one length a line"
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
    """Returns int64 [..., T]: the place of each token in its document, from the segment ids of rows, in which a document is one
    run. Padding is a run too."""
    at = np.arange(segment_ids.shape[-1])
    begins = np.ones(segment_ids.shape, bool)
    begins[..., 1:] = segment_ids[..., 1:] != segment_ids[..., :-1]
    return at - np.maximum.accumulate(np.where(begins, at, 0), axis=-1)


def busiest(pairs: np.ndarray) -> float:
    """Returns the pairs of the rank that has the most over the mean, of int64 [..., ranks], both summed over what comes first:
    the ranks of each wait for their busiest. 1 where there is no pair."""
    total = pairs.sum()
    return float(pairs.max(-1).sum() / pairs.mean(-1).sum()) if total else 1.0
