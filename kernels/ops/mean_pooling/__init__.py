"""Mean pooling: one vector per sequence, the mean of its valid tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework import segments
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.framework.requests import known
from kernels.ops.mean_pooling.contract import MeanPoolingConfig, op

__all__ = ["MeanPoolingConfig", "mean_pooling", "op"]


def _valid(attention_mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns the mask as bool [B, T]."""
    mask = jnp.asarray(attention_mask)
    if jnp.issubdtype(mask.dtype, jnp.inexact):
        # 0 / -inf and 1 / 0 are both common conventions, with opposite meanings.
        raise ValueError(
            f"mean_pooling: argument 'attention_mask' must be boolean or 0/1 integers, true where a token is valid, got "
            f"{mask.dtype}; write attention_mask > 0, or attention_mask == 0 for a mask that is added to logits"
        )
    if mask.shape != shape:
        raise ValueError(
            f"mean_pooling: argument 'attention_mask' must have the shape [B, T] = {shape} of x's tokens, got {mask.shape}"
        )
    return mask if mask.dtype == jnp.bool_ else mask != 0


def _cuts(cum_seqlens: Any, batch: Any) -> jax.Array:
    cuts = jnp.asarray(cum_seqlens)
    if cuts.ndim != 1 or cuts.shape[0] < 2 or not jnp.issubdtype(cuts.dtype, jnp.integer):
        raise ValueError(
            "mean_pooling: argument 'cum_seqlens' must be integers [0, n1, n1 + n2, ...], with one more entry than sequences, "
            f"got {cuts.dtype} of shape {cuts.shape}"
        )
    if batch != 1:
        raise ValueError(
            f"mean_pooling: argument 'cum_seqlens' splits one packed row, but x has B = {batch}; reshape x to [1, B * T, D], "
            "or pass 'attention_mask'"
        )
    values = known(cum_seqlens)
    if values is not None and (values[1:] < values[:-1]).any():
        raise ValueError(
            "mean_pooling: argument 'cum_seqlens' must be nondecreasing, [0, n1, n1 + n2, ...], got "
            f"{values.tolist()[:8]}; pass cumulative sums of the lengths, not the lengths"
        )
    return cuts.astype(jnp.int32)  # T may not fit in a narrower dtype


@public(op)
def mean_pooling(
    x: jax.Array, attention_mask: Any = None, *, cum_seqlens: Any = None, cu_seqlens: Any = None
) -> Prepared:
    """Returns the mean of the valid tokens of each sequence, accumulated in float32, in the dtype of x: [B, D], or with
    `cum_seqlens` [sequences, D]. The mean of a sequence without valid tokens is 0.

    Args:
      x: [B, T, D].
      attention_mask: bool, or integers 0 and 1, [B, T], true where a token is valid; None: all are. Other tokens are
        ignored, even if they contain NaN.
      cum_seqlens: int [sequences + 1], cumulative lengths [0, n1, n1 + n2, ...]: x is one row (B = 1) of packed
        sequences. Tokens past the last one are ignored. `cu_seqlens` is another name for it.
      cfg: `MeanPoolingConfig`.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]])
    >>> print(mean_pooling(x, jnp.array([[1, 1, 0]])))
    [[2. 4.]]
    >>> print(mean_pooling(x, cum_seqlens=[0, 2, 3]))
    [[2. 4.]
     [9. 9.]]
    """
    if cu_seqlens is not None:
        if cum_seqlens is not None:
            raise ValueError("mean_pooling: argument 'cu_seqlens' is 'cum_seqlens' by another name; pass only one")
        cum_seqlens = cu_seqlens
    if not is_array(x) or not is_float_array(x) or x.ndim != 3:
        got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
        hint = "; one sequence is x[None]" if is_array(x) and x.ndim == 2 else ""
        raise ValueError(f"mean_pooling: argument 'x' must be a float array [B, T, D], got {got}{hint}")
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        raise ValueError(f"mean_pooling: argument 'x' of shape {x.shape} has no elements; give it at least one token")
    B, T, _ = x.shape
    valid = None if attention_mask is None else _valid(attention_mask, (B, T))
    cuts = None if cum_seqlens is None else _cuts(cum_seqlens, B)
    # The number of tokens of a mean is counted here, over whole sequences, however x is split.
    if cuts is None:
        valid = jnp.ones((B, T), bool) if valid is None else valid
        ids, count = jnp.where(valid, 0, -1), jnp.sum(valid, axis=1)[:, None]
    else:
        ids, inside = segments.of_cuts(cuts, T), jnp.clip(cuts, 0, T)
        if valid is None:
            before = inside
        else:
            ids = jnp.where(valid, ids, -1)
            before = jnp.pad(jnp.cumsum(valid[0], dtype=jnp.int32), (1, 0))[inside]
        count = jnp.diff(before)[None]
    call = op.bind(x, ids.astype(jnp.int32), num_segments=count.shape[1])

    def finish(total: jax.Array, count: jax.Array) -> jax.Array:
        mean = (total / jnp.maximum(count, 1)[..., None]).astype(x.dtype)
        return mean[:, 0] if cuts is None else mean[0]

    dims, named = (("B", "D"), "") if cuts is None else (("G", "D"), "cum_seqlens")
    return Prepared(call, finish=finish, dims=dims, cuts=named, sums=(count,))
