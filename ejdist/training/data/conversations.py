"""Writes conversations into a folder of a cache or a dataset: tokens, offsets, a mask, and which row each is.

mask.bin has a byte for each token, 1 where it is trained. places.bin has two int64 for each conversation: which of the folder's
sources it comes from, and its row there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ejdist.buckets import path_of
from ejdist.training.chats.encoding import Chats, Encoder, Skipped
from ejdist.training.chats.rows import columns
from ejdist.training.data.cache import NewFolder
from ejdist.training.data.hub import hub_rows, is_stream, row_of_hub
from ejdist.training.data.sources import row_of, rows
from ejdist.training.data.tokenizer import Tokenizer

Range = tuple[
    str, int, int | None
]  # a file and the bytes that its rows begin in; of a set on a hub: a part, and of how many


def rows_of(ranges: Sequence[Range], key: str) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """Yields (what an error calls it, its place, the row or the error of reading it) of all rows."""
    for source, (path, begin, end) in enumerate(ranges):
        if is_stream(path):
            for number, (where, row) in enumerate(hub_rows(path, begin, end or 1)):
                yield where, (source, number), row
        else:
            for number, where, row in rows(path_of(path), columns(key), begin, end):
                yield where, (source, number), row


def row_name(found: Range, number: int) -> str:
    """Returns what an error calls a row of a range."""
    path, begin, _ = found
    return row_of_hub(path, begin, number) if is_stream(path) else row_of(path_of(path), number, begin)


def write_conversations(
    new: NewFolder,
    found: Iterable[tuple[str, tuple[int, int], Any]],
    chats: Chats,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    report: Callable[[int], Any] = lambda characters: None,
) -> dict[str, Any]:
    """Returns the facts about the conversations that it writes: documents, tokens, trained, skipped and fingerprint.

    Raises:
      ValueError: a row is wrong, and chats.on_error = stop.
    """
    skipped, digest = Skipped(), hashlib.sha256(json.dumps(chats.description, sort_keys=True).encode())
    documents = tokens = trained = 0
    with (
        new.file("tokens.bin") as ids,
        new.file("mask.bin") as masks,
        new.file("offsets.bin") as offsets,
        new.file("places.bin") as places,
    ):
        offsets.write(np.zeros(1, np.int64).tobytes())
        for one in Encoder(chats, tokenizer).encode_all(found, skipped, report):
            content, mask = one.ids.astype(dtype).tobytes(), one.mask.astype(np.uint8).tobytes()
            documents, tokens, trained = documents + 1, tokens + len(one.ids), trained + int(one.mask.sum())
            end = np.int64(tokens).tobytes()
            ids.write(content)
            masks.write(mask)
            offsets.write(end)
            places.write(np.asarray(one.place, np.int64).tobytes())
            for part in (content, mask, end):
                digest.update(part)
    facts = {"documents": documents, "tokens": tokens, "trained": trained, "skipped": asdict(skipped)}
    return {**facts, "fingerprint": digest.hexdigest()[:24]}


def none_left(skipped: dict[str, Any]) -> str:
    """Returns why there is no conversation, as the rest of a sentence."""
    if not skipped["count"]:
        return "the files have no rows"
    return f"all {skipped['rows']:,} rows are wrong; the first: {skipped['first']}"


def joined(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts of several folders as of one, but for their fingerprints."""
    skipped = [f["skipped"] for f in facts]
    first = next((s["first"] for s in skipped if s["first"]), "")
    rows, count = (sum(s[name] for s in skipped) for name in ("rows", "count"))
    whole = {name: sum(f[name] for f in facts) for name in ("documents", "tokens", "trained")}
    return {**whole, "skipped": asdict(Skipped(count, rows, first))}


def described(chats: Chats, facts: dict[str, Any]) -> list[str]:
    """Returns lines that say what became of the rows."""
    skipped = facts["skipped"]
    trained = f"{facts['trained']:,} of {facts['tokens']:,} tokens are trained"
    lines = [f"{facts['documents']:,} {chats.describe()}: {trained}"]
    if skipped["count"]:
        wrong = f"{skipped['count']:,} of {skipped['rows']:,} rows are wrong and skipped (data.on_error=skip)"
        lines.append(f"{wrong}; the first: {skipped['first']}")
    return lines
