"""Operations on sharded arrays. The only file that calls `shard_map`.

`sharded(function)` is a public function of `kernels` with `mesh`, `in_specs` and `out_specs`. Every spec follows from the
dims that the operation declares. What an operation cannot do without communication it does not do here: splitting such a dim
raises, and names the operation that communicates.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejdist.layout import (
    Axes,
    axes_in,
    axes_of_specs,
    check_mesh_of,
    check_out_specs,
    check_specs,
    current_layout,
    on_mesh,
    spec,
)
from ejdist.mesh import check_mesh, current_mesh, is_explicit
from kernels._core import select
from kernels._core.binding import Call, is_array, typed
from kernels._core.contract import Op
from kernels._core.dims import leading, named
from kernels._core.dispatch import varying_axes
from kernels._core.interpret import interpreting
from kernels._core.masks import MaskInfo, map_data
from kernels._core.public import Prepared, PublicFunction, module_class

# Dims of the fields of MaskInfo.
MASK_DIMS = {
    "q_segment_ids": ("B", "T"),
    "kv_segment_ids": ("B", "S"),
    "q_positions": ("B", "T"),
    "kv_positions": ("B", "S"),
    "attention_mask": ("B", "N", "T", "S"),
    "prefix_lengths": ("B",),
}
_SHARDED_DOC = """
    On a mesh, also:
      mesh: default: the mesh in force (`jax.set_mesh`, `with mesh:`); with none, the arrays are used as they are.
      in_specs: PartitionSpecs of the first arrays, None for one that follows; the others follow from the dims that these
        show. Default: the layout in force (`set_layout`), or the arrays' own types on a mesh of explicit axes.
      out_specs: of the result. It follows from the inputs, so this only says it again: another one is a ValueError.
"""


def mesh_of(mesh: Any, in_specs: Any = None, out_specs: Any = None) -> Any:
    """Returns the mesh given or in force; None where there is none, or it has one device.

    Raises:
      ValueError: what was given is no mesh, or this is inside a `shard_map`, where arrays are a device's own; or specs were
        given for a mesh that does not exist.
    """
    given = [n for n, x in (("mesh", mesh), ("in_specs", in_specs), ("out_specs", out_specs)) if x is not None]
    check_mesh(mesh)
    if given and jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"arguments {', '.join(map(repr, given))} are for global arrays, and this call is inside a shard_map, where the "
            "arrays are a device's own: leave them out"
        )
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError(
            "arguments 'in_specs' and 'out_specs' say where arrays lie on a mesh, and there is none: give 'mesh', or call "
            "under `with jax.set_mesh(mesh):`"
        )
    # On explicit axes even one device is in the types of the arrays.
    return None if mesh is None or (mesh.size == 1 and not is_explicit(mesh)) else mesh


def _arrays(call: Call) -> dict[str, Any]:
    return {n: v for n, v in call.arguments.items() if is_array(v)}


def dims_of(op: Op, name: str, value: Any) -> tuple[str, ...]:
    """Returns the name of each dim of an argument."""
    return named(op.parameters[name].dims, value.ndim)


def resolve_axes(
    op: Op, call: Call, mesh: Any, in_specs: Any, table: Axes | None = None, handles: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Returns dim -> mesh axes: from `in_specs`, which are those of the first arrays in order; else, on a mesh of explicit
    axes, from the types of the arrays; else from the table, by default that of the layout in force."""
    arrays = _arrays(call)
    for name, value in arrays.items():
        check_mesh_of(f"{op.name}: argument {name!r}", value, mesh)
    if in_specs is not None:
        given = check_specs("in_specs", in_specs, mesh, len(arrays), f"array arguments of {op.name}")
        shown = [(n, v, s) for (n, v), s in zip(arrays.items(), given, strict=False) if s is not None]
        dims = [dims_of(op, n, v) for n, v, _ in shown]
        return dict(table or {}) | axes_of_specs(dims, [s for *_, s in shown], [v.shape for _, v, _ in shown])
    if is_explicit(mesh):
        axes: dict[str, tuple[str, ...]] = dict(table or {})
        for name, value in sorted(arrays.items(), key=lambda item: item[0] in op.weights):
            own = axes_of_specs([dims_of(op, name, value)], [jax.typeof(value).sharding.spec], [value.shape])
            if name in op.weights:  # stored over axes that are others' here, or in a dim that is needed whole: gathered
                taken = {a for axes_of in axes.values() for a in axes_of}
                fit = _may_be_split(op, name, value, handles)
                own = {d: s for d, s in own.items() if d in fit and (axes.get(d) == s or not taken & set(s))}
            for dim, split in own.items():
                if any(mesh.shape[a] > 1 for a in split) and dim not in _may_be_split(op, name, value, handles):
                    raise _needs_whole(op, name, dim, split)
            for dim, split in own.items():
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
    if any(d.variadic and d.name in op.local_dims for d in op.parameters[name].dims):
        local |= set(leading(value.ndim - len(op.parameters[name].dims) + 1))
    return local


def _needs_whole(op: Op, name: str, dim: str, axes: Sequence[str]) -> ValueError:
    where = op.elsewhere.get(dim)
    return ValueError(
        f"{op.name}: argument {name!r} has dim {dim} split over {', '.join(axes)}, but this operation needs it whole"
        + (f"; use ejdist.{where}, which communicates over it" if where else "; gather it first")
    )


def _not_one(op: Op, call: Call, without: Collection[str] = ()) -> dict[str, None]:
    """Returns the dims that are not 1 in every array of a call but those, in order."""
    arrays = {n: v for n, v in _arrays(call).items() if n not in without}
    return {d: None for n, v in arrays.items() for d, size in zip(dims_of(op, n, v), v.shape, strict=True) if size != 1}


def _apart(
    op: Op, call: Call, axes: Axes, mesh: Any, handles: Collection[str], said: bool
) -> dict[str, tuple[str, ...]]:
    """Returns the axes with each axis on one dim of the call. A sum over an axis that also splits the tokens would add those
    of different devices. Where a layout has one axis for two dims, the one that is summed or communicated over keeps it; what
    was `said`, in specs or types, is not changed.

    Raises:
      ValueError: specs or types have an axis on two dims.
    """
    joint = {*op.sum_dims, *handles}
    together = [*map(set, op.tied_dims), {"T", "S"}]
    owners: dict[str, str] = {}
    result = dict(axes)
    for dim in sorted(_not_one(op, call), key=lambda d: d not in joint):
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
    for name, value in _arrays(call).items():
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
    if sizes[second] == 1:  # read by every one of the first, so whole on every device
        return
    a, b = split(first), split(second)
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
        raise ValueError(
            f"{op.name}: argument {holders[second][0]} has {second} = {sizes[second]}, which cannot be divided over {over}: "
            f"make that a divisor of {second}, or repeat that dim of {' and '.join(holders[second])} "
            f"{math.lcm(sizes[second], parts) // sizes[second]} times (jnp.repeat)"
        )


def map_shards(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Returns the function applied to the shards of its arguments, on every device of the mesh.

    What varies over which axis is tracked (`check_vma`): an out_spec that takes one device's part for all is refused, and the
    gradient of what is the same on several devices is summed over them, once.
    """
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    if not is_explicit(mesh):
        return mapped

    def placed(*arguments: Any) -> Any:
        # On a mesh of explicit axes (`jax.make_mesh`) where an array lies is its type, and `shard_map` moves nothing.
        return mapped(*jax.sharding.reshard(arguments, jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs)))

    return placed


@dataclass(frozen=True)
class _Program:
    """What one compiled sharded call depends on: `key` is all of it, the rest is what it is made from."""

    key: tuple
    op: Op = field(compare=False)
    local: Callable = field(compare=False)
    mesh: Any = field(compare=False)
    in_specs: Mapping[str, Any] = field(compare=False)
    out_specs: Any = field(compare=False)
    gathered: Mapping[str, Any] = field(compare=False)
    sums: tuple[str, ...] = field(compare=False)
    offsets: Mapping[str, tuple[tuple[str, ...], int]] = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)


@functools.lru_cache(maxsize=1024)
def _compiled(p: _Program) -> Callable:
    """Returns the jitted function of the global arrays. Kept, so that a second eager call compiles nothing."""

    def body(arrays: dict[str, Any]) -> Any:
        for name, dims in p.gathered.items():
            for dim, axes in dims:
                arrays[name] = jax.lax.all_gather(arrays[name], axes, axis=dim, tiled=True)
        for name, (axes, size) in p.offsets.items():
            arrays[name] = arrays.get(name, jnp.int32(0)) + jax.lax.axis_index(axes) * size
        out = p.local(**arrays, **p.options)
        return jax.tree.map(settled, out, p.out_specs)

    def settled(x: jax.Array, lies: PartitionSpec) -> jax.Array:
        # An axis of one device may be in the type of an explicit array, and is no part of a result that lacks the dim.
        strange = varying_axes(x) - {*axes_in(lies), *p.sums}
        alone = tuple(a for a, n in p.mesh.shape.items() if n == 1 and a in strange)
        return jax.lax.psum(x, p.sums + alone) if p.sums or alone else x

    body.__name__ = p.op.name
    return jax.jit(map_shards(body, p.mesh, (dict(p.in_specs),), p.out_specs))


def _spec_tree(op: Op, name: str, value: Any, axes: Axes, mesh: Any) -> Any:
    what = f"{op.name}: argument {name!r}"
    if isinstance(value, MaskInfo):

        def of_field(field: str, x: Any) -> PartitionSpec:
            return spec(MASK_DIMS[field], axes, shape=x.shape, mesh=mesh, what=f"mask field {field!r}")

        return map_data(value, of_field)
    if not is_array(value):  # a pytree of weights: whole on every device
        return jax.tree.map(lambda x: PartitionSpec(), value)
    return spec(dims_of(op, name, value), axes, shape=value.shape, mesh=mesh, what=what)


def _stored(op: Op, call: Call, axes: Axes, mesh: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """Returns argument -> ((dim, axes), ...) to gather inside, and puts the specs of such arguments as they are stored.

    Gathered where it is used, a parameter's gradient is scattered as it is summed. That is only so over axes that split other
    arrays, so that each device has a gradient of its own; over the rest the compiler gathers, outside.
    """
    layout, gathered = current_layout(), {}
    varying = {a for d in _not_one(op, call, without=op.weights) for a in axes.get(d, ())}
    for name in op.weights:
        value: Any = call.arguments.get(name)
        if not is_array(value):
            continue
        dims = dims_of(op, name, value)
        where = on_mesh(layout.parameters, mesh)
        extra = [tuple(a for a in where.get(d, ()) if a in varying and a not in axes.get(d, ())) for d in dims]
        parts = [math.prod(mesh.shape[a] for a in (*axes.get(d, ()), *e)) for d, e in zip(dims, extra, strict=True)]
        if any(extra) and all(size % n == 0 for size, n in zip(value.shape, parts, strict=True)):
            own = {d: (*axes.get(d, ()), *e) for d, e in zip(dims, extra, strict=True)}
            specs[name] = spec(dims, own, shape=value.shape, mesh=mesh, what=f"{op.name}: argument {name!r}")
            gathered[name] = tuple((i, e) for i, e in enumerate(extra) if e)
    return gathered


def run(
    prepared: Prepared,
    op: Op,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    local: Callable | None = None,
    table: Axes | None = None,
    handles: Collection[str] = (),
    stored: bool = False,
    platform: str | None = None,
    cfg: Any = None,
) -> Any:
    """Returns the result of a prepared call on sharded arguments.

    Args:
      prepared: the call, whose arrays are global, and what becomes of its outputs.
      mesh, in_specs, out_specs: see `sharded`.
      local: what runs on a shard, hashable, a function of the keyword arguments, with `axes` first if it has `handles`;
        default: the operation.
      table: dim -> axes that go before the layout's.
      handles: dims that `local` communicates over, and that may be split for that reason.
      stored: whether the operation's weights lie as the layout stores parameters; they are then gathered here.
    """
    call = prepared.call
    mesh = mesh_of(mesh, in_specs, out_specs)
    if mesh is None:
        return prepared.result(op, op.run(call, platform=platform, cfg=cfg))
    axes = resolve_axes(op, call, mesh, in_specs, table, handles)
    check_local(op, call, axes, mesh, handles)
    axes = _apart(op, call, axes, mesh, handles, said=in_specs is not None or is_explicit(mesh))
    data = {n: v for n, v in call.traced().items() if v is not None}
    specs = {n: _spec_tree(op, n, v, axes, mesh) for n, v in data.items()}
    gathered = _stored(op, call, axes, mesh, specs) if stored else {}
    # A dim that is 1 in every argument was not split, so it is not in the outputs either.
    split = _not_one(op, call)
    lies = {d: a for d, a in axes.items() if d in split and d not in op.sum_dims}
    lead = len(call.dims["lead"]) if "lead" in call.dims else 0
    outputs = [
        named(dims, len(dims) - 1 + lead if any(d.variadic for d in dims) else len(dims)) for dims in op.output_dims
    ]
    results = tuple(spec(dims, lies) for dims in outputs)
    if out_specs is not None:
        by_name = dict(zip(op.outputs, results, strict=True))
        many = not isinstance(prepared.returns, str) and prepared.finish is None
        wanted = (
            (spec(prepared.dims, lies),)
            if prepared.finish is not None
            else tuple(by_name[n] for n in (prepared.returns if many else (prepared.returns,)))
        )
        check_out_specs(out_specs, wanted, mesh)
    sums = tuple(a for d in sorted(op.sum_dims & split.keys()) for a in axes.get(d, ()))
    offsets = {
        n: (axes[d], call.dims[d] // math.prod(mesh.shape[a] for a in axes[d]))
        for n, d in op.offset_of.items()
        if axes.get(d) and d in split
    }
    options = {**{n: v for n, v in call.static().items() if n not in offsets}, "platform": platform, "cfg": cfg}
    own: Callable = op if local is None else local
    if handles:
        own = functools.partial(own, {d: axes.get(d, ()) if d in split else () for d in handles})
    key = (op, local, mesh, tuple(handles), tuple((d, axes.get(d, ())) for d in sorted(axes)), results, call.key())
    key += (tuple(gathered.items()), tuple(offsets.items()), platform, typed(cfg), interpreting(), select.state(call))
    out = results if len(results) > 1 else results[0]
    program = _Program(key, op, own, mesh, specs, out, gathered, sums, offsets, options)
    return prepared.result(op, _compiled(program)(data))


class ShardedFunction:
    """A public function on sharded arrays: `mesh`, `in_specs` and `out_specs` beside its own arguments."""

    def __init__(self, function: PublicFunction, local: Callable | None = None, handles: Collection[str] = ()) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.local, self.handles = function, local, tuple(handles)
        self.__module__ = "ejdist"
        self.__signature__ = with_mesh(inspect.signature(function))
        self.__doc__ = (function.__doc__ or "").split(">>>")[0].rstrip() + "\n" + _SHARDED_DOC
        self.Module = module_class(function.Module.__name__, self)

    def __call__(
        self,
        *args: Any,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        platform: str | None = None,
        cfg: Any = None,
        **kwargs: Any,
    ) -> Any:
        where = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "platform": platform, "cfg": cfg}
        return self.run(self.function.prepare(*args, **kwargs), **where)

    def run(self, prepared: Prepared, **where: Any) -> Any:
        """Returns the result of a prepared call."""
        op = prepared.op or self.function.op
        return run(prepared, op, local=self.local, handles=self.handles, **where)

    def with_stored_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As calling it, with the operation's weights as a model stores them: what `ejdist.models` calls."""
        where = {n: kwargs.pop(n) for n in ("mesh", "platform", "cfg") if n in kwargs}
        return self.run(self.function.prepare(*args, **kwargs), stored=True, **where)

    def __repr__(self) -> str:
        return f"<sharded function {self.__name__}>"


def with_mesh(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature with the three arguments of a sharded function."""
    extra = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("mesh", "in_specs", "out_specs")
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *extra])


def sharded(function: PublicFunction, *, local: Callable | None = None, handles: Sequence[str] = ()) -> ShardedFunction:
    """Returns the function on sharded arrays. Without a mesh, given or in force, it is the function itself.

    Args:
      local: for what communicates: what runs on a shard, `local({dim: axes}, **arguments)`, hashable.
      handles: the dims that it communicates over.
    """
    return ShardedFunction(function, local, handles)
