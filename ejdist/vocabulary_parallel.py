"""Cross entropy with the vocabulary split over devices: each has a part of every sum over it, and they are joined.

Each device computes the log-sum-exp and the target's logit over its part of the vocabulary; two reductions of a number a
token join them (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sharded import sharded
from kernels.ops.cross_entropy.contract import logits_op, op


def _joined(axes: dict[str, tuple[str, ...]], targets: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns (lse, target logit, mean logit) of this device's tokens over the whole vocabulary."""
    vocabulary = axes["V"]
    of_logits = "logits" in arguments
    if vocabulary:
        # A target of another device's part is out of range here, and has logit 0.
        size = arguments["logits" if of_logits else "lm_head"].shape[-1]
        targets = targets - jax.lax.axis_index(vocabulary) * size
    outputs = (logits_op if of_logits else op)(targets=targets, **arguments)
    if not vocabulary:
        return outputs
    lse, at_target, mean = outputs
    largest = jax.lax.pmax(jax.lax.stop_gradient(lse), vocabulary)
    lse = largest + jnp.log(jax.lax.psum(jnp.exp(lse - largest), vocabulary))
    return lse, jax.lax.psum(at_target, vocabulary), jax.lax.pmean(mean, vocabulary)


fused_cross_entropy = sharded(kernels.fused_cross_entropy, local=_joined, handles=("V",))
fused_token_losses = sharded(kernels.fused_token_losses, local=_joined, handles=("V",))
