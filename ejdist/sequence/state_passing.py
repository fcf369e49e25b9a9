"""Recurrences over a sequence that is split over mesh axes: each rank learns the state that enters it, and does its own part.

What a rank does to a state is a map, S_out = A(S_in) + b for a linear recurrence. Its size does not depend on how many tokens
the rank has. The maps are composed by a prefix scan over the ranks, log2(ranks) hops of one map each; the state that enters a
rank is the initial state after the maps before it. All parts are differentiable, so the derivative is JAX's.

Sources: G. Blelloch, *Prefix Sums and Their Applications*, 1990 (a linear recurrence as a scan over pairs (A, b)); W. Hillis,
G. Steele, *Data Parallel Algorithms*, 1986 (the scan by doubling); W. Sun et al., *Linear Attention Sequence Parallelism*,
2024, arXiv:2404.02882 (states passed between ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from kernels.engines.scan.recurrence import last_run, last_valid_before
from kernels.framework.binding import is_traced_argument
from kernels.framework.contract import Op
from kernels.framework.dispatch import vary_alike


class Passing(Protocol):
    """What an operation declares of its recurrence so that its sequence can be split. A map is a pytree of arrays [B, ...]."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        """Returns the state [B, ...] of a sequence that begins from nothing."""
        ...

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        """Returns the map of this rank's valid tokens (bool [B, T]), one sequence without a beginning; of none: the identity.

        Args:
          arguments: those of the contract that the call has, arrays and options, but segment_ids, initial_state and num_states.
        """
        ...

    def combine(self, first: Any, then: Any) -> Any:
        """Returns the map that is `first`, followed by `then`."""
        ...

    def apply(self, over: Any, state: jax.Array) -> jax.Array:
        """Returns the state [B, ...] after a map."""
        ...

    def constant(self, state: jax.Array, like: Any) -> Any:
        """Returns the map, of the structure and shapes of `like`, after which the state is this one, whatever it was."""
        ...


@dataclass(frozen=True)
class Linear:
    """S_out = A * S_in + b with A elementwise (it broadcasts against the state): decays. Maps are pairs (A, b).

    A subclass has `start` and `summary`. One whose A is a matrix overrides `times`, and `after` where that is not the same.
    """

    def times(self, a: jax.Array, state: jax.Array) -> jax.Array:
        """Returns A applied to a state."""
        return a * state

    def after(self, then: jax.Array, first: jax.Array) -> jax.Array:
        """Returns the A of `first` followed by `then`."""
        return self.times(then, first)

    def combine(self, first: Any, then: Any) -> Any:
        (a, b), (c, d) = first, then
        return self.after(c, a), self.times(c, b) + d

    def apply(self, over: Any, state: jax.Array) -> jax.Array:
        a, b = over
        return self.times(a, state) + b

    def constant(self, state: jax.Array, like: Any) -> Any:
        return jnp.zeros_like(like[0]), state


@dataclass(frozen=True)
class StatePassing:
    """What runs on a shard: `sharded(function, local=StatePassing(op, passing), handles=("T",))`.

    Attributes:
      op: a recurrence with the contract's form of `kernels/engines/scan/recurrence.py`; outputs (out, final_state).
      passing: hashable, as a frozen dataclass without fields is.
    """

    op: Op
    passing: Passing

    def __call__(
        self, axes: dict[str, tuple[str, ...]], *, platform: Any = None, cfg: Any = None, **arguments: Any
    ) -> Any:
        axis = axes["T"]
        if not axis:
            return self.op(**arguments, platform=platform, cfg=cfg)
        ids, initial = arguments.pop("segment_ids", None), arguments.pop("initial_state", None)
        num_states = arguments.pop("num_states", 1)
        options = {n: x for n, x in arguments.items() if not is_traced_argument(x)}
        arguments = {n: x for n, x in arguments.items() if n not in options}
        first = next(p.name for p in self.op.parameters.values() if [d.name for d in p.dims[:2]] == ["B", "T"])
        B, T = arguments[first].shape[:2]
        if ids is None:
            ids = jnp.zeros((B, T), jnp.int32)
        arguments, ids, _ = vary_alike((arguments, ids, exchange.rank(axis)))
        start = self.passing.start(arguments)
        if initial is None:
            initial = jnp.repeat(start[:, None], num_states, axis=1)
        initial, start = vary_alike((initial.astype(start.dtype), start), ids)
        set_options = {n: x for n, x in options.items() if x is not None}
        enters = entering(self.passing, {**arguments, **set_options}, ids, initial, start, axis)
        arguments |= {"segment_ids": ids, "initial_state": enters, "num_states": num_states}
        out, final = self.op(**arguments, **options, platform=platform, cfg=cfg)
        return out, _ends(ids, final, axis)


def entering(
    passing: Passing, arguments: dict[str, Any], ids: jax.Array, initial: jax.Array, start: jax.Array, axis: Any
) -> jax.Array:
    """Returns the initial states [B, G, ...] of this rank's part: with the one that the rank before it hands over.

    Args:
      ids: this rank's [B, T].
      initial: [B, G, ...], of the whole sequence.
      start: [B, ...], of a segment that begins from nothing.
    """
    rows, several = jnp.arange(ids.shape[0]), initial.shape[1] > 1
    nothing = jnp.all(ids < 0, axis=1)  # of this row on this rank
    tail, whole = last_run(ids)
    first = _first_valid(ids)
    before = _last_id_before(ids, axis)
    # One state: a row that has begun nowhere yet begins here from its initial state, which the maps pass on.
    goes_on = (before == first) & (before >= 0) if several else (before == first) | (before < 0)
    goes_on |= nothing
    over = passing.summary(arguments, tail)
    mine = initial[rows, jnp.clip(_last_valid(ids), 0, None)] if several else start
    over = _select(whole & goes_on, over, passing.constant(passing.apply(over, mine), over))
    state = passing.apply(exclusive_scan(passing, over, axis), initial[:, 0])
    state = jnp.where(exchange.rank(axis) == 0, initial[:, 0], state)
    if not several:
        return _select(goes_on, state, start)[:, None]
    segment = jnp.maximum(first, 0)
    return initial.at[rows, segment].set(_select(goes_on & ~nothing, state, initial[rows, segment]))


def exclusive_scan(passing: Passing, over: Any, axis: Any) -> Any:
    """Returns the map of all ranks before this one; on the first rank it is undefined.

    log2(ranks) hops, in each of which a rank sends one map; then one more.
    """
    n, rank, by = jax.lax.axis_size(axis), exchange.rank(axis), 1
    while by < n - 1:  # the last rank's own map is not needed, so the last hop would add nothing
        joined = passing.combine(exchange.shift(over, axis, by), over)
        over = _select(rank >= by, joined, over)
        by *= 2
    return exchange.shift(over, axis, 1)


def halo(tree: Any, axis: Any, size: int) -> Any:
    """Returns the last `size` tokens before this rank's own, [B, size, ...] of arrays [B, T, ...]; 0 before the first rank, and
    -1 in integers, which are segment ids. A rank with fewer tokens than that hands on those of the ranks before it, hop by hop.
    """
    n, rank = jax.lax.axis_size(axis), exchange.rank(axis)

    def of(x: jax.Array) -> jax.Array:
        fill, parts, hop = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0, [], 0
        while (missing := size - sum(part.shape[1] for part in parts)) > 0:
            hop += 1
            if hop >= n:  # there is nothing farther away
                nothing = jnp.full((x.shape[0], missing, *x.shape[2:]), fill, x.dtype)
                parts.append(vary_alike((nothing, x))[0])
                break
            part = exchange.shift(x[:, max(0, x.shape[1] - missing) :], axis, hop)
            parts.append(jnp.where(rank >= hop, part, jnp.asarray(fill, x.dtype)))
        return jnp.concatenate(parts[::-1], axis=1) if parts else x[:, :0]

    return jax.tree.map(of, tree)


def _select(condition: jax.Array, a: Any, b: Any) -> Any:
    """Returns a where the condition, one or one for each row, holds, else b; leaf by leaf."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        mask = condition if condition.ndim == 0 else condition.reshape(-1, *(1,) * (max(x.ndim, y.ndim) - 1))
        return jnp.where(mask, x, y)

    return jax.tree.map(one, a, b)


def _first_valid(ids: jax.Array) -> jax.Array:
    """Returns [B]: the id of the first valid token, -1 where there is none."""
    index = jnp.argmax(ids >= 0, axis=1)
    return jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0].clip(-1)


def _last_valid(ids: jax.Array) -> jax.Array:
    return _first_valid(ids[:, ::-1])


def _last_id_before(ids: jax.Array, axis: Any) -> jax.Array:
    """Returns [B]: the id of the last valid token on a rank before this one, -1 where there is none."""
    every = jax.lax.all_gather(_last_valid(ids), axis, axis=1)  # [B, ranks]
    return last_valid_before(every)[:, exchange.rank(axis)]


def _ends(ids: jax.Array, final: jax.Array, axis: Any) -> jax.Array:
    """Returns the final states [B, G, ...] of the whole sequence, the same on all ranks: of a segment, that of the last rank
    that has a token of it; of one without tokens, that of the first rank."""
    rank, G = exchange.rank(axis), final.shape[1]
    if G == 1:
        owns = jnp.broadcast_to(rank == jax.lax.axis_size(axis) - 1, final.shape[:2])
    else:
        rows = jnp.arange(ids.shape[0])[:, None]
        has = jnp.zeros(final.shape[:2], bool).at[rows, jnp.where(ids < 0, G, ids)].set(True, mode="drop")
        last = jax.lax.pmax(jnp.where(has, rank, 0), axis)
        owns = last == rank
    return jax.lax.psum(jnp.where(owns.reshape(*owns.shape, *(1,) * (final.ndim - 2)), final, 0), axis)
