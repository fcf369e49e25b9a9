"""The dataset of a stream, a set on a hub or a source of a plugin, made where it is first needed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from ejdist.training.chats.special_tokens import BY_FILES, SpecialTokens
from ejdist.training.data.conversation_keys import TEXT, Asked
from ejdist.training.data.dataset import MANIFEST, Dataset, open_dataset
from ejdist.training.data.own_source import identity_of, own_source
from ejdist.training.data.tokenizing import make_dataset


def hub_dataset(
    source: str,
    tokenizer: str,
    text_key: str,
    cache_dir: Path,
    *,
    asked: Asked = TEXT,
    special_tokens: SpecialTokens = BY_FILES,
) -> Dataset:
    """Returns the dataset of "hf:NAME[:SPLIT]" or "NAME:REST", streamed into the cache once, by this process alone.

    Raises:
      ValueError: the library `datasets` is missing, or the set cannot be read.
    """
    others = [identity_of(source)] if own_source(source) is not None else []
    others += [] if asked.format == "text" else [asdict(asked)]
    others += [] if special_tokens == BY_FILES else [asdict(special_tokens)]
    key = hashlib.sha256(json.dumps([source, tokenizer, text_key, *others]).encode()).hexdigest()[:16]
    folder = cache_dir / f"hub-{key}"
    if not (folder / MANIFEST).exists():
        how = {"tokenizer": tokenizer, "text_key": text_key, "asked": asked, "special_tokens": special_tokens}
        make_dataset(folder, source, **how)
    return open_dataset(folder, tokenizer, special_tokens=special_tokens)
