"""The grid of every operation: op × backend × case × dtype, in value and in every gradient, against the contract.

The tolerance calibrates itself. The contract is evaluated in float32 on the rounded inputs: the truth. It is evaluated
again at the case's dtype: its distance from the truth is what rounding costs there. A backend may be off by twice that,
plus a floor for the order of summation.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from kernels._core.binding import is_float_array
from kernels._core.interpret import interpret

FLOOR = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def on_this_machine(backend):
    """Returns the context in which a backend's numbers can be had on a CPU: its interpreter, if it needs one."""
    return contextlib.nullcontext() if "cpu" in backend.platforms else interpret()


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def cotangents(outputs, seed=1):
    """Returns a random cotangent for each float output, zero where the output is not finite (a row with no key)."""
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.where(jnp.isfinite(y), jnp.asarray(rng.standard_normal(y.shape), y.dtype), 0) if is_float_array(y) else None
        for y in as_tuple(outputs)
    )


def value_and_gradients(function, arguments, d_outputs=None):
    """Returns (outputs, {argument: gradient}, cotangents) of a function over all its float array arguments."""
    floats = {k: v for k, v in arguments.items() if is_float_array(v)}
    others = {k: v for k, v in arguments.items() if k not in floats}

    @jax.jit
    def run(floats, d_outputs):
        outputs, pull = jax.vjp(lambda f: as_tuple(function(**f, **others)), floats)
        d = cotangents(outputs) if d_outputs is None else tuple(c.astype(y.dtype) for c, y in zip(d_outputs, outputs))
        return outputs, pull(d)[0], d

    return run(floats, d_outputs)


def error(actual, wanted):
    """Returns the relative error in the 2-norm; infinite where the two are not finite in the same places."""
    a, w = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    if a.shape != w.shape or not np.array_equal(np.isfinite(a), np.isfinite(w)):
        return np.inf
    bad = ~np.isfinite(w)
    if not np.array_equal(a[bad], w[bad]):
        return np.inf
    a, w = a[~bad], w[~bad]
    return float(np.linalg.norm(a - w) / max(np.linalg.norm(w), np.sqrt(w.size) * 1e-2, 1e-30))


def check(op, backend, case, dtype, seed=0):
    """Raises AssertionError naming every output and gradient that is farther from the truth than rounding explains."""
    arguments = op.case_inputs(case, dtype=dtype, seed=seed)
    exact = {k: v.astype(jnp.float32) if is_float_array(v) else v for k, v in arguments.items()}
    with jax.default_matmul_precision("highest"):
        truth, true_gradients, d = value_and_gradients(op.function, exact)
        rounded, rounded_gradients, _ = (
            (truth, true_gradients, None) if dtype == "float32" else value_and_gradients(op.function, arguments, d)
        )
    with on_this_machine(backend):
        got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform=backend.name), arguments, d)
    rows = [(n, g, t, r) for n, g, t, r in zip(op.outputs, got, truth, rounded)]
    assert set(gradients) == set(true_gradients)
    rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in gradients]
    bad = []
    for name, actual, wanted, yardstick in rows:
        allowed = 2 * min(error(yardstick, wanted), 1.0) + FLOOR[dtype]
        off = error(actual, wanted)
        if not off <= allowed:
            bad.append(f"{name}: relative error {off:.2e}, allowed {allowed:.2e}")
    for name, value in zip(op.outputs, got):
        wanted = jax.eval_shape(lambda: op.function(**arguments))
        expected = as_tuple(wanted)[op.outputs.index(name)]
        if value.dtype != expected.dtype:
            bad.append(f"{name}: dtype {value.dtype}, the contract has {expected.dtype}")
    assert not bad, f"{op.name} on {backend.name}, case {case.name}, {dtype}: " + "; ".join(bad)
