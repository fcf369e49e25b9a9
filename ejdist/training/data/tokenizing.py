"""Tokenizing: files become the shards of a dataset, in any number of processes and hosts, once.

A shard is made in a folder beside its place and renamed into it (`cache.new_folder`), so what is there is whole: a run that
was killed goes on with what is missing, and files that are added make new shards. `settings.json` holds what all shards of a
folder share; the first run writes it, and a run with others is refused. `dataset.json` is written when nothing is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ejdist.buckets import path_of
from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.special_tokens import BY_FILES, SpecialTokens
from ejdist.training.data.blocks import BLOCK
from ejdist.training.data.cache import Damaged, checksum_of, new_folder, sealed
from ejdist.training.data.conversation_keys import TEXT, Asked
from ejdist.training.data.conversations import Range, joined, none_left, rows_of, write_conversations
from ejdist.training.data.dataset import (
    MANIFEST,
    fingerprint_of,
    tokenizer_of,
)
from ejdist.training.data.hub import hub_parts, is_stream
from ejdist.training.data.settings import REMEDY, Settings, settings_of, texts_of_unit, writing
from ejdist.training.data.sources import files_of
from ejdist.training.data.text_writing import Report, write_texts
from ejdist.training.data.tokenizer import Tokenizer
from ejdist.training.data.units import Span, Unit, digest_of, span_of, units_of


@dataclass(frozen=True)
class Plan:
    """The shards of a dataset: all of them, and those still missing.

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
    special_tokens: SpecialTokens = BY_FILES,
) -> Plan:
    """Returns the work. Writes the settings of the folder, and trains a tokenizer `bpe:SIZE`, if it is the first.

    Raises:
      ValueError: a source, the tokenizer or a size is wrong, a file has changed since its shard was made, or the folder has
        other settings. OSError: it cannot be written.
    """
    finished = _units_made(folder)
    if is_stream(source):
        parts = hub_parts(source)
        units = [Unit((Span(source, i, parts, 0, 0),)) for i in range(parts)]
    else:
        files = [span_of(path) for path in files_of(source)]
        _check_unchanged(folder, files, finished)
        units = units_of(files, shard_bytes, list(finished.values()))
    chats = asked.chats(source, tokenizer, text_key)
    settings = settings_of(folder, source, units, tokenizer, special_tokens, text_key, shard_bytes, sample_bytes, chats)
    todo = tuple(unit for unit in units if unit.name not in finished)
    return Plan(folder, settings, source, tuple(units), todo)


def _units_made(folder: Path) -> dict[str, Unit]:
    """Returns the units whose shards are there, by name."""
    units = {}
    for path in sorted(folder.glob("shard-*/meta.json")):
        if re.fullmatch(r"shard-[0-9a-f]{16}", path.parent.name):
            units[path.parent.name] = Unit(tuple(Span(**s) for s in _facts(path.parent)["sources"]))
    return units


def _facts(shard: Path) -> dict[str, Any]:
    try:
        return sealed(shard / "meta.json")["facts"]
    except Damaged as damage:
        raise ValueError(f"{shard} is damaged: {damage}; remove that folder, and run the command again") from None


def _check_unchanged(folder: Path, files: list[Span], finished: dict[str, Unit]) -> None:
    """Raises ValueError for a file that is not what shards were made from. A new time alone is no change: a copy has one."""
    now = {file.path: file for file in files}
    for name, unit in finished.items():
        for was in unit.spans:
            file = now.get(was.path)
            if file is None or (file.size, file.mtime_ns) == (was.size, was.mtime_ns):
                continue
            if file.size != was.size or digest_of(was) != was.digest:
                raise ValueError(
                    f"data.source: {was.path} has changed since {folder / name} was made from it; remove that folder to make "
                    "it again, or tokenize into another folder"
                )


def make_shard(folder: Path, unit: Unit, settings: Settings, tokenizer: Tokenizer, source: Any, report: Report) -> None:
    """Makes the shard of a unit, unless another process has in the meantime.

    Raises:
      ValueError: a file or a row is wrong, or a file has changed since it was listed. OSError: it cannot be written.
    """
    shard = folder / unit.name
    if shard.exists():
        return
    spans = tuple(s if s.streamed else replace(s, digest=digest_of(s)) for s in unit.spans)
    with new_folder(shard, what="the shard", remedy=REMEDY, block=BLOCK) as new:
        if settings.chats is None:
            facts = write_texts(new, texts_of_unit(unit, settings.text_key, source), settings.dtype, tokenizer, report)
        else:
            chats = Chats(**settings.chats)
            rows = rows_of([_range(span) for span in unit.spans], chats.key)
            facts = write_conversations(new, rows, chats, tokenizer, settings.dtype, report)
        tokenizer_facts = {"tokenizer": settings.fingerprint} | (settings.special_tokens or {})
        new.facts = {**facts, **tokenizer_facts, "sources": Unit(spans).facts()}
        for span in unit.spans:
            now = None if span.streamed else span_of(path_of(span.path))
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
        other = [key for key, id in (settings.special_tokens or {}).items() if facts.get(key) != id]
        if other:
            raise ValueError(f"{folder / name} was made with another {' and '.join(other)}; remove that folder")
        shards.append({"name": name, "checksum": checksum_of(content), **facts})
    _check_complete(folder, shards)
    shards.sort(key=lambda s: [(Path(p["path"]), p["begin"]) for p in s["sources"]])
    whole = joined(shards) if settings.chats is not None else {}
    # Of the files, enough to tell where a shard comes from: all of them stand in its own meta.json.
    shards = [{**s, "sources": s["sources"][:2], "num_sources": len(s["sources"])} for s in shards if s["documents"]]
    if not shards:
        none = none_left(whole["skipped"]) if whole else "the files hold no text"
        raise ValueError(f"source = {plan.source!r}: {none}")
    if sum(s.get("of_text", s["tokens"] - s["documents"]) for s in shards) == 0:
        raise ValueError(f"source = {plan.source!r}: the tokenizer has no tokens for any of its text")
    chats = {}
    if settings.chats is not None:
        chats = {"chats": settings.chats, "conversations": whole}
    content = {
        "format": settings.format,
        "fingerprint": fingerprint_of(settings.fingerprint, settings.dtype.name, shards),
        "tokenizer": settings.own,
        "dtype": settings.dtype.name,
        "text_key": settings.text_key,
        "documents": sum(s["documents"] for s in shards),
        "tokens": sum(s["tokens"] for s in shards),
        "shards": shards,
        **chats,
    }
    new = folder / f"{MANIFEST}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with writing(folder):
            new.write_text(json.dumps({"content": content, "checksum": checksum_of(content)}, indent=1))
            os.replace(new, folder / MANIFEST)
    finally:
        new.unlink(missing_ok=True)
    return content


def _check_complete(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Raises ValueError if a source has a range that no shard was made from, or one that two were."""
    spans = sorted((s for shard in shards for s in shard["sources"]), key=lambda s: (s["path"], s["begin"], s["end"]))
    for path, ranges in itertools.groupby(spans, key=lambda s: s["path"]):
        ranges = list(ranges)
        if Span(**ranges[0]).streamed:
            whole = [s["begin"] for s in ranges] == list(range(ranges[0]["end"]))
        else:
            ends = [0, *(s["end"] for s in ranges)]
            whole = [s["begin"] for s in ranges] == ends[:-1] and ends[-1] == ranges[0]["size"]
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
    special_tokens: SpecialTokens = BY_FILES,
) -> dict[str, Any]:
    """Returns the content of `dataset.json`, of a dataset made or completed by this process alone.

    Raises:
      ValueError: as `make_plan`, `make_shard` and `write_manifest`. OSError: it cannot be written.
    """
    sizes = {"shard_bytes": shard_bytes, "sample_bytes": sample_bytes}
    how = {"tokenizer": tokenizer, "special_tokens": special_tokens, "text_key": text_key, "asked": asked}
    plan = make_plan(folder, source, **how, **sizes)
    used = tokenizer_of(folder, plan.settings.own)
    for unit in plan.todo:
        make_shard(folder, unit, plan.settings, used, source, lambda characters: None)
    return write_manifest(plan)
