"""Parses a contract's parameters and the dims of its arrays from its signature and annotations."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.framework import options
from kernels.framework.dims import Dim

_KINDS = {
    "Float": "float",
    "Int": "int",
    "UInt": "int",
    "Integer": "int",
    "Bool": "bool",
    "Shaped": "any",
    "Num": "any",
}


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter of a contract. `kind` is None if it is not declared as an array (options, pytrees)."""

    name: str
    kind: str | None
    dims: tuple[Dim, ...]
    default: Any
    required: bool
    positional: bool
    static: bool  # declared as a Python number, string or bool: compiled into the program, never traced
    annotation: Any = Any

    @functools.cached_property
    def accepted(self) -> set[tuple[type, Any]]:
        """Options already checked, with their types: a cache, since most calls repeat the same values."""
        return set()

    @functools.cached_property
    def plain(self) -> tuple[str, ...]:
        """Names of the dims if all are plain, distinct names; else an empty tuple."""
        names = tuple(d.name for d in self.dims if d.name and not (d.size or d.offset or d.broadcast or d.variadic))
        return names if len(set(names)) == len(self.dims) else ()

    def shape(self, dims: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of the argument for the given sizes."""
        sizes: list[int] = []
        for d in self.dims:
            sizes.extend(
                dims.get(d.name, ()) if d.variadic else [d.size if d.size is not None else dims[d.name] + d.offset]
            )
        return tuple(sizes)


STATIC_TYPES = (bool, int, float, str)


def _array_annotation(annotation: Any) -> tuple[str, tuple[Dim, ...]] | None:
    for member in options.members(annotation):
        if hasattr(member, "dim_str") and hasattr(member, "dtypes"):
            kind = _KINDS.get(member.__name__.split("[")[0], "any")
            return kind, tuple(Dim.parse(part) for part in member.dim_str.split())
    return None


@functools.lru_cache(maxsize=1)  # for the parameters, and then for the outputs of one contract
def _hints(function: Callable) -> dict[str, Any]:
    return typing.get_type_hints(function)


def parameters_of(function: Callable) -> dict[str, Parameter]:
    """Returns the parameters of a contract by name, in order, parsed from its signature and annotations."""
    hints = _hints(function)
    result = {}
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"{function.__name__}: a contract names every parameter; *{p.name} is not allowed")
        annotation = hints.get(p.name, Any)
        array = _array_annotation(annotation)
        members = [m for m in options.members(annotation) if m is not type(None)]
        result[p.name] = Parameter(
            name=p.name,
            kind=array[0] if array else None,
            dims=array[1] if array else (),
            default=None if p.default is p.empty else p.default,
            required=p.default is p.empty,
            positional=p.kind is not p.KEYWORD_ONLY,
            static=array is None and bool(members) and all(m in STATIC_TYPES for m in members),
            annotation=annotation,
        )
    return result


def output_dims(function: Callable, count: int) -> tuple[tuple[Dim, ...], ...]:
    """Returns the dims of each output, parsed from the return annotation of a contract.

    Raises:
      TypeError: the annotation is missing, or does not have one entry for each output.
    """
    hint = _hints(function).get("return")
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    read = [_array_annotation(h) for h in hints]
    if len(read) != count or None in read:
        raise TypeError(f"{function.__name__}: its return annotation must give the dims of {count} outputs, got {hint}")
    return tuple(annotation[1] for annotation in read if annotation is not None)


def saved_dims(names: tuple[str, ...], dims: tuple[tuple[Dim, ...], ...]) -> dict[str, tuple[Dim, ...]]:
    """Returns the dims of what a backward receives in `saved`, by name: outputs, their cotangents d_NAME, and delta, one
    number per row of the first output."""
    outputs = dict(zip(names, dims, strict=True))
    return outputs | {f"d_{name}": of for name, of in outputs.items()} | {"delta": dims[0][:-1]}
