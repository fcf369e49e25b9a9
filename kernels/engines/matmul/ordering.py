"""Rows in the order of their groups: where each goes, where each comes from, and how many a group has."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.dispatch import apply, vary_alike
from kernels.framework.interpret import interpreting
from kernels.framework.platforms import PLATFORMS


class GroupOrder(NamedTuple):
    """The choices of T tokens, k each, sorted by group; of one group in the order of tokens.

    Attributes:
      slots: int32 [T, k], where a choice is in that order; -1 for one of no group.
      pairs: int32 [T k], the inverse: the choice t * k + j there; -1 past the last choice of a group.
      tokens: int32 [T k], that choice's token t; -1 past the last.
      sizes: int32 [groups], how many choices each group has.
    """

    slots: jax.Array
    pairs: jax.Array
    tokens: jax.Array
    sizes: jax.Array


def group_order(groups: jax.Array, num_groups: int, *, platform: str | None = None) -> GroupOrder:
    """Returns the order of choices by group, stable.

    On NVIDIA GPUs a counting sort of two kernels, whose memory is [programs, num_groups]; elsewhere XLA's sort.

    Args:
      groups: int [T, k], the group of each choice; a number outside [0, num_groups), such as -1, is no group.
      platform: "triton" or "xla" to use that one; None for the fastest where this is compiled for.
    """
    tokens, top_k = groups.shape

    def by_triton(ids: jax.Array) -> GroupOrder:
        from kernels.engines.matmul.ordering_triton import sorted_by_counting

        return GroupOrder(*sorted_by_counting(ids, num_groups))

    def by_xla(ids: jax.Array) -> GroupOrder:
        return sorted_by_xla(ids, num_groups)

    installed = all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))
    branches = dict.fromkeys(PLATFORMS, by_xla)
    if platform == "triton" and interpreting():
        branches = dict.fromkeys(PLATFORMS, by_triton)
    elif platform != "xla" and installed:
        branches["cuda"] = by_triton
    shapes = (tokens, top_k), (tokens * top_k,), (tokens * top_k,), (num_groups,)
    leaves: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    result = GroupOrder(*leaves)
    if not tokens * top_k:
        return by_xla(groups.astype(jnp.int32))
    return apply("group_order", branches, result, groups.astype(jnp.int32))


def sorted_by_xla(ids: jax.Array, num_groups: int) -> GroupOrder:
    """Returns the same from XLA's sort: what the kernels are compared with."""
    tokens, top_k = ids.shape
    inside = (ids >= 0) & (ids < num_groups)
    # GPUs sort unsigned integers fastest.
    keys = jnp.where(inside, ids, num_groups).reshape(-1).astype(jnp.uint32)
    index = vary_alike(jnp.arange(tokens * top_k, dtype=jnp.int32), keys)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True).reshape(tokens, top_k)
    # Compare and sum in place: on a mesh a scatter would gather all choices first.
    sizes = jnp.sum(ids[..., None] == jnp.arange(num_groups), axis=(0, 1), dtype=jnp.int32)
    pairs = jnp.where(index < sizes.sum(), order, -1)
    return GroupOrder(jnp.where(inside, place, -1), pairs, jnp.where(pairs < 0, -1, pairs // top_k), sizes)
