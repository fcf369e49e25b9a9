"""Projection and log-softmax in blocks of tokens, in plain XLA: at most block_rows x V logits exist at one time."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.engines.rows.vocabulary import block_rows, candidates
from kernels.ops.cross_entropy import blocks
from kernels.ops.cross_entropy.contract import CrossEntropyConfig, cross_entropy_of_logits, logits_op


def _bent(logits, cap):
    """Returns (logits in float32 under the cap, derivative of the cap or None)."""
    logits = logits.astype(jnp.float32)
    if cap is None:
        return logits, None
    bent = jnp.tanh(logits / cap)
    return cap * bent, 1 - bent * bent


def _outputs(logits, targets, cap, cfg):
    return cross_entropy_of_logits(logits, targets, logits_soft_cap=cap)


def _pull(logits, targets, per_token, dtype, cap, cfg):
    lse, d_lse, d_target, d_mean = (x[:, None] for x in per_token)
    logits, slope = _bent(logits, cap)
    V = logits.shape[1]
    # Where all entries are masked out, as in a part of the vocabulary, their probability is 0.
    d = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)) * d_lse + d_mean / V
    # One entry a row; a comparison fuses into the expression, where a scatter would be a pass of its own.
    d = d + jnp.where(jnp.arange(V) == targets[:, None], d_target, 0)
    return (d if slope is None else d * slope).astype(dtype)


def backward_logits(saved, logits, targets, logits_soft_cap):
    per_token = [saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit")]
    rows = logits.reshape(-1, logits.shape[-1])
    return {
        "logits": _pull(rows, targets.reshape(-1), per_token, logits.dtype, logits_soft_cap, None).reshape(logits.shape)
    }


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
blocks.register(
    "xla",
    _outputs,
    _pull,
    heuristic=lambda call, platform: CrossEntropyConfig(block_rows=block_rows(call, blocks.BLOCK_ELEMENTS)),
    candidates=lambda call: [CrossEntropyConfig(block_rows=rows) for rows in candidates(call, blocks.MOST_ROWS)],
    **EVERYWHERE,
)
logits_op.register(cross_entropy_of_logits, backward_logits, name="xla", **EVERYWHERE)
