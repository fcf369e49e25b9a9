"""Tokens and their experts on the device that has them all: sort by expert, multiply, and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejdist.experts.metrics import Traffic
from kernels import combine_rows
from kernels.engines.matmul.ordering import group_order
from kernels.engines.matmul.permutation import picked
from kernels.framework.dispatch import vary_alike


def local(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Any,
    apply: Callable,
    *,
    num_experts: int,
    gathers: bool = False,
) -> tuple[jax.Array, Traffic]:
    """Returns (out [M, D'], traffic): every token through its experts, on the device that has them all.

    Nothing is dropped and nothing is padded: memory is that of top_k rows for each token, however they are spread.

    Args:
      x: [M, D]. experts: int [M, k], -1 for none. weights: float32 [M, k].
      params: of all experts, a pytree.
      apply: (params, rows [R, D] sorted by expert, rows of each expert [E]) -> rows [R, D']; zero past the last expert's.
      num_experts: E.
      gathers: `apply` gathers rows itself: it is called with x [M, D] in their place, and `rows=`, `slots=` as in
        `kernels.grouped_matmul`, so that they are never in memory in their order.
    """
    x, experts, weights = vary_alike((x, experts, weights))
    order = group_order(experts, num_experts)
    if gathers:
        rows = apply(params, x, order.sizes, rows=order.tokens, slots=order.slots)
    else:
        rows = apply(params, picked(x, order.tokens, order.slots), order.sizes)
    return combine_rows(rows, order.slots, order.pairs, weights), Traffic()
