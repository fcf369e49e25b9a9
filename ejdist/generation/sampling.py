"""Samples the next token from the logits, each row with the options of its request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a request.

    temperature: 0 for the most likely token. top_k: of the most likely ones alone; 0 for all. top_p: of the fewest whose
    probabilities sum to it. min_p: of those at least as likely as this share of the most likely one. They apply in this order,
    after the temperature. seed: of the draws, which depend on nothing else: not on the other requests.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range, with the range."""
        wrong = {
            "temperature": (not 0 <= self.temperature < math.inf, "0, for the most likely token, or a positive number"),
            "top_k": (not 0 <= self.top_k < 2**31, "a number of tokens, or 0 for all"),
            "top_p": (not 0 < self.top_p <= 1, "above 0, and at most 1 for all tokens"),
            "min_p": (not 0 <= self.min_p <= 1, "from 0, for all tokens, to 1"),
            "seed": (not 0 <= self.seed < 2**32, "in [0, 2**32)"),
        }
        for name, (is_wrong, rule) in wrong.items():
            if is_wrong:
                raise ValueError(f"{name} = {getattr(self, name)} must be {rule}")


class Choices(NamedTuple):
    """The fields of `Sampling` of each row, and the number of tokens that its request has so far; [B] each.

    The three limits are None where no row has one. Which program draws a step's tokens thus depends on the requests, and no
    program asks the device: on a GPU the host would wait for the answer, and start the next step late.
    """

    temperature: Any
    seed: Any
    drawn: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None

    @classmethod
    def of(cls, rows: list[tuple[Sampling, int]]) -> Choices | None:
        """Returns the arrays for a list of (sampling options, number of tokens so far), one per row; None if every row takes
        its most likely token."""
        draws = [one for one, _ in rows if one.temperature > 0]
        if not draws:
            return None
        limited = any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in draws)
        dtypes = {"temperature": np.float32, "seed": np.uint32}
        dtypes |= {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32} if limited else {}
        columns = {name: np.array([getattr(one, name) for one, _ in rows], dtype) for name, dtype in dtypes.items()}
        return cls(drawn=np.array([drawn for _, drawn in rows], np.int32), **columns)


def sample(logits: jax.Array, choices: Choices | None) -> tuple[jax.Array, jax.Array]:
    """Returns (the chosen tokens, int32 [B]; their log-probabilities under the model, float32 [B], as training has them:
    without temperature or limits).

    Args:
      logits: float32 [B, V].
      choices: None for the most likely token of each row.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if choices is not None:
        cold = choices.temperature == 0
        scaled = logits / jnp.where(cold, 1, choices.temperature)[:, None]
        scaled = scaled if choices.top_k is None else _limited(scaled, choices)

        def noise(seed: jax.Array, count: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), logits.shape[-1:])

        noisy = scaled + jax.vmap(noise)(choices.seed, choices.drawn)
        tokens = jnp.where(cold, tokens, jnp.argmax(noisy, axis=-1).astype(jnp.int32))
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    return tokens, scores


def _limited(scaled: jax.Array, choices: Choices) -> jax.Array:
    """Returns logits [B, V] with -inf for tokens that top_k, top_p or min_p excludes; equal logits go together."""
    ordered = -jnp.sort(-scaled, axis=-1)
    ranks = jnp.arange(scaled.shape[-1])
    first = jnp.where(choices.top_k > 0, choices.top_k, scaled.shape[-1])
    within = jnp.where(ranks < first[:, None], ordered, -jnp.inf)
    probabilities = jax.nn.softmax(within, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    enough = (before < choices.top_p[:, None]) | (choices.top_p == 1)[:, None]
    likely = probabilities >= choices.min_p[:, None] * probabilities[:, :1]
    stays = (within > -jnp.inf) & enough & likely
    stays = stays.at[:, 0].set(True)
    least = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= least, scaled, -jnp.inf)
