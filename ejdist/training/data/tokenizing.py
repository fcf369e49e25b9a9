"""Tokenizing: files become the shards of a dataset, in any number of processes and hosts, once.

A shard is made in a folder beside its place and renamed into it (`cache.new_folder`), so what is there is whole: a run that
was killed goes on with what is missing, and files that are added make new shards. `settings.json` holds what all shards of a
folder share; the first run writes it, and a run with others is refused. `dataset.json` is written when nothing is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.chats.encoding import Chats
from ejdist.training.data.cache import Damaged, checksum_of, new_folder, sealed
from ejdist.training.data.conversation_keys import TEXT, Asked
from ejdist.training.data.conversations import Range, joined, none_left, rows_of, write_conversations
from ejdist.training.data.dataset import (
    BLOCK,
    CHATS_FORMAT,
    FORMAT,
    MANIFEST,
    SETTINGS,
    TOKENIZER,
    fingerprint_of,
    tokenizer_of,
)
from ejdist.training.data.hub import hub_parts, is_stream
from ejdist.training.data.sources import STDLIB, NotText, files_of
from ejdist.training.data.text_writing import Report, write_texts
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, train_bpe
from ejdist.training.data.units import Span, Unit, digest_of, span_of, texts_of, units_of

_REMEDY = "name a writable folder with enough space in to="

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

    @property
    def conversations(self) -> Chats | None:
        return None if self.chats is None else Chats(**self.chats)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class Plan:
    """What is to be made, and what is there.

    Attributes:
      units: all of this run's sources, in order.
      todo: those of them that have no shard yet.
    """

    folder: Path
    settings: Settings
    source: Any
    units: tuple[Unit, ...]
    todo: tuple[Unit, ...]


def make_plan(
    folder: Path,
    source: Any,
    *,
    tokenizer: str,
    text_key: str,
    shard_bytes: int,
    sample_bytes: int,
    asked: Asked = TEXT,
) -> Plan:
    """Returns the work. Writes the settings of the folder, and trains a tokenizer `bpe:SIZE`, if it is the first.

    Raises:
      ValueError: a source, the tokenizer or a size is wrong, a file has changed since its shard was made, or the folder has
        other settings. OSError: it cannot be written.
    """
    made = _units_made(folder)
    if is_stream(source):
        parts = hub_parts(source)
        units = [Unit((Span(source, i, parts, 0, 0),)) for i in range(parts)]
    else:
        files = [span_of(path) for path in files_of(source)]
        _check_unchanged(folder, files, made)
        units = units_of(files, shard_bytes, list(made.values()))
    chats = asked.chats(source, tokenizer, text_key)
    settings = _settings(folder, source, units, tokenizer, text_key, shard_bytes, sample_bytes, chats)
    todo = tuple(unit for unit in units if unit.name not in made)
    return Plan(folder, settings, source, tuple(units), todo)


def _units_made(folder: Path) -> dict[str, Unit]:
    """Returns the units whose shards are there, by name."""
    found = {}
    for path in sorted(folder.glob("shard-*/meta.json")):
        if re.fullmatch(r"shard-[0-9a-f]{16}", path.parent.name):
            found[path.parent.name] = Unit(tuple(Span(**s) for s in _facts(path.parent)["sources"]))
    return found


def _facts(shard: Path) -> dict[str, Any]:
    try:
        return sealed(shard / "meta.json")["facts"]
    except Damaged as damage:
        raise ValueError(f"{shard} is damaged: {damage}; remove that folder, and run the command again") from None


def _check_unchanged(folder: Path, files: list[Span], made: dict[str, Unit]) -> None:
    """Raises ValueError for a file that is not what shards were made from. A new time alone is no change: a copy has one."""
    now = {file.path: file for file in files}
    for name, unit in made.items():
        for was in unit.spans:
            file = now.get(was.path)
            if file is None or (file.size, file.mtime_ns) == (was.size, was.mtime_ns):
                continue
            if file.size != was.size or digest_of(was) != was.digest:
                raise ValueError(
                    f"data.source: {was.path} has changed since {folder / name} was made from it; remove that folder to make "
                    "it again, or tokenize into another folder"
                )


def _settings(
    folder: Path,
    source: Any,
    units: list[Unit],
    tokenizer: str,
    text_key: str,
    shard_bytes: int,
    sample_bytes: int,
    chats: Chats | None,
) -> Settings:
    """Returns the settings of a folder, written now if there are none.

    Raises:
      ValueError: they are not those of this run.
    """
    there = _read_settings(folder)
    if there is None:
        made, content = _make_tokenizer(source, units, tokenizer, text_key, sample_bytes)
        name = tokenizer if made.fingerprint == ByteTokenizer.fingerprint or tokenizer.startswith("bpe:") else "file"
        wanted = Settings(name, made.fingerprint, made.vocab_size, text_key, shard_bytes)
        kept = {name: value for name, value in asdict(wanted).items() if name != "chats"}
        if chats is not None:
            kept |= {"format": CHATS_FORMAT, "chats": chats.as_json()}
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if content is not None:
                _publish(folder / TOKENIZER, content)
            _publish(folder / SETTINGS, json.dumps({"content": kept, "checksum": checksum_of(kept)}).encode())
        there = _read_settings(folder)
        assert there is not None
    else:
        wanted = replace(there, text_key=text_key, shard_bytes=shard_bytes)
        if not (tokenizer.startswith("bpe:") and tokenizer == there.tokenizer):
            other, _ = _make_tokenizer(source, units, tokenizer, text_key, 0)
            wanted = replace(wanted, fingerprint=other.fingerprint, vocab_size=other.vocab_size)
    said = {"fingerprint": "tokenizer", "text_key": "text_key", "shard_bytes": "shard_mb"}
    wrong = [key for name, key in said.items() if getattr(there, name) != getattr(wanted, name)]
    was, now = (None if c is None else c.key_of_cache for c in (there.conversations, chats))
    if was != now:
        names = [name for name in (was or now or {}) if was is None or now is None or was[name] != now[name]]
        wrong += ["format"] if was is None or now is None else [_KEYS.get(name, name) for name in names]
    if wrong:
        begun = any(folder.glob("shard-*"))
        anew = "" if begun else f", or remove {SETTINGS} and {TOKENIZER} there: no shard is made yet"
        raise ValueError(
            f"{folder} was started with another {' and '.join(wrong)} ({SETTINGS} there: {there.tokenizer}, fingerprint "
            f"{there.fingerprint}, text_key {there.text_key}, shard_mb {there.shard_bytes / 2**20:g}); give the same, or "
            f"tokenize into another folder{anew}"
        )
    tokenizer_of(folder, {"name": there.tokenizer, "fingerprint": there.fingerprint})
    return there


def _read_settings(folder: Path) -> Settings | None:
    try:
        return Settings(**sealed(folder / SETTINGS))
    except (Damaged, TypeError) as damage:
        if (folder / SETTINGS).exists():
            raise ValueError(f"{folder / SETTINGS} is damaged: {damage}; tokenize into another folder") from None
        return None


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {folder}: {error.strerror or error}; {_REMEDY}") from error


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
    source: Any, units: list[Unit], name: str, text_key: str, sample_bytes: int
) -> tuple[Tokenizer, bytes | None]:
    """Returns the tokenizer and the content of its file. `bpe:SIZE` is trained on the first documents of every unit, which have
    the same share of the sample."""
    if name == "bytes":
        return ByteTokenizer(), None
    if not name.startswith("bpe:"):
        path = Path(name).expanduser()
        return FileTokenizer(path), path.read_bytes()
    size, share = bpe_size(name), max(1, sample_bytes // max(1, len(units)))
    if not sample_bytes:
        raise ValueError(f"tokenizer={name}: the folder has another tokenizer already; give that, or another folder")

    def sample() -> Iterator[str]:
        for unit in units:
            left = share
            for text in _texts(unit, text_key, source):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    content = train_bpe(sample(), size).encode()
    return FileTokenizer.of(content, f"tokenizer={name}"), content


def _texts(unit: Unit, text_key: str, source: Any) -> Iterator[str]:
    for span in unit.spans:
        try:
            yield from texts_of(span, text_key)
        except NotText:
            if source != STDLIB:  # which has a few files in other encodings, made to test them
                raise


def make_shard(folder: Path, unit: Unit, settings: Settings, tokenizer: Tokenizer, source: Any, report: Report) -> None:
    """Makes the shard of a unit, unless another process has in the meantime.

    Raises:
      ValueError: a file or a row is wrong, or a file has changed since it was listed. OSError: it cannot be written.
    """
    shard = folder / unit.name
    if shard.exists():
        return
    spans = tuple(s if s.streamed else replace(s, digest=digest_of(s)) for s in unit.spans)
    with new_folder(shard, what="the shard", remedy=_REMEDY, block=BLOCK) as new:
        if settings.chats is None:
            facts = write_texts(new, _texts(unit, settings.text_key, source), settings.dtype, tokenizer, report)
        else:
            chats = Chats(**settings.chats)
            rows = rows_of([_range(span) for span in unit.spans], chats.key)
            facts = write_conversations(new, rows, chats, tokenizer, settings.dtype, report)
        new.facts = {**facts, "tokenizer": settings.fingerprint, "sources": Unit(spans).facts()}
        for span in unit.spans:
            now = None if span.streamed else span_of(Path(span.path))
            if now and (now.size, now.mtime_ns) != (span.size, span.mtime_ns):
                raise ValueError(
                    f"data.source: {span.path} changed while it was read; start again once nothing writes to it"
                )


def _range(span: Span) -> Range:
    return span.path, span.begin, None if span.whole else span.end


def missing(plan: Plan) -> int:
    """Returns how many shards of a plan are not there."""
    return sum(not (plan.folder / unit.name / "meta.json").exists() for unit in plan.units)


def write_manifest(plan: Plan) -> dict[str, Any]:
    """Returns the content of `dataset.json`, written from the shards that are there: those of runs before too.

    Raises:
      ValueError: a shard is of another tokenizer, a file of a run before has only some of its shards, or there is no text.
    """
    folder, settings, shards = plan.folder, plan.settings, []
    for name in _units_made(folder):
        content = sealed(folder / name / "meta.json")
        facts = content["facts"]
        if facts["tokenizer"] != settings.fingerprint:
            raise ValueError(f"{folder / name} was made with another tokenizer; remove that folder")
        shards.append({"name": name, "checksum": checksum_of(content), **facts})
    _check_complete(folder, shards)
    shards.sort(key=lambda s: [(Path(p["path"]), p["begin"]) for p in s["sources"]])
    whole = joined(shards) if settings.chats is not None else {}
    # Of the files, enough to tell where a shard comes from: all of them stand in its own meta.json.
    shards = [{**s, "sources": s["sources"][:2], "num_sources": len(s["sources"])} for s in shards if s["documents"]]
    if not shards:
        none = none_left(whole["skipped"]) if whole else "the files hold no text"
        raise ValueError(f"source = {plan.source!r}: {none}")
    if sum(s["tokens"] - s["documents"] for s in shards) == 0:
        raise ValueError(f"source = {plan.source!r}: the tokenizer has no tokens for any of its text")
    own = {"name": settings.tokenizer, "fingerprint": settings.fingerprint, "vocab_size": settings.vocab_size}
    chats = {}
    if settings.chats is not None:
        chats = {"chats": settings.chats, "conversations": whole}
    content = {
        "format": settings.format,
        "fingerprint": fingerprint_of(settings.fingerprint, settings.dtype.name, shards),
        "tokenizer": own,
        "dtype": settings.dtype.name,
        "text_key": settings.text_key,
        "documents": sum(s["documents"] for s in shards),
        "tokens": sum(s["tokens"] for s in shards),
        "shards": shards,
        **chats,
    }
    new = folder / f"{MANIFEST}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with _writing(folder):
            new.write_text(json.dumps({"content": content, "checksum": checksum_of(content)}, indent=1))
            os.replace(new, folder / MANIFEST)
    finally:
        new.unlink(missing_ok=True)
    return content


def _check_complete(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Raises ValueError if a source has a range that no shard was made from, or one that two were."""
    spans = sorted((s for shard in shards for s in shard["sources"]), key=lambda s: (s["path"], s["begin"], s["end"]))
    for path, found in itertools.groupby(spans, key=lambda s: s["path"]):
        found = list(found)
        if Span(**found[0]).streamed:
            whole = [s["begin"] for s in found] == list(range(found[0]["end"]))
        else:
            ends = [0, *(s["end"] for s in found)]
            whole = [s["begin"] for s in found] == ends[:-1] and ends[-1] == found[0]["size"]
        if not whole:
            raise ValueError(
                f"{folder} does not have every part of {path} once: a run that read it was not finished, or a shard was added "
                "by hand; run the command with that source again, or remove the shards made from it"
            )


def make_dataset(
    folder: Path,
    source: Any,
    *,
    tokenizer: str = "bytes",
    text_key: str = "text",
    shard_bytes: int = 1 << 28,
    sample_bytes: int = 1 << 26,
    asked: Asked = TEXT,
) -> dict[str, Any]:
    """Returns the content of `dataset.json`, of a dataset made or completed by this process alone.

    Raises:
      ValueError: as `make_plan`, `make_shard` and `write_manifest`. OSError: it cannot be written.
    """
    sizes = {"shard_bytes": shard_bytes, "sample_bytes": sample_bytes}
    plan = make_plan(folder, source, tokenizer=tokenizer, text_key=text_key, asked=asked, **sizes)
    used = tokenizer_of(folder, {"name": plan.settings.tokenizer, "fingerprint": plan.settings.fingerprint})
    for unit in plan.todo:
        make_shard(folder, unit, plan.settings, used, source, lambda characters: None)
    return write_manifest(plan)
