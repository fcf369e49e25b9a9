"""A matrix that is not trained: its numbers as they are stored, and the adapter that may be trained beside it.

Its product with x is `x W + strength (x a) b`, from three parts: there is no array of W's size beside W, neither a sum with the
adapter nor a gradient. Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, equation 3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = 127  # of int8, of which -128 is not used


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale", "a", "b"], meta_fields=["strength"])
@dataclass(frozen=True)
class Frozen:
    """A frozen matrix, or a stack of them.

    Attributes:
      values: its numbers, in a float dtype or int8, as the layout stores a parameter.
      scale: of int8 values, float32 with the dims of `values`, of size 1 where a product sums: the matrix is values * scale.
      a: [dims that a product sums over, rank]. b: [rank, the other dims]. None: no adapter.
      strength: what the adapter's product is multiplied by.
    """

    values: Any
    scale: Any = None
    a: Any = None
    b: Any = None
    strength: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def whole(self, dtype: Any) -> jax.Array:
        """Returns the matrix without its adapter as an array of a dtype. Raises ValueError if it has an adapter."""
        if self.a is not None:
            raise ValueError("a matrix with an adapter is multiplied by `project` alone: it has no form as one array")
        if self.scale is None:
            return self.values.astype(dtype)
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)

    def adapter_in(self, dtype: Any) -> Frozen:
        """Returns the same with its adapter in a dtype; the values stay as they are."""
        return self if self.a is None else replace(self, a=self.a.astype(dtype), b=self.b.astype(dtype))


def adapter_dims(dims: Sequence[str], inputs: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the dims of `a` and of `b`, beside a matrix with those dims of which a product sums over `inputs`. The rank is
    "_", which no axis splits. Each other dim is sharded as in the matrix, in which R is whole beside a D: both are split over
    the same axes."""
    dim_of = {d: "_" if d == "R" and "D" in dims else d for d in dims}
    return [*(dim_of[d] for d in dims if d in inputs), "_"], ["_", *(dim_of[d] for d in dims if d not in inputs)]


def quantised(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns (values in int8, scale in float32) of a matrix: rounded to the nearest of 255 multiples of its channel's scale,
    the largest absolute number over 127.

    Args:
      x: floats. axes: the dims that a product sums over, of which each output channel has all.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale
