"""Tokens and their experts on the device that has them all: sort by expert, multiply, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.experts.metrics import Traffic, expert_counts
from ejdist.experts.rows import order_of
from kernels.framework.dispatch import vary_alike


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the rows of x in another order. The gradient is a gather too, by the inverse: nothing is scattered."""
    return jnp.asarray(x).at[order].get(unique_indices=True, mode="promise_in_bounds")


_permuted.defvjp(
    lambda x, order, inverse: (_permuted(x, order, inverse), (order, inverse)),
    lambda kept, d: (_permuted(d, *reversed(kept)), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x: jax.Array, order: jax.Array, inverse: jax.Array, top_k: int) -> jax.Array:
    """Returns top_k rows of each of x, in an order of all of these; the gradient is a gather and a sum over top_k."""
    return jnp.asarray(x).at[order // top_k].get(mode="promise_in_bounds")


def _spread_bwd(top_k: int, kept: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None, None]:
    d = _permuted(d, *reversed(kept))
    return d.reshape(d.shape[0] // top_k, top_k, d.shape[1]).sum(1), None, None


_spread.defvjp(lambda x, order, inverse, top_k: (_spread(x, order, inverse, top_k), (order, inverse)), _spread_bwd)


def local(
    x: jax.Array, experts: jax.Array, weights: jax.Array, params: Any, apply: Callable, *, num_experts: int
) -> tuple[jax.Array, Traffic]:
    """Returns (out [M, D'] float32, traffic): every token through its experts, on the device that has them all.

    Nothing is dropped and nothing is padded: memory is that of top_k rows for each token, however they are spread.

    Args:
      x: [M, D]. experts: int [M, k], -1 for none. weights: float32 [M, k].
      params: of all experts, a pytree.
      apply: (params, rows [R, D] sorted by expert, rows of each expert [E]) -> rows [R, D']; zero past the last expert's.
      num_experts: E.
    """
    tokens, top_k = experts.shape
    x, experts, weights = vary_alike((x, experts, weights))
    own = jnp.where(experts < 0, num_experts, experts).reshape(tokens * top_k)
    order = order_of(own)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    rows = apply(params, _spread(x, order, inverse, top_k), expert_counts(experts, num_experts))
    rows = _permuted(rows, inverse, order).reshape(tokens, top_k, rows.shape[1])
    return jnp.sum(weights[..., None] * rows.astype(weights.dtype), axis=1), Traffic()
