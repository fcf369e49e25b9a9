"""The operations of a model, bound to a mesh and a scheme of sequence parallelism."""

from __future__ import annotations

import functools

import jax

from ejdist import faces
from ejdist.layout import constrain, gather
from ejdist.mesh import SP
from ejdist.models.ops import Ops
from ejdist.sequence.attention import ring_attention
from ejdist.sequence.order import Order


def bind_ops(
    mesh: jax.sharding.Mesh | None,
    *,
    order: Order | str = "contiguous",
    scheme: str = "ring",
    platform: str | None = None,
) -> Ops:
    """Returns the operations that a model calls.

    Args:
      mesh: where the arrays lie; None for one device.
      order: the order that the batch was permuted to.
      scheme: how keys and values travel over the sequence axis, "ring" or "all_gather".
      platform: backend of every operation; None for the fastest.
    """
    where = {"mesh": mesh, "platform": platform}

    def attention(query, key, value, segment_ids, window, logits_soft_cap):
        return ring_attention(
            query,
            key,
            value,
            axis_name=SP,
            causal=True,
            sliding_window=window,
            logits_soft_cap=logits_soft_cap,
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
            scheme=scheme,
            order=order,
            **where,
        )

    def rotary_embedding(x, positions, base, scaling):
        return faces.rotary_embedding(x, positions, base=base, scaling=scaling, **where)

    def cross_entropy(hidden, lm_head, targets, z_loss, logits_soft_cap):
        return faces.cross_entropy_terms(
            hidden, lm_head, targets, z_loss=z_loss, logits_soft_cap=logits_soft_cap, **where
        )

    return Ops(
        attention=attention,
        rms_norm=lambda x, weight, eps: faces.rms_norm(x, weight, eps=eps, **where),
        rotary_embedding=rotary_embedding,
        gated_mlp=lambda x, gate, up, down, activation: faces.gated_mlp(
            x, gate, up, down, activation=activation, **where
        ),
        cross_entropy=cross_entropy,
        constrain=functools.partial(constrain, mesh=mesh),
        gather=functools.partial(gather, mesh=mesh),
    )
