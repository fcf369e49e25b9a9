"""Requests for text, and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ejdist.generation.sampling import Sampling

# Why a text ended: an end token, a stop string, or its limit of tokens.
END, STOP, LENGTH = "end", "stop", "length"


@dataclass(frozen=True)
class Result:
    """A finished text.

    Attributes:
      id: the number that `submit` returned.
      prompt: token ids.
      tokens: the generated ids, including the end token.
      log_probabilities: of each generated token under the model, in nats, without temperature or limits, as in training.
      reason: why the text ended: "end", "stop" or "length".
      text: the decoded tokens, without the end token and up to the stop string; None without `decode`.
    """

    id: int
    prompt: np.ndarray
    tokens: list[int]
    log_probabilities: list[float]
    reason: str
    text: str | None


class Token(NamedTuple):
    """A token that a step generated; `reason` says why its text ended with it, None if it did not."""

    id: int
    token: int
    log_probability: float
    reason: str | None


@dataclass
class Request:
    """A text in progress.

    filled, begun: number of prompt tokens in the cache, and of generated ones, in the steps that have started. pages: the
    request's pages, in order; empty while it waits. slot: -1 before it has one, and when it has ended.
    """

    id: int
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    digests: list[bytes]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    filled: int = 0
    begun: int = 0
    published: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)

    def take(
        self, token: int, log_probability: float, ends: Collection[int], decode: Callable[..., str] | None
    ) -> str | None:
        """Appends the next token; returns why the text ended, or None if it continues."""
        self.tokens.append(token)
        self.log_probabilities.append(log_probability)
        if token in ends:
            return END
        if decode is not None and self.stop:
            # Every token is at least a byte, and every character at most four: so it is enough to search the end of the text.
            tail = decode(self.tokens[-4 * (max(map(len, self.stop)) + 1) :])
            if any(one in tail for one in self.stop) and self._stopped(decode(self.tokens)) is not None:
                return STOP
        return LENGTH if len(self.tokens) == self.max_tokens else None

    def result(self, reason: str, decode: Callable[..., str] | None) -> Result:
        """Returns the finished text."""
        text = None
        if decode is not None:
            text = decode(self.tokens[:-1] if reason == END else self.tokens)
            text = text[: self._stopped(text)] if reason == STOP else text
        return Result(self.id, self.prompt, self.tokens, self.log_probabilities, reason, text)

    def _stopped(self, text: str) -> int | None:
        """Returns the position of the first stop string."""
        return min((place for one in self.stop if (place := text.find(one)) >= 0), default=None)


def ids_of(prompt: Any, vocab_size: int) -> np.ndarray:
    """Returns the token ids of a prompt, int32. Raises ValueError if it is empty, or has something else."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"a prompt must be a list of token ids, got {ids.dtype} of shape {ids.shape}")
    if not ids.size:
        raise ValueError("the prompt is empty: give at least one token, such as the tokenizer's BOS")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"the prompt has token {ids.max() if ids.max() >= vocab_size else ids.min()}, but the model has tokens 0 to "
            f"{vocab_size - 1}: use the tokenizer that the model was trained with"
        )
    return ids.astype(np.int32)


def stops_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the strings that stop a text. Raises ValueError for an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise ValueError(f"stop = {stop!r} must be one or more non-empty strings")
    return stops
