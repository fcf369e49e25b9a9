"""The arguments of a case, and smaller versions of it for devices and oracles that it is too large for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case
from kernels.framework.contract import Op
from kernels.framework.work import nbytes

# Dims along which an operation repeats itself: tokens and rows. They are cut first, down to LEAST, so that the widths,
# which decide how a kernel is built, stay what they are for as long as possible.
SEQUENCE, LEAST = ("T", "S", "M", "lead"), 256


def as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def split(arguments: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Returns (float arrays, other data, Python values): what has a gradient, what travels, what is compiled in.

    Other data are integer arrays and pytrees of arrays, a mask for example.
    """
    floats, data, static = {}, {}, {}
    for name, value in arguments.items():
        plain = value is None or isinstance(value, (bool, int, float, str, tuple))
        leaves = [] if plain else jax.tree.leaves(value)
        if is_float(value):
            floats[name] = value
        elif not plain and all(hasattr(leaf, "dtype") for leaf in leaves):
            data[name] = value
        else:
            static[name] = value
    return floats, data, static


def cast(arguments: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {k: v.astype(dtype) if is_float(v) else v for k, v in arguments.items()}


def abstract(op: Op, case: Case, dtype: str) -> dict[str, Any]:
    """Returns the arguments of a case with shapes in place of random arrays: nothing large is made."""
    arguments: dict[str, Any] = dict(case.options)
    for name, p in op.parameters.items():
        array_dtype = case.dtype(name, dtype)
        follows = p.kind == "float" and all(d.name in case.dims and not d.broadcast for d in p.dims)
        if name in case.make and not follows:
            make = case.make[name]
            shaped = getattr(make, "shaped", None)  # of a large array, which only its shape is wanted of
            value = make(np.random.default_rng(0), case.dims) if shaped is None else shaped(case.dims)
            arguments[name] = jax.ShapeDtypeStruct(value.shape, array_dtype) if is_float(value) else value
        elif (follows and name in case.make) or case.draws(p):
            arguments[name] = jax.ShapeDtypeStruct(case.shape(p), array_dtype)
    return arguments


def _shape(p: Any, dims: Any, unnamed: tuple = ()) -> tuple:
    """Returns the shape of a parameter; `unnamed` stands where its dims say `...`."""
    shape: list = []
    for d in p.dims:
        if d.variadic:
            shape += dims.get(d.name, unnamed)
        elif d.name:
            shape.append(dims[d.name] + d.offset)
        else:
            shape.append("?" if d.size is None else d.size)  # `_`: whatever the case says
    return tuple(shape)


def scaled(op: Op, case: Case, fits: Callable[[Case], bool]) -> Case:
    """Returns the case, or the largest version of it that fits: the greatest sequence dim, and every one of that size,
    is halved until it is LEAST; then the greatest of all dims, and every one of that size.

    Raises:
      ValueError: no version of it fits.
    """
    while not fits(case):
        sizes = {name: max(size, default=1) if isinstance(size, tuple) else size for name, size in case.dims.items()}
        long = {n: s for n, s in sizes.items() if n in SEQUENCE and s > LEAST} or sizes
        greatest = max(long.values())
        if greatest < 2:
            raise ValueError(f"{op.name}, case {case.name}: it does not fit, however small; raise the limit")
        case = with_dims(op, case, {n: _halved(case.dims[n]) for n, s in long.items() if s == greatest})
    return case


def _halved(size: Any) -> Any:
    if not isinstance(size, tuple):
        return size // 2
    at = size.index(max(size))
    return (*size[:at], size[at] // 2, *size[at + 1 :])


def with_dims(op: Op, case: Case, changes: dict[str, Any]) -> Case:
    dims = {**case.dims, **changes}
    shapes: dict[str, Any] = {}
    for name, shape in case.shapes.items():  # sizes that follow a dim follow it still; broadcast dims stay 1
        if callable(shape):
            shapes[name] = shape
            continue
        extra = len(shape) + 1 - len(op.parameters[name].dims)  # what `...` stands for in this case stays as it is
        before, after = (_shape(op.parameters[name], d, ("?",) * extra) for d in (case.dims, dims))
        shapes[name] = tuple(n if s == b else s for s, b, n in zip(shape, before, after, strict=True))
    return dataclasses.replace(case, dims=dims, shapes=shapes)


def within(op: Op, dtype: str, gflop: float, mebibytes: float) -> Callable[[Case], bool]:
    """Returns whether a case's forward is at most that work, and its arrays at most that large."""

    def fits(case: Case) -> bool:
        arguments = abstract(op, case, dtype)
        large = nbytes(*(leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")))
        flops = op.work(op.bind(**arguments))[0].flops if op.work else 0
        return flops <= gflop * 1e9 and large <= mebibytes * 2**20

    return fits


def contract_fits(op: Op, limit: float) -> Callable[[Case], bool]:
    """Returns whether the contract, in float32 and with its gradient, makes no array larger than `limit` bytes.

    It is traced, not run: what is dense in a contract (all pairs of attention, all logits) shows as one array.
    """

    def fits(case: Case) -> bool:
        floats, data, static = split(abstract(op, case, "float32"))

        def both(floats: Any, data: Any) -> Any:
            outputs, pull = jax.vjp(lambda f: op.function(**f, **data, **static), floats)
            return pull(jax.tree.map(jnp.ones_like, outputs))

        return _largest(jax.make_jaxpr(both)(floats, data).jaxpr) <= limit

    return fits


def _largest(jaxpr: Any) -> float:
    largest = 0
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            if hasattr(value.aval, "dtype"):
                largest = max(largest, math.prod(value.aval.shape) * value.aval.dtype.itemsize)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                largest = max(largest, _largest(inner))
    return largest
