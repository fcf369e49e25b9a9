"""The vocabulary of costs: what schemes, orders and the parts of a layer declare of themselves, and the planner adds up.

Each declares its own costs beside its code: a scheme of the sequence or of the experts `cost` and `memory`, an order its
`Balance`, a part of a layer `memory`, `traffic`, `flops` and `recomputed`. What declares none is refused by name
(`declared`); it is never costed as something else.
"""

from __future__ import annotations

from collections.abc import Collection
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
    """What a device sends: (axis, collective) -> bytes, and the number of collectives that carry them.

    waits: of those bytes and collectives, what no work runs beside; all that nobody says hides. passes: bytes of its own memory
    that a device reads and writes besides, to put together what was sent.
    """

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str], float] = {}
        self.calls: dict[tuple[str, str], float] = {}
        self.waits: dict[tuple[str, str], tuple[float, float]] = {}
        self.passes = 0.0

    def add(
        self, axis: str, collective: str, sent: float, calls: float = 1, waits: tuple[float, float] | None = None
    ) -> None:
        """Adds `sent` bytes, in `calls` collectives together, of which `waits` have no work beside them; None: all. Raises
        ValueError for one that is not in `COLLECTIVES`."""
        if collective not in COLLECTIVES:
            raise ValueError(f"collective = {collective!r} is unknown; use one of {', '.join(COLLECTIVES)}")
        key = axis, collective
        self.bytes[key] = self.bytes.get(key, 0) + sent
        self.calls[key] = self.calls.get(key, 0) + calls
        before, more = self.waits.get(key, (0, 0)), (sent, calls) if waits is None else waits
        self.waits[key] = before[0] + more[0], before[1] + more[1]

    def add_all(self, other: Traffic, times: int = 1) -> None:
        """Adds what another sends, `times` times."""
        for key, sent in other.bytes.items():
            waits = other.waits[key]
            self.add(*key, times * sent, times * other.calls[key], (times * waits[0], times * waits[1]))
        self.passes += times * other.passes

    def hidden(self, waited: float, passes: float) -> Traffic:
        """Returns it where so much of each transfer is waited for, from 0 to 1, and so many bytes are read and written."""
        hidden = Traffic()
        hidden.passes = passes
        for key, sent in self.bytes.items():
            hidden.add(*key, sent, self.calls[key], (waited * sent, waited * self.calls[key]))
        return hidden

    def over(self, axes: Collection[str]) -> Traffic:
        """Returns what of it is sent along some axes, and what is read and written."""
        some = Traffic()
        some.passes = self.passes
        for key, sent in self.bytes.items():
            if key[0] in axes:
                some.add(*key, sent, self.calls[key], self.waits[key])
        return some

    def waited(self) -> Traffic:
        """Returns what is waited for."""
        alone = Traffic()
        for key, (sent, calls) in self.waits.items():
            alone.add(*key, sent, calls)
        return alone

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
