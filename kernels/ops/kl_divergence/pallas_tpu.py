"""KL divergence of logits on TPUs: one pass over both models' for all outputs, and one for the gradient.

Of hidden states it is XLA's there, as cross entropy is.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows.vocabulary_pallas import columns, finite, joined, passed, shares, tile_by_tile
from kernels.ops.kl_divergence.blocks import PER_ROW
from kernels.ops.kl_divergence.contract import KLDivergenceConfig, logits_op, work_of_logits


def _bent(ref, cap, temperature):
    """Returns (logits under the softmax, their derivative)."""
    x = ref[...].astype(jnp.float32)
    if cap is None:
        return x / temperature, 1 / temperature
    bent = jnp.tanh(x / cap)
    return bent * (cap / temperature), (1 - bent * bent) / temperature


def kl_divergence_fwd_kernel(
    student, teacher, student_lse, teacher_lse, gap, largest_p, largest_q, total_p, total_q, *, V, how
):
    reverse, temperature, *caps = how
    models, lse = ((student, caps[0]), (teacher, caps[1])), (student_lse, teacher_lse)
    if not reverse:
        models, lse = models[::-1], lse[::-1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        for kept, value in ((largest_p, -jnp.inf), (largest_q, -jnp.inf), (total_p, 0), (total_q, 0), (gap, 0)):
            kept[...] = jnp.full(kept.shape, value, jnp.float32)

    def add(within):
        p, q = (within(_bent(ref, cap, temperature)[0], -jnp.inf) for ref, cap in models)
        new_p, share, shrunk_p = joined(p, largest_p[...])
        new_q, each_q, shrunk_q = joined(q, largest_q[...])
        # An entry that p gives nothing counts nothing, and a sum that is 0 stays 0 however far q is.
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


def kl_divergence_bwd_kernel(
    student, teacher, student_lse, teacher_lse, gap, d_student_lse, d_gap, d_logits, *, V, how
):
    reverse, temperature, cap, teacher_cap = how
    x, slope = _bent(student, cap, temperature)
    other, _ = _bent(teacher, teacher_cap, temperature)
    own = shares(x, student_lse[...])
    d = d_student_lse[...] * own
    if reverse:  # p is the student: through the probabilities, and through the logits that they weigh
        more = jnp.where(own > 0, own * (1 + (x - other) - gap[...]), 0.0)
        # The gap of a token that is not counted may be infinite, and its cotangent is 0.
        d += jnp.where(d_gap[...] == 0, 0.0, d_gap[...] * more)
    else:
        d -= d_gap[...] * shares(other, teacher_lse[...])
    d_logits[...] = (d * slope).astype(d_logits.dtype)


def forward_logits(logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
    both = [x.reshape(-1, x.shape[-1]) for x in (logits, teacher_logits)]
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    cost = work_of_logits(logits_op.bind(logits, teacher_logits))[0]
    outputs = passed(kl_divergence_fwd_kernel, both, [], cfg.block_vocab, made=3, kept=4, work=cost, how=how)
    return tuple(x.reshape(logits.shape[:-1]) for x in outputs)


def backward_logits(saved, logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
    both = [x.reshape(-1, x.shape[-1]) for x in (logits, teacher_logits)]
    rows = [saved[name].reshape(-1) for name in PER_ROW]
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    cost = work_of_logits(logits_op.bind(logits, teacher_logits))[1]
    (d,) = passed(kl_divergence_bwd_kernel, both, rows, cfg.block_vocab, made=logits.dtype, work=cost, how=how)
    return {"logits": d.reshape(logits.shape)}


def candidates(call):
    return [KLDivergenceConfig(block_vocab=n) for n in columns(call)]


logits_op.register(
    forward_logits,
    backward_logits,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=lambda call: "an array has no elements" if call.logits.size == 0 else None,
    heuristic=lambda call, platform: candidates(call)[0],
    candidates=candidates,
)
