"""Operations on sharded arrays. The only file that calls `shard_map`.

`sharded(op)` is an operation of `kernels` with `mesh`, `in_specs` and `out_specs`; `run` is one call of it. Every spec
follows from the dims that the contract declares. What an operation cannot do without communication it does not do here:
splitting such a dim raises, and names the operation that communicates.
"""

from __future__ import annotations

import functools
import itertools
import math
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

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
LEADING = ("B", "T", "N")

# Where query heads read key heads of the same device: query head n reads key head n // (N / K), so both are split alike.
GROUPED_HEADS = ("flash_attention",)

# Where to go for a dim that an operation cannot have split.
COMMUNICATES = {
    ("flash_attention", "T"): "ring_attention, which exchanges keys and values over that axis",
    ("flash_attention", "S"): "ring_attention, which exchanges keys and values over that axis",
    ("cross_entropy", "V"): "ejdist.fused_cross_entropy, which joins the parts over that axis",
    ("gated_mlp", "F"): "ejdist.gated_mlp, which sums the parts over that axis",
}


def leading(count: int) -> tuple[str, ...]:
    """Returns the names of that many leading dims: B, B T, B T N, and unnamed, never split, after these."""
    return (*LEADING, *("_",) * count)[:count]


def mesh_of(mesh: Any, in_specs: Any = None, out_specs: Any = None) -> Any:
    """Returns the mesh given or in force; None where there is none, or it has one device.

    Raises:
      ValueError: specs were given for a mesh that does not exist.
    """
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError(
            "arguments 'in_specs' and 'out_specs' say where arrays lie on a mesh, and there is none: give 'mesh', or call "
            "under `with jax.set_mesh(mesh):`"
        )
    return None if mesh is None or mesh.size == 1 else mesh


def _named(dims: Sequence[Dim], lead: int) -> tuple[str, ...]:
    names = [leading(lead) if d.variadic else (d.name or "_",) for d in dims]
    return tuple(itertools.chain.from_iterable(names))


def dims_of(parameter: Parameter, value: Any) -> tuple[str, ...]:
    """Returns the name of each dim of an argument; those of a variadic `*lead` by its length, see `leading`."""
    return _named(parameter.dims, value.ndim - len(parameter.dims) + 1)


def output_dims(op: Op, arguments: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the dims of each output, from the return annotation of the contract."""
    lead = 0
    for name, value in arguments.items():
        dims = op.parameters[name].dims
        if is_array(value) and any(d.variadic for d in dims):
            lead = value.ndim - len(dims) + 1
    hint = typing.get_type_hints(op.function)["return"]
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    return tuple(_named([Dim.parse(part) for part in h.dim_str.split()], lead) for h in hints)


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
    shown = arrays[: len(in_specs)]
    dims = [dims_of(op.parameters[n], v) for n, v in shown]
    return axes_of_specs(dims, in_specs, [v.shape for _, v in shown])


def check_local(op: Op, arguments: Mapping[str, Any], axes: Axes, mesh: Any, handles: Collection[str] = ()) -> None:
    """Raises ValueError where a dim is split that the operation needs whole; names what communicates over it.

    Args:
      handles: dims over which the caller communicates itself.
    """

    def split(dim: str) -> tuple[str, ...]:
        return tuple(a for a in axes.get(dim, ()) if mesh.shape[a] > 1)

    sizes: dict[str, int] = {}
    for name, value in arguments.items():
        if not is_array(value):
            continue
        parameter = op.parameters[name]
        dims = dims_of(parameter, value)
        local = {*op.local_dims, *handles}
        if any(d.variadic and d.name in op.local_dims for d in parameter.dims):
            local |= set(leading(value.ndim - len(parameter.dims) + 1))
        for dim, size in zip(dims, value.shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 1))
            if split(dim) and size > 1 and dim not in local:
                where = COMMUNICATES.get((op.name, dim))
                raise ValueError(
                    f"{op.name}: argument {name!r} has dim {dim} split over {', '.join(split(dim))}, but this operation "
                    "needs it whole" + (f"; use {where}" if where else "; gather it first")
                )
    if op.name in GROUPED_HEADS:
        _check_heads(op, sizes["N"], sizes["K"], split("N"), split("K"), mesh)


def _check_heads(op: Op, N: int, K: int, query_axes: Sequence[str], key_axes: Sequence[str], mesh: Any) -> None:
    if K == 1:  # read by every query head, so whole on every device
        return
    if query_axes != key_axes:
        raise ValueError(
            f"{op.name}: the N = {N} query heads are split over {query_axes or 'nothing'} and the K = {K} heads of 'key' and "
            f"'value' over {key_axes or 'nothing'}; split them alike"
        )
    parts = math.prod(mesh.shape[a] for a in key_axes)
    if K % parts:
        raise ValueError(
            f"{op.name}: argument 'key' has K = {K} heads, which cannot be divided over "
            f"{' x '.join(f'{a}={mesh.shape[a]}' for a in key_axes)}: make that a divisor of K, or repeat the heads of 'key' "
            f"and 'value' {math.lcm(K, parts) // K} times (jnp.repeat on dim 2)"
        )


def map_shards(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Returns the function applied to the shards of its arguments, on every device of the mesh.

    Replication is stated by the specs and not tracked through the function (`check_vma=False`): kernels of other
    toolchains carry no such types. Gradients of arguments that are replicated over an axis are summed over it.
    """
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return mapped

    def placed(*arguments: Any) -> Any:
        # On a mesh of explicit axes (`jax.make_mesh`) where an array lies is its type, and `shard_map` moves nothing.
        where = jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs)
        return mapped(*jax.sharding.reshard(arguments, where))

    return placed


def run(
    op: Op,
    arguments: Mapping[str, Any],
    *,
    out_dims: Sequence[Sequence[str]] | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    local: Callable | None = None,
    table: Axes = ACTIVATIONS,
    handles: Collection[str] = (),
    **call: Any,
) -> Any:
    """Returns the outputs of an operation on sharded arguments.

    Args:
      arguments: of the contract; arrays are global.
      out_dims: the dims of each output; default: those of the contract.
      mesh: default: the mesh in force. Without one, the operation runs on the arrays as they are.
      in_specs: specs of the first arrays; the others follow from the dims that these show.
      out_specs: specs of the outputs; default: from the same dims.
      local: what runs on a shard, a function of the keyword arguments; default: the operation.
      table: dim -> axes, where there are no in_specs.
      handles: dims that `local` communicates over, and that may be split for that reason.
      call: platform and cfg.
    """
    local = op if local is None else local
    mesh = mesh_of(mesh, in_specs, out_specs)
    given = {n: v for n, v in arguments.items() if v is not None}
    if mesh is None:
        return local(**given, **call)
    axes = resolve_axes(op, given, mesh, in_specs, table)
    check_local(op, given, axes, mesh, handles)
    out_dims = output_dims(op, given) if out_dims is None else out_dims
    arrays = {n: v for n, v in given.items() if is_array(v) or isinstance(v, MaskInfo)}
    options = {n: v for n, v in given.items() if n not in arrays}
    specs = {n: _spec_tree(op, n, v, axes, mesh) for n, v in arrays.items()}
    # A dim that is 1 in every argument was not split, so it is not in the outputs either.
    split = {
        dim
        for n, v in given.items()
        if is_array(v)
        for dim, size in zip(dims_of(op.parameters[n], v), v.shape)
        if size > 1
    }
    results = tuple(spec(dims, {dim: axes.get(dim, ()) for dim in split}) for dims in out_dims)
    if out_specs is None:
        out_specs = results if len(results) > 1 else results[0]
    elif len(out_dims) > 1 and isinstance(out_specs, PartitionSpec):
        # The caller states the spec of the visible output; the others follow their dims.
        out_specs = (out_specs, *results[1:])

    def body(arrays: dict[str, Any]) -> Any:
        return local(**arrays, **options, **call)

    return map_shards(body, mesh, (specs,), out_specs)(arrays)


def sharded(op: Op, *, local: Callable | None = None, handles: Collection[str] = ()) -> Callable:
    """Returns the operation with three arguments more: `mesh`, `in_specs` and `out_specs`, see `run`.

    Without a mesh, given or in force, it is the operation. `local` and `handles` are for what communicates.
    """

    @functools.wraps(op.function)
    def on_mesh(
        *args: Any,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        platform: str | None = None,
        cfg: Any = None,
        **kwargs: Any,
    ) -> Any:
        arguments = op.bind(*args, **kwargs).arguments
        where = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
        return run(op, arguments, local=local, handles=handles, platform=platform, cfg=cfg, **where)

    return on_mesh


__all__ = [
    "check_local",
    "dims_of",
    "leading",
    "map_shards",
    "mesh_of",
    "output_dims",
    "resolve_axes",
    "run",
    "sharded",
]
