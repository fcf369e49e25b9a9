"""Documents that are streamed: of a data set on a hub, `hf:NAME[:SPLIT]`, by the library `datasets` where that is installed; or
of a source that a plugin registers, `NAME:REST`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from ejdist.training.data.own_source import own_rows_of, own_source
from ejdist.training.data.sources import text_of

PREFIX = "hf:"


def is_stream(source: Any) -> bool:
    """Returns whether a source is streamed, and is not files."""
    plugin = own_source(source)
    return (
        plugin[0].value.read is not None
        if plugin is not None
        else isinstance(source, str) and source.startswith(PREFIX)
    )


def _stream(source: str) -> Any:
    """Returns the streamed set of "hf:NAME[:SPLIT]".

    Raises:
      ValueError: the library is not installed, or cannot load the set; names the remedy.
    """
    name, _, split = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise ValueError(f"data.source = {source!r}: write hf:NAME or hf:NAME:SPLIT, for example hf:allenai/c4:train")
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"data.source = {source!r} needs the library datasets: pip install datasets, or give files"
        ) from None
    try:
        return library.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the library and what it fetches with have many
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"data.source = {source!r} cannot be opened ({type(error).__name__}: {reason}); check the name, the split, and "
            "that this host reaches the hub"
        ) from error


def hub_parts(source: str) -> int:
    """Returns into how many parts a set is divided, which can be read apart from each other."""
    if own_source(source) is not None:
        return 1
    stream = _stream(source)
    return int(getattr(stream, "num_shards", None) or getattr(stream, "n_shards", None) or 1)


def hub_documents(source: str, part: int, parts: int, text_key: str) -> Iterator[str]:
    """Yields the documents of one part of a set, in order.

    Raises:
      ValueError: the set cannot be read, or a row has no text; names the row.
    """
    for where, row in hub_rows(source, part, parts):
        yield text_of(row, text_key, where)


def hub_rows(source: str, part: int, parts: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (what an error calls it, the row) of one part of a set, in order.

    Raises:
      ValueError: the set cannot be read.
    """
    if own_source(source) is not None:
        yield from ((row_of_hub(source, part, n), row) for n, row in enumerate(own_rows_of(source)))
        return
    stream = _stream(source)
    rows = iter(stream if parts == 1 else stream.shard(num_shards=parts, index=part))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise ValueError(
                f"data.source = {source!r}: reading stops after row {number} of part {part} ({type(error).__name__}: {error}); "
                "start again: what is done stays"
            ) from error
        yield row_of_hub(source, part, number), dict(row)
        number += 1


def row_of_hub(source: str, part: int, number: int) -> str:
    """Returns what an error calls a row of a set."""
    return f"data.source = {source!r}, part {part}, row {number} (from 0)"
