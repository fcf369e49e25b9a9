"""Where logical dims live on the mesh: the specs of arrays follow from the tables here.

Two tables: how activations are split, and how parameters are stored. Fully sharded data parallelism is the difference
between them: a parameter's D is stored over fsdp, and over cp and sp, whose ranks all need it; it is gathered where it is used.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejdist.mesh import BATCH_AXES, EP, FSDP, SEQUENCE_AXES, TP, mesh_here
from ejdist.order import Order, order_of
from kernels.framework.dims import VOCABULARY

Axes = Mapping[str, tuple[str, ...]]
Specs = PartitionSpec | tuple  # of several arrays

# Dims: see kernels/framework/dims.py. What is not in a table is not split.
ACTIVATIONS: Axes = {
    "B": BATCH_AXES, "T": SEQUENCE_AXES, "S": SEQUENCE_AXES, "N": (TP,), "K": (TP,), "F": (TP,), "V": (TP,), "E": (EP,),
}  # fmt: skip
PARAMETERS: Axes = {
    "D": (FSDP, *SEQUENCE_AXES), "R": (FSDP, *SEQUENCE_AXES), "N": (TP,), "K": (TP,), "F": (TP,), "V": (TP,), "E": (EP,),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The mesh axes of each dim, for activations and for stored parameters.

    order: how tokens are ordered along T, see `Order`; by name it is over as many ranks as T's axes have. None: unspecified.
    """

    activations: Axes
    parameters: Axes
    order: str | Order | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((*self.activations.items(), *self.parameters.items(), self.order))

    def check(self, mesh: Any, also: Sequence[str] = ()) -> None:
        """Raises ValueError for a mesh with an axis of several devices that this layout does not mention: every device along it
        would silently compute everything.

        Args:
          also: axes that the caller names elsewhere.
        """
        known = {a for table in (self.activations, self.parameters) for axes in table.values() for a in axes} | {*also}
        strange = [a for a, size in mesh.shape.items() if size > 1 and a not in known]
        if strange:
            lacks = sorted(known - {*mesh.shape})
            absent = (
                ""
                if self is DEFAULT or not lacks
                else f" (the layout names the axis {lacks[0]!r}, which this mesh does not have)"
            )
            remedy = (
                "Declare a layout, such as ejdist.set_layout(B=('data',), N='model', K='model', F='model', V='model')"
            )
            if {*mesh.shape} <= {a for axes in DEFAULT.activations.values() for a in axes}:
                remedy = "Call ejdist.set_layout() to go back to that of ejdist.make_mesh, which made this mesh, or declare one"
            raise ValueError(
                f"the mesh {dict(mesh.shape)} has the axes {', '.join(map(repr, strange))}, and nothing says which dims are "
                f"sharded over them{absent}, so every device would do all the work. {remedy}, or give in_specs; to replicate "
                "over an axis: set_layout(..., replicated=('name',))"
            )


DEFAULT = Layout(ACTIVATIONS, PARAMETERS)
_layout: contextvars.ContextVar[Layout] = contextvars.ContextVar("layout", default=DEFAULT)


def current_layout() -> Layout:
    """Returns the layout in force: the one of `set_layout`, otherwise the project's default."""
    return _layout.get()


class set_layout:
    """Sets the mesh axes of each dim on your own mesh, for all sharded functions called afterwards.

    As a statement it holds from there on; as a context manager, inside the block. Dims that are not named are not split.
    `set_layout()` with no argument goes back to the project's own axes, and `order` alone leaves the axes as they are. Like
    `jax.set_mesh` it applies to one thread. It says where arrays are and never what is computed, so a jitted function that
    was traced before keeps the layout of that time.

    Args:
      dims: dim -> axis or axes, of activations: B batch, T (and S) sequence, N query heads, K key heads, F feed-forward, V
        vocabulary, E experts; kernels/framework/dims.py has them all.
      parameters: the same for parameters as a model stores them; default: the activations' axes of N, K, F, V and E.
      replicated: axes over which everything is the same, on purpose.
      order: of a batch's tokens along T: "contiguous", or "zigzag", "striped" or an `Order` that the batch was
        permuted to. Operations that can follow it do (`ring_attention`, recurrences), those for which it does not matter run
        unchanged, and the others refuse. By name it is over as many ranks as T's axes have on the mesh.

    Raises:
      ValueError: a dim or an order that does not exist.

    >>> with set_layout(B="data", N="model", K="model", F="model", V="model"):
    ...     current_layout().activations["B"]
    ('data',)
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, str | tuple[str, ...]] | None = None,
        replicated: str | Sequence[str] = (),
        order: str | Order | None = None,
        **dims: str | tuple[str, ...],
    ) -> None:

        def axes(table: Mapping[str, str | tuple[str, ...]], what: str) -> Axes:
            if not isinstance(table, Mapping):
                raise ValueError(
                    f"set_layout: argument 'parameters' must map dims to axes, {{'D': 'data'}}, got {table!r}"
                )
            unknown = sorted(set(table) - set(VOCABULARY))
            if unknown:
                raise ValueError(
                    f"set_layout: {what} {', '.join(unknown)} do not exist; there are {', '.join(VOCABULARY)}"
                )
            split = {d: (a,) if isinstance(a, str) else a for d, a in table.items()}
            odd = [d for d, a in split.items() if not isinstance(a, (tuple, list)) or {type(x) for x in a} - {str}]
            if odd:
                raise ValueError(f"set_layout: {odd[0]} = {table[odd[0]]!r} must be an axis name, or a tuple of them")
            return {d: tuple(a) for d, a in split.items()}

        if order is not None and not isinstance(order, Order):
            order_of(order, 1, "", "set_layout: argument 'order'")
        self._before = current_layout()
        if not dims and parameters is None and not replicated:
            _layout.set(DEFAULT if order is None else replace(self._before, order=order))
            return
        activations = axes(dims, "dims")
        stored = {d: a for d, a in activations.items() if d in "NKFVE"}
        if parameters is not None:
            stored = dict(axes(parameters, "dims of parameters"))
        if "T" in activations and "S" not in activations:
            activations = {**activations, "S": activations["T"]}
        # An axis to replicate over is known, and is on no dim.
        whole = (replicated,) if isinstance(replicated, str) else tuple(replicated)
        _layout.set(Layout({**activations, "replicated": whole} if whole else activations, stored, order))

    def __enter__(self) -> Layout:
        return current_layout()

    def __exit__(self, *error: Any) -> None:
        _layout.set(self._before)


def on_mesh(table: Axes, mesh: Any, **changes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns the table with only the axes that the mesh has with more than one device."""
    sizes = dict(mesh.shape)
    return {dim: tuple(a for a in axes if sizes.get(a, 1) > 1) for dim, axes in {**table, **changes}.items()}


def spec(
    dims: Sequence[str], axes: Axes, *, shape: Sequence[int] | None = None, mesh: Any = None, what: str = "array"
) -> PartitionSpec:
    """Returns the PartitionSpec of an array with those dims. A dim of size 1 is broadcast and stays whole. An axis splits the
    first dim that asks for it: experts over fsdp are stored whole in D.

    Raises:
      ValueError: a dim does not divide by the devices it is split over; names the array, the dim and the remedy.
    """
    entries: list[Any] = []
    taken: set[str] = set()
    for i, dim in enumerate(dims):
        size = None if shape is None else shape[i]
        split = () if dim == "_" or size == 1 else tuple(a for a in axes.get(dim, ()) if a not in taken)
        taken |= {*split}
        if split and size is not None and mesh is not None:
            parts = math.prod(mesh.shape[a] for a in split)
            if size % parts:
                over = " x ".join(f"{a}={mesh.shape[a]}" for a in split)
                raise ValueError(
                    f"{what}: dim {dim} = {size} cannot be divided over {over}; "
                    f"make it a multiple of {parts}, or make the axis smaller"
                )
        entries.append(None if not split else split[0] if len(split) == 1 else tuple(split))
    return PartitionSpec(*entries)


def axes_of_specs(
    dims_of: Sequence[Sequence[str]], specs: Sequence[PartitionSpec], shapes: Sequence[Sequence[int]]
) -> dict[str, tuple[str, ...]]:
    """Returns dim -> mesh axes, read from the specs of arrays whose dims and shapes are known.

    A dim of size 1 is broadcast: its entry is ignored.

    Raises:
      ValueError: two specs split the same dim differently, or one splits a dim that has no name.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for dims, entry_list, shape in zip(dims_of, specs, shapes, strict=True):
        entries = (*entry_list, *(None,) * (len(dims) - len(entry_list)))
        if len(entries) > len(dims):
            raise ValueError(f"in_specs: {entry_list} has {len(entries)} entries for an array of dims {' '.join(dims)}")
        for dim, entry, size in zip(dims, entries, shape, strict=True):
            split = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            if size == 1:
                continue
            if dim == "_" and split:
                raise ValueError(f"in_specs: {entry_list} shards a dim that the operation needs whole, over {split}")
            if axes.setdefault(dim, split) != split:
                raise ValueError(
                    f"in_specs: dim {dim} is split over {axes[dim]} in one array and over {split} in another"
                )
    return axes


def axes_in(spec: Iterable[Any]) -> list[str]:
    """Returns the mesh axes that a PartitionSpec names."""
    return [a for entry in spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)]


def explicit(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """Returns the spec with the explicit axes of the mesh alone: what the type of an array may say."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = [tuple(a for a in axes_in((entry,)) if kinds[a] == AxisType.Explicit) for entry in spec]
    return PartitionSpec(*(e or None for e in entries))


def check_mesh_of(what: str, x: Any, mesh: Any) -> None:
    """Raises ValueError for an array whose type has explicit axes that the mesh lacks; None: there is no mesh."""
    strange = sorted(set(axes_in(jax.typeof(x).sharding.spec)) - set(mesh.axis_names if mesh is not None else ()))
    if strange and mesh is None and jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"{what} is sharded over the explicit axes {', '.join(strange)}, which the shard_map around this call does not "
            "map; map over them too"
        )
    if strange and mesh is None:
        raise ValueError(
            f"{what} is sharded over the explicit axes {', '.join(strange)} of a mesh not in force: give 'mesh', or call under "
            "`with jax.set_mesh(mesh):`"
        )
    if strange:
        raise ValueError(
            f"{what} is sharded over the explicit axes {', '.join(strange)} of a mesh other than {dict(mesh.shape)}; leave "
            "'mesh' out, or move the array with jax.device_put"
        )


def check_specs(argument: str, specs: Any, mesh: Any, most: int, of_what: str) -> tuple[PartitionSpec | None, ...]:
    """Returns the specs as a tuple.

    Raises:
      ValueError: they are not PartitionSpecs, are too many, or name an axis that the mesh lacks, or one twice.
    """
    all_specs = (specs,) if isinstance(specs, PartitionSpec) else specs
    if not isinstance(all_specs, (tuple, list)):
        hint = "; give its .spec" if isinstance(all_specs, NamedSharding) else ""
        raise ValueError(
            f"argument {argument!r} must be a PartitionSpec or a tuple of them, got {type(all_specs).__name__}{hint}"
        )
    if len(all_specs) > most:
        raise ValueError(f"argument {argument!r}: {len(all_specs)} {argument} for {most} {of_what}")
    for s in all_specs:
        if s is not None and not isinstance(s, PartitionSpec):
            hint = "; give its .spec" if isinstance(s, NamedSharding) else ""
            raise ValueError(f"argument {argument!r} must hold PartitionSpecs, got {type(s).__name__}{hint}")
        odd = [e for e in s or () if not (e is None or isinstance(e, (str, tuple)))]
        if odd:
            raise ValueError(
                f"argument {argument!r}: {s} has the entry {odd[0]}; use axis names, tuples of them, or None"
            )
        named = axes_in(() if s is None else s)
        unknown = [a for a in named if a not in mesh.axis_names]
        if unknown:
            raise ValueError(f"{argument} name the axes {unknown}, which the mesh {dict(mesh.shape)} does not have")
        twice = sorted({a for a in named if named.count(a) > 1})
        if twice:
            raise ValueError(
                f"{argument}: {s} names the axis {', '.join(map(repr, twice))} twice; an axis splits one dim"
            )
    return tuple(all_specs)


def check_out_specs(specs: Any, wanted: Sequence[PartitionSpec], mesh: Any) -> None:
    """Raises ValueError where the specs differ from those that follow from the inputs. A single spec applies to the first
    of several results."""

    def plain(s: PartitionSpec | None) -> tuple:
        entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in s or ()]
        entries = [tuple(a for a in e if mesh.shape[a] > 1) for e in entries]
        while entries and not entries[-1]:
            entries.pop()
        return tuple(entries)

    requested = check_specs("out_specs", specs, mesh, len(wanted), "results")
    for s, w in zip(requested, wanted, strict=False):
        if s is not None and plain(s) != plain(w):
            raise ValueError(
                f"argument 'out_specs' says {s}, but from the inputs follows {w}: leave it out, and move the result "
                "afterwards with jax.lax.with_sharding_constraint where it should lie elsewhere"
            )


def check_dims(what: str, dims: str) -> None:
    """Raises ValueError for a dim that is neither in the vocabulary nor "_": no layout could split it, so every device would
    silently hold all of it. `what`: the array, for the message."""
    for dim in dims.split():
        if dim != "_" and dim not in VOCABULARY:
            raise ValueError(
                f"{what} has the dims {dims!r}, but {dim!r} is not in the vocabulary: use _ for a dim that is never split, or "
                f"one of {', '.join(VOCABULARY)} (kernels/framework/dims.py says what each means)"
            )


def sharding(
    mesh: jax.sharding.Mesh,
    dims: Sequence[str],
    table: Axes,
    *,
    shape: Sequence[int] | None = None,
    what: str = "array",
) -> NamedSharding:
    """Returns the sharding of an array with these dims on the mesh; "_" is a dim that is never split.

    Raises:
      ValueError: a dim is not in the vocabulary, or its size does not divide by its axes.
    """
    check_dims(what, " ".join(dims))
    return NamedSharding(mesh, spec(dims, on_mesh(table, mesh), shape=shape, mesh=mesh, what=what))


def stacked_over(axis: str | None, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of arrays that are stacked in a new first dim, one for each device of an axis that they are not
    split over; None: each device has its part of all of them."""
    return NamedSharding(sharding.mesh, PartitionSpec(axis, *sharding.spec))


def row_of(sharding: Any) -> NamedSharding | None:
    """Returns the sharding of one row of arrays that are stacked in the first dim; None if theirs is on no mesh."""
    if not isinstance(sharding, NamedSharding):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def replicated(mesh: Any) -> NamedSharding:
    """Returns the sharding of what every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, dims: str, mesh: jax.sharding.Mesh | None, table: Axes | None = None) -> jax.Array:
    """Returns x with the sharding constraint of its dims ("B T D"); x itself without a mesh."""
    mesh = mesh_here(mesh)
    if mesh is None or mesh.size == 1:
        return x
    table = current_layout().activations if table is None else table
    where = sharding(mesh, dims.split(), table, shape=x.shape, what="activation")
    around = jax.sharding.get_abstract_mesh()  # inside a `shard_map` only that has devices
    return jax.lax.with_sharding_constraint(x, NamedSharding(around, where.spec) if around.manual_axes else where)


def gather(x: jax.Array, dims: str, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Returns a parameter, which is stored where the layout stores its dims, where its activations have them; its gradient
    comes back as the parameter is stored, so that no device holds the whole of it longer than it takes to add it up."""
    if mesh is None or mesh.size == 1:
        return x
    layout = current_layout()

    @jax.custom_vjp
    def placed(x: jax.Array) -> jax.Array:
        return constrain(x, dims, mesh, layout.activations)

    placed.defvjp(
        lambda x: (placed(x), None), lambda _, gradient: (constrain(gradient, dims, mesh, layout.parameters),)
    )
    return placed(x)
