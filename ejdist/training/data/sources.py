"""Where documents come from: files of text, jsonl, jsonl.gz or parquet, and the sources of the standard library."""

from __future__ import annotations

import glob
import gzip
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

STDLIB = "stdlib"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "turtledemo"}


def files_of(source: str | Sequence[str]) -> list[Path]:
    """Returns the files of a source, sorted: "stdlib", or one or more globs ("corpus/**/*.jsonl.gz").

    Raises:
      ValueError: a pattern matches no file.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    patterns = [source] if isinstance(source, str) else list(source)
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(p) for p in glob.glob(os.path.expanduser(pattern), recursive=True)]
        matches = [p for p in matches if p.is_file()]
        if not matches:
            hint = "give a glob such as 'corpus/**/*.jsonl'" if Path(pattern).is_dir() else "check the path"
            raise ValueError(f"data.source = {pattern!r} matches no file (from {os.getcwd()}): {hint}")
        found.update(matches)
    return sorted(found)


def documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """Yields the documents of one file: a text file is one document, a row of jsonl or parquet is one each.

    Raises:
      ValueError: a row cannot be read or has no text; names the file, the row and the remedy.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")):
        yield from _jsonl(path, text_key)
    elif name.endswith(".parquet"):
        yield from _parquet(path, text_key)
    else:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); leave it out") from None


def _jsonl(path: Path, text_key: str) -> Iterator[str]:
    opened = gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else path.open(encoding="utf-8")
    try:
        with opened as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: not JSON ({error.msg}); remove or mend the line"
                    ) from None
                yield _text_of(row, text_key, f"{path}, line {number}")
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _parquet(path: Path, text_key: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None
    with table:
        if text_key not in table.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {text_key!r}; set data.text_key to one of {', '.join(table.schema_arrow.names)}"
            )
        row = 0
        for batch in table.iter_batches(columns=[text_key], batch_size=1024):
            for value in batch.column(0).to_pylist():
                yield _text_of({text_key: value}, text_key, f"{path}, row {row}")
                row += 1


def _text_of(row: object, text_key: str, where: str) -> str:
    if not isinstance(row, dict) or text_key not in row:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no key {text_key!r} (there is {keys}); set data.text_key")
    if not isinstance(row[text_key], str):
        raise ValueError(f"{where}: {text_key!r} is {type(row[text_key]).__name__}, not text")
    return row[text_key]
