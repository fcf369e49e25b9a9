"""Public functions: cross entropy per token, and reduced."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.rows.losses import check_reduction, is_counted, reduced, reduced_sum
from kernels.engines.rows.vocabulary import no_features
from kernels.framework.binding import is_array
from kernels.framework.dims import leading
from kernels.framework.public import Prepared, public
from kernels.framework.segments import indices
from kernels.ops.cross_entropy.contract import (
    TokenLosses,
    check_options,
    logits_op,
    op,
    sums_op,
    token_losses,
)


class LossSums(NamedTuple):
    """Weighted sums over the counted tokens, float32 scalars. Each is differentiable."""

    total: jax.Array  # loss + z_loss: what a training step differentiates
    loss: jax.Array  # cross entropy alone, without z_loss
    z_loss: jax.Array  # the term added by the argument z_loss; zero without it
    counted: jax.Array  # sum of the token weights, or the number of tokens


def _check_arrays(hidden: Any, lm_head: Any, targets: Any, logits: Any) -> None:
    if targets is None:
        raise ValueError("fused_cross_entropy: argument 'targets' is missing")
    if (logits is None) == (hidden is None) or (hidden is None) != (lm_head is None):
        raise ValueError("fused_cross_entropy: pass either 'hidden' and 'lm_head', or 'logits'")
    for name, x in (("hidden", hidden), ("lm_head", lm_head), ("logits", logits), ("targets", targets)):
        if x is not None and not is_array(x) and not (name == "targets" and isinstance(x, (list, tuple, int))):
            raise ValueError(f"fused_cross_entropy: argument {name!r} must be an array, got {type(x).__name__}")
    for name, x in (("hidden", hidden), ("lm_head", lm_head), ("logits", logits)):
        if x is not None and no_features(x):
            raise ValueError(
                f"fused_cross_entropy: argument {name!r} of shape {x.shape} has no features, or no vocabulary"
            )


def _check_shape(name: str, x: jax.Array, lead: tuple[int, ...]) -> None:
    if x.shape != lead:
        of = "" if name == "targets" else ", as targets"
        raise ValueError(f"fused_cross_entropy: argument {name!r} must have shape {lead}{of}, got {x.shape}")


def _as_weights(weights: Any) -> jax.Array:
    """Returns the weights as floats; integer and boolean weights have no gradient."""
    weights = jnp.asarray(weights)
    return weights if jnp.issubdtype(weights.dtype, jnp.floating) else weights.astype(jnp.float32)


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
    """Returns the terms of `fused_cross_entropy` per token, `TokenLosses` of [*lead], for callers that reduce themselves.

    `loss` equals the result of `reduction="none"`, including z_loss; `z_loss` is that part of it; `counted` is 1 where a
    token counts. Cross entropy alone is `loss - z_loss`, or the loss of a call without z_loss.

    The backward recomputes the logits, because the cotangents of the tokens are known only after the forward;
    `fused_loss_sums` does not.

    >>> import jax.numpy as jnp
    >>> terms = fused_token_losses(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> print(terms.loss.round(4), terms.counted)  # log 8, and an ignored token
    [2.0794 0.    ] [1. 0.]
    """
    _check_arrays(hidden, lm_head, targets, logits)
    check_options("fused_cross_entropy", label_smoothing, z_loss, logits_soft_cap)
    targets = indices(targets)  # converted to int32: in 8 or 16 bits an ignored index could wrap to a token
    arrays: Any = {"hidden": hidden, "lm_head": lm_head} if logits is None else {"logits": logits}
    _check_shape("targets", targets, next(iter(arrays.values())).shape[:-1])
    cap = {} if logits_soft_cap is None else {"logits_soft_cap": float(logits_soft_cap)}
    operation = op if logits is None else logits_op
    # The operation has no ignored index: there, the logit of an invalid target is 0.
    call = operation.bind(**arrays, targets=targets, **cap)

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

    return Prepared(call, finish=finish, dims=leading(targets.ndim), op=operation)


@public(sums_op)
def fused_loss_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
) -> Prepared:
    """Returns the terms of `fused_cross_entropy` summed over the tokens, `LossSums`. Use this in a training step: under
    gradient accumulation the mean is over the tokens of all microbatches.

    `total` equals the result of `reduction="sum"`: `loss`, the cross entropy, plus `z_loss`. Differentiate `total`: the
    gradient of either part alone is also correct, but with a z_loss its backward recomputes the logits.

    All tokens of `total` share one cotangent, so a differentiated call computes the gradients block by block while it
    has the logits, and the backward only scales them: three matmuls, where `fused_token_losses` has four. The residuals
    are the gradient of hidden, in its dtype, and of lm_head, in float32. If a mesh splits the vocabulary, the softmax of
    a block needs the parts of all devices first, so the backward recomputes the logits as in `fused_token_losses`.

    >>> import jax.numpy as jnp
    >>> sums = fused_loss_sums(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> print(sums.total.round(4), sums.counted)  # log 8, and an ignored token
    2.0794 1.0
    """
    _check_arrays(hidden, lm_head, targets, None)
    check_options("fused_cross_entropy", label_smoothing, z_loss, logits_soft_cap)
    targets = indices(targets)
    _check_shape("targets", targets, hidden.shape[:-1])
    if weights is not None:
        weights = _as_weights(weights)
        _check_shape("weights", weights, targets.shape)
    options: Any = {} if logits_soft_cap is None else {"logits_soft_cap": float(logits_soft_cap)}
    options |= {"label_smoothing": float(label_smoothing), "z_loss": float(z_loss), "ignore_index": ignore_index}
    call = sums_op.bind(hidden, lm_head, targets, weights, **options)

    def finish(total: jax.Array, loss: jax.Array, of_z: jax.Array) -> LossSums:
        return LossSums(total, loss, of_z, jnp.sum(_counted(targets, ignore_index, weights)))

    return Prepared(call, finish=finish, dims=((), (), (), ()))


def _counted(targets: jax.Array, ignore_index: int, weights: jax.Array | None) -> jax.Array:
    """Returns the weight of each token in the mean."""
    counted = is_counted(targets, ignore_index).astype(jnp.float32)
    return counted if weights is None else counted * weights


@public(sums_op, op, logits_op)
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
      hidden: [*lead, D]; lm_head: [D, V]. Their product is never materialised, only one block of tokens at a time.
      targets: int [*lead]; `ignore_index` and -100 are not counted. Any other target outside [0, V) makes the loss and
        its gradients NaN.
      logits: [*lead, V], instead of hidden and lm_head.
      label_smoothing: the fraction of the target distribution that is spread evenly over the vocabulary.
      z_loss: weight of lse^2, which keeps the softmax normaliser near 1 (Chowdhery et al., PaLM, 2022).
      weights: float [*lead], one per token; the mean divides by their sum.
      reduction: "mean" over counted tokens (0 if there are none), "sum", or "none" for [*lead]. With hidden and lm_head,
        the first two use `fused_loss_sums`, whose gradients do not recompute the logits.
      cfg: `CrossEntropyConfig(block_rows=...)`, the number of tokens whose logits exist at once.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> loss = fused_cross_entropy(jnp.zeros((2, 4)), jnp.zeros((4, 8)), jnp.array([1, -1]))
    >>> round(float(loss), 4)  # log 8
    2.0794
    """
    check_reduction("fused_cross_entropy", reduction)
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    options["logits_soft_cap"] = logits_soft_cap
    weights = None if weights is None else _as_weights(weights)
    if reduction == "none" or logits is not None:
        prepared = fused_token_losses.prepare(hidden, lm_head, targets, logits=logits, **options)
        if weights is not None:
            _check_shape("weights", weights, prepared.call.targets.shape)
    else:
        _check_arrays(hidden, lm_head, targets, None)
        prepared = fused_loss_sums.prepare(hidden, lm_head, targets, weights=weights, **options)
    assert prepared.finish is not None
    finish_terms = prepared.finish

    def finish(*outputs: jax.Array) -> jax.Array:
        terms = finish_terms(*outputs)
        if isinstance(terms, LossSums):
            return reduced_sum(terms.total, terms.counted, reduction)
        return reduced(terms.loss, terms.counted, weights, reduction)

    dims = prepared.dims if reduction == "none" else ()
    return Prepared(prepared.call, finish=finish, dims=dims, op=prepared.op or sums_op)
