"""Whether the result of a call depends on the order of its tokens, other than by being in the same order."""

from __future__ import annotations

from kernels.framework.backend import Operation
from kernels.framework.binding import Call

# The dims along which tokens have an order. Along other dims, arguments identify entries: groups of rows, pages.
SEQUENCE = ("T", "S")


def whole_dims(op: Operation) -> tuple[str, ...]:
    """Returns the sequence dims along which tokens interact: neither local nor summed over."""
    dims = {d.name for p in op.parameters.values() for d in p.dims}
    return tuple(d for d in SEQUENCE if d in dims - op.local_dims - op.sum_dims)


def depends_on_order(op: Operation, call: Call) -> bool:
    """Returns whether permuting the tokens changes the result beyond permuting it."""
    if all(call.dims.get(d, 1) == 1 for d in whole_dims(op)):
        return False
    return bool(op.ordered(call) if callable(op.ordered) else op.ordered)
