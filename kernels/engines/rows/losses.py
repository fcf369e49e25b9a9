"""What losses of tokens have in common: which tokens count, and what their losses are reduced to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# What most data pipelines of the field mark tokens with that do not count.
ALSO_IGNORED = -100


def is_counted(targets: jax.Array, ignore_index: int) -> jax.Array:
    """Returns which tokens count."""
    return (targets != ignore_index) & (targets != ALSO_IGNORED)


def check_reduction(owner: str, reduction: str) -> None:
    """Raises ValueError where there is no such reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{owner}: argument 'reduction' = {reduction!r}: use mean, sum or none")


def check_cap(owner: str, name: str, cap: float | None) -> None:
    """Raises ValueError where a soft cap is not positive, naming the argument."""
    if cap is not None and not cap > 0:
        raise ValueError(f"{owner}: argument {name!r} must be positive, got {cap}; None for no cap")


def reduced(losses: jax.Array, counts: jax.Array, weights: jax.Array | None, reduction: str) -> jax.Array:
    """Returns losses [*lead] times weights, or their sum or mean. Where `counts` is 0 and not 1, so is the loss."""
    if weights is not None:
        losses, counts = losses * weights, counts * weights
    return losses if reduction == "none" else reduced_sum(jnp.sum(losses), jnp.sum(counts), reduction)


def reduced_sum(total: jax.Array, count: jax.Array, reduction: str) -> jax.Array:
    """Returns a sum of losses, or the mean; 0 where nothing counts."""
    return total if reduction == "sum" else total / jnp.where(count == 0, 1, count)
