"""The hops of a ring: the loop in which keys travel and gradients follow them, and the work of one hop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from ejdist.sequence.local import Local
from ejdist.sequence.trips import over_needed
from kernels.engines.attention.softmax import merge
from kernels.framework.binding import is_float_array


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
    axis, hops = local.axis, local.hops
    gaps, home = [b - a for a, b in itertools.pairwise(hops)], None

    def visit(hop: Any, state: Any, before: int, after: int) -> tuple[Any, Any, Any]:
        keys, stay, travel = state
        coming, moved = exchange.shift(keys, axis, after), exchange.shift(travel, axis, before)
        return coming, *body(hop, keys, stay, moved, isinstance(hop, int) and hop == hops[-1])

    state = exchange.shift(local.travelling, axis, hops[0]), None, None

    def travels(state: Any) -> Any:
        keys, stay, travel = state
        of = None if travel is None else {n: x.astype(dtype or keys[n].dtype) for n, x in travel.items()}
        return keys, stay, of

    # Behind barriers, or the compiler sends the keys of a later hop, which need no attention, beside those of this one.
    state, done = jax.lax.optimization_barrier(visit(hops[0], state, 0, gaps[0] if gaps else 0)), 1
    if gaps and is_own(hops[0]) and state[2] is not None:
        home, state = {n: x.astype(local.keys[n].dtype) for n, x in state[2].items()}, (*state[:2], None)
        if len(hops) > 2:  # after it all hops are alike
            state, done = travels(jax.lax.optimization_barrier(visit(hops[1], state, gaps[0], gaps[1]))), 2
    elif gaps:
        state = travels(state)
    middle = hops[done:-1]
    if len(middle) > 1 and len(set(gaps)) == 1:
        state, _ = jax.lax.scan(lambda s, hop: (visit(hop, s, gaps[0], gaps[0]), None), state, jnp.asarray(middle))
    else:
        for hop, before, after in zip(middle, gaps[done - 1 :], gaps[done:], strict=False):
            state = jax.lax.optimization_barrier(visit(hop, state, before, after))
    if gaps:
        state = visit(hops[-1], state, gaps[-1], 0)
    _, stay, travel = state
    if travel is None:
        return stay, None
    coming = {n: x.astype(local.keys[n].dtype) for n, x in travel.items()}
    arrived = exchange.shift(coming, axis, local.ranks - hops[-1])
    return stay, arrived if home is None else {n: x.astype(jnp.float32) + arrived[n] for n, x in home.items()}


def _zeros(local: Local, names: Iterable[str]) -> dict[str, jax.Array]:
    """Returns gradients of nothing, float32."""
    arrays = {**local.keys, **local.own}
    return {n: local.full(arrays[n].shape) for n in names}


def _with(x: jax.Array, part: slice | None, new: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns x [B, T, ...] with `new` of a part of its tokens, or of all of it, in their place."""
    if part is None or part == slice(0, x.shape[1]):
        return new(x)
    return jax.lax.dynamic_update_slice_in_dim(x, new(x[:, part]), part.start, 1)


def attended(local: Local, hop: Any, keys: dict[str, jax.Array], sofar: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), float32, of the keys so far, or of none where that is None, and of those that are here at a hop: a
    hop's work, forward. Where this rank sees none of them it is nothing."""
    first = sofar is None
    if first and not is_own(hop):
        shape = (*local.query.shape[:3], local.sizes["Hv"])
        sofar, first = (local.full(shape), local.full(shape[:3], -jnp.inf)), False

    def work(queries: slice, part: slice) -> tuple[jax.Array, jax.Array]:
        new_out, new_lse = local.attend_at(hop, keys, queries, part)
        if first:
            return new_out.astype(jnp.float32), new_lse
        out, lse = sofar
        merged = merge(out[:, queries], lse[:, queries], new_out, new_lse)
        return _with(out, queries, lambda _: merged[0]), _with(lse, queries, lambda _: merged[1])

    return local.at_hop(hop, work, lambda: sofar)


def pulled(
    local: Local, saved: dict[str, jax.Array], hop: Any, keys: dict[str, jax.Array], own: Any, sums: Any
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (the gradients of what is the rank's own, those of the keys that are here at a hop), with the hop's part added:
    a hop's work, backward. They are float32; those of the keys have their dtype where `sums` is None, nothing yet.

    What is added to `sums` is a second conditional, so that the first, which attends, need not wait until they arrive.
    """
    floats, names = [n for n, x in local.own.items() if is_float_array(x)], [*local.keys]
    if own is None and not is_own(hop):
        own = _zeros(local, floats)

    def work(queries: slice, part: slice) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        grads = local.pull_at(hop, saved, keys, queries, part)
        of_keys = {n: _padded(grads[n].astype(keys[n].dtype), part, keys[n].shape[1]) for n in names}
        if own is None:
            return {n: grads[n].astype(jnp.float32) for n in floats}, of_keys
        places = {n: queries for n in own if local.has_rows(n)}
        return {n: _with(x, places.get(n), lambda y, n=n: y + grads[n]) for n, x in own.items()}, of_keys

    added, grads = local.at_hop(hop, work, lambda: (own, {n: jnp.zeros_like(keys[n]) for n in names}))
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
