"""Packing: documents in a shuffled order, one after another, cut into rows of a fixed length.

No token is wasted: every token of the corpus is in exactly one row of an epoch, and only the last row has padding. A
document that is cut goes on in the next row as a segment of its own. Any row can be made directly from its number.
"""

from __future__ import annotations

import functools

import numpy as np

from ejdist.training.data.corpus import Corpus


class Packing:
    """Rows of `length` tokens from a corpus; `row(i)` is a pure function of (corpus, length, seed, i)."""

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        if length < 2:
            raise ValueError(f"data.sequence_length must be at least 2, got {length}")
        if seed < 0:
            raise ValueError(f"run.seed must be 0 or more, got {seed}")
        self.corpus, self.length, self.seed = corpus, length, seed
        self.rows_per_epoch = -(-int(corpus.offsets[-1]) // length)
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (documents in their order, where each begins in the stream, rows in their order)."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.corpus.num_documents)
        starts = np.concatenate([[0], np.cumsum(np.diff(self.corpus.offsets)[order])])
        return order, starts, rng.permutation(self.rows_per_epoch)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns int32 [length] arrays: tokens, targets, positions, segment_ids.

        targets is the next token of the same document, -1 after its last one; positions count from 0 in each segment;
        segment_ids are 0, 1, 2, ... along the row and -1 for padding.
        """
        epoch, number = divmod(index, self.rows_per_epoch)
        order, starts, rows = self._epoch(epoch)
        begin = int(rows[number]) * self.length
        end = min(begin + self.length, int(starts[-1]))
        row = {n: np.zeros(self.length, np.int32) for n in ("tokens", "positions")}
        row |= {n: np.full(self.length, -1, np.int32) for n in ("targets", "segment_ids")}
        place, segment = begin, 0
        d = int(np.searchsorted(starts, begin, side="right")) - 1
        while place < end:
            stop = min(int(starts[d + 1]), end)
            first = int(self.corpus.offsets[order[d]]) + place - int(starts[d])
            count, at = stop - place, place - begin
            whole = stop == starts[d + 1]  # the document ends here; else its next token is the target of the last
            tokens = self.corpus.tokens[first : first + count + (0 if whole else 1)].astype(np.int32)
            row["tokens"][at : at + count] = tokens[:count]
            row["targets"][at : at + len(tokens) - 1] = tokens[1:]
            row["positions"][at : at + count] = np.arange(count)
            row["segment_ids"][at : at + count] = segment
            place, segment, d = stop, segment + 1, d + 1
        return row
