"""Greedy decoding under the mesh that trains, without a cache: every token comes from a forward pass over the whole row.

A pass predicts the token after every place of a row, so it checks a guess of what follows: as far as the guess is what the
model writes, it stands, and the first token that differs is replaced by the model's. The text is that of one token at a time,
whatever the guess, and takes at most as many passes. The first guess is a right answer, which the same passes score: teacher
forcing. Later guesses are what followed the last two tokens where they stood before.

Source of the check: Stern et al., Blockwise Parallel Decoding for Deep Autoregressive Models, 2018; of such guesses: Saxena,
Prompt Lookup Decoding, 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ejdist.training.forward import Evaluator

WINDOW = (
    32  # tokens that a pass predicts in each row; their logits, [rows, WINDOW, vocabulary], are all that is kept of it
)


class Asked(Protocol):
    """What is decoded: ids of a prompt and of a right answer to it, and how many may be generated, at least the answer's."""

    @property
    def prompt(self) -> np.ndarray: ...
    @property
    def answer(self) -> np.ndarray: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class Answer:
    """What a model answers.

    Attributes:
      ids: generated, without the end of the text; empty where nothing is generated.
      right: tokens of the right answer that are the most likely ones, each after the right ones before it.
      log_probability: of the right answer, the sum over its tokens, in nats.
      passes: rows of forward passes that it took.
    """

    ids: tuple[int, ...]
    right: int
    log_probability: float
    passes: int


@dataclass
class _Row[T: Asked]:
    """A prompt that is being answered: first its right answer is scored, then the model's own one is generated."""

    asked: T
    scored: list[int] = field(default_factory=list)  # the most likely tokens at the places of the right answer
    known: list[int] = field(default_factory=list)  # what the model writes
    guess: list[int] = field(default_factory=list)  # what it may write after that
    log_probability: float = 0.0
    passes: int = 0

    @property
    def scoring(self) -> bool:
        return len(self.scored) < len(self.asked.answer)

    @property
    def at(self) -> int:
        """How many tokens after the prompt the first prediction of the next pass is for."""
        return len(self.scored) if self.scoring else len(self.known)

    def follows(self) -> list[int]:
        """Returns what the next pass reads after the prompt."""
        return self.asked.answer.tolist() if self.scoring else [*self.known, *self.guess]

    def take(self, best: np.ndarray, scores: np.ndarray) -> None:
        """Takes the predictions of a pass: the most likely tokens from `at` on, and log-probabilities of the right answer's."""
        self.passes += 1
        if self.scoring:
            more = min(len(best), len(self.asked.answer) - len(self.scored))
            self.log_probability += float(scores[:more].astype(np.float64).sum())
            self.scored += best[:more].tolist()
            if not self.scoring:
                self._accept(self.asked.answer.tolist(), self.scored)
            return
        predicted = min(len(best), len(self.guess) + 1, self.asked.tokens - len(self.known))
        self._accept(self.guess, best[:predicted].tolist())

    def _accept(self, guess: list[int], best: list[int]) -> None:
        """Takes the tokens of a pass that read a guess, those before the first difference and the one there; guesses again."""
        same = next((i for i, one in enumerate(best) if i >= len(guess) or guess[i] != one), len(best))
        self.known += best[: same + 1]
        ids = np.concatenate([self.asked.prompt, np.asarray(self.known, np.int32)])
        before = np.flatnonzero((ids[:-2] == ids[-2]) & (ids[1:-1] == ids[-1])) if len(ids) > 2 else []
        # What is shorter than a guess goes on from its start: a text that repeats itself.
        self.guess = np.resize(ids[before[-1] + 2 :], WINDOW - 1).tolist() if len(before) else []

    def right_ids(self) -> np.ndarray:
        """Returns the WINDOW ids whose log-probabilities the next pass is to return."""
        ids = np.zeros(WINDOW, np.int32)
        right = self.asked.answer[self.at : self.at + WINDOW] if self.scoring else ids
        ids[: len(right)] = right
        return ids


def decode[T: Asked](
    evaluator: Evaluator,
    asked: Iterable[T],
    ends: Collection[int],
    enough: Callable[[T, list[int]], bool] | None = None,
    generate: bool = True,
) -> Iterator[tuple[T, Answer]]:
    """Yields (prompt, answer) as they are finished: a free row of the batch takes the next prompt. Call it on all hosts.

    Args:
      asked: of which prompt and tokens together fit into the evaluator's length.
      ends: tokens that end a text.
      enough: whether what is generated so far needs no more; generation ends there too. Default: at the end alone.
      generate: False only scores the right answers.
    """
    waiting = iter(asked)
    rows: deque[_Row[T]] = deque()
    while True:
        while len(rows) < evaluator.rows and (one := next(waiting, None)) is not None:
            if len(one.prompt) + one.tokens > evaluator.length or len(one.answer) > one.tokens:
                raise ValueError(
                    f"a prompt of {len(one.prompt)} tokens with {one.tokens} to generate, of which the answer takes "
                    f"{len(one.answer)}, does not fit into {evaluator.length}"
                )
            rows.append(_Row(one))
        if not rows:
            return
        best, scores = _passed(evaluator, list(rows))
        for i in range(len(rows)):
            row = rows.popleft()
            before = len(row.known)
            row.take(best[i], scores[i])
            if row.scoring or (generate and not _ended(row, before, ends, enough)):
                rows.append(row)
                continue
            right = int((np.asarray(row.scored) == row.asked.answer).sum())
            yield row.asked, Answer(tuple(row.known) if generate else (), right, row.log_probability, row.passes)


def _ended(row: _Row[Any], before: int, ends: Collection[int], enough: Callable[[Any, list[int]], bool] | None) -> bool:
    """Returns whether the text has ended, and cuts what follows its end. `before`: how many tokens were known earlier."""
    for count in range(before, len(row.known)):
        if row.known[count] in ends:
            del row.known[count:]
            return True
        if enough is not None and enough(row.asked, row.known[: count + 1]):
            del row.known[count + 1 :]
            return True
    return len(row.known) >= row.asked.tokens


def _passed(evaluator: Evaluator, rows: list[_Row[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the most likely tokens, log-probabilities of the right ones), [rows, WINDOW] each, of one forward pass."""
    shape = (evaluator.rows, evaluator.length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions")}
    batch |= {name: np.full(shape, -1, np.int32) for name in ("targets", "segment_ids")}
    marks = np.full(shape, -1, np.int32)
    right = np.zeros((evaluator.rows, WINDOW), np.int32)
    # Rows past the last prompt repeat it, and are not looked at.
    for i, row in enumerate([*rows, *[rows[-1]] * (evaluator.rows - len(rows))]):
        ids = [*row.asked.prompt.tolist(), *row.follows()][: evaluator.length]
        batch["tokens"][i, : len(ids)] = ids
        batch["positions"][i, : len(ids)] = np.arange(len(ids))
        batch["segment_ids"][i, : len(ids)] = 0
        # The token before a place predicts it.
        first = len(row.asked.prompt) - 1 + row.at
        last = min(first + WINDOW, len(ids))
        marks[i, first:last] = np.arange(last - first)
        right[i] = row.right_ids()
    return evaluator.answers(batch, marks, right)
