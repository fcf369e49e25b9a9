"""Where documents come from: files of text, jsonl, jsonl.gz or parquet, and the sources of the standard library.
Conversations come from the same files, and from a few that are always there."""

from __future__ import annotations

import codecs
import errno
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ejdist.buckets import BucketPath, source_path
from ejdist.paths import is_url
from ejdist.training.chats import EXAMPLES

STDLIB = "stdlib"
EXAMPLE_CHATS = "example_chats"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "turtledemo"}


class NotText(ValueError):
    """A file that should be a document is not UTF-8."""


def files_of(source: str | Sequence[str] | None) -> list[Path]:
    """Returns the files of a source: "stdlib", "example_chats", or one or more globs ("corpus/**/*.jsonl.gz"), of files or of
    objects of a bucket (gs://BUCKET/*.jsonl), which are `ejdist.buckets.BucketPath`.

    They are sorted by path, whatever the order of the globs and of the file system, objects last. A file that is found more
    than once, by several globs or through links, is taken once. As in a shell, a glob passes over hidden files.

    Raises:
      ValueError: there is no source, a pattern matches no file, a folder of it cannot be listed, or a link leads nowhere.
    """
    if source is None:
        raise ValueError(
            "data.source is not set: name the files to train on, for example data.source='corpus/**/*.jsonl.gz', or use "
            "data=stdlib for the sources of the Python standard library"
        )
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    if source == EXAMPLE_CHATS:
        return [EXAMPLES]
    patterns = [source] if isinstance(source, str) else source
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"data.source = {source!r}: give {STDLIB!r}, a glob of files, or a list of globs")
    by_real_path: dict[str, Path] = {}
    for path in sorted({p for pattern in patterns if not is_url(pattern) for p in _matches(pattern)}):
        by_real_path.setdefault(os.path.realpath(path), path)
    objects = {o for pattern in patterns if is_url(pattern) for o in _objects(pattern)}
    return [*by_real_path.values(), *sorted(objects)]


def _objects(pattern: str) -> list[Any]:
    """Returns the objects of a bucket that a pattern names."""
    one = source_path("data.source", pattern)
    bucket, _, names = pattern[5:].partition("/")
    try:
        if one.is_file():
            return [one]
        matches = BucketPath(f"gs://{bucket}").glob(names) if glob.has_magic(names) else []
        hint = "give a pattern such as gs://BUCKET/corpus/**/*.jsonl" if one.is_dir() else "check the name"
    except OSError as error:
        raise ValueError(
            f"data.source = {pattern!r}: cannot list it: {error.strerror}; check the bucket's name and permissions"
        ) from error
    if not matches:
        raise ValueError(f"data.source = {pattern!r} matches no object: {hint}")
    return matches


def _matches(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)
    if os.path.isfile(expanded):  # a name may have the brackets of a glob
        return [Path(expanded)]
    _check_folders(pattern, expanded)
    everything = glob.glob(expanded, recursive=True)
    for path in everything:
        if not os.path.exists(path):
            raise ValueError(f"data.source = {pattern!r}: {path} is a broken link; fix or remove it")
    matches = [Path(p) for p in everything if os.path.isfile(p)]
    if not matches:
        folder = any(os.path.isdir(p) for p in everything)
        hint = "give a glob such as 'corpus/**/*.jsonl'" if folder else "check the path"
        raise ValueError(f"data.source = {pattern!r} matches no file (from {os.getcwd()}): {hint}")
    return matches


def _check_folders(pattern: str, expanded: str) -> None:
    """Raises ValueError for a folder that cannot be listed: glob passes over it, and its files would be missing."""
    head, tail = os.path.split(expanded)
    while tail:
        if glob.has_magic(tail):
            places = os.path.join(head, tail, "") if tail == "**" else os.path.join(head, "") if head else "./"
            for folder in glob.glob(places, recursive=True):
                try:
                    os.scandir(folder).close()
                except OSError as error:
                    raise ValueError(
                        f"data.source = {pattern!r}: cannot list {folder}: {error.strerror}; make it readable, or give "
                        "globs that do not reach it"
                    ) from None
        head, tail = os.path.split(head)


def is_jsonl(path: Path) -> bool:
    return path.name.lower().endswith((".jsonl", ".ndjson"))


def is_text(path: Path) -> bool:
    """Returns whether a file is one document, and not of a format with rows."""
    return not path.name.lower().endswith((".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet"))


def documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """Yields the documents of one file: a text file is one document, a row of jsonl or parquet is one each.

    A byte-order mark is left out, and the lines of a text file end in "\\n", however they did. Blank lines of jsonl are passed
    over.

    Raises:
      ValueError: the file cannot be read or is damaged, or a row has no text; names the file, the row and the remedy.
    """
    if is_text(path):
        yield _text(path)
    elif path.name.lower().endswith(".parquet"):
        yield from _parquet(path, text_key)
    else:
        yield from _jsonl(path, text_key, _lines(path, compressed=not is_jsonl(path)))


def unreadable(path: Path, error: OSError) -> ValueError:
    """Returns the message about a source file that the system cannot read."""
    remedies = {
        errno.ENOENT: "it existed when the files were listed; start again once nothing moves the files",
        errno.EACCES: "make it readable, or leave it out",
        errno.EPERM: "make it readable, or leave it out",
    }
    remedy = remedies.get(error.errno or 0, "check the disk or the mount, or leave it out")
    return ValueError(f"data.source: cannot read {path}: {error.strerror or error}; {remedy}")


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return decoded(path, content, 0)


def decoded(path: Path, content: bytes, begin: int) -> str:
    """Returns the text of bytes of a file, which begin there. Raises NotText: they are not UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotText(
            f"data.source: {path} is not UTF-8 text ({error.reason} at byte {begin + error.start}); convert it to UTF-8, or "
            "leave it out (rows are read from .jsonl, .jsonl.gz, .ndjson, .ndjson.gz and .parquet only)"
        ) from None
    text = text.removeprefix("\ufeff") if begin == 0 else text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path, *, compressed: bool) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file, numbered from 1."""
    number = 0
    try:
        with path.open("rb") as raw:
            if compressed and not raw.peek(1):
                raise EOFError("it is empty")  # Python reads it as no lines, but it is a failed download
            lines = gzip.GzipFile(fileobj=raw) if compressed else raw
            for number, line in enumerate(lines, 1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"data.source: {path}, after line {number}: damaged gzip ({error}); fetch or compress it again, or leave it out"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error


def jsonl_between(path: Path, text_key: str, begin: int, end: int) -> Iterator[str]:
    """Yields the documents of the lines of a jsonl file whose first byte is in [begin, end).

    So ranges that follow each other have every line once, wherever they meet.

    Raises:
      ValueError: as `documents`; it counts the lines from `begin`.
    """
    yield from _jsonl(path, text_key, _lines_between(path, begin, end), after=begin)


def _lines_between(path: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as f:
            if begin:  # the line that the byte before belongs to is of the range before
                f.seek(begin - 1)
                while (passed := f.readline(1 << 20)) and not passed.endswith(b"\n"):
                    pass
            number = 0
            while f.tell() < end and (line := f.readline()):
                number += 1
                yield number, line if begin or number > 1 else line.removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise unreadable(path, error) from error


def _jsonl(path: Path, text_key: str, lines: Iterator[tuple[int, bytes]], after: int = 0) -> Iterator[str]:
    for number, line in lines:
        if line.strip():
            where = row_of(path, number, after)
            yield text_of(parsed(line, where), text_key, where)


def row_of(path: Path, number: int, after: int = 0) -> str:
    """Returns what an error calls a row: of the file, or of a range of its lines that begins at the byte `after`."""
    if path.name.lower().endswith(".parquet"):
        return f"data.source: {path}, row {number} (from 0)"
    return f"data.source: {path}, line {number}" + (f" of those that begin past byte {after - 1}" if after else "")


def parsed(line: bytes, where: str) -> object:
    """Returns the row of a line of jsonl. Raises ValueError if it cannot be parsed; `where` names the line in the message."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line); convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); remove or fix the line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        reason = str(error).partition(";")[0]
        raise ValueError(f"{where}: unreadable JSON ({reason}); remove or fix the line") from None


def rows(
    path: Path, columns: Sequence[str], begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, str, object]]:
    """Yields (number, what an error calls it, the row, or the ValueError of reading it) of a file with rows.

    Args:
      columns: those of a table that are read, where it has them.
      begin, end: the bytes that lines begin in, of a jsonl file that is read in ranges.

    Raises:
      ValueError: the file cannot be read, is damaged, or has no rows.
    """
    if is_text(path):
        raise ValueError(
            f"data.source: {path} has no rows: conversations are read from .jsonl, .jsonl.gz, .ndjson, .ndjson.gz and "
            ".parquet; leave it out, or set data.format=text"
        )
    if path.name.lower().endswith(".parquet"):
        for number, row in enumerate(_table(path, columns)):
            yield number, row_of(path, number), {name: _without_nulls(value) for name, value in row.items()}
        return
    whole = begin == 0 and end is None
    lines = _lines(path, compressed=not is_jsonl(path)) if whole else _lines_between(path, begin, end or 0)
    for number, line in lines:
        if line.strip():
            where, row = row_of(path, number, begin), None
            try:
                row = parsed(line, where)
            except ValueError as error:
                row = error
            yield number, where, row


def _without_nulls(value: Any) -> Any:
    """Returns a value of a table without the keys that have none in this row: a table has all keys in every row."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _parquet(path: Path, text_key: str) -> Iterator[str]:
    for number, row in enumerate(_table(path, [text_key], needed=True)):
        yield text_of(row, text_key, row_of(path, number))


def _table(path: Path, columns: Sequence[str], *, needed: bool = False) -> Iterator[dict[str, object]]:
    """Yields the rows of a parquet file, with those of the columns that it has.

    Args:
      needed: whether the first column must be there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        file: Any = path.open() if isinstance(path, BucketPath) else path
        with pq.ParquetFile(file, page_checksum_verification=True) as table:
            names = table.schema_arrow.names
            read = [name for name in columns if name in names]
            if read and (columns[0] in read or not needed):
                for batch in table.iter_batches(columns=read, batch_size=1024):
                    for values in zip(*(batch.column(name).to_pylist() for name in read), strict=True):
                        yield dict(zip(read, values, strict=True))
                        row += 1
                return
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's, and not the library's
            raise unreadable(path, error) from error
        raise ValueError(
            f"data.source: {path} is not a readable parquet file, after {row} rows: {error}; fetch or write it again, or "
            "leave it out"
        ) from None
    raise ValueError(f"data.source: {path} has no column {columns[0]!r}; set data.text_key to one of {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def text_of(row: object, text_key: str, where: str) -> str:
    """Returns the text of a row. Raises ValueError if it has none; `where` names the row in the message."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__}, not an object with the key {text_key!r}; fix or remove it")
    if text_key not in row:
        chats = (
            "; recipe=sft, or data.format=auto, reads conversations"
            if {"messages", "completion", "input_ids"} & set(row)
            else ""
        )
        raise ValueError(
            f"{where}: no key {text_key!r} (there is {_listed(list(row)) or 'none'}); set data.text_key{chats}"
        )
    text = row[text_key]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: {text_key!r} is {type(text).__name__}, not text; fix or remove it, or set data.text_key"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {text_key!r} has half of a surrogate pair (\\u{ord(text[error.start]):04x} at character "
            f"{error.start}), which is not text; fix or remove it"
        ) from None
    return text
