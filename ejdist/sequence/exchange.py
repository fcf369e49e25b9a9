"""How arrays travel along the axis that the sequence is split over: around a ring, or all at once.

The axis is one mesh axis or several. Several count the ranks from the first axis, the major one, to the last, as
`PartitionSpec(("node", "sp"))` does, in whatever order the mesh lists them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kernels.framework.dispatch import vary_alike, varying_axes

Axis = str | tuple[str, ...]


# A GPU has one of these transfers on its way at a time, so those of a hop must be one: XLA joins up to so many bytes. A TPU has
# five, and a hop both ways has eight: keys, values and their gradients, each way.
_COMPILER_OPTIONS = {
    "gpu": {"xla_gpu_collective_permute_combine_threshold_bytes": 2**40},
    "tpu": {"xla_max_concurrent_async_collective_permutes": 8},
}


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns what a program with a split sequence is compiled with so that its transfers hide under attention:
    `jax.jit(step, compiler_options=compiler_options(mesh))`. A recipe's step is; empty where nothing need be asked for."""
    return dict(_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {}))


def rank(axis: Axis) -> jax.Array:
    """Returns the number of this rank along the axis."""
    return jax.lax.axis_index(axis)


def size(axis: Axis) -> int:
    """Returns how many ranks there are along the axis."""
    return jax.lax.axis_size(axis)


def on_torus() -> bool:
    """Whether the devices of this call have links to their neighbours, each of which carries a direction."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu"


def _in_mesh_order(axis: Axis) -> tuple[Axis, list[int]]:
    """Returns the axes as the mesh lists them, and the number there of each of our ranks: ppermute takes no other order."""
    n = size(axis)
    if isinstance(axis, str):
        return axis, list(range(n))
    listed = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axis)
    mesh_ranks = np.arange(n).reshape([size(a) for a in listed])
    return listed, mesh_ranks.transpose([listed.index(a) for a in axis]).ravel().tolist()


def shift(tree: Any, axis: Axis, by: int) -> Any:
    """Returns what the rank `by` places before this one holds."""
    n = size(axis)
    if by % n == 0:
        return tree
    listed, mesh_ranks = _in_mesh_order(axis)
    pairs = [(mesh_ranks[i], mesh_ranks[(i + by) % n]) for i in range(n)]
    with jax.named_scope("exchange"):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, listed, pairs), tree)


def send(tree: Any, axis: Axis, pairs: Any) -> Any:
    """Returns what the ranks of the (sender, receiver) pairs are sent, zeros on those that are sent nothing."""
    listed, mesh_ranks = _in_mesh_order(axis)
    there = [(mesh_ranks[sender], mesh_ranks[receiver]) for sender, receiver in pairs]
    with jax.named_scope("exchange"):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, listed, there), tree)


def gather(tree: Any, axis: Axis, dim: int = 1) -> Any:
    """Returns every rank's arrays, joined along a dim in the order of the ranks."""
    with jax.named_scope("exchange"):
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), tree)


def scatter_sum(tree: Any, axis: Axis) -> Any:
    """Returns this rank's part, along dim 1, of the sum over all ranks: the transpose of `gather`."""
    with jax.named_scope("exchange"):
        return jax.tree.map(lambda x: jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True), tree)


@jax.custom_batching.custom_vmap
def _alike(x: jax.Array) -> jax.Array:
    return x


@_alike.def_vmap
def _greatest_of_batch(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    """The rows of a caller's vmap take one way together: a loop whose end is batched would run every branch of every row."""
    return x.max(0), False


def greatest(x: jax.Array) -> jax.Array:
    """Returns the greatest of each number over all devices that are mapped over, along whatever axis: the same on each."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    numbers = [jax.lax.axis_index(axis) for axis in axes]
    if any(map(varying_axes, numbers)):  # or the map around does not track what varies
        x = vary_alike(x, numbers)
    with jax.named_scope("exchange"):
        return _alike(jax.lax.pmax(x, tuple(axes)) if axes else x)


def all_to_all(tree: Any, axis: Axis, split: int, join: int) -> Any:
    """Returns this rank's part of dim `split` of every rank's arrays, joined along dim `join` in the order of the ranks."""
    with jax.named_scope("exchange"):
        return jax.tree.map(lambda x: jax.lax.all_to_all(x, axis, split, join, tiled=True), tree)
