"""Text to batches. The global batch of a step is a pure function of (seed, step), whatever the number of hosts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.paths import check_folder
from ejdist.sections import compared, operational
from ejdist.training.chats.special_tokens import SpecialTokens, ends_of
from ejdist.training.data.conversation_keys import Asked, one_of
from ejdist.training.data.corpus import Corpus, build_corpus
from ejdist.training.data.dataset import OWN, Dataset, is_dataset, open_dataset
from ejdist.training.data.hub import is_stream
from ejdist.training.data.hub_dataset import hub_dataset
from ejdist.training.data.mixture import MixedRows, Mixture, check_sections, counts_of
from ejdist.training.data.own_source import OwnRows, own_source
from ejdist.training.data.packing import Packing, Rows
from ejdist.training.data.shard_packing import CorpusShard, Cut, Whole
from ejdist.training.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["CURSOR", "Begin", "Corpus", "Data", "DataSection", "build", "described_key"]


@dataclass
class DataSection:
    """The `data` section of a recipe. What a run is compared by when it goes on is the data cursor of its checkpoint: the
    content of the corpus and the tokenizer, which may have moved."""

    # The folder of a dataset that launch.tokenize made; or "stdlib", "example_chats", a glob of files (text, jsonl, jsonl.gz,
    # parquet) or a list of globs, which are tokenized at the start; hf:NAME[:SPLIT]; or NAME:REST of a source that a plugin
    # registers.
    source: Any = compared("stdlib", recorded=True)
    # Instead of source: a list of {source, weight}, and text_key, format, loss_on and chat_template where they differ.
    mixture: Any = compared(None, recorded=True)
    weights_by: str = compared("rows", recorded=True)  # what the weights of a mixture are shares of: rows, or tokens
    # What rows are: text; messages, completion or ids, see the README; auto: what the first row has, which the run says.
    format: str = compared("text", recorded=True)
    # Of conversations. What is trained: assistant, last, all, or spans; null: assistant, and what rows of ids say.
    loss_on: str | None = compared(None, recorded=True)
    chat_template: str | None = compared(None, recorded=True)  # a file, or chatml; null: that of the tokenizer's folder
    chat_template_kwargs: Any = compared(None)  # more variables of the template: {enable_thinking: false}
    # The date of templates that write one, as 2026-01-31; null: that of the first start.
    chat_date: str | None = compared(None)
    on_error: str = compared("stop")  # a row that is wrong: stop or skip
    too_long: str = compared("stop", recorded=True)  # a conversation that is longer than a row: stop, skip or truncate
    text_key: str = compared("text", recorded=True)  # the key or column of jsonl and parquet rows
    # How text becomes tokens: bytes, bpe:SIZE (trained on the corpus), a tokenizer.json or a folder that has one, or dataset:
    # the dataset's own.
    tokenizer: str = compared("bytes", recorded=True)
    # The token before a document: auto, as the tokenizer's folder says; null for none.
    bos: str | None = compared("auto", recorded=True)
    # The token behind a document of text: auto, as its folder says; null for none.
    eos: str | None = compared("auto", recorded=True)
    packing: str = compared("cut", recorded=True)  # documents at the end of a row: cut, or whole if they fit into a row
    sequence_length: int = compared(2048)  # tokens of a row
    global_batch: int = compared(4)  # rows of a step, over all devices
    prefetch: int = operational(4)  # batches read ahead
    cache_dir: str | None = operational(
        None
    )  # folder for tokenized corpora; default: $EJDIST_CACHE_DIR or ~/.cache/ejdist

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; what is wrong with the files is told where they are opened."""
        _check_how(self.packing, self.prefetch, self.too_long)
        one_of("weights_by", self.weights_by, ("rows", "tokens"))
        self.conversations().check()
        for key, least in (("sequence_length", 2), ("global_batch", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.{key} must be at least {least}, got {getattr(self, key)}")

    def special_tokens(self) -> SpecialTokens:
        """Returns what is asked for at both ends of a document."""
        return SpecialTokens(self.bos, self.eos)

    def conversations(self, part: dict[str, Any] | None = None) -> Asked:
        """Returns what this says of conversations, or what a source of a mixture says instead."""
        own = {f.name: getattr(self, f.name) for f in fields(Asked)}
        return Asked(**own | {name: value for name, value in (part or {}).items() if name in own})


def _check_how(packing: str, prefetch: int, too_long: str) -> None:
    if packing not in ("cut", "whole"):
        raise ValueError(f"data.packing = {packing!r} is unknown; use cut or whole")
    if prefetch < 1:
        raise ValueError(f"data.prefetch must be at least 1 batch, got {prefetch}")
    one_of("too_long", too_long, ("stop", "skip", "truncate"))


@dataclass(frozen=True)
class Begin:
    """Where a run began to read data: with batch number `batch`, when `used` tokens of rows were read of each source."""

    batch: int = 0
    used: dict[str, int] = field(default_factory=dict)


class Data:
    """Batches of a packed corpus: int32 [rows, length] arrays tokens, targets, positions, segment_ids."""

    def __init__(
        self,
        corpus: Corpus | Dataset | Mixture,
        *,
        sequence_length: int,
        global_batch: int,
        seed: int,
        prefetch: int = 4,
        packing: str = "cut",
        too_long: str = "stop",
        cache_dir: str | os.PathLike | None = None,
        guessed: bool = False,
        begin: Begin = Begin(),
    ) -> None:
        _check_how(packing, prefetch, too_long)
        if global_batch < 1:
            raise ValueError(f"data.global_batch must be positive, got {global_batch}")
        self.corpus, self.global_batch, self.seed, self.prefetch = corpus, global_batch, seed, prefetch
        cache = Path(cache_dir or default_cache_dir())
        self._how: dict[str, Any] = {"packing": packing, "too_long": too_long, "cache_dir": cache}
        self.begin = begin
        # Rows, not tokens: of another length they are cut and shuffled anew.
        self._first = [-(-begin.used.get(name, 0) // sequence_length) for name in self.sources]
        self.packing = _rows_of(corpus, sequence_length, seed, **self._how, first=self._first)
        self._how["guessed"] = self._guessed = guessed

    def resized(self, sequence_length: int, global_batch: int) -> Data:
        """Returns the data of the same corpus, seed and packing in batches of another size: itself, where it has that."""
        if (sequence_length, global_batch) == (self.packing.length, self.global_batch):
            return self
        return self._like(sequence_length=sequence_length, global_batch=global_batch)

    def _like(self, **other: Any) -> Data:
        own: dict[str, Any] = {"sequence_length": self.packing.length, "global_batch": self.global_batch}
        own |= {"seed": self.seed, "prefetch": self.prefetch, **self._how}
        return Data(self.corpus, **own | other)

    def after(self, cursor: dict[str, Any], number: int) -> Data:
        """Returns the data as a run reads it on that has read up to batch `number` of what its checkpoint's cursor describes.

        The same batches go on. Otherwise the data begins here, each source where the run has left it, counted in tokens.
        """
        # Checkpoints from before sources were counted: all batches were of one data.
        old = {str(cursor["corpus"]): number * cursor["global_batch"] * cursor["sequence_length"]}
        now, same = self.cursor(0), ("corpus", "order", "seed", "sequence_length", "global_batch")
        if all(now[name] == cursor.get(name, Packing.order) for name in same):
            begin = Begin(*cursor.get("begin", (0, {})))
        else:
            begin = Begin(number, cursor.get("used", old))
        return self if begin == self.begin else self._like(begin=begin)

    @property
    def sources(self) -> list[str]:
        """The names by which what was read of each source is counted."""
        names = [corpus.fingerprint for corpus in self._corpora]
        return [f"{name}#{n}" if (n := names[:i].count(name)) else name for i, name in enumerate(names)]

    def used(self, number: int) -> dict[str, int]:
        """Returns how many tokens of rows a run has read of each source before batch `number`, in other stages too."""
        count = max(0, number - self.begin.batch) * self.global_batch
        rows = self.packing.rows_of_parts(count) if isinstance(self.packing, MixedRows) else [count]
        ends = (first + more for first, more in zip(self._first, rows, strict=True))
        return self.begin.used | {n: end * self.packing.length for n, end in zip(self.sources, ends, strict=True)}

    @property
    def vocab_size(self) -> int:
        return self.corpus.tokenizer.vocab_size

    @property
    def num_tokens(self) -> int:
        return self.corpus.num_tokens

    @property
    def tokens_of_sources(self) -> list[int]:
        """The tokens of each source."""
        return [corpus.num_tokens for corpus in self._corpora]

    @property
    def has_conversations(self) -> bool:
        return any(corpus.chats is not None for corpus in self._corpora)

    @property
    def _corpora(self) -> tuple[Corpus | Dataset, ...]:
        return self.corpus.parts if isinstance(self.corpus, Mixture) else (self.corpus,)

    def notes(self, key: str = "data.source") -> list[str]:
        """Returns lines that say what rows of conversations were taken for, and which were not taken. Of text there is one
        where data.format=auto (`guessed`). `key`: that names the source."""
        parts = self.packing.parts if isinstance(self.packing, MixedRows) else [self.packing]
        found = []
        for i, (corpus, rows) in enumerate(zip(self._corpora, parts, strict=True)):
            lines = corpus.describe() + (rows.describe() if isinstance(rows, Whole) else [])
            if self._guessed and corpus.chats is None:
                lines.append("text, all of which is trained (data.format=auto)")
            where = f"data.mixture[{i}]" if len(parts) > 1 else key
            found += [f"{where}: {line}" for line in lines]
        return found

    def ends(self) -> str | None:
        """Returns a line that says which tokens begin and end a document; None for bytes, whose end has no name."""
        bos, eos = ends_of(self.corpus.tokenizer).values()
        if self.corpus.tokenizer.fingerprint == ByteTokenizer.fingerprint:
            return None
        return f"documents begin with {bos or 'no token'} (data.bos), and texts end with {eos or 'none'} (data.eos)"

    @property
    def steps_per_epoch(self) -> float:
        return self.packing.rows_per_epoch / self.global_batch

    @property
    def rows_before_again(self) -> float:
        """Rows that come before one comes again. No number of a mixture's: its weights say how often each source comes."""
        return math.inf if isinstance(self.corpus, Mixture) else self.packing.rows_per_epoch

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Returns the batch of a step, counted from 0, or only those of its rows: what one host needs."""
        at = step - self.begin.batch
        if at < 0:
            raise ValueError(f"step must be {self.begin.batch or '0'} or more, got {step}")
        first = 0 if isinstance(self.packing, MixedRows) else self._first[0]
        numbers = range(first + at * self.global_batch, first + (at + 1) * self.global_batch)[rows]
        made = [self.packing.row(i) for i in numbers]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}

    def iterator(
        self, start: int, stop: int, rows: slice = slice(None), number: Callable[[int], int] = lambda step: step
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields `batch(number(step), rows)` for step = start, ..., stop - 1, read ahead by threads."""
        import grain

        steps = grain.MapDataset.range(start, stop).map(lambda step: self.batch(number(int(step)), rows))
        options = grain.ReadOptions(num_threads=min(2, self.prefetch), prefetch_buffer_size=self.prefetch)
        return iter(steps.to_iter_dataset(options))

    def cursor(self, step: int, number: int | None = None) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the data: the next step, what its batches are made from, and what was read.

        Args:
          number: of the next batch; default: `step`, for a run that has skipped none.
        """
        return {
            "step": step,
            "begin": [self.begin.batch, self.begin.used],
            "used": self.used(step if number is None else number),
            "seed": self.seed,
            "corpus": self.corpus.fingerprint,
            "tokenizer": self.corpus.tokenizer.fingerprint,
            **ends_of(self.corpus.tokenizer),
            "sequence_length": self.packing.length,
            "global_batch": self.global_batch,
            "order": self.packing.order,
        } | ({"conversations": self._conversations()} if self.has_conversations else {})

    def _conversations(self) -> list[dict[str, Any] | None]:
        return [None if corpus.chats is None else corpus.chats.description for corpus in self._corpora]

    def changes(self, cursor: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns the entries of `CURSOR` in which a checkpoint's cursor is of other batches: name -> (was, is)."""
        now = self.cursor(0)
        # What there was before it was recorded: one order, and no BOS; another EOS shows in the corpus.
        cursor = {"order": Packing.order, "bos": None, "eos": now["eos"], **cursor}
        changed = {name: (cursor.get(name), now.get(name)) for name in CURSOR if cursor.get(name) != now.get(name)}
        if {"tokenizer", "bos", "eos", "conversations"} & set(changed):  # the same files have become other tokens
            changed.pop("corpus", None)
        return changed

    def check_cursor(self, cursor: dict[str, Any]) -> None:
        """Raises ValueError, naming the key, if the batches of a resumed run would not be those of the run so far."""
        if changed := self.changes(cursor):
            told = "; ".join(f"{described_key(name)}: was {was}, is {now}" for name, (was, now) in changed.items())
            raise ValueError(f"this run cannot resume with other data: {told}; restore it, or start in another run.dir")


# Of the entries of a cursor by which batches are compared: the keys that they follow from, and what else may have changed.
CURSOR = {
    "seed": (("run.seed",), ""),
    "corpus": (("data.source", "data.mixture", "data.weights_by"), " (its files have changed)"),
    "tokenizer": (("data.tokenizer",), ""),
    "bos": (("data.bos",), ""),
    "eos": (("data.eos",), ""),
    "sequence_length": (("data.sequence_length",), ""),
    "global_batch": (("data.global_batch",), ""),
    "order": (("data.packing", "data.too_long"), " (how rows follow from the documents)"),
    "conversations": (("data.format", "data.loss_on", "data.chat_template", "data.chat_date"), ""),
}


def described_key(name: str) -> str:
    """Returns the keys that an entry of a cursor follows from, for a message."""
    keys, why = CURSOR[name]
    return " or ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys) + why


def _rows_of(
    corpus: Any, length: int, seed: int, packing: str, too_long: str, cache_dir: Path, first: list[int] | None = None
) -> Rows:
    """Returns the rows of a corpus. Raises ValueError: a size is wrong, or conversations do not fit."""
    if isinstance(corpus, Mixture):
        rows = [_rows_of(part, length, seed, packing, too_long, cache_dir) for part in corpus.parts]
        return MixedRows(rows, corpus.counts_for(rows), seed, first)
    if isinstance(corpus, OwnRows):
        return corpus.rows(length, seed)
    if packing == "cut" and corpus.chats is not None:
        raise ValueError("data.packing = cut would divide conversations between rows; set data.packing=whole")
    if isinstance(corpus, Corpus) and packing == "cut":
        return Packing(corpus, length, seed)
    shards = [CorpusShard(corpus)] if isinstance(corpus, Corpus) else corpus.shards
    if packing == "cut":
        return Cut(shards, length, seed)
    return Whole(shards, length, seed, corpus.fingerprint, cache_dir, too_long)


def default_cache_dir() -> str:
    """Returns where tokenized corpora are kept: $EJDIST_CACHE_DIR, else ~/.cache/ejdist."""
    return os.environ.get("EJDIST_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "ejdist")


def build(section: DataSection, *, seed: int, tokenizer: Tokenizer | None = None) -> Data:
    """Returns the data of a recipe's section.

    Args:
      tokenizer: for files, instead of the section's; default: the section's.

    Raises:
      ValueError: the files, the tokenizer or a size are wrong; names the key.
    """
    check_folder("data.cache_dir", section.cache_dir)
    cache = Path(section.cache_dir or default_cache_dir()).expanduser()
    if section.mixture is None:
        corpus = _open(section, section.source, section.text_key, cache, section.conversations(), tokenizer)
    else:
        parts = check_sections(section.mixture, section.source)
        weights = [part["weight"] for part in parts]
        counts = counts_of(weights)
        opened = []
        for i, part in enumerate(parts):
            text_key, asked = part.get("text_key", section.text_key), section.conversations(part)
            try:
                asked.check()
                opened.append(_open(section, part["source"], text_key, cache, asked, tokenizer))
            except ValueError as error:
                raise ValueError(f"data.mixture[{i}]: {error}") from error
        ends = ends_of(opened[0].tokenizer)
        for part, other in zip(parts[1:], opened[1:], strict=True):
            if other.tokenizer.fingerprint != opened[0].tokenizer.fingerprint:
                raise ValueError(
                    f"data.mixture: {part['source']!r} has another tokenizer than {parts[0]['source']!r}; tokenize all "
                    "sources with the same tokenizer.json, and name that in data.tokenizer"
                )
            if other_ends := [key for key, token in ends_of(other.tokenizer).items() if token != ends[key]]:
                raise ValueError(
                    f"data.mixture: {part['source']!r} was made with another {' and '.join(other_ends)} than "
                    f"{parts[0]['source']!r}; tokenize all sources with the same"
                )
        corpus = Mixture(tuple(opened), counts, tuple(weights) if section.weights_by == "tokens" else None)
    if all(one.chats is None for one in (corpus.parts if isinstance(corpus, Mixture) else (corpus,))):
        section.conversations().check_used()
    sizes = {"sequence_length": section.sequence_length, "global_batch": section.global_batch}
    how = {
        "packing": section.packing,
        "too_long": section.too_long,
        "cache_dir": cache,
        "guessed": section.format == "auto",
    }
    return Data(corpus, seed=seed, prefetch=section.prefetch, **how, **sizes)


def _open(
    section: DataSection, source: Any, text_key: str, cache: Path, asked: Asked, instead: Tokenizer | None = None
) -> Corpus | Dataset:
    """Returns what one source is: a dataset, or files that are tokenized now or were before. `instead`: for files, replaces the
    tokenizer of that name."""
    tokenizer, special_tokens = section.tokenizer, section.special_tokens()
    if (own := own_source(source)) is not None and own[0].value.rows is not None:
        return OwnRows(source, *own, tokenizer, special_tokens)  # pyrefly: ignore[bad-return]
    if is_stream(source):
        return hub_dataset(source, tokenizer, text_key, cache, asked=asked, special_tokens=special_tokens)
    for one in source if isinstance(source, (list, tuple)) else [source]:
        check_folder("data.source", one if isinstance(one, str) else None)
    check_folder("data.tokenizer", tokenizer)
    folder = Path(source).expanduser() if isinstance(source, str) else None
    if folder is not None and is_dataset(folder):
        return open_dataset(folder, tokenizer, text_key, asked=asked, special_tokens=special_tokens)
    joined = (
        [p for p in source if isinstance(p, str) and is_dataset(Path(p).expanduser())]
        if isinstance(source, list)
        else []
    )
    if joined:
        raise ValueError(
            f"data.source lists {joined[0]!r}, which is a dataset; join datasets with data.mixture, by weight"
        )
    if tokenizer == OWN and instead is None:
        given = "data.source is not set" if source is None else f"data.source = {source!r} is not a dataset"
        raise ValueError(
            f"data.tokenizer = {OWN!r} is the tokenizer of a dataset, but {given}: make one with python -m launch.tokenize and "
            "give its folder, or name a tokenizer"
        )
    chats = asked.chats(source, tokenizer, text_key)
    return build_corpus(source, instead or tokenizer, text_key, cache, chats=chats, asked=special_tokens)
