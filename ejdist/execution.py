"""One call on sharded arrays: what is decided once for calls of its kind, and the program that runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejdist.layout import Axes, axes_in, check_mesh_of, check_out_specs, current_layout, explicit, spec
from ejdist.mapped import map_shards
from ejdist.mesh import is_explicit
from ejdist.order import Order
from ejdist.placement import (
    apart,
    arrays_of,
    check_local,
    mesh_of,
    not_one,
    resolve_axes,
    spec_tree,
    stored_specs,
    summed_dims,
)
from ejdist.tokens import Follows, mesh_around, order_of_call
from kernels.framework import select
from kernels.framework.binding import Call, typed
from kernels.framework.contract import Op
from kernels.framework.dims import named
from kernels.framework.dispatch import varying_axes
from kernels.framework.interpret import interpreting
from kernels.framework.public import Prepared


@dataclass(frozen=True, eq=False)
class _Program:
    """The program of calls of one kind: what runs on a shard, where the arrays are placed, and what is gathered, summed and
    offset around it."""

    name: str
    local: Callable
    mesh: Any
    in_specs: Mapping[str, Any]
    out_specs: Any
    gathered: Mapping[str, Any]
    sums: tuple[str, ...]
    offsets: Mapping[str, tuple[tuple[str, ...], int]]
    options: Mapping[str, Any]

    @functools.cached_property
    def jitted(self) -> Callable:
        """The function of the global arrays, compiled once."""

        def body(arrays: dict[str, Any]) -> Any:
            for name, dims in self.gathered.items():
                for dim, axes in dims:
                    arrays[name] = jax.lax.all_gather(arrays[name], axes, axis=dim, tiled=True)
            for name, (axes, size) in self.offsets.items():
                arrays[name] = arrays.get(name, jnp.int32(0)) + jax.lax.axis_index(axes) * size
            return jax.tree.map(self._settled, self.local(**arrays, **self.options), self.out_specs)

        body.__name__ = self.name
        return jax.jit(map_shards(body, self.mesh, (dict(self.in_specs),), self.out_specs))

    def _settled(self, x: jax.Array, placed: PartitionSpec) -> jax.Array:
        # An axis of one device may be in the type of an explicit array, and is no part of a result that lacks the dim.
        strange = varying_axes(x) - {*axes_in(placed), *self.sums}
        alone = tuple(a for a, n in self.mesh.shape.items() if n == 1 and a in strange)
        return jax.lax.psum(x, self.sums + alone) if self.sums or alone else x


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
    order: str | Order | None = None,
    follows: Follows = False,
    checked: bool = False,
    name: str = "",
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
      stored: whether the operation's weights are sharded as the layout stores parameters; they are then gathered here.
      order: of the tokens; default: the layout's.
      follows: which orders `local` has a form for; it takes that of the tokens as `order`.
      checked: whether the order was checked before.
      name: of the public function, default: the operation's.
    """
    call, name = prepared.call, name or op.name
    op.check_asked(platform, cfg)
    mesh_argument, mesh = mesh, mesh_of(mesh, in_specs, out_specs)
    if mesh is None:
        if not checked:
            order_of_call(name, op, prepared, {}, mesh_around(mesh, mesh_argument), given=order, follows=False)
        for argument, value in arrays_of(call).items():
            check_mesh_of(f"{op.name}: argument {argument!r}", value, mesh)
        return prepared.result(op, op.run(call, platform=platform, cfg=cfg))
    in_specs, out_specs = (tuple(s) if isinstance(s, list) else s for s in (in_specs, out_specs))
    data = call.traced()
    # What is decided below follows from shapes, types and options, so calls of one kind share it.
    asked = (in_specs, out_specs, local, tuple((table or {}).items()), tuple(handles), stored)
    tokens = (order, follows, checked, current_layout())
    types = tuple(jax.typeof(x).sharding for x in jax.tree.leaves(data))
    kind = (op, name, call.program_key(), types, mesh, mesh_argument is None)
    kind += (jax.sharding.get_abstract_mesh(), asked, tokens)
    kind += (prepared.returns, prepared.finish is None, prepared.cuts, prepared.dims)
    kind += (platform, typed(cfg), interpreting(), select.state(call))
    try:
        program, hashable = _decided.get(kind), True
    except TypeError:  # specs that cannot be hashed: refused below
        program, hashable = None, False
    if program is None:
        around = mesh_around(mesh, mesh_argument)
        how = (in_specs, out_specs, local, table, handles, stored, order, follows, checked, platform, cfg)
        program = _decide(prepared, op, name, mesh, around, *how)
        if hashable:
            if len(_decided) >= _MOST_DECIDED:
                _decided.clear()
            _decided[kind] = program
    if any(0 in x.shape for x in jax.tree.leaves(data)):
        return prepared.result(op, _of_nothing(op, call, mesh, program.out_specs, platform, cfg))
    return prepared.result(op, program.jitted(data))


_decided: dict[tuple, _Program] = {}
_MOST_DECIDED = 1024


def _decide(
    prepared: Prepared,
    op: Op,
    name: str,
    mesh: Any,
    around: Any,
    in_specs: Any,
    out_specs: Any,
    local: Callable | None,
    table: Axes | None,
    handles: Collection[str],
    stored: bool,
    order: str | Order | None,
    follows: Follows,
    checked: bool,
    platform: str | None,
    cfg: Any,
) -> _Program:
    """Returns what runs for calls of one kind: where each array is placed, what is gathered, summed and offset. Raises what
    `run` does for an impossible call.

    Args:
      around: the mesh with the sizes of the axes around the call, see `order_of_call`. The others are those of `run`.
    """
    call = prepared.call
    axes = resolve_axes(op, call, mesh, in_specs, table, handles)
    check_local(op, call, axes, mesh, handles)
    axes = apart(op, call, axes, mesh, handles, said=in_specs is not None or is_explicit(mesh))
    follows, lie = local is not None and follows, None
    if not checked:
        lie = order_of_call(name, op, prepared, axes, around, given=order, follows=follows)
    data = {n: v for n, v in call.traced().items() if v is not None}
    specs = {n: spec_tree(op, n, v, axes, mesh) for n, v in data.items()}
    gathered = stored_specs(op, call, axes, mesh, specs) if stored else {}
    # A dim that is 1 in every argument was not split, so it is not in the outputs either.
    split = not_one(op, call)
    summed = summed_dims(op, call)
    output_axes = {d: a for d, a in axes.items() if d in split and d not in summed}
    lead = len(call.dims["lead"]) if "lead" in call.dims else 0
    outputs = [
        named(dims, len(dims) - 1 + lead if any(d.variadic for d in dims) else len(dims)) for dims in op.output_dims
    ]
    results = tuple(spec(dims, output_axes) for dims in outputs)
    if out_specs is not None:
        by_name = dict(zip(op.outputs, results, strict=True))
        returned = (prepared.returns,) if isinstance(prepared.returns, str) else prepared.returns
        if prepared.finish is None:
            expected = tuple(by_name[n] for n in returned)
        else:
            dims: Any = prepared.dims
            several = dims if any(isinstance(d, tuple) for d in dims) else (dims,)
            expected = tuple(spec(d, output_axes) for d in several)
        check_out_specs(out_specs, expected, mesh)
    sums = tuple(a for d in sorted(summed & split.keys()) for a in axes.get(d, ()))
    offsets = {
        n: (axes[d], call.dims[d] // math.prod(mesh.shape[a] for a in axes[d]))
        for n, d in op.offset_of.items()
        if axes.get(d) and d in split
    }
    options = {**{n: v for n, v in call.static().items() if n not in offsets}, "platform": platform, "cfg": cfg}
    function: Callable = op if local is None else local
    if handles:
        function = functools.partial(function, {d: axes.get(d, ()) if d in split else () for d in handles})
    if follows:
        function = functools.partial(function, order=lie)
    out = results if len(results) > 1 else results[0]
    return _Program(op.name, function, mesh, specs, out, gathered, sums, offsets, options)


def _of_nothing(op: Op, call: Call, mesh: Any, out_specs: Any, platform: str | None, cfg: Any) -> Any:
    """Returns the outputs of a call that has an empty array, with no `shard_map`: XLA silently ends the process over one whose
    arrays are all empty, as in a gradient."""
    if not is_explicit(mesh):
        return op.run(call, platform=platform, cfg=cfg)
    whole = jax.sharding.reshard(call.traced(), NamedSharding(mesh, PartitionSpec()))
    outputs = op(**whole, **call.static(), platform=platform, cfg=cfg)
    where = jax.tree.map(lambda s: NamedSharding(mesh, explicit(s, mesh)), out_specs)
    return jax.sharding.reshard(outputs, where)
