"""What a model writes, token by token, through `ejdist.generation`: where the other measures here only score right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ejdist.evaluation.recall import Cell, Prompts
from ejdist.generation.requests import Result


def written(engine: Any, prompts: Sequence[np.ndarray], max_tokens: int) -> list[Result]:
    """Returns what an `Engine` writes after each prompt: the most likely tokens. Call it on all hosts.

    Raises:
      ValueError: a prompt is empty, too long, or of another tokenizer; says which one.
    """
    numbers = []
    for i, ids in enumerate(prompts):
        try:
            numbers.append(engine.submit(ids, max_tokens=max_tokens, temperature=0))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
    results: dict[int, Result] = {}
    while not engine.idle:
        engine.step()
        results |= engine.results()
    return [results[number] for number in numbers]


def measure_spelled(engine: Any, prompts: Prompts, depths: Sequence[float], examples: int) -> list[Cell]:
    """Returns a cell of the task "spelled" for each depth, each of `examples` prompts, whose values are written by an `Engine`
    that no token ends. Log-probabilities are those of what is written."""
    asked = [prompts.make(depth, i) for depth in depths for i in range(examples)]
    count = prompts.value_tokens
    results = written(engine, [row[:-count] for row, _ in asked], count)
    hits = np.array([np.asarray(one.tokens) == answer for one, (_, answer) in zip(results, asked, strict=True)])
    scores = np.array([sum(one.log_probabilities) for one in results])
    cells = []
    for i, depth in enumerate(depths):
        mine = slice(i * examples, (i + 1) * examples)
        right, tokens, score = int(hits[mine].all(axis=1).sum()), float(hits[mine].mean()), float(scores[mine].mean())
        cells.append(Cell("spelled", prompts.length, float(depth), examples, right, tokens, score))
    return cells
