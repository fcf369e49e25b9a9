"""A ring of two levels: one inside of each group of ranks, and one between the groups, which have slower links.

A flat ring over several hosts crosses the network at every hop, for the ranks at the ends of a host: all wait for it. Here the
keys of a group go round inside of it, while those that it began with are on their way to the next group, which needs them only
when all of these are attended to.

Sources: Gu et al., LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism, 2024 (double-ring
attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import PERMUTE, Traffic
from ejdist.sequence import exchange
from ejdist.sequence.cost import AttentionShape, Axes
from ejdist.sequence.hops import over_hops
from ejdist.sequence.local import Local
from ejdist.sequence.way import BY_BATCH

Arrays = dict[str, jax.Array]
Body = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class _Inside(Local):
    """A call as the ring inside of a group sees it: its ranks, and the keys that the group has."""

    inner: str = ""

    @property
    def axis(self) -> exchange.Axis:
        return self.inner

    @property
    def ranks(self) -> int:
        return exchange.size(self.inner)

    @property
    def hops(self) -> tuple[int, ...]:
        return tuple(range(self.ranks))


def check(levels: Any, hops: str) -> None:
    """Raises ValueError for a number of levels that no ring has, or that does not go with its hops; names the remedy."""
    if levels not in (1, 2) or isinstance(levels, bool):
        raise ValueError(f"sequence.levels = {levels!r} is unknown; use 1, or 2 over mesh.cp and mesh.sp")
    if levels == 2 and hops == BY_BATCH:
        raise ValueError(
            f"sequence.levels = 2 makes all hops, and sequence.hops = {BY_BATCH!r} those that documents need: leave one of the "
            "two out"
        )


def refused(over: Axes) -> str | None:
    """Returns why a sequence over those axes can have no two levels, or None."""
    if len([n for _, n in over if n > 1]) > 1:
        return None
    return "sequence.levels = 2 is for a sequence over two axes, mesh.cp and mesh.sp, and this one is over one: leave it out"


def over_hops_by(levels: int) -> Callable[..., tuple[Any, Any]]:
    """Returns the loop over the hops of a ring of one or two levels."""
    return over_levels if levels == 2 else over_hops


def over_levels(local: Local, body: Body, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Returns (stay, travel) after `body` at every hop, as `hops.over_hops`: a group's keys go round inside of it before those
    of the next group do, which travel meanwhile. What is added for keys goes home inside of the group, and from group to group
    behind the keys.

    Args:
      local: of a call over several axes, of which the last one is inside of a group.
    """
    if len(local.hops) == 1:
        return over_hops(local, body, dtype)
    axes = (local.axis,) if isinstance(local.axis, str) else local.axis
    if why := refused(tuple((a, exchange.size(a)) for a in axes)):
        raise ValueError(f"ring_attention: {why}")
    outer, inner = axes[:-1], axes[-1]
    between = outer[0] if len(outer) == 1 else outer
    groups, size = math.prod(exchange.size(a) for a in outer), exchange.size(inner)
    group, place = exchange.rank(between), exchange.rank(inner)

    def inside(number: Any, keys: Arrays, stay: Any, last: bool) -> tuple[Any, Any]:
        """Returns (stay, the gradients of the group's keys that this rank had) after the ring inside of a group, over the keys
        of the group `number` places before this one."""
        is_mine = isinstance(number, int) and number == 0

        def visit(hop: Any, here: Arrays, sofar: Any, travel: Any, ends: bool) -> tuple[Any, Any]:
            holder = (group - number) % groups * size + (place - hop) % size
            flat = 0 if is_mine and isinstance(hop, int) and hop == 0 else (exchange.rank(axes) - holder) % local.ranks
            return body(flat, here, stay if sofar is None else sofar, travel, last and ends)

        known: dict[str, Any] = {f.name: getattr(local, f.name) for f in fields(Local)} | {"keys": keys, "needed": None}
        return over_hops(_Inside(**known, inner=inner), visit, dtype)

    def sums(grads: Any) -> Any:
        return None if grads is None else {n: x.astype(dtype or local.keys[n].dtype) for n, x in grads.items()}

    def visit(number: Any, state: Any, last: bool = False) -> Any:
        keys, stay, travel = state
        coming = keys if last else exchange.shift(keys, between, 1)
        moved = exchange.shift(travel, between, 1)
        stay, grads = inside(number, keys, stay, last)
        if moved is not None:
            grads = {n: x + grads[n] for n, x in moved.items()}
        return jax.lax.optimization_barrier((coming, stay, grads))

    (keys, stay, home), travel = visit(0, (local.travelling, None, None)), None
    if groups > 2:
        keys, stay, travel = visit(1, (keys, stay, None))
        state = keys, stay, sums(travel)

        def step(state: Any, number: Any) -> tuple[Any, None]:
            keys, stay, travel = visit(number, state)
            return (keys, stay, sums(travel)), None

        if groups > 3:
            state, _ = jax.lax.scan(step, state, jnp.arange(2, groups - 1))
        keys, stay, travel = state
    _, stay, travel = visit(groups - 1, (keys, stay, travel), True)
    if travel is None:
        return stay, None
    leaving = {n: x.astype(local.keys[n].dtype) for n, x in travel.items()}
    arrived = exchange.shift(leaving, between, 1)
    return stay, {n: x.astype(jnp.float32) + arrived[n] for n, x in home.items()}


def levels_of(shape: AttentionShape) -> tuple[tuple[str, int], tuple[str, int]]:
    """Returns (axis, how many) of the groups, and of the ranks inside of one."""
    over = [(axis, n) for axis, n in shape.over if n > 1]
    return (over[0][0], math.prod(n for _, n in over[:-1])), over[-1]


def traffic(shape: AttentionShape, wide: int) -> Traffic:
    """Returns what a rank sends, see `Scheme.cost`.

    Args:
      wide: how many times as large as what travels its gradients are, on their way.
    """
    sent, keys, passes = Traffic(), shape.travelling, shape.forwards + 1
    (between, groups), (inner, size) = levels_of(shape)
    # In each group's turn keys go round, and their gradients by other ranks follow by a hop and go home.
    sent.add(inner, PERMUTE, groups * passes * (size - 1) * keys, 2 * groups * passes * (size - 1))
    sent.add(inner, PERMUTE, groups * (wide * (size - 2) + 1) * keys, 2 * groups * (size - 1))
    sent.add(between, PERMUTE, passes * (groups - 1) * keys, 2 * passes * (groups - 1))
    sent.add(between, PERMUTE, (wide * (groups - 2) + 1) * keys, 2 * (groups - 1))
    return sent
