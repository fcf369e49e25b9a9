"""Shared by token losses: which tokens count, and how losses are reduced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The conventional index of tokens that do not count.
ALSO_IGNORED = -100


def is_counted(targets: jax.Array, ignore_index: int) -> jax.Array:
    """Returns a mask of the tokens that count."""
    return (targets != ignore_index) & (targets != ALSO_IGNORED)


def check_reduction(owner: str, reduction: str) -> None:
    """Raises ValueError for an unknown reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{owner}: argument 'reduction' = {reduction!r}: use mean, sum or none")


def check_cap(owner: str, name: str, cap: float | None) -> None:
    """Raises ValueError for a soft cap that is not positive, naming the argument."""
    if cap is not None and not cap > 0:
        raise ValueError(f"{owner}: argument {name!r} must be positive, got {cap}; None for no cap")


def reduced(losses: jax.Array, counts: jax.Array, weights: jax.Array | None, reduction: str) -> jax.Array:
    """Returns losses [*lead] times weights, or their sum or mean. The loss is 0 where `counts` is 0."""
    if weights is not None:
        losses, counts = losses * weights, counts * weights
    return losses if reduction == "none" else reduced_sum(jnp.sum(losses), jnp.sum(counts), reduction)


def reduced_sum(total: jax.Array, count: jax.Array, reduction: str) -> jax.Array:
    """Returns the sum of the losses, or the mean; 0 if no token counts."""
    return total if reduction == "sum" else total / jnp.where(count == 0, 1, count)
