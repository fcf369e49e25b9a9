"""The work of tokenizing, in units that make a shard each: ranges of large files, and small files together.

Units follow from the files and the size of a shard alone, whoever makes them and in which order, so that a run that was
killed goes on with the same ones. Large files of text and jsonl are split into ranges of bytes:

- a line of jsonl is of the range that has its first byte;
- a file of text up to `TEXT_PART` is one document. A longer one is cut into documents of about that size: after the last
  blank line of the 64 KiB before the place, else after the last line, else after the last space, else between two characters.

A file of another kind (gzip, parquet) is never split.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from ejdist.buckets import path_of
from ejdist.training.data.hub import hub_documents
from ejdist.training.data.sources import decoded, documents, is_jsonl, is_text, jsonl_between, unreadable

TEXT_PART = 1 << 24  # bytes of a file of text in one document
_LOOK_BACK = 1 << 16  # bytes before a place in which a good cut is looked for


@dataclass(frozen=True)
class Span:
    """What a unit has of a file: all of it, or the range [begin, end) of its bytes. Of a set on a hub: one of `end` parts."""

    path: str
    begin: int
    end: int
    size: int
    mtime_ns: int
    digest: str = ""  # SHA-256 of the range, once it has been read

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == self.size

    @property
    def streamed(self) -> bool:
        """Whether it is a part of a stream, whose bytes nobody knows."""
        return self.size == 0 and self.end > 0

    @property
    def place(self) -> tuple[str, int, int]:
        return self.path, self.begin, self.end


@dataclass(frozen=True)
class Unit:
    """What becomes one shard."""

    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        """The folder of the shard: it follows from where the text comes from."""
        places = json.dumps([span.place for span in self.spans])
        return f"shard-{hashlib.sha256(places.encode()).hexdigest()[:16]}"

    @property
    def size(self) -> int:
        """Bytes of the sources; of a set on a hub nobody knows them before."""
        return sum(span.end - span.begin for span in self.spans if span.size)

    def facts(self) -> list[dict]:
        return [asdict(span) for span in self.spans]


def span_of(path: Path) -> Span:
    """Returns the whole of a file. Raises ValueError if it cannot be inspected."""
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return Span(str(path.absolute()), 0, stat.st_size, stat.st_size, stat.st_mtime_ns)


def units_of(files: Sequence[Span], shard_bytes: int, made: Sequence[Unit] = ()) -> list[Unit]:
    """Returns the units of the files, in their order.

    Files that are larger than a shard have units of their own; smaller ones that follow each other share one, up to its size.

    Args:
      made: units of an earlier run. A file in one of them stays there, so new files make new units.
    """
    unit_of = {span.path: unit for unit in made for span in unit.spans if span.whole}
    units: list[Unit] = []
    group: list[Span] = []
    grouped = 0

    def close() -> None:
        nonlocal grouped
        if group:
            units.append(Unit(tuple(group)))
            group.clear()
        grouped = 0

    for file in files:
        path = path_of(file.path)
        if file.path in unit_of:
            close()
            if unit_of[file.path].spans[0].path == file.path:  # its files follow each other: it comes with the first
                units.append(unit_of[file.path])
        elif file.size > shard_bytes and (is_jsonl(path) or (is_text(path) and file.size > TEXT_PART)):
            close()
            cuts = [*range(0, file.size, shard_bytes), file.size]
            for begin, end in itertools.pairwise(cuts):
                units.append(Unit((Span(file.path, begin, end, file.size, file.mtime_ns),)))
        else:
            if group and grouped + file.size > shard_bytes:
                close()
            group.append(file)
            grouped += file.size
    close()
    return units


def texts_of(span: Span, text_key: str) -> Iterator[str]:
    """Yields the documents of a span, in order, without those of white space alone.

    Raises:
      ValueError: the file or a row is wrong; names it.
    """
    path = path_of(span.path)
    if span.streamed:
        texts = hub_documents(span.path, span.begin, span.end, text_key)
    elif is_text(path) and span.size > TEXT_PART:
        texts = _parts(path, span)
    elif is_jsonl(path) and not span.whole:
        texts = jsonl_between(path, text_key, span.begin, span.end)
    else:
        texts = documents(path, text_key)
    return (text for text in texts if text and not text.isspace())


def digest_of(span: Span) -> str:
    """Returns the SHA-256 of the bytes of a span."""
    digest, path = hashlib.sha256(), path_of(span.path)
    try:
        with path.open("rb") as f:
            f.seek(span.begin)
            left = span.end - span.begin
            while left and (content := f.read(min(left, 1 << 20))):
                digest.update(content)
                left -= len(content)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def _parts(path: Path, span: Span) -> Iterator[str]:
    places = [*range(span.begin, span.end, TEXT_PART), span.end]
    try:
        with path.open("rb") as f:
            cuts = [cut_before(f, place, span.size) for place in places]
            for begin, end in itertools.pairwise(cuts):
                f.seek(begin)
                yield decoded(path, f.read(end - begin), begin)
    except OSError as error:
        raise unreadable(path, error) from error


def cut_before(f: BinaryIO, place: int, size: int) -> int:
    """Returns where a file of text is cut that should be cut at `place`: there or a little before."""
    if place <= 0 or place >= size:
        return max(0, min(place, size))
    first = max(0, place - min(_LOOK_BACK, TEXT_PART // 2))
    f.seek(first)
    near = f.read(place + 1 - first)
    before = near[:-1]
    for ends in ((b"\n\n", b"\n\r\n"), (b"\n",), (b" ",)):
        cut = max(before.rfind(end) + len(end) if end in before else 0 for end in ends)
        if cut:
            return first + cut
    position = len(before)
    while position > 0 and len(before) - position < 4 and near[position] & 0xC0 == 0x80:  # inside a character
        position -= 1
    if position > 0 and near[position - 1 : position + 1] == b"\r\n":
        position -= 1
    return first + position
