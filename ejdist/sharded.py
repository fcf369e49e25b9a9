"""Operations on sharded arrays.

`sharded(function)` is a public function of `kernels` with `mesh`, `in_specs` and `out_specs`. Every spec follows from the
dims that the operation declares (`placement.py`). What an operation cannot do without communication it does not do here:
splitting such a dim raises, and names the operation that communicates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.execution import run
from ejdist.layout import Axes
from ejdist.mesh import current_mesh
from ejdist.order import Order
from ejdist.tokens import Follows, Ranks, axes_of_rank, order_of_call
from kernels.framework.contract import Op
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
    follows: Follows,
    name: str,
    platform: str | None,
    cfg: Any,
) -> Any:
    """Returns the result of a prepared call on a rank's part of a sequence, inside a `shard_map` that has these axes. Over axes
    that it leaves to the compiler the call is mapped here, by the layout."""
    lie = order_of_call(name, op, prepared, {"T": axes}, Ranks(), given=order, follows=follows)
    if local is None:
        prepared = replace(prepared, sums=jax.lax.psum(prepared.sums, axes))
    on_rank = _OnRank(op, local, axes, tuple(handles), (("order", lie),) if follows else ())
    how = {"platform": platform, "cfg": cfg}
    if current_mesh() is not None:
        whole: Axes = dict.fromkeys(SEQUENCE, ())
        return run(prepared, op, local=on_rank, handles=SEQUENCE, table=whole, checked=True, name=name, **how)
    call = prepared.call
    arguments = {n: v for n, v in call.traced().items() if v is not None} | call.static()
    return prepared.result(op, on_rank({}, **arguments, **how))


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
        follows: Follows = False,
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
            arguments = [n for n in ("mesh", "in_specs", "out_specs") if where.get(n) is not None]
            axes = axes_of_rank(self.__name__, op, prepared, axis_name, communicates, arguments)
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
    follows: Follows = False,
    on_rank: Callable | bool = True,
) -> ShardedFunction:
    """Returns the function on sharded arrays. Without a mesh, given or in force, it is the function itself.

    Args:
      local: for what communicates: what runs on a shard, `local({dim: axes}, **arguments)`, hashable.
      handles: the dims that it communicates over.
      follows: whether it has a form for tokens in any order, see `Order`, or "fixed": in any that is the same for all rows; it
        then takes `order`, that in which they lie.
      on_rank: what runs on a rank inside a `shard_map` of the caller's, over the axes that it names: True for `local`; False
        where the function's arguments can be read only beside a whole sequence.
    """
    return ShardedFunction(function, local, handles, follows=follows, on_rank=on_rank)
