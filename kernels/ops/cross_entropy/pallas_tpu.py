"""Cross entropy of logits on TPUs: one pass over them for all outputs, and one for their gradient.

Of hidden states it is XLA's there: beside the matmuls around a block its compiler counts nothing that a kernel would save.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows.vocabulary_pallas import column, columns, finite, joined, passed, shares, tile_by_tile
from kernels.framework.segments import indices
from kernels.ops.cross_entropy.contract import CrossEntropyConfig, logits_op, work_of_logits


def cross_entropy_fwd_kernel(logits, targets, lse, target_logit, mean_logit, largest, total, *, V, cap):
    @pl.when(pl.program_id(1) == 0)
    def _():
        largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
        for sums in (total, target_logit, mean_logit):
            sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(within):
        x = logits[...].astype(jnp.float32)
        if cap is not None:
            x = cap * jnp.tanh(x / cap)
        counted = within(x, 0.0)
        mean_logit[...] += jnp.sum(counted, axis=1, keepdims=True)
        at_target = jnp.where(column(x.shape) == targets[...], counted, 0.0)
        target_logit[...] += jnp.sum(at_target, axis=1, keepdims=True)
        new, each, shrunk = joined(within(x, -jnp.inf), largest[...])
        total[...] = total[...] * shrunk + jnp.sum(each, axis=1, keepdims=True)
        largest[...] = new

    tile_by_tile(logits.shape, V, add)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        lse[...] = finite(largest[...]) + jnp.log(total[...])
        mean_logit[...] = mean_logit[...] / V


def cross_entropy_bwd_kernel(logits, targets, lse, d_lse, d_target_logit, d_mean_logit, d_logits, *, V, cap):
    x, slope = logits[...].astype(jnp.float32), 1.0
    if cap is not None:
        bent = jnp.tanh(x / cap)
        x, slope = cap * bent, 1 - bent * bent
    d = shares(x, lse[...]) * d_lse[...] + d_mean_logit[...] / V
    d += jnp.where(column(x.shape) == targets[...], d_target_logit[...], 0.0)
    d_logits[...] = (d * slope).astype(d_logits.dtype)


def forward_logits(logits, targets, logits_soft_cap, cfg):
    rows = logits.reshape(-1, logits.shape[-1])
    cost = work_of_logits(logits_op.bind(logits, targets))[0]
    outputs = passed(
        cross_entropy_fwd_kernel,
        [rows],
        [indices(targets).reshape(-1)],
        cfg.block_vocab,
        made=3,
        kept=2,
        work=cost,
        cap=logits_soft_cap,
    )
    return tuple(x.reshape(targets.shape) for x in outputs)


def backward_logits(saved, logits, targets, logits_soft_cap, cfg):
    rows = logits.reshape(-1, logits.shape[-1])
    per_row = [indices(targets), *(saved[n] for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit"))]
    cost = work_of_logits(logits_op.bind(logits, targets))[1]
    (d,) = passed(
        cross_entropy_bwd_kernel,
        [rows],
        [x.reshape(-1) for x in per_row],
        cfg.block_vocab,
        made=logits.dtype,
        work=cost,
        cap=logits_soft_cap,
    )
    return {"logits": d.reshape(logits.shape)}


def candidates(call):
    return [CrossEntropyConfig(block_vocab=n) for n in columns(call)]


logits_op.register(
    forward_logits,
    backward_logits,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=lambda call: "an array has no elements" if call.logits.size == 0 else None,
    heuristic=lambda call, platform: candidates(call)[0],
    candidates=candidates,
)
