"""Matmuls that overlap with the communication that they need: an all-gather before, or a reduce-scatter after.

The product is taken apart along the rows that travel: while a device multiplies one block of rows, the next is on its way
around the ring, in both directions at once where there are enough devices (Wang et al., Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models, ASPLOS 2023). The gradient of each is the other's form: what was
gathered is scattered, and the rows that the gradient of the weights needs travel once more, so nothing gathered is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejdist.layout import axes_of_specs, check_mesh_of, check_out_specs, check_specs, current_layout, on_mesh, spec
from ejdist.mapped import map_shards
from ejdist.mesh import TP, axis_is_bound, check_axis, is_explicit
from ejdist.placement import mesh_of
from ejdist.sequence import exchange
from kernels.engines.matmul.dot import dot
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import reverse_only, vary_alike
from kernels.framework.platforms import Unsupported
from kernels.framework.public import module_class

_DTYPES = ("bfloat16", "float16", "float32")


def _rings(rows: int, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (first row, rows, direction) of the parts of a block that travel: half of it each way, where both ways differ."""
    if ranks < 3 or rows % 2:
        return ((0, rows, 1),)
    return ((0, rows // 2, 1), (rows // 2, rows // 2, -1))


def _rows(x: jax.Array, first: Any, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, count, x.ndim - 2)


def _gathered(x: jax.Array, axis: str, use: Callable, carry: Any) -> Any:
    """Returns the carry after use(rows, their place among those of all ranks, carry) of all rows of all ranks."""
    n, me, block = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]
    parts = [(first, by, _rows(x, first, count)) for first, count, by in _rings(block, n)]
    for hop in range(n):
        # Sent before it is used, so that the next part travels meanwhile.
        ahead = [exchange.shift(part, axis, by) if hop + 1 < n else part for _, by, part in parts]
        for first, by, part in parts:
            carry = use(part, (me - by * hop) % n * block + first, carry)
        parts = [(first, by, part) for (first, by, _), part in zip(parts, ahead, strict=True)]
    return carry


def _scattered(product: Callable, block: int, axis: str, dtype: Any) -> jax.Array:
    """Returns this rank's block of rows of the sum over ranks of product(first row, rows), which travels in `dtype`."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    sums: list[Any] = []
    rings = _rings(block, n)
    for hop in range(n):
        # The sum that a rank holds now comes home after the hops that are left; it travels while the next part is computed.
        travelled = [exchange.shift(s, axis, by) for s, (_, _, by) in zip(sums, rings, strict=False)]
        parts = [product((me - by * (hop + 1)) % n * block + first, count) for first, count, by in rings]
        pairs = zip(parts, travelled, strict=True) if sums else ((part, None) for part in parts)
        sums = [(part if s is None else part + s.astype(jnp.float32)).astype(dtype) for part, s in pairs]
    return jnp.concatenate(sums, axis=-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _all_gather_matmul(x: jax.Array, w: jax.Array, axis: str) -> jax.Array:
    """Returns all rows of all ranks times this rank's columns of w."""

    def use(rows: jax.Array, first: jax.Array, out: jax.Array) -> jax.Array:
        product = dot("...td,df->...tf", rows, w).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(out, product, first, out.ndim - 2)

    return _gathered(x, axis, use, _like(x, (*x.shape[:-2], x.shape[-2] * lax.axis_size(axis), w.shape[1]), x.dtype))


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros that are typed as varying over the axes that x varies over."""
    return vary_alike(jnp.zeros(shape, dtype), x)


def _all_gather_bwd(axis: str, residuals: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    d = d.astype(x.dtype)
    dx = _scattered(lambda first, count: dot("...tf,df->...td", _rows(d, first, count), w), x.shape[-2], axis, x.dtype)

    def use(rows: jax.Array, first: jax.Array, dw: jax.Array) -> jax.Array:
        return dw + dot("...td,...tf->df", rows, _rows(d, first, rows.shape[-2]))

    return dx, _gathered(x, axis, use, _like(x, w.shape, jnp.float32)).astype(w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _reduce_scatter_matmul(x: jax.Array, w: jax.Array, axis: str) -> jax.Array:
    """Returns this rank's rows of the sum over ranks of x w."""
    block = x.shape[-2] // lax.axis_size(axis)
    return _scattered(lambda first, count: dot("...tf,fd->...td", _rows(x, first, count), w), block, axis, x.dtype)


def _reduce_scatter_bwd(axis: str, residuals: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals

    def use(rows: jax.Array, first: jax.Array, carry: Any) -> Any:
        dx, dw = carry
        part = dot("...td,fd->...tf", rows, w).astype(x.dtype)
        dx = lax.dynamic_update_slice_in_dim(dx, part, first, dx.ndim - 2)
        return dx, dw + dot("...tf,...td->fd", _rows(x, first, rows.shape[-2]), rows)

    start = (_like(x, x.shape, x.dtype), _like(x, w.shape, jnp.float32))
    dx, dw = _gathered(d.astype(x.dtype), axis, use, start)
    return dx, dw.astype(w.dtype)


_all_gather_matmul.defvjp(lambda x, w, axis: (_all_gather_matmul(x, w, axis), (x, w)), _all_gather_bwd)
_reduce_scatter_matmul.defvjp(lambda x, w, axis: (_reduce_scatter_matmul(x, w, axis), (x, w)), _reduce_scatter_bwd)


def _check(name: str, x: Any, w: Any, platform: Any, cfg: Any) -> None:
    """Raises ValueError or Unsupported for arguments that do not fit."""
    for argument, a, least, dims in (("x", x, 2, "[*lead, rows, columns]"), ("w", w, 2, "[rows, columns]")):
        if not is_float_array(a) or a.ndim < least or (argument == "w" and a.ndim != 2):
            got = f"{a.dtype} of shape {a.shape}" if hasattr(a, "shape") else type(a).__name__
            raise ValueError(f"{name}: argument {argument!r} must be a float array {dims}, got {got}")
    if str(x.dtype) not in _DTYPES:  # float64 would be multiplied in float32
        raise Unsupported(f"{name}: dtype {x.dtype} is not among {', '.join(_DTYPES)}")
    if x.dtype != w.dtype:
        raise ValueError(f"{name}: argument 'w' is {w.dtype} but 'x' is {x.dtype}; cast one of them")
    if x.shape[-1] != w.shape[0]:
        raise ValueError(f"{name}: argument 'w' of shape {w.shape} must have {x.shape[-1]} rows, the last dim of 'x'")
    if not w.shape[0]:
        raise ValueError(f"{name}: argument 'w' of shape {w.shape} has no rows; there must be at least 1")
    if platform not in (None, "xla"):
        raise Unsupported(f"{name} has no {platform} backend; it has xla")
    if cfg is not None:
        raise ValueError(f"{name}: argument 'cfg' = {cfg!r}: this operation has no configurations; leave it out")


@functools.lru_cache(maxsize=256)
def _compiled(local: Callable, axis: str, mesh: Any, in_specs: Any, out_spec: Any) -> Callable:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return local(*vary_alike((x, w), lax.axis_index(axis)), axis)

    return jax.jit(map_shards(body, mesh, in_specs, out_spec))


def _run(name: str, local: Callable, x: Any, w: Any, gathers: bool, axis_name: str, where: dict[str, Any]) -> jax.Array:
    """Returns the product on this rank's arrays where the axis is bound, else on global ones."""
    if not isinstance(axis_name, str):
        raise ValueError(f"{name}: argument 'axis_name' must be the name of a mesh axis, got {axis_name!r}")
    if axis_is_bound(axis_name):
        arguments = [n for n, value in where.items() if value is not None]
        if arguments:
            raise ValueError(
                f"{name}: arguments {', '.join(map(repr, arguments))} are for global arrays; this call is mapped over "
                f"{axis_name!r} already and has a rank's own: leave them out"
            )
        _check_rows(name, x, lax.axis_size(axis_name), gathers)
        return local(*reverse_only(name, vary_alike((x, w), lax.axis_index(axis_name))), axis_name)
    check_axis(axis_name, where["mesh"])
    mesh = mesh_of(**where)
    for argument, a in (("x", x), ("w", w)):
        check_mesh_of(f"{name}: argument {argument!r}", a, mesh)
    if mesh is None:
        return dot("...td,df->...tf", x, w).astype(x.dtype)
    for argument, a in (("x", x), ("w", w)):
        if 0 in a.shape:  # on a mesh the compiler aborts the process over the gradient of an empty array
            raise ValueError(
                f"{name}: argument {argument!r} of shape {a.shape} is empty; on a mesh leave the call out where there is "
                "nothing to do"
            )
    in_specs, out_spec = _specs(name, x, w, gathers, axis_name, mesh, where["in_specs"])
    if where["out_specs"] is not None:
        check_out_specs(where["out_specs"], (out_spec,), mesh)
    return _compiled(local, axis_name, mesh, in_specs, out_spec)(*reverse_only(name, (x, w)))


def _check_rows(name: str, x: jax.Array, ranks: int, gathers: bool) -> None:
    if not gathers and x.shape[-2] % ranks:
        raise ValueError(
            f"{name}: argument 'x' has {x.shape[-2]} rows (dim T), which cannot be scattered over {ranks} devices; pad them to "
            f"a multiple of {ranks}"
        )


def _specs(name: str, x: Any, w: Any, gathers: bool, axis: str, mesh: Any, requested: Any) -> tuple[Any, Any]:
    """Returns the specs of x and w, and of the result.

    Raises:
      ValueError: a dim does not divide, or the specs lack the axis where this needs it.
    """
    lead = ("B", *("_",) * (x.ndim - 3)) if x.ndim > 2 else ()
    # The columns that are split are F, of either operation; D is whole.
    dims = ((*lead, "T", "D"), ("D", "F")) if gathers else ((*lead, "T", "F"), ("F", "D"))
    if is_explicit(mesh) and requested is None:
        layout = axes_of_specs(dims[:1], [jax.typeof(x).sharding.spec], [x.shape])
    else:
        if requested is None:
            current_layout().check(mesh, also=(axis,))
        layout = on_mesh(current_layout().activations, mesh)
    axes = {
        "B": layout.get("B", ()),
        "T": (*(a for a in layout.get("T", ()) if a != axis), *((axis,) if gathers else ())),
    }
    if requested is not None:
        specs = check_specs("in_specs", requested, mesh, 2, f"array arguments of {name}")
        shown = [(d, s, a.shape) for d, s, a in zip(dims, specs, (x, w), strict=False) if s is not None]
        axes |= axes_of_specs([d for d, _, _ in shown], [s for _, s, _ in shown], [shape for *_, shape in shown])
    # An axis that splits the columns splits no batch.
    axes |= {"F": axes.get("F", (axis,)), "D": axes.get("D", ()), "B": tuple(a for a in axes["B"] if a != axis)}
    for dim, must in (("F", (axis,)), ("D", ())):
        if tuple(a for a in axes[dim] if a == axis or mesh.shape[a] > 1) != must:
            over = must or "nothing"
            raise ValueError(f"{name}: in_specs split dim {dim} over {axes[dim]}, but it must be split over {over}")
    if gathers and (axes["T"][-1:] != (axis,)):
        raise ValueError(
            f"{name}: in_specs split dim T, the rows of 'x', over {axes['T']}, but it must be split over {axis!r}, as the last "
            "of its axes"
        )
    in_specs = tuple(
        spec(d, axes, shape=a.shape, mesh=mesh, what=f"{name}: argument {n!r}")
        for n, d, a in zip(("x", "w"), dims, (x, w), strict=True)
    )
    rows = axes["T"][:-1] if gathers else (*axes["T"], axis)
    out = {**axes, "T": rows}
    out_dims = (*lead, "T", "F" if gathers else "D")
    shape = (*x.shape[:-1], w.shape[1])
    return in_specs, spec(out_dims, out, shape=shape, mesh=mesh, what=f"{name}: the result")


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str = TP,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Returns x w, [*lead, T, F] in x's dtype, where a mesh axis splits the rows T of x, and the columns F of w.

    The rows are gathered while they are multiplied: the first matmul of a layer whose tokens are split between layers. Called
    outside a `shard_map` it makes its own, on global arrays; called inside one that has `axis_name`, on this rank's: x
    [*lead, T / ranks, D] and w [D, F / ranks] give [*lead, T, F / ranks].

    Args:
      x: [*lead, T, D]. w: [D, F]. Of one dtype.
      axis_name: the mesh axis.
      mesh, in_specs, out_specs: where the arrays lie; default: the layout in force, or the type of x on explicit axes, with T
        over its axes and then `axis_name`, and F over `axis_name`.

    Both have gradients: of x by `reduce_scatter_matmul`'s form, of w with the rows gathered once more.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for.

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
    """
    _check("all_gather_matmul", x, w, platform, cfg)
    where = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return _run("all_gather_matmul", _all_gather_matmul, x, w, True, axis_name, where)


def reduce_scatter_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str = TP,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Returns x w, [*lead, T, D] in x's dtype, where a mesh axis splits the columns F of x and the rows F of w.

    Each device has a part of the sum over F, and the axis splits the rows T of the result: each is added up on its way
    to the device that has it, in float32 on a device and in x's dtype between them. The last matmul of a layer whose tokens are
    split between layers. Called inside a `shard_map` that has `axis_name`, x [*lead, T, F / ranks] and w [F / ranks, D] give
    [*lead, T / ranks, D].

    Args:
      x: [*lead, T, F]. w: [F, D]. Of one dtype. T must be a multiple of the devices.
      axis_name: the mesh axis.
      mesh, in_specs, out_specs: where the arrays lie; default: the layout in force, or the type of x on explicit axes, with F
        over `axis_name`.

    Both have gradients, by `all_gather_matmul`'s form: the rows of the cotangent travel once for both.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for.

    Source: as `all_gather_matmul`.
    """
    _check("reduce_scatter_matmul", x, w, platform, cfg)
    where = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return _run("reduce_scatter_matmul", _reduce_scatter_matmul, x, w, False, axis_name, where)


AllGatherMatmul = module_class("AllGatherMatmul", all_gather_matmul)
ReduceScatterMatmul = module_class("ReduceScatterMatmul", reduce_scatter_matmul)
FUNCTIONS = {f.__name__: f for f in (all_gather_matmul, reduce_scatter_matmul)}
MODULES = {"AllGatherMatmul": AllGatherMatmul, "ReduceScatterMatmul": ReduceScatterMatmul}
