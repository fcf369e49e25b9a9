"""What devices with parts of a vocabulary know of each token, joined."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def joined_lse(lse: jax.Array, vocabulary: tuple[str, ...]) -> jax.Array:
    """Returns the log-sum-exp over the whole vocabulary, from that over this device's part."""
    largest = jax.lax.pmax(jax.lax.stop_gradient(lse), vocabulary)
    largest = jnp.where(jnp.isinf(largest), 0.0, largest)
    total = jax.lax.psum(jnp.exp(lse - largest), vocabulary)
    # A token of which every part is masked out has -inf, and no gradient, as on one device.
    nothing = total == 0
    return jnp.where(nothing, -jnp.inf, largest + jnp.log(jnp.where(nothing, 1.0, total)))


def of_this_part(targets: jax.Array, vocabulary: tuple[str, ...], size: int) -> tuple[jax.Array, int]:
    """Returns (targets as this device's part of the vocabulary, of `size`, counts them; the size of the whole). A target of
    another device's part is out of range here, and has logit 0."""
    if not vocabulary:
        return targets, size
    return targets - jax.lax.axis_index(vocabulary) * size, size * math.prod(map(jax.lax.axis_size, vocabulary))


def of_every_part(outputs: tuple[jax.Array, ...], vocabulary: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """Returns (lse, target logit, mean logit) over the whole vocabulary, from those of this device's part."""
    if not vocabulary:
        return outputs
    lse, at_target, mean = outputs
    return joined_lse(lse, vocabulary), jax.lax.psum(at_target, vocabulary), jax.lax.pmean(mean, vocabulary)
