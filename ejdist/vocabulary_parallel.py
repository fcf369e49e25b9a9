"""Cross entropy and KL divergence with the vocabulary split over devices: each has a part of every sum over it, and the parts
are joined.

Each device computes the log-sum-exp and what it weighs over its part of the vocabulary; a few reductions of a number a token
join them (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.narrow_loss import narrow_loss_sums, narrow_token_losses
from ejdist.precision import Narrow
from ejdist.sharded import sharded
from ejdist.vocabulary_parts import joined_lse, of_every_part, of_this_part
from kernels.ops import kl_divergence as kl
from kernels.ops.cross_entropy import logits_op, op, summed, sums_op, terms_of_tokens


def _joined(axes: dict[str, tuple[str, ...]], targets: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns (lse, target logit, mean logit) of this device's tokens over the whole vocabulary."""
    vocabulary = axes["V"]
    of_logits = "logits" in arguments
    targets, _ = of_this_part(targets, vocabulary, arguments["logits" if of_logits else "lm_head"].shape[-1])
    return of_every_part((logits_op if of_logits else op)(targets=targets, **arguments), vocabulary)


def _sums(
    axes: dict[str, tuple[str, ...]],
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    **arguments: Any,
) -> tuple[jax.Array, ...]:
    """Returns (cross entropy and z-loss, each by itself) summed over this device's tokens.

    Gradients that are computed in the forward need the softmax of a block of tokens while its logits are there. Where the
    vocabulary is split it is known after the parts of all devices, so there the logits are computed again in the backward.
    """
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if not axes["V"]:
        return sums_op(targets=targets, weights=weights, **how, **arguments)
    size = arguments["lm_head"].shape[-1] * math.prod(map(jax.lax.axis_size, axes["V"]))
    terms = terms_of_tokens(*_joined(axes, targets, **arguments), targets=targets, vocabulary=size, **how)
    return summed(terms, weights)


def _reduced(axes: dict[str, tuple[str, ...]], **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns the parts of `fused_cross_entropy`: sums, or the terms of each token."""
    return (_sums if "ignore_index" in arguments else _joined)(axes, **arguments)


def _joined_gap(axes: dict[str, tuple[str, ...]], reverse: bool, **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns (student's lse, teacher's lse, gap) of this device's tokens over the whole vocabulary."""
    vocabulary = axes["V"]
    outputs = (kl.logits_op if "logits" in arguments else kl.op)(reverse=reverse, **arguments)
    if not vocabulary:
        return outputs
    *parts, gap = outputs
    whole = [joined_lse(lse, vocabulary) for lse in parts]
    p = 0 if reverse else 1
    # A part's gap is a mean under its own part of p, and counts as much as it has of p; of nothing it may be infinite.
    share = jnp.exp(parts[p] - jnp.where(whole[p] == -jnp.inf, 0.0, whole[p]))
    gap = jnp.where(share > 0, gap, 0.0)
    # A share of an infinite gap has no gradient: of a token that is not counted it would be 0 times infinity.
    share = jnp.where(jnp.isinf(gap), jax.lax.stop_gradient(share), share)
    return *whole, jax.lax.psum(share * gap, vocabulary)


fused_cross_entropy = sharded(kernels.fused_cross_entropy, local=_reduced, handles=("V",))
fused_loss_sums = sharded(kernels.fused_loss_sums, local=_sums, handles=("V",))
fused_token_losses = sharded(kernels.fused_token_losses, local=_joined, handles=("V",))
fused_kl_divergence = sharded(kernels.fused_kl_divergence, local=_joined_gap, handles=("V",))


def of_projection(
    functions: Mapping[str, Callable], *, mesh: Any = None, platform: str | None = None
) -> dict[str, Callable]:
    """Returns the losses among functions that a model calls, each for an output projection in 8 bits too."""
    narrow = {"fused_loss_sums": narrow_loss_sums, "fused_token_losses": narrow_token_losses}
    where = {"mesh": mesh, "platform": platform}
    return {
        name: functools.partial(_either, functions[name], functools.partial(f, **where)) for name, f in narrow.items()
    }


def _either(wide: Callable, narrow: Callable, hidden: Any, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
    return (narrow if isinstance(lm_head, Narrow) else wide)(hidden, lm_head, *args, **kwargs)
