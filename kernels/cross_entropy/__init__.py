"""Cross entropy from hidden states and the output projection, or from logits, with no whole logits in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.cross_entropy.contract import CrossEntropyConfig, op

__all__ = [
    "CrossEntropyConfig",
    "TokenLosses",
    "fused_cross_entropy",
    "fused_token_losses",
    "join_vocabulary_shards",
    "op",
    "token_losses",
]


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

    loss = lse - (1 - s) target_logit - s mean_logit with smoothing s; z_loss = z lse^2. An ignored token is selected
    away, not multiplied by zero: an infinite lse of padding would otherwise make the loss NaN.
    """
    counted = targets != ignore_index
    loss = lse - (1 - label_smoothing) * target_logit - label_smoothing * mean_logit
    return TokenLosses(
        jnp.where(counted, loss, 0.0), jnp.where(counted, z_loss * lse * lse, 0.0), counted.astype(jnp.float32)
    )


def join_vocabulary_shards(
    lse: jax.Array, target_logit: jax.Array, mean_logit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the outputs of `op` over the whole vocabulary from those over its n equal shards, stacked as [n, ...].

    Shard i was called with `targets - i * V / n`: a target of another shard is out of range there and has logit 0.
    On a mesh, stack with `jax.lax.all_gather`; the gradients of every shard follow by differentiation.
    """
    return jax.nn.logsumexp(lse, axis=0), jnp.sum(target_logit, axis=0), jnp.mean(mean_logit, axis=0)


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
    platform: str | None = None,
    cfg: CrossEntropyConfig | None = None,
) -> TokenLosses:
    """Returns the terms of `fused_cross_entropy` for each token, [...], for a caller who sums and counts on its own.

    A training step wants this: with gradient accumulation the mean is over the tokens of all its parts.
    """
    if targets is None:
        raise ValueError("argument 'targets' is missing")
    if (logits is None) == (hidden is None) or (hidden is None) != (lm_head is None):
        raise ValueError("give either 'hidden' and 'lm_head', or 'logits'")
    whole: Any = hidden if logits is None else logits
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"argument 'label_smoothing' must be in [0, 1), got {label_smoothing}")
    if logits_soft_cap is not None and logits_soft_cap <= 0:
        raise ValueError(f"argument 'logits_soft_cap' must be positive, got {logits_soft_cap}; None for no cap")
    targets = jnp.asarray(targets)
    lead = whole.shape[:-1]
    if targets.shape != lead:
        raise ValueError(f"argument 'targets' must have shape {lead}, got {targets.shape}")
    cap = None if logits_soft_cap is None else float(logits_soft_cap)
    flat = targets.reshape(-1)
    if logits is not None:
        vocabulary = logits.shape[-1]
        parts: Any = _of_logits(logits.reshape(-1, vocabulary), flat, cap)
    else:
        assert hidden is not None and lm_head is not None
        vocabulary = lm_head.shape[-1]
        rows = hidden.reshape(-1, hidden.shape[-1])
        parts = op(rows, lm_head, flat, logits_soft_cap=cap, platform=platform, cfg=cfg)
    lse, at_target, mean = parts
    terms = token_losses(
        lse, at_target, mean, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    # A target that is no token and is not ignored is the caller's mistake. Under a trace it cannot raise, so it shows.
    stray = (flat != ignore_index) & ((flat < 0) | (flat >= vocabulary))
    terms = terms._replace(loss=jnp.where(stray, jnp.nan, terms.loss))
    return TokenLosses(*(x.reshape(lead) for x in terms))


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
    """Returns the cross entropy of targets under softmax(cap(hidden lm_head)), plus z_loss * lse^2, in float32.

    Args:
      hidden: [..., D]; lm_head: [D, V]. Their product exists only a block of tokens at a time.
      targets: int [...]; `ignore_index` is never counted. Any other target outside [0, V) makes the loss NaN.
      logits: [..., V], instead of hidden and lm_head.
      label_smoothing: this much of the target is spread evenly over the vocabulary.
      z_loss: weight of lse^2, which keeps the softmax normaliser near 1 (Chowdhery et al., PaLM, 2022).
      weights: float [...], of each token; the mean is over their sum.
      reduction: "mean" over counted tokens (0 if there are none), "sum", or "none" for [...].
      cfg: `CrossEntropyConfig(block_rows=...)`, tokens whose logits exist at one time.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> loss = fused_cross_entropy(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> round(float(loss), 4)  # log 8
    2.0794
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"argument 'reduction' = {reduction!r}: use mean, sum or none")
    terms = fused_token_losses(
        hidden,
        lm_head,
        targets,
        logits=logits,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logits_soft_cap=logits_soft_cap,
        platform=platform,
        cfg=cfg,
    )
    each, count = terms.loss + terms.z_loss, terms.counted
    if weights is not None:
        if weights.shape != count.shape:
            raise ValueError(f"argument 'weights' must have shape {count.shape}, as targets, got {weights.shape}")
        each, count = each * weights, count * weights
    if reduction == "none":
        return each
    total, count = jnp.sum(each), jnp.sum(count)
    return total if reduction == "sum" else total / jnp.where(count == 0, 1, count)


def _of_logits(logits: jax.Array, targets: jax.Array, cap: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    # The caller has the logits already, so plain autodiff costs no memory that is not spent.
    logits = logits.astype(jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    V = logits.shape[-1]
    at_target = jnp.take_along_axis(logits, jnp.clip(targets, 0, V - 1)[:, None], axis=1)[:, 0]
    inside = (targets >= 0) & (targets < V)
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, at_target, 0), jnp.mean(logits, axis=-1)
