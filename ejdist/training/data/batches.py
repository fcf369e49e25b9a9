"""Batches of a packed corpus, and what a checkpoint keeps of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.chats.special_tokens import ends_of
from ejdist.training.data.conversation_keys import one_of
from ejdist.training.data.corpus import Corpus
from ejdist.training.data.dataset import Dataset
from ejdist.training.data.even_packing import Even
from ejdist.training.data.mixture import MIXTURE_BEFORE, MixedRows, Mixture
from ejdist.training.data.own_source import OwnRows
from ejdist.training.data.packing import Packing, Rows, rows_of
from ejdist.training.data.shard_packing import CorpusShard, Cut
from ejdist.training.data.tokenizer import ByteTokenizer
from ejdist.training.data.whole_packing import Whole

# Which rows of a batch: a slice, or their numbers, int [n].
HostRows = slice | np.ndarray
# Values of data.balance.
AUTO, ROWS, NONE = "auto", "rows", "none"


def check_how(packing: str, prefetch: int, too_long: str) -> None:
    if packing not in ("cut", "even", "whole"):
        raise ValueError(f"data.packing = {packing!r} is unknown; use cut, even or whole")
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
        check_how(packing, prefetch, too_long)
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
        arguments: dict[str, Any] = {"sequence_length": self.packing.length, "global_batch": self.global_batch}
        arguments |= {"seed": self.seed, "prefetch": self.prefetch, **self._how}
        return Data(self.corpus, **arguments | other)

    def after(self, cursor: dict[str, Any], number: int) -> Data:
        """Returns the data for a run that has read up to batch `number` of the data that its checkpoint's cursor describes.

        If that is the same data, its batches continue. Otherwise this data begins here, each source where the run left it,
        counted in tokens.
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
    def has_squares(self) -> bool:
        """Whether rows say how long their documents are, see `squares`."""
        return all(hasattr(rows, "squares") for rows in self._parts)

    @property
    def bytes_of_lengths(self) -> int:
        """What a host reads to know the lengths of all documents."""
        return getattr(self.packing, "bytes_of_lengths", 0)

    @property
    def _parts(self) -> Sequence[Rows]:
        return self.packing.parts if isinstance(self.packing, MixedRows) else [self.packing]

    @property
    def _corpora(self) -> tuple[Corpus | Dataset, ...]:
        return self.corpus.parts if isinstance(self.corpus, Mixture) else (self.corpus,)

    def notes(self, key: str = "data.source") -> list[str]:
        """Returns lines that say how rows of conversations were read, and which were passed over, and how even those of
        data.packing=even are. For other text there is one only if data.format=auto (`guessed`). `key`: names the source."""
        described = []
        for i, (corpus, rows) in enumerate(zip(self._corpora, self._parts, strict=True)):
            lines = corpus.describe() + (rows.describe() if isinstance(rows, Even | Whole) else [])
            if self._guessed and corpus.chats is None:
                lines.append("text, all of which is trained (data.format=auto)")
            where = f"data.mixture[{i}]" if len(self._parts) > 1 else key
            described += [f"{where}: {line}" for line in lines]
        return described

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
        """Rows before one comes again; infinity for a mixture, whose weights decide how often each source comes."""
        return math.inf if isinstance(self.corpus, Mixture) else self.packing.rows_per_epoch

    def batch(self, step: int, rows: HostRows = slice(None)) -> dict[str, np.ndarray]:
        """Returns the batch of a step, counted from 0, or only those of its rows: what one host needs."""
        packed = rows_of(self.packing, self._numbers(step, rows))
        return {name: np.stack([row[name] for row in packed]) for name in packed[0]}

    def squares(self, step: int) -> np.ndarray:
        """Returns float64 [global_batch]: of each row of a batch, the sum of the squares of the lengths of its documents."""
        return self.packing.squares(self._numbers(step))  # pyrefly: ignore[missing-attribute]

    def _numbers(self, step: int, rows: HostRows = slice(None)) -> list[int]:
        """Returns the numbers of rows of a batch, among those of the packing."""
        index = step - self.begin.batch
        if index < 0:
            raise ValueError(f"step must be {self.begin.batch or '0'} or more, got {step}")
        first = 0 if isinstance(self.packing, MixedRows) else self._first[0]
        within = range(self.global_batch)[rows] if isinstance(rows, slice) else rows
        return [first + index * self.global_batch + int(i) for i in within]

    def iterator(
        self,
        start: int,
        stop: int,
        rows: HostRows = slice(None),
        number: Callable[[int], int] = lambda step: step,
        then: Callable[[dict[str, np.ndarray]], Any] = lambda batch: batch,
        deal: Callable[[int], np.ndarray] | None = None,
    ) -> Iterator[Any]:
        """Yields `then(batch(number(step), rows))` for step = start, ..., stop - 1, made ahead by threads.

        Args:
          deal: of a batch's number, which of its rows lies at each place, int64 [global_batch]; `rows` are places then.
        """
        import grain

        def made(step: int) -> Any:
            wanted = number(step)
            return then(self.batch(wanted, rows if deal is None else deal(wanted)[rows]))

        steps = grain.MapDataset.range(start, stop).map(lambda step: made(int(step)))
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
        """Returns the entries of `CURSOR` in which a checkpoint's cursor describes other batches: name -> (was, is)."""
        now = self.cursor(0)
        # Checkpoints from before these were recorded had one order and no BOS; another EOS shows in the corpus.
        cursor = {"order": Packing.order, "bos": None, "eos": now["eos"], **cursor}
        changed = {name: (cursor.get(name), now.get(name)) for name in CURSOR if cursor.get(name) != now.get(name)}
        if {"tokenizer", "bos", "eos", "conversations"} & set(changed):  # the same files have become other tokens
            changed.pop("corpus", None)
        return changed

    def check_cursor(self, cursor: dict[str, Any]) -> None:
        """Raises ValueError, naming the key, if the batches of a resumed run would not be those of the run so far."""
        if changed := self.changes(cursor):
            raise ValueError(
                f"this run cannot resume with other data: {described(changed)}, or start in another run.dir"
            )


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


def described(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns how entries of a cursor have changed, and how to have what they were, for a message."""
    from_before = {name: str(was).startswith(f"{MIXTURE_BEFORE} ") for name, (was, _) in changed.items()}
    told = [
        "data.mixture: the run began before version 0.2.0, in which a source of a mixture had its rows in another order"
        if from_before[name]
        else f"{described_key(name)}: was {was}, is {now}"
        for name, (was, now) in changed.items()
    ]
    how = ["restore it"] if not all(from_before.values()) else []
    how += ["finish the run with the version that it began with"] if any(from_before.values()) else []
    return f"{'; '.join(told)}; {', '.join(how)}"


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
    if packing in ("cut", "even") and corpus.chats is not None:
        raise ValueError(f"data.packing = {packing} would divide conversations between rows; set data.packing=whole")
    if isinstance(corpus, Corpus) and packing == "cut":
        return Packing(corpus, length, seed)
    shards = [CorpusShard(corpus)] if isinstance(corpus, Corpus) else corpus.shards
    if packing == "cut":
        return Cut(shards, length, seed)
    if packing == "even":
        return Even(shards, length, seed, corpus.fingerprint, cache_dir)
    return Whole(shards, length, seed, corpus.fingerprint, cache_dir, too_long)


def default_cache_dir() -> str:
    """Returns where tokenized corpora are kept: $EJDIST_CACHE_DIR, else ~/.cache/ejdist."""
    return os.environ.get("EJDIST_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "ejdist")
