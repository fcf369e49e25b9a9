"""`flash_attention` inside a caller's `shard_map` that splits the sequence: the ring, over the axes that the call names.

On global arrays it needs a whole sequence, so that nothing communicates unasked; `ring_attention` splits one there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

import kernels
from ejdist.order import Order
from ejdist.sequence.attention import OnShard
from ejdist.sequence.checks import check_call
from ejdist.sequence.schemes import Ring
from ejdist.sharded import sharded
from kernels.ops.flash_attention import op


def _as_a_ring(
    axes: Mapping[str, tuple[str, ...]], *, order: Order | None, **arguments: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of a rank's queries over the keys of all ranks."""
    axis = axes["T"][0] if len(axes["T"]) == 1 else axes["T"]
    order = Order("contiguous", jax.lax.axis_size(axis)) if order is None else order
    check_call(op.bind(**{n: x for n, x in arguments.items() if n not in ("platform", "cfg")}))
    return OnShard(axis, Ring(), lse=True)(order=order, **arguments)


flash_attention = sharded(kernels.flash_attention, follows=True, on_rank=_as_a_ring)
scaled_dot_product_attention = sharded(kernels.scaled_dot_product_attention, follows=True, on_rank=_as_a_ring)
