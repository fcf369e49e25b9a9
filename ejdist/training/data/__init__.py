"""Text to batches. The global batch of a step is a pure function of (seed, step), whatever the number of hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.training.data.corpus import Corpus, build_corpus
from ejdist.training.data.packing import Packing

__all__ = ["Corpus", "Data", "DataSection", "build"]


@dataclass
class DataSection:
    """The `data` section of a recipe."""

    source: Any = "stdlib"  # "stdlib", a glob of files (text, jsonl, jsonl.gz, parquet), or a list of globs
    text_key: str = "text"  # the key or column of jsonl and parquet rows
    tokenizer: str = "bytes"  # bytes, bpe:SIZE (trained on the corpus), or the path of a tokenizer.json
    sequence_length: int = 2048  # tokens of a row
    global_batch: int = 4  # rows of a step, over all devices
    prefetch: int = 4  # batches read ahead
    cache_dir: str | None = None  # tokenized corpora; default: $EJDIST_CACHE_DIR or ~/.cache/ejdist


class Data:
    """Batches of a packed corpus: int32 [rows, length] arrays tokens, targets, positions, segment_ids."""

    def __init__(
        self, corpus: Corpus, *, sequence_length: int, global_batch: int, seed: int, prefetch: int = 4
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"data.prefetch must be at least 1 batch, got {prefetch}")
        if global_batch < 1:
            raise ValueError(f"data.global_batch must be positive, got {global_batch}")
        self.corpus, self.global_batch, self.seed, self.prefetch = corpus, global_batch, seed, prefetch
        self.packing = Packing(corpus, sequence_length, seed)

    @property
    def vocab_size(self) -> int:
        return self.corpus.tokenizer.vocab_size

    @property
    def num_tokens(self) -> int:
        return int(self.corpus.offsets[-1])

    @property
    def steps_per_epoch(self) -> float:
        return self.packing.rows_per_epoch / self.global_batch

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Returns the batch of a step, counted from 0, or only those of its rows: what one host needs."""
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        numbers = range(step * self.global_batch, (step + 1) * self.global_batch)[rows]
        made = [self.packing.row(i) for i in numbers]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}

    def iterator(self, start: int, stop: int, rows: slice = slice(None)) -> Iterator[dict[str, np.ndarray]]:
        """Yields `batch(step, rows)` for step = start, ..., stop - 1, read ahead by threads."""
        import grain

        steps = grain.MapDataset.range(start, stop).map(lambda step: self.batch(int(step), rows))
        options = grain.ReadOptions(num_threads=min(2, self.prefetch), prefetch_buffer_size=self.prefetch)
        return iter(steps.to_iter_dataset(options))

    def cursor(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the data: the next step, and what its batches are made from."""
        return {
            "step": step,
            "seed": self.seed,
            "corpus": self.corpus.fingerprint,
            "tokenizer": self.corpus.tokenizer.fingerprint,
            "sequence_length": self.packing.length,
            "global_batch": self.global_batch,
        }

    def check_cursor(self, cursor: dict[str, Any]) -> None:
        """Raises ValueError, naming the key, if the batches of a resumed run would not be those of the run so far."""
        keys = {
            "seed": "run.seed",
            "corpus": "data.source (its files have changed)",
            "tokenizer": "data.tokenizer",
            "sequence_length": "data.sequence_length",
            "global_batch": "data.global_batch",
        }
        now = self.cursor(cursor.get("step", 0))
        changed = [f"{key}: was {cursor.get(n)}, is {now[n]}" for n, key in keys.items() if cursor.get(n) != now[n]]
        if changed:
            raise ValueError(
                f"this run cannot go on with other data: {'; '.join(changed)}; restore it, or start in another run.dir"
            )


def default_cache_dir() -> str:
    """Returns where tokenized corpora are kept: $EJDIST_CACHE_DIR, else ~/.cache/ejdist."""
    return os.environ.get("EJDIST_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "ejdist")


def build(section: DataSection, *, seed: int) -> Data:
    """Returns the data of a recipe's section.

    Raises:
      ValueError: the files, the tokenizer or a size are wrong; names the key.
    """
    cache = section.cache_dir or default_cache_dir()
    corpus = build_corpus(section.source, section.tokenizer, section.text_key, cache)
    sizes = {"sequence_length": section.sequence_length, "global_batch": section.global_batch}
    return Data(corpus, seed=seed, prefetch=section.prefetch, **sizes)
