"""A prompt of RULER: what a task draws, and how it is brought to a length in tokens."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ejdist.evaluation.ruler.questions import Questions
from ejdist.evaluation.ruler.words import Essays, Rng
from ejdist.training.chats.special_tokens import begun
from ejdist.training.data.tokenizer import Tokenizer

_ATTEMPTS = 20  # at answers that stand nowhere else in the prompt
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDS = 40  # at most, of the search for an amount, which takes about four
_SLACK = 256  # a prompt is long enough where less than this part of its room is free


@dataclass(frozen=True)
class Case:
    """What a task has drawn for a prompt, whatever its length.

    Attributes:
      references: strings that the answer should contain.
      answer: a right answer, as it would follow the prompt.
      text: (amount) -> the prompt with that much haystack.
      unit: what the amount counts, for errors.
      least, most: of the amount.
      once: strings that stand in the prompt's haystack exactly once, so that nothing else answers the question.
      depth: where the answer stands, from 0 for the start of the haystack to 1; None where it has no single place.
    """

    references: tuple[str, ...]
    answer: str
    text: Callable[[int], str]
    unit: str
    least: int = 1
    most: int | None = None
    once: tuple[str, ...] = ()
    depth: float | None = None


@dataclass(frozen=True)
class Sources:
    """What the user may name: the text of haystacks, and the questions of qa_1 (SQuAD) and qa_2 (HotpotQA)."""

    essays: Essays
    squad: Questions | None = None
    hotpotqa: Questions | None = None

    def digest(self) -> str:
        """Returns what tells these from others: hosts must have the same."""
        questions = [q.digest() if q else "" for q in (self.squad, self.hotpotqa)]
        return hashlib.sha256("\0".join([*self.essays.words, *questions]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """A task of RULER.

    Attributes:
      name: RULER's name of it.
      tokens: to generate, in RULER; an answer that takes more with a tokenizer has room for it.
      draw: returns what a prompt is about. Its arguments: rng, depth (from 0 to 1), number, length in tokens, sources.
      match: "all" for the part of the references that an answer contains, "part" for whether it contains one of them.
    """

    name: str
    tokens: int
    draw: Callable[[Rng, float, int, int, Sources], Case]
    match: str = "all"
    needs: str | None = None  # the field of Sources, and key of the command, without which it cannot run


@dataclass(frozen=True)
class Sample:
    """A prompt.

    Attributes:
      prompt, answer: int32 ids, of the prompt and of a right answer to it.
      references: strings that a text must contain.
      tokens: how many may be generated: prompt and these fit into the length.
      depth: see `Case`.
    """

    task: str
    number: int
    text: str
    prompt: np.ndarray
    answer: np.ndarray
    references: tuple[str, ...]
    tokens: int
    depth: float | None


@dataclass(frozen=True)
class Generator:
    """The prompts of a task at a length: a pure function of (task, length, seed, number, tokenizer, sources).

    Attributes:
      length: tokens of a prompt with what is generated after it, at most, as in RULER.
      tokenizer: a prompt begins with its BOS, as a document of training does.
    """

    task: Task
    length: int
    tokenizer: Tokenizer
    sources: Sources
    seed: int = 0

    def depth(self, number: int) -> float:
        """Returns the depth of a prompt's needle, from 0 to 1. Those of the first n prompts are spread evenly, for any n:
        steps of the golden ratio (Kronecker's sequence) from a place that the seed draws."""
        return float((self._rng(0).random() + number * _GOLDEN) % 1)

    def make(self, number: int) -> Sample:
        """Returns a prompt. Raises ValueError: the length has no room for it, or the haystack has its answer elsewhere too."""
        for attempt in range(_ATTEMPTS):
            case = self._case(number, attempt)
            answer = self._answer(case)
            tokens = max(self.task.tokens, len(answer))
            _, text, ids = self._fitted(case, tokens, self._typical)
            if all(text.count(one) == 1 for one in case.once):
                assert len(ids) + tokens <= self.length, (len(ids), tokens, self)
                return Sample(self.task.name, number, text, ids, answer, case.references, tokens, case.depth)
        raise ValueError(
            f"essays = {self.sources.essays.name!r} has the answers of {self.task.name} in it, {_ATTEMPTS} draws in a row; "
            "name another text"
        )

    @functools.cached_property
    def _typical(self) -> int:
        """An amount of haystack that has room in all prompts or nearly, where the search for each one's begins."""
        case = self._case(0, 0)
        size = self._fitted(case, max(self.task.tokens, len(self._answer(case))), case.least + 1)[0]
        return size - size // 1000

    def _fitted(self, case: Case, tokens: int, start: int) -> tuple[int, str, np.ndarray]:
        """Returns (amount, text, ids) of the longest prompt that leaves room for that many tokens of an answer.

        Raises:
          ValueError: there is no room for the least.
        """
        room = self.length - tokens
        low = first = case.least
        text = case.text(low)
        best = low, text, self._ids(text)
        base = len(best[2])
        if base > room:
            raise ValueError(
                f"lengths: {self.length} tokens are too few for {self.task.name}, which needs {base + tokens} for its "
                f"question, {low} {case.unit} and an answer of {tokens} tokens; use longer ones, or leave that task out"
            )
        high, now = math.inf if case.most is None else case.most + 1, start
        for _ in range(_ROUNDS):
            now = int(min(max(now, low + 1), high - 1))
            if now <= low:
                break
            text = case.text(now)
            ids = self._ids(text)
            used = len(ids)
            if used <= room:
                low, best = now, (now, text, ids)
            else:
                high = now
            one = max((used - base) / (now - first), 1e-3)  # tokens of one more
            if 0 <= room - used < max(one, room / _SLACK):
                break
            now += math.floor((room - used) / one)
        return best

    def _answer(self, case: Case) -> np.ndarray:
        """Returns the ids that follow the prompt in a right answer: the start of a text may have tokens of its own."""
        tail = case.text(case.least).rpartition("\n")[2]
        alone, both = self.tokenizer.encode(tail), self.tokenizer.encode(tail + case.answer)
        follows = np.array_equal(both[: len(alone)], alone)
        return np.asarray(both[len(alone) :] if follows else self.tokenizer.encode(case.answer), np.int32)

    def _rng(self, *of: int) -> Rng:
        name = int.from_bytes(hashlib.sha256(self.task.name.encode()).digest()[:4])
        return np.random.default_rng([self.seed, name, self.length, *of])

    def _case(self, number: int, attempt: int) -> Case:
        rng = self._rng(1, number, attempt)
        return self.task.draw(rng, self.depth(number), number, self.length, self.sources)

    def _ids(self, text: str) -> np.ndarray:
        return begun(self.tokenizer, self.tokenizer.encode(text)).astype(np.int32)
