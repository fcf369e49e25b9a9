"""Files that are verified block by block when something of them is read for the first time, with few reads.

A read brings several spans at once. Blocks that nobody has verified are read whole, neighbours together, and kept in memory up
to a limit of bytes; of other blocks only the spans are read, close ones together. A file is never mapped: a disk that fails is
an error, and not a signal that ends the process.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.data.cache import Damaged

BLOCK = 1 << 16  # bytes under one checksum
_MOST = 1 << 30  # bytes of a read: a call returns 2 GiB at most

Span = tuple[int, int]  # [begin, end)


class Kept:
    """Blocks in memory, those used last, of at most `limit` bytes together. Threads share it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._blocks: OrderedDict[Any, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> bytes | None:
        """Returns a block, None if it is not in memory."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: Any, block: bytes) -> None:
        """Keeps a block, and drops those that were used longest ago."""
        with self._lock:
            self.size += len(block) - len(self._blocks.pop(key, b""))
            self._blocks[key] = block
            while self.size > self.limit:
                self.size -= len(self._blocks.popitem(last=False)[1])


class OpenFile:
    """A file opened for reading, closed when nobody reads from it any more."""

    gap = 1 << 10  # bytes between two spans that cost less than another read, and are read with them

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Returns the bytes of each span, fewer where the file ends before."""
        return [self._pread(begin, end) for begin, end in spans]

    def _pread(self, begin: int, end: int) -> bytes:
        parts = []
        while begin < end and (part := os.pread(self.number, min(end - begin, _MOST), begin)):
            parts.append(part)
            begin += len(part)
        return b"".join(parts)


class OpenObject:
    """The object of a bucket, read as `OpenFile` reads a file: spans that are asked for together travel together."""

    gap = 1 << 18  # what a connection brings in a few milliseconds, where a request takes tens of them

    def __init__(self, path: Any) -> None:
        self.read = path.read_ranges


class CheckedFile:
    """A file whose blocks are verified when they are first read.

    Attributes:
      whole: whether blocks are read whole each time, for a file of which neighbours are soon read too.
    """

    def __init__(
        self, path: Path, size: int, checksums: list[int], open_file: Any, kept: Kept, whole: bool = False
    ) -> None:
        self.path, self.size, self.whole = path, size, whole
        self._checksums = np.asarray(checksums, np.uint32)
        self._verified = np.zeros(len(checksums), bool)
        self._open, self._kept = open_file, kept

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Returns the bytes of each span [begin, end). Raises Damaged: they are not those that were written."""
        needed = sorted({block for span in spans for block in _blocks(span)})
        blocks = {block: content for block in needed if (content := self._kept.get((self.path, block))) is not None}
        missing = [block for block in needed if block not in blocks]
        handle: Any = None if not missing else self._open(self.path)
        unread = list(_joined((block, block + 1) for block in missing if self.whole or not self._verified[block]))
        runs = [(first * BLOCK, min(last * BLOCK, self.size)) for first, last in unread]
        for (first, last), content in zip(unread, handle.read(runs) if runs else [], strict=True):
            for block in range(first, last):
                part = content[(block - first) * BLOCK :][:BLOCK]
                self._verify(block, part)
                blocks[block] = part
                self._kept.put((self.path, block), part)
        pieces = {span: _within(span, blocks) for span in spans if all(block in blocks for block in _blocks(span))}
        rest = sorted(span for span in spans if span not in pieces)
        together = list(_joined(rest, handle.gap)) if rest else []
        begins = [begin for begin, _ in together]
        contents = self._exactly(handle, together) if rest else []
        for begin, end in rest:
            of = bisect_right(begins, begin) - 1
            pieces[begin, end] = contents[of][begin - begins[of] : end - begins[of]]
        return [pieces[span] for span in spans]

    def _exactly(self, handle: Any, spans: Sequence[Span]) -> list[bytes]:
        contents = handle.read(spans)
        if any(len(content) < end - begin for content, (begin, end) in zip(contents, spans, strict=True)):
            raise Damaged(f"{self.path.name} is shorter than {self.size} bytes")
        return contents

    def _verify(self, block: int, content: bytes) -> None:
        if zlib.crc32(content) != self._checksums[block]:
            last = min((block + 1) * BLOCK, self.size)
            raise Damaged(f"{self.path.name} does not hold the bytes that were written, from {block * BLOCK} to {last}")
        self._verified[block] = True


def _blocks(span: Span) -> range:
    return range(span[0] // BLOCK, -(-span[1] // BLOCK)) if span[0] < span[1] else range(0)


def _within(span: Span, blocks: dict[int, bytes]) -> bytes:
    first = span[0] // BLOCK * BLOCK
    content = b"".join(blocks[block] for block in _blocks(span))
    return content[span[0] - first : span[1] - first]


def _joined(spans: Iterable[Span], gap: int = 0) -> Iterator[Span]:
    """Yields ascending spans, those that are at most `gap` apart as one."""
    current: Span | None = None
    for begin, end in spans:
        if current is not None and begin - current[1] <= gap:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current
