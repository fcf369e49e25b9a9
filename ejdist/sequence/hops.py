"""The hops of a ring: the loop in which keys travel and gradients follow them, and the work of one hop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from ejdist.sequence.local import Local, without_padding
from ejdist.sequence.trips import over_needed
from kernels.engines.attention.softmax import merge
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import vary_alike


@dataclass(frozen=True)
class Work:
    """What a rank does at every hop of a ring.

    Attributes:
      body: see `over_hops`. results: of what `over_hops` returns, by name.
      brought: (placed, seen, stay, last) -> (stay, the gradients of these keys, or None): the work over the keys that a scheme
        puts together, and their mask, `placed()`, if any of them is `seen`. All of it is one conditional where it is not in
        place: a compiler would have transfers run beside what comes before and after a kernel.
    """

    local: Local
    body: Callable[..., tuple[Any, Any]]
    results: Callable[[Any, Any], dict[str, jax.Array]]
    brought: Callable[..., tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class Lap:
    """A way around a ring: the work, and the hops in the order in which they are made."""

    work: Work
    hops: tuple[int, ...]

    @property
    def local(self) -> Local:
        return self.work.local

    @property
    def gaps(self) -> list[int]:
        """By how many ranks keys are passed on after each hop."""
        return [(b - a) % self.local.ranks for a, b in itertools.pairwise(self.hops)]

    def passed_on(self, tree: Any, by: int) -> Any:
        return exchange.shift(tree, self.local.axis, by)


def over_hops(local: Local, body: Any, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Returns (stay, travel) after `stay, travel = body(hop, keys, stay, travel, last)` at every hop, or at those that a batch
    needs. Both are None at the first.

    The keys are passed on, and what travels follows them by a hop, beside a body that needs neither result until it adds to
    `travel`, so that both ways the transfers may hide under the work. What a rank adds for its own keys stays at home; what
    others add, sums in `dtype` or in that of the keys where it is None, begins with the first of them, and after the last hop
    goes home in the dtype of the keys.
    Evenly spaced hops are one loop, so a program does not grow with the ring; two sets of keys are alive at a time. Every rank
    sends at every hop, whether it has work there or not.
    """
    if local.needed is not None:
        return over_needed(local, body, dtype)
    work = Work(local, body, lambda stay, travel: {"stay": stay, "travel": travel})
    return over_laps([Lap(work, local.hops)], dtype)[0]


def over_laps(laps: Sequence[Lap], dtype: Any = jnp.float32) -> list[tuple[Any, Any]]:
    """Returns what `over_hops` returns, of each of several laps with as many hops, which are made side by side."""
    count, gaps, homes = len(laps[0].hops), [lap.gaps for lap in laps], None

    def visit(number: int | None, hops: Any, states: Any) -> Any:
        """At the hops of that number; None: at some between others, which are evenly spaced."""
        last = number == count - 1
        arrived = []  # all of it is on its way before anything is attended to
        for lap, gap, (keys, _, travel) in zip(laps, gaps, states, strict=True):
            before, after = (
                gap[:1] * 2 if number is None else (0 if not number else gap[number - 1], 0 if last else gap[number])
            )
            arrived.append((lap.passed_on(keys, after), lap.passed_on(travel, before)))
        states_after = []
        for lap, hop, (keys, stay, _), (coming, moved) in zip(laps, hops, states, arrived, strict=True):
            states_after.append((coming, *lap.work.body(hop, keys, stay, moved, last)))
        return tuple(states_after)

    def hops_at(number: int) -> tuple[int, ...]:
        return tuple(lap.hops[number] for lap in laps)

    def travels(states: Any) -> Any:
        return tuple(
            (keys, stay, None if sums is None else {n: x.astype(dtype or keys[n].dtype) for n, x in sums.items()})
            for keys, stay, sums in states
        )

    first = hops_at(0)
    states: Any = tuple(
        (lap.passed_on(lap.local.travelling, hop), None, None) for lap, hop in zip(laps, first, strict=True)
    )
    if count == 1:
        ends = visit(0, first, states)
        return [_home(lap, stay, travel, None) for lap, (_, stay, travel) in zip(laps, ends, strict=True)]
    # Behind barriers, or the compiler sends the keys of a later hop, which need no attention, beside those of this one.
    states, done = jax.lax.optimization_barrier(visit(0, first, states)), 1
    if is_own(first[0]) and states[0][2] is not None:
        homes = [{n: x.astype(keys[n].dtype) for n, x in own.items()} for keys, _, own in states]
        states = tuple((keys, stay, None) for keys, stay, _ in states)
        if count > 2:  # after it all hops are alike
            states, done = travels(jax.lax.optimization_barrier(visit(1, hops_at(1), states))), 2
    else:
        states = travels(states)
    if count - 1 - done > 1 and all(len(set(gap)) == 1 for gap in gaps):
        middle = tuple(jnp.asarray(lap.hops[done:-1]) for lap in laps)
        states = tuple((keys, widened(stay), travel) for keys, stay, travel in states)
        states, _ = jax.lax.scan(lambda s, hops: (visit(None, hops, s), None), states, middle)
    else:
        for number in range(done, count - 1):
            states = jax.lax.optimization_barrier(visit(number, hops_at(number), states))
    states = visit(count - 1, hops_at(count - 1), states)
    homes = homes or [None] * len(laps)
    ends = zip(laps, states, homes, strict=True)
    return [_home(lap, stay, travel, home) for lap, (_, stay, travel), home in ends]


def _home(lap: Lap, stay: Any, travel: Any, home: Any) -> tuple[Any, Any]:
    """Returns (stay, travel) with what others have added for this rank's keys, beside what it has itself."""
    if travel is None:
        return stay, None
    coming = {n: x.astype(lap.local.keys[n].dtype) for n, x in travel.items()}
    arrived = lap.passed_on(coming, lap.local.ranks - lap.hops[-1])
    return stay, arrived if home is None else {n: x.astype(jnp.float32) + arrived[n] for n, x in home.items()}


def widened(tree: Any) -> Any:
    """Returns what stays on a rank in float32, as what later hops add to is."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def attends(local: Local) -> Work:
    """Returns the work of a forward."""
    local, _ = without_padding(local)

    def body(hop: Any, keys: dict[str, jax.Array], sofar: Any, travel: Any, last: bool) -> tuple[Any, Any]:
        return attended(local, hop, keys, sofar, local.needed is None), travel

    def brought(placed: Any, seen: Any, sofar: Any, last: bool) -> tuple[Any, None]:
        def work() -> Any:
            out, lse = widened(sofar)
            return vary_alike(merge(out, lse, *local.attend_to(*placed())), local.query)

        return jax.lax.cond(seen, work, lambda: vary_alike(widened(sofar), local.query)), None

    return Work(local, body, lambda stay, _: dict(zip(("out", "lse"), widened(stay), strict=True)), brought)


def pulls(local: Local, saved: dict[str, jax.Array]) -> Work:
    """Returns the work of a backward."""
    local, saved = without_padding(local, saved)

    def body(hop: Any, keys: dict[str, jax.Array], grads: Any, sums: Any, last: bool) -> tuple[Any, Any]:
        return pulled(local, saved, hop, keys, grads, sums, local.needed is None)

    def brought(placed: Any, seen: Any, own: Any, last: bool) -> tuple[Any, Any]:
        like = jax.eval_shape(placed)[0]

        def work() -> Any:
            keys, mask = placed()
            grads = local.pull_from(saved, keys, mask)
            added = {n: x + grads[n] for n, x in widened(own).items()}
            return vary_alike((added, {n: grads[n].astype(x.dtype) for n, x in keys.items()}), local.query)

        def keep() -> Any:
            return vary_alike((widened(own), {n: jnp.zeros(x.shape, x.dtype) for n, x in like.items()}), local.query)

        return jax.lax.cond(seen, work, keep)

    return Work(local, body, lambda grads, sums: widened(grads) | sums, brought)


def _zeros(local: Local, names: Iterable[str]) -> dict[str, jax.Array]:
    """Returns gradients of nothing, float32."""
    arrays = {**local.keys, **local.own}
    return {n: local.full(arrays[n].shape) for n in names}


def _with(x: jax.Array, part: slice | None, new: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns x [B, T, ...] with `new` of a part of its tokens, or of all of it, in their place."""
    if part is None or part == slice(0, x.shape[1]):
        return new(x)
    return jax.lax.dynamic_update_slice_in_dim(x, new(x[:, part]), part.start, 1)


def attended(
    local: Local, hop: Any, keys: dict[str, jax.Array], sofar: Any, as_made: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), float32, of the keys so far, or of none where that is None, and of those that are here at a hop: a
    hop's work, forward. Where this rank sees none of them it is nothing.

    Args:
      as_made: out of a rank's own keys alone is in the dtype in which it was made. A pass over it is work that transfers would
        hide under, in the place of a kernel, and memory.
    """
    first = sofar is None
    if first and not is_own(hop):
        shape = (*local.query.shape[:3], local.sizes["Hv"])
        sofar, first = (local.full(shape), local.full(shape[:3], -jnp.inf)), False

    def work(queries: slice, part: slice) -> tuple[jax.Array, jax.Array]:
        new_out, new_lse = local.attend_at(hop, keys, queries, part)
        if first:
            return new_out if as_made else new_out.astype(jnp.float32), new_lse
        out, lse = widened(sofar)
        merged = merge(out[:, queries], lse[:, queries], new_out, new_lse)
        return _with(out, queries, lambda _: merged[0]), _with(lse, queries, lambda _: merged[1])

    return local.at_hop(hop, work, lambda: widened(sofar))


def pulled(
    local: Local,
    saved: dict[str, jax.Array],
    hop: Any,
    keys: dict[str, jax.Array],
    own: Any,
    sums: Any,
    as_made: bool = False,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (the gradients of what is the rank's own, those of the keys that are here at a hop), with the hop's part added:
    a hop's work, backward. They are float32; those of the keys have their dtype where `sums` is None, nothing yet. `as_made` as
    of `attended`.

    What is added to `sums` is a second conditional, so that the first, which attends, need not wait until they arrive.
    """
    floats, names = [n for n, x in local.own.items() if is_float_array(x)], [*local.keys]
    if own is None and not is_own(hop):
        own = _zeros(local, floats)

    def work(queries: slice, part: slice) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        grads = local.pull_at(hop, saved, keys, queries, part)
        of_keys = {n: _padded(grads[n].astype(keys[n].dtype), part, keys[n].shape[1]) for n in names}
        if own is None:
            return {n: grads[n] if as_made else grads[n].astype(jnp.float32) for n in floats}, of_keys
        places = {n: queries for n in own if local.has_rows(n)}
        sofar = widened(own)
        return {n: _with(x, places.get(n), lambda y, n=n: y + grads[n]) for n, x in sofar.items()}, of_keys

    added, grads = local.at_hop(hop, work, lambda: (widened(own), {n: jnp.zeros_like(keys[n]) for n in names}))
    if sums is None:
        return added, grads

    def add(queries: slice, part: slice) -> dict[str, jax.Array]:
        return {n: _with(x, part, lambda y, n=n: y + grads[n][:, part]) for n, x in sums.items()}

    return added, local.at_hop(hop, add, lambda: sums)


def _padded(x: jax.Array, part: slice, length: int) -> jax.Array:
    """Returns an array [B, length, ...] that has x at a part of the tokens, and zeros elsewhere."""
    if part == slice(0, length):
        return x
    return jnp.pad(x, [(0, 0), (part.start, length - part.stop), *((0, 0),) * (x.ndim - 2)])


def is_own(hop: Any) -> bool:
    return isinstance(hop, int) and hop == 0
