"""Where logical dims live on the mesh. The only file that builds PartitionSpecs.

Two tables: how activations are split, and how parameters are stored. Fully sharded data parallelism is the difference
between them: a parameter's D is stored over fsdp and gathered where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ejdist.mesh import BATCH_AXES, EP, FSDP, SP, TP

Axes = Mapping[str, tuple[str, ...]]

# Dims: B batch, T query position, S key position, N query heads, K kv heads, H head width, D model width, F feed-forward,
# V vocabulary, E experts. What is not in a table is not split.
ACTIVATIONS: Axes = {"B": BATCH_AXES, "T": (SP,), "S": (SP,), "N": (TP,), "K": (TP,), "F": (TP,), "V": (TP,)}
PARAMETERS: Axes = {"D": (FSDP,), "N": (TP,), "K": (TP,), "F": (TP,), "V": (TP,), "E": (EP,)}


def on_mesh(table: Axes, mesh: Any, **changes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns the table with only the axes that the mesh has with more than one device."""
    sizes = dict(mesh.shape)
    return {dim: tuple(a for a in axes if sizes.get(a, 1) > 1) for dim, axes in {**table, **changes}.items()}


def spec(
    dims: Sequence[str], axes: Axes, *, shape: Sequence[int] | None = None, mesh: Any = None, what: str = "array"
) -> PartitionSpec:
    """Returns the PartitionSpec of an array with those dims. A dim of size 1 is broadcast and stays whole.

    Raises:
      ValueError: a dim does not divide by the devices it is split over; names the array, the dim and the remedy.
    """
    entries: list[Any] = []
    for i, dim in enumerate(dims):
        split = axes.get(dim, ())
        size = None if shape is None else shape[i]
        if size == 1:
            split = ()
        if split and size is not None and mesh is not None:
            parts = math.prod(mesh.shape[a] for a in split)
            if size % parts:
                over = " x ".join(f"{a}={mesh.shape[a]}" for a in split)
                raise ValueError(
                    f"{what}: dim {dim} = {size} cannot be divided over {over}; "
                    f"make it a multiple of {parts}, or make the axis smaller"
                )
        entries.append(None if not split else split[0] if len(split) == 1 else tuple(split))
    return PartitionSpec(*entries)


def axes_of_specs(
    dims_of: Sequence[Sequence[str]], specs: Sequence[PartitionSpec], shapes: Sequence[Sequence[int]]
) -> dict[str, tuple[str, ...]]:
    """Returns dim -> mesh axes, read from the specs of arrays whose dims and shapes are known.

    A dim of size 1 is broadcast: its entry says nothing of the dim.

    Raises:
      ValueError: two specs split the same dim differently, or one splits a dim that has no name.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for dims, entry_list, shape in zip(dims_of, specs, shapes, strict=True):
        entries = (*entry_list, *(None,) * (len(dims) - len(entry_list)))
        if len(entries) > len(dims):
            raise ValueError(f"in_specs: {entry_list} has {len(entries)} entries for an array of dims {' '.join(dims)}")
        for dim, entry, size in zip(dims, entries, shape, strict=True):
            split = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            if size == 1:
                continue
            if dim == "_" and split:
                raise ValueError(f"in_specs: {entry_list} splits a dim that an operation needs whole, over {split}")
            if axes.setdefault(dim, split) != split:
                raise ValueError(
                    f"in_specs: dim {dim} is split over {axes[dim]} in one array and over {split} in another"
                )
    return axes


def sharding(
    mesh: jax.sharding.Mesh,
    dims: Sequence[str],
    table: Axes,
    *,
    shape: Sequence[int] | None = None,
    what: str = "array",
) -> NamedSharding:
    """Returns how an array of those dims lies on the mesh."""
    return NamedSharding(mesh, spec(dims, on_mesh(table, mesh), shape=shape, mesh=mesh, what=what))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of what every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, dims: str, mesh: jax.sharding.Mesh | None, table: Axes = ACTIVATIONS) -> jax.Array:
    """Returns x, told to the compiler to lie as its dims ("B T D") say; x itself without a mesh."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, dims.split(), table, shape=x.shape, what="activation"))


def gather(x: jax.Array, dims: str, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Returns a parameter, which is stored as PARAMETERS says, where ACTIVATIONS has its dims; its gradient comes back as
    the parameter is stored, so that no device holds the whole of it longer than it takes to add it up."""
    if mesh is None or mesh.size == 1:
        return x

    @jax.custom_vjp
    def placed(x: jax.Array) -> jax.Array:
        return constrain(x, dims, mesh)

    placed.defvjp(lambda x: (placed(x), None), lambda _, gradient: (constrain(gradient, dims, mesh, PARAMETERS),))
    return placed(x)
