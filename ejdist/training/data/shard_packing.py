"""Packing of shards: rows of a dataset whose documents nobody lists in memory.

Rows of all shards are in one shuffled order (`Shuffle`), which takes no memory. The documents of a row come from a *window*:
documents that follow each other in a shard, `_ROWS` rows of tokens and `_DOCUMENTS` documents on average. In it they are in
an order of the epoch's own. So a row reads one window's offsets and its own tokens, wherever it is, and depends on (dataset,
length, seed, number) alone. What several rows need of a shard is read together.

`Cut` has documents one after another, cut where a row ends. The stream of a shard has windows in the order in which they lie,
so a place in it is a place on disk but for the order within a window, and the number of rows follows from the manifest.
`whole_packing` cuts no document that fits into a row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ejdist.buckets import at_once
from ejdist.training.chats.encoding import Chats
from ejdist.training.data.blocks import Span
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


class Shards:
    """Shards and their windows, and the rows of them in an order of the epoch's own."""

    def __init__(self, shards: Sequence[Tokens], length: int, seed: int) -> None:
        check_sizes(length, seed)
        self.shards, self.length, self.seed = shards, length, seed
        self.rows_per_epoch = 0
        self.window_sizes = rows, documents = _ROWS, _DOCUMENTS
        self.windows = [
            max(1, s.num_tokens // (rows * length), s.num_documents // documents) for s in shards
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


class KeptSquares(Shards):
    """Rows whose squares are kept in the folder that has what was made of all lengths."""

    _folder: Path

    @functools.cached_property
    def _squares(self) -> np.ndarray:
        """float32 [rows of an epoch], see `squares`, in the order of windows: it follows from the lengths, in every epoch."""
        return np.fromfile(self._folder / "squares.bin", np.float32)

    def squares(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns of each of those rows the sum of the squares of the lengths of its documents; see `Rows`."""
        places = (divmod(index, self.rows_per_epoch) for index in numbers)
        return self._squares[[self._rows(epoch)[number] for epoch, number in places]].astype(np.float64)


class Cut(Shards):
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
