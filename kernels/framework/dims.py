"""The vocabulary of dims, and the parser of an annotation's dims."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# A dim has one name and one meaning in every operation, because a layout maps each name to mesh axes once.
VOCABULARY = {
    "B": "rows of the batch",
    "T": "positions of queries, or of the sequence where there is one",
    "S": "positions of keys",
    "N": "heads; query heads, where keys have their own",
    "K": "heads of keys and values",
    "H": "width of a head, of queries and keys",
    "Hv": "width of a head of values",
    "Hr": "width of the positional part of a head, where it is separate",
    "R": "rank of the latent that keys and values are projected from",
    "D": "width of the model",
    "Dt": "width of a second model: the teacher in distillation",
    "F": "inner width of a layer: feed-forward, or the channels of a recurrence",
    "V": "entries of the vocabulary",
    "E": "experts: groups with separate weights",
    "G": "groups or sequences: counted, never split",
    "C": "entries of a chunk or page, or rows of a token",
    "M": "rows: tokens of all sequences, concatenated",
    "L": "layers",
    "P": "rows of a projection: positions or features that are projected to",
    "W": "taps of a convolution",
    "lead": "any number of leading dims: B, then T, then N",
    "pages": "pages of a cache",
    "requests": "requests in one serving batch",
    "slots": "slots of a state pool",
    "tokens": "tokens whose rows lie in another order",
    "sinks": "attention sinks of a head",
}


@dataclass(frozen=True)
class Dim:
    """One entry of a shape annotation. `name` is empty for a fixed size or a wildcard.

    Syntax: `T` (a name), `#T` (that size or 1), `*lead` (any number of dims, bound as a tuple), `T+1` (a name and an
    offset), `4` (a fixed size), `_` (any size), `...` (any number of dims, unbound).
    """

    name: str = ""
    size: int | None = None
    offset: int = 0
    broadcast: bool = False
    variadic: bool = False

    @classmethod
    def parse(cls, text: str) -> Dim:
        if text == "...":
            return cls(variadic=True)
        if text == "_":
            return cls()
        if text.lstrip("-").isdigit():
            return cls(size=int(text))
        match = re.fullmatch(r"([#*]?)([A-Za-z_]\w*)(?:([+-]\d+))?", text)
        if match is None:
            raise TypeError(
                f"cannot read dim {text!r}: write a name, '#name', '*name', 'name+1', an integer, '_' or '...'"
            )
        mark, name, offset = match.groups()
        return cls(name=name, offset=int(offset or 0), broadcast=mark == "#", variadic=mark == "*")

    def __str__(self) -> str:
        if self.size is not None:
            return str(self.size)
        sign = f"{self.offset:+d}" if self.offset else ""
        return ("#" * self.broadcast + "*" * bool(self.variadic and self.name) + self.name + sign) or (
            "..." if self.variadic else "_"
        )


# Leading dims of operations that take any number of them.
LEADING = ("B", "T", "N")


def leading(count: int) -> tuple[str, ...]:
    """Returns the names of `count` leading dims: B, B T, or B T N, then "_" (unnamed, never split)."""
    return (*LEADING, *("_",) * count)[:count]


def named(dims: Iterable[Dim], ndim: int) -> tuple[str, ...]:
    """Returns a name for each dim of an array with `ndim` dims; `*lead` expands by `leading`; "_" if unnamed."""
    dims = tuple(dims)
    lead = ndim - len(dims) + 1

    def names(d: Dim) -> tuple[str, ...]:
        if d.variadic:
            return leading(lead) if d.name else ("_",) * lead
        return (d.name or "_",)

    return tuple(name for d in dims for name in names(d))


def check_vocabulary(owner: str, names: Iterable[str]) -> None:
    """Raises TypeError for dims that are not in the vocabulary."""
    unknown = sorted({n for n in names if n} - set(VOCABULARY))
    if unknown:
        raise TypeError(
            f"{owner}: dims {', '.join(unknown)} are not in the vocabulary ({', '.join(VOCABULARY)}); use the existing "
            "name with this meaning, or add the new meaning to kernels/framework/dims.py"
        )
