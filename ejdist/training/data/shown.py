"""Conversations as text, to look at: what is trained stands in double brackets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.buckets import source_path
from ejdist.training.chats.encoding import Encoder, Skipped
from ejdist.training.chats.special_tokens import BY_FILES, SpecialTokens
from ejdist.training.data.conversation_keys import Asked
from ejdist.training.data.conversations import row_name, rows_of
from ejdist.training.data.dataset import OWN, is_dataset, open_dataset
from ejdist.training.data.hub import hub_parts, is_stream
from ejdist.training.data.sources import files_of
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

_OPEN, _CLOSE = "[[", "]]"


def shown(
    source: Any,
    tokenizer: str,
    asked: Asked,
    count: int,
    *,
    text_key: str = "text",
    special_tokens: SpecialTokens = BY_FILES,
) -> Iterator[str]:
    """Yields for each of the first conversations of a source its row, how many of its tokens are trained, and its text.

    Args:
      source: files, as `data.source` of data=files names them, or the folder of a dataset, whose shards are read.
      count: rows of files to read, wrong ones too; conversations of a dataset.

    Raises:
      ValueError: the rows are text, or a key is wrong; or a row is, and data.on_error = stop.
    """
    folder = source_path("data.source", source) if isinstance(source, str) and not is_stream(source) else None
    if folder is not None and is_dataset(folder):
        yield from _of_dataset(folder, count)
        return
    chats = asked.chats(source, tokenizer, text_key)
    if chats is None:
        raise ValueError(
            f"show = {count} is of conversations, and rows of text are trained whole; set data.format=auto, or what rows are"
        )
    own: Tokenizer = ByteTokenizer(special_tokens) if tokenizer == "bytes" else FileTokenizer(tokenizer, special_tokens)
    ranges = (
        [(source, part, parts) for parts in [hub_parts(source)] for part in range(parts)]
        if is_stream(source)
        else [(str(path), 0, None) for path in files_of(source)]
    )
    encoder, skipped = Encoder(chats, own), Skipped()
    for row in itertools.islice(rows_of(ranges, chats.key), count):
        for one in encoder.encode_all([row], skipped, lambda characters: None):
            yield _conversation(row_name(ranges[one.place[0]], one.place[1]), one.ids, one.mask, own)
    if skipped.count:
        yield f"wrong, and skipped: {skipped.count} of these {skipped.rows} rows, the first: {skipped.first}"


def _of_dataset(folder: Path, count: int) -> Iterator[str]:
    dataset = open_dataset(folder, OWN)
    if dataset.chats is None:
        raise ValueError(f"show = {count} is of conversations, and {folder} has text, which is trained whole")
    places = ((shard, document) for shard in dataset.shards for document in range(shard.num_documents))
    for shard, document in itertools.islice(places, count):
        begin, end = (int(offset) for offset in shard.offsets(document, document + 2))
        mask = shard.mask(begin, end).astype(bool)
        yield _conversation(shard.place(document), shard.tokens(begin, end), mask, dataset.tokenizer)


def _conversation(place: str, ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> str:
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    parts = ((bool(mask[begin]), tokenizer.text(ids[begin:end].tolist())) for begin, end in itertools.pairwise(cuts))
    text = "".join(f"{_OPEN}{part}{_CLOSE}" if trained else part for trained, part in parts)
    where = place.removeprefix("data.source: ")
    return f"{where}: {int(mask.sum()):,} of {len(ids):,} tokens are trained\n{text}"
