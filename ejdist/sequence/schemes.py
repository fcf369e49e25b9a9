"""Schemes of sequence parallelism: what travels between the ranks, and when. A scheme is a class here and its name below."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejdist.costs import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Traffic
from ejdist.order import Order
from ejdist.sequence import exchange, ulysses
from ejdist.sequence.cost import AttentionShape, Axes, SchemeBytes
from ejdist.sequence.local import Local, merge
from ejdist.sequence.reshard import undivided
from kernels.framework.binding import is_float_array


class Scheme:
    """The attention of a rank's queries over the keys of all ranks, forward and backward. Stateless, frozen, hashable.

    What every scheme needs is done around it: a scheme sees no sinks and is never differentiated, and `local` answers for
    masks and positions. Results are this rank's own.

    hides: whether its transfers run beside attention over keys that are there already. A scheme declares `hides`, `cost` and
    `memory` for the planner, which refuses one that does not.
    """

    hides: ClassVar[bool]

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse), float32, over all keys."""
        raise NotImplementedError

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradients of key, value and the floats of `local.own`, by name.

        `saved` has d_out, and the lse and delta of the whole softmax, so a part of the keys gives its part of the gradient.
        """
        raise NotImplementedError

    def rejects(self, heads: int, over: Axes) -> str | None:
        """Returns why it cannot have that many heads of queries on a device over a sequence that is split over those axes, or
        None."""
        return None

    def uneven(self, order: Order, over: Axes) -> Order:
        """Returns the order by which work is divided among what waits for each other: that of the ranks, unless some of them
        have even work whatever the mask and the documents."""
        return order

    def cost(self, shape: AttentionShape) -> Traffic:
        """Returns what a rank sends for one layer in one microbatch, forward and backward, by axis and collective."""
        raise NotImplementedError

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        """Returns the bytes that a rank holds for keys of other ranks and for sums over ranks. `shape.ranks` is at least 2."""
        raise NotImplementedError


def _over_hops(local: Local, body: Any, stay: Any, travel: Any) -> tuple[Any, Any]:
    """Returns (stay, travel) after `stay, travel = body(hop, keys, stay, travel)` at every hop.

    The keys are passed on, and `travel` follows them by a hop, beside a body that needs neither result until it adds to
    `travel`, so that both ways the transfers may hide under the work. After the last hop `travel` goes home. Evenly spaced
    hops are one loop, so a program does not grow with the ring; two sets of keys are alive at a time.
    """
    axis, hops = local.axis, local.hops
    gaps = [b - a for a, b in itertools.pairwise(hops)]

    def visit(hop: Any, state: Any, before: int, after: int) -> tuple[Any, Any, Any]:
        keys, stay, travel = state
        coming, moved = exchange.shift(keys, axis, after), exchange.shift(travel, axis, before)
        return coming, *body(hop, keys, stay, moved)

    state = exchange.shift(local.keys, axis, hops[0]), stay, travel
    state = visit(hops[0], state, 0, gaps[0] if gaps else 0)
    middle = hops[1:-1]
    if len(middle) > 1 and len(set(gaps)) == 1:
        state, _ = jax.lax.scan(lambda s, hop: (visit(hop, s, gaps[0], gaps[0]), None), state, jnp.asarray(middle))
    else:
        for hop, before, after in zip(middle, gaps, gaps[1:], strict=False):
            state = jax.lax.optimization_barrier(visit(hop, state, before, after))
    if gaps:
        state = visit(hops[-1], state, gaps[-1], 0)
    _, stay, travel = state
    return stay, exchange.shift(travel, axis, local.ranks - hops[-1])


def _nothing(local: Local) -> tuple[jax.Array, jax.Array]:
    """Returns the (out, lse) of no keys."""
    B, T, N, _ = local.query.shape
    return local.full((B, T, N, local.value.shape[3])), local.full((B, T, N), -jnp.inf)


def attended(local: Local, hop: Any, keys: dict[str, jax.Array], sofar: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), float32, of the keys so far and of those that are here at a hop: a hop's work, forward."""
    out, lse = sofar
    new_out, new_lse = local.attend_at(hop, keys)
    return merge(out, lse, new_out, new_lse)


def pulled(
    local: Local, saved: dict[str, jax.Array], hop: Any, keys: dict[str, jax.Array], own: Any, sums: Any
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (the gradients of what is the rank's own, those of the keys that are here at a hop), float32, with the hop's part
    added: a hop's work, backward."""
    grads = local.pull_at(hop, saved, keys)
    return {n: x + grads[n] for n, x in own.items()}, {n: x + grads[n] for n, x in sums.items()}


@dataclass(frozen=True)
class Ring(Scheme):
    """Keys and values travel around the ring, and their gradients with them: O(T / ranks) memory."""

    hides = True

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        def attend(hop: Any, keys: dict[str, jax.Array], sofar: Any, travel: Any) -> tuple[Any, Any]:
            return attended(local, hop, keys, sofar), travel

        return _over_hops(local, attend, _nothing(local), ())[0]

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def pull(hop: Any, keys: dict[str, jax.Array], grads: Any, sums: Any) -> tuple[Any, Any]:
            return pulled(local, saved, hop, keys, grads, sums)

        grads = {n: local.full(x.shape) for n, x in local.own.items() if is_float_array(x)}
        # The sums stay beside the keys that they belong to.
        sums = {"key": local.full(local.key.shape), "value": local.full(local.value.shape)}
        grads, sums = _over_hops(local, pull, grads, sums)
        return grads | sums

    def cost(self, shape: AttentionShape) -> Traffic:
        sent, keys = Traffic(), shape.key + shape.value
        if shape.hops:
            passes = shape.forwards + 1  # keys and values travel in the backward too
            sent.add(shape.axis, PERMUTE, passes * keys * shape.hops, 2 * passes * shape.hops)
            # Their gradients, in float32, follow them and go home.
            sent.add(shape.axis, PERMUTE, shape.float32 * keys * (shape.hops + 1), 2 * (shape.hops + 1))
        return sent

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return _held(shape, sets=2)


def _held(shape: AttentionShape, sets: int) -> SchemeBytes:
    """Returns the bytes of that many sets of keys and values, and of the sums over ranks of all gradients, in float32."""
    keys, wide = shape.key + shape.value, shape.float32
    # Two kernels, forward and backward, have sums of the size of their output.
    return SchemeBytes((sets + wide) * keys + wide * shape.query, gpu_zeros=2 * wide * shape.out)


def _over_gathered(local: Local, body: Any, state: Any) -> Any:
    """Returns the state after `state = body(hop, keys, state)` at every hop: of the rank's own keys, which need not wait for
    those of the others, and then of theirs, which are gathered meanwhile."""
    gathered, length = exchange.gather(local.keys, local.axis), local.query.shape[1]
    state = body(0, local.keys, state)

    def visit(state: Any, hop: Any) -> tuple[Any, None]:
        start = local.holder(hop) * length
        keys = {n: jax.lax.dynamic_slice_in_dim(x, start, length, 1) for n, x in gathered.items()}
        return body(hop, keys, state), None

    return jax.lax.scan(visit, state, jnp.asarray(local.hops[1:]))[0]


@dataclass(frozen=True)
class AllGather(Scheme):
    """Every rank gathers all keys and values, and the gradients are summed where they belong: O(T) memory, one exchange.

    Where hops are plain they run one by one, the first beside the exchange; else one attention takes all keys.
    """

    hides = False

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        if len(local.hops) == 1:  # no rank needs the keys of another, and a ring of one hop sends nothing
            return Ring().forward(local)
        if local.plain:
            return _over_gathered(local, functools.partial(attended, local), _nothing(local))
        out, lse = local.attend(*local.in_order(exchange.gather(local.keys, local.axis)))
        return out.astype(jnp.float32), lse

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if len(local.hops) == 1:
            return Ring().backward(local, saved)
        if local.plain:
            grads, parts = self._backward_of_hops(local, saved)
        else:
            grads = local.pull(saved, *local.in_order(exchange.gather(local.keys, local.axis)))
            parts = {n: local.of_ranks(grads[n].astype(jnp.float32)) for n in ("key", "value")}
        return grads | exchange.scatter_sum(parts, local.axis)

    def _backward_of_hops(self, local: Local, saved: dict[str, jax.Array]) -> tuple[dict, dict]:
        """Returns (the gradient of the rank's own queries, those of the keys and values of all ranks)."""
        length = local.query.shape[1]

        def pull(hop: Any, keys: dict[str, jax.Array], state: Any) -> tuple[Any, Any]:
            (query, parts), grads, start = state, local.pull_at(hop, saved, keys), local.holder(hop) * length

            def placed(n: str, x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(x, grads[n].astype(jnp.float32), start, 1)

            return query + grads["query"], {n: placed(n, x) for n, x in parts.items()}

        def whole(x: jax.Array) -> jax.Array:
            return local.full((x.shape[0], length * local.ranks, *x.shape[2:]))

        parts = {"key": whole(local.key), "value": whole(local.value)}
        query, parts = _over_gathered(local, pull, (local.full(local.query.shape), parts))
        return {"query": query}, parts

    def cost(self, shape: AttentionShape) -> Traffic:
        sent, passes = Traffic(), shape.forwards + 1  # the backward gathers keys and values again
        keys, others = shape.key + shape.value, shape.ranks - 1
        if shape.hops:
            sent.add(shape.axis, ALL_GATHER, passes * keys * others, 2 * passes)
            sent.add(shape.axis, REDUCE_SCATTER, shape.float32 * keys * others, 2)
        return sent

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return _held(shape, sets=shape.ranks)


@dataclass(frozen=True)
class Ulysses(Scheme):
    """Tokens are exchanged for heads over the last axis of the sequence: a rank attends whole sequences with its part of the
    heads, balanced whatever the mask and the documents. Over the axes before it, which may be slower, goes another scheme.

    Heads of keys that are fewer than the ranks are repeated.

    Attributes:
      outer: the scheme over the other axes.
      head_groups: of a rank's heads. One after the other is exchanged, each beside the attention of the one before, and no more
        than two are held.
    """

    outer: Scheme = Ring()
    head_groups: int = 1

    hides = False

    def __post_init__(self) -> None:
        if not isinstance(self.outer, Scheme):
            raise ValueError(f"Ulysses: argument 'outer' = {self.outer!r} must be a Scheme, such as Ring()")
        if isinstance(self.head_groups, bool) or not isinstance(self.head_groups, int) or self.head_groups < 1:
            raise ValueError(f"sequence.head_groups = {self.head_groups!r} must be an integer of at least 1")

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        return ulysses.forward(local, self.outer, self.head_groups)

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return ulysses.backward(local, saved, self.outer, self.head_groups)

    def rejects(self, heads: int, over: Axes) -> str | None:
        (axis, ranks), before = over[-1], over[:-1]
        outer = math.prod(n for _, n in before)
        if reason := undivided(heads, axis, ranks, self.head_groups, outer):
            return reason
        return self.outer.rejects(heads // ranks // self.head_groups, before) if before else None

    def uneven(self, order: Order, over: Axes) -> Order:
        return self.outer.uneven(order.of_groups(over[-1][1]), over[:-1])

    def cost(self, shape: AttentionShape) -> Traffic:
        return ulysses.traffic(shape, self.outer, self.head_groups)

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return ulysses.held(shape, self.outer, self.head_groups)


# The first is where a plan begins.
SCHEMES: dict[str, type[Scheme]] = {"ring": Ring, "all_gather": AllGather, "ulysses": Ulysses}


def scheme_of(scheme: str | Scheme, **options: Any) -> Scheme:
    """Returns the scheme by name, or the one given.

    Args:
      options: of the named scheme, such as `outer`, a scheme by name, or `head_groups`; None: its own default.

    Raises:
      ValueError: the name is unknown, or that scheme has no such option.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(
            f"ring_attention: argument 'scheme' = {scheme!r} is unknown; use one of {', '.join(SCHEMES)}, or a Scheme such as "
            "Ring()"
        )
    asked = {name: value for name, value in options.items() if value is not None}
    for name, value in asked.items():
        if name not in options_of(SCHEMES[scheme]):
            having = [other for other, made in SCHEMES.items() if name in options_of(made)]
            raise ValueError(
                f"sequence.{name} = {value!r} is no option of the scheme {scheme!r}: use sequence.scheme={having[0]}, or leave "
                "it out"
            )
    return SCHEMES[scheme](**{n: scheme_of(value) if n == "outer" else value for n, value in asked.items()})


def options_of(scheme: type[Scheme]) -> set[str]:
    """Returns the names of a scheme's options."""
    return {field.name for field in fields(scheme)} if is_dataclass(scheme) else set()
