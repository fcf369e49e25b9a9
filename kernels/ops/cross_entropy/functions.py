"""What users call: cross entropy for each token, and reduced."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels._core.binding import is_array
from kernels._core.dims import leading
from kernels._core.public import Prepared, public
from kernels.ops.cross_entropy.contract import logits_op, op

# What most data pipelines of the field mark tokens with that do not count.
ALSO_IGNORED = -100


class TokenLosses(NamedTuple):
    """Per-token terms, float32, zero where the target is ignored."""

    loss: jax.Array
    z_loss: jax.Array
    counted: jax.Array  # 1 where the token counts, 0 where it is ignored


def token_losses(
    lse: jax.Array,
    target_logit: jax.Array,
    mean_logit: jax.Array,
    targets: jax.Array,
    *,
    vocabulary: int,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLosses:
    """Returns the terms of cross entropy from the outputs of the operation, for a vocabulary of that many tokens.

    loss = lse - (1 - s) target_logit - s mean_logit with smoothing s; z_loss = z lse^2. An ignored token is selected
    away, not multiplied by zero: an infinite lse of padding would otherwise make the loss NaN.
    """
    counted = (targets != ignore_index) & (targets != ALSO_IGNORED)
    loss = lse - (1 - label_smoothing) * target_logit
    if label_smoothing:  # the mean is -inf where a token of the vocabulary is masked out
        loss = loss - label_smoothing * mean_logit
    # A target that is no token and is not ignored is the caller's mistake. Under a trace it cannot raise, so it shows, in
    # the loss and in the gradients.
    stray = counted & ((targets < 0) | (targets >= vocabulary))
    loss = loss * jnp.where(stray, jnp.nan, 1.0)
    return TokenLosses(
        jnp.where(counted, loss, 0.0), jnp.where(counted, z_loss * lse * lse, 0.0), counted.astype(jnp.float32)
    )


@public(op, logits_op)
def fused_token_losses(
    hidden: jax.Array | None = None,
    lm_head: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    logits: jax.Array | None = None,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
) -> Prepared:
    """Returns the terms of `fused_cross_entropy` for each token, `TokenLosses` of [*lead], for a caller who sums and counts
    on its own.

    A training step wants this: with gradient accumulation the mean is over the tokens of all its parts.

    >>> import jax.numpy as jnp
    >>> terms = fused_token_losses(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> print(terms.loss.round(4), terms.counted)  # log 8, and a token that is ignored
    [2.0794 0.    ] [1. 0.]
    """
    if targets is None:
        raise ValueError("fused_cross_entropy: argument 'targets' is missing")
    if (logits is None) == (hidden is None) or (hidden is None) != (lm_head is None):
        raise ValueError("fused_cross_entropy: give either 'hidden' and 'lm_head', or 'logits'")
    for name, x in (("hidden", hidden), ("lm_head", lm_head), ("logits", logits), ("targets", targets)):
        if x is not None and not is_array(x) and not (name == "targets" and isinstance(x, (list, tuple, int))):
            raise ValueError(f"fused_cross_entropy: argument {name!r} must be an array, got {type(x).__name__}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"fused_cross_entropy: argument 'label_smoothing' must be in [0, 1), got {label_smoothing}")
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"fused_cross_entropy: argument 'z_loss' must not be negative, got {z_loss}; 0 for none")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(
            f"fused_cross_entropy: argument 'logits_soft_cap' must be positive, got {logits_soft_cap}; None for no cap"
        )
    targets = jnp.asarray(targets)
    given: Any = {"hidden": hidden, "lm_head": lm_head} if logits is None else {"logits": logits}
    lead = next(iter(given.values())).shape[:-1]
    if targets.shape != lead:
        raise ValueError(f"fused_cross_entropy: argument 'targets' must have shape {lead}, got {targets.shape}")
    cap = {} if logits_soft_cap is None else {"logits_soft_cap": float(logits_soft_cap)}
    own = op if logits is None else logits_op
    # The operation knows no ignored index: whatever is no token has logit 0 there.
    call = own.bind(**given, targets=targets, **cap)

    def finish(lse: jax.Array, target_logit: jax.Array, mean_logit: jax.Array) -> TokenLosses:
        return token_losses(
            lse,
            target_logit,
            mean_logit,
            targets,
            vocabulary=call.dims["V"],
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    return Prepared(call, finish=finish, dims=leading(targets.ndim), op=own)


@public(op, logits_op)
def fused_cross_entropy(
    hidden: jax.Array | None = None,
    lm_head: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    logits: jax.Array | None = None,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    weights: jax.Array | None = None,
    reduction: str = "mean",
) -> Prepared:
    """Returns the cross entropy of targets under softmax(cap(hidden lm_head)), plus z_loss * lse^2, in float32.

    Args:
      hidden: [*lead, D]; lm_head: [D, V]. Their product exists only a block of tokens at a time.
      targets: int [*lead]; `ignore_index` and -100 are never counted. Any other target outside [0, V) makes the loss and its
        gradients NaN.
      logits: [*lead, V], instead of hidden and lm_head.
      label_smoothing: this much of the target is spread evenly over the vocabulary.
      z_loss: weight of lse^2, which keeps the softmax normaliser near 1 (Chowdhery et al., PaLM, 2022).
      weights: float [*lead], of each token; the mean is over their sum.
      reduction: "mean" over counted tokens (0 if there are none), "sum", or "none" for [*lead].
      cfg: `CrossEntropyConfig(block_rows=...)`, tokens whose logits exist at one time.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> loss = fused_cross_entropy(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> round(float(loss), 4)  # log 8
    2.0794
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"fused_cross_entropy: argument 'reduction' = {reduction!r}: use mean, sum or none")
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    prepared = fused_token_losses.prepare(
        hidden, lm_head, targets, logits=logits, logits_soft_cap=logits_soft_cap, **options
    )
    shape = prepared.call.targets.shape
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != shape:
            raise ValueError(
                f"fused_cross_entropy: argument 'weights' must have shape {shape}, as targets, got {weights.shape}"
            )

    def finish(*outputs: jax.Array) -> jax.Array:
        assert prepared.finish is not None
        terms = prepared.finish(*outputs)
        each, count = terms.loss + terms.z_loss, terms.counted
        if weights is not None:
            each, count = each * weights, count * weights
        if reduction == "none":
            return each
        total, count = jnp.sum(each), jnp.sum(count)
        return total if reduction == "sum" else total / jnp.where(count == 0, 1, count)

    return Prepared(prepared.call, finish=finish, dims=prepared.dims if reduction == "none" else (), op=prepared.op)
