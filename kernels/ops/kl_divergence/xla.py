"""Two projections and their softmaxes in blocks of tokens, in plain XLA: 2 x block_rows x V logits exist at one time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.rows.vocabulary import EVERYWHERE, bent, facts, shares
from kernels.ops.kl_divergence.adapters import BLOCK_ELEMENTS, MOST_ROWS, gradient, register, register_logits
from kernels.ops.kl_divergence.contract import KLDivergenceConfig


def _outputs(student, teacher, how, cfg):
    student, _ = bent(student, how.cap, how.temperature)
    teacher, _ = bent(teacher, how.teacher_cap, how.temperature)
    lse = jax.nn.logsumexp(student, axis=-1), jax.nn.logsumexp(teacher, axis=-1)
    p, q, lse_p = (student, teacher, lse[0]) if how.reverse else (teacher, student, lse[1])
    share = shares(p, lse_p[:, None])
    return *lse, jnp.sum(jnp.where(share > 0, share * (p - q), 0), axis=-1)


def _pull(student, teacher, row, dtype, how, cfg):
    return gradient(student, teacher, {name: x[:, None] for name, x in row.items()}, how).astype(dtype)


register("xla", _outputs, _pull, **facts(KLDivergenceConfig, BLOCK_ELEMENTS, MOST_ROWS))
register_logits("xla", _outputs, _pull, **EVERYWHERE)
