"""Router statistics of a batch: sums and maxima that combine over layers, microbatches and devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

_NONE: Any = np.int32(0)
_EMPTY: Any = np.float32(0)
_ONE: Any = np.zeros(1, np.int32)


class Traffic(NamedTuple):
    """Statistics of dispatching tokens to experts; zero on one device, and where no tokens are dispatched.

    Attributes:
      extra_passes: int32 [], overflow passes beyond the first.
      high_water: float32 [], buffer utilization: rows for the fullest slot of the buffer over its size.
      dropped: int32 [], choices that exceeded the capacity and contribute nothing.
    """

    extra_passes: jax.Array = _NONE
    high_water: jax.Array = _EMPTY
    dropped: jax.Array = _NONE


class Stats(NamedTuple):
    """Statistics of the tokens, without padding. `REDUCTIONS` says how each combines over tokens.

    Attributes:
      tokens: int32 [], the number of tokens without padding.
      counts: int32 [E], how often each expert was chosen; top_k * tokens in all.
      probabilities: [E], the scores of each token, normalised over experts, summed over tokens.
      balance_loss, z_loss: [], sums over tokens; divide by `tokens` and multiply by a coefficient to add to a training loss.
        They have gradients, and so has `probabilities`.
      entropy: [], of each token's probabilities, in nats, summed over tokens.
      max_violation: [], the largest of `counts` relative to their mean, less 1: 0 in balance.
      dead_experts: int32 [], experts that no token chose.
      rank_counts: int32 [ranks], how often the experts of each rank were chosen; [1] on one device.
      host_counts: int32 [hosts], the same of each host; [1] where the ranks are of one, or do not lie host by host.
      rank_tokens: int32 [ranks], the tokens with an expert on each rank, which are the rows that travel by rank.
      extra_passes, high_water, dropped: [], see `Traffic`.
    """

    tokens: jax.Array
    counts: jax.Array
    probabilities: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array
    entropy: jax.Array
    max_violation: jax.Array
    dead_experts: jax.Array
    rank_counts: jax.Array
    host_counts: jax.Array = _ONE
    rank_tokens: jax.Array = _ONE
    extra_passes: jax.Array = _NONE
    high_water: jax.Array = _EMPTY
    dropped: jax.Array = _NONE


jax.export.register_namedtuple_serialization(Stats, serialized_name="ejdist.experts.Stats")

REDUCTIONS = {
    "tokens": "sum",
    "counts": "sum",
    "probabilities": "sum",
    "balance_loss": "sum",
    "z_loss": "sum",
    "entropy": "sum",
    "max_violation": "max",
    "dead_experts": "max",
    "rank_counts": "sum",
    "host_counts": "sum",
    "rank_tokens": "sum",
    "extra_passes": "max",
    "high_water": "max",
    "dropped": "sum",
}


def expert_counts(experts: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [E], how often each expert occurs in `experts`, of any shape; -1, and E or more, count for none."""
    # Compare and sum in place: on a mesh a scatter would gather them first.
    return jnp.sum(experts[..., None] == jnp.arange(num_experts), axis=tuple(range(experts.ndim)), dtype=jnp.int32)


def rank_tokens(experts: jax.Array, ranks: int, num_experts: int) -> jax.Array:
    """Returns int32 [ranks], the tokens of experts [..., k] that have one on each rank, of equal parts of the experts."""
    own = num_experts // ranks
    chosen = (experts >= 0) & (experts < num_experts)
    here = chosen[..., None] & (experts[..., None] // own == jnp.arange(ranks))
    return jnp.sum(jnp.any(here, axis=-2), axis=tuple(range(experts.ndim - 1)), dtype=jnp.int32)


def max_violation(counts: jax.Array) -> jax.Array:
    """Returns how far the largest of counts [..., E] is above their mean, as a part of it (Wang et al., 2024, eq. 4)."""
    counts = counts.astype(jnp.float32)  # a count of many tokens times E may pass an int32
    total = counts.sum(-1)
    return jnp.where(total > 0, counts.max(-1) * counts.shape[-1] / jnp.maximum(total, 1) - 1, 0)


def dead_experts(counts: jax.Array) -> jax.Array:
    """Returns how many of counts [..., E] are zero."""
    return jnp.sum(counts == 0, axis=-1, dtype=jnp.int32)


def merge(a: Stats, b: Stats) -> Stats:
    """Returns the statistics of the tokens of both: two microbatches, or two layers."""
    join = {"sum": jnp.add, "max": jnp.maximum}
    return Stats(**{name: join[how](getattr(a, name), getattr(b, name)) for name, how in REDUCTIONS.items()})


def summary(stats: Stats) -> dict[str, jax.Array]:
    """Returns what a log shows, float32 scalars, of statistics that are reduced over microbatches and devices.

    Means are over tokens, `dropped_fraction` over choices. `load_violation` and `unused_experts` are of the counts of all of
    these; `max_violation`, `dead_experts`, `extra_passes` and `high_water` of the worst part (microbatch, layer).
    """
    tokens = jnp.maximum(stats.tokens, 1).astype(jnp.float32)
    means = {name: getattr(stats, name) / tokens for name in ("balance_loss", "z_loss", "entropy")}
    means["dropped_fraction"] = stats.dropped / jnp.maximum(stats.counts.sum(), 1)
    worst = {name: getattr(stats, name) for name in ("max_violation", "dead_experts", "extra_passes", "high_water")}
    of_all = {"load_violation": max_violation(stats.counts), "unused_experts": dead_experts(stats.counts)}
    return {name: jnp.asarray(x, jnp.float32) for name, x in (means | worst | of_all).items()}
