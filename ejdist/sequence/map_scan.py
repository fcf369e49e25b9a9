"""The scan of maps over the ranks and the runs of each: which state enters a run of tokens.

Sources: G. Blelloch, *Prefix Sums and Their Applications*, 1990 (a linear recurrence as a scan over pairs (A, b)); W. Hillis,
G. Steele, *Data Parallel Algorithms*, 1986 (the scan by doubling).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.sequence import exchange
from ejdist.sequence.runs import Runs
from kernels.framework.dispatch import vary_alike


class Maps(Protocol):
    """What an operation declares of its recurrence so that its sequence can be split. A map is a pytree of arrays [B, ...]."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        """Returns the state [B, ...] of a sequence that begins from nothing."""
        ...

    def combine(self, first: Any, then: Any) -> Any:
        """Returns the map that is `first`, followed by `then`."""
        ...

    def apply(self, over: Any, state: jax.Array) -> jax.Array:
        """Returns the state [B, ...] after a map."""
        ...


def entering(passing: Maps, over: Any, state: jax.Array, runs: Runs, hops: jax.Array | None) -> jax.Array:
    """Returns [rows, ...]: the states that enter this rank's runs.

    Args:
      over: the maps of its runs. state: [B, ...], that of the whole sequence.
    """
    over = jax.tree.map(runs.apart, over)
    ways = [(way, [*places]) for way, places in itertools.groupby(range(runs.count), lambda place: runs.ways[place])]
    mine = [jax.tree.map(lambda x, p=p: x[p[0] : p[-1] + 1].reshape(-1, *x.shape[2:]), over) for _, p in ways]
    each = exclusive_scans(passing, mine, [way for way, _ in ways], runs.axis, hops)
    before = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
    starts = state[None]  # [runs, B, ...], of each place
    if runs.count > 1:

        def place_after(s: jax.Array, of_place: Any) -> tuple[jax.Array, jax.Array]:
            s = passing.apply(of_place, s)
            return s, s

        every = [_of_all(passing.combine(b, m), *of, runs) for b, m, of in zip(each, mine, ways, strict=True)]
        totals = jax.tree.map(lambda *x: jnp.concatenate(x), *(maps for maps in every if maps is not None))
        state, totals = vary_alike((state, totals), exchange.rank(runs.axis))
        starts = jnp.concatenate([state[None], jax.lax.scan(place_after, state, totals)[1]])
    is_first = jnp.repeat(runs.here() % len(runs.parts) == 0, state.shape[0])
    starts = starts.reshape(-1, *state.shape[1:])
    return select(is_first, starts, passing.apply(before, starts))


def _of_all(over: Any, way: int, places: list[int], runs: Runs) -> Any:
    """Returns the maps [places, B, ...] of all ranks, of consecutive places whose runs go one way; nothing comes after the last
    place of all, whose map is left out, or None.

    Args:
      over: the maps [places * B, ...] up to and with the runs of this rank.
    """
    n, rank = exchange.size(runs.axis), exchange.rank(runs.axis)
    inner = len(places) - (places[-1] == runs.count - 1)
    if inner == 0:
        return None

    def of_all(x: jax.Array) -> jax.Array:
        x = x.reshape(len(places), -1, *x.shape[1:])[:inner]
        return jax.lax.psum(jnp.where(rank == (n - 1 if way > 0 else 0), x, 0), runs.axis)

    return jax.tree.map(of_all, over)


def exclusive_scans(
    passing: Maps, overs: list[Any], ways: list[int], axis: Any, hops: jax.Array | None = None
) -> list[Any]:
    """Returns the maps of all ranks before this one, of each of several scans; on the first rank they are undefined.

    log2(ranks) hops, in each of which a rank sends one map; then one more. Which hops are made is one choice for all scans: XLA
    for CPUs runs conditionals that do not wait for each other side by side, and then takes the transfer of one for that of
    another.

    Args:
      ways: of each scan 1, or -1, in which the last rank is the first.
      hops: how many of the first hops are made, the same on every device; default: all.
    """
    n, rank = jax.lax.axis_size(axis), exchange.rank(axis)

    def doubled(count: int, overs: list[Any]) -> list[Any]:
        for by in _steps(n)[:count]:
            joined = [passing.combine(exchange.shift(o, axis, way * by), o) for o, way in zip(overs, ways, strict=True)]
            overs = [
                select((rank if way > 0 else n - 1 - rank) >= by, new, old)
                for new, old, way in zip(joined, overs, ways, strict=True)
            ]
        return overs

    most = len(_steps(n))
    if hops is None or most == 0:
        overs = doubled(most, overs)
    else:
        overs = jax.lax.switch(hops, [functools.partial(doubled, count) for count in range(most + 1)], overs)
    return [exchange.shift(over, axis, way) for over, way in zip(overs, ways, strict=True)]


def _steps(ranks: int) -> list[int]:
    """Returns how far each hop of a scan by doubling goes. Nobody needs the last rank's map, so one more would add nothing."""
    return [2**i for i in range(max(ranks - 2, 0).bit_length())]


def needed_hops(through: jax.Array, runs: Runs) -> jax.Array | None:
    """Returns int32 []: how many hops of `exclusive_scans` are needed, since nothing is left of what is before a map that no
    state passes through; None where there are none. The same on every device: who parts ways before a collective waits.

    Args:
      through: bool [rows], of this rank's runs.
    """
    n = len(runs.parts)
    if not _steps(n):
        return None
    every = jax.lax.all_gather(runs.apart(through), runs.axis)  # [ranks, runs, B]
    every = jnp.where((np.array(runs.ways) > 0)[:, None], every, every[::-1])
    # Nothing is before the first rank, and nobody needs the map of the last.
    index = jnp.arange(n - 1).reshape(-1, 1, 1)
    longest = jnp.max(index - jax.lax.cummax(jnp.where(every[: n - 1] & (index > 0), -1, index), axis=0))
    hops = jnp.sum(longest >= np.array(_steps(n)), dtype=jnp.int32)
    return exchange.greatest(hops)


def select(condition: jax.Array, a: Any, b: Any) -> Any:
    """Returns a where the condition, one or one for each row, holds, else b; leaf by leaf."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        mask = condition if condition.ndim == 0 else condition.reshape(-1, *(1,) * (max(x.ndim, y.ndim) - 1))
        return jnp.where(mask, x, y)

    return jax.tree.map(one, a, b)
