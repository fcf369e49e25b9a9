"""The grid of every operation: op × backend × case × dtype, in value and in every gradient, against the contract.

The tolerance calibrates itself. The contract is evaluated in float32 on the rounded inputs: the truth. It is evaluated
again at the case's dtype: its distance from the truth is what rounding costs there. A backend may be off by twice that,
plus a floor for the order of summation.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import floats_apart, is_float_array, is_traced_argument, merged
from kernels.framework.interpret import interpret

# What is built on another operation, or is another form of one with the same code around it (chunks, groups, blocks of keys):
# what the framework or a mesh makes of it is quick for the other, and slow for this.
BUILT_ON_ANOTHER = {
    "differential_attention": "flash_attention",
    "linformer_attention": "flash_attention",
    "mixture_of_attention_heads": "flash_attention",
    "quantized_attention": "flash_attention",
    "attention": "flash_attention",
    "native_sparse_attention": "blocksparse_attention",
    "performer_attention": "linear_attention",
    "append_and_attend": "paged_attention",
    "page_attention": "paged_attention",
    "decode_attention": "paged_attention",
    "flash_mla": "flash_attention",
    "rwkv7": "delta_rule",
    "rwkv4": "linear_attention",
    "state_space_v1": "state_space_v2",
    "grouped_matmul_quantized": "grouped_matmul",
    "grouped_matmul_gathered": "grouped_matmul",
    "quantized_grouped_matmul": "grouped_matmul",
}

# Of 8 bits the inputs alone are: results are wider, and rounded.
FLOOR = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float8_e4m3fn": 2e-3, "float8_e5m2": 2e-3}


def on_this_machine(backend):
    """Returns the context in which a backend's numbers can be had on a CPU: its interpreter, if it needs one."""
    return contextlib.nullcontext() if "cpu" in backend.platforms else interpret()


def _parts(name, value):
    """Returns what a value is made of: the rules of a mask and of a scaling, words, and of anything else that it is given."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            (name, n, x if isinstance(x, str) else None) for n, x in fields.items() if x is not None and x is not False
        }
    return {(name, value if isinstance(value, (str, bool)) else None)}


def _structure(make, dims):
    """Returns an argument that a case makes, with tracers for its arrays: nothing is compiled while tests are collected."""
    made = []
    try:
        jax.eval_shape(lambda: made.append(make(np.random.default_rng(0), dims)))
    except jax.errors.ConcretizationTypeError:  # its numbers decide what it is
        return make(np.random.default_rng(0), dims)
    return made[0]


def facts(case, first):
    """Returns what a case has that an operation or its kernels may treat otherwise: options, arrays that are given or left out,
    rules of a mask, and sizes that the operation's first case does not have."""
    found = {("dim", *item) for item in case.dims.items() - first.dims.items()}
    found |= {("given", n) for n in case.arrays} | {("left out", n) for n in {*first.arrays} - {*case.arrays}}
    found |= {("shape", n) for n in case.shapes} | {("wide", n) for n in case.wide}
    made = {name: _structure(make, case.dims) for name, make in case.make.items()}
    return found.union(*(_parts(name, value) for name, value in (case.options | made).items()))


def covering(cases):
    """Returns the names of the first case and of few others, so that each of their `facts` is in one of them."""
    each = {case.name: facts(case, cases[0]) for case in cases}
    names = [cases[0].name] if cases else []
    left = frozenset().union(*each.values()) - frozenset().union(*(each[name] for name in names))
    while left:
        names.append(max(each, key=lambda name: len(each[name] & left)))
        left -= each[names[-1]]
    return frozenset(names)


def fewest(cases):
    """Returns the names of `covering`, without those whose `facts` are all in the others'."""
    each = {name: facts(next(c for c in cases if c.name == name), cases[0]) for name in covering(cases)}
    for name in sorted(each, key=lambda name: (len(each[name]), name)):
        others = [found for other, found in each.items() if other != name]
        if others and each[name] <= frozenset().union(*others):
            del each[name]
    return frozenset(each)


def richest(cases):
    """Returns the name of the case that has most facts."""
    return max(cases, key=lambda case: len(facts(case, cases[0]))).name


def differentiable(op):
    """Returns whether any backend has a backward; an operation of which none has is forward only."""
    return any(b.backward is not None for b in op.backends.values())


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def cotangents(outputs, seed=1):
    """Returns a random cotangent for each float output, zero where the output is not finite (a row with no key)."""
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.where(jnp.isfinite(y), jnp.asarray(rng.standard_normal(y.shape), y.dtype), 0) if is_float_array(y) else None
        for y in as_tuple(outputs)
    )


def widened(arguments):
    """Returns the arguments with every float leaf in float32."""

    def wide(x):  # by NumPy: JAX would compile a program for each shape
        return x if not is_float_array(x) or x.dtype == np.float32 else jax.device_put(np.asarray(x).astype(np.float32))

    return jax.tree.map(wide, arguments)


def value_and_gradients(function, arguments, d_outputs=None, no_gradient=()):
    """Returns (outputs, {argument: gradient}, cotangents) of a function over the float leaves of all its arguments.

    The gradient of an argument that is a pytree has its structure, with None for the leaves that are not floats.
    """
    traced, static = apart(arguments)
    return differentiated(function, static, no_gradient)(traced, d_outputs)


def apart(arguments):
    """Returns (the traced arguments, the static ones)."""
    traced = {n: v for n, v in arguments.items() if is_traced_argument(v)}
    return traced, {n: v for n, v in arguments.items() if n not in traced}


def differentiated(function, static, no_gradient):
    """Returns the jitted function (traced arguments, cotangents or None) of `value_and_gradients`."""

    # What has no gradient is data too: as a constant of the program it would be folded, at length, by the compiler.
    @jax.jit
    def run(traced, d_outputs):
        floats, others = floats_apart(traced, no_gradient)
        outputs, pull = jax.vjp(lambda f: as_tuple(function(**merged(f, others), **static)), floats)
        d = cotangents(outputs) if d_outputs is None else d_outputs
        given = [np.zeros(y.shape, jax.dtypes.float0) if c is None else c.astype(y.dtype) for c, y in zip(d, outputs)]
        return outputs, pull(tuple(given))[0], d

    return run


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


@dataclass(frozen=True)
class Truth:
    """The contract on one case. `exact` in float32 and `rounded` at the case's dtype hold outputs and gradients by name."""

    arguments: dict[str, Any]
    exact: dict[str, Any]
    rounded: dict[str, Any]
    d_outputs: tuple


def named(op, outputs, gradients):
    """Returns what was computed by name: outputs, and the gradient of each float leaf of each argument."""
    paths, _ = jax.tree_util.tree_flatten_with_path(gradients)
    return dict(zip(op.outputs, outputs)) | {f"d{jax.tree_util.keystr(path)}": g for path, g in paths}


@functools.lru_cache(maxsize=2)
def contract_of(op, case_name, seed):
    """Returns the contract on a case, differentiated and jitted; in float32 one program, whatever the dtype of the inputs."""
    arguments = op.case_inputs(next(c for c in op.cases if c.name == case_name), seed=seed)
    # What no backend differentiates need not be differentiated here.
    return differentiated(op.function, apart(arguments)[1], op.no_gradient if differentiable(op) else tuple(arguments))


@functools.lru_cache(maxsize=32)
def truth_of(op, case_name, dtype, seed):
    """Returns the `Truth` of a case. It is the same for every backend, so the rows of a grid that are about one case and dtype
    stand side by side and it is computed once."""
    case = next(c for c in op.cases if c.name == case_name)
    arguments, contract = op.case_inputs(case, dtype=dtype, seed=seed), contract_of(op, case_name, seed)
    with jax.default_matmul_precision("highest"):
        *exact, d = contract(apart(widened(arguments))[0], None)
        rounded = exact
        if dtype != "float32":
            *rounded, _ = contract(apart(arguments)[0], d)
    return Truth(arguments, named(op, *exact), named(op, *rounded), d)


def check(op, backend, case, dtype, seed=0):
    """Raises AssertionError naming every output and gradient that is farther from the truth than rounding explains."""
    truth = truth_of(op, case.name, dtype, seed)
    with on_this_machine(backend):
        if backend.backward is None:
            found = [as_tuple(op(**truth.arguments, platform=backend.name)), {}]
        else:
            *found, _ = value_and_gradients(
                lambda **a: op(**a, platform=backend.name), truth.arguments, truth.d_outputs, op.no_gradient
            )
    got, bad = named(op, *found), []
    assert set(got) == set(truth.exact) or backend.backward is None
    for name, actual in got.items():
        wanted, yardstick = truth.exact[name], truth.rounded[name]
        allowed = 2 * min(error(yardstick, wanted), 1.0) + FLOOR[dtype]
        off = error(actual, wanted)
        if not off <= allowed:
            bad.append(f"{name}: relative error {off:.2e}, allowed {allowed:.2e}")
        if actual.dtype != yardstick.dtype:
            bad.append(f"{name}: dtype {actual.dtype}, the contract has {yardstick.dtype}")
    assert not bad, f"{op.name} on {backend.name}, case {case.name}, {dtype}: " + "; ".join(bad)
