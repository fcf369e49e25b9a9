"""Runs a plan: the backends of one call as a differentiable, jitted function. Custom VJPs are wired here, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.ad_checkpoint import checkpoint_name

from kernels._core.call import is_float_array
from kernels._core.dispatch import Unsupported, by_platform

if TYPE_CHECKING:
    from kernels._core.contract import Backend, Op

# A plan says, for each platform that may be lowered for, which backend runs with which configuration, or why none does.
Plan = tuple[tuple[str, "Backend | None", Any, str], ...]


class Saved(dict):
    """What a backward receives beside the inputs: cotangents `d_<output>` and residuals, as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"nothing named {name!r} was saved; there is {', '.join(self)}") from None


def _as_tuple(op: Op, value: Any) -> tuple:
    return value if len(op.outputs) > 1 else (value,)


def _branches(op: Op, plan: Plan, make: Callable[[Backend, Any], Callable]) -> dict[str, Callable | str]:
    """Returns a branch per platform. Platforms with the same backend and configuration share one, traced once."""
    shared: dict[Any, Callable] = {}
    result: dict[str, Callable | str] = {}
    for platform, backend, cfg, reason in plan:
        if backend is None:
            result[platform] = reason
            continue
        key = (backend.name, cfg)
        if key not in shared:
            shared[key] = make(backend, cfg)
        result[platform] = shared[key]
    return result


def _run_forward(op: Op, plan: Plan, static: dict[str, Any], traced: dict[str, Any]) -> Any:
    def make(backend: Backend, cfg: Any) -> Callable:
        def branch(arrays: dict[str, Any]) -> Any:
            with jax.named_scope(f"{op.name}.{backend.name}"):
                arguments = {**static, **arrays}
                return backend.forward(*(arguments[name] for name in op.parameters), cfg)

        return branch

    result = jax.eval_shape(lambda arrays: op.function(**static, **arrays), traced)
    return by_platform(_branches(op, plan, make), result, traced)


def _run_backward(op: Op, plan: Plan, static: dict[str, Any], saved: dict[str, Any], traced: dict[str, Any]) -> Any:
    floats = {k: v for k, v in traced.items() if is_float_array(v)}

    def make(backend: Backend, cfg: Any) -> Callable:
        def branch(saved: dict[str, Any], arrays: dict[str, Any]) -> Any:
            with jax.named_scope(f"{op.name}.{backend.name}.backward"):
                arguments = {**static, **arrays}
                assert backend.backward is not None  # the plan was made for a differentiated call
                gradients = backend.backward(Saved(saved), *(arguments[name] for name in op.parameters), cfg)
            assert set(gradients) == set(floats), (op.name, backend.name, sorted(gradients), sorted(floats))
            for name, g in gradients.items():
                assert g.shape == floats[name].shape, (op.name, backend.name, name, g.shape, floats[name].shape)
            return {name: g.astype(floats[name].dtype) for name, g in gradients.items()}

        return branch

    result = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in floats.items()}
    return by_platform(_branches(op, plan, make), result, saved, traced)


@functools.lru_cache(maxsize=4096)
def compiled(
    op: Op, primal: Plan, gradient: Plan | None, refusal: str, static_items: tuple, interpreted: bool
) -> Callable:
    """Returns the jitted, differentiable function (float arrays, other arrays) -> outputs of one plan and one set of
    static options. `interpreted` is in the key because a traced program remembers how its kernels were launched."""
    static = dict(static_items)

    def call(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
        return _run_forward(op, primal, static, {**inputs, **others})

    call.__name__ = op.name  # what profiles and programs show
    run = jax.custom_vjp(call)

    def run_fwd(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
        if gradient is None:
            raise Unsupported(refusal)
        outputs = _as_tuple(op, _run_forward(op, gradient, static, {**inputs, **others}))
        # Named, so that a remat policy can keep what the backward needs instead of running the forward again.
        outputs = tuple(
            checkpoint_name(value, f"{op.name}.{name}") if name in op.residuals else value
            for name, value in zip(op.outputs, outputs, strict=True)
        )
        residuals = {n: v for n, v in zip(op.outputs, outputs, strict=True) if n in op.residuals}
        return outputs if len(op.outputs) > 1 else outputs[0], (inputs, others, residuals)

    def run_bwd(kept: Any, cotangents: Any) -> Any:
        inputs, others, residuals = kept
        assert gradient is not None  # else the forward has raised
        grads = {
            f"d_{name}": value
            for name, value in zip(op.outputs, _as_tuple(op, cotangents), strict=True)
            if value.dtype != jax.dtypes.float0
        }
        saved = op.backward_inputs(residuals, grads) if op.backward_inputs else {**residuals, **grads}
        return _run_backward(op, gradient, static, saved, {**inputs, **others}), None

    run.defvjp(run_fwd, run_bwd)
    return jax.jit(run)


@functools.lru_cache(maxsize=4096)
def compiled_backward(op: Op, plan: Plan, static_items: tuple, interpreted: bool) -> Callable:
    """Returns the jitted function (saved, arrays) -> gradients of one plan and one set of static options."""
    static = dict(static_items)

    def run(saved: dict[str, Any], traced: dict[str, Any]) -> Any:
        return _run_backward(op, plan, static, saved, traced)

    run.__name__ = f"{op.name}_backward"
    return jax.jit(run)
