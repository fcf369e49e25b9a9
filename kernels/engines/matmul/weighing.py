"""Rows by their weights, and the gradient of these, where the products of the rows are added up by weight."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.matmul.activations import ACTIVATIONS
from kernels.framework.dispatch import apply
from kernels.framework.interpret import interpreting
from kernels.framework.platforms import PLATFORMS


class Weighed(NamedTuple):
    """With w the weight of each of M rows; undefined in rows that have no pair, but for the gradient.

    Attributes:
      d: the cotangents times w, of rows [M, F], or of the products [M, width] that they are the activation of.
      rows: [M, F], the rows times w.
      d_weight: float32 [M], the product of each row with its cotangent; 0 of a row that has no pair.
    """

    d: jax.Array
    rows: jax.Array
    d_weight: jax.Array


def weigh(
    d: jax.Array,
    rows: jax.Array,
    pairs: jax.Array,
    weights: jax.Array,
    *,
    activation: str | None = None,
    platform: str | None = None,
) -> Weighed:
    """Returns rows and their cotangents times their weights, and the gradients of the weights, in one pass on NVIDIA GPUs.

    Weights are of y = rows matrix, and d_y are the cotangents of y before they are weighed. With d = d_y transposed(matrix) the
    gradient of a weight is <d_y, y> = <d, rows>: neither y nor w d_y need be in memory.

    Args:
      d: [M, F].
      rows: [M, F]; or with an activation products [M, 2 F], of a gate and an up projection: then rows are
        activation(gate) * up.
      pairs: int32 [M], which of `weights`, counted through, is of a row; -1 for none.
      weights: float [tokens, k].
      platform: "triton" or "xla" to use that one; None for the fastest where this is compiled for.
    """

    def by_triton(d: jax.Array, rows: jax.Array, pairs: jax.Array, weights: jax.Array) -> Weighed:
        from kernels.engines.matmul.weighing_triton import weighed

        return Weighed(*weighed(d, rows, pairs, weights, activation))

    by_xla = functools.partial(_by_xla, activation=activation)
    installed = all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))
    branches = dict.fromkeys(PLATFORMS, by_xla)
    if platform == "triton" and interpreting():
        branches = dict.fromkeys(PLATFORMS, by_triton)
    elif platform != "xla" and installed:
        branches["cuda"] = by_triton
    shapes = jax.ShapeDtypeStruct(rows.shape, rows.dtype), jax.ShapeDtypeStruct(d.shape, rows.dtype)
    result = Weighed(*shapes, jax.ShapeDtypeStruct(d.shape[:1], jnp.float32))  # pyrefly: ignore[bad-argument-type]
    return apply("weigh", branches, result, d.astype(rows.dtype), rows, pairs, weights)


def _by_xla(d: jax.Array, rows: jax.Array, pairs: jax.Array, weights: jax.Array, *, activation: str | None) -> Weighed:
    weight = jnp.where(pairs >= 0, weights.reshape(-1)[jnp.maximum(pairs, 0)], 0).astype(jnp.float32)[:, None]

    def activated(products: jax.Array) -> jax.Array:
        if activation is None:
            return products
        gate, up = jnp.split(products, 2, axis=1)
        return ACTIVATIONS[activation](gate) * up

    wide, pull = jax.vjp(activated, rows.astype(jnp.float32))
    wide_d = d.astype(jnp.float32)
    d_weight = jnp.where(pairs >= 0, jnp.sum(wide * wide_d, axis=1), 0)
    return Weighed(pull(weight * wide_d)[0].astype(rows.dtype), (weight * wide).astype(rows.dtype), d_weight)
