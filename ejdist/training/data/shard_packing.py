"""Packing of shards: rows of a dataset whose documents nobody lists in memory.

Rows of all shards are in one shuffled order (`Shuffle`), which takes no memory. The documents of a row come from a *window*:
documents that follow each other in a shard, `_ROWS` rows of tokens and `_DOCUMENTS` documents on average. In it they are in
an order of the epoch's own. So a row reads one window's offsets and its own tokens, wherever it is, and depends on (dataset,
length, seed, number) alone. What several rows need of a shard is read together.

- `Cut`: documents one after another, cut where a row ends. The stream of a shard has windows in the order in which they lie,
  so a place in it is a place on disk but for the order within a window, and the number of rows follows from the manifest.
- `Whole`: no document is cut unless it is longer than a row; a conversation never is, and `too_long` says what becomes of
  one that does not fit: the run stops, it is skipped, or only its beginning is taken. Best fit, longest first, within a
  window: a document goes where it leaves the least room (Ding et al., Fewer Truncations Improve Language Modeling, 2024).
  How many rows a window has is known once it is packed: a pass over the lengths, made once and kept in the cache.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ejdist.buckets import at_once
from ejdist.training.chats.encoding import Chats
from ejdist.training.data.blocks import Span
from ejdist.training.data.cache import new_folder, open_folder
from ejdist.training.data.corpus import Corpus
from ejdist.training.data.packing import check_sizes, filled_row, squares_of
from ejdist.training.data.shuffle import Shuffle

_ROWS, _DOCUMENTS = 64, 8192
READ_WHOLE = 1 << 27  # bytes of offsets that every host may read and keep, to know the lengths of all documents


class Tokens(Protocol):
    """What is packed: a `Shard`, or all of a corpus."""

    num_documents: int
    num_tokens: int
    chats: Chats | None  # of conversations, which have a mask and places

    def tokens_of(self, spans: Sequence[Span]) -> list[np.ndarray]: ...

    def mask(self, begin: int, end: int) -> np.ndarray: ...

    def mask_of(self, spans: Sequence[Span]) -> list[np.ndarray]: ...

    def offsets(self, begin: int, end: int) -> np.ndarray: ...

    def place(self, document: int) -> str: ...

    def first_from(self, token: int) -> int: ...


class CorpusShard:
    """A corpus as one shard."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.num_documents, self.num_tokens, self.chats = corpus.num_documents, corpus.num_tokens, corpus.chats

    def tokens(self, begin: int, end: int) -> np.ndarray:
        return self._corpus.tokens[begin:end]

    def tokens_of(self, spans: Sequence[Span]) -> list[np.ndarray]:
        return [self.tokens(begin, end) for begin, end in spans]

    def mask_of(self, spans: Sequence[Span]) -> list[np.ndarray]:
        return [self.mask(begin, end) for begin, end in spans]

    def mask(self, begin: int, end: int) -> np.ndarray:
        assert self._corpus.mask is not None
        return self._corpus.mask[begin:end].astype(bool)

    def place(self, document: int) -> str:
        return self._corpus.place(document)

    def offsets(self, begin: int, end: int) -> np.ndarray:
        return self._corpus.offsets[begin:end]

    def first_from(self, token: int) -> int:
        return int(np.searchsorted(self._corpus.offsets[:-1], token))


class Window(NamedTuple):
    """Documents of a shard: `first` to `first + len(offsets) - 1`, and where each begins."""

    number: int
    offsets: np.ndarray  # and the end of the last


class Segment(NamedTuple):
    """Tokens of a row: `count` from `begin` of a shard, and one more where the document goes on, the target of the last."""

    shard: int
    begin: int
    count: int
    more: int

    @property
    def span(self) -> Span:
        return self.begin, self.begin + self.count + self.more


class _Shards:
    """Shards and their windows, and the rows of them in an order of the epoch's own."""

    def __init__(self, shards: Sequence[Tokens], length: int, seed: int) -> None:
        check_sizes(length, seed)
        self.shards, self.length, self.seed = shards, length, seed
        self.rows_per_epoch = 0
        self.windows = [
            max(1, s.num_tokens // (_ROWS * length), s.num_documents // _DOCUMENTS) for s in shards
        ]  # of each shard
        self._rows = functools.lru_cache(maxsize=2)(lambda epoch: Shuffle(self.rows_per_epoch, seed, epoch))
        self._window = functools.lru_cache(maxsize=16)(self._read_window)

    def _read_window(self, shard: int, number: int) -> Window:
        """Returns the documents that begin in that window's share of the tokens."""
        s, count = self.shards[shard], self.windows[shard]
        first, last = (s.first_from(-(-i * s.num_tokens // count)) for i in (number, number + 1))
        return Window(number, s.offsets(first, last + 1))

    def _order(self, epoch: int, shard: int, window: Window) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch, shard, window.number])
        return rng.permutation(len(window.offsets) - 1)

    def _segment(self, shard: int, document_end: int, begin: int, count: int) -> Segment:
        """Returns `count` tokens from `begin`, of a document that ends there or later."""
        # A conversation that is too long ends here: nobody trains the rest.
        ends = self.shards[shard].chats is not None or begin + count == document_end
        return Segment(shard, begin, count, 0 if ends else 1)

    def segments(self, index: int) -> list[Segment]:
        """Returns what the row of that number consists of."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the row of that number; see `filled_row`."""
        return self.rows([index])[0]

    def rows(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        """Returns the rows of those numbers, whose tokens are read together."""
        made = [self.segments(index) for index in indices]
        spans: dict[int, list[Span]] = {}
        for segment in itertools.chain.from_iterable(made):
            spans.setdefault(segment.shard, []).append(segment.span)

        def read(folder: Any, number: int, of_shard: list[Span]) -> Any:
            s = self.shards[number]
            return zip(*([s.tokens_of(of_shard)] + ([] if s.chats is None else [s.mask_of(of_shard)])), strict=True)

        # Those in folders of a bucket are read at once.
        folders = [getattr(self.shards[number], "folder", None) for number in spans]
        arrays = dict(zip(spans, at_once(read, folders, list(spans), list(spans.values())), strict=True))
        return [filled_row(self.length, [_filling(s, *next(arrays[s.shard])) for s in row]) for row in made]


def _filling(segment: Segment, tokens: np.ndarray, *mask: np.ndarray) -> Any:
    return tokens, segment.count, *mask


class Cut(_Shards):
    """Rows in which documents follow each other and are cut where a row ends: no token is wasted, only the last row of a shard
    has padding."""

    order = "cut of shards"

    def __init__(self, shards: Sequence[Tokens], length: int, seed: int) -> None:
        super().__init__(shards, length, seed)
        self._ends = np.cumsum([-(-s.num_tokens // length) for s in shards])
        self.rows_per_epoch = int(self._ends[-1])
        self.tokens_per_row = sum(s.num_tokens for s in shards) / self.rows_per_epoch
        self._lengths_read = False
        self.bytes_of_lengths = 8 * sum(s.num_documents + 1 for s in shards)
        self._stream = functools.lru_cache(maxsize=16)(self._make_stream)

    def _make_stream(self, epoch: int, shard: int, number: int) -> tuple[np.ndarray, np.ndarray, Window]:
        """Returns (documents of a window in their order, where each begins in the stream of the shard, the window)."""
        window = self._window(shard, number)
        order = self._order(epoch, shard, window)
        lengths = np.diff(window.offsets)[order]
        return order, window.offsets[0] + np.concatenate([[0], np.cumsum(lengths)]), window

    def _span(self, index: int) -> tuple[int, int, int, int]:
        """Returns (epoch, shard, first, end) of the row of that number: tokens of the stream of a shard."""
        epoch, number = divmod(index, self.rows_per_epoch)
        number = self._rows(epoch)[number]
        shard = int(np.searchsorted(self._ends, number, side="right"))
        num_tokens = self.shards[shard].num_tokens
        place = (number - int(self._ends[shard]) + -(-num_tokens // self.length)) * self.length
        return epoch, shard, place, min(place + self.length, num_tokens)

    def squares(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns of each of those rows the sum of the squares of the lengths of its documents; see `Rows`."""
        if not self._lengths_read and self.bytes_of_lengths <= READ_WHOLE:
            self._read_lengths()
        found = np.zeros(len(numbers))
        for i, index in enumerate(numbers):
            epoch, shard, place, end = self._span(index)
            while place < end:
                _, starts, _ = self._stream(epoch, shard, self._window_at(shard, place))
                stop = min(end, int(starts[-1]))
                found[i] += squares_of(starts, place, stop)
                place = stop
        return found

    def _read_lengths(self) -> None:
        """Reads all offsets in few reads, so that they are in memory: the rows of a step are in as many windows."""
        folders = [getattr(s, "folder", None) for s in self.shards]
        at_once(lambda folder, s: s.offsets(0, s.num_documents + 1), folders, list(self.shards))
        self._lengths_read = True

    def segments(self, index: int) -> list[Segment]:
        """Returns what the row of that number consists of."""
        epoch, shard, place, end = self._span(index)
        segments = []
        while place < end:
            order, starts, window = self._stream(epoch, shard, self._window_at(shard, place))
            d = int(np.searchsorted(starts, place, side="right")) - 1
            while place < end and d < len(order):
                first = int(window.offsets[order[d]]) + place - int(starts[d])
                count = min(int(starts[d + 1]), end) - place
                segments.append(self._segment(shard, int(window.offsets[order[d] + 1]), first, count))
                place, d = place + count, d + 1
        return segments

    def _window_at(self, shard: int, place: int) -> int:
        """Returns the window that has this token: the one that its document begins in."""
        s = self.shards[shard]
        begin = int(s.offsets(document := s.first_from(place + 1) - 1, document + 1)[0])
        return begin * self.windows[shard] // s.num_tokens


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


class Whole(_Shards):
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
        key = json.dumps([self.order, fingerprint, self.length, _ROWS, _DOCUMENTS, "squares"])
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

    @functools.cached_property
    def _squares(self) -> np.ndarray:
        """float32 [rows of an epoch], see `squares`, in the order of windows: it follows from the lengths, in every epoch."""
        return np.fromfile(self._folder / "squares.bin", np.float32)

    def squares(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns of each of those rows the sum of the squares of the lengths of its documents; see `Rows`."""
        places = (divmod(index, self.rows_per_epoch) for index in numbers)
        return self._squares[[self._rows(epoch)[number] for epoch, number in places]].astype(np.float64)

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
