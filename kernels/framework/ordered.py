"""Whether a call depends on the order in which tokens lie in its arrays, beyond that its result lies in the same order."""

from __future__ import annotations

from kernels.framework.backend import Operation
from kernels.framework.binding import Call

# The dims along which tokens have an order. Those of other dims are named by arguments: rows of groups, entries of pages.
SEQUENCE = ("T", "S")


def whole_dims(op: Operation) -> tuple[str, ...]:
    """Returns the dims of the sequence along which tokens are not independent of each other: neither local nor summed over."""
    dims = {d.name for p in op.parameters.values() for d in p.dims}
    return tuple(d for d in SEQUENCE if d in dims - op.local_dims - op.sum_dims)


def depends_on_order(op: Operation, call: Call) -> bool:
    """Returns whether another order of the tokens gives other results, and not the same ones in that order."""
    if all(call.dims.get(d, 1) == 1 for d in whole_dims(op)):
        return False
    return bool(op.ordered(call) if callable(op.ordered) else op.ordered)
