"""Runs a plan: the backends of one call as a differentiable, jitted function. Custom VJPs are defined only here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from kernels.framework import padding
from kernels.framework.backend import Backend, Choice, Operation, Plan
from kernels.framework.binding import Call, floats_apart, is_float_array, is_traced_argument, merged
from kernels.framework.dispatch import apply, reverse_only, vary_alike
from kernels.framework.platforms import Unsupported


class Saved(dict):
    """What a backward receives besides the inputs: cotangents `d_<output>` and residuals, as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no residual or cotangent is named {name!r}; available: {', '.join(self)}") from None


def _as_tuple(op: Operation, value: Any) -> tuple:
    return value if len(op.outputs) > 1 else (value,)


def _primals(tree: Any) -> Any:
    """Returns the primal values that the forward of a `custom_vjp` with `symbolic_zeros` receives."""
    return jax.tree.map(lambda leaf: leaf.value, tree)


def _cotangent(cotangent: Any) -> jax.Array | None:
    """Returns the cotangent of an output, or None if it is a symbolic zero: nothing depends on that output."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent


def _branches(plan: Plan, make: Callable[[Choice, Any], Callable]) -> dict[str, Callable | str]:
    """Returns for each platform `make(choice, its backend)`, or the reason why there is none."""
    return {c.platform: c.reason if c.backend is None else make(c, c.backend) for c in plan.choices}


def _apply(
    plan: Plan, name: str, make: Callable[[Choice, Any], Callable], result: Any, *operands: Any, **batched: Any
) -> Any:
    """Returns the result of a plan's branches, `make(choice, its backend)` for each platform that has a backend."""
    missing = {c.platform: c.missing for c in plan.choices if c.missing}
    ordered = any(
        c.platform == "cpu" and c.backend is not None and c.backend.toolchain == "pallas" for c in plan.choices
    )
    return apply(name, _branches(plan, make), result, *operands, missing=missing, ordered=ordered, **batched)


def _contract_of(op: Operation, static: Mapping[str, Any], with_residuals: bool) -> Callable:
    """Returns the contract of a call, arrays -> (outputs, name -> extra residual). Every backend returns these shapes. A call
    uses one function object, because JAX caches traces by function and a derivative needs several."""

    def contract(arrays: dict[str, Any]) -> Any:
        extra = op.extra_residuals(**static, **arrays) if with_residuals and op.extra_residuals is not None else {}
        return op.function(**static, **arrays), extra

    return contract


def _run_forward(
    op: Operation,
    plan: Plan,
    static: Mapping[str, Any],
    contract: Callable,
    traced: dict[str, Any],
    with_residuals: bool = False,
) -> Any:
    """Returns (outputs, name -> extra residual or what a backend keeps); there are none unless `with_residuals`."""

    def make(choice: Choice, backend: Backend) -> Callable:
        keeping = with_residuals and (choice.keeps or op.extra_residuals is not None)

        def branch(arrays: dict[str, Any]) -> Any:
            with jax.named_scope(f"{op.name}.{backend.name}"):
                inputs = padding.of_forward(op, arrays)
                results = backend.run(
                    "forward_with_residuals" if keeping else "forward", {**static, **inputs}, choice.cfg
                )
            outputs, extra = results if keeping else (results, {})
            if with_residuals and not choice.keeps:
                extra = {**extra, **{name: jnp.zeros(x.shape, x.dtype) for name, x in plan.kept.items()}}
            if set(extra) != set(result[1]):
                raise TypeError(f"{op.name} on {backend.name}: residuals {sorted(extra)}, expected {sorted(result[1])}")
            for name, like in result[1].items():
                if (extra[name].shape, extra[name].dtype) != (like.shape, like.dtype):
                    what = f"{extra[name].dtype}{[*extra[name].shape]}, expected {like.dtype}{[*like.shape]}"
                    raise TypeError(f"{op.name} on {backend.name}: residual {name!r} is {what}")
            return outputs, extra

        return branch

    result = jax.eval_shape(contract, traced)
    if with_residuals:
        result = result[0], {**result[1], **plan.kept}

    def batched(size: int, is_batched: Any, operands: Any) -> Any:
        if with_residuals and op.extra_residuals is not None:
            return None
        return _batched_forward(op, plan, static, contract, result, size, is_batched[0], operands[0])

    return _apply(plan, op.name, make, result, traced, batched=batched)


def _run_backward(op: Operation, plan: Plan, static: Mapping[str, Any], saved: dict, traced: dict) -> Any:
    """Returns name -> gradient, for the leaves that have one; the other leaves are None."""
    floats, _ = floats_apart(traced, op.no_gradient)
    # Branches live as long as the program. Closing over arrays here would keep the traced ones alive.
    result = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), floats)

    def make(choice: Choice, backend: Backend) -> Callable:
        def branch(saved: dict[str, Any], arrays: dict[str, Any]) -> Any:
            if not choice.keeps:
                saved = {name: x for name, x in saved.items() if name not in plan.kept}
            with jax.named_scope(f"{op.name}.{backend.name}.backward"):
                saved, arrays = padding.of_backward(op, saved, arrays)
                gradients = backend.run("backward", {**static, **arrays}, choice.cfg, Saved(saved))
            return _checked(op, backend, gradients, result)

        return branch

    return _apply(plan, f"{op.name}_backward", make, result, saved, traced)


def _checked(op: Operation, backend: Backend, gradients: Mapping[str, Any], floats: dict[str, Any]) -> dict[str, Any]:
    """Returns the gradients in the dtypes of their inputs, after checking their names, structure and shapes."""
    what = f"{op.name} on {backend.name}: its backward returned gradients"
    if set(gradients) != set(floats):
        raise TypeError(
            f"{what} of {', '.join(sorted(gradients))}, but the inputs with a gradient are {', '.join(sorted(floats))}; "
            "declare inputs without one by Op(no_gradient=...)"
        )
    checked = {}
    for name, like in floats.items():
        (expected, tree), (actual, has) = jax.tree.flatten(like), jax.tree.flatten(gradients[name])
        if tree != has or [g.shape for g in actual] != [w.shape for w in expected]:
            raise TypeError(f"{what} of {name!r} as {jax.tree.map(jnp.shape, gradients[name])}, expected {like}")
        checked[name] = jax.tree.unflatten(tree, [g.astype(w.dtype) for g, w in zip(actual, expected, strict=True)])
    return checked


def _batched_forward(
    op: Operation,
    plan: Plan,
    static: Mapping[str, Any],
    contract: Callable,
    result: Any,
    size: int,
    is_batched: dict,
    traced: dict,
) -> Any:
    """Returns the outputs for operands with an extra leading dim, as one call: the dim is folded into B or `*lead`.
    Returns None if a batched operand (such as a weight) or an output (such as a sum over the batch) has neither."""
    heads = [next(iter(dims), None) for dims in op.output_dims]
    if any(d is None or not (d.variadic or d.name == "B") for d in heads):
        return None
    leads, rows = {}, {}
    for name, value in traced.items():
        first = next(iter(op.parameters[name].dims), None)
        if first is not None and first.variadic:
            leads[name] = value if is_batched[name] else jnp.broadcast_to(value[None], (size, *value.shape))
        elif first is not None and first.name == "B":
            rows[name] = value if is_batched[name] else jnp.broadcast_to(value[None], (size, *value.shape))
        elif any(jax.tree.leaves(is_batched[name])) or (first is None and jax.tree.leaves(value)):
            return None
    if leads and rows:
        return None
    largest = max((x.shape[1] for x in rows.values()), default=0)
    for name, x in rows.items():  # an array with B = 1 is broadcast to every row of the batch
        rows[name] = jnp.broadcast_to(x, (size, largest, *x.shape[2:])).reshape(size * largest, *x.shape[2:])
    folded = {**traced, **leads, **rows}
    call = op.bind(**static, **folded)
    again = op.plan(call, plan.toolchain, plan.cfg, differentiated=False)
    if plan.kept:
        again = again.forward_of(op.plan(call, plan.toolchain, plan.cfg, differentiated=True))
        shapes = {name: (size * x.shape[0], *x.shape[1:]) for name, x in plan.kept.items()}
        if {name: x.shape for name, x in again.kept.items()} != shapes:
            return None  # more rows are too many for the backend that keeps them
    results = _run_forward(op, again, static, contract, folded, bool(plan.kept))
    return jax.tree.map(lambda x, like: x.reshape(size, *like.shape), results, result)


def compiled(op: Operation, call: Call, primal: Plan, gradient: Plan | None, refusal: str) -> Callable:
    """Returns the jitted, differentiable function of a call's arrays -> outputs.

    Args:
      primal, gradient: plans for the forward and the backward. If the contract has `extra_residuals`, a differentiated
        call uses `gradient` for its forward too; so it does where a backend of it keeps arrays for its backward.
      refusal: why `gradient` is None.
    """
    static = call.static()
    contract = _contract_of(op, static, False)
    with_extra = contract if op.extra_residuals is None else _contract_of(op, static, True)

    def forward_of(plan: Plan, with_residuals: bool = False) -> Callable:
        """Returns a plan's forward, (inputs, others) -> (outputs, extra residuals), differentiable to any order."""

        def call(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
            shapes_of = with_extra if with_residuals else contract
            return _run_forward(op, plan, static, shapes_of, merged(inputs, others), with_residuals)

        def run_fwd(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
            inputs, others = _primals((inputs, others))
            outputs, residuals, extra = differentiated(inputs, others)
            return (outputs, extra if with_residuals else {}), (inputs, others, {**residuals, **extra})

        def run_bwd(saved: Any, cotangents: Any) -> Any:
            # Residuals, extra ones included, are functions of the inputs, so derivatives reach the inputs through
            # `pull`.
            d_outputs = tuple(map(_cotangent, _as_tuple(op, cotangents[0])))
            inputs, others, residuals = saved
            inputs, residuals, d_outputs = reverse_only(op.name, (inputs, residuals, d_outputs))
            return backward(inputs, others, residuals, d_outputs), None

        call.__name__ = op.name  # what profiles and programs show
        run = jax.custom_vjp(call)
        # No cotangent is materialised for unused outputs: a backward may skip work for them.
        run.defvjp(run_fwd, run_bwd, symbolic_zeros=True)
        return lambda inputs, others: run(reverse_only(op.name, inputs), others)

    def differentiated(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
        """Returns (outputs, residuals among the outputs, extra residuals) of a call under differentiation."""
        if gradient is None:
            raise Unsupported(refusal)

        def tagged(name: str, value: Any) -> Any:
            # Named, so that a remat policy can save what the backward needs instead of running the forward again.
            return checkpoint_name(value, f"{op.name}.{name}")

        has_extra = op.extra_residuals is not None
        forward = gradient if has_extra else primal.forward_of(gradient)
        outputs, extra = forward_of(forward, has_extra or bool(forward.kept))(inputs, others)
        outputs = tuple(
            tagged(name, value) if name in op.residuals else value
            for name, value in zip(op.outputs, _as_tuple(op, outputs), strict=True)
        )
        residuals = {n: v for n, v in zip(op.outputs, outputs, strict=True) if n in op.residuals}
        extra = {name: tagged(name, value) for name, value in extra.items()}
        return outputs if len(op.outputs) > 1 else outputs[0], residuals, extra

    @jax.custom_vjp
    def backward(inputs: Any, others: Any, residuals: Any, cotangents: tuple) -> Any:
        """Returns the gradients of the inputs."""
        assert gradient is not None  # otherwise the forward would have raised
        traced = merged(inputs, others)
        by_name = {f"d_{name}": value for name, value in zip(op.outputs, cotangents, strict=True)}
        d = {name: x for name, x in by_name.items() if x is not None and x.dtype != jax.dtypes.float0}
        if op.backward_inputs is None and any(x is None for x in by_name.values()):
            outputs = _as_tuple(op, jax.eval_shape(lambda x: op.function(**static, **x), traced))
            unused = [(name, y) for (name, x), y in zip(by_name.items(), outputs, strict=True) if x is None]
            d |= {name: jnp.zeros(y.shape, y.dtype) for name, y in unused if is_float_array(y)}
        kept = {name: residuals[name] for name in gradient.kept}
        saved = {**op.backward_inputs(residuals, d), **kept} if op.backward_inputs else {**residuals, **d}
        return _run_backward(op, gradient, static, saved, traced)

    def backward_fwd(inputs: Any, others: Any, residuals: Any, cotangents: Any) -> Any:
        return backward(inputs, others, residuals, cotangents), (inputs, others, cotangents)

    def backward_bwd(saved: Any, d_gradients: Any) -> Any:
        """The second derivative is that of the contract, on every platform. Residuals are functions of the inputs, so
        only the inputs and the cotangents receive cotangents."""
        inputs, others, cotangents = saved

        def gradients(inputs: Any, cotangents: Any) -> Any:
            def outputs(x: Any) -> Any:
                every = _as_tuple(op, op.function(**static, **merged(x, others)))
                return tuple(None if d is None else y for y, d in zip(every, cotangents, strict=True))

            with jax.default_matmul_precision("highest"):
                return jax.vjp(outputs, inputs)[1](cotangents)[0]

        d_inputs, d_cotangents = jax.vjp(gradients, inputs, cotangents)[1](d_gradients)
        return d_inputs, None, None, d_cotangents

    backward.defvjp(backward_fwd, backward_bwd)
    differentiable = forward_of(primal)

    def run(traced: dict[str, Any]) -> Any:
        _check_mesh(op, traced)
        return differentiable(*floats_apart(vary_alike(traced), op.no_gradient))[0]

    run.__name__ = op.name
    return _jitted(run)


def compiled_forward(op: Operation, call: Call, plan: Plan) -> Callable:
    """Returns the jitted function arrays -> (outputs, what backends keep) for one plan and one set of static options. It is not
    differentiated."""
    static = call.static()
    contract = _contract_of(op, static, False)

    def run(traced: dict[str, Any]) -> Any:
        _check_mesh(op, traced)
        return _run_forward(op, plan, static, contract, vary_alike(traced), bool(plan.kept))

    run.__name__ = op.name
    return _jitted(run)


def compiled_backward(op: Operation, call: Call, plan: Plan) -> Callable:
    """Returns the jitted function (saved, arrays) -> gradients for one plan and one set of static options."""
    static = call.static()

    def run(saved: dict[str, Any], traced: dict[str, Any]) -> Any:
        _check_mesh(op, (saved, traced))
        return _run_backward(op, plan, static, *vary_alike((saved, traced)))

    run.__name__ = f"{op.name}_backward"
    return _jitted(run)


def _jitted(run: Callable) -> Callable:
    """Returns the jitted function, which stays jitted under `jax.disable_jit`: an operation is atomic."""
    compiled = jax.jit(run)

    def call(*arrays: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*arrays)

    return call


def backward_of(op: Operation, function: Callable) -> Callable:
    """Returns a backward that differentiates `function`, a plain `jnp` forward of all parameters of the contract."""

    def backward(saved: Saved, **arguments: Any) -> dict[str, Any]:
        traced = {name: value for name, value in arguments.items() if is_traced_argument(value)}
        rest = {name: value for name, value in arguments.items() if name not in traced}
        floats, others = floats_apart(traced, op.no_gradient)
        outputs, vjp = jax.vjp(lambda floats: function(**rest, **merged(floats, others)), floats)
        d = tuple(saved[f"d_{n}"].astype(y.dtype) for n, y in zip(op.outputs, _as_tuple(op, outputs), strict=True))
        (gradients,) = vjp(d if len(op.outputs) > 1 else d[0])
        return gradients

    saved = inspect.Parameter("saved", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    backward.__dict__["__signature__"] = inspect.Signature([saved, *parameters])
    return backward


def _check_mesh(op: Operation, tree: Any) -> None:
    """Raises ValueError for arrays that are sharded over explicit mesh axes: an operation of one device cannot decide
    how its results are sharded."""
    for x in jax.tree.leaves(tree):
        sharding = jax.typeof(x).sharding  # the mesh of the array, which need not be in force
        explicit = {
            n for n, t in zip(sharding.mesh.axis_names, sharding.mesh.axis_types) if t == jax.sharding.AxisType.Explicit
        }
        named = {a for e in sharding.spec if e for a in ((e,) if isinstance(e, str) else e)} & explicit
        if named:
            raise ValueError(
                f"{op.name}: an array is sharded over the explicit mesh axes {', '.join(sorted(named))}, but "
                "functions of `kernels` work on one device's arrays; use the function of the same name in `ejdist`"
            )
