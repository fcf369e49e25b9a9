"""The hops of a ring that the documents of a batch need: which they are, the same on all devices, and the way over them.

Packed documents end, so a batch needs few of the hops that a mask's rules allow. Which ones is known at run time only, and
shapes are static, so this is a loop of as many turns as a batch needs. Every device of the mesh decides by the same numbers, or
a transfer would wait forever.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from ejdist.sequence.local import Local
from ejdist.sequence.way import Way
from kernels.framework.dispatch import vary_alike


def jumps(local: Local) -> bool:
    """Whether a rank may need keys of ranks both before and after it. It does not where the text continues from each rank to
    the next and no query sees later keys."""
    return local.ranks > 2 and not (local.mask.causal and local.static.order.goes_on)


def over_needed(local: Local, at_hop: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns what `hops.over_hops` returns, after `at_hop` at the hops that `local.needed` names, and at those on the way.

    Each is beside the transfer to the next. A rank's own keys come by themselves, since without a hop that is all; so does the
    first hop of a backward, at which the sums begin that follow the keys.
    """
    axis, n, way = local.axis, local.ranks, Way.of(local.needed, jumps(local))
    last = way.last

    def body(hop: Any, *state: Any) -> tuple[Any, Any]:
        # Under a caller's vmap a conditional of the body is a selection, whose operands must vary over ranks before it.
        return at_hop(hop if isinstance(hop, int) else vary_alike(hop, local.query), *state)

    def one_on(tree: Any) -> Any:
        return exchange.shift(tree, axis, 1)

    def sums(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x.astype(dtype or local.keys[name].dtype) for name, x in grads.items()}

    def visit(hop: Any, keys: Any, stay: Any, travel: Any) -> tuple[Any, ...]:
        # Behind a barrier, or the compiler sends the keys of a later hop, which need no attention, beside those of this one.
        moved = one_on(keys), one_on(travel)
        coming, stay, travel = jax.lax.optimization_barrier((moved[0], *body(hop, keys, stay, moved[1], False)))
        hop, (coming, travel) = way.next(hop, (coming, None if travel is None else sums(travel)), axis)
        return hop, *vary_alike((coming, stay, travel), local.query)

    def rest(hop: Any, keys: Any, stay: Any, travel: Any) -> tuple[Any, Any]:
        """Returns (stay, travel) after this hop and all that come after it."""
        state = hop, *vary_alike((keys, stay, travel), local.query)
        _, keys, stay, travel = jax.lax.while_loop(lambda s: s[0] != last, lambda s: visit(*s), state)
        return body(last, keys, stay, one_on(travel), True)

    def alone() -> tuple[Any, Any]:
        return body(0, local.travelling, None, None, True)

    def around() -> tuple[Any, Any]:
        moved = one_on(local.travelling)
        coming, stay, home = jax.lax.optimization_barrier((moved, *body(0, local.travelling, None, None, False)))
        hop, coming = way.next(jnp.int32(0), coming, axis)
        if home is None:
            return rest(hop, coming, stay, None)
        home = {name: x.astype(local.keys[name].dtype) for name, x in home.items()}

        def one() -> tuple[Any, Any]:
            stayed, travel = body(hop, coming, stay, None, True)
            return vary_alike((stayed, sums(travel)), local.query)

        def several() -> tuple[Any, Any]:
            stayed, travel = rest(*visit(hop, coming, stay, None))
            return vary_alike((stayed, sums(travel)), local.query)

        stay, travel = jax.lax.cond(hop == last, one, several)
        leaving = {name: x.astype(local.keys[name].dtype) for name, x in travel.items()}
        ways = [functools.partial(exchange.shift, axis=axis, by=n - hop) for hop in range(1, n)]
        arrived = jax.lax.switch(last - 1, ways, leaving)
        return stay, {name: x.astype(jnp.float32) + arrived[name] for name, x in home.items()}

    def whole(function: Any) -> Any:
        def run() -> tuple[Any, Any]:
            stay, travel = function()
            wide = None if travel is None else {name: x.astype(jnp.float32) for name, x in travel.items()}
            return vary_alike((stay, wide), local.query)

        return run

    return jax.lax.cond(last > 0, whole(around), whole(alone))


def gathered(local: Local) -> dict[str, jax.Array]:
    """Returns the keys of all ranks, in the order of the ranks: of those that this rank sees none of, zeros or their own."""
    if local.needed is None:
        return exchange.gather(local.keys, local.axis)
    axis, length, way = local.axis, local.query.shape[1], Way.of(local.needed, jumps(local))

    def placed(every: Any, keys: Any, hop: Any) -> Any:
        start = local.holder(hop) * length
        return {n: jax.lax.dynamic_update_slice_in_dim(x, keys[n], start, 1) for n, x in every.items()}

    def visit(hop: Any, keys: Any, every: Any) -> tuple[Any, Any, Any]:
        hop, keys = way.next(hop, exchange.shift(keys, axis, 1), axis)
        return hop, *vary_alike((keys, placed(every, keys, hop)), local.query)

    def by_hops() -> Any:
        none = {n: jnp.zeros_like(x, shape=(x.shape[0], length * local.ranks, *x.shape[2:])) for n, x in keys.items()}
        state = vary_alike((keys, placed(vary_alike(none, local.query), keys, 0)), local.query)
        return jax.lax.while_loop(lambda s: s[0] != way.last, lambda s: visit(*s), (jnp.int32(0), *state))[2]

    keys = vary_alike(local.keys, local.query)
    return jax.lax.cond(
        way.sent < local.ranks - 1, by_hops, lambda: vary_alike(exchange.gather(keys, axis), local.query)
    )


def over_gathered(local: Local, body: Any) -> Any:
    """Returns the state after `state = body(hop, keys, state)` at every hop: of the rank's own keys, with no state, which need
    not wait for those of the others, and then of theirs, which are gathered meanwhile."""
    every, length = exchange.gather(local.keys, local.axis), local.query.shape[1]
    state = body(0, local.keys, None)

    def visit(state: Any, hop: Any) -> tuple[Any, None]:
        start = local.holder(hop) * length
        keys = {n: jax.lax.dynamic_slice_in_dim(x, start, length, 1) for n, x in every.items()}
        return body(hop, keys, state), None

    return jax.lax.scan(visit, state, jnp.asarray(local.hops[1:]))[0]


def scattered(local: Local, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns this rank's part of the sums over all ranks, of arrays [B, ranks * T, ...] that are zero for ranks of which this
    one sees no key: the transpose of `gathered`."""
    if local.needed is None:
        return exchange.scatter_sum(parts, local.axis)
    axis, length, way = local.axis, local.query.shape[1], Way.of(local.needed, jumps(local))

    def of(hop: Any) -> Any:
        return {n: jax.lax.dynamic_slice_in_dim(x, local.holder(hop) * length, length, 1) for n, x in parts.items()}

    def visit(hop: Any, sums: Any) -> tuple[Any, Any]:
        before, sums = way.before(hop, exchange.shift(sums, axis, -1), axis)
        return before, vary_alike({n: x + sums[n] for n, x in of(before).items()}, local.query)

    def by_hops() -> Any:
        state = way.last, vary_alike(of(way.last), local.query)
        return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: visit(*s), state)[1]

    parts = vary_alike(parts, local.query)
    return jax.lax.cond(
        way.sent < local.ranks - 1, by_hops, lambda: vary_alike(exchange.scatter_sum(parts, axis), local.query)
    )
