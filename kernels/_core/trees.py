"""Masks of trees of drafted tokens, for speculative decoding: a node sees the text before the tree, its ancestors, itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def tree_mask(parents: Any, prefix_length: int = 0) -> jax.Array:
    """Returns bool [B, T, prefix_length + T], an `attention_mask` of attention: whether a node of a tree sees a token.

    All candidates of a draft are verified in one call: the keys are those of the text so far and of the nodes, the queries
    those of the nodes. The position of a node is that of its depth, `prefix_length + number of ancestors`: what it sees, less
    one, `tree_mask(...).sum(-1) - 1`; rotary embeddings need it.

    Args:
      parents: int [T] or [B, T]: the place of each node's parent among the nodes, before its own; -1: the node follows the text
        itself; -2: padding, which sees nothing and is not seen.
      prefix_length: tokens of text before the nodes, which every node sees.

    Raises:
      ValueError: `parents` are no such integers, or name a node that does not come before (where their values are known).

    Source: X. Miao et al., SpecInfer, 2023, arXiv:2305.09781 (tree attention).

    >>> print(tree_mask([-1, 0, 0, 2], prefix_length=1)[0].astype(int))
    [[1 1 0 0 0]
     [1 1 1 0 0]
     [1 1 0 1 0]
     [1 1 0 1 1]]
    """
    array = jnp.asarray(parents)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(
            f"tree_mask: argument 'parents' must be integers [T] or [B, T], got {array.dtype} of shape {array.shape}"
        )
    if not isinstance(prefix_length, (int, np.integer)) or prefix_length < 0:
        raise ValueError(f"tree_mask: argument 'prefix_length' must be an integer of at least 0, got {prefix_length!r}")
    array = array if array.ndim == 2 else array[None]
    T = array.shape[1]
    at = jnp.arange(T)
    if not isinstance(parents, jax.core.Tracer):
        wrong = np.argwhere((np.asarray(parents) >= np.arange(T)) | (np.asarray(parents) < -2))
        if wrong.size:
            raise ValueError(
                f"tree_mask: argument 'parents' has a parent at {tuple(wrong[0].tolist())} that does not come before its node: "
                "order the nodes so that parents come first; -1 is a node without one, -2 padding"
            )
    real = array > -2
    seen = ((at == at[:, None]) | (at == array[..., None])) & real[..., None] & real[:, None]
    steps = 1
    while steps < T:  # what is seen by what is seen: twice as far up with every turn
        seen = jnp.einsum("bij,bjk->bik", seen.astype(jnp.float32), seen.astype(jnp.float32)) > 0
        steps *= 2
    text = jnp.broadcast_to(real[..., None], (*array.shape, prefix_length))
    return jnp.concatenate([text, seen], axis=2)
