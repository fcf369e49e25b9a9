"""Recall from the context: a needle in a haystack of text, and one of many key-value pairs.

Prompts consist of token ids, for any tokenizer. A key and a value are a few random ids; somewhere in the prompt they are side
by side, at its end the key is repeated, and the value must follow. "needle": one pair in text. "recall": nothing but pairs. The
value's tokens are given as they come, so one forward pass scores all of them (teacher forcing): an answer is right where each
of its tokens is the most likely one, which is when greedy generation would write it.

A prompt is a pure function of (seed, task, length, depth, number).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.training.forward import Evaluator

TASKS = ("needle", "recall")
_ATTEMPTS = 100  # at a key that stands nowhere else


@dataclass(frozen=True)
class Prompts:
    """The prompts of a task at a length.

    Attributes:
      task: "needle" or "recall".
      length: tokens of a row; the last token of the answer is the target of the last one.
      text: int [many], tokens that the haystack is taken from; keys and values consist of its ids.
      key_tokens, value_tokens: ids of a key, and of a value.
      seed: of everything drawn.
    """

    task: str
    length: int
    text: np.ndarray
    key_tokens: int = 4
    value_tokens: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, naming the argument, where no prompt is possible."""
        if self.task not in TASKS:
            raise ValueError(f"tasks: {self.task!r} is unknown; use {' or '.join(TASKS)}")
        if self.key_tokens < 1 or self.value_tokens < 1:
            raise ValueError(
                f"key_tokens = {self.key_tokens} and value_tokens = {self.value_tokens} must be at least 1 token"
            )
        if self._body < self._pair:
            raise ValueError(
                f"lengths: a prompt of {self.length} tokens is too short for a key and value of {self._pair} and the question; "
                f"use at least {2 * self._pair - 1}, or fewer key_tokens and value_tokens"
            )
        if len(self._ids) ** self.key_tokens < 4 * self.pairs:
            raise ValueError(
                f"key_tokens = {self.key_tokens}: the data has {len(self._ids)} different tokens, too few for the "
                f"{self.pairs} different keys of {self.length} tokens; use more key_tokens, or other data"
            )

    @property
    def _pair(self) -> int:
        return self.key_tokens + self.value_tokens

    @property
    def _body(self) -> int:
        """Tokens before the question."""
        return self.length + 1 - self._pair

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        return np.unique(self.text)

    @property
    def pairs(self) -> int:
        """Pairs in a prompt."""
        return self._body // self._pair if self.task == "recall" else 1

    def make(self, depth: float, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32 [length + 1], the prompt and its answer; int32 [value_tokens], the answer).

        Args:
          depth: 0 for the pair at the start, 1 for just before the question.
          number: which of the prompts.
        """
        rng = np.random.default_rng([self.seed, TASKS.index(self.task), self.length, round(depth * 10**6), number])
        for _ in range(_ATTEMPTS):
            row = self._drawn(rng, depth)
            asked = row[-self._pair : -self.value_tokens]
            windows = np.lib.stride_tricks.sliding_window_view(row[: -self.value_tokens], self.key_tokens)
            if (windows == asked).all(axis=1).sum() == 2:  # in its pair and in the question, and nowhere else by chance
                return row, row[-self.value_tokens :]
        raise ValueError(
            f"key_tokens = {self.key_tokens}: every drawn key also occurs elsewhere in {self.length} tokens too; use more"
        )

    def _drawn(self, rng: np.random.Generator, depth: float) -> np.ndarray:
        keys, values = self._keys(rng), rng.choice(self._ids, (self.pairs, self.value_tokens))
        pairs = np.concatenate([keys, values], axis=1)
        if self.task == "needle":
            start, size = int(rng.integers(len(self.text))), self._body - self._pair
            around, asked = self.text.take(np.arange(start, start + size), mode="wrap"), 0
            index = round(depth * size)
            body = np.concatenate([around[:index], pairs[0], around[index:]])
        else:
            asked = round(depth * (self.pairs - 1))
            rest = rng.choice(self._ids, self._body - pairs.size)
            body = np.concatenate([rest, pairs.reshape(-1)])
        row = np.concatenate([body, keys[asked], values[asked]]).astype(np.int32)
        assert row.shape == (self.length + 1,), (row.shape, self)
        return row

    def batch(self, rows: Sequence[np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns (the batch of these prompts, marks: where their answers are predicted)."""
        whole = np.stack(rows)
        shape = (len(rows), self.length)
        batch = {
            "tokens": whole[:, :-1],
            "targets": whole[:, 1:],
            "positions": np.broadcast_to(np.arange(self.length, dtype=np.int32), shape),
            "segment_ids": np.zeros(shape, np.int32),
        }
        marks = np.full(shape, -1, np.int32)
        # The token before the first of the answer predicts it.
        marks[:, self.length - self.value_tokens :] = np.arange(self.value_tokens)
        return batch, marks

    def _keys(self, rng: np.random.Generator) -> np.ndarray:
        """Returns [pairs, key_tokens], all different."""
        keys = np.zeros((0, self.key_tokens), self._ids.dtype)
        while len(keys) < self.pairs:  # at least three quarters of all possible keys are free
            more = rng.choice(self._ids, (self.pairs - len(keys), self.key_tokens))
            both = np.concatenate([keys, more])
            keys = both[np.sort(np.unique(both, axis=0, return_index=True)[1])]
        return keys


def wilson(p: float, n: int) -> tuple[float, float]:
    """Returns the 95% confidence interval of a probability, p of n trials having succeeded (Wilson, 1927)."""
    z = 1.959964
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))


@dataclass(frozen=True)
class Cell:
    """The answers of a task at a length and a depth.

    Attributes:
      count, correct: prompts, and those whose answer is right in all its tokens.
      tokens_correct: the part of all the answers' tokens that are the most likely ones.
      log_probability: of an answer, the sum over its tokens, in nats; the mean over prompts.
    """

    task: str
    length: int
    depth: float
    count: int
    correct: int
    tokens_correct: float
    log_probability: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the accuracy."""
        return wilson(self.accuracy, self.count)

    def row(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        low, high = self.interval
        return vars(self) | {"accuracy": self.accuracy, "low": low, "high": high}


def measure_recall(evaluator: Evaluator, prompts: Prompts, depths: Sequence[float], examples: int) -> list[Cell]:
    """Returns a cell for each depth, each of `examples` prompts.

    Raises:
      ValueError: a depth is not in [0, 1], or there are no examples.
    """
    wrong = [d for d in depths if not 0 <= d <= 1]
    if wrong or not depths or examples < 1:
        raise ValueError(f"depths must be in [0, 1] and examples at least 1, got {list(depths)} and {examples}")
    asked = [(depth, *prompts.make(depth, i)) for depth in depths for i in range(examples)]
    right, scores = [], []
    for first in range(0, len(asked), evaluator.rows):
        part = asked[first : first + evaluator.rows]
        filled = [*part, *[part[-1]] * (evaluator.rows - len(part))]  # the rows past the last prompt are not looked at
        batch, marks = prompts.batch([row for _, row, _ in filled])
        answers = np.stack([answer for _, _, answer in filled])
        best, score = evaluator.answers(batch, marks, answers)
        right += list((best == answers)[: len(part)])
        scores += list(score[: len(part)].astype(np.float64).sum(axis=1))
    cells = []
    for i, depth in enumerate(depths):
        mine = slice(i * examples, (i + 1) * examples)
        hits = np.stack(right[mine])
        cells.append(
            Cell(
                prompts.task,
                prompts.length,
                float(depth),
                examples,
                int(hits.all(axis=1).sum()),
                float(hits.mean()),
                float(np.mean(scores[mine])),
            )
        )
    return cells
