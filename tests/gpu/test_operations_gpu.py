"""Every operation that has a backend for GPUs alone, on a CUDA device: numbers, tuning candidates, and the same bits twice.

Run with the command in CONTRIBUTING.md.
"""

import functools

import jax
import numpy as np
import pytest
from grid import FLOOR, differentiable, error, named, value_and_gradients, widened

import kernels


def has_cuda():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

ROWS = [
    pytest.param(op, name, case, id=f"{op.name}-{case.name}-{name}")
    for op in kernels.operations().values()
    for name in op.backends
    if name.endswith("_gpu")
    for case in op.cases
    if "bench" not in case.tags
]
each = pytest.mark.parametrize(("op", "backend", "case"), ROWS)


def inputs(op, backend, case, dtype, **options):
    """Returns the arguments of a case, with options beside its own; skips one that the backend refuses, with its reason."""
    arguments = op.case_inputs(case, dtype=dtype) | options
    reason = op.backends[backend].refuses(op, op.bind(**arguments), differentiable(op))
    if reason:
        pytest.skip(f"{backend} refuses it: {reason}")
    return arguments


def without_gradient(op, arguments):
    """Returns the names of arguments that are not differentiated: all of them where no backend has a backward."""
    return op.no_gradient if differentiable(op) else tuple(arguments)


def off(op, backend, case, dtype, cfg=None):
    """Returns what is farther from the contract in float32 than twice its own rounding, by name."""
    arguments = inputs(op, backend, case, dtype)
    fixed = without_gradient(op, arguments)
    # A contract says what is meant, not how: on a GPU its products of float32 would be rounded to tf32.
    with jax.default_matmul_precision("highest"):
        *exact, d = value_and_gradients(op.function, widened(arguments), None, fixed)
        *rounded, _ = value_and_gradients(op.function, arguments, d, fixed)
    run = functools.partial(op, platform=backend, cfg=cfg)
    *got, _ = value_and_gradients(lambda **a: run(**a), arguments, d, fixed)
    truth, rounded, got = (named(op, *of) for of in (exact, rounded, got))
    assert set(got) == set(truth)
    return [(n, cfg) for n, w in truth.items() if not error(got[n], w) <= 2 * error(rounded[n], w) + FLOOR[dtype]]


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers(op, backend, case, dtype):
    assert not off(op, backend, case, dtype)


@each
def test_numbers_of_every_tuning_candidate(op, backend, case):
    candidates = op.backends[backend].candidates
    call = op.bind(**inputs(op, backend, case, "bfloat16"))
    for cfg in candidates(call) if candidates else ():
        assert not off(op, backend, case, "bfloat16", cfg)


@each
def test_the_same_call_gives_the_same_bits(op, backend, case):
    """Where that is an option, of the backends that have it."""
    options = {"deterministic": True} if "deterministic" in op.parameters else {}
    arguments = inputs(op, backend, case, "bfloat16", **options)
    run = functools.partial(op, platform=backend)
    fixed = without_gradient(op, arguments)
    runs = [value_and_gradients(lambda **a: run(**a), arguments, None, fixed) for _ in range(2)]
    first, second = ([np.asarray(x).tobytes() for x in jax.tree.leaves(r)] for r in runs)
    assert first == second
