"""Permutations of rows, to sort them by group and back. Their gradients are gathers; JAX's own would be scatter-adds, because
it does not know that indices are distinct."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the rows of x permuted by `order`. The gradient is a gather by `inverse`, not a scatter-add."""
    return jnp.asarray(x).at[order].get(unique_indices=True, mode="promise_in_bounds")


permuted.defvjp(
    lambda x, order, inverse: (permuted(x, order, inverse), (order, inverse)),
    lambda residuals, d: (permuted(d, *reversed(residuals)), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x: jax.Array, order: jax.Array, inverse: jax.Array, top_k: int) -> jax.Array:
    """Returns top_k copies of each row of x, permuted by `order`. The gradient is a gather and a sum over top_k."""
    return jnp.asarray(x).at[order // top_k].get(mode="promise_in_bounds")


def _spread_bwd(top_k: int, residuals: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None, None]:
    d = permuted(d, *reversed(residuals))
    return d.reshape(d.shape[0] // top_k, top_k, d.shape[1]).sum(1), None, None


@jax.custom_vjp
def picked(x: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the rows x[rows] [M, D] of x [tokens, D], zeros for a negative index. The gradient is a sum of gathers by the
    inverse, `slots` [tokens, k]: where each row of x is used, -1 for none."""
    return jnp.where((rows >= 0)[:, None], jnp.asarray(x)[jnp.maximum(rows, 0)], 0)


def _picked_bwd(slots: jax.Array, d: jax.Array) -> tuple[jax.Array, None, None]:
    total: Any = 0
    for j in range(slots.shape[1]):
        total += jnp.where((slots[:, j] >= 0)[:, None], d[jnp.maximum(slots[:, j], 0)].astype(jnp.float32), 0)
    return total.astype(d.dtype), None, None


picked.defvjp(lambda x, rows, slots: (picked(x, rows, slots), slots), _picked_bwd)

spread.defvjp(lambda x, order, inverse, top_k: (spread(x, order, inverse, top_k), (order, inverse)), _spread_bwd)
