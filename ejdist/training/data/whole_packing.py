"""Rows of a dataset that hold documents whole; what no document fills is padding.

No document is cut unless it is longer than a row; a conversation never is, and `too_long` says what becomes of one that does
not fit: the run stops, it is skipped, or only its beginning is taken. Best fit, longest first, within a window of
`shard_packing`: a document goes where it leaves the least room (Ding et al., Fewer Truncations Improve Language Modeling,
2024). How many rows a window has is known once it is packed: a pass over the lengths, made once and kept in the cache, with the
squares of each row.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ejdist.training.data.cache import new_folder, open_folder
from ejdist.training.data.shard_packing import KeptSquares, Segment, Tokens, Window


class Piece(NamedTuple):
    """A document, or as much of it as fills a row."""

    document: int
    begin: int  # within the document
    count: int


def best_fit(lengths: np.ndarray, order: np.ndarray, length: int) -> list[list[Piece]]:
    """Returns the rows that hold the documents whole, but those longer than a row; in a row they are in the given order.

    How many rows there are, and the lengths in each, depend on the lengths alone, and not on their order.
    """
    rows: list[list[tuple[int, Piece]]] = []
    rest = []
    for rank, document in enumerate(order.tolist()):
        count, begin = int(lengths[document]), 0
        while count - begin >= length:
            rows.append([(rank, Piece(document, begin, length))])
            begin += length
        if begin < count:
            rest.append((count - begin, rank, Piece(document, begin, count - begin)))
    rest.sort(key=lambda entry: -entry[0])
    room: list[tuple[int, int]] = []  # (tokens that are free, row), ascending
    for count, rank, piece in rest:
        fits = bisect_left(room, (count, -1))
        free, row = room.pop(fits) if fits < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((rank, piece))
        if free > count:
            insort(room, (free - count, row))
    return [[piece for _, piece in sorted(row)] for row in rows]


@dataclass
class TooLong:
    """Conversations that are longer than a row.

    Attributes:
      count, dropped: how many there are, and how many of them are not packed at all.
      longest: tokens of it. shard, document, first: which is the first, and its tokens.
    """

    count: int = 0
    dropped: int = 0
    longest: int = 0
    shard: int = 0
    document: int = 0
    first: int = 0

    def add(self, shard: int, lengths: np.ndarray, taken: np.ndarray, length: int) -> None:
        long = np.flatnonzero(lengths > length)
        if len(long) and not self.count:
            self.shard, self.document, self.first = shard, int(long[0]), int(lengths[long[0]])
        self.count += len(long)
        self.dropped += int((taken[long] == 0).sum())
        self.longest = max(self.longest, int(lengths[long].max(initial=0)))


class Whole(KeptSquares):
    """Rows that hold documents whole; what no document fills is padding.

    Attributes:
      too_long: what becomes of a conversation that is longer than a row: stop, skip or truncate.
    """

    def __init__(
        self,
        shards: Sequence[Tokens],
        length: int,
        seed: int,
        fingerprint: str,
        cache_dir: Path,
        too_long: str = "stop",
    ) -> None:
        super().__init__(shards, length, seed)
        self.too_long = too_long
        chats = any(s.chats is not None for s in shards)
        self.order = f"whole conversations, too long: {too_long}" if chats else "whole"
        self._first_window = np.cumsum([0, *self.windows])
        self._ends = self._counted(fingerprint, cache_dir)
        self.rows_per_epoch = int(self._ends[-1])
        if not self.rows_per_epoch:
            nothing = ", and nothing that is trained fits into it" if too_long == "truncate" else ""
            remedy = "" if nothing else ", or set data.too_long=truncate"
            raise ValueError(
                f"all conversations are longer than data.sequence_length = {length:,}{nothing}: make that larger{remedy}"
            )
        self._packed = functools.lru_cache(maxsize=16)(self._pack)

    @functools.cached_property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row, without padding. Of conversations that are too long this reads all lengths again."""
        if not self._long.count:
            return sum(s.num_tokens for s in self.shards) / self.rows_per_epoch
        taken = (self._taken(i, s.offsets(0, s.num_documents + 1)).sum() for i, s in enumerate(self.shards))
        return int(sum(taken)) / self.rows_per_epoch

    def describe(self) -> list[str]:
        """Returns a line about conversations that are longer than a row, if there are any."""
        if not self._long.count:
            return []
        long = self._long
        done = "are skipped"
        if self.too_long == "truncate":
            done = f"are truncated, and {long.dropped:,} of them, where nothing trained is left, skipped"
        return [
            f"conversations longer than data.sequence_length = {self.length:,}: {long.count:,}, the longest of "
            f"{long.longest:,} tokens; they {done} (data.too_long={self.too_long})"
        ]

    def _counted(self, fingerprint: str, cache_dir: Path) -> np.ndarray:
        """Returns how many rows there are up to the end of each window of all shards, from the cache or counted now."""
        key = json.dumps([self.order, fingerprint, self.length, *self.window_sizes, "squares"])
        folder = cache_dir / f"rows-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        facts = open_folder(folder)
        if facts is None:
            long = TooLong()
            squares = [of for shard in range(len(self.shards)) for of in self._squares_of(shard, long)]
            self._check_long(long)
            with new_folder(folder) as new, new.file("rows.bin") as rows, new.file("squares.bin") as out:
                rows.write(np.cumsum([len(of) for of in squares], dtype=np.int64).tobytes())
                out.write(np.concatenate(squares).tobytes())
                new.facts = facts = {"too_long": asdict(long)} if long.count else {}
        self._long = TooLong(**facts.get("too_long", {}))
        self._folder = folder
        return np.fromfile(folder / "rows.bin", np.int64)

    def _check_long(self, long: TooLong) -> None:
        if long.count and self.too_long == "stop":
            first = self.shards[long.shard].place(long.document)
            raise ValueError(
                f"{first}: the conversation has {long.first:,} tokens, more than data.sequence_length = {self.length:,} "
                f"(longer than that: {long.count:,}, the longest of {long.longest:,}); make it larger, or set "
                "data.too_long=skip or truncate"
            )

    def _squares_of(self, shard: int, long: TooLong) -> list[np.ndarray]:
        """Returns of each window of a shard the squares of its rows, float32."""
        s, windows = self.shards[shard], self.windows[shard]
        offsets = s.offsets(0, s.num_documents + 1)
        begins = [-(-i * s.num_tokens // windows) for i in range(windows + 1)]
        first = np.searchsorted(offsets[:-1], begins)
        taken = self._taken(shard, offsets)
        if s.chats is not None:
            long.add(shard, np.diff(offsets), taken, self.length)
        lengths = (taken[a:b] for a, b in itertools.pairwise(first))
        packed = (best_fit(window, np.arange(len(window)), self.length) for window in lengths)
        return [np.array([sum(piece.count**2 for piece in row) for row in rows], np.float32) for rows in packed]

    def _taken(self, shard: int, offsets: np.ndarray) -> np.ndarray:
        """Returns how many tokens of each document are packed."""
        lengths, s = np.diff(offsets), self.shards[shard]
        if s.chats is None or not (long := lengths > self.length).any():
            return lengths
        lengths = np.where(long, self.length if self.too_long == "truncate" else 0, lengths)
        for document in np.flatnonzero(long & (lengths > 0)):
            begin = int(offsets[document])
            if not s.mask(begin + 1, begin + self.length).any():
                lengths[document] = 0
        return lengths

    def _pack(self, epoch: int, shard: int, number: int) -> tuple[Window, list[list[Piece]]]:
        window = self._window(shard, number)
        return window, best_fit(self._taken(shard, window.offsets), self._order(epoch, shard, window), self.length)

    def segments(self, index: int) -> list[Segment]:
        """Returns what the row of that number consists of."""
        epoch, number = divmod(index, self.rows_per_epoch)
        number = self._rows(epoch)[number]
        w = int(np.searchsorted(self._ends, number, side="right"))
        shard = int(np.searchsorted(self._first_window, w, side="right")) - 1
        window, rows = self._packed(epoch, shard, w - int(self._first_window[shard]))
        pieces = rows[number - int(self._ends[w - 1] if w else 0)]
        ends, starts = window.offsets[1:], window.offsets[:-1]
        return [self._segment(shard, int(ends[p.document]), int(starts[p.document]) + p.begin, p.count) for p in pieces]
