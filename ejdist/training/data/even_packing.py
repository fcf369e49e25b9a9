"""Full rows of even work: which row of its window a document lies in is chosen.

Attention of a row grows with the sum of the squares of the lengths of its documents, and documents one after another leave
that to chance. Here the longest document comes first, and each goes to the row with the smallest sum that has room for it
whole (Graham, Bounds on multiprocessing timing anomalies, 1969, with rows of so many tokens). What fits nowhere whole is cut
into the room that is left, so that no token is wasted. A document of a row's length or more fills rows of its own.

A window is a range of rows of a shard, and its documents are those of as many tokens on disk, cut where the window begins and
ends. So which documents a row can have follows from its number and the manifest. How long the documents of each row are
follows from the lengths in the window, in every epoch: the squares are found once, in a pass over all lengths, and kept.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ejdist.training.data.cache import new_folder, open_folder
from ejdist.training.data.shard_packing import KeptSquares, Segment, Tokens, Window
from ejdist.training.data.whole_packing import Piece


def even_rows(lengths: np.ndarray, order: np.ndarray, length: int, count: int) -> list[list[Piece]]:
    """Returns `count` rows that hold the documents: all of `length` tokens, but the last one, which has what remains. In a row
    documents are in the given order.

    How long the documents of each row are depends on the lengths alone, and not on their order.

    Args:
      lengths: int [documents], of a sum above (count - 1) * length and up to count * length.
      order: int [documents], all of them.
    """
    room = [length] * count
    room[-1] -= count * length - int(lengths.sum())
    rows: list[list[tuple[int, Piece]]] = [[] for _ in room]
    rest, full = [], 0
    for rank, (document, end) in enumerate(zip(order.tolist(), lengths[order].tolist(), strict=True)):
        begin = 0
        while end - begin >= length:
            rows[full].append((rank, Piece(document, begin, length)))
            room[full] = 0
            begin, full = begin + length, full + 1
        if begin < end:
            rest.append((end - begin, rank, Piece(document, begin, end - begin)))
    rest.sort(key=lambda entry: -entry[0])
    squares = [0] * count
    least = [(0, row) for row, free in enumerate(room) if free]  # a heap of (squares, row)
    narrow: list[tuple[int, int]] = []  # a heap of (-room, row): those with less room than the last document
    nowhere = []
    for need, rank, piece in rest:
        while narrow and -narrow[0][0] >= need:
            row = heapq.heappop(narrow)[1]
            heapq.heappush(least, (squares[row], row))
        while least and room[least[0][1]] < need:
            row = heapq.heappop(least)[1]
            heapq.heappush(narrow, (-room[row], row))
        if not least:
            nowhere.append((rank, piece))
            continue
        row = least[0][1]
        rows[row].append((rank, piece))
        room[row] -= need
        squares[row] += need * need
        if room[row]:
            heapq.heapreplace(least, (squares[row], row))
        else:
            heapq.heappop(least)
    # These are short beside a row: what counts is that they are in few pieces.
    wide = iter(sorted((row for row, free in enumerate(room) if free), key=lambda row: -room[row]))
    row = next(wide, 0)
    for rank, (document, begin, need) in nowhere:
        while need:
            if not room[row]:
                row = next(wide)
            taken = min(need, room[row])
            rows[row].append((rank, Piece(document, begin, taken)))
            room[row] -= taken
            begin, need = begin + taken, need - taken
    return [[piece for _, piece in sorted(row)] for row in rows]


class Place(NamedTuple):
    """A window: rows `first` to `first + count - 1` of its shard, which hold its tokens from `begin` to `end`."""

    first: int
    count: int
    begin: int
    end: int


class Even(KeptSquares):
    """Full rows, in which documents lie so that the sums of the squares of their lengths are even; only the last row of a shard
    has padding. A pure function of (shards, length, seed, number)."""

    order = "even"

    def __init__(self, shards: Sequence[Tokens], length: int, seed: int, fingerprint: str, cache_dir: Path) -> None:
        super().__init__(shards, length, seed)
        self._rows_of = [-(-s.num_tokens // length) for s in shards]
        self.windows = [min(windows, rows) for windows, rows in zip(self.windows, self._rows_of, strict=True)]
        self._ends = np.cumsum(self._rows_of)
        self.rows_per_epoch = int(self._ends[-1])
        self.tokens_per_row = sum(s.num_tokens for s in shards) / self.rows_per_epoch
        self._facts, self._folder = self._kept(fingerprint, cache_dir)
        self._packed = functools.lru_cache(maxsize=16)(self._pack)

    def _place(self, shard: int, number: int) -> Place:
        rows, windows, tokens = self._rows_of[shard], self.windows[shard], self.shards[shard].num_tokens
        first, end = (n * rows // windows for n in (number, number + 1))
        return Place(first, end - first, first * self.length, min(end * self.length, tokens))

    def _read_window(self, shard: int, number: int) -> Window:
        """Returns the documents that have tokens of that window."""
        s, place = self.shards[shard], self._place(shard, number)
        first = s.first_from(place.begin + 1) - 1
        return Window(number, s.offsets(first, s.first_from(place.end) + 1))

    def _pack(self, epoch: int, shard: int, number: int) -> tuple[Window, np.ndarray, list[list[Piece]]]:
        """Returns (the window, where its documents begin in it, its rows)."""
        window, place = self._window(shard, number), self._place(shard, number)
        inside = window.offsets.clip(place.begin, place.end)
        order = self._order(epoch, shard, window)
        return window, inside, even_rows(np.diff(inside), order, self.length, place.count)

    def segments(self, index: int) -> list[Segment]:
        """Returns what the row of that number consists of."""
        epoch, number = divmod(index, self.rows_per_epoch)
        number = self._rows(epoch)[number]
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = number - int(self._ends[shard]) + self._rows_of[shard]
        w = ((row + 1) * self.windows[shard] - 1) // self._rows_of[shard]
        window, inside, rows = self._packed(epoch, shard, w)
        return [
            self._segment(shard, int(window.offsets[p.document + 1]), int(inside[p.document]) + p.begin, p.count)
            for p in rows[row - self._place(shard, w).first]
        ]

    def describe(self) -> list[str]:
        """Returns a line that says how even the rows are, and how many documents are cut."""
        spread, cut, long = (self._facts[name] for name in ("spread", "cut", "long"))
        documents = sum(s.num_documents for s in self.shards)
        return [
            "documents lie in rows so that these have even attention (data.packing=even): the sum of the squares of their "
            f"lengths has a standard deviation of {spread:.2f} of the mean, and {cut:,} of {documents:,} documents are cut, "
            f"{long:,} of them longer than a row"
        ]

    def _kept(self, fingerprint: str, cache_dir: Path) -> tuple[dict[str, Any], Path]:
        """Returns what is known of an epoch's rows, and the folder with their squares, from the cache or found now."""
        key = json.dumps([self.order, fingerprint, self.length, *self.window_sizes])
        folder = cache_dir / f"rows-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        facts = open_folder(folder)
        if facts is None:
            cut, long, of_windows = 0, 0, []
            for shard, s in enumerate(self.shards):
                offsets = s.offsets(0, s.num_documents + 1)
                of_documents = np.diff(offsets)
                long += int((of_documents > self.length).sum())
                cut += int((of_documents > 0).sum())
                for number in range(self.windows[shard]):
                    place = self._place(shard, number)
                    first, last = (
                        np.searchsorted(offsets, place.begin, "right") - 1,
                        np.searchsorted(offsets, place.end),
                    )
                    lengths = np.diff(offsets[first : last + 1].clip(place.begin, place.end))
                    rows = even_rows(lengths, np.arange(len(lengths)), self.length, place.count)
                    of_windows.append(np.array([sum(piece.count**2 for piece in row) for row in rows], np.float32))
                    whole = of_documents[first:last].tolist()
                    cut -= sum(piece.count == whole[piece.document] for row in rows for piece in row)
            squares = np.concatenate(of_windows)
            spread = squares.std(dtype=np.float64) / squares.mean(dtype=np.float64)
            with new_folder(folder) as new, new.file("squares.bin") as out:
                out.write(squares.tobytes())
                new.facts = facts = {"cut": cut, "long": long, "spread": float(spread)}
        return facts, folder
