"""Evaluation while a run trains: the loss of held-out data by position, on the run's own mesh and with its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ejdist.training.chats.special_tokens import ends_of
from ejdist.training.data import Data
from ejdist.training.data import build as build_data
from ejdist.training.forward import Evaluator, without_noise
from ejdist.training.positions import batches_once, loss_by_octave
from ejdist.training.program import Program, TrainSections
from ejdist.training.samples import Samples


def data_of_evaluation(sections: TrainSections, trained: Data, others: Sequence[Data] = ()) -> Data | None:
    """Returns the data of `evaluation.data`, with the tokenizer and packing of the data that the run trains on; None if the
    run evaluates nothing.

    Args:
      others: the data of other stages.

    Raises:
      ValueError: the files are wrong, have other tokens, or are what the run trains on; names the key.
    """
    s = sections
    if not s.evaluation.every:
        return None
    section = replace(s.data, source=s.evaluation.data, mixture=None)
    try:
        data = build_data(section, seed=s.run.seed, tokenizer=trained.corpus.tokenizer)
    except ValueError as error:
        raise ValueError(f"evaluation.data: {error}") from error
    if data.corpus.tokenizer.fingerprint != trained.corpus.tokenizer.fingerprint:
        raise ValueError(
            f"evaluation.data = {s.evaluation.data!r} is tokenized with another tokenizer than the run's data; tokenize it "
            "with the same one"
        )
    if ends_of(data.corpus.tokenizer) != ends_of(trained.corpus.tokenizer):
        raise ValueError(
            f"evaluation.data = {s.evaluation.data!r} was made with another BOS or EOS than the run's data; tokenize it with "
            "the same data.bos and data.eos"
        )
    if any(data.corpus.fingerprint in (one.corpus.fingerprint, *one.sources) for one in (trained, *others)):
        raise ValueError(
            f"evaluation.data = {s.evaluation.data!r} is a corpus that the run trains on; name files that are held out"
        )
    return data


@dataclass(frozen=True)
class HeldOut:
    """The evaluation of a stage of a run.

    Attributes:
      every: steps between evaluations.
      last: the run's last step, after which it is evaluated too.
      batches: most batches of an evaluation. Data that is shorter is used once.
      samples: what it writes then; None for nothing.
    """

    data: Data
    evaluator: Evaluator
    every: int
    last: int
    batches: int
    samples: Samples | None = None

    def due(self, step: int) -> bool:
        """Returns whether the state after this step is evaluated; step 0 is the initial state."""
        return step % self.every == 0 or step == self.last

    def measure(self, state: Any, alive: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Returns the row of a state for `evaluation.jsonl`, without its step. Call it on all hosts.

        Args:
          alive: called before each batch.
        """
        began = time.perf_counter()

        def batches() -> Iterator[dict[str, Any]]:
            for batch in batches_once(self.data, self.batches):
                alive()
                yield batch

        self.evaluator.use(state.params, state.buffers)
        try:
            octaves = loss_by_octave(self.evaluator, batches())
        finally:
            self.evaluator.use(None, None)  # the next step is given these arrays to overwrite
        written = {} if self.samples is None else {"samples": self.samples.write(state.params, state.buffers, alive)}
        row, counted = octaves["row"], bool(octaves["row"].counts.any())
        return {
            "sequence_length": self.evaluator.length,
            "loss": row.mean if counted else None,
            "tokens": int(row.counts.sum()),
            "seconds": time.perf_counter() - began,
            **{place: of.rows() for place, of in octaves.items()},
            **written,
        }


def evaluation_of(sections: TrainSections, program: Program, data: Data | None) -> HeldOut | None:
    """Returns the evaluation of a stage, yet to be compiled; None if the run evaluates nothing.

    Raises:
      ValueError: the model has no losses of single tokens, or is to write samples and cannot.
    """
    if data is None:
        return None
    s = sections
    quiet = without_noise(s)
    evaluator = Evaluator(quiet, program.mesh, program=program if quiet is s else None)
    sized = data.resized(s.data.sequence_length, s.data.global_batch)
    samples = Samples(s, program, data.corpus.tokenizer) if s.evaluation.samples else None
    return HeldOut(sized, evaluator, s.evaluation.every, s.run.steps, s.evaluation.batches, samples)
