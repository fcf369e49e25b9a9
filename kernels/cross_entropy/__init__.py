"""Cross entropy from hidden states and the output projection, or from logits, with no whole logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.cross_entropy.contract import CrossEntropyConfig, op

__all__ = ["CrossEntropyConfig", "TokenLosses", "fused_cross_entropy", "op", "token_losses"]


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
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLosses:
    """Returns the terms of cross entropy from what `op` returns, or from its parts joined over vocabulary shards.

    loss = lse - (1 - s) target_logit - s mean_logit with smoothing s; z_loss = z lse^2.
    """
    counted = (targets != ignore_index).astype(jnp.float32)
    loss = lse - (1 - label_smoothing) * target_logit - label_smoothing * mean_logit
    return TokenLosses(loss * counted, z_loss * lse * lse * counted, counted)


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
    platform: str | None = None,
    cfg: CrossEntropyConfig | None = None,
) -> jax.Array:
    """Returns the cross entropy of targets under softmax(cap(hidden lm_head)), plus z_loss * lse^2.

    Args:
      hidden: [..., D]; lm_head: [D, V]. Their product exists only a block of tokens at a time.
      targets: int [...]; `ignore_index` is never counted.
      logits: [..., V], instead of hidden and lm_head.
      label_smoothing: this much of the target is spread evenly over the vocabulary.
      weights: float [...], of each token; the mean is over their sum.
      reduction: "mean" over counted tokens (0 if there are none), "sum", or "none" for [...].

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> loss = fused_cross_entropy(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> round(float(loss), 4)  # log 8
    2.0794
    """
    if targets is None:
        raise ValueError("argument 'targets' is missing")
    if (logits is None) == (hidden is None) or (hidden is None) != (lm_head is None):
        raise ValueError("give either 'hidden' and 'lm_head', or 'logits'")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"argument 'reduction' = {reduction!r}: use mean, sum or none")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"argument 'label_smoothing' must be in [0, 1), got {label_smoothing}")
    lead = (hidden if logits is None else logits).shape[:-1]
    if tuple(targets.shape) != tuple(lead):
        raise ValueError(f"argument 'targets' must have shape {tuple(lead)}, got {tuple(targets.shape)}")
    if logits is not None:
        parts = _of_logits(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), logits_soft_cap)
    else:
        flat = hidden.reshape(-1, hidden.shape[-1])
        cap = None if logits_soft_cap is None else float(logits_soft_cap)
        parts = op(flat, lm_head, targets.reshape(-1), logits_soft_cap=cap, platform=platform, cfg=cfg)
    terms = token_losses(
        *parts, targets.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    each, count = terms.loss + terms.z_loss, terms.counted
    if weights is not None:
        each, count = each * weights.reshape(-1), count * weights.reshape(-1)
    if reduction == "none":
        return each.reshape(lead)
    total = jnp.sum(each)
    return total if reduction == "sum" else total / jnp.where(jnp.sum(count) == 0, 1, jnp.sum(count))


def _of_logits(logits: jax.Array, targets: jax.Array, cap: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    # The caller has the logits already, so plain autodiff costs no memory that is not spent.
    logits = logits.astype(jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(targets >= 0, at_target, 0), jnp.mean(logits, axis=-1)
