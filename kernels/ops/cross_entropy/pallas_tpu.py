"""Cross entropy of logits on TPUs: one pass over them for all outputs, and one for their gradient.

From hidden states, TPUs use XLA: by its compiler's estimates, a kernel between the matmuls of a block would save nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows.vocabulary import bent
from kernels.engines.rows.vocabulary_pallas import column, facts, finite, joined, passed, tile_by_tile
from kernels.framework.segments import indices
from kernels.ops.cross_entropy.adapters import PER_TOKEN, gradient, register_logits
from kernels.ops.cross_entropy.contract import CrossEntropyConfig


def cross_entropy_fwd_kernel(logits, targets, lse, target_logit, mean_logit, largest, total, *, V, cap):
    @pl.when(pl.program_id(1) == 0)
    def _():
        largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
        for sums in (total, target_logit, mean_logit):
            sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(within):
        x, _ = bent(logits[...], cap)
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


def cross_entropy_bwd_kernel(logits, *refs, V, cap):
    *per_token, d_logits = refs
    row = {name: ref[...] for name, ref in zip(PER_TOKEN, per_token, strict=True)}
    d_logits[...] = gradient(logits[...], column(logits.shape), row, V, cap).astype(d_logits.dtype)


def _outputs(logits, targets, cap, cfg):
    rows = [indices(targets)]
    return passed(cross_entropy_fwd_kernel, [logits], rows, cfg.block_vocab, outputs=3, accumulators=2, cap=cap)


def _pull(logits, row, dtype, cap, cfg):
    rows = [indices(row[name]) if name == "targets" else row[name] for name in PER_TOKEN]
    return passed(cross_entropy_bwd_kernel, [logits], rows, cfg.block_vocab, outputs=dtype, cap=cap)[0]


register_logits("pallas_tpu", _outputs, _pull, **facts(CrossEntropyConfig))
