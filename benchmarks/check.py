"""Numbers before times: every contestant's outputs and gradients against the contract in float32.

The tolerance calibrates itself, as in tests/grid.py. The contract in float32 on the rounded inputs is the truth; its distance
from the contract at the case's dtype is what rounding costs there. A contestant may be off by twice that and a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import as_tuple, cast, is_float, split
from benchmarks.peers import first
from kernels.framework.contract import Op

FLOOR = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class Reference:
    """What must come out: values, and how far off each may be, by name; and the cotangents that were sent back."""

    names: tuple[str, ...]
    values: dict[str, Any]
    allowed: dict[str, float]
    cotangents: tuple


@jax.jit
def _error(actual: Any, wanted: Any) -> Any:
    a, w = actual.astype(jnp.float32), wanted.astype(jnp.float32)
    finite = jnp.isfinite(w)
    same = jnp.all(jnp.where(finite, jnp.isfinite(a), (a == w) | (jnp.isnan(a) & jnp.isnan(w))))
    off = jnp.linalg.norm(jnp.where(finite, a - w, 0).ravel())
    size = jnp.maximum(jnp.linalg.norm(jnp.where(finite, w, 0).ravel()), jnp.sqrt(1.0 * w.size) * 1e-2)
    return jnp.where(same, off / size, jnp.inf)


def error(actual: Any, wanted: Any) -> float:
    """Returns the relative error in the 2-norm; infinite where shapes differ, or what is finite."""
    return float(_error(actual, wanted)) if actual.shape == wanted.shape else float("inf")


def _cotangents(outputs: tuple, dtypes: tuple) -> tuple:
    # Zero where an output is not finite: a query without a key has no gradient.
    keys = jax.random.split(jax.random.key(1), len(outputs))
    return tuple(
        jnp.where(jnp.isfinite(y), jax.random.normal(k, y.shape), 0).astype(d)
        for k, y, d in zip(keys, outputs, dtypes, strict=True)
    )


class Oracle:
    """The references of one call: of all outputs, or of what a contestant gives of them.

    Args:
      function: what the truth is computed with; None for the contract in float32.
      allowed: how far off each value may be, where `function` is no truth but a backend.
    """

    def __init__(
        self,
        op: Op,
        arguments: dict[str, Any],
        function: Callable[..., Any] | None = None,
        allowed: Callable[[Any], dict[str, float]] | None = None,
    ):
        self.op, self.arguments, self.function, self.allowed = op, arguments, function, allowed
        self._found: dict[Any, Reference] = {}

    def reference(self, of: Callable[..., Any] | None) -> Reference:
        """Returns the reference of `of` of the outputs; of all of them for None. Each is computed once."""
        if of not in self._found:
            self._found[of] = self._computed(of)
        return self._found[of]

    def _computed(self, of: Callable[..., Any] | None) -> Reference:
        floats, data, static = split(self.arguments)

        def function(**arrays: Any) -> Any:
            outputs = as_tuple((self.function or self.op.function)(**static, **arrays))
            return outputs if of is None else of(*outputs)

        shapes = jax.eval_shape(lambda f, d: as_tuple(function(**f, **d)), floats, data)
        kept = [at for at, y in enumerate(shapes) if is_float(y)]
        names = tuple(self.op.outputs[at] if of in (None, first) else "value" for at in kept)
        dtypes = tuple(shapes[at].dtype for at in kept)

        @jax.jit
        def values(floats: Any, data: Any, cotangents: Any) -> Any:
            def outputs_of(floats: Any) -> tuple:
                outputs = as_tuple(function(**floats, **data))
                return tuple(outputs[at] for at in kept)

            outputs, pull = jax.vjp(outputs_of, floats)
            sent = _cotangents(outputs, dtypes) if cotangents is None else cotangents
            (gradients,) = pull(tuple(c.astype(y.dtype) for c, y in zip(sent, outputs, strict=True)))
            named = dict(zip(names, outputs, strict=True))
            return named | {f"d_{name}": g for name, g in gradients.items()}, sent

        if self.allowed is not None:
            found, cotangents = values(floats, data, None)
            return Reference(names, found, self.allowed(of), cotangents)
        with jax.default_matmul_precision("highest"):
            truth, cotangents = values(cast(floats, "float32"), data, None)
        dtype = str(next(iter(floats.values())).dtype)
        rounded = truth if dtype == "float32" else values(floats, data, cotangents)[0]
        allowed = {n: 2 * min(error(rounded[n], truth[n]), 1.0) + FLOOR[dtype] for n in truth}
        return Reference(names, truth, allowed, cotangents)


def errors(contestant: Any, arguments: dict[str, Any], oracle: Oracle) -> tuple[dict[str, float], str]:
    """Returns (error of each value by name, what is wrong with them or ""), of the very programs that are timed."""
    reference = oracle.reference(contestant.of)
    floats, data, _ = split(arguments)
    programs = contestant.programs
    inputs = programs.load(floats, data)
    if contestant.backward:
        outputs, gradients = programs.outputs_and_gradients(inputs, programs.load_cotangents(reference.cotangents))
    else:
        outputs, gradients = programs.outputs(inputs), {}
    # What is stated to have no gradient has zeros, which are no answer to the contract's derivative.
    stated = {f"d_{n}": g for n, g in gradients.items() if n not in oracle.op.no_gradient}
    actual = dict(zip(reference.names, outputs, strict=True)) | stated
    found = {name: error(value, reference.values[name]) for name, value in actual.items()}
    wrong = [
        f"{name}: relative error {off:.1e}, allowed {reference.allowed[name]:.1e}"
        for name, off in found.items()
        if not off <= reference.allowed[name]
    ]
    return found, "; ".join(wrong)
