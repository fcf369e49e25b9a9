"""How keys and values travel along an axis: around a ring, or all at once."""

from __future__ import annotations

from typing import Any

import jax


def shift(tree: Any, axis_name: str, by: int) -> Any:
    """Returns what the rank `by` places before this one holds."""
    n = jax.lax.axis_size(axis_name)
    if by % n == 0:
        return tree
    pairs = [(i, (i + by) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)


def gather(tree: Any, axis_name: str) -> Any:
    """Returns every rank's arrays, joined along dim 1 in the order of the ranks."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name, axis=1, tiled=True), tree)


def scatter_sum(tree: Any, axis_name: str) -> Any:
    """Returns this rank's part, along dim 1, of the sum over all ranks: the transpose of `gather`."""
    return jax.tree.map(lambda x: jax.lax.psum_scatter(x, axis_name, scatter_dimension=1, tiled=True), tree)
