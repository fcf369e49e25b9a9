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
from kernels.ops.cross_entropy.contract import ALSO_IGNORED, Terms, op, summed, sums_op, terms_of_tokens

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
        return summed(terms_of_tokens(*outputs, targets=targets, vocabulary=lm_head.shape[1], **how), weights)

    def walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, of_token: Callable) -> Any:
        """Returns (terms of each token, gradients of the sum of `of_token(terms)` times weights: of hidden and of lm_head)."""
        lead, rows = targets.shape, cfg.block_rows
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        each = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.reshape(-1).astype(jnp.float32)

        def block(d_head: jax.Array, x: Any) -> Any:
            h, t, w = x
            logits = dot("td,dv->tv", h, lm_head)
            outputs = outputs_of(logits, t, logits_soft_cap, cfg)

            def losses(*outputs: jax.Array) -> Any:
                terms = terms_of_tokens(*outputs, targets=t, vocabulary=lm_head.shape[1], **how)
                return of_token(terms), terms

            _, pull_losses, terms = jax.vjp(losses, *outputs, has_aux=True)
            d = pull(logits, t, (outputs[0], *pull_losses(w)), h.dtype, logits_soft_cap, cfg)
            return d_head + dot("td,tv->dv", h, d), (terms, dot("tv,dv->td", d, lm_head).astype(h.dtype))

        # A row of padding is ignored, whatever else is.
        xs = (in_blocks(flat, rows), in_blocks(targets, rows, ALSO_IGNORED), in_blocks(each, rows))
        d_head, (terms, d_hidden) = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        terms = Terms(*(out_of_blocks(x, flat.shape[0]).reshape(lead) for x in terms))
        return terms, out_of_blocks(d_hidden, flat.shape[0]).reshape(hidden.shape), d_head

    def keeping_sums(hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg):
        how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        terms, d_hidden, d_head = walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, _together)
        kept = {"hidden_gradient": d_hidden, "lm_head_gradient": d_head, "losses": _together(terms)}
        return summed(terms, weights), kept

    def backward_sums(
        saved, hidden, lm_head, targets, weights, ignore_index, label_smoothing, z_loss, logits_soft_cap, cfg
    ):
        d_total, d_loss, d_z_loss = (saved.get(f"d_{output}") for output in sums_op.outputs)
        if z_loss == 0:  # then the loss is the total, and z_loss a constant
            d_total, d_loss, d_z_loss = _added(d_total, d_loss), None, None
        if d_loss is None and d_z_loss is None:
            gradients = {"hidden": saved.hidden_gradient, "lm_head": saved.lm_head_gradient, "weights": saved.losses}
            gradients = {name: d_total * x.astype(jnp.float32) for name, x in gradients.items()}
        else:  # what the forward kept is of both terms together
            of_loss, of_z = _added(d_total, d_loss), _added(d_total, d_z_loss)

            def of_token(terms: Terms) -> jax.Array:
                return of_loss * terms.cross_entropy + of_z * terms.z_loss

            how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
            terms, d_hidden, d_head = walked(hidden, lm_head, targets, weights, how, logits_soft_cap, cfg, of_token)
            gradients = {"hidden": d_hidden, "lm_head": d_head, "weights": of_token(terms)}
        return {name: x for name, x in gradients.items() if name != "weights" or weights is not None}

    op.register(forward, backward, name=name, **facts)
    sums_op.register(forward_sums, backward_sums, forward_with_residuals=keeping_sums, name=name, **facts)


def _together(terms: Terms) -> jax.Array:
    return terms.cross_entropy + terms.z_loss


def _added(*cotangents: jax.Array | None) -> Any:
    """Returns the sum of those that there are; 0 where there is none."""
    return sum((x for x in cotangents if x is not None), start=jnp.float32(0))
