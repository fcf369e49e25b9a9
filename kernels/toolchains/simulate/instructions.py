"""Inline PTX of kernels that are interpreted: the few instructions on 32 bits that they are written with, over NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["executed"]


def _permuted(low: Any, high: Any, selector: Any) -> Any:
    """Returns the four bytes that a selector's digits choose, of the eight of two words."""
    eight = [(word >> np.uint32(8 * i)) & np.uint32(0xFF) for word in (low, high) for i in range(4)]
    digits = [int(selector) >> 4 * i & 0xF for i in range(4)]
    if max(digits) > 7:
        raise NotImplementedError(f"prmt.b32 with {int(selector):#x}, which repeats signs, is not interpreted")
    return sum(eight[digit] << np.uint32(8 * i) for i, digit in enumerate(digits))


def _of_halves(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        halves = (np.ascontiguousarray(x, np.uint32).view(np.float16) for x in (a, b))
        return function(*halves).astype(np.float16).view(np.uint32)

    return run


def _of_float(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: function(np.ascontiguousarray(a, np.uint32).view(np.float32)).astype(np.float32).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _permuted,
    "sub.rn.f16x2": _of_halves(np.subtract),
    "ex2.approx.ftz.f32": _of_float(np.exp2),
    "rcp.approx.ftz.f32": _of_float(np.reciprocal),
}


def executed(asm: str, constraints: str, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the registers that a piece of PTX writes, $0 and those that follow, from the ones that it reads: uint32 arrays.

    Raises:
      NotImplementedError: it has an instruction, or registers, that are not known here.
    """
    kinds = [kind.strip() for kind in constraints.split(",")]
    outputs = [kind for kind in kinds if kind.startswith("=")]
    if {*kinds} - {"=r", "r"} or len(kinds) != len(outputs) + len(operands):
        raise NotImplementedError(f"registers {constraints!r} of {asm!r} are not interpreted")
    values: dict[str, Any] = {f"${len(outputs) + i}": x for i, x in enumerate(operands)}

    def value(text: str) -> Any:
        return np.uint32(int(text, 0)) if text[0].isdigit() else values[text]

    for statement in filter(None, re.split(r"[;\n]", asm.strip().strip("{}"))):
        name, *rest = statement.split(None, 1)
        if name == ".reg" or not rest:
            continue
        if name not in _INSTRUCTIONS:
            raise NotImplementedError(f"instruction {name!r} of {asm!r} is not interpreted")
        to, *read = (part.strip() for part in rest[0].split(","))
        values[to] = _INSTRUCTIONS[name](*map(value, read))
    return [values[f"${i}"] for i in range(len(outputs))]
