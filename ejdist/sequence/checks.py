"""What a sequence over ranks cannot have: refused before anything runs."""

from __future__ import annotations

from typing import Any

from ejdist.layout import current_layout
from ejdist.mesh import SP
from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.tokens import resolve_order
from kernels.framework.platforms import Unsupported


def check_without_mesh(axis: exchange.Axis, order: str | Order | None) -> None:
    """Raises ValueError where a call outside any mesh is meant for one: computing without would read the tokens wrongly."""
    if axis != SP:
        raise ValueError(
            f"ring_attention: argument 'axis_name' = {axis!r} names an axis, and there is no mesh: give 'mesh', or call under "
            "`with jax.set_mesh(mesh):`"
        )
    resolve_order("ring_attention", 1, "no mesh is given or in force", order)
    order = current_layout().order if order is None else order
    if isinstance(order, str) and order != "contiguous":
        raise ValueError(
            f"ring_attention: argument 'order' = {order!r} needs ranks, and there is no mesh: give 'mesh', or call under `with "
            "jax.set_mesh(mesh):`; on one device leave the tokens in their own order, 'contiguous'"
        )


def check_call(call: Any) -> None:
    """Raises Unsupported or ValueError for arguments that a sequence over ranks cannot have; all are of whole arrays."""
    mask = call.mask
    dense = {"bias": call.bias, "attention_mask": None if mask is None else mask.attention_mask}
    for name, x in dense.items():
        if x is not None:
            raise Unsupported(
                f"ring_attention: {name!r} is as large as T x T and is not split; describe it by a MaskInfo, or by segments"
            )
    queries, keys = call.dims["T"], call.dims["S"]
    if queries != keys:
        raise ValueError(
            f"ring_attention: argument 'key' has length {keys}, but 'query' has {queries}: a ring needs one length"
        )


def check_cuts(options: dict[str, Any], how: str) -> None:
    """Raises ValueError for cuts of a whole sequence in its own order, which the tokens are not: `how` says why."""
    for name in ("cum_seqlens_q", "cum_seqlens_k"):
        if options.get(name) is not None:
            raise ValueError(
                f"ring_attention: argument {name!r} cuts a whole sequence in its own order, and the tokens {how}: give "
                "'q_segment_ids', an id for each token, which lie as the tokens do"
            )
