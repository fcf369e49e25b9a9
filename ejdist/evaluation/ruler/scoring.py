"""How answers are scored: RULER's string matches, and what one forward pass over a right answer shows.

Source: Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?, 2024, section 4, and
scripts/eval/synthetic/constants.py of github.com/NVIDIA/RULER.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.evaluation.decoding import Answer
from ejdist.evaluation.recall import wilson
from ejdist.evaluation.ruler.samples import Sample


def string_match(text: str, references: Sequence[str], match: str) -> float:
    """Returns the score of an answer, from 0 to 1, in which case does not matter.

    Args:
      match: "all" for the part of the references that are in the text, "part" for 1 where one of them is.
    """
    text = re.sub(r"[\x00-\x1f]", "\n", text).lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if match == "part" else sum(hits) / len(hits)


@dataclass(frozen=True)
class Scored:
    """An answer with its score: None where nothing was generated."""

    sample: Sample
    answer: Answer
    text: str | None
    score: float | None

    def row(self, length: int) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "task": self.sample.task,
            "length": length,
            "number": self.sample.number,
            "depth": self.sample.depth,
            "prompt_tokens": len(self.sample.prompt),
            "references": list(self.sample.references),
            "answer": self.text,
            "score": None if self.score is None else 100 * self.score,
            "teacher_forced": self.answer.right == len(self.sample.answer),
            "passes": self.answer.passes,
        }


def summary(answers: Sequence[Scored], length: int) -> dict[str, Any]:
    """Returns the row of a task at a length.

    score: the mean string match, 0 to 100, as RULER prints it, with `low` and `high` around it: Wilson's 95% interval, which is
    too wide rather than too narrow where answers are right in part. empty: answers without a character. teacher_forced: of the
    tokens of right answers, each after those before it, `tokens_correct` is the part that are the most likely ones, `accuracy`
    the part of prompts where all of them are, and `log_probability` that of an answer in nats, the mean over prompts.
    """
    scores = [a.score for a in answers if a.score is not None]
    row: dict[str, Any] = {"task": answers[0].sample.task, "length": length, "count": len(answers)}
    if scores:
        mean = float(np.mean(scores))
        low, high = wilson(mean, len(scores))
        row |= {"score": 100 * mean, "low": 100 * low, "high": 100 * high}
        row["empty"] = sum(not (a.text or "").strip() for a in answers)
    tokens = [len(a.sample.answer) for a in answers]
    right = [a.answer.right for a in answers]
    row["teacher_forced"] = {
        "tokens_correct": sum(right) / sum(tokens),
        "accuracy": float(np.mean([r == n for r, n in zip(right, tokens, strict=True)])),
        "log_probability": float(np.mean([a.answer.log_probability for a in answers])),
    }
    sizes = [len(a.sample.prompt) for a in answers]
    return row | {"prompt_tokens": [min(sizes), max(sizes)], "passes": sum(a.answer.passes for a in answers)}
