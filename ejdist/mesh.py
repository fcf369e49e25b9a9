"""The device mesh. The only file that names mesh axes.

dp: replicas. fsdp: parameters are sharded, gathered where they are used. ep: experts. cp and sp: the sequence, and parameters
as over fsdp. tp: heads, features and the vocabulary. The batch is split over dp, fsdp and ep together, a sequence over cp and
sp: sp joins neighbours, cp groups of them, for a scheme that treats the two differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE

from ejdist.sections import operational

DP, FSDP, EP, CP, SP, TP = AXES = ("dp", "fsdp", "ep", "cp", "sp", "tp")
BATCH_AXES = (DP, FSDP, EP)
SEQUENCE_AXES = (CP, SP)


@dataclass
class MeshSection:
    """The `mesh` section of a recipe: devices along each axis; one may be -1, for what is left of the devices."""

    dp: int = operational(1)  # devices along dp: replicas of the model, which share the batch; -1 for all that are left
    fsdp: int = operational(1)  # devices that parameters are sharded over, and the batch; -1 for all that are left
    ep: int = operational(1)  # devices that experts are sharded over, and the batch; -1 for all that are left
    cp: int = operational(
        1
    )  # groups of sp that a sequence is split over, for schemes that treat the two differently; mostly 1
    sp: int = operational(1)  # devices that a sequence is split over, and parameters; -1 for all that are left
    tp: int = operational(1)  # devices that heads, features and the vocabulary are split over; -1 for all that are left
    # Over several TPU slices dp goes over the network between them; fsdp may too, where it is asked for.
    fsdp_across_slices: bool = operational(False)

    def validate(self) -> None:
        """Raises ValueError naming the keys; `mesh_shape` checks whether the sizes fit the devices."""
        _check_axes(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """axis -> devices along it, as given."""
        return {axis: getattr(self, axis) for axis in AXES}

    @staticmethod
    def sequence_shards(mesh: jax.sharding.Mesh) -> int:
        """Returns over how many devices a sequence is split."""
        return math.prod(mesh.shape.get(axis, 1) for axis in SEQUENCE_AXES)


def _check_axes(shape: dict[str, int]) -> None:
    bad = [a for a, n in shape.items() if not isinstance(n, (int, np.integer)) or (n < 1 and n != -1)]
    if bad:
        raise ValueError(
            f"mesh.{bad[0]} must be a positive number of devices, or -1 for the rest: sizes are integers, got {shape[bad[0]]!r}"
        )
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"mesh sizes: at most one -1 (the rest of the devices); got {shape}")


def mesh_shape(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Returns the size of every axis; one may be given as -1, for what is left of the devices.

    Raises:
      ValueError: the sizes do not fit the devices; names the key, the product and the remedy.
    """
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    open_axes = [axis for axis, size in shape.items() if size == -1]
    _check_axes(shape)
    fixed = math.prod(size for size in shape.values() if size != -1)
    written = " x ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size != 1) or "1"
    if open_axes:
        if num_devices % fixed:
            raise ValueError(f"{written}: {num_devices} devices are not divisible by {fixed}; change one of the sizes")
        shape[open_axes[0]] = num_devices // fixed
    elif fixed > num_devices:
        raise ValueError(
            f"{written} needs {fixed} devices, but there are {num_devices}; make an axis smaller, or start on more devices"
        )
    return shape


def make_mesh(
    dp: int = 1,
    fsdp: int = 1,
    ep: int = 1,
    cp: int = 1,
    sp: int = 1,
    tp: int = 1,
    devices: Sequence[Any] | None = None,
    fsdp_across_slices: bool = False,
) -> jax.sharding.Mesh:
    """Returns a mesh with the six axes, over the first of `devices` (default: all) that it needs.

    Neighbours along tp, then sp, then cp, are neighbours among the devices: those axes communicate most. Over several TPU
    slices dp goes over them, and every other axis stays inside of one.

    Args:
      fsdp_across_slices: fsdp may go over slices too, where dp is smaller than their number.

    Raises:
      ValueError: the sizes do not fit the devices, or an axis that is to stay inside of a slice does not.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    shape = mesh_shape({DP: dp, FSDP: fsdp, EP: ep, CP: cp, SP: sp, TP: tp}, len(devices))
    sizes, count = tuple(shape.values()), math.prod(shape.values())
    slices = slices_of(devices)
    if count > len(slices[0]) and len(slices) > 1:
        slices, between = between_slices(shape, slices, fsdp_across_slices)
        inside = [size // outer for size, outer in zip(sizes, between)]
        used = [device for one in slices for device in one]
        laid = mesh_utils.create_hybrid_device_mesh(inside, between, used, allow_split_physical_axes=True)
        return jax.sharding.Mesh(laid, AXES)
    if count == len(slices[0]) and count > 1:
        # Lays the axes along the links of the machine; a physical axis may be split, as 4 x 4 x 4 chips into 8 x 8.
        laid = mesh_utils.create_device_mesh(sizes, slices[0], allow_split_physical_axes=True)
        return jax.sharding.Mesh(laid, AXES)
    return jax.sharding.Mesh(np.asarray(slices[0][:count], dtype=object).reshape(sizes), AXES)


def abstract_mesh(section: MeshSection, num_devices: int, num_slices: int = 1) -> jax.sharding.AbstractMesh:
    """Returns the mesh that `make_mesh` makes on that many devices of that many TPU slices, which need not exist here.

    Raises:
      ValueError: as `make_mesh`.
    """
    shape, each = mesh_shape(section.sizes, num_devices), num_devices // num_slices
    if num_slices > 1 and math.prod(shape.values()) > each:
        between_slices(shape, [[None] * each] * num_slices, section.fsdp_across_slices)
    return jax.sharding.AbstractMesh(tuple(shape.values()), AXES)


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each TPU slice. Inside of one they are linked to each other, and between two goes the data-centre
    network. Other devices count as one slice: their network is the same between all machines."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        number = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def between_slices[Devices: Sequence[Any]](
    shape: dict[str, int], slices: list[Devices], fsdp_across: bool
) -> tuple[list[Devices], tuple[int, ...]]:
    """Returns (the slices that a mesh of a `shape` is over, over how many of them each axis goes). Raises ValueError."""
    written = " x ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size != 1)
    numbers = {len(one) for one in slices}
    if len(numbers) > 1:
        raise ValueError(
            f"the TPU slices have {' and '.join(map(str, sorted(numbers)))} devices; a mesh needs slices of equal size"
        )
    each, count = numbers.pop(), math.prod(shape.values())
    if count % each:
        raise ValueError(
            f"{written} is {count} devices, but a TPU slice has {each}: a mesh over several slices must use all devices of each"
        )
    number = count // each
    over_dp = math.gcd(shape[DP], number)
    over_fsdp = number // over_dp
    if over_fsdp > 1 and not (fsdp_across and shape[FSDP] % over_fsdp == 0):
        asked = f", and mesh.fsdp of {over_fsdp}" if fsdp_across else ""
        raise ValueError(
            f"{written} over {number} TPU slices of {each} devices: only mesh.dp crosses the network between them, so make "
            f"it a multiple of {number}{asked}; mesh.fsdp_across_slices=true lets fsdp go over it too, which gathers the "
            "parameters of every layer through it"
        )
    return slices[:number], tuple({DP: over_dp, FSDP: over_fsdp}.get(axis, 1) for axis in AXES)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """Returns the mesh in force: of `jax.set_mesh`, or of a `with mesh:` block; None if there is neither.

    Inside a `shard_map` it is the mesh of those axes that this one leaves to the compiler. Where it is over all of them arrays
    are a rank's own already, so there is no mesh to place them on: None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return _left_of(mesh) if mesh.manual_axes else mesh
    # JAX has no public way to read the older form, which the documentation of the field still shows.
    from jax._src import mesh as jax_mesh

    mesh = jax_mesh.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def _left_of(mesh: jax.sharding.AbstractMesh) -> jax.sharding.AbstractMesh | None:
    """Returns the mesh of the axes that a `shard_map` around this is not over; None where these have one device."""
    left = [a for a in mesh.axis_names if a not in mesh.manual_axes]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if math.prod(mesh.shape[a] for a in left) == 1:
        return None
    return jax.sharding.AbstractMesh(
        tuple(mesh.shape[a] for a in left), tuple(left), axis_types=tuple(types[a] for a in left)
    )


def mesh_here(mesh: Any) -> Any:
    """Returns the mesh of a call that was given one: inside a `shard_map` over some of its axes, that of the others; None where
    there is nothing left to place arrays on.

    Raises:
      ValueError: the `shard_map` around this is of another mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None or not around.manual_axes:
        return mesh
    left = _left_of(around)
    if mesh != left and dict(mesh.shape) != dict(around.shape):
        raise ValueError(
            f"argument 'mesh' is {_described(mesh)}, but this call is inside a shard_map of {_described(around)}: leave the "
            "argument out"
        )
    return left


def check_mesh(mesh: Any) -> None:
    """Raises ValueError for an argument that is not a mesh, or not the one to compute on here."""
    if mesh is None:
        return
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise ValueError(
            f"argument 'mesh' must be a jax.sharding.Mesh, got {type(mesh).__name__}; make one with ejdist.make_mesh"
        )
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and not around.manual_axes and mesh.abstract_mesh != around:
        raise ValueError(
            f"argument 'mesh' is {_described(mesh)}, but the mesh in force is {_described(around)}, and a program is of one "
            "mesh: leave the argument out, or make the call outside of `jax.set_mesh`"
        )
    if around.empty and isinstance(mesh, jax.sharding.AbstractMesh) and not unsafe_am_i_under_a_jit_DO_NOT_USE():
        raise ValueError(
            "argument 'mesh' is an AbstractMesh, which has no devices: give the Mesh, or call inside jax.jit on arrays that "
            "lie on it"
        )


def _described(mesh: Any) -> str:
    kinds = ", ".join(sorted({str(t) for t in mesh.axis_types}))
    return f"{dict(mesh.shape)} ({kinds})"


def is_explicit(mesh: Any) -> bool:
    """Returns whether the types of arrays on this mesh have their shardings."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def check_types(mesh: Any) -> None:
    """Raises ValueError for a mesh on which the types of arrays show their sharding over some axes only: every device along
    the others would silently compute everything."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    silent = [a for a, kind in kinds.items() if kind != jax.sharding.AxisType.Explicit and mesh.shape[a] > 1]
    if is_explicit(mesh) and silent:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has axes of two types, and of {', '.join(map(repr, silent))}, which the types of "
            "arrays say nothing of, it is not known which dims lie on them: give 'in_specs', or make all axes of one type "
            "(axis_types of jax.make_mesh)"
        )


def axis_is_bound(axis_name: str) -> bool:
    """Returns whether this runs inside a `shard_map` over that axis."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def check_axis(axis_name: str, mesh: Any = None) -> None:
    """Raises ValueError where an axis that is not bound is not one to split a sequence over either: the mesh does not have
    it, or this runs inside a `shard_map` that is over other axes, on arrays that may be parts of a sequence."""
    check_mesh(mesh)
    around = jax.sharding.get_abstract_mesh()
    left = current_mesh() if around.manual_axes else None
    if around.manual_axes and (left is None or axis_name not in left.axis_names):
        if around.shape.get(axis_name) != 1:
            raise ValueError(
                f"argument 'axis_name' = {axis_name!r} is not among the axes {tuple(around.manual_axes)} that this is mapped "
                "over; name one of those, or map over that axis too"
            )
        return
    mesh = current_mesh() if mesh is None else mesh
    if mesh is not None and axis_name not in mesh.axis_names:
        raise ValueError(
            f"argument 'axis_name' = {axis_name!r} (that of the layout's T, where none is given) is not an axis of the mesh "
            f"{dict(mesh.shape)}: name the one that splits the sequence, or declare it once, ejdist.set_layout(T=AXIS)"
        )
