"""Layers one after the other in a program, without a loop: the rows of their stacks, and the order of their backward."""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_vjp
def in_turn(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
    """Returns the input and the weights of a layer, whose gradients are all done before the backward of the layer before it
    begins. Without it a compiler may leave the products that make gradients of matrices for later, and then what they read of
    several layers is alive at once."""
    return x, weights


def _barred(_: None, cotangents: Any) -> Any:
    leaves, tree = jax.tree.flatten(cotangents)
    wanted = [i for i, d in enumerate(leaves) if d.dtype != jax.dtypes.float0]
    for i, d in zip(wanted, jax.lax.optimization_barrier([leaves[i] for i in wanted]), strict=True):
        leaves[i] = d
    return jax.tree.unflatten(tree, leaves)


in_turn.defvjp(lambda x, weights: ((x, weights), None), _barred)


def apart(stacks: Any) -> list[Any]:
    """Returns the rows of stacks. Their gradients are joined at once: those of rows that are indexed would be added to zeros as
    large as the stack, one by one."""
    leaves, tree = jax.tree.flatten(stacks)
    rows = [jax.lax.split(x, (1,) * x.shape[0]) for x in leaves]
    return [jax.tree.unflatten(tree, [x[i].reshape(x[i].shape[1:]) for x in rows]) for i in range(leaves[0].shape[0])]
