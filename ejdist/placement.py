"""Which mesh axes split which dims of a call, and whether the operation can have it so.

The axes come from specs, from the types of arrays, or from the layout in force; what an operation allows, from the facts that
it declares. Nothing here runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejdist.layout import Axes, axes_of_specs, check_mesh_of, check_specs, current_layout, on_mesh, spec
from ejdist.mesh import check_mesh, check_types, current_mesh, is_explicit, mesh_here
from kernels.engines.attention.masks import MASK_DIMS, MaskInfo, map_data
from kernels.framework.binding import Call, is_array
from kernels.framework.contract import Op
from kernels.framework.dims import leading, named


def mesh_of(mesh: Any, in_specs: Any = None, out_specs: Any = None) -> Any:
    """Returns the mesh of the call, `mesh` or the one in force; None without one, or where it has one device. Inside a
    `shard_map` it is the mesh of the axes that the `shard_map` leaves to the compiler.

    Raises:
      ValueError: `mesh` is not a mesh; or this is inside a `shard_map` over all axes, where arrays are a device's own; or there
        are specs but no mesh, or no specs for a mesh whose axes are of two types.
    """
    names = [n for n, x in (("mesh", mesh), ("in_specs", in_specs), ("out_specs", out_specs)) if x is not None]
    check_mesh(mesh)
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if names and inside and current_mesh() is None:
        raise ValueError(
            f"arguments {', '.join(map(repr, names))} are for global arrays, and this call is inside a shard_map, where the "
            "arrays are a device's own: leave them out"
        )
    mesh = current_mesh() if mesh is None else mesh_here(mesh)
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError(
            "arguments 'in_specs' and 'out_specs' say where arrays lie on a mesh, and there is none: give 'mesh', or call "
            "under `with jax.set_mesh(mesh):`"
        )
    if mesh is not None and in_specs is None:
        check_types(mesh)
    # On explicit axes even one device is in the types of the arrays.
    return None if mesh is None or (mesh.size == 1 and not is_explicit(mesh)) else mesh


def arrays_of(call: Call) -> dict[str, Any]:
    return {n: v for n, v in call.arguments.items() if is_array(v)}


def dims_of(op: Op, name: str, value: Any) -> tuple[str, ...]:
    """Returns the name of each dim of an argument."""
    return named(op.parameters[name].dims, value.ndim)


def resolve_axes(
    op: Op, call: Call, mesh: Any, in_specs: Any, table: Axes | None = None, handles: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Returns dim -> mesh axes: from `in_specs`, which are those of the first arrays in order; else, on a mesh of explicit
    axes, from the types of the arrays; else from the table, by default that of the layout in force."""
    arrays = arrays_of(call)
    for name, value in arrays.items():
        check_mesh_of(f"{op.name}: argument {name!r}", value, mesh)
    if in_specs is not None:
        requested = check_specs("in_specs", in_specs, mesh, len(arrays), f"array arguments of {op.name}")
        shown = [(n, v, s) for (n, v), s in zip(arrays.items(), requested, strict=False) if s is not None]
        dims = [dims_of(op, n, v) for n, v, _ in shown]
        return dict(table or {}) | axes_of_specs(dims, [s for *_, s in shown], [v.shape for _, v, _ in shown])
    if is_explicit(mesh):
        axes: dict[str, tuple[str, ...]] = dict(table or {})
        for name, value in sorted(arrays.items(), key=lambda item: item[0] in op.weights):
            array_axes = axes_of_specs([dims_of(op, name, value)], [jax.typeof(value).sharding.spec], [value.shape])
            if name in op.weights:  # stored over axes that are others' here, or in a dim that is needed whole: gathered
                used = {a for axes_of in axes.values() for a in axes_of}
                fit = _may_be_split(op, name, value, handles)
                array_axes = {
                    d: s for d, s in array_axes.items() if d in fit and (axes.get(d) == s or not used & set(s))
                }
            for dim, split in array_axes.items():
                if any(mesh.shape[a] > 1 for a in split) and dim not in _may_be_split(op, name, value, handles):
                    raise _needs_whole(op, name, dim, split)
            for dim, split in array_axes.items():
                # What is whole may be cut to go with what is split: nothing needs to move for it.
                if split and axes.setdefault(dim, split) != split and not (name in op.weights or dim in (table or {})):
                    raise ValueError(
                        f"{op.name}: dim {dim} is split over {axes[dim]} in one array and over {split} in {name!r}, by their "
                        "types; move one of them with jax.sharding.reshard"
                    )
        return axes
    layout = current_layout()
    layout.check(mesh, also=[a for axes in (table or {}).values() for a in axes])
    return on_mesh({**layout.activations, **(table or {})}, mesh)


def _may_be_split(op: Op, name: str, value: Any, handles: Collection[str]) -> set[str]:
    """Returns the dims of an argument that may be split."""
    local = {*op.local_dims, *op.sum_dims, *handles}
    if any(d.variadic and d.name in op.local_dims | op.sum_dims for d in op.parameters[name].dims):
        local |= set(leading(value.ndim - len(op.parameters[name].dims) + 1))
    return local


def summed_dims(op: Op, call: Call) -> set[str]:
    """Returns the dims of a call that every output is a sum over; `*lead` by the names that its dims have."""
    lead = leading(len(call.dims["lead"])) if "lead" in op.sum_dims else ()
    return {*(op.sum_dims - {"lead"}), *lead} - {"_"}


def _needs_whole(op: Op, name: str, dim: str, axes: Sequence[str]) -> ValueError:
    where = op.see_also.get(dim)
    return ValueError(
        f"{op.name}: argument {name!r} has dim {dim} split over {', '.join(axes)}, but this operation needs it whole"
        + (f"; use ejdist.{where}, which communicates over it" if where else "; gather it first")
    )


def not_one(op: Op, call: Call, without: Collection[str] = ()) -> dict[str, None]:
    """Returns the dims that are not 1 in every array of a call but those, in order."""
    arrays = {n: v for n, v in arrays_of(call).items() if n not in without}
    return {d: None for n, v in arrays.items() for d, size in zip(dims_of(op, n, v), v.shape, strict=True) if size != 1}


def apart(
    op: Op, call: Call, axes: Axes, mesh: Any, handles: Collection[str], said: bool
) -> dict[str, tuple[str, ...]]:
    """Returns the axes with each axis on one dim of the call. A sum over an axis that also splits the tokens would add those
    of different devices. Where a layout has one axis for two dims, the one that is summed or communicated over keeps it; axes
    that specs or types fix (`said`) do not change.

    Raises:
      ValueError: specs or types have an axis on two dims.
    """
    joint = {*op.sum_dims, *handles}
    together = [*map(set, op.tied_dims), {"T", "S"}]
    owners: dict[str, str] = {}
    result = dict(axes)
    for dim in sorted(not_one(op, call), key=lambda d: d not in joint):
        for axis in axes.get(dim, ()):
            other = owners.setdefault(axis, dim)
            if other == dim or mesh.shape[axis] == 1 or {other, dim} in together:
                continue
            if said:
                raise ValueError(
                    f"{op.name}: the axis {axis!r} splits both dim {other} and dim {dim}, so no device would have the "
                    "parts that belong together: split one of them over another axis, or leave it whole"
                )
            result[dim] = tuple(a for a in result[dim] if a != axis)
    return result


def check_local(op: Op, call: Call, axes: Axes, mesh: Any, handles: Collection[str] = ()) -> None:
    """Raises ValueError where a dim is split that the operation needs whole; names what communicates over it.

    Args:
      handles: dims over which the caller communicates itself.
    """

    def split(dim: str) -> tuple[str, ...]:
        return tuple(a for a in axes.get(dim, ()) if mesh.shape[a] > 1)

    sizes: dict[str, int] = {}
    holders: dict[str, list[str]] = {}
    for name, value in arrays_of(call).items():
        local = _may_be_split(op, name, value, handles)
        for dim, size in zip(dims_of(op, name, value), value.shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 1))
            holders.setdefault(dim, []).append(repr(name))
            if split(dim) and size != 1 and dim not in local:
                raise _needs_whole(op, name, dim, split(dim))
    for first, second in op.tied_dims:
        _check_tied(op, (first, second), sizes, holders, split, mesh)


def _check_tied(
    op: Op,
    dims: tuple[str, str],
    sizes: Mapping[str, int],
    holders: Mapping[str, list[str]],
    split: Callable[[str], tuple[str, ...]],
    mesh: Any,
) -> None:
    """Raises ValueError unless two dims of which the second serves groups of the first are split alike."""
    first, second = dims
    a, b = split(first), split(second)
    if sizes[second] == 1:  # read by every one of the first, so whole on every device
        if a and op.together:
            raise ValueError(
                f"{op.name}: dim {first} = {sizes[first]} of {holders[first][0]} is split over {', '.join(a)}, but all of it "
                f"decides together, since {' and '.join(holders[second])} have {second} = 1: leave {first} whole (mesh.tp=1), "
                f"or use a model with as many of {second} as divide over that axis"
            )
        alone = [n for n, o in zip(op.outputs, op.output_dims) if {first, second} & {d.name for d in o} == {second}]
        if a and alone:
            parts = math.prod(mesh.shape[x] for x in a)
            raise ValueError(
                f"{op.name}: dim {second} = 1 of output {alone[0]!r} would be made by each of the {parts} devices that {first} "
                f"is split over ({', '.join(a)}): repeat that dim of {' and '.join(holders[second])} {parts} times (jnp.repeat)"
            )
        return
    if a != b:
        raise ValueError(
            f"{op.name}: dim {first} = {sizes[first]} of {holders[first][0]} is split over {a or 'nothing'} and {second} = "
            f"{sizes[second]} of {' and '.join(holders[second])}, which serves it, over {b or 'nothing'}; split them alike"
        )
    parts = math.prod(mesh.shape[x] for x in b)
    over = " x ".join(f"{x}={mesh.shape[x]}" for x in b)
    if sizes[first] % parts:
        raise ValueError(
            f"{op.name}: argument {holders[first][0]} has {first} = {sizes[first]}, which cannot be divided over {over}; make "
            f"that a divisor of {sizes[first]}"
        )
    if sizes[second] % parts:
        times = math.lcm(sizes[second], parts) // sizes[second]
        repeated = f", or repeat that dim of {' and '.join(holders[second])} {times} times (jnp.repeat)"
        raise ValueError(
            f"{op.name}: argument {holders[second][0]} has {second} = {sizes[second]}, which cannot be divided over {over}: "
            f"make that a divisor of {second}{'' if op.together else repeated}"
        )


def spec_tree(op: Op, name: str, value: Any, axes: Axes, mesh: Any) -> Any:
    """Returns the spec of an argument, or the tree of specs of one that is a pytree.

    Raises:
      ValueError: a dim does not divide.
    """
    what = f"{op.name}: argument {name!r}"
    if isinstance(value, MaskInfo):

        def of_field(field: str, x: Any) -> PartitionSpec:
            return spec(MASK_DIMS[field], axes, shape=x.shape, mesh=mesh, what=f"mask field {field!r}")

        return map_data(value, of_field)
    if not is_array(value):  # a pytree of weights: whole on every device
        return jax.tree.map(lambda x: PartitionSpec(), value)
    return spec(dims_of(op, name, value), axes, shape=value.shape, mesh=mesh, what=what)


def stored_specs(op: Op, call: Call, axes: Axes, mesh: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """Returns argument -> ((dim, axes), ...) to gather inside, and puts the specs of such arguments as they are stored.

    Gathered where it is used, a parameter's gradient is scattered as it is summed. That is only so over axes that split other
    arrays, so that each device has a gradient of its own; over the rest the compiler gathers, outside.
    """
    layout, gathered = current_layout(), {}
    varying = {a for d in not_one(op, call, without=op.weights) for a in axes.get(d, ())}
    for name in op.weights:
        value: Any = call.arguments.get(name)
        if not is_array(value):
            continue
        dims = dims_of(op, name, value)
        where = on_mesh(layout.parameters, mesh)
        extra = [tuple(a for a in where.get(d, ()) if a in varying and a not in axes.get(d, ())) for d in dims]
        parts = [math.prod(mesh.shape[a] for a in (*axes.get(d, ()), *e)) for d, e in zip(dims, extra, strict=True)]
        if any(extra) and all(size % n == 0 for size, n in zip(value.shape, parts, strict=True)):
            stored_axes = {d: (*axes.get(d, ()), *e) for d, e in zip(dims, extra, strict=True)}
            specs[name] = spec(dims, stored_axes, shape=value.shape, mesh=mesh, what=f"{op.name}: argument {name!r}")
            gathered[name] = tuple((i, e) for i, e in enumerate(extra) if e)
    return gathered
