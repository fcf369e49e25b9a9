"""Trees of draft tokens for speculative decoding: what each token attends to, and which tokens the model accepts.

Sources: Miao et al., SpecInfer, 2023; Cai et al., Medusa, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.requests import known


def _integers(function: str, name: str, x: Any, form: str, fits: Callable[[tuple[int, ...]], bool]) -> jax.Array:
    """Returns the value as an array. Raises ValueError unless it holds integers and its shape fits."""
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise ValueError(f"{function}: argument {name!r} must be {form}, got {x!r}") from None
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits(array.shape):
        raise ValueError(f"{function}: argument {name!r} must be {form}, got {array.dtype} of shape {array.shape}")
    return array


def _parents(parents: Any, function: str) -> jax.Array:
    """Returns the parents as int32 [B, T], each smaller than its token's own index."""
    form = "integers [T] or [B, T], the index of each token's parent, smaller than its own, or -1 for a root"
    array = _integers(function, "parents", parents, form, lambda shape: len(shape) in (1, 2) and 0 not in shape)
    values, index = known(parents), np.arange(array.shape[-1])
    if values is not None and (values >= index).any():
        place = np.argwhere(values >= index)[0]
        raise ValueError(
            f"{function}: argument 'parents' has {values[*place]} for the token at {place[-1]}; a parent must precede "
            "its token, or be -1 for a root"
        )
    array = (array[None] if array.ndim == 1 else array).astype(jnp.int32)
    # Under a trace, an invalid parent counts as a root: with a cycle, no root would ever be reached.
    return jnp.where(array < index, array, -1)


def _ancestors(parents: jax.Array) -> jax.Array:
    """Returns bool [B, T, T]: whether j is i or an ancestor of i. O(log T) matrix products."""
    T = parents.shape[1]
    index = jnp.arange(T)
    above = parents[:, :, None] == index
    reach = above | jnp.eye(T, dtype=bool)
    for _ in range(max(T - 1, 1).bit_length()):
        twice = jnp.einsum("bij,bjk->bik", reach.astype(jnp.int32), reach.astype(jnp.int32))
        reach = twice > 0
    return reach


def tree_attention_mask(parents: Any, prefix_length: int = 0, prefix_mask: Any = None) -> jax.Array:
    """Returns bool [B, T, prefix_length + T], for `attention_mask` of `flash_attention`: a draft token attends to the
    prefix, to itself, and to its ancestors.

    Args:
      parents: int [T] or [B, T]: the index of each token's parent, smaller than its own; -1 if it follows the prefix
        directly.
      prefix_length: number of keys before those of the tree, which come last.
      prefix_mask: bool [B, prefix_length], true where such a key is valid; default: all are.

    The queries are the T draft tokens. A token's position, for rotary embeddings, is prefix length +
    `tree_depths(parents)`.

    Raises:
      ValueError: names the argument.

    >>> print(tree_attention_mask([-1, 0, 0, 1])[0].astype(int))
    [[1 0 0 0]
     [1 1 0 0]
     [1 0 1 0]
     [1 1 0 1]]
    """
    ancestors = _ancestors(_parents(parents, "tree_attention_mask"))
    if not isinstance(prefix_length, int) or prefix_length < 0:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_length' must be a number of keys, got {prefix_length!r}; if it "
            "differs between rows, pass the longest, and 'prefix_mask'"
        )
    before = jnp.ones((1, prefix_length), bool) if prefix_mask is None else jnp.asarray(prefix_mask)
    if before.dtype != jnp.bool_ or before.ndim != 2 or before.shape[1] != prefix_length:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_mask' must be bool [B, prefix_length = {prefix_length}], got "
            f"{before.dtype} of shape {before.shape}"
        )
    if ancestors.shape[0] > 1 and before.shape[0] > 1 and ancestors.shape[0] != before.shape[0]:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_mask' has {before.shape[0]} rows, but 'parents' has {ancestors.shape[0]}"
        )
    rows = max(ancestors.shape[0], before.shape[0])
    T = ancestors.shape[1]
    parts = [jnp.broadcast_to(before[:, None], (rows, T, prefix_length)), jnp.broadcast_to(ancestors, (rows, T, T))]
    return jnp.concatenate(parts, axis=-1)


def tree_depths(parents: Any) -> jax.Array:
    """Returns int32 [B, T]: the number of ancestors of each token.

    >>> print(tree_depths([-1, 0, 0, 1]))
    [[0 1 1 2]]
    """
    return jnp.sum(_ancestors(_parents(parents, "tree_depths")), axis=-1, dtype=jnp.int32) - 1


def verify_tree(parents: Any, draft_tokens: Any, next_tokens: Any, first_token: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (accepted bool [B, T], last int32 [B]): the longest path of draft tokens from a root that greedy decoding
    would have produced, and the index of its last token, or -1 if no token is accepted.

    A token matches if it is the model's next token after its parent; a path is accepted if all its tokens match. Of
    paths of equal length, as with siblings that propose the same token, the first is taken.

    Args:
      parents: int [T] or [B, T], as in `tree_attention_mask`.
      draft_tokens: int [B, T]. next_tokens: int [B, T], the model's next token after each of them.
      first_token: int [B], the model's next token after the prefix, which a root must match.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> accepted, last = verify_tree([-1, 0, 0, 1], jnp.array([[5, 7, 8, 9]]), jnp.array([[8, 9, 1, 2]]), jnp.array([5]))
    >>> print(accepted, last)
    [[ True False  True False]] [2]
    """
    up = _parents(parents, "verify_tree")
    T = up.shape[1]
    f, form = "verify_tree", f"integers [B, T = {T}]"

    def of_rows(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] == T and up.shape[0] in (1, shape[0])

    drafts = _integers(f, "draft_tokens", draft_tokens, form, of_rows)
    B = drafts.shape[0]
    following = _integers(f, "next_tokens", next_tokens, f"{form} with B = {B}", lambda shape: shape == drafts.shape)
    first = _integers(f, "first_token", first_token, f"integers [B] = ({B},)", lambda shape: shape == (B,))
    up = jnp.broadcast_to(up, drafts.shape)
    before = jnp.take_along_axis(following, jnp.maximum(up, 0), axis=1)
    fits = drafts == jnp.where(up < 0, first[:, None], before)
    above = _ancestors(up)
    length = jnp.where(jnp.all(fits[:, None] | ~above, axis=-1), jnp.sum(above, axis=-1), 0)
    last = jnp.argmax(length, axis=-1)
    some = jnp.max(length, axis=-1) > 0
    path = jnp.take_along_axis(above, last[:, None, None], axis=1)[:, 0]
    return path & some[:, None], jnp.where(some, last, -1).astype(jnp.int32)
