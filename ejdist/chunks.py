"""Chunks of a row and the documents in it, as they are dealt out to ranks. NumPy, on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (the attention of each chunk, whether a document begins there, ranks) -> the chunks of each rank, int64 [ranks, some].
Deal = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def text_indices(seen: np.ndarray, ranks: int, chunk: int, deal: Deal) -> np.ndarray:
    """Returns int32 [..., T]: which token of the row lies at each place, of ranks one after another.

    Args:
      seen: [..., T], the attention of each token, in the order of the text.
      deal: which ranks get which chunks.
    """
    rows, inside = seen.reshape(-1, seen.shape[-1]), np.arange(chunk, dtype=np.int32)
    weights, placed = rows.reshape(len(rows), -1, chunk).sum(-1, dtype=np.float64), np.empty(rows.shape, np.int32)
    for i, row in enumerate(weights):
        placed[i] = (deal(row, begins(rows[i], chunk), ranks).reshape(-1, 1) * chunk + inside).reshape(-1)
    return placed.reshape(seen.shape)


def begins(seen: np.ndarray, chunk: int) -> np.ndarray:
    """Returns bool [chunks]: whether a document begins between the middle of the chunk before and that of this one.

    A document's first token sees fewer keys than the token before it, unless that is the first of one too. Where tokens see
    later ones as well, documents of one length are not told apart: then they are dealt out together.
    """
    first = np.concatenate([[True], seen[1:] < seen[:-1]])
    number = np.cumsum(first).reshape(-1, chunk)[:, chunk // 2]
    return np.concatenate([[True], number[1:] != number[:-1]])
