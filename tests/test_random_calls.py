"""Random legal calls of every operation, against its contract: outputs, and the gradient of every float input.

A draw starts from a case: its sizes are drawn anew (odd ones, 1, past a chunk), an option may take its value of another case,
and a float dtype is drawn. Each of its calls has data of its own, so that one program serves many calls. What is no legal call,
since sizes hang together in ways that only the operation knows, is drawn again. All draws are the same in every run.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, differentiable, error, named, widened

import kernels
from benchmarks.cases import with_dims
from kernels import Unsupported
from kernels.framework.binding import floats_apart, is_float_array, is_traced_argument, merged
from kernels.framework.requests import check_cuts, check_tables

OPS = kernels.operations()
SETS, EACH = 10, 30  # draws of an operation, and calls of each
SEQUENCE, WIDTH, ROWS = (1, 2, 7, 31, 33, 65, 70), (1, 2, 3, 4, 6, 8, 16), (1, 2, 3)
LONG = {"T", "S", "M"}  # dims of a sequence; the rest are widths, but for rows and heads
FEW = {"B", "N", "K", "E", "G", "requests", "slots", "L"}


def new_sizes(rng, case):
    """Returns dim -> size: dims that are as long as each other stay so, and so do multiples of heads."""
    dims = dict(case.dims)
    ratio = dims["N"] // dims["K"] if dims.get("K") and dims.get("N") else 0
    by_size: dict = {}
    for name, size in case.dims.items():
        kind = LONG if name in LONG else FEW if name in FEW else None
        if rng.random() < 0.3:
            continue  # as it is
        if isinstance(size, tuple):
            dims[name] = tuple(int(rng.choice(ROWS if i else (1, 5, 33))) for i in range(len(size)))
            continue
        choices = SEQUENCE if kind is LONG else ROWS if kind is FEW else WIDTH
        key = (size, kind is LONG)
        dims[name] = by_size.setdefault(key, int(rng.choice(choices))) if kind is LONG else int(rng.choice(choices))
    if ratio:
        dims["N"] = dims["K"] * int(rng.choice((1, ratio)))
    return dims


def check_requests(arguments):
    """Raises ValueError for requests with more queries than rows, or whose keys their tables and pages have no room for."""
    if "query_start_loc" in arguments and "query" in arguments:
        check_cuts("random call", "query_start_loc", arguments["query_start_loc"], arguments["query"].shape[0])
    if {"kv_lens", "block_tables"} <= arguments.keys():
        cache = next(arguments[n] for n in ("key_cache", "kv_cache") if n in arguments)
        lens, tables = (arguments[n] for n in ("kv_lens", "block_tables"))
        check_tables("random call", ("kv_lens", lens), ("block_tables", tables), *cache.shape[:2])


def legal(op, backend, case, dtype):
    """Returns whether the backend runs the case, which is told from shapes."""
    try:
        arguments = op.case_inputs(case, dtype=dtype)
        check_requests(arguments)
        call = op.bind(**arguments)
        traced = call.traced()
        jax.eval_shape(lambda traced: op.function(**call.static(), **traced), traced)
    except (ValueError, TypeError, IndexError, ZeroDivisionError, KeyError, Unsupported):
        return False
    return backend.refuses(op, call, differentiable(op)) is None


def drawn(op, backend, which):
    """Returns (case, dtype) of a draw."""
    rng = np.random.default_rng([which, zlib.crc32(op.name.encode())])
    cases = [c for c in op.cases if "bench" not in c.tags]
    dtypes = sorted(backend.dtypes & FLOOR.keys())
    for _ in range(50):
        case = cases[rng.integers(len(cases))]
        dtype = "float32" if which % 2 else dtypes[rng.integers(len(dtypes))]
        options = dict(case.options)
        for name in options:
            others = [c.options[name] for c in cases if name in c.options]
            if rng.random() < 0.3:
                options[name] = others[rng.integers(len(others))]
        try:
            found = dataclasses.replace(with_dims(op, case, new_sizes(rng, case)), options=options)
        except KeyError:  # a shape that the case says has a dim whose size it does not
            found = dataclasses.replace(case, options=options)
        if legal(op, backend, found, dtype):
            return found, dtype
    return case, "float32"


def program(function, static, no_gradient):
    """Returns the jitted (data, noise or cotangents) -> (outputs, gradients, cotangents)."""

    @jax.jit
    def run(traced, noise):
        floats, others = floats_apart(traced, no_gradient)

        def outputs_of(floats):
            outputs = function(**merged(floats, others), **static)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        outputs, pull = jax.vjp(outputs_of, floats)
        d = [
            jnp.where(jnp.isfinite(y), n, 0).astype(y.dtype) if is_float_array(y) else None
            for y, n in zip(outputs, noise)
        ]
        given = [np.zeros(y.shape, jax.dtypes.float0) if c is None else c for c, y in zip(d, outputs)]
        return outputs, pull(tuple(given))[0] if floats else {}, d

    return run


def size_of(x):
    """Returns the root of the mean square of what is finite."""
    finite = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def compare(op, backend, case, dtype, calls):
    """Raises AssertionError naming what is farther from the contract than rounding explains, over all calls together."""
    first = op.case_inputs(case, dtype=dtype)
    static = {n: v for n, v in first.items() if not is_traced_argument(v)}
    constant = op.no_gradient if differentiable(op) else tuple(first)
    contract = program(op.function, static, constant)
    own = program(functools.partial(op, platform=backend.name), static, constant)
    found: list = []
    for seed in range(calls):
        traced = {n: v for n, v in op.case_inputs(case, dtype=dtype, seed=seed).items() if n not in static}
        rng = np.random.default_rng(seed)
        shapes = jax.eval_shape(lambda traced: op.function(**static, **traced), traced)
        noise = [rng.standard_normal(y.shape).astype(np.float32) for y in jax.tree.leaves(shapes)]
        with jax.default_matmul_precision("highest"):
            exact = contract(widened(traced), noise)
            rounded = exact if dtype == "float32" else contract(traced, exact[2])
        found.append([named(op, *r[:2]) for r in (exact, rounded, own(traced, exact[2]))])
    arrays = {
        name: [np.concatenate([np.asarray(f[i][name], np.float64).ravel() for f in found]) for i in range(3)]
        for name in found[0][2]
    }
    largest, bad = max(size_of(exact) for exact, _, _ in arrays.values()), []
    for name, (exact, rounded, got) in arrays.items():
        off, allowed = error(got, exact), 2 * min(error(rounded, exact), 1.0) + FLOOR[dtype]
        # What cancels, as the gradient of logits that are alone, is left with the rounding of larger numbers.
        noise = np.isfinite(off) and size_of(got - np.where(np.isfinite(got), exact, got)) < FLOOR[dtype] / 2 * largest
        if not (off <= allowed or noise):
            worst = int(np.argmax([error(f[2][name], f[0][name]) for f in found]))
            bad.append(f"{name}: relative error {off:.2e}, allowed {allowed:.2e}; the worst call is {worst}")
    assert not bad, (
        f"{op.name} on {backend.name}, {case.name} with {case.dims}, {case.options}, {dtype}: {'; '.join(bad)}"
    )


def _rows():
    for op in OPS.values():
        for which in range(SETS):
            marks = () if which == 1 and op.name in ("rms_norm", "mean_pooling") else (pytest.mark.slow,)
            yield pytest.param(op, which, marks=marks, id=f"{op.name}-{which}")


@pytest.mark.parametrize(("op", "which"), list(_rows()))
def test_random_calls(op, which):
    for backend in op.backends.values():
        if "cpu" in backend.platforms:
            compare(op, backend, *drawn(op, backend, which), EACH)
