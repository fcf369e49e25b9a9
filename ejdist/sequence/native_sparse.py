"""Native sparse attention whose sequence is split over a mesh axis: each rank gathers the keys and values of all.

Which blocks a query selects is known only when it has looked at the means of all of them, so any rank may need any token. The
gradients of what was gathered are summed where they belong. What it costs, and what would cost less: README of the operation.

A block is tokens that follow one another, so tokens in another order than contiguous are exchanged first, and the result goes
back: a rank then has one run of the text. Segment ids are put into the order of the text before the operation reads where
documents start.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from ejdist.layout import current_layout
from ejdist.mesh import current_mesh
from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.runs import Runs
from ejdist.sharded import ShardedFunction
from ejdist.tokens import axes_of_layout, resolve_order
from kernels.ops.native_sparse_attention import op

_NAME = "native_sparse_attention"
_KEYS = ("key", "value", "starts")  # what is gathered; starts are in the order of the text already


def _gathered(
    axes: dict[str, tuple[str, ...]],
    *,
    query: jax.Array,
    order: Order | None = None,
    q_start: jax.Array | None = None,
    platform: str | None = None,
    cfg: Any = None,
    **arguments: Any,
) -> jax.Array:
    """Returns the output of this rank's queries."""
    ranks_of = axes["T"]
    runs = None if order is None or not ranks_of else Runs(order, query.shape[1], ranks_of)
    if runs is not None and runs.count > 1:
        _check(order, query, arguments["key"], axes)
        query = runs.exchanged(query)
        moved = {n: x for n, x in arguments.items() if isinstance(x, jax.Array) and n != "starts"}
        arguments |= {n: runs.exchanged(x) for n, x in moved.items()}
    if axes["S"]:
        names = [n for n in _KEYS if arguments.get(n) is not None]
        arguments |= exchange.gather({n: arguments[n] for n in names}, axes["S"])
    if ranks_of:
        local_length, length = query.shape[1], query.shape[1] * jax.lax.axis_size(ranks_of)
        first = jnp.int32(arguments["key"].shape[1] - length) if q_start is None else q_start
        q_start = first + jax.lax.axis_index(ranks_of) * local_length
    out = op(query=query, q_start=q_start, platform=platform, cfg=cfg, **arguments)
    return runs.home(out) if runs is not None and runs.count > 1 else out


def _check(order: Any, query: jax.Array, key: jax.Array, axes: dict[str, tuple[str, ...]]) -> None:
    """Raises ValueError for queries and keys that are not the same tokens, in an order of which ranks exchange tokens."""
    if axes["T"] != axes["S"] or query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{_NAME}: argument 'query' has {query.shape[1]} tokens of a rank and 'key' {key.shape[1]}, split over {axes['T']} "
            f"and {axes['S']}: in order {order.name!r} both must be the same tokens; give all queries, or use "
            "order='contiguous' (sequence.order=contiguous)"
        )


class _NativeSparse(ShardedFunction):
    """The sharded function: documents are those of the text, in whatever order its tokens lie."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **_of_text(kwargs))

    def with_stored_weights(self, *args: Any, **kwargs: Any) -> Any:
        return super().with_stored_weights(*args, **_of_text(kwargs))


def _of_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call with segment ids in the order of the text."""
    ids, given, mesh = (kwargs.get(name) for name in ("segment_ids", "order", "mesh"))
    mesh = current_mesh() if mesh is None else mesh
    if ids is None or mesh is None or (given is None and current_layout().order is None):
        return kwargs
    axes = axes_of_layout(mesh)
    ranks = math.prod(mesh.shape.get(axis, 1) for axis in axes)
    order = resolve_order(_NAME, ranks, f"the sequence is split over {', '.join(axes)}", given)
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if order.carried or ids.ndim != 2:  # refused by name when the call is prepared, or runs
        return kwargs
    return kwargs | {"segment_ids": order.inverse(ids)}


native_sparse_attention = _NativeSparse(
    kernels.native_sparse_attention, _gathered, ("T", "S"), follows="fixed", on_rank=False
)
