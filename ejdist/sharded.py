"""Operations on sharded arrays. The only file that calls `shard_map`.

`run` takes an operation of `kernels`, its arguments, and where its dims lie on the mesh; every spec follows from the dims
that the contract declares. What an operation cannot do without communication it does not do here: splitting such a dim
raises, and names the operation that communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejdist.layout import ACTIVATIONS, Axes, axes_of_specs, on_mesh, spec
from ejdist.mesh import current_mesh
from kernels._core.call import Dim, Parameter, is_array
from kernels._core.contract import Op
from kernels._core.masks import MaskInfo, map_data

# Dims of the fields of MaskInfo, and of the leading dims of an operation that takes any number of them.
MASK_DIMS = {
    "q_segment_ids": ("B", "T"),
    "kv_segment_ids": ("B", "S"),
    "q_positions": ("B", "T"),
    "kv_positions": ("B", "S"),
    "attention_mask": ("B", "N", "T", "S"),
    "prefix_lengths": ("B",),
}
LEADING = {0: (), 1: ("B",), 2: ("B", "T"), 3: ("B", "T", "N")}

# Where to go for a dim that an operation cannot have split.
COMMUNICATES = {
    ("flash_attention", "T"): "ring_attention, which exchanges keys and values over that axis",
    ("flash_attention", "S"): "ring_attention, which exchanges keys and values over that axis",
    ("cross_entropy", "V"): "ejdist.vocabulary_parallel_cross_entropy, which joins the parts over that axis",
    ("gated_mlp", "F"): "the model's own matmuls under jit, which the compiler partitions",
}


def dims_of(parameter: Parameter, value: Any, aliases: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns the name of each dim of an argument; a variadic `*lead` is B, B T, or B T N by its length."""
    names: list[str] = []
    for d in parameter.dims:
        if d.variadic:
            names.extend(LEADING[value.ndim - (len(parameter.dims) - 1)])
        else:
            names.append((aliases or {}).get(d.name, d.name))
    return tuple(names)


def _checked_mesh(mesh: Any) -> Any:
    mesh = current_mesh() if mesh is None else mesh
    return None if mesh is None or mesh.size == 1 else mesh


def _spec_tree(op: Op, name: str, value: Any, axes: Axes, mesh: Any) -> Any:
    what = f"{op.name}: argument {name!r}"
    if isinstance(value, MaskInfo):

        def of_field(field: str, x: Any) -> PartitionSpec:
            return spec(MASK_DIMS[field], axes, shape=x.shape, mesh=mesh, what=f"mask field {field!r}")

        return map_data(value, of_field)
    return spec(dims_of(op.parameters[name], value), axes, shape=value.shape, mesh=mesh, what=what)


def resolve_axes(
    op: Op,
    arguments: Mapping[str, Any],
    mesh: Any,
    in_specs: Sequence[PartitionSpec] | PartitionSpec | None,
    table: Axes = ACTIVATIONS,
) -> dict[str, tuple[str, ...]]:
    """Returns dim -> mesh axes: from `in_specs`, which are those of the first arrays in order, else from the table."""
    if in_specs is None:
        return on_mesh(table, mesh)
    in_specs = (in_specs,) if isinstance(in_specs, PartitionSpec) else tuple(in_specs)
    arrays = [(n, v) for n, v in arguments.items() if is_array(v)]
    if len(in_specs) > len(arrays):
        raise ValueError(f"{op.name}: {len(in_specs)} in_specs for {len(arrays)} array arguments")
    for s in in_specs:
        named = [a for entry in s if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)]
        unknown = [a for a in named if a not in mesh.axis_names]
        if unknown:
            raise ValueError(f"in_specs name the axes {unknown}, which the mesh {dict(mesh.shape)} does not have")
    dims = [dims_of(op.parameters[n], v) for n, v in arrays[: len(in_specs)]]
    return axes_of_specs(dims, in_specs)


def check_local(op: Op, arguments: Mapping[str, Any], axes: Axes, mesh: Any) -> None:
    """Raises ValueError where a dim is split that the operation needs whole; names what communicates over it."""
    allowed = set(op.local_dims)
    for name, value in arguments.items():
        if not is_array(value):
            continue
        parameter = op.parameters[name]
        variadic = any(d.variadic and d.name in allowed for d in parameter.dims)
        dims = dims_of(parameter, value)
        local = allowed | (set(LEADING[value.ndim - len(parameter.dims) + 1]) if variadic else set())
        for dim, size in zip(dims, value.shape, strict=True):
            split = [a for a in axes.get(dim, ()) if mesh.shape[a] > 1]
            if split and size > 1 and dim not in local:
                where = COMMUNICATES.get((op.name, dim))
                raise ValueError(
                    f"{op.name}: argument {name!r} has dim {dim} split over {', '.join(split)}, but this operation needs it "
                    f"whole" + (f"; use {where}" if where else "; gather it first")
                )


def map_shards(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Returns the function applied to the shards of its arguments, on every device of the mesh.

    Replication is stated by the specs and not tracked through the function (`check_vma=False`): kernels of other
    toolchains carry no such types. Gradients of arguments that are replicated over an axis are summed over it.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def run(
    op: Op,
    arguments: Mapping[str, Any],
    *,
    out_dims: Sequence[Sequence[str]],
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    local: Callable | None = None,
    table: Axes = ACTIVATIONS,
    check: bool = True,
    **call: Any,
) -> Any:
    """Returns the outputs of an operation on sharded arguments.

    Args:
      arguments: of the contract; arrays are global.
      out_dims: the dims of each output.
      mesh: default: the mesh in force. Without one, the operation runs on the arrays as they are.
      in_specs: specs of the first arrays; the others follow from the dims that these show.
      out_specs: specs of the outputs; default: from the same dims.
      local: what runs on a shard, a function of the keyword arguments; default: the operation.
      call: platform and cfg.
    """
    local = op if local is None else local
    mesh = _checked_mesh(mesh)
    given = {n: v for n, v in arguments.items() if v is not None}
    if mesh is None:
        return local(**given, **call)
    axes = resolve_axes(op, given, mesh, in_specs, table)
    if check:
        check_local(op, given, axes, mesh)
    arrays = {n: v for n, v in given.items() if is_array(v) or isinstance(v, MaskInfo)}
    options = {n: v for n, v in given.items() if n not in arrays}
    specs = {n: _spec_tree(op, n, v, axes, mesh) for n, v in arrays.items()}
    if out_specs is None:
        results = tuple(spec(dims, axes) for dims in out_dims)
        out_specs = results if len(results) > 1 else results[0]
    elif len(out_dims) > 1 and isinstance(out_specs, PartitionSpec):
        # The caller states the spec of the visible output; the others follow their dims.
        out_specs = (out_specs, *(spec(dims, axes) for dims in out_dims[1:]))

    def body(arrays: dict[str, Any]) -> Any:
        return local(**arrays, **options, **call)

    return map_shards(body, mesh, (specs,), out_specs)(arrays)


def parts(axes: Axes, dim: str, mesh: Any) -> int:
    """Returns over how many devices a dim is split."""
    return math.prod(mesh.shape[a] for a in axes.get(dim, ()))


__all__ = ["Dim", "check_local", "dims_of", "map_shards", "parts", "resolve_axes", "run"]
