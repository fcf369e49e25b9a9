"""What a model scores on RULER's tasks at a length, prompts of all tasks sharing its batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ejdist.evaluation.decoding import decode
from ejdist.evaluation.ruler.samples import Generator, Sample
from ejdist.evaluation.ruler.scoring import Scored, string_match
from ejdist.training.forward import Evaluator


def measure_ruler(
    evaluator: Evaluator, generators: Sequence[Generator], count: int, generate: bool = True
) -> Iterator[list[Scored]]:
    """Yields the answers of each task, in the order of the prompts, as soon as it is finished. Call it on all hosts.

    Args:
      evaluator: of the generators' length.
      count: prompts of each task, at least 1.
      generate: False only scores right answers, by teacher forcing.

    Raises:
      ValueError: a length has no room for a prompt, or the evaluator has another length.
    """
    if count < 1 or {g.length for g in generators} - {evaluator.length}:
        raise ValueError(f"count = {count} must be at least 1, and generators be of {evaluator.length} tokens")
    of = {g.task.name: g for g in generators}
    answers: dict[str, list[Scored]] = {name: [] for name in of}

    def scored(sample: Sample, ids: Sequence[int]) -> tuple[str, float]:
        generator = of[sample.task]
        text = generator.tokenizer.decode(ids)
        return text, string_match(text, sample.references, generator.task.match)

    def enough(sample: Sample, ids: list[int]) -> bool:
        return scored(sample, ids)[1] == 1  # more text takes nothing away

    prompts = itertools.chain.from_iterable((g.make(i) for i in range(count)) for g in generators)
    ends = generators[0].tokenizer.stop_ids if generators else ()
    for sample, answer in decode(evaluator, prompts, ends, enough, generate):
        text, score = scored(sample, answer.ids) if generate else (None, None)
        mine = answers[sample.task]
        mine.append(Scored(sample, answer, text, score))
        if len(mine) == count:
            yield sorted(mine, key=lambda one: one.sample.number)
