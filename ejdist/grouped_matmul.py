"""Grouped matmul with its rows split over devices, beside the experts and the features.

Where rows are split, each device finds the sizes of the groups in its own rows from those of all, without communication. Where
the contracted dim is split (the second matmul of an expert, whose columns the first one split), each device has a part of
every product, and they are added up (Shoeybi et al., Megatron-LM, 2019). Over split experts the operation itself is a sum.
Rows do not move: they are those that a device has already.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sharded import sharded
from kernels.ops.grouped_matmul import op, quantized_op


def _own_sizes(group_sizes: jax.Array, first: jax.Array, rows: int) -> jax.Array:
    """Returns how many rows of each group are among `rows` rows from the row `first` on."""
    edges = jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - first
    return jnp.diff(edges.clip(0, rows))


def _own_scales(scale: jax.Array, features: tuple[str, ...]) -> jax.Array:
    """Returns the scales of this device's part of D: all of them where there is one for a column, else its own blocks."""
    blocks, ranks = scale.shape[1], jax.lax.axis_size(features)
    if blocks == 1:
        return scale
    if blocks % ranks:
        raise ValueError(
            f"grouped_matmul: argument 'rhs_scale' has {blocks} blocks of dim D, which cannot be divided over {features} of "
            f"{ranks} devices; leave D whole"
        )
    return jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(features) * (blocks // ranks), blocks // ranks, 1)


def _on_shard(axes: dict[str, tuple[str, ...]], group_sizes: jax.Array, **arguments: Any) -> jax.Array:
    """Returns this device's rows of the result, of its experts."""
    rows, features = axes["M"], axes["D"]
    if rows:
        count = arguments["lhs"].shape[0]
        group_sizes = _own_sizes(group_sizes, jax.lax.axis_index(rows) * count, count)
    scale, bias = (arguments.get(n) for n in ("rhs_scale", "rhs_bias"))
    chosen = op if scale is None else quantized_op
    if not features:
        return chosen(group_sizes=group_sizes, **arguments)
    if arguments["activation"] is not None:
        raise ValueError(
            f"grouped_matmul: argument 'activation' is of whole products, and D is split over {features}, so each device has a "
            "part of them; apply it to the result, or split F"
        )
    if scale is not None:
        arguments["rhs_scale"] = _own_scales(scale, features)
    if bias is not None:  # once, not on every device
        arguments["rhs_bias"] = jnp.where(jax.lax.axis_index(features) == 0, bias, 0)
    return jax.lax.psum(chosen(group_sizes=group_sizes, **arguments), features)


grouped_matmul = sharded(kernels.grouped_matmul, local=_on_shard, handles=("M", "D"))
