"""Files with a JSON row a step, in the order of steps: appended to, and cut at their end where a run goes on from an earlier
step.

Nothing is read whole: a run of any length starts, goes on and ends with the same memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_READ = 1 << 20  # bytes
_MOST = 4096  # rows that are kept of a file for pictures


def json_of(line: str | bytes) -> Any:
    """Returns the JSON value of a line, None if it is invalid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_number(value: Any, kind: Any = (int, float), most: float = 2.0**63) -> bool:
    """Returns whether a value of a JSON file is a finite number, below a bound."""
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < most


class StepRows:
    """The rows of a file, read anew each time that they are iterated over; without invalid lines: the last may be truncated,
    and others damaged. None where there is no file."""

    def __init__(self, path: Path, valid: Callable[[dict[str, Any]], bool]) -> None:
        self.path, self._valid = path, valid

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open(errors="replace", newline="\n") as file:
            for line in file:
                if (row := self._row(line)) is not None:
                    yield row

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def backwards(self) -> Iterator[dict[str, Any]]:
        """Yields the rows, the last one first."""
        for _, line in _lines_backwards(self.path):
            if (row := self._row(line.decode(errors="replace"))) is not None:
                yield row

    def spread(self, count: int) -> list[dict[str, Any]]:
        """Returns the first row, the last one, and others at even distances in the file, at most `count` in all."""
        size, rows = self.path.stat().st_size if self.path.exists() else 0, {}
        if not size:
            return []
        with self.path.open("rb") as file:
            for i in range(count):
                # The line that has this byte: with lines of one length, those at even distances.
                place = (size - 1) * i // max(1, count - 1)
                for begin, line in _lines_backwards(self.path, _end_of_line(file, place)):
                    if (row := self._row(line.decode(errors="replace"))) is not None:
                        rows[begin] = row
                        break
        return [rows[begin] for begin in sorted(rows)]

    def _row(self, line: str) -> dict[str, Any] | None:
        row = json_of(line)
        return row if isinstance(row, dict) and self._valid(row) else None


class RowsFile:
    """A file that rows are appended to, each in a write of its own.

    Args:
      start: the step that the run goes on from; rows of later steps are cut off.

    Raises:
      OSError: it cannot be written, here and later.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        cut_after(path, start)
        self._file = path.open("a", buffering=1)

    def put(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


def cut_after(path: Path, step: int) -> None:
    """Cuts a file behind its last row of this step or an earlier one. What is read is what is cut, and a row more.

    Raises:
      OSError: it cannot be read or written.
    """
    if not path.exists():
        return
    size, kept = path.stat().st_size, 0
    # A run that begins reads nothing.
    for begin, line in _lines_backwards(path) if step > 0 else ():
        row = json_of(line)
        if isinstance(row, dict) and is_number(row.get("step"), int) and row["step"] <= step:
            kept = begin + len(line)
            break
    if kept < size:
        os.truncate(path, kept)
    with path.open("rb+") as file:
        if kept and os.pread(file.fileno(), 1, kept - 1) != b"\n":  # a write that was cut off behind the row
            file.seek(kept)
            file.write(b"\n")


class Thinned:
    """Some of the rows that pass: all, or of more than `most` every second, fourth, ... and the last one.

    Args:
      also: steps whose rows are kept too.
    """

    def __init__(self, also: Iterable[int] = (), most: int = _MOST) -> None:
        self._kept: list[dict[str, Any]] = []
        self._wanted, self._chosen, self._most = set(also), dict[int, dict[str, Any]](), most
        self._last: dict[str, Any] | None = None

    def passing(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the rows."""
        every = 1
        for i, row in enumerate(rows):
            self._last = row
            if row["step"] in self._wanted:
                self._chosen[row["step"]] = row
            if i % every == 0:
                self._kept.append(row)
            if len(self._kept) > self._most:
                self._kept, every = self._kept[::2], 2 * every
            yield row

    def rows(self) -> list[dict[str, Any]]:
        """Returns those of the rows that have passed, by step."""
        of_step = {row["step"]: row for row in self._kept} | self._chosen
        if self._last is not None:
            of_step[self._last["step"]] = self._last
        return [of_step[step] for step in sorted(of_step)]


def _end_of_line(file: Any, place: int) -> int:
    """Returns where the line ends that has the byte at `place`."""
    file.seek(place)
    file.readline()
    return file.tell()


def _lines_backwards(path: Path, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (where it begins, the line with its end) of the lines up to `end`, the last one first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begin = path.stat().st_size if end is None else end
        rest = b""  # the end of a line whose beginning has not been read
        while begin > 0:
            first = max(0, begin - _READ)
            file.seek(first)
            block = file.read(begin - first) + rest
            lines = block.splitlines(keepends=True) if b"\r" not in block else _split(block)
            place = first + len(block)
            for line in reversed(lines[1:]):
                place -= len(line)
                yield place, line
            rest, begin = (lines[0] if lines else b""), first
        if rest:
            yield 0, rest


def _split(block: bytes) -> list[bytes]:
    """Returns the lines of a block: only a line feed ends one."""
    lines = [line + b"\n" for line in block.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
