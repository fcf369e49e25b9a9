"""Trees of draft tokens, as speculative decoding verifies them: what each sees, and which a model agrees with.

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
    """Returns the array. Raises ValueError unless it holds integers, and its shape fits."""
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise ValueError(f"{function}: argument {name!r} must be {form}, got {x!r}") from None
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits(array.shape):
        raise ValueError(f"{function}: argument {name!r} must be {form}, got {array.dtype} of shape {array.shape}")
    return array


def _parents(parents: Any, function: str) -> jax.Array:
    """Returns the parents as int32 [B, T], each before its token."""
    form = "integers [T] or [B, T], the place of each token's parent before it and -1 for a root"
    array = _integers(function, "parents", parents, form, lambda shape: len(shape) in (1, 2) and 0 not in shape)
    values, at = known(parents), np.arange(array.shape[-1])
    if values is not None and (values >= at).any():
        place = np.argwhere(values >= at)[0]
        raise ValueError(
            f"{function}: argument 'parents' has {values[*place]} for the token at {place[-1]}, and a parent is before its "
            "token; -1 for a root"
        )
    array = (array[None] if array.ndim == 1 else array).astype(jnp.int32)
    # Under a trace one that is not before its token is none: a circle would never reach a root.
    return jnp.where(array < at, array, -1)


def _ancestors(parents: jax.Array) -> jax.Array:
    """Returns bool [B, T, T]: whether j is i, or above it in the tree. O(log T) products."""
    T = parents.shape[1]
    at = jnp.arange(T)
    above = parents[:, :, None] == at
    reach = above | jnp.eye(T, dtype=bool)
    for _ in range(max(T - 1, 1).bit_length()):
        twice = jnp.einsum("bij,bjk->bik", reach.astype(jnp.int32), reach.astype(jnp.int32))
        reach = twice > 0
    return reach


def tree_attention_mask(parents: Any, prefix_length: int = 0, prefix_mask: Any = None) -> jax.Array:
    """Returns bool [B, T, prefix_length + T], for `attention_mask` of `flash_attention`: a draft token sees the prefix, itself,
    and its ancestors.

    Args:
      parents: int [T] or [B, T]: the place of each token's parent, before the token's own; -1 for one that follows the prefix.
      prefix_length: keys before the tree's own, which lie last.
      prefix_mask: bool [B, prefix_length], true where such a key is valid; default: all are.

    Queries are the T draft tokens. A token's position, for its rotation, is prefix length + `tree_depths(parents)`.

    Raises:
      ValueError: naming the argument.

    >>> print(tree_attention_mask([-1, 0, 0, 1])[0].astype(int))
    [[1 0 0 0]
     [1 1 0 0]
     [1 0 1 0]
     [1 1 0 1]]
    """
    own = _ancestors(_parents(parents, "tree_attention_mask"))
    if not isinstance(prefix_length, int) or prefix_length < 0:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_length' must be a number of keys, got {prefix_length!r}; where rows have "
            "different ones, give the longest, and 'prefix_mask'"
        )
    before = jnp.ones((1, prefix_length), bool) if prefix_mask is None else jnp.asarray(prefix_mask)
    if before.dtype != jnp.bool_ or before.ndim != 2 or before.shape[1] != prefix_length:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_mask' must be bool [B, prefix_length = {prefix_length}], got "
            f"{before.dtype} of shape {before.shape}"
        )
    if own.shape[0] > 1 and before.shape[0] > 1 and own.shape[0] != before.shape[0]:
        raise ValueError(
            f"tree_attention_mask: argument 'prefix_mask' has {before.shape[0]} rows, and 'parents' {own.shape[0]}"
        )
    rows = max(own.shape[0], before.shape[0])
    T = own.shape[1]
    parts = [jnp.broadcast_to(before[:, None], (rows, T, prefix_length)), jnp.broadcast_to(own, (rows, T, T))]
    return jnp.concatenate(parts, axis=-1)


def tree_depths(parents: Any) -> jax.Array:
    """Returns int32 of the shape [B, T]: how many ancestors each token has.

    >>> print(tree_depths([-1, 0, 0, 1]))
    [[0 1 1 2]]
    """
    return jnp.sum(_ancestors(_parents(parents, "tree_depths")), axis=-1, dtype=jnp.int32) - 1


def verify_tree(parents: Any, draft_tokens: Any, next_tokens: Any, first_token: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (accepted bool [B, T], last int32 [B]): the draft tokens that greedy decoding would have made, the longest path
    of such from a root, and the place of its last one, -1 where there is none.

    A token fits if it is the model's next token after its parent; a path is accepted where all of it fits. Of two that are
    equally long, as of siblings that propose the same token, the first is taken.

    Args:
      parents: int [T] or [B, T], as in `tree_attention_mask`.
      draft_tokens: int [B, T]. next_tokens: int [B, T], the model's own choice after each of them.
      first_token: int [B], the model's choice after the prefix, that a root must be.

    Raises:
      ValueError: naming the argument.

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
