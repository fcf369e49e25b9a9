"""Matrices that are gathered in 8 bits: each device quantises the part that it stores, and its bytes and scales travel.

Of blocks of 128 by 128 the numbers are those of the gathered matrix quantised, and half of bfloat16's bytes are sent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.layout import axes_in, constrain, current_layout, on_mesh, spec
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from ejdist.precision import OPERAND, Blocks, Narrow, blocks_of, gathers_blocks


class Gathered(NamedTuple):
    """A matrix in 8 bits, of its own dims, and its scales [sums, others], of the first of these dims each; placed as
    activations."""

    blocks: Blocks
    dims: list[str]
    scale_dims: list[str]


def _sides(dims: list[str], dims_x: list[str]) -> tuple[list[str], list[str]]:
    """Returns the dims of a matrix that a product sums over, and the others."""
    return [d for d in dims_x if d in dims], [d for d in dims if d not in dims_x]


def _between_blocks(dims: list[str], shape: tuple[int, ...], sides: Any, table: Any, mesh: Any) -> bool:
    """Returns whether a layout splits a matrix between blocks, along the first dim of sums and that of the others alone."""
    first, sizes = [side[0] for side in sides], dict(zip(dims, shape, strict=True))
    whole = spec(dims, table, shape=shape, mesh=mesh, what="parameter")
    parts = {d: math.prod(mesh.shape[a] for a in axes_in([entry])) for d, entry in zip(dims, whole)}
    if any(n > 1 and d not in first for d, n in parts.items()):
        return False
    if any(math.prod(sizes[d] // parts.get(d, 1) for d in side) % 128 for side in sides):
        return False
    # An axis splits the first dim that asks for it: the scales have their dims in another order, perhaps.
    counts = [math.prod(sizes[d] for d in side) // 128 for side in sides]
    return [*axes_in(spec(first, table, shape=counts, mesh=mesh))] == [
        a for d in first for a in axes_in([dict(zip(dims, whole)).get(d)])
    ]


def stays(shape: tuple[int, ...], dims: list[str], mesh: Any) -> bool:
    """Returns whether a matrix is stored where products read it, and not gathered."""
    here = mesh_here(mesh)
    tables = (on_mesh(table, here) for table in (current_layout().parameters, current_layout().activations))
    before, after = (spec(dims, table, shape=shape, mesh=here, what="parameter") for table in tables)
    return {*axes_in(before)} == {*axes_in(after)}


def gathered_blocks(weight: Narrow, dims: list[str], dims_x: list[str], mesh: Any) -> Gathered | None:
    """Returns a matrix that was quantised as it is stored, placed where products read it; None where it is stored there, or
    is not split between blocks: then it is gathered in its own dtype."""
    here, shape, sides = mesh_here(mesh), weight.values.shape, _sides(dims, dims_x)
    if not gathers_blocks(weight.precision) or not all(sides) or stays(shape, dims, mesh):
        return None
    stored, used = (on_mesh(table, here) for table in (current_layout().parameters, current_layout().activations))
    if not all(_between_blocks(dims, shape, sides, table, here) for table in (stored, used)):
        return None

    def quantised(w: jax.Array) -> Blocks:
        order = [dims.index(d) for side in sides for d in side]
        parts = jnp.transpose(w, order)
        blocks = blocks_of(parts.reshape(math.prod(parts.shape[: len(sides[0])]), -1))
        bits = jnp.transpose(blocks.bits.reshape(parts.shape), [order.index(i) for i in range(len(dims))])
        return Blocks(bits, blocks.scale)

    first, before = [side[0] for side in sides], spec(dims, stored, shape=shape, mesh=here, what="parameter")
    counts = [math.prod(shape[dims.index(d)] for d in side) // 128 for side in sides]
    scales = spec(first, stored, shape=counts, mesh=here)
    bits, scale = map_shards(quantised, here, (before,), Blocks(before, scales))(jax.lax.stop_gradient(weight.values))
    # Their bytes are gathered, not numbers that a compiler could widen first.
    bits, scale = (checkpoint_name(y, OPERAND) for y in jax.lax.optimization_barrier((bits, scale)))
    return Gathered(Blocks(constrain(bits, " ".join(dims), mesh), constrain(scale, " ".join(first), mesh)), dims, first)


def spec_of(made: Gathered | None, mesh: Any) -> Any:
    """Returns how blocks lie on a mesh."""
    if made is None:
        return None
    table = on_mesh(current_layout().activations, mesh)
    return Blocks(
        spec(made.dims, table, shape=made.blocks.bits.shape, mesh=mesh),
        spec(made.scale_dims, table, shape=made.blocks.scale.shape, mesh=mesh),
    )


def flat(blocks: Blocks | None, dims: list[str], dims_x: list[str]) -> Blocks | None:
    """Returns a device's blocks as a matrix [sums, others]."""
    if blocks is None:
        return None
    summed, others = _sides(dims, dims_x)
    bits = jnp.transpose(blocks.bits, [dims.index(d) for d in (*summed, *others)])
    return Blocks(bits.reshape(math.prod(bits.shape[: len(summed)]), -1), blocks.scale)
