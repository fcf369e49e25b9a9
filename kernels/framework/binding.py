"""Binding: checks one call of an operation against its contract and names its arguments and dims.

The dims of a contract are declared in its jaxtyping annotations (`Float[Array, "B T N H"]`) and parsed once
(declaration.py). Shape and dtype checks, test arrays and sharding specs are all derived from them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from kernels.framework import options
from kernels.framework.declaration import STATIC_TYPES, Parameter
from kernels.framework.dims import Dim
from kernels.framework.options import ARRAYS, is_array


def is_float_array(value: Any) -> bool:
    return isinstance(value, ARRAYS) and is_a(value.dtype, np.floating)


@functools.lru_cache(maxsize=256)
def is_a(dtype: Any, kind: Any) -> bool:
    """Returns whether `dtype` is a subtype of `kind`, such as `np.floating`."""
    return bool(jax.dtypes.issubdtype(dtype, kind))


def is_traced_argument(value: Any) -> bool:
    """Returns whether an argument is passed as data: an array, or a pytree of arrays (such as MaskInfo)."""
    if value is None or isinstance(value, STATIC_TYPES):
        return False
    if isinstance(value, ARRAYS):
        return True
    leaves = jax.tree.leaves(value)
    if not leaves:
        return not isinstance(value, (tuple, list, dict))
    return all(isinstance(leaf, ARRAYS) for leaf in leaves)


def floats_apart(traced: Mapping[str, Any], without: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the arguments into (floats, others), with None in place of the leaves that are in the other part.

    `floats` has every argument with at least one float leaf; its other leaves are None. `others` has every argument,
    with the float leaves set to None. `merged` is the inverse.

    Args:
      without: arguments to put into `others` whole, such as floats without a gradient.
    """
    floats = {
        n: jax.tree.map(lambda x: x if is_float_array(x) else None, v)
        for n, v in traced.items()
        if n not in without and any(map(is_float_array, jax.tree.leaves(v)))
    }
    others = {
        n: jax.tree.map(lambda x: None if is_float_array(x) else x, v) if n in floats else v for n, v in traced.items()
    }
    return floats, others


def merged(floats: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that `floats_apart` split: its inverse."""

    def either(a: Any, b: Any) -> Any:
        return b if a is None else a

    return {
        n: jax.tree.map(either, floats[n], v, is_leaf=lambda x: x is None) if n in floats else v
        for n, v in others.items()
    }


def typed(value: Any) -> Any:
    """Returns a hashable key for an option. Two options share a compiled program only if their keys are equal, so the
    key distinguishes values that Python compares equal: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(typed, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), tuple(typed(getattr(value, f.name)) for f in dataclasses.fields(value)))
    return (type(value), value)


class Call:
    """One call, bound to the contract.

    Arguments are attributes; `dims` maps dim name -> size; `dtype` is the dtype of the first float argument. Arrays may
    be tracers, so a backend's predicates may look at shapes and dtypes only.
    """

    def __init__(self, op_name: str, arguments: Mapping[str, Any], dims: dict[str, Any], dtype: str):
        self.op_name, self.arguments, self.dims, self.dtype = op_name, dict(arguments), dims, dtype
        self._data = {
            n
            for n, v in self.arguments.items()
            if isinstance(v, ARRAYS) or (v is not None and type(v) not in STATIC_TYPES and is_traced_argument(v))
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('op_name', 'call')} has no parameter {name!r}") from None

    def traced(self) -> dict[str, Any]:
        return {k: v for k, v in self.arguments.items() if k in self._data}

    def static(self) -> dict[str, Any]:
        return {k: v for k, v in self.arguments.items() if k not in self._data}

    def program_key(self) -> tuple:
        """Returns the key of this call's compiled program: shapes and dtypes of arrays, types and values of options.

        Raises:
          ValueError: an option cannot be hashed.
        """
        parts: list[Any] = []
        for name, value in self.arguments.items():
            if value is None:
                parts.append((name, None))
            elif isinstance(value, ARRAYS):
                parts.append((name, value.shape, value.dtype))
            elif name in self._data:
                leaves, tree = jax.tree.flatten(value)
                parts.append((name, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)))
            else:
                stands_for = (name, typed(value))
                try:
                    hash(stands_for)
                except TypeError:
                    raise ValueError(
                        f"{self.op_name}: argument {name!r} must be hashable (use a tuple), got {value!r}"
                    ) from None
                parts.append(stands_for)
        return tuple(parts)

    def symbolic_dims(self) -> tuple[str, ...]:
        """Returns the dims whose size is symbolic, as when a program is exported for any size."""

        def is_symbol(size: Any) -> bool:
            return any(map(is_symbol, size)) if isinstance(size, tuple) else not isinstance(size, int)

        return tuple(name for name, size in self.dims.items() if is_symbol(size))

    def signature(self) -> str:
        """Returns the call's shapes, dtypes and static options as a string: the key of tuned configurations."""
        parts = []
        for name, value in self.arguments.items():
            if name in self._data:
                leaves, tree = jax.tree.flatten(value)
                shapes = ",".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
                parts.append(f"{name}={shapes}" if is_array(value) else f"{name}={tree}:{shapes}")
            else:
                parts.append(f"{name}={value!r}")
        return ";".join(parts)


def bind(op_name: str, parameters: Mapping[str, Parameter], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, with defaults filled in.

    Raises:
      ValueError: too many positional arguments, an unknown, duplicate or missing argument, or an array where the
        contract declares a Python value.
    """
    positional = [p.name for p in parameters.values() if p.positional]
    if len(args) > len(positional):
        raise ValueError(
            f"{op_name}: takes {len(positional)} positional arguments ({', '.join(positional)}), got {len(args)}; "
            "pass the rest by keyword"
        )
    by_name = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name not in parameters:
            raise ValueError(f"{op_name}: unknown argument {name!r}; it takes {', '.join(parameters)}")
        if name in by_name:
            raise ValueError(f"{op_name}: argument {name!r} was given twice")
        by_name[name] = value
    bound = {}
    for name, p in parameters.items():
        if name not in by_name:
            if p.required:
                raise ValueError(f"{op_name}: argument {name!r} is missing")
            bound[name] = p.default
            continue
        value = by_name[name]
        if p.kind is not None and isinstance(value, jax.Array) and _fits(value.dtype, p.kind):
            bound[name] = value
        elif type(value) in STATIC_TYPES and p.kind is None:
            if (type(value), value) not in p.accepted:
                value = _normalised(op_name, p, value)
                if len(p.accepted) < _MOST_ACCEPTED:
                    p.accepted.add((type(value), value))
            bound[name] = value
        else:
            bound[name] = _normalised(op_name, p, value)
    return bound


_MOST_ACCEPTED = 256


_ABSTRACT = {"float": np.floating, "int": np.integer, "bool": np.bool_}


@functools.lru_cache(maxsize=256)
def _fits(dtype: Any, kind: str) -> bool:
    """Returns whether an array of this dtype has the kind that the contract declares."""
    return is_a(dtype, _ABSTRACT.get(kind, np.number)) and not is_a(dtype, np.complexfloating)


def _normalised(op_name: str, p: Parameter, value: Any) -> Any:
    if p.kind is None:
        if p.static and isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
            value = value.item()
        if wrong := options.of_kind(p.name, value, p.annotation) or options.of_domain(p.name, value):
            raise ValueError(f"{op_name}: {wrong}")
        return value
    if value is None and (p.default is not None or p.required) and type(None) not in options.members(p.annotation):
        raise ValueError(f"{op_name}: argument {p.name!r} must be an array, got None")
    if value is None:
        return value
    if isinstance(value, (bool, int, float)):
        # A Python number where the contract declares an array is passed as data, so its value does not cause a
        # recompile.
        return np.asarray(value, {"float": np.float32, "int": np.int32, "bool": np.bool_}.get(p.kind))
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
            value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))  # as jnp.asarray does
        except (TypeError, ValueError):
            raise ValueError(
                f"{op_name}: argument {p.name!r} cannot be converted to an array; give numbers, in rows of equal length"
            ) from None
    if not is_array(value):
        raise ValueError(f"{op_name}: argument {p.name!r} must be an array, got {type(value).__name__}")
    if not _fits(value.dtype, p.kind):
        kind = {"any": "an int or float", "int": "an int"}.get(p.kind, f"a {p.kind}")
        raise ValueError(f"{op_name}: argument {p.name!r} must have {kind} dtype, got {value.dtype}; cast it")
    return value


def resolve_dims(op_name: str, parameters: Mapping[str, Parameter], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dim name -> size (a tuple for `*name`), after checking that all arrays agree.

    Raises:
      ValueError: names the argument, the dim, both sizes, and the argument that fixed the first size.
    """
    sizes: dict[str, Any] = {}
    owner: dict[str, str] = {}
    later: list[tuple[Parameter, Dim, int, tuple[int, ...]]] = []

    def settle(p: Parameter, dim: Dim, size: Any, shape: tuple[int, ...]) -> None:
        if dim.size is not None:
            if size != dim.size:
                raise ValueError(
                    f"{op_name}: argument {p.name!r} of shape {shape} must have size {dim.size} there, got {size}"
                )
            return
        if not dim.name:
            return
        base = size - dim.offset if not dim.variadic else size
        if dim.name not in sizes:
            sizes[dim.name], owner[dim.name] = base, p.name
        elif sizes[dim.name] != base:
            expected = sizes[dim.name] if dim.variadic else sizes[dim.name] + dim.offset
            raise ValueError(
                f"{op_name}: argument {p.name!r} of shape {shape} has {dim} = {size}, but {dim.name} = "
                f"{sizes[dim.name]} in argument {owner[dim.name]!r}, so {expected} is needed"
                + (" (or 1)" if dim.broadcast else "")
            )

    for p in parameters.values():
        value = bound[p.name]
        if p.kind is None or value is None:
            continue
        shape = tuple(value.shape)
        if p.plain and len(shape) == len(p.plain):
            for name, size in zip(p.plain, shape):
                if sizes.setdefault(name, size) is not size and sizes[name] != size:
                    break
                owner.setdefault(name, p.name)
            else:
                continue
        spread = [i for i, d in enumerate(p.dims) if d.variadic]
        fixed = len(p.dims) - len(spread)
        if (not spread and len(shape) != fixed) or len(shape) < fixed:
            raise ValueError(
                f"{op_name}: argument {p.name!r} must have dims [{' '.join(map(str, p.dims))}], got shape {shape}"
            )
        head = spread[0] if spread else len(p.dims)
        tail = len(p.dims) - head - 1 if spread else 0
        pairs = list(zip(p.dims[:head], shape[:head], strict=True))
        if spread:
            middle = shape[head : len(shape) - tail]
            pairs += [(p.dims[head], middle)]
            pairs += list(zip(p.dims[head + 1 :], shape[len(shape) - tail :], strict=True))
        for dim, size in pairs:
            if dim.broadcast:
                later.append((p, dim, size, shape))
            else:
                settle(p, dim, size, shape)
    # Broadcast dims are checked last, when the argument that fixes the size has been seen.
    for p, dim, size, shape in later:
        if size != 1:
            settle(p, dim, size, shape)
    for _, dim, size, _ in later:
        sizes.setdefault(dim.name, size)
    return sizes
