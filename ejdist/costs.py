"""The vocabulary of costs: what schemes, orders and the parts of a layer declare of themselves, and the planner adds up.

Each declares its own costs beside its code: a scheme of the sequence or of the experts `cost` and `memory`, an order its
`Balance`, a part of a layer `memory`, `traffic`, `flops` and `recomputed`. What declares none is refused by name
(`declared`); it is never costed as something else.
"""

from __future__ import annotations

from typing import Any

from ejdist.mesh import AXES

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
ALL_TO_ALL, RAGGED_ALL_TO_ALL, PERMUTE = "all_to_all", "ragged_all_to_all", "permute"
# Half of the bytes to the next rank and half to the one before, at once.
PERMUTE_BOTH = "permute_both"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, RAGGED_ALL_TO_ALL, PERMUTE, PERMUTE_BOTH)
# What stands for an axis where it goes over TPU slices, beside the part of it inside of one.
NETWORK = "network"


class Undeclared(ValueError):
    """A scheme, an order or a part does not declare what it costs; the message names it and what to declare."""


class Traffic:
    """What a device sends: (axis, collective) -> bytes, and the number of collectives that carry them."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str], float] = {}
        self.calls: dict[tuple[str, str], float] = {}

    def add(self, axis: str, collective: str, sent: float, calls: float = 1) -> None:
        """Adds `sent` bytes, in `calls` collectives together. Raises ValueError for one that is not in `COLLECTIVES`."""
        if collective not in COLLECTIVES:
            raise ValueError(f"collective = {collective!r} is unknown; use one of {', '.join(COLLECTIVES)}")
        key = axis, collective
        self.bytes[key] = self.bytes.get(key, 0) + sent
        self.calls[key] = self.calls.get(key, 0) + calls

    def add_all(self, other: Traffic, times: int = 1) -> None:
        """Adds what another sends, `times` times."""
        for (axis, collective), sent in other.bytes.items():
            self.add(axis, collective, times * sent, times * other.calls[axis, collective])

    def without(self, other: Traffic, times: int = 1) -> Traffic:
        """Returns what is left where another, a part of it, is taken away `times` times."""
        left = Traffic()
        for key, sent in self.bytes.items():
            if (rest := sent - times * other.bytes.get(key, 0)) > 0:
                left.add(*key, rest, self.calls[key] - times * other.calls.get(key, 0))
        return left

    def along(self) -> dict[str, int]:
        """Returns axis -> bytes, of the axes along which something is sent."""
        sums = {axis: sum(n for (a, _), n in self.bytes.items() if a == axis) for axis in (*AXES, NETWORK)}
        return {axis: int(n) for axis, n in sums.items() if n}


def declared(owner: Any, member: str, changed_by: tuple[str, ...], what: str) -> Any:
    """Returns `owner.member`, a cost that its class declares.

    Args:
      changed_by: the methods whose behaviour the cost describes. A class that overrides one of them declares the cost again:
        what it inherits is the cost of another.
      what: what the member is or returns, for the message.

    Raises:
      Undeclared: the class, or the one that it inherits the behaviour from, declares no such cost.
    """
    classes = type(owner).__mro__

    def declares(name: str) -> int:
        return next((i for i, c in enumerate(classes) if name in vars(c)), len(classes))

    behaves = min(map(declares, changed_by))
    if declares(member) > behaves:
        name, where = type(owner).__name__, classes[behaves].__name__
        raise Undeclared(f"{name} does not declare what it costs: add {member!r} to class {where}, {what}")
    return getattr(owner, member)
