"""Projection and log-softmax in blocks of tokens, in plain XLA: at most block_rows x V logits exist at one time."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.engines.rows.vocabulary import EVERYWHERE, facts
from kernels.ops.cross_entropy.adapters import BLOCK_ELEMENTS, MOST_ROWS, gradient, register, register_logits
from kernels.ops.cross_entropy.contract import CrossEntropyConfig, cross_entropy_of_logits


def _outputs(logits, targets, cap, cfg):
    return cross_entropy_of_logits(logits, targets, logits_soft_cap=cap)


def _pull(logits, row, dtype, cap, cfg):
    V = logits.shape[1]
    return gradient(logits, jnp.arange(V), {name: x[:, None] for name, x in row.items()}, V, cap).astype(dtype)


register("xla", _outputs, _pull, **facts(CrossEntropyConfig, BLOCK_ELEMENTS, MOST_ROWS))
register_logits("xla", _outputs, _pull, **EVERYWHERE)
