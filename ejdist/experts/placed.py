"""Applies sharded experts: on one device, on a rank of the caller's `shard_map`, or over a mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.experts.dispatch import check_buffer, exchange
from ejdist.experts.how import DispatchConfig, chosen
from ejdist.experts.local import local
from ejdist.experts.metrics import Traffic
from ejdist.experts.narrow import check_precision
from ejdist.experts.schemes import LOCAL, SCHEMES
from ejdist.layout import (
    Axes,
    axes_in,
    axes_of_specs,
    check_mesh_of,
    check_specs,
    current_layout,
    explicit,
    on_mesh,
    spec,
)
from ejdist.mapped import map_shards
from ejdist.mesh import axis_is_bound, current_mesh, is_explicit
from ejdist.packed import Packed
from ejdist.placement import mesh_of
from kernels.framework import select
from kernels.framework.binding import is_array
from kernels.framework.interpret import interpreting

# W is the D of a weight, which may be sharded over other axes than the D of the tokens; it is gathered when used.
_DIMS = {"gate": "E W F", "up": "E W F", "down": "E F W", "gate_bias": "E F", "up_bias": "E F", "down_bias": "E W"}


@dataclass(frozen=True)
class ExpertSharding:
    """How the arrays of a layer are sharded.

    mesh: None on one device, or inside the caller's `shard_map`, where arrays are local. axes: dim -> mesh axes, for B, T, F,
    E, and W, the stored D of weights. axis: the axes that experts are sharded over. alike: these do not shard the tokens, so
    that all ranks have the same tokens, as when decoding a batch of one.
    """

    mesh: Any
    axes: Axes
    axis: tuple[str, ...]
    alike: bool = False

    @property
    def hosts(self) -> int:
        """The number of hosts that the experts are sharded over, each with as many ranks, one after the other; 1 where these
        are not known, or do not lie so."""
        if not self.axis or not isinstance(self.mesh, jax.sharding.Mesh):
            return 1
        along = tuple(self.mesh.axis_names.index(a) for a in self.axis)
        devices = np.moveaxis(self.mesh.devices, along, range(len(along))).reshape(self.ranks, -1)[:, 0]
        return hosts_of([d.process_index for d in devices])

    @property
    def ranks(self) -> int:
        """The number of devices that the experts are sharded over."""
        return math.prod(jax.lax.axis_size(a) if self.mesh is None else self.mesh.shape[a] for a in self.axis)

    def automatic(self, route: Callable) -> Callable:
        """Returns the router for this mesh. It sums over all tokens, so the compiler partitions it, on explicit axes too."""
        if self.mesh is None or not is_explicit(self.mesh):
            return route
        specs = (explicit(spec(dims, self.axes), self.mesh) for dims in (("B", "T", "_"), ()))
        rows, whole = (jax.sharding.NamedSharding(self.mesh, s) for s in specs)

        def routed(x: Any, router: Any, **options: Any) -> Any:
            arrays = {n: v for n, v in options.items() if is_array(v)}
            static = {n: v for n, v in options.items() if n not in arrays}

            def on_mesh(x: Any, router: Any, arrays: dict[str, Any]) -> Any:
                return route(x, router, **arrays, **static)

            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, router, arrays))
            outputs = jax.eval_shape(on_mesh, *shapes)
            out_shardings = type(outputs)(rows, rows, jax.tree.map(lambda _: whole, outputs.stats))
            mapped: Any = jax.sharding.auto_axes(on_mesh, axes=self.mesh.axis_names, out_sharding=out_shardings)

            # Put arrays on the mesh first: otherwise their gradients would have automatic axes.
            def placed(a: Any) -> Any:
                return jax.sharding.reshard(a, jax.sharding.NamedSharding(self.mesh, jax.typeof(a).sharding.spec))

            return mapped(*jax.tree.map(placed, (x, router, arrays)))

        return routed

    def bound(self, function: Any, stored: bool) -> Callable:
        """Returns a sharded function of x [B, T, D] and weights, on this mesh."""
        if stored:
            return functools.partial(function.with_stored_weights, mesh=self.mesh)
        x_spec = spec(("B", "T", "D"), self.axes)
        return functools.partial(function, mesh=self.mesh, in_specs=(x_spec,))


def hosts_of(processes: Sequence[int]) -> int:
    """Returns how many hosts there are, if ranks of these processes are equally many of each, one after the other; else 1."""
    hosts = len(set(processes))
    size = len(processes) // hosts
    parts = [{*processes[i : i + size]} for i in range(0, len(processes), size)]
    return hosts if len(parts) == hosts and all(len(part) == 1 for part in parts) else 1


def expert_sharding(
    x: jax.Array, gate: Any, num_experts: int, *, axis: Any, mesh: Any, in_specs: Any, stored: Axes | None
) -> ExpertSharding:
    """Returns how a call's arrays are sharded.

    Raises:
      ValueError: naming the argument.
    """
    named = () if axis is None else (axis,) if isinstance(axis, str) else axis
    if not isinstance(named, tuple) or not all(isinstance(a, str) for a in named) or len(set(named)) < len(named):
        raise _refuse("axis", f"= {axis!r} must be the name of a mesh axis, a tuple of different names, or None")
    if named and all(map(axis_is_bound, named)):
        if mesh is not None or in_specs is not None:
            raise _refuse(
                "mesh",
                "and 'in_specs' are for global arrays, but this call is already mapped over 'axis': leave them out",
            )
        left = current_mesh()
        if left is not None:
            raise _refuse(
                "axis",
                f"= {axis!r} is mapped, but the axes {', '.join(map(repr, left.axis_names))} are left to the compiler, "
                "which cannot partition the experts' products: map over these too, or over none of 'axis'",
            )
        return ExpertSharding(None, {}, named)
    whole = mesh_of(mesh, in_specs)
    for name, array in (("x", x), ("gate", gate)):
        if is_array(array):
            check_mesh_of(f"moe: argument {name!r}", array, whole)
    if whole is None:
        if named and mesh is None:
            raise _refuse(
                "axis",
                f"= {axis!r} names a mesh axis, but there is no mesh: give 'mesh', or call it inside a shard_map over that "
                "axis",
            )
        return ExpertSharding(None, {}, ())
    strange = [a for a in named if a not in whole.axis_names]
    if strange:
        raise _refuse("axis", f"= {axis!r} names {strange[0]!r}, which the mesh {dict(whole.shape)} does not have")
    if 0 in x.shape[:2]:  # the SPMD partitioner crashes on the gradient of an empty array
        raise _refuse("x", f"of shape {x.shape} has no token; on a mesh skip the call for an empty batch")
    axes = _axes(x, gate, whole, named, in_specs, stored)
    split = {a for d, size in zip("BT", x.shape[:2], strict=True) if size > 1 for a in axes.get(d, ())}
    loose = [a for a in axes["E"] if a not in split]
    if loose and len(loose) < len(axes["E"]):
        raise _refuse(
            "axis",
            f": experts are sharded over {axes['E']}, of which {loose[0]!r} does not shard the tokens of 'x' of shape "
            f"{x.shape} but others do; use only axes that shard the batch or the sequence, or none of these",
        )
    place = ExpertSharding(whole, axes, axes["E"], alike=bool(loose))
    if num_experts % place.ranks:
        over = " x ".join(f"{a}={whole.shape[a]}" for a in place.axis)
        raise _refuse(
            "router",
            f"has E = {num_experts} experts, which cannot be divided over {over}; use a multiple of {place.ranks}, or a "
            "smaller axis",
        )
    return place


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"moe: argument {argument!r} {what}")


def _axes(x: Any, gate: Any, mesh: Any, named: tuple[str, ...], in_specs: Any, stored: Axes | None) -> dict[str, Any]:
    """Returns dim -> mesh axes."""
    gate = gate.words if isinstance(gate, Packed) else gate
    seen = [(("B", "T", "D"), x), (("E", "W", "F") if gate.ndim == 3 else ("E", "W", "_", "F"), gate)]
    specs: Sequence[Any] | None = None
    if in_specs is not None:
        specs = check_specs("in_specs", in_specs, mesh, 2, "arrays that they are of, 'x' and 'gate'")
    elif is_explicit(mesh):
        specs = [jax.typeof(a).sharding.spec for _, a in seen]
    if specs is None:
        layout = current_layout()
        layout.check(mesh, also=named)
        axes = on_mesh(layout.activations, mesh)
        axes = {d: axes.get(d, ()) for d in ("B", "T", "F", "E")}
        axes["E"] = tuple(a for a in named if mesh.shape[a] > 1) if named else axes["E"]
        whole = on_mesh(stored or {}, mesh).get("D", ())
        axes["W"] = tuple(a for a in whole if a not in axes["E"])
    else:
        shown = [(d, a, s) for (d, a), s in zip(seen, specs, strict=False) if s is not None]
        spec_axes = axes_of_specs([d for d, *_ in shown], [s for *_, s in shown], [a.shape for _, a, _ in shown])
        if spec_axes.get("D"):
            raise _refuse(
                "in_specs",
                f"shards dim D of 'x' over {spec_axes['D']}, but every expert needs it whole; gather it first",
            )
        # Tokens keep axes of size 1: they are in the type of an explicit x, and so in the type of the result.
        axes = {d: tuple(a for a in spec_axes.get(d, ()) if d in "BT" or mesh.shape[a] > 1) for d in "BTFEW"}
        expert_axes = tuple(a for a in named if mesh.shape[a] > 1)
        if named and "E" in spec_axes and axes["E"] != expert_axes:
            raise _refuse(
                "axis", f"= {named} differs from the axes that 'gate' is sharded over, {axes['E']}; give one of the two"
            )
        axes["E"] = expert_axes if named else axes["E"]
    tokens = {*axes["B"], *axes["T"]}
    both = [a for a in axes["F"] if a in tokens or a in axes["E"]]
    if both:
        raise _refuse(
            "mesh", f": the axis {both[0]!r} shards dim F and also the tokens or experts; an axis may shard one of them"
        )
    return axes


@dataclass(frozen=True)
class _Program:
    """The cache key of a compiled call."""

    place_key: tuple
    alike: bool
    apply: Any
    num_experts: int
    how: DispatchConfig
    shapes: tuple
    chosen_by: tuple  # state that the choice of backends and configurations depends on
    mesh: Any = field(compare=False)
    axes: Any = field(compare=False)


def _check(how: DispatchConfig, top_k: int, alike: bool) -> None:
    """Raises ValueError for arguments that `exchange` would refuse, on one device too, where nothing is sent."""
    same = "all ranks of the experts have the same tokens"
    if alike and how.scheme not in ("auto", LOCAL):
        raise _refuse(
            "dispatch", f"= {how.scheme!r} sends tokens to other ranks, but here {same}; use 'auto' or {LOCAL!r}"
        )
    if alike and how.capacity is not None:
        raise _refuse("capacity", f"= {how.capacity} is not supported where {same}; leave it out")
    if isinstance(how.scheme, str) and how.scheme not in ("auto", *SCHEMES):
        raise _refuse("dispatch", f"= {how.scheme!r} is unknown; use 'auto', one of {', '.join(SCHEMES)}, or a Scheme")
    check_precision("moe: argument 'exchange'", how.precision)
    check_buffer(how.buffer, 1 if how.chunks is None else how.chunks, how.capacity, top_k)


def apply_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Mapping[str, jax.Array],
    apply: Any,
    *,
    num_experts: int,
    place: ExpertSharding,
    how: DispatchConfig,
    on_choice: Callable[[str], None] | None = None,
) -> tuple[jax.Array, Traffic]:
    """Returns (out [B, T, D], stats): the weighted sum of the experts' outputs for each token. `stats` covers all devices;
    inside the caller's `shard_map` `dropped` covers only the rank's own tokens.

    Args:
      apply: the same object for the same function, see `exchange`.
      on_choice: called with a line that says which scheme was chosen and why.
    """
    _check(how, weights.shape[-1], place.alike)
    if place.mesh is None:
        how = chosen(how, place, x.shape[0] * x.shape[1], num_experts, weights.shape[-1], x, params, on_choice)
        return _flat(x, experts, weights, dict(params), apply, num_experts, place.axis, how)
    mesh, axes = place.mesh, place.axes
    split = [a for d, size in zip("BT", x.shape[:2], strict=True) if size > 1 for a in axes[d]]
    tokens = x.shape[0] * x.shape[1] // math.prod(mesh.shape[a] for a in split)
    if place.alike:
        how = replace(how, scheme=LOCAL)
    how = chosen(how, place, tokens, num_experts, weights.shape[-1], x, params, on_choice)
    key = (mesh, tuple(sorted(axes.items())))
    shapes = tuple(sorted((n, p.flat if isinstance(p, Packed) else p.shape) for n, p in params.items()))
    chosen_by = (interpreting(), select.state(None))
    program = _compiled(_Program(key, place.alike, apply, num_experts, how, (x.shape, shapes), chosen_by, mesh, axes))
    return program(x, experts, weights, dict(params))


def _flat(x, experts, weights, params, apply, num_experts, axis, how: DispatchConfig) -> tuple[jax.Array, Traffic]:
    B, T, _ = x.shape
    x, experts, weights = (a.reshape(B * T, a.shape[2]) for a in (x, experts, weights))
    if not axis and how.capacity is None:  # a plain function, differentiable any number of times
        out, traffic = local(x, experts, weights, params, apply, num_experts=num_experts, gathers=True)
        return out.reshape(B, T, out.shape[1]), traffic
    out, s = exchange(
        x, experts, weights, params, apply, axis=axis or None, num_experts=num_experts, gathers=True, **how.options()
    )
    return out.reshape(B, T, out.shape[1]), Traffic(s.extra_passes, s.high_water, s.dropped)


def _of_own_experts(
    x, experts, weights, params, apply, num_experts, axis, how: DispatchConfig
) -> tuple[jax.Array, Traffic]:
    """Returns the same for tokens that are replicated over the ranks: each computes its experts' part of every sum, and the
    parts are added up."""
    num_local = num_experts // math.prod(jax.lax.axis_size(a) for a in axis)
    experts = experts - jax.lax.axis_index(axis) * num_local
    experts = jnp.where((experts >= 0) & (experts < num_local), experts, -1)
    out, traffic = _flat(x, experts, weights, params, apply, num_local, (), how)
    return jax.lax.psum(out, axis), traffic


@functools.lru_cache(maxsize=256)
def _compiled(p: _Program) -> Callable:
    """Returns the jitted function of global arrays. Cached, so that a second eager call compiles nothing."""
    shapes = dict(p.shapes[1])
    axes, mesh = p.axes, p.mesh
    rows = spec(("B", "T", "_"), axes, shape=p.shapes[0], mesh=mesh, what="moe: argument 'x'")
    tokens = {*axes_in(rows)}  # not all axes of B and T: a batch of one is not sharded
    # All-gather inside the shard_map over axes that split the tokens, so that its transpose is a reduce-scatter; over the
    # other axes the compiler gathers, outside.
    inside = tuple(a for a in axes["W"] if a in tokens)

    def dims(name: str) -> list[str]:
        e, *rest = _DIMS[name].split()
        return [e, *rest] if len(shapes[name]) == len(rest) + 1 else [e, *rest[:-1], "_", rest[-1]]

    weight_axes = {**axes, "W": inside}
    specs = {n: spec(dims(n), weight_axes, shape=s, mesh=mesh, what=f"moe: argument {n!r}") for n, s in shapes.items()}
    through = _of_own_experts if p.alike else _flat
    split = tuple(sorted(tokens))

    def body(x: Any, experts: Any, weights: Any, params: dict) -> Any:
        for name, w in params.items():
            if inside and "W" in dims(name) and shapes[name][dims(name).index("W")] > 1:
                gathered = functools.partial(
                    jax.lax.all_gather, axis_name=inside, axis=dims(name).index("W"), tiled=True
                )
                params[name] = jax.tree.map(gathered, w)
        if "down_bias" in params and axes["F"]:  # add the bias once, not on every device with a part of F
            params["down_bias"] = jnp.where(jax.lax.axis_index(axes["F"]) == 0, params["down_bias"], 0)
        out, traffic = through(x, experts, weights, params, p.apply, p.num_experts, axes["E"], p.how)
        out = jax.lax.psum(out, axes["F"]) if axes["F"] else out
        return out, traffic._replace(dropped=jax.lax.psum(traffic.dropped, split) if split else traffic.dropped)

    whole = jax.tree.map(lambda _: spec((), {}), Traffic())
    mapped = map_shards(body, mesh, (rows, rows, rows, specs), (rows, whole))
    return jax.jit(mapped)
