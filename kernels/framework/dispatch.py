"""Dispatch at lowering: one traced program that contains a branch for each platform it may be lowered for.

A call of an operation is one primitive. Its branch is selected, traced and lowered for the platform the program is
lowered for, and for no other, so a branch that cannot be batched, differentiated or lowered elsewhere does no harm
there. Properties of the primitive (batching rule, type inside a `shard_map`, no JVP) are the same on every platform. If
no backend qualifies for a platform, lowering for that platform raises our error message.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from kernels.framework.interpret import interpret, interpreting
from kernels.framework.platforms import PLATFORMS, Unsupported
from kernels.framework.target import device_kind

_MOST_FRAMES = 32  # of the stack shown with an error at lowering
_JAX = f"{Path(jax.__file__).parent}/"


@dataclass(frozen=True, eq=False, repr=False)
class Branches:
    """The branches of one call.

    Attributes:
      name: name of the operation, for profiles and messages.
      by_platform: for each of PLATFORMS, a function of the operands, or the reason why no backend can run.
      result: pytree of shapes and dtypes that every branch returns.
      batched: the same call with one more leading dim on the operands, see `apply`; None to map over the rows one by
        one.
      missing: platform -> why no kernels run there, if their toolchain is missing.
      interpreted: compute capability of the GPU whose kernels are interpreted, or None to compile them.
      traced: the branch for the CPU, where its effects were asked for; else None, and a branch is traced when it is lowered.
      stack: the Python stack when the call was traced. Lowering runs under a different stack, which shows neither the
        caller nor, in a ring, the strategy and ring step.
    """

    name: str
    by_platform: Mapping[str, Callable | str]
    result: Any
    batched: Callable | None
    missing: Mapping[str, str]
    interpreted: int | None
    traced: ClosedJaxpr | None
    stack: tuple[tuple[str, int, str], ...]

    def __repr__(self) -> str:
        return self.name


def apply(
    name: str,
    by_platform: Mapping[str, Callable | str],
    result: Any,
    *operands: Any,
    batched: Callable | None = None,
    missing: Mapping[str, str] | None = None,
    ordered: bool = False,
) -> Any:
    """Returns the result of the branch for the platform that this program is lowered for.

    Args:
      by_platform: for each of PLATFORMS, the function to run, or the reason why no backend can run.
      result: pytree of `jax.ShapeDtypeStruct`: what every branch returns.
      operands: pytrees of arrays, passed to the branch.
      batched: (size, is_batched, operands) -> result or None: the same call under `vmap`, with a leading dim of that
        size on the operands that `is_batched` (a tree of bool) marks and on all results; None if that cannot be one
        call.
      missing: platform -> why no kernels run there; a warning is issued once, when a program is lowered for a device of that
        platform.
      ordered: whether the branch for the CPU may hold ordered host callbacks, as kernels in Pallas's interpreter do. It is then
        traced here, for its effects.
    """
    leaves, tree = jax.tree.flatten(operands)
    leaves = [*map(jax.numpy.asarray, leaves)]
    traced = _traced(by_platform["cpu"], jax.tree.unflatten(tree, leaves)) if ordered and interpreting() else None
    branches = Branches(name, by_platform, result, batched, missing or {}, interpreting(), traced, _stack())
    shapes = tuple((tuple(x.shape), x.dtype) for x in jax.tree.leaves(result))
    effects = frozenset() if traced is None else frozenset(traced.effects)
    flat = _call_p.bind(*vary_alike(leaves), branches=branches, tree=tree, shapes=shapes, acts=effects)
    return jax.tree.unflatten(jax.tree.structure(result), flat)


def reverse_only(name: str, tree: Any) -> Any:
    """Returns the arrays unchanged, and raises an error that names the operation if they are differentiated in forward
    mode.

    JAX refuses forward mode through a `custom_vjp` too, but its error names nothing, so inputs of ours pass through
    here first. This leaves nothing in the compiled program.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.inexact)]
    if floats:
        for i, x in zip(floats, _reverse_only_p.bind(*(leaves[i] for i in floats), name=name), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def varying_axes(x: Any) -> frozenset:
    """Returns the axes of the enclosing `shard_map` over which x varies; empty outside of a `shard_map`, or if it does
    not track varying axes (`check_vma=False`)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def vary_alike(tree: Any, *others: Any) -> Any:
    """Casts the arrays to vary over every mesh axis that any of them, or of `others`, varies over.

    Inside a `shard_map` all operands of an operation then have one type, and the transpose of this cast sums the
    gradient of an array that was replicated over the devices.
    """
    every = frozenset().union(*map(varying_axes, jax.tree.leaves((tree, others))))

    def cast(x: Any) -> Any:
        missing = every - varying_axes(x)
        return jax.lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x

    return jax.tree.map(cast, tree) if every else tree


_call_p = Primitive("ejdist_call")
_call_p.multiple_results = True


@_call_p.def_impl
def _run(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # otherwise it would recurse
        return jax.jit(lambda *a: _call_p.bind(*a, **params))(*args)


def _traced(branch: Callable | str, operands: Any) -> ClosedJaxpr | None:
    """Returns the jaxpr of a branch for operands of these shapes; None where it is the reason why there is no backend."""
    if isinstance(branch, str):
        return None
    with _local():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), operands)
        return jax.make_jaxpr(branch)(*shapes)


@_call_p.def_effectful_abstract_eval
def _typed(*avals: Any, branches: Branches, tree: Any, shapes: Any, acts: frozenset) -> Any:
    return _shapes(avals, shapes), acts


def _shapes(avals: Any, shapes: Any) -> Any:
    plain = [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]
    kind = getattr(avals[0], "manual_axis_type", None) if avals else None
    if kind is None or not kind.varying:
        return plain
    # Inside a `shard_map` that tracks varying axes, results vary over the same axes as the operands, on the same mesh.
    mesh = avals[0].sharding.mesh
    shardings = [jax.sharding.NamedSharding(mesh, jax.P(*(None,) * len(shape))) for shape, _ in shapes]
    return [x.update(sharding=sharding, manual_axis_type=kind) for x, sharding in zip(plain, shardings, strict=True)]


def _lower(platform: str, ctx: Any, *args: Any, branches: Branches, **params: Any) -> Any:
    if platform in branches.missing and device_kind(platform) is not None:
        _warn_once(branches.name, branches.missing[platform])
    try:
        chosen = branches.by_platform[platform]
        if platform == "cpu" and branches.traced is not None:
            return _lowered(jaxpr_as_fun(branches.traced), ctx, args, branches)
        if isinstance(chosen, str):
            raise Unsupported(chosen)
        return _lowered(
            lambda *leaves: jax.tree.leaves(chosen(*jax.tree.unflatten(params["tree"], leaves))), ctx, args, branches
        )
    except Exception as error:
        error.add_note(f"{branches.name} was first called (most recent call last):\n{_shown(branches.stack)}")
        raise


def _lowered(run: Callable, ctx: Any, args: Any, branches: Branches) -> Any:
    # Per-device arrays, whatever the enclosing mesh: kernels know nothing of it, and their loops carry unvarying
    # constants.
    plain = [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in ctx.avals_in]
    inner = ctx.replace(avals_in=plain)
    with _local(), interpret(branches.interpreted):
        results = mlir.lower_fun(run, multiple_results=True)(inner, *args)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    return results


def _stack() -> tuple[tuple[str, int, str], ...]:
    """Returns (file, line, function) of the callers, innermost first, without JAX's own frames."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _MOST_FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith((_JAX, "<")):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def _shown(stack: tuple[tuple[str, int, str], ...]) -> str:
    return "".join(traceback.StackSummary.from_list([(*entry, None) for entry in reversed(stack)]).format()).rstrip()


_silent = threading.Lock()  # acquired once and never released: the warning is given once


def _warn_once(name: str, reason: str) -> None:
    """Warns, once per process, that operations run on XLA because a toolchain is missing."""
    if _silent.acquire(blocking=False):
        warnings.warn(
            f"{name}: {reason}. Without it, this and every other operation with Triton kernels runs on XLA, which may "
            "be many times slower on this GPU. Pass platform='xla' if that is intended",
            RuntimeWarning,
            stacklevel=2,
        )


def _local() -> Any:
    """Returns a context in which JAX tracks neither the mesh nor which axes a value varies over."""
    # JAX disables the check in this way for the bodies of its own kernels; there is no public API.
    from jax._src import config

    return config._check_vma(False)


for _platform in PLATFORMS:
    mlir.register_lowering(_call_p, partial(_lower, _platform), platform=_platform)


def _batch(args: Any, dims: Any, *, branches: Branches, tree: Any, **params: Any) -> Any:
    args = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = [d is not None for d in dims]
    size = next(x.shape[0] for x, m in zip(args, mapped, strict=True) if m)
    if branches.batched is not None:
        with interpret(branches.interpreted):
            result = branches.batched(size, jax.tree.unflatten(tree, mapped), jax.tree.unflatten(tree, args))
        if result is not None:
            return jax.tree.leaves(result), [0] * len(params["shapes"])

    def one(rows: Any) -> Any:
        row = iter(rows)
        whole = [next(row) if m else x for x, m in zip(args, mapped, strict=True)]
        return _call_p.bind(*whole, branches=branches, tree=tree, **params)

    return jax.lax.map(one, [x for x, m in zip(args, mapped, strict=True) if m]), [0] * len(params["shapes"])


batching.primitive_batchers[_call_p] = _batch


def _no_derivative(primals: Any, tangents: Any, *, branches: Branches, **params: Any) -> Any:
    raise Unsupported(
        f"{branches.name}: this derivative is not supported. `jax.grad` and `jax.vjp` of the operation work, to any "
        "order; forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) does not, and neither does differentiating a "
        "backward whose residuals come from the caller"
    )


ad.primitive_jvps[_call_p] = _no_derivative


_reverse_only_p = Primitive("ejdist_reverse_only")
_reverse_only_p.multiple_results = True
_reverse_only_p.def_impl(lambda *args, name: list(args))
_reverse_only_p.def_abstract_eval(lambda *avals, name: list(avals))
mlir.register_lowering(_reverse_only_p, lambda ctx, *args, name: list(args))
batching.primitive_batchers[_reverse_only_p] = lambda args, dims, name: (_reverse_only_p.bind(*args, name=name), dims)

# Tangents pass through this primitive: a linear map that can be transposed but not evaluated.
_tangents_p = Primitive("ejdist_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_abstract_eval(lambda *avals, name: list(avals))
ad.primitive_transposes[_tangents_p] = lambda cotangents, *args, name: list(cotangents)


def _refuse_forward_mode(*args: Any, name: str) -> Any:
    raise Unsupported(
        f"{name}: forward-mode differentiation (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) is not supported; use reverse mode: "
        "`jax.grad`, `jax.vjp` or `jax.jacrev`"
    )


_tangents_p.def_impl(_refuse_forward_mode)
batching.primitive_batchers[_tangents_p] = lambda args, dims, name: _refuse_forward_mode(name=name)
mlir.register_lowering(_tangents_p, lambda ctx, *args, name: _refuse_forward_mode(name=name))


def _marked(tangents: Any, name: str) -> list[Any]:
    marked = iter(_tangents_p.bind(*(t for t in tangents if not isinstance(t, ad.Zero)), name=name))
    return [t if isinstance(t, ad.Zero) else next(marked) for t in tangents]


# Primals are returned unchanged, so that a residual is the same array that the caller holds.
ad.primitive_jvps[_reverse_only_p] = lambda primals, tangents, name: (list(primals), _marked(tangents, name))
ad.primitive_jvps[_tangents_p] = lambda primals, tangents, name: (
    _tangents_p.bind(*primals, name=name),
    _marked(tangents, name),
)
