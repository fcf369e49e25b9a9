"""Packing: documents in a shuffled order, in rows of a fixed length. Any row can be made directly from its number.

`Packing` is for a corpus whose documents can be listed in memory: all of them in one order, one after another, cut into rows.
No token is wasted: every token of the corpus is in exactly one row of an epoch, and only the last row has padding. A document
that is cut goes on in the next row as a segment of its own. `shard_packing` and `whole_packing` have rows of
datasets of any size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ejdist.training.data.corpus import Corpus


class Rows(Protocol):
    """Rows of `length` tokens, by number, epoch after epoch.

    Attributes:
      order: names how rows follow from the documents; a run that goes on with another would see other batches.
      tokens_per_row: mean over an epoch, without padding.

    They may also have `squares(numbers)`, float64 [n]: of each of those rows, the sum of the squares of the lengths of its
    documents, found without reading their tokens. `data.balance` deals rows by it. `bytes_of_lengths`: what it reads, over all
    rows, if not nothing.
    """

    length: int
    rows_per_epoch: int
    order: str

    @property
    def tokens_per_row(self) -> float: ...

    def row(self, index: int) -> dict[str, np.ndarray]: ...


def rows_of(packing: Rows, numbers: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Returns the rows of those numbers, read together where the rows can (`rows` of shards and of mixtures)."""
    together = getattr(packing, "rows", None)
    return [packing.row(n) for n in numbers] if together is None else together(numbers)


def squares_of(starts: np.ndarray, begin: int, end: int) -> float:
    """Returns the sum of the squares of the lengths of documents, cut at `begin` and `end`. `starts`: where each begins in a
    stream, ascending."""
    inside = starts[np.searchsorted(starts, begin, "right") : np.searchsorted(starts, end, "left")]
    return float((np.diff(np.concatenate([[begin], inside, [end]])).astype(np.float64) ** 2).sum())


def filled_row(
    length: int, segments: Iterable[tuple[np.ndarray, int] | tuple[np.ndarray, int, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Returns int32 [length] arrays: tokens, targets, positions, segment_ids.

    targets is the next token of the same document, -1 after its last one and where the next one is not trained; positions
    count from 0 in each segment; segment_ids are 0, 1, 2, ... along the row and -1 for padding.

    Args:
      segments: (tokens, how many of them are of this row): those, and the next one where the document goes on. Of
        conversations also which of the tokens are trained, bool.
    """
    row = {n: np.zeros(length, np.int32) for n in ("tokens", "positions")}
    row |= {n: np.full(length, -1, np.int32) for n in ("targets", "segment_ids")}
    offset = 0
    for segment, (tokens, count, *trained) in enumerate(segments):
        row["tokens"][offset : offset + count] = tokens[:count]
        targets = row["targets"][offset : offset + len(tokens) - 1]
        targets[:] = tokens[1:]
        for mask in trained:
            targets[~mask[1:]] = -1
        row["positions"][offset : offset + count] = np.arange(count)
        row["segment_ids"][offset : offset + count] = segment
        offset += count
    return row


def check_sizes(length: int, seed: int) -> None:
    """Raises ValueError for a length or a seed that no rows can be made with."""
    if length < 2:
        raise ValueError(f"data.sequence_length must be at least 2, got {length}")
    if seed < 0:
        raise ValueError(f"run.seed must be 0 or more, got {seed}")


class Packing:
    """Rows of `length` tokens from a corpus; `row(i)` is a pure function of (corpus, length, seed, i)."""

    order = "cut"

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        check_sizes(length, seed)
        self.corpus, self.length, self.seed = corpus, length, seed
        self.rows_per_epoch = -(-corpus.num_tokens // length)
        self.tokens_per_row = corpus.num_tokens / self.rows_per_epoch
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (documents in their order, where each begins in the stream, rows in their order)."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.corpus.num_documents)
        starts = np.concatenate([[0], np.cumsum(np.diff(self.corpus.offsets)[order])])
        return order, starts, rng.permutation(self.rows_per_epoch)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the row of that number; see `filled_row`."""
        epoch, number = divmod(index, self.rows_per_epoch)
        order, starts, rows = self._epoch(epoch)
        place = int(rows[number]) * self.length
        end = min(place + self.length, int(starts[-1]))
        d = int(np.searchsorted(starts, place, side="right")) - 1
        segments = []
        while place < end:
            stop = min(int(starts[d + 1]), end)
            first = int(self.corpus.offsets[order[d]]) + place - int(starts[d])
            count = stop - place
            whole = stop == starts[d + 1]  # the document ends here; else its next token is the target of the last
            segments.append((self.corpus.tokens[first : first + count + (0 if whole else 1)], count))
            place, d = stop, d + 1
        return filled_row(self.length, segments)

    def squares(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns of each of those rows the sum of the squares of the lengths of its documents; see `Rows`."""
        found = np.empty(len(numbers))
        for i, index in enumerate(numbers):
            epoch, number = divmod(index, self.rows_per_epoch)
            _, starts, rows = self._epoch(epoch)
            place = int(rows[number]) * self.length
            found[i] = squares_of(starts, place, min(place + self.length, int(starts[-1])))
        return found
