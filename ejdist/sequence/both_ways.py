"""Both ways around a ring: half of the heads of keys go from each rank to the next, and the other half to the one before.

A link carries as many bytes in each direction at once, and a ring that goes one way uses one of them. Where devices are joined
to their neighbours, as TPUs are, both ways take half of the time. Where each is joined to a switch, as GPUs of a host are,
what is sent and what arrives fill both directions of its link already.

Heads are what is halved, and not tokens: a rank merges each of its queries' results once a hop either way, halves of a zigzag
have even work at every hop, and kernels see as many tokens as in one direction.

Sources: Wang et al., TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional
Communication, 2024 (arXiv:2412.20501), where queries go one way and results the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.order import AUTO
from ejdist.sequence import exchange
from ejdist.sequence.cost import AttentionShape
from ejdist.sequence.hops import Lap, Work, over_laps
from ejdist.sequence.local import Local
from ejdist.sequence.way import BY_BATCH

Arrays = dict[str, jax.Array]
_HEADS = ("N", "K")


def check(directions: Any, levels: int, hops: str) -> None:
    """Raises ValueError for directions that are not known, or that go with no such levels or hops."""
    if isinstance(directions, bool) or directions not in (1, 2, AUTO):
        raise ValueError(f"sequence.directions = {directions!r} is unknown; use 1, 2, or {AUTO}")
    if directions == 2 and levels != 1:
        why = f"is for one ring over all ranks, and sequence.levels = {levels}: leave one of the two out"
        raise ValueError(f"sequence.directions = 2 {why}")
    if directions == 2 and hops == BY_BATCH:
        why = f"makes all hops, and sequence.hops = {hops!r} only those that documents need: leave one of the two out"
        raise ValueError(f"sequence.directions = 2 {why}")


def asked(directions: int | str, local: Local, all_hops: bool) -> bool:
    """Returns whether a call goes both ways; `all_hops`: whether its ring has one level, and documents leave no hop out.

    Raises:
      ValueError: it should, and what travels has no heads that could be halved.
    """
    odd = next((n for n, x in local.keys.items() if (dim := _head(local, n, x)) is None or x.shape[dim] % 2), None)
    if directions == AUTO:
        every = local.hops == tuple(range(local.ranks))
        return all_hops and every and local.ranks > 2 and odd is None and exchange.on_torus()
    if directions == 1 or local.ranks == 1:
        return False
    if odd is not None:
        dim = _head(local, odd, local.keys[odd])
        heads = "none" if dim is None else local.keys[odd].shape[dim]
        raise ValueError(
            f"ring_attention: sequence.directions = 2 halves the heads of what travels, and {odd!r} has {heads} on a device: "
            f"use 1 or {AUTO}"
        )
    return all_hops


def goes(directions: int | str, shape: AttentionShape, all_hops: bool) -> bool:
    """Returns whether what a planned call sends goes both ways at once, see `asked`: not where hops are left out, of which both
    halves may go the same way, nor between two ranks, of which each is on both sides of the other."""
    every = all_hops and 2 <= shape.hops == shape.ranks - 1
    if directions == AUTO:
        return every and shape.torus and shape.kv_heads % 2 == 0 and not shape.latents
    return directions == 2 and every


def around(
    local: Local, saved: Arrays, work: Callable[[Local, Arrays], Work], dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Returns the results of `work(local, saved)` at every hop, by name, where the second half of the heads makes the hops in
    the opposite order."""
    one, *others = local.hops
    back = (one, *reversed(others)) if one == 0 else (*reversed(others), one)
    halves = [work(_half_of(local, half), {n: _half(local, n, x, half) for n, x in saved.items()}) for half in (0, 1)]
    laps = [Lap(half, way) for half, way in zip(halves, (local.hops, back), strict=True)]
    parts = [lap.work.results(*state) for lap, state in zip(laps, over_laps(laps, dtype), strict=True)]
    return {n: _joined(local, n, [results[n] for results in parts]) for n in parts[0]}


def _half_of(local: Local, half: int) -> Local:
    """Returns a call with the first half of its heads, or the second."""
    own, keys = ({n: _half(local, n, x, half) for n, x in of.items()} for of in (local.own, local.keys))
    # Behind a barrier, or what is cut is made twice, as hops want it and as a loop does, and both are held.
    own, keys = jax.lax.optimization_barrier((own, keys))
    return replace(local, own=own, keys=keys)


def _head(local: Local, name: str, x: jax.Array) -> int | None:
    """Returns which dim of an argument, of what is saved, or of an output are heads; None where it has none."""
    op = local.static.op
    dims = op.parameters[name].dims if name in op.parameters else op.saved_dims[name]
    return next((i for i, d in enumerate(dims) if d.name in _HEADS and not (d.broadcast and x.shape[i] == 1)), None)


def _half(local: Local, name: str, x: jax.Array, half: int) -> jax.Array:
    dim = _head(local, name, x)
    return x if dim is None else jnp.split(x, 2, dim)[half]


def _joined(local: Local, name: str, halves: list[jax.Array]) -> jax.Array:
    dim = _head(local, name, halves[0])
    assert dim is not None, name
    return jnp.concatenate(halves, dim)
