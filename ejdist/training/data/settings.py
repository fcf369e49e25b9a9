"""What all shards of a dataset share, in its settings.json. The first run writes it, and the tokenizer beside it."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.special_tokens import SpecialTokens, ends_of
from ejdist.training.data.cache import Damaged, checksum_of, sealed
from ejdist.training.data.dataset import CHATS_FORMAT, FORMAT, SETTINGS, TOKENIZER, tokenizer_of
from ejdist.training.data.sources import STDLIB, NotText
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, tokenizer_file, train_bpe
from ejdist.training.data.units import Unit, texts_of

REMEDY = "name a writable folder with enough space in to="

# What the settings of conversations are called on the command line.
_KEYS = {
    "key": "text_key",
    "templates": "chat_template",
    "tokens": "chat_template",
    "arguments": "chat_template_kwargs",
}


@dataclass(frozen=True)
class Settings:
    """What all shards of a dataset share."""

    tokenizer: str  # bytes, bpe:SIZE, or the name of the file
    fingerprint: str  # of the tokenizer
    vocab_size: int
    text_key: str
    shard_bytes: int
    format: int = FORMAT
    chats: dict[str, Any] | None = None  # `Chats`, of conversations
    # The ids of bos and eos; None of a folder that was begun before they were recorded.
    special_tokens: dict[str, int | None] | None = None

    @property
    def conversations(self) -> Chats | None:
        return None if self.chats is None else Chats(**self.chats)

    @property
    def own(self) -> dict[str, Any]:
        """What dataset.json has of the tokenizer."""
        facts = {"name": self.tokenizer, "fingerprint": self.fingerprint, "vocab_size": self.vocab_size}
        return facts | (self.special_tokens or {})

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


def settings_of(
    folder: Path,
    source: Any,
    units: list[Unit],
    tokenizer: str,
    special_tokens: SpecialTokens,
    text_key: str,
    shard_bytes: int,
    sample_bytes: int,
    chats: Chats | None,
) -> Settings:
    """Returns the settings of a folder, written now if there are none.

    Raises:
      ValueError: they are not those of this run.
    """
    stored, others, ends = _read_settings(folder), [], {}
    if stored is None:
        resolved, content = _make_tokenizer(source, units, tokenizer, special_tokens, text_key, sample_bytes)
        name = (
            tokenizer if resolved.fingerprint == ByteTokenizer.fingerprint or tokenizer.startswith("bpe:") else "file"
        )
        ids = {"bos": resolved.bos_id, "eos": resolved.eos_id}
        wanted = Settings(name, resolved.fingerprint, resolved.vocab_size, text_key, shard_bytes, special_tokens=ids)
        serialized = {name: value for name, value in asdict(wanted).items() if name != "chats"}
        if chats is not None:
            serialized |= {"format": CHATS_FORMAT, "chats": chats.as_json()}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if content is not None:
                _publish(folder / TOKENIZER, content)
            _publish(
                folder / SETTINGS, json.dumps({"content": serialized, "checksum": checksum_of(serialized)}).encode()
            )
        stored = _read_settings(folder)
        assert stored is not None
        ends = ends_of(tokenizer_of(folder, stored.own))  # which another process may have written first
        others = [key for key, id in ids.items() if id != (stored.special_tokens or {}).get(key)]
    else:
        wanted = replace(stored, text_key=text_key, shard_bytes=shard_bytes)
        ends = asked_for = ends_of(tokenizer_of(folder, stored.own))
        if tokenizer.startswith("bpe:") and tokenizer == stored.tokenizer:
            asked_for = special_tokens.over(ends)
        else:
            other, _ = _make_tokenizer(source, units, tokenizer, special_tokens, text_key, 0)
            wanted = replace(wanted, fingerprint=other.fingerprint, vocab_size=other.vocab_size)
            asked_for = ends_of(other) if other.fingerprint == stored.fingerprint else ends
        others = [key for key, token in ends.items() if token != asked_for[key]]
    options = {"fingerprint": "tokenizer", "text_key": "text_key", "shard_bytes": "shard_mb"}
    wrong = [key for name, key in options.items() if getattr(stored, name) != getattr(wanted, name)] + others
    was, now = (None if c is None else c.key_of_cache for c in (stored.conversations, chats))
    if was != now:
        names = [name for name in (was or now or {}) if was is None or now is None or was[name] != now[name]]
        wrong += ["format"] if was is None or now is None else [_KEYS.get(name, name) for name in names]
    if wrong:
        begun = any(folder.glob("shard-*"))
        anew = "" if begun else f", or remove {SETTINGS} and {TOKENIZER} there: no shard is made yet"
        raise ValueError(
            f"{folder} was started with another {' and '.join(wrong)} ({SETTINGS} there: {stored.tokenizer}, fingerprint "
            f"{stored.fingerprint}, {', '.join(f'{key} {token or "null"}' for key, token in ends.items())}, text_key "
            f"{stored.text_key}, shard_mb {stored.shard_bytes / 2**20:g}); give the same, or tokenize into another folder{anew}"
        )
    return stored


def _read_settings(folder: Path) -> Settings | None:
    try:
        return Settings(**sealed(folder / SETTINGS))
    except (Damaged, TypeError) as damage:
        if (folder / SETTINGS).exists():
            raise ValueError(f"{folder / SETTINGS} is damaged: {damage}; tokenize into another folder") from None
        return None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {folder}: {error.strerror or error}; {REMEDY}") from error


def _publish(path: Path, content: bytes) -> None:
    """Writes a file that is whole or not there; of several writers the first is kept."""
    new = path.parent / f"{path.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        new.write_bytes(content)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def _make_tokenizer(
    source: Any, units: list[Unit], name: str, special_tokens: SpecialTokens, text_key: str, sample_bytes: int
) -> tuple[Tokenizer, bytes | None]:
    """Returns the tokenizer and the content of its file. `bpe:SIZE` is trained on the first documents of every unit, which have
    the same share of the sample."""
    if name == "bytes":
        return ByteTokenizer(special_tokens), None
    if not name.startswith("bpe:"):
        return FileTokenizer(name, special_tokens), tokenizer_file(name).read_bytes()
    size, share = bpe_size(name), max(1, sample_bytes // max(1, len(units)))
    if not sample_bytes:
        raise ValueError(f"tokenizer={name}: the folder has another tokenizer already; give that, or another folder")

    def sample() -> Iterator[str]:
        for unit in units:
            left = share
            for text in texts_of_unit(unit, text_key, source):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    content = train_bpe(sample(), size).encode()
    return FileTokenizer.of(content, f"tokenizer={name}", special_tokens), content


def texts_of_unit(unit: Unit, text_key: str, source: Any) -> Iterator[str]:
    """Yields the texts of a unit."""
    for span in unit.spans:
        try:
            yield from texts_of(span, text_key)
        except NotText:
            if source != STDLIB:  # which has a few files in other encodings, made to test them
                raise
