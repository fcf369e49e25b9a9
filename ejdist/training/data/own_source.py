"""Custom sources of data, `data.source=NAME:REST`: documents that are tokenized here, or rows that are packed already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.registered import SOURCE, Entry, entry_of
from ejdist.training.chats.special_tokens import BY_FILES, SpecialTokens
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

FIELDS = ("tokens", "targets", "positions", "segment_ids")


@dataclass(frozen=True)
class OwnSource:
    """A source as a plugin registers it, see `ejdist.plugins.register_source`."""

    read: Callable[[str], Any] | None
    rows: Callable[..., Any] | None
    identity: Callable[[str], str]


def own_source(source: Any) -> tuple[Entry, str] | None:
    """Returns (the entry, REST) of "NAME:REST", None if no plugin registered NAME."""
    if not isinstance(source, str):
        return None
    name, colon, rest = source.partition(":")
    entry = entry_of(SOURCE, name) if colon else None
    return None if entry is None else (entry, rest)


def identity_of(source: str) -> str:
    """Returns the digest of what identifies the content of a source. Raises ValueError: the source does not say."""
    plugin = own_source(source)
    assert plugin is not None
    entry, rest = plugin
    value = entry.value.identity(rest)
    if not isinstance(value, str) or not value:
        raise ValueError(f"data.source = {source!r}: identity of {entry.module} must return a text, got {value!r}")
    return hashlib.sha256(json.dumps([source, value]).encode()).hexdigest()[:24]


def own_rows_of(source: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a source of documents; a text becomes the row {"text": text}.

    Raises:
      ValueError: it yields something else.
    """
    plugin = own_source(source)
    assert plugin is not None
    entry, rest = plugin
    for number, row in enumerate(entry.value.read(rest)):
        if not isinstance(row, str | dict):
            raise ValueError(
                f"data.source = {source!r}, row {number} (from 0): {entry.module} yields {type(row).__name__}, neither a text "
                "nor a dict"
            )
        yield {"text": row} if isinstance(row, str) else row


class OwnRows:
    """What stands for a corpus where a source packs its own rows."""

    chats = None
    num_documents = 0

    def __init__(
        self, source: str, entry: Entry, rest: str, tokenizer: str, special_tokens: SpecialTokens = BY_FILES
    ) -> None:
        """Raises ValueError if the tokenizer would have to be trained: there is no text."""
        if tokenizer.startswith("bpe:"):
            raise ValueError(
                f"data.tokenizer = {tokenizer!r} is trained on text, and {source!r} has rows of tokens; use bytes, or a "
                "tokenizer.json"
            )
        self.tokenizer: Tokenizer = (
            ByteTokenizer(special_tokens) if tokenizer == "bytes" else FileTokenizer(tokenizer, special_tokens)
        )
        self._source, self._entry, self._rest = source, entry, rest
        self.fingerprint = identity_of(source)
        self.num_tokens = 0

    def rows(self, length: int, seed: int) -> Any:
        """Returns its rows of a length. Raises ValueError if their length differs."""
        packed = self._entry.value.rows(self._rest, length, self.tokenizer, seed)
        what = f"data.source = {self._source!r}: the rows of {self._entry.module}"
        for name in ("length", "rows_per_epoch", "tokens_per_row", "order", "row"):
            if not hasattr(packed, name):
                raise ValueError(f"{what} have no {name}; see ejdist.training.data.packing.Rows")
        if packed.length != length or packed.rows_per_epoch < 1:
            raise ValueError(
                f"{what} are {packed.rows_per_epoch} of {packed.length} tokens; at least one of {length} is needed"
            )
        self.num_tokens = packed.rows_per_epoch * length
        check_arrays(packed.row(0), (length,), self.tokenizer.vocab_size, f"{what}, row 0")
        return packed

    def describe(self) -> list[str]:
        """Returns lines about how the rows were read."""
        return [f"rows that {self._entry.module} packs"]


def check_arrays(arrays: Any, shape: tuple[int, ...], vocab_size: int, what: str) -> None:
    """Raises ValueError, naming the array, unless these are those of a batch or a row: int32 of that shape, ids in the
    vocabulary, and targets that may be -1."""
    missing = [name for name in FIELDS if name not in arrays]
    if missing:
        raise ValueError(f"{what} has no {missing[0]}; it needs {', '.join(FIELDS)}")
    for name in FIELDS:
        x = np.asarray(arrays[name])
        if x.shape != shape or x.dtype.kind not in "iu":
            raise ValueError(f"{what}: {name} is {x.dtype} {list(x.shape)}, not int32 {list(shape)}")
        least, most = (
            (-1 if name in ("targets", "segment_ids") else 0),
            vocab_size if name in ("tokens", "targets") else 2**31,
        )
        if x.size and not least <= x.min() <= x.max() < most:
            raise ValueError(f"{what}: {name} has {x.min()} to {x.max()}; it may have {least} to {most - 1}")
