"""Which rows are of which matrix, and how the weights of a call are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def bounds(
    group_sizes: jax.Array, group_offset: jax.Array | None, experts: int, rows: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [E] twice: the first row of each matrix's group, and one past its last."""
    edges = jnp.minimum(jnp.pad(jnp.cumsum(group_sizes.astype(jnp.int32)), (1, 0)), rows)
    first = 0 if group_offset is None else group_offset.astype(jnp.int32)
    edges = edges[(first + jnp.arange(experts + 1)).clip(0, group_sizes.shape[0])]
    return edges[:-1], edges[1:]


def matrices(rhs: Any, rhs_transposed: Any) -> tuple[jax.Array, bool, bool]:
    """Returns (matrices [E, D, width], or [E, width, D]; whether transposed; whether of a gate and an up projection)."""
    if rhs is None:
        E, D = rhs_transposed.shape[0], rhs_transposed.shape[-1]
        return rhs_transposed.reshape(E, -1, D), True, rhs_transposed.ndim == 4
    return rhs.reshape(*rhs.shape[:2], -1), False, rhs.ndim == 4
