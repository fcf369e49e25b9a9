"""Where the tokens of a call are in the sequence: in which order, and over which axes of a `shard_map` around it.

Both are facts of the layout in force that an operation may depend on without being able to see them in its arrays.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax

from ejdist.layout import Axes, current_layout
from ejdist.mesh import SP, axis_is_bound, current_mesh, mesh_here
from ejdist.order import CARRIED, NAMES, Order, order_of
from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.ordered import SEQUENCE, depends_on_order, whole_dims
from kernels.framework.platforms import Unsupported
from kernels.framework.public import Prepared

FIXED = tuple(name for name in NAMES if name not in CARRIED)  # the same for all rows
# Whether an operation has a form for other orders than contiguous: none, those that are the same for all rows, or all.
Follows = bool | Literal["fixed"]
_LAYOUT = "set_layout: argument 'order'"


def resolve_order(name: str, ranks: int, where: str, given: str | Order | None) -> Order:
    """Returns the order of the tokens over that many ranks: of the argument 'order' of a function, else the layout's.

    Raises:
      ValueError: the two differ, or one is for another number of ranks; `where` names what the ranks are of.
    """
    of_layout = current_layout().order
    asked = None if given is None else order_of(given, ranks, where, f"{name}: argument 'order'")
    if of_layout is None:
        return Order("contiguous", ranks) if asked is None else asked
    order = order_of(of_layout, ranks, where, _LAYOUT)
    if asked is not None and asked != order and ranks > 1:
        raise ValueError(
            f"{name}: argument 'order' = {given!r}, but the layout in force has order {of_layout!r}: leave the argument out, "
            "or call under a set_layout with that order"
        )
    return order


def order_of_call(
    name: str, op: Op, prepared: Prepared, axes: Axes, mesh: Any, *, given: str | Order | None, follows: Follows
) -> Order | None:
    """Returns the order of the tokens of a call, for an operation that `follows` it; None where it need not know.

    Args:
      axes: dim -> axes of the mesh that split it in this call. A sequence that is whole here may be permuted all the same.
      mesh: None without one; else anything with the sizes of the axes, as `mesh.shape`.
      given: the order that the caller asks for; default: the layout's.
      follows: which orders it has a form for.

    Raises:
      Unsupported: the operation depends on the order, and has no form for this one; names it, and the remedy.
      ValueError: the caller and the layout say different orders, or one for another number of ranks.
    """
    layout = current_layout()
    order = layout.order if given is None else given
    if order is None:
        return None
    split = axes.get("T") or axes.get("S") or ()
    sizes = {} if mesh is None else dict(mesh.shape)
    ranks = math.prod(sizes.get(a, 1) for a in split or layout.activations.get("T", ()))
    kind, shards = (order.name, order.shards) if isinstance(order, Order) else (order, ranks)
    if given is not None and layout.order is not None:
        resolve_order(name, shards, "those of the tokens", given)
    # The name of an order is not enough without a mesh, which has the number of ranks.
    unknown = mesh is None and not isinstance(order, Order)
    if kind == "contiguous" or (shards == 1 and not unknown):
        return Order("contiguous", math.prod(sizes.get(a, 1) for a in split))
    carried = kind in CARRIED and shards > 1
    if follows and split and not prepared.cuts and not (carried and follows == "fixed"):
        return resolve_order(name, ranks, f"dim T is split over {', '.join(split)}", order)
    if prepared.cuts or depends_on_order(op, prepared.call):
        fixed = follows == "fixed" and split and not prepared.cuts
        raise _no_form(name, prepared.cuts, kind, None if unknown else shards, FIXED if fixed else FIXED[:1])
    return None


def _no_form(name: str, cuts: str, order: str, ranks: int | None, instead: tuple[str, ...]) -> Unsupported:
    """Returns the refusal of a call on tokens in that order; ranks: None where their number is not known. instead: orders that
    it has a form for, of which the first is contiguous."""
    if ranks is None:
        where = f"in order {order!r} over ranks that are not known, since there is no mesh"
        remedy = "give 'mesh', or call under `with jax.set_mesh(mesh):`"
    else:
        where = f"in order {order!r} over {ranks} ranks"
        index = "(..., index=...)" if order in CARRIED else ""
        remedy = f"or undo it first with Order({order!r}, {ranks}).inverse{index} and call under order='contiguous'"
    why = (
        f"argument {cuts!r} cuts a sequence in its own order"
        if cuts
        else "its result depends on the order of the tokens"
    )
    return Unsupported(
        f"{name}: {why}, and they are {where} (set_layout, or sequence.order of a recipe), which it does not support: use "
        f"order={' or '.join(map(repr, instead))} (sequence.order={instead[0]}), {remedy}"
    )


def check_carried(name: str, order: Order, mask: MaskInfo | None) -> None:
    """Raises ValueError or Unsupported for an order that each row brings, of which the call knows nothing or not enough."""
    if not order.carried:
        return
    if mask is None or mask.q_positions is None:
        raise ValueError(
            f"{name}: order {order.name!r} is another one for each row: give 'q_positions' and 'kv_positions', int32 "
            "[B, T], which token of the text lies at each place (`Order.text_indices`; a recipe's batch has it as 'order'), or "
            "use order='striped'"
        )
    if mask.q_segment_ids is not None and mask.replace(q_positions=None, kv_positions=None).counts_in_segments:
        raise Unsupported(
            f"{name}: chunks and sink tokens count from the start of each document, which order {order.name!r} does not "
            "support: use order='striped' (sequence.order=striped)"
        )


class Ranks:
    """The mesh around a call inside a `shard_map`, as far as `order_of_call` asks: its axes and their sizes."""

    def __init__(self) -> None:
        self.shape = dict(jax.sharding.get_abstract_mesh().shape)


def needed_whole(op: Op, call: Call) -> tuple[str, ...]:
    """Returns the dims of a call along which the result for a part of a sequence is not that part of the result."""
    summed = tuple(d for d in SEQUENCE if d in op.sum_dims)
    return tuple(d for d in (*whole_dims(op), *summed) if call.dims.get(d, 1) != 1)


def axes_of_rank(
    name: str, op: Op, prepared: Prepared, axis_name: Any, communicates: bool, given: list[str]
) -> tuple[str, ...] | None:
    """Returns the axes of the caller's `shard_map` that the sequence of a call is split over; None where it is split over none.

    Args:
      axis_name: the caller's argument. `()` for a sequence that is whole.
      communicates: whether the operation has a form over ranks.
      given: the arguments for global arrays that the call has too.

    Raises:
      ValueError: the layout has the sequence on an axis that this is mapped over, and the call does not say what to do; or its
        `axis_name` is impossible.
    """
    if axis_name is None and not jax.sharding.get_abstract_mesh().manual_axes:
        return None
    dims = needed_whole(op, prepared.call)
    if axis_name is None:
        axes = bound_axes(dims)
        if axes:
            raise ValueError(_unsaid(name, op, dims, axes, communicates))
        return None
    names = mapped_axes(name, axis_name)
    if names and given:
        raise ValueError(
            f"{name}: arguments {', '.join(map(repr, given))} are for global arrays; this call is mapped over {axis_name!r} "
            "already and has a rank's own: leave them out"
        )
    if not names or math.prod(jax.lax.axis_size(a) for a in names) == 1:
        return None
    if not communicates:
        raise ValueError(
            f"{name}: argument 'axis_name' = {axis_name!r}: this operation does not support a sequence split over "
            f"ranks{_instead(op, dims, names)}"
        )
    if prepared.cuts:
        raise ValueError(
            f"{name}: argument {prepared.cuts!r} cuts a whole sequence, and the tokens are those of one rank of {axis_name!r}: "
            "give an id for each token in its place"
        )
    return names


def mapped_axes(name: str, axis_name: Any) -> tuple[str, ...]:
    """Returns the axes of the caller's `shard_map` that an argument 'axis_name' names. Raises ValueError for anything else."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or len(set(names)) < len(names) or {*map(type, names)} - {str}:
        raise ValueError(
            f"{name}: argument 'axis_name' = {axis_name!r} must be the name of a mesh axis, a tuple of different names, the "
            "major axis first, or () for a sequence that is whole"
        )
    unmapped = [a for a in names if not axis_is_bound(a)]
    if unmapped:
        raise ValueError(
            f"{name}: argument 'axis_name' = {axis_name!r} is for a call inside a shard_map over that axis, and this one is "
            f"not inside one over {unmapped[0]!r}: leave it out; set_layout or 'in_specs' say where global arrays lie"
        )
    return names


def axes_of_layout(mesh: Any) -> tuple[str, ...]:
    """Returns the axes that the layout in force has a sequence on, those of several devices where there are any."""
    names = current_layout().activations.get("T") or (SP,)
    mesh = current_mesh() if mesh is None else mesh_here(mesh)
    sizes = {**({} if mesh is None else mesh.shape), **jax.sharding.get_abstract_mesh().shape}
    return tuple(n for n in names if sizes.get(n, 1) > 1) or names[-1:]


def bound_axes(dims: tuple[str, ...] = SEQUENCE) -> tuple[str, ...]:
    """Returns the axes of several devices that the layout has those dims on and a `shard_map` around this is over."""
    around = jax.sharding.get_abstract_mesh()
    table = current_layout().activations
    axes = dict.fromkeys(a for d in dims for a in table.get(d, ()))
    return tuple(a for a in axes if a in around.manual_axes and around.shape[a] > 1)


def mesh_around(mesh: Any, given: Any) -> Any:
    """Returns what `order_of_call` asks for the sizes of axes: a mesh, of one device too, or what is around a `shard_map`.

    Args:
      mesh: on which the call runs, if any. given: the caller's argument.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is not None and not around.manual_axes:
        return mesh
    return Ranks() if given is not None or not around.empty or current_mesh() is not None else None


def _instead(op: Op, dims: tuple[str, ...], axes: tuple[str, ...]) -> str:
    """Returns what to use where an operation cannot communicate over the axes."""
    other = next((op.see_also[d] for d in dims if d in op.see_also), "")
    name = repr(axes[0] if len(axes) == 1 else axes)
    use = f"; use ejdist.{other}(..., axis_name={name}), which communicates, or" if other else ";"
    return f"{use} gather the sequence, and give axis_name=()"


def _unsaid(name: str, op: Op, dims: tuple[str, ...], axes: tuple[str, ...], communicates: bool) -> str:
    over = ", ".join(map(repr, axes))
    problem = (
        f"{name}: dim {dims[0]} is split over the axis {over} of the layout in force, and this call is inside a shard_map "
        "over it, so the arrays have a part of each sequence, and this operation needs all of it"
    )
    if not communicates:
        return problem + _instead(op, dims, axes)
    named = repr(axes[0] if len(axes) == 1 else axes)
    return f"{problem}: give axis_name={named}, over which it then communicates, or () where the sequence is whole on each rank"
