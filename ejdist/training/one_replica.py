"""Arrays that each replica of the mesh has a copy of: the hosts of one replica read them, and devices send them to the others.

With 16 slices of data parallelism every host would read the storage 16 times over; the network between devices is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ejdist.layout import stacked_over
from ejdist.mesh import DP


def read_once(like: Any, read: Callable[[Any], Any], agree: Callable[[Callable[[], Any]], Any]) -> Any:
    """Returns the tree of arrays that `read` returns for `like`. Call it on all hosts.

    Args:
      like: tree of `jax.ShapeDtypeStruct` with shardings.
      read: takes such a tree, with the mesh of a replica where the others get theirs from it.
      agree: calls a function on each host, and raises on all of them if it does on one: a host that cannot read must not leave
        the others waiting for its devices.
    """
    mesh = _mesh_of(like)
    replica = None if mesh is None else one_replica(mesh)
    if mesh is None or replica is None:
        return agree(lambda: read(like))
    inside = any(device.process_index == jax.process_index() for device in replica.devices.flat)
    arrays = agree(lambda: read(jax.tree.map(partial(_placed, replica), like)) if inside else None)
    if arrays is None:
        return jax.tree.map(lambda x: spread(None, x), like)
    return jax.tree.map(spread, arrays, like)


def one_replica(mesh: Mesh) -> Mesh | None:
    """Returns the part of a mesh that holds all of the state once; None where no host is outside, or one is only partly."""
    axis = mesh.axis_names.index(DP) if DP in mesh.axis_names else 0
    if mesh.shape.get(DP, 1) == 1:
        return None
    first = np.take(mesh.devices, [0], axis=axis)
    others = np.delete(mesh.devices, 0, axis=axis)
    hosts, elsewhere = ({device.process_index for device in part.flat} for part in (first, others))
    return None if hosts & elsewhere else Mesh(first, mesh.axis_names)


def _mesh_of(like: Any) -> Mesh | None:
    """Returns the mesh of all arrays; None if there is none, or if one cannot be sent as here."""
    meshes = []
    for leaf in jax.tree.leaves(like):
        placement = getattr(leaf, "sharding", None)
        if not isinstance(placement, NamedSharding) or not isinstance(placement.mesh, Mesh):
            return None  # a number
        split = jax.tree.leaves(tuple(placement.spec))
        if DP in split or placement.memory_kind == "pinned_host" or leaf.dtype.kind == "c":
            return None
        meshes.append(placement.mesh)
    return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None


def _placed(mesh: Mesh, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    placement = NamedSharding(mesh, like.sharding.spec)  # pyrefly: ignore[missing-attribute]
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=placement)


def spread(array: jax.Array | None, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array on all replicas. Call it on all hosts, for the same arrays in the same order.

    Args:
      array: on the first replica; None on hosts that have no part of it.
      like: where it goes.
    """
    placement: Any = like.sharding
    count = placement.mesh.shape[DP]
    stacked = stacked_over(DP, placement)
    shape = placement.shard_shape(like.shape)
    held = {} if array is None else {shard.device: shard.data for shard in array.addressable_shards}
    zeros = np.zeros((1, *shape), like.dtype)
    # A device of another replica has nothing to add. It holds a part of that shape until all have been summed.
    parts = [
        held[device].reshape(1, *shape) if device in held else jax.device_put(zeros, device)
        for device in stacked.addressable_devices
    ]
    whole = jax.make_array_from_single_device_arrays((count, *like.shape), stacked, parts)
    return _summed(placement)(whole)


def _summed(placement: NamedSharding) -> Any:
    return jax.jit(_sum_of_bits, out_shardings=placement, donate_argnums=0)


def _sum_of_bits(x: jax.Array) -> jax.Array:
    """Returns the sum over the first dim, of which all but one are zeros, bit for bit: -0.0 + 0.0 would be another zero."""
    if x.dtype == bool:
        return x.any(axis=0)
    bits = x if x.dtype.kind in "iu" else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=0, dtype=bits.dtype), x.dtype)
