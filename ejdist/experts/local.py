"""Tokens and their experts on the device that has them all: sort by expert, multiply, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.experts.metrics import Traffic, expert_counts
from ejdist.experts.rows import order_of
from kernels.engines.matmul.permutation import permuted, spread
from kernels.framework.dispatch import vary_alike


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
    chosen = jnp.where(experts < 0, num_experts, experts).reshape(tokens * top_k)
    order = order_of(chosen)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    rows = apply(params, spread(x, order, inverse, top_k), expert_counts(experts, num_experts))
    rows = permuted(rows, inverse, order).reshape(tokens, top_k, rows.shape[1])
    return jnp.sum(weights[..., None] * rows.astype(weights.dtype), axis=1), Traffic()
