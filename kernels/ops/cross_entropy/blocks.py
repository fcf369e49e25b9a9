"""The walk over blocks of tokens: the matmuls, which are XLA's on every device, around what a backend does with the logits.

A backend brings two functions of the logits of a block, [rows, V] in float32:
  outputs: (logits, targets, soft cap, cfg) -> (lse, target_logit, mean_logit), [rows] each.
  pull: (logits, targets, (lse, d_lse, d_target_logit, d_mean_logit), dtype, soft cap, cfg) -> their gradient, in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.engines.rows.vocabulary import in_blocks, out_of_blocks
from kernels.ops.cross_entropy.contract import ALSO_IGNORED, TokenLosses, op, summed, sums_op, token_losses

# Logits of one block: 2^26 float32 are 256 MiB.
BLOCK_ELEMENTS, MOST_ROWS = 2**26, 8192


def register(name: str, outputs_of: Callable, pull: Callable, **facts: Any) -> None:
    """Registers a backend of both operations on hidden states: terms of each token, and their sums."""

    def forward(hidden, lm_head, targets, logits_soft_cap, cfg):
        lead = targets.shape
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

        def block(_: None, x: Any) -> Any:
            h, t = x
            return None, outputs_of(dot("td,dv->tv", h, lm_head), t, logits_soft_cap, cfg)

        rows = cfg.block_rows
        _, outputs = jax.lax.scan(block, None, (in_blocks(flat, rows), in_blocks(targets, rows, -1)))
        return tuple(out_of_blocks(x, flat.shape[0]).reshape(lead) for x in outputs)

    def backward(saved, hidden, lm_head, targets, logits_soft_cap, cfg):
        shape, rows = hidden.shape, cfg.block_rows
        flat, targets = hidden.reshape(-1, shape[-1]), targets.reshape(-1)

        def block(d_head: jax.Array, x: Any) -> Any:
            h, t, *per_token = x
            d = pull(dot("td,dv->tv", h, lm_head), t, per_token, h.dtype, logits_soft_cap, cfg)
            return d_head + dot("td,tv->dv", h, d), dot("tv,dv->td", d, lm_head).astype(h.dtype)

        # A padded row has cotangents of zero, and lse = 0 keeps its exponential finite.
        per_token = (saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit"))
        xs = (in_blocks(flat, rows), in_blocks(targets, rows, -1), *(in_blocks(x, rows) for x in per_token))
        d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        return {"hidden": out_of_blocks(d_hidden, flat.shape[0]).reshape(shape), "lm_head": d_head}

    def forward_sums(hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg):
        how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        outputs = forward(hidden, lm_head, targets, logits_soft_cap, cfg)
        return summed(token_losses(*outputs, targets=targets, vocabulary=lm_head.shape[1], **how), weights)

    def keeping_sums(hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg):
        lead, rows = targets.shape, cfg.block_rows
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        each = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.reshape(-1).astype(jnp.float32)
        how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}

        def block(d_head: jax.Array, x: Any) -> Any:
            h, t, w = x
            logits = dot("td,dv->tv", h, lm_head)
            outputs = outputs_of(logits, t, logits_soft_cap, cfg)

            def losses(*outputs: jax.Array) -> Any:
                terms = token_losses(*outputs, targets=t, vocabulary=lm_head.shape[1], **how)
                return terms.loss + terms.z_loss, terms

            _, pull_losses, terms = jax.vjp(losses, *outputs, has_aux=True)
            d = pull(logits, t, (outputs[0], *pull_losses(w)), h.dtype, logits_soft_cap, cfg)
            return d_head + dot("td,tv->dv", h, d), (terms, dot("tv,dv->td", d, lm_head).astype(h.dtype))

        # A row of padding is ignored, whatever else is.
        xs = (in_blocks(flat, rows), in_blocks(targets, rows, ALSO_IGNORED), in_blocks(each, rows))
        d_head, (terms, d_hidden) = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        terms = TokenLosses(*(out_of_blocks(x, flat.shape[0]).reshape(lead) for x in terms))
        kept = {
            "hidden_gradient": out_of_blocks(d_hidden, flat.shape[0]).reshape(hidden.shape),
            "lm_head_gradient": d_head,
            "losses": terms.loss + terms.z_loss,
        }
        return summed(terms, weights), kept

    op.register(forward, backward, name=name, **facts)
    sums_op.register(forward_sums, _scaled, keeping=keeping_sums, name=name, **facts)


def _scaled(saved, hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap):
    """Returns the gradients of the sum from what its forward kept."""
    kept = {"hidden": saved.hidden_gradient, "lm_head": saved.lm_head_gradient}
    if weights is not None:
        kept["weights"] = saved.losses
    return {name: saved.d_total * x.astype(jnp.float32) for name, x in kept.items()}
