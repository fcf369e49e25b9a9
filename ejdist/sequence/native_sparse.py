"""Native sparse attention whose sequence is split over a mesh axis: each rank gathers the keys and values of all.

Which blocks a query selects is known only when it has looked at the means of all of them, so any rank may need any token. The
gradients of what was gathered are summed where they belong. What it costs, and what would cost less: README of the operation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sequence import exchange
from ejdist.sharded import sharded
from kernels.ops.native_sparse_attention import op


def _gathered(
    axes: dict[str, tuple[str, ...]], *, query: jax.Array, q_start: jax.Array | None = None, **arguments: Any
) -> jax.Array:
    """Returns the output of this rank's queries."""
    ranks_of = axes["T"]
    if axes["S"]:
        names = [n for n in ("key", "value", "starts") if arguments.get(n) is not None]
        arguments |= exchange.gather({n: arguments[n] for n in names}, axes["S"])
    if ranks_of:
        local_length, length = query.shape[1], query.shape[1] * jax.lax.axis_size(ranks_of)
        first = jnp.int32(arguments["key"].shape[1] - length) if q_start is None else q_start
        q_start = first + jax.lax.axis_index(ranks_of) * local_length
    return op(query=query, q_start=q_start, **arguments)


native_sparse_attention = sharded(kernels.native_sparse_attention, local=_gathered, handles=("T", "S"), on_rank=False)
