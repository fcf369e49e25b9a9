"""Multi-token prediction: a module beside the head that predicts the token after the next.

DeepSeek-V3, arXiv:2412.19437, section 2.2. At token i it joins what the model made of the tokens up to i with the embedding of
token i + 1, in one more layer of the kind of the last, and predicts token i + 2 with the model's own embedding and output
projection.

What comes next is read from the text, whatever the order of a split sequence, and never from another document. As in the
published weights, the model's side is what its output projection takes, after the last norm, and the embedding comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.models.config import DecoderShape
from ejdist.models.model import BatchContext, Flops, Metric, Metrics
from ejdist.models.ops import Ops
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, added, norm_weight
from ejdist.models.stack import AHEAD, ahead_of, declare_buffers, declare_layers, layers_of, run_layers
from ejdist.precision import Narrow

EMBEDDING, HIDDEN, FINAL = "embedding_norm", "hidden_norm", "final_norm"
OF_EMBEDDING, OF_HIDDEN = "of_embedding", "of_hidden"
LOSS = "mtp_loss"


def declare(c: DecoderShape) -> dict[str, Any]:
    """Returns {"mtp": its parameters}, those of its layer stacked in one row; nothing for a model without it."""
    one, D = ahead_of(c), c.model_dim
    if one is None:
        return {}
    norms = {name: norm_weight(c, D) for name in (EMBEDDING, HIDDEN, FINAL)}
    # Two matrices are the one of [2D, D] that joins both.
    joins = {n: Param((D, D), "D R", std=c.init_std, inputs="D") for n in (OF_EMBEDDING, OF_HIDDEN)}
    return {AHEAD: norms | joins | declare_layers(one)}


def buffers(c: DecoderShape) -> dict[str, dict[str, Param]]:
    """Returns the buffers of its layer, such as a router's bias, by the name that `stack.update_buffers` knows."""
    one = ahead_of(c)
    return {} if one is None else {f"{AHEAD}_{part}": of_part for part, of_part in declare_buffers(one).items()}


def flops(c: DecoderShape) -> tuple[Flops, ...]:
    """Returns the forward FLOPs of its layer, of what joins its inputs, and of the output projection."""
    one = ahead_of(c)
    if one is None:
        return ()
    D = c.model_dim
    return (*(p.flops(one) for parts in layers_of(one) for p in parts), Flops(4 * D * D), Flops(2 * c.vocab_size * D))


def following(batch: Any, ops: Ops) -> tuple[jax.Array, jax.Array]:
    """Returns (the next token of each, int32 [B, T], 0 where its document ends; the target of the next token, -1 there). Only
    whole numbers move: in the order of the text each is the neighbour of the one that it is for."""
    order, index = ops.order, batch.get("order")

    def text(x: jax.Array) -> jax.Array:
        return x if order is None or isinstance(order, str) else order.inverse(x, index=index)

    def back(x: jax.Array) -> jax.Array:
        return ops.constrain(x if order is None or isinstance(order, str) else order.permute(x, index=index), "B T")

    tokens, targets, ids = (text(batch[name]) for name in ("tokens", "targets", "segment_ids"))
    goes_on = (ids == _next(ids, -1)) & (ids >= 0)
    return (
        back(jnp.where(goes_on, _next(tokens, 0), 0)),
        back(jnp.where(goes_on, _next(targets, -1), -1)),
    )


def _next(x: jax.Array, last: int) -> jax.Array:
    return jnp.concatenate([x[:, 1:], jnp.full_like(x[:, :1], last)], axis=1)


def loss(
    params: dict,
    hidden: jax.Array,
    projection: jax.Array | Narrow,
    ctx: BatchContext,
    c: DecoderShape,
    context: Callable[..., LayerContext],
) -> tuple[jax.Array, Metrics]:
    """Returns (the weighted sum over counted tokens of the cross entropy two tokens ahead, and of its layer's losses; metrics:
    "mtp_loss", that cross entropy over the tokens that the model's own counts).

    Args:
      hidden: [B, T, D] after the last norm. projection: [D, V]. context: of layers, for the configuration `ahead_of(c)`.
    """
    one, weights = ahead_of(c), params[AHEAD]
    assert one is not None
    tokens, targets = following(ctx.batch, ctx.ops)
    embedded = ctx.ops.embedding(params["embedding"], tokens).astype(c.compute_dtype)

    def normed(x: jax.Array, name: str) -> jax.Array:
        return ctx.ops.rms_norm(x, added(weights[name], norm_weight(c, c.model_dim)), eps=c.norm_eps)

    def joined(x: jax.Array, norm: str, matrix: str) -> jax.Array:
        return ctx.ops.project(normed(x, norm), weights[matrix].astype(c.compute_dtype), "btd,dr->btr")

    x = joined(embedded, EMBEDDING, OF_EMBEDDING) + joined(hidden, HIDDEN, OF_HIDDEN)
    of_layer = {name: weights[name] for name in declare_layers(one)}
    mine = {name: ctx.buffers[f"{AHEAD}_{name}"] for name in declare_buffers(one)}
    (x,), metrics = run_layers([ctx.ops.constrain(x, "B T D")], of_layer, mine, one, [context], range(1))
    sums = ctx.ops.fused_loss_sums(normed(x, FINAL), projection, targets, z_loss=0.0, logits_soft_cap=c.logits_soft_cap)
    # Its layer's losses balance experts, and weigh what those of other layers do.
    losses = {name: m for name, m in metrics.items() if m.how == "loss"}
    seen = {f"{AHEAD}_{name}": m for name, m in metrics.items() if m.how == "update"}
    total = c.mtp.weight * sums.loss + sum(m.value for m in losses.values())
    told = {f"{AHEAD}/{name}": replace(m, how="mean") for name, m in losses.items()}
    return total, {LOSS: Metric(sums.loss, "mean")} | told | seen
