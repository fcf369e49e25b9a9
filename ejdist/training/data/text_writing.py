"""Writes documents into a shard of a dataset: tokens, and where each document ends."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ejdist.training.chats.special_tokens import begun, ended
from ejdist.training.data.cache import NewFolder
from ejdist.training.data.tokenizer import Tokenizer

SEGMENT = 1 << 18  # characters of a document that are tokenized at once
_BATCH = 1 << 20  # characters that go to the tokenizer together, in documents or parts of them

Report = Callable[[int], None]  # called with the number of characters tokenized


def write_texts(
    new: NewFolder, texts: Iterator[str], dtype: np.dtype, tokenizer: Tokenizer, report: Report
) -> dict[str, Any]:
    """Returns the facts about the documents that it writes: documents, tokens, those of the text itself, and fingerprint."""
    digest, documents, tokens, text_tokens, before = hashlib.sha256(), 0, 0, 0, 0
    with new.file("tokens.bin") as out, new.file("offsets.bin") as offsets:
        offsets.write(np.zeros(1, np.int64).tobytes())
        for batch in _batches(_segments(texts)):
            ids, ends = [], array("q")
            for encoded, (_, first, last) in zip(tokenizer.encode_batch([t for t, *_ in batch]), batch, strict=True):
                text_tokens += len(encoded)
                encoded = begun(tokenizer, encoded) if first else encoded
                encoded = ended(tokenizer, encoded) if last else encoded
                ids.append(encoded.astype(dtype))
                tokens += len(encoded)
                if last and tokens > before:  # not of a text without tokens, where nothing begins and ends it
                    ends.append(tokens)
                    before = tokens
            content = np.concatenate(ids).tobytes()
            documents += len(ends)
            out.write(content)
            offsets.write(ends.tobytes())
            digest.update(content)
            report(sum(len(t) for t, *_ in batch))
    for checksums in (new.files[name]["checksums"] for name in ("tokens.bin", "offsets.bin")):
        digest.update(json.dumps(checksums).encode())
    return {"documents": documents, "tokens": tokens, "of_text": text_tokens, "fingerprint": digest.hexdigest()[:24]}


def _segments(texts: Iterator[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yields (text, whether it begins a document, whether it ends one), no longer than `SEGMENT`: a tokenizer takes many times
    the memory of a text.

    A longer document is divided after a line, so that no word is; else after a space.
    """
    for text in texts:
        begin = 0
        while len(text) - begin > SEGMENT:
            near = text[begin + SEGMENT // 2 : begin + SEGMENT]
            cut = max(near.rfind("\n"), -1) + 1 or near.rfind(" ") + 1 or len(near)
            yield text[begin : begin + SEGMENT // 2 + cut], not begin, False
            begin += SEGMENT // 2 + cut
        yield text[begin:], not begin, True


def _batches(segments: Iterator[tuple[str, bool, bool]]) -> Iterator[list[tuple[str, bool, bool]]]:
    batch, size = [], 0
    for segment in segments:
        batch.append(segment)
        size += len(segment[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
