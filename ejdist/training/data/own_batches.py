"""Custom batches, in place of a recipe's data: a function of the step, or an iterable that can be iterated anew."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ejdist.training.data import Begin, Data
from ejdist.training.data.batches import HostRows
from ejdist.training.data.own_source import FIELDS, check_arrays

Batch = Mapping[str, Any]

OWN_BATCHES = "own batches"  # in the place of an order and of a tokenizer, of which nothing is known


class OwnBatches(Data):
    """Batches that the caller makes, with the interface of `Data`.

    Nothing is read ahead: the step waits for them.
    """

    has_conversations = False

    def __init__(
        self,
        batches: Callable[[int], Batch] | Iterable[Batch],
        *,
        sequence_length: int,
        global_batch: int,
        vocab_size: int,
        seed: int,
        fingerprint: str | None = None,
    ) -> None:
        """Args:
          batches: as `ejdist.training.train` takes them.
          fingerprint: of the first batch; default: it is made.

        Raises:
          ValueError: they are neither, can be iterated only once, or the first one is wrong.
        """
        if not callable(batches) and (not isinstance(batches, Iterable) or iter(batches) is batches):
            raise ValueError(
                f"train: argument 'batches' is {type(batches).__name__}; give a function of the step, or an iterable that "
                "begins anew each time, for a run that resumes or rewinds must have its batches again"
            )
        self._batches, self.global_batch, self.seed, self.begin = batches, global_batch, seed, Begin()
        self.packing = SimpleNamespace(length=sequence_length, order=OWN_BATCHES)  # pyrefly: ignore[bad-assignment]
        tokenizer = SimpleNamespace(
            fingerprint=OWN_BATCHES, vocab_size=vocab_size, bos_id=None, eos_id=None, token_of=lambda id: None
        )
        self.corpus = SimpleNamespace(  # pyrefly: ignore[bad-assignment]
            tokenizer=tokenizer, num_tokens=0, fingerprint=fingerprint, chats=None
        )
        if fingerprint is None:
            first = next(self.iterator(0, 1))
            content = b"".join(name.encode() + np.ascontiguousarray(first[name]).tobytes() for name in FIELDS)
            self.corpus.fingerprint = hashlib.sha256(content).hexdigest()[:24]  # pyrefly: ignore[read-only]

    def resized(self, sequence_length: int, global_batch: int) -> OwnBatches:
        """Returns the same batches, which are to have another size."""
        if (sequence_length, global_batch) == (self.packing.length, self.global_batch):
            return self
        sizes = {"sequence_length": sequence_length, "global_batch": global_batch, "seed": self.seed}
        return OwnBatches(self._batches, vocab_size=self.vocab_size, fingerprint=self.corpus.fingerprint, **sizes)

    @property
    def has_squares(self) -> bool:
        """False: a batch has an order of its own."""
        return False

    def notes(self, key: str = "data.source") -> list[str]:
        """Returns a line that says where batches come from."""
        return [f"{key} is not read: train() was given batches"]

    def batch(self, step: int, rows: HostRows = slice(None)) -> dict[str, np.ndarray]:
        """Returns the batch of a step, counted from 0, or only those of its rows. Raises ValueError: it is wrong."""
        return next(self.iterator(step, step + 1, rows))

    def iterator(
        self,
        start: int,
        stop: int,
        rows: HostRows = slice(None),
        number: Callable[[int], int] = lambda step: step,
        then: Callable[[dict[str, np.ndarray]], Any] = lambda batch: batch,
        deal: Callable[[int], np.ndarray] | None = None,
    ) -> Iterator[Any]:
        """Yields `then` of the batch of `number(step)` for step = start, ..., stop - 1. With an iterable, earlier batches are
        passed over. See `Data.iterator`."""
        source, position = None if callable(self._batches) else iter(self._batches), 0
        for step in range(start, stop):
            wanted = number(step)
            if source is None:
                batch = self._batches(wanted)  # pyrefly: ignore[not-callable]
            else:
                for _ in range(position, wanted):
                    next(source, None)
                batch, position = next(source, None), wanted + 1
            yield then(self._checked(batch, wanted, rows if deal is None else deal(wanted)[rows]))

    def _checked(self, batch: Any, step: int, rows: HostRows) -> dict[str, np.ndarray]:
        what = f"train: argument 'batches': batch {step}"
        if batch is None:
            raise ValueError(f"{what} is missing; give as many batches as the run has steps, run.steps")
        if not isinstance(batch, Mapping):
            raise ValueError(f"{what} is {type(batch).__name__}, not a dict of arrays")
        shape = (self.global_batch, self.packing.length)
        whole = {
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
            "segment_ids": np.zeros(shape, np.int32),
            **batch,
        }
        if strange := sorted(set(whole) - set(FIELDS)):
            raise ValueError(f"{what} has {strange[0]!r}, which no step reads; it may have {', '.join(FIELDS)}")
        check_arrays(whole, shape, self.vocab_size, what)
        return {name: np.asarray(whole[name], np.int32)[rows] for name in FIELDS}

    def ends(self) -> None:
        """Batches are tokens already."""

    def used(self, number: int) -> dict[str, int]:
        """Batches are not counted by source."""
        return {}

    def after(self, cursor: dict[str, Any], number: int) -> OwnBatches:
        """Returns the batches for a run that resumes: a batch is identified by its number."""
        return self

    def changes(self, cursor: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns no changes. Raises ValueError if the run so far had other batches, or a recipe's data."""
        if cursor.get("corpus") != self.corpus.fingerprint:
            before = "others" if cursor.get("order") == self.packing.order else "those of a recipe's data"
            raise ValueError(
                f"train: argument 'batches': the first batch is not that of the run so far, which had {before}; restore them, "
                "or start in another run.dir"
            )
        return {}
