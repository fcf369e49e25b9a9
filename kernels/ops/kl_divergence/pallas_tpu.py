"""KL divergence of logits on TPUs: one pass over both models' logits for all outputs, and one for the gradient.

From hidden states, TPUs use XLA, as for cross entropy.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows.vocabulary import bent
from kernels.engines.rows.vocabulary_pallas import facts, finite, joined, passed, tile_by_tile
from kernels.ops.kl_divergence.adapters import PER_TOKEN, gradient, register_logits
from kernels.ops.kl_divergence.contract import KLDivergenceConfig


def kl_divergence_fwd_kernel(
    student, teacher, student_lse, teacher_lse, gap, largest_p, largest_q, total_p, total_q, *, V, how
):
    models, lse = ((student, how.cap), (teacher, how.teacher_cap)), (student_lse, teacher_lse)
    if not how.reverse:
        models, lse = models[::-1], lse[::-1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref, value in ((largest_p, -jnp.inf), (largest_q, -jnp.inf), (total_p, 0), (total_q, 0), (gap, 0)):
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    def add(within):
        p, q = (within(bent(ref[...], cap, how.temperature)[0], -jnp.inf) for ref, cap in models)
        new_p, share, shrunk_p = joined(p, largest_p[...])
        new_q, each_q, shrunk_q = joined(q, largest_q[...])
        # An entry with p = 0 contributes nothing, however small q is.
        apart = jnp.sum(jnp.where(share > 0, share * (p - q), 0.0), axis=1, keepdims=True)
        gap[...] = jnp.where(shrunk_p > 0, gap[...] * shrunk_p, 0.0) + apart
        total_p[...] = total_p[...] * shrunk_p + jnp.sum(share, axis=1, keepdims=True)
        total_q[...] = total_q[...] * shrunk_q + jnp.sum(each_q, axis=1, keepdims=True)
        largest_p[...], largest_q[...] = new_p, new_q

    tile_by_tile(student.shape, V, add)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        lse[0][...] = finite(largest_p[...]) + jnp.log(total_p[...])
        lse[1][...] = finite(largest_q[...]) + jnp.log(total_q[...])
        gap[...] = jnp.where(total_p[...] == 0, 0.0, gap[...] / total_p[...])


def kl_divergence_bwd_kernel(student, teacher, *refs, V, how):
    *per_token, d_logits = refs
    row = {name: ref[...] for name, ref in zip(PER_TOKEN, per_token, strict=True)}
    d_logits[...] = gradient(student[...], teacher[...], row, how).astype(d_logits.dtype)


def _outputs(student, teacher, how, cfg):
    return passed(kl_divergence_fwd_kernel, [student, teacher], [], cfg.block_vocab, outputs=3, accumulators=4, how=how)


def _pull(student, teacher, row, dtype, how, cfg):
    rows = [row[name] for name in PER_TOKEN]
    return passed(kl_divergence_bwd_kernel, [student, teacher], rows, cfg.block_vocab, outputs=dtype, how=how)[0]


register_logits("pallas_tpu", _outputs, _pull, **facts(KLDivergenceConfig))
