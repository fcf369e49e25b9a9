"""The walk over blocks of tokens: the matmuls, which are XLA's on every device, around what a backend does with the logits.

A backend brings two functions of the logits of a block, [rows, V] in float32:
  outputs: (logits, targets, soft cap, cfg) -> (lse, target_logit, mean_logit), [rows] each.
  pull: (logits, targets, (lse, d_lse, d_target_logit, d_mean_logit), dtype, soft cap, cfg) -> their gradient, in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels._core.binding import Call
from kernels.ops.cross_entropy.contract import ALSO_IGNORED, TokenLosses, op, summed, sums_op, token_losses

# Logits of one block, in elements: 2^26 float32 are 256 MiB. Every block reads lm_head and, in the backward, reads and
# writes its float32 gradient, so below about a thousand rows the matmuls wait for memory whatever the vocabulary.
_BLOCK_ELEMENTS, _LEAST_ROWS = 2**26, 1024


def block_rows(call: Call) -> int:
    """Returns the tokens whose logits exist at one time."""
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // call.dims["V"] // 128 * 128)
    return max(1, min(math.prod(call.dims["lead"]), rows))


def candidates(call: Call) -> list[int]:
    """Returns the tokens of a block to choose from when tuning."""
    tokens = math.prod(call.dims["lead"])
    return [*(r for r in (256, 512, 1024, 2048, 4096, 8192) if r < tokens), max(1, tokens)]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """Returns [n, rows, ...] of x [T, ...], padded."""
    n = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, rows, *x.shape[1:])


def _rows_of(x: jax.Array, count: int) -> jax.Array:
    """Returns [count, ...] of blocks [n, rows, ...], without the padding."""
    return x.reshape(-1, *x.shape[2:])[:count]


def register(name: str, outputs_of: Callable, pull: Callable, **facts: Any) -> None:
    """Registers a backend of both operations on hidden states: terms of each token, and their sums."""

    def forward(hidden, lm_head, targets, logits_soft_cap, cfg):
        lead = targets.shape
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

        def block(_: None, x: Any) -> Any:
            h, t = x
            return None, outputs_of(_dot("td,dv->tv", h, lm_head), t, logits_soft_cap, cfg)

        rows = cfg.block_rows
        _, outputs = jax.lax.scan(block, None, (_blocks(flat, rows), _blocks(targets, rows, -1)))
        return tuple(_rows_of(x, flat.shape[0]).reshape(lead) for x in outputs)

    def backward(saved, hidden, lm_head, targets, logits_soft_cap, cfg):
        shape, rows = hidden.shape, cfg.block_rows
        flat, targets = hidden.reshape(-1, shape[-1]), targets.reshape(-1)

        def block(d_head: jax.Array, x: Any) -> Any:
            h, t, *per_token = x
            d = pull(_dot("td,dv->tv", h, lm_head), t, per_token, h.dtype, logits_soft_cap, cfg)
            return d_head + _dot("td,tv->dv", h, d), _dot("tv,dv->td", d, lm_head).astype(h.dtype)

        # A padded row has cotangents of zero, and lse = 0 keeps its exponential finite.
        per_token = (saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit"))
        xs = (_blocks(flat, rows), _blocks(targets, rows, -1), *(_blocks(x, rows) for x in per_token))
        d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        return {"hidden": _rows_of(d_hidden, flat.shape[0]).reshape(shape), "lm_head": d_head}

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
            logits = _dot("td,dv->tv", h, lm_head)
            outputs = outputs_of(logits, t, logits_soft_cap, cfg)

            def losses(*outputs: jax.Array) -> Any:
                terms = token_losses(*outputs, targets=t, vocabulary=lm_head.shape[1], **how)
                return terms.loss + terms.z_loss, terms

            _, pull_losses, terms = jax.vjp(losses, *outputs, has_aux=True)
            d = pull(logits, t, (outputs[0], *pull_losses(w)), h.dtype, logits_soft_cap, cfg)
            return d_head + _dot("td,tv->dv", h, d), (terms, _dot("tv,dv->td", d, lm_head).astype(h.dtype))

        # A row of padding is ignored, whatever else is.
        xs = (_blocks(flat, rows), _blocks(targets, rows, ALSO_IGNORED), _blocks(each, rows))
        d_head, (terms, d_hidden) = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        terms = TokenLosses(*(_rows_of(x, flat.shape[0]).reshape(lead) for x in terms))
        kept = {
            "hidden_gradient": _rows_of(d_hidden, flat.shape[0]).reshape(hidden.shape),
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
