"""Operations on sharded arrays.

`sharded(function)` is a public function of `kernels` with `mesh`, `in_specs` and `out_specs`. Every spec follows from the
dims that the operation declares (`placement.py`). What an operation cannot do without communication it does not do here:
splitting such a dim raises, and names the operation that communicates.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejdist.layout import Axes, axes_in, check_mesh_of, check_out_specs, explicit, spec
from ejdist.mapped import map_shards
from ejdist.mesh import current_mesh, is_explicit
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
from ejdist.tokens import Ranks, axes_of_rank, mesh_around, order_of_call
from kernels.framework import select
from kernels.framework.binding import Call, is_array, typed
from kernels.framework.contract import Op
from kernels.framework.dims import named
from kernels.framework.dispatch import varying_axes
from kernels.framework.interpret import interpreting
from kernels.framework.ordered import SEQUENCE, whole_dims
from kernels.framework.public import Prepared, PublicFunction, module_class

_SHARDED_DOC = """
    On a mesh, also:
      mesh: default: the mesh in force (`jax.set_mesh`, `with mesh:`); with none, the arrays are used as they are.
      in_specs: PartitionSpecs of the first arrays, None for one that follows; the others follow from the dims that these
        show. Default: the layout in force (`set_layout`), or the arrays' own types on a mesh of explicit axes.
      out_specs: of the result. It follows from the inputs, so this only says it again: another one is a ValueError.
"""
_RANK_DOC = """      axis_name: inside a `shard_map` of your own, where arrays are a rank's part of each sequence: the mesh axis
        that it is split over, or a tuple of them, the major one first; ranks communicate over these. `()`: each rank has the
        whole sequence.
"""


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
    follows: bool = False,
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
      stored: whether the operation's weights lie as the layout stores parameters; they are then gathered here.
      order: that the tokens lie in; default: the layout's.
      follows: whether `local` has a form for every order, which it then takes as `order`.
      checked: whether the order was looked into before.
      name: of the public function, default: the operation's.
    """
    call, name = prepared.call, name or op.name
    op.check_asked(platform, cfg)
    given, mesh = mesh, mesh_of(mesh, in_specs, out_specs)
    if mesh is None:
        if not checked:
            order_of_call(name, op, prepared, {}, mesh_around(mesh, given), given=order, follows=False)
        for name, value in arrays_of(call).items():
            check_mesh_of(f"{op.name}: argument {name!r}", value, mesh)
        return prepared.result(op, op.run(call, platform=platform, cfg=cfg))
    axes = resolve_axes(op, call, mesh, in_specs, table, handles)
    check_local(op, call, axes, mesh, handles)
    axes = apart(op, call, axes, mesh, handles, said=in_specs is not None or is_explicit(mesh))
    follows, lie = follows and local is not None, None
    if not checked:
        lie = order_of_call(name, op, prepared, axes, mesh_around(mesh, given), given=order, follows=follows)
    data = {n: v for n, v in call.traced().items() if v is not None}
    specs = {n: spec_tree(op, n, v, axes, mesh) for n, v in data.items()}
    gathered = stored_specs(op, call, axes, mesh, specs) if stored else {}
    # A dim that is 1 in every argument was not split, so it is not in the outputs either.
    split = not_one(op, call)
    summed = summed_dims(op, call)
    lies = {d: a for d, a in axes.items() if d in split and d not in summed}
    lead = len(call.dims["lead"]) if "lead" in call.dims else 0
    outputs = [
        named(dims, len(dims) - 1 + lead if any(d.variadic for d in dims) else len(dims)) for dims in op.output_dims
    ]
    results = tuple(spec(dims, lies) for dims in outputs)
    if out_specs is not None:
        by_name = dict(zip(op.outputs, results, strict=True))
        returned = (prepared.returns,) if isinstance(prepared.returns, str) else prepared.returns
        if prepared.finish is None:
            wanted = tuple(by_name[n] for n in returned)
        else:
            dims: Any = prepared.dims
            several = dims if any(isinstance(d, tuple) for d in dims) else (dims,)
            wanted = tuple(spec(d, lies) for d in several)
        check_out_specs(out_specs, wanted, mesh)
    sums = tuple(a for d in sorted(summed & split.keys()) for a in axes.get(d, ()))
    offsets = {
        n: (axes[d], call.dims[d] // math.prod(mesh.shape[a] for a in axes[d]))
        for n, d in op.offset_of.items()
        if axes.get(d) and d in split
    }
    options = {**{n: v for n, v in call.static().items() if n not in offsets}, "platform": platform, "cfg": cfg}
    own: Callable = op if local is None else local
    if handles:
        own = functools.partial(own, {d: axes.get(d, ()) if d in split else () for d in handles})
    if follows:
        own = functools.partial(own, order=lie)
    key = (
        op,
        local,
        mesh,
        tuple(handles),
        tuple((d, axes.get(d, ())) for d in sorted(axes)),
        results,
        call.program_key(),
        lie if follows else None,
    )
    key += (tuple(gathered.items()), tuple(offsets.items()), platform, typed(cfg), interpreting(), select.state(call))
    out = results if len(results) > 1 else results[0]
    if any(is_array(v) and 0 in v.shape for v in data.values()):
        return prepared.result(op, _of_nothing(op, call, mesh, out, platform, cfg))
    program = _Program(key, op, own, mesh, specs, out, gathered, sums, offsets, options)
    return prepared.result(op, _compiled(program)(data))


def _of_nothing(op: Op, call: Call, mesh: Any, out_specs: Any, platform: str | None, cfg: Any) -> Any:
    """Returns the outputs of a call that has an empty array, with no `shard_map`: XLA ends the process without a word over one
    whose arrays are all empty, as those of a gradient are."""
    if not is_explicit(mesh):
        return op.run(call, platform=platform, cfg=cfg)
    whole = jax.sharding.reshard(call.traced(), NamedSharding(mesh, PartitionSpec()))
    outputs = op(**whole, **call.static(), platform=platform, cfg=cfg)
    where = jax.tree.map(lambda s: NamedSharding(mesh, explicit(s, mesh)), out_specs)
    return jax.sharding.reshard(outputs, where)


@dataclass(frozen=True)
class _OnRank:
    """What runs on a rank's part of a sequence, inside a `shard_map` of the caller's that has these axes; hashable.

    local: None for a sum over the tokens. more: what it takes beside the arguments of the operation.
    """

    op: Op
    local: Callable | None
    axes: tuple[str, ...]
    handles: tuple[str, ...]
    more: tuple[tuple[str, Any], ...]

    def __call__(self, _: Any, **arguments: Any) -> Any:
        if self.local is None:
            return jax.lax.psum(self.op(**arguments), self.axes)
        axes = {d: self.axes if d in SEQUENCE else () for d in self.handles}
        return self.local(axes, **dict(self.more), **arguments)


def run_on_rank(
    prepared: Prepared,
    op: Op,
    axes: tuple[str, ...],
    *,
    local: Callable | None,
    handles: Collection[str],
    order: str | Order | None,
    follows: bool,
    name: str,
    platform: str | None,
    cfg: Any,
) -> Any:
    """Returns the result of a prepared call on a rank's part of a sequence, inside a `shard_map` that has these axes. Over axes
    that it leaves to the compiler the call is mapped here, by the layout."""
    op.check_asked(platform, cfg)
    lie = order_of_call(name, op, prepared, {"T": axes}, Ranks(), given=order, follows=follows)
    if local is None:
        prepared = replace(prepared, sums=jax.lax.psum(prepared.sums, axes))
    own = _OnRank(op, local, axes, tuple(handles), (("order", lie),) if follows else ())
    how = {"platform": platform, "cfg": cfg}
    if current_mesh() is not None:
        whole: Axes = dict.fromkeys(SEQUENCE, ())
        return run(prepared, op, local=own, handles=SEQUENCE, table=whole, checked=True, name=name, **how)
    call = prepared.call
    arguments = {n: v for n, v in call.traced().items() if v is not None} | call.static()
    return prepared.result(op, own({}, **arguments, **how))


class ShardedFunction:
    """A public function on sharded arrays: `mesh`, `in_specs` and `out_specs` beside its own arguments, and `axis_name` where a
    result depends on a whole sequence.

    Attributes:
      ops: the operations that it may call.
    """

    def __init__(
        self,
        function: PublicFunction,
        local: Callable | None = None,
        handles: Collection[str] = (),
        *,
        follows: bool = False,
        on_rank: Callable | bool = True,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__name__: str = function.__name__
        self.function, self.local, self.handles, self.follows = function, local, tuple(handles), follows
        self.on_rank, self.rank_handles = (None, ()) if isinstance(on_rank, bool) else (on_rank, SEQUENCE)
        if on_rank is True and {*SEQUENCE} & {*handles}:
            self.on_rank, self.rank_handles = local, self.handles
        self.ops: tuple[Op, ...] = function.ops
        # What sums over tokens of any dims gives the sum of those that it is given, as of the rows of a batch.
        self.of_sequences = any(whole_dims(op) or "T" in op.sum_dims for op in function.ops)
        self.__module__ = "ejdist"
        self.__signature__ = with_mesh(inspect.signature(function), ("axis_name",) if self.of_sequences else ())
        doc = (function.__doc__ or "").split(">>>")[0].rstrip() + "\n" + _SHARDED_DOC
        self.__doc__ = doc + (_RANK_DOC if self.of_sequences else "")
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
        if self.of_sequences:
            where["axis_name"] = kwargs.pop("axis_name", None)
        return self.run(self.function.prepare(*args, **kwargs), **where)

    def run(self, prepared: Prepared, *, axis_name: Any = None, **where: Any) -> Any:
        """Returns the result of a prepared call."""
        op = prepared.op or self.function.op
        how: dict[str, Any] = {"follows": self.follows, "name": self.__name__}
        if self.of_sequences:
            sums = "T" in op.sum_dims
            communicates = sums or self.on_rank is not None
            given = [n for n in ("mesh", "in_specs", "out_specs") if where.get(n) is not None]
            axes = axes_of_rank(self.__name__, op, prepared, axis_name, communicates, given)
            if axes is not None:
                how |= {n: where.get(n) for n in ("order", "platform", "cfg")}
                local = None if sums else self.on_rank
                return run_on_rank(prepared, op, axes, local=local, handles=self.rank_handles, **how)
        return self._on_mesh(prepared, op, **how, **where)

    def _on_mesh(self, prepared: Prepared, op: Op, **how: Any) -> Any:
        """Returns the result of a prepared call on global arrays."""
        return run(prepared, op, local=self.local, handles=self.handles, **how)

    def with_stored_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As calling it, with the operation's weights as a model stores them: what `ejdist.models` calls."""
        where = {n: kwargs.pop(n) for n in ("mesh", "order", "platform", "cfg", "axis_name") if n in kwargs}
        return self.run(self.function.prepare(*args, **kwargs), stored=True, **where)

    def __repr__(self) -> str:
        return f"<sharded function {self.__name__}>"


def with_mesh(signature: inspect.Signature, also: Sequence[str] = ()) -> inspect.Signature:
    """Returns the signature with the three arguments of a sharded function, and those."""
    names = ("mesh", "in_specs", "out_specs", *also)
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
    return signature.replace(parameters=[*signature.parameters.values(), *extra])


def sharded(
    function: PublicFunction,
    *,
    local: Callable | None = None,
    handles: Sequence[str] = (),
    follows: bool = False,
    on_rank: Callable | bool = True,
) -> ShardedFunction:
    """Returns the function on sharded arrays. Without a mesh, given or in force, it is the function itself.

    Args:
      local: for what communicates: what runs on a shard, `local({dim: axes}, **arguments)`, hashable.
      handles: the dims that it communicates over.
      follows: whether it has a form for tokens in any order, see `Order`; it then takes `order`, that in which they lie.
      on_rank: what runs on a rank inside a `shard_map` of the caller's, over the axes that it names: True for `local`; False
        where the function's arguments can be read only beside a whole sequence.
    """
    return ShardedFunction(function, local, handles, follows=follows, on_rank=on_rank)
