"""Recurrences over a sequence that is split over mesh axes: each rank learns the state that enters it, and does its own part.

What a rank does to a state is a map, S_out = A(S_in) + b for a linear recurrence. Its size does not depend on how many tokens
the rank has. The maps are composed by a prefix scan over the ranks, log2(ranks) hops of one map each; the state that enters a
rank is the initial state after the maps before it. Where documents are told apart, the hops are as many as ranks that one of
them spans ask for, which the program finds as it runs. All parts are differentiable, so the derivative is JAX's.

In an order in which a rank has several runs of tokens, each run has a map, and states pass between runs: by a scan over the
ranks, at once for all places that a run has on a rank, and from place to place by the map of all ranks. Or tokens are exchanged
to contiguous order and back, where that sends less.

Source: W. Sun et al., *Linear Attention Sequence Parallelism*, 2024, arXiv:2404.02882 (states passed between ranks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.cost import states_sent
from ejdist.sequence.map_scan import Maps, entering, needed_hops, select
from ejdist.sequence.runs import Runs
from kernels.engines.scan.recurrence import last_run
from kernels.framework.binding import is_traced_argument
from kernels.framework.contract import Op
from kernels.framework.dispatch import vary_alike


class Passing(Maps, Protocol):
    """A recurrence whose map is cheaper than its outputs, which are computed from the state that enters."""

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        """Returns the map of this rank's valid tokens (bool [B, T]), one sequence without a beginning; of none: the identity.

        Args:
          arguments: those of the contract that the call has, arrays and options, but segment_ids, initial_state and num_states.
        """
        ...

    def constant(self, state: jax.Array, like: Any) -> Any:
        """Returns the map, of the structure and shapes of `like`, after which the state is this one, whatever it was."""
        ...


class OncePassing(Maps, Protocol):
    """A recurrence whose map (A, b) comes out of the pass over its outputs, which need the entering state in the end."""

    def once(
        self, call: Callable[..., Any], arguments: dict[str, Any], initial: jax.Array, entered: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """Returns (out, final states) as they are if nothing enters, and what the entering state is multiplied with for each.

        Args:
          call: the operation. arguments: those of its contract, arrays and options, but initial_state.
          initial: [B, G, ...], the states that are known. entered: bool [B, G]: which of them is the one that enters.
        """
        ...

    def reached(self, reach: jax.Array, state: jax.Array) -> jax.Array:
        """Returns what an entering state [B, ...] adds to out [B, T, ...]."""
        ...

    def times(self, a: jax.Array, state: jax.Array) -> jax.Array:
        """Returns A applied to states."""
        ...

    def identity(self, like: Any) -> Any:
        """Returns the map, of the shapes of `like`, after which every state is what it was."""
        ...


@dataclass(frozen=True)
class Linear:
    """S_out = A * S_in + b with A elementwise (it broadcasts against the state): decays. Maps are pairs (A, b).

    A subclass has `start`, and `summary` or what `OncePassing` has. Where A is a matrix it overrides `times`, and `after` where
    that is not the same.
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


_OF_SEQUENCES = ("segment_ids", "initial_state")


@dataclass(frozen=True)
class StatePassing:
    """What runs on a shard: `sharded(function, local=StatePassing(op, passing), handles=("T",), follows="fixed")`.

    Attributes:
      op: a recurrence with the contract's form of `kernels/engines/scan/recurrence.py`; outputs (out, final_state).
      passing: hashable, as a frozen dataclass without fields is.
      exchanged: whether tokens in another order than contiguous are exchanged, or states passed between their runs; None: what
        sends less, see `states_sent`.
    """

    op: Op
    passing: Passing | OncePassing
    exchanged: bool | None = None

    def __call__(
        self,
        axes: dict[str, tuple[str, ...]],
        *,
        order: Order | None = None,
        platform: Any = None,
        cfg: Any = None,
        **arguments: Any,
    ) -> Any:
        axis = axes["T"]
        if not axis:
            return self.op(**arguments, platform=platform, cfg=cfg)
        options = {n: x for n, x in arguments.items() if not is_traced_argument(x) and n not in _OF_SEQUENCES}
        arguments = {n: x for n, x in arguments.items() if n not in options and x is not None}
        tokens = [n for n in arguments if [d.name for d in self.op.parameters[n].dims[:2]] == ["B", "T"]]
        B, length = arguments[tokens[0]].shape[:2]
        runs = Runs(Order("contiguous", exchange.size(axis)) if order is None else order, length, axis)
        if runs.count > 1 and self._exchanges(runs, {n: arguments[n] for n in tokens}, arguments | options):
            arguments |= {n: runs.exchanged(arguments[n]) for n in tokens}
            out, final = self(axes, platform=platform, cfg=cfg, **arguments, **options)
            return runs.home(out), final
        ids, initial = arguments.pop("segment_ids", None), arguments.pop("initial_state", None)
        documents, ids = ids is not None, jnp.zeros((B, length), jnp.int32) if ids is None else ids
        arguments, ids, _ = vary_alike((arguments, ids, exchange.rank(axis)))
        arguments |= {n: runs.rows(arguments[n]) for n in tokens if n in arguments}
        start, num_states = self.passing.start(arguments), options.pop("num_states", 1)
        if initial is None:
            initial = jnp.repeat(start[:B, None], num_states, axis=1)
        initial, start = vary_alike((initial.astype(start.dtype), start), ids)
        call = functools.partial(self.op, num_states=num_states, platform=platform, cfg=cfg)
        run: Any = _through_once if hasattr(self.passing, "once") else _through
        ids = runs.rows(ids)
        edges = _Edges.of(ids, runs, num_states > 1, documents)
        out, final = run(self.passing, call, (arguments, options), ids, initial, start, runs, edges)
        return runs.back(out), _ends(ids, final, runs)

    def _exchanges(self, runs: Runs, tokens: dict[str, jax.Array], arguments: dict[str, Any]) -> bool:
        if self.exchanged is not None:
            return self.exchanged
        out, final = jax.eval_shape(lambda a: self.op(**{**arguments, **a}), tokens)
        # A map is a state and what multiplies it, which is as large where that is a matrix, and counted so where it is less.
        state = 2 * final.dtype.itemsize * final.size // final.shape[1]
        every = sum(x.dtype.itemsize * x.size for x in (*tokens.values(), out))
        one, other = (states_sent(runs.order, runs.own, state, every, exchanged=e) for e in (False, True))
        return sum(other.bytes.values()) < sum(one.bytes.values())


@dataclass(frozen=True)
class _Edges:
    """Where the runs of a rank begin and end, bool and int [rows].

    Attributes:
      goes_on: whether the first segment of a run began before it, or the run has no valid token. nothing: whether it has none.
      first, last: the segments of its first and last valid token; 0 where there is none, or where all have one state.
      through: whether the state that enters a run leaves it, changed; else another one does.
      hops: how many hops of `exclusive_scans` some rank needs, int32 []; None for all.
    """

    goes_on: jax.Array
    nothing: jax.Array
    first: jax.Array
    last: jax.Array
    through: jax.Array
    hops: jax.Array | None

    @classmethod
    def of(cls, ids: jax.Array, runs: Runs, several: bool, documents: bool) -> _Edges:
        nothing = jnp.all(ids < 0, axis=1)
        first, last = _first_valid(ids), _last_valid(ids)
        before = runs.last_id_before(last)
        # One state: a row that has begun nowhere yet begins here from its initial state, which the maps pass on.
        goes_on = (before == first) & (before >= 0) if several else (before == first) | (before < 0)
        first, last = (jnp.maximum(x, 0) if several else jnp.zeros_like(x) for x in (first, last))
        goes_on |= nothing
        through = goes_on & last_run(ids)[1]
        return cls(goes_on, nothing, first, last, through, needed_hops(through, runs) if documents else None)


def _through(
    passing: Passing,
    call: Any,
    first: Any,
    ids: jax.Array,
    initial: jax.Array,
    start: jax.Array,
    runs: Runs,
    edges: _Edges,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, final states [rows, G, ...]) of this rank's runs: from the maps of all runs the states that enter these.

    Args:
      given: (arrays, options) of the operation, of the rows of the runs. ids: those of the rows.
      initial: [B, G, ...], of the whole sequence. start: [rows, ...], of a segment that begins from nothing.
    """
    (arguments, options), each, several = first, runs.repeated(initial), initial.shape[1] > 1
    rows, tail = jnp.arange(ids.shape[0]), last_run(ids)[0]
    set_options = {n: x for n, x in options.items() if x is not None}
    over = passing.summary({**arguments, **set_options}, tail)
    mine = each[rows, edges.last] if several else start
    over = select(edges.through, over, passing.constant(passing.apply(over, mine), over))
    state = entering(passing, over, initial[:, 0], runs, edges.hops)
    if not several:
        enters = select(edges.goes_on, state, start)[:, None]
    else:
        known = each[rows, edges.first]
        enters = each.at[rows, edges.first].set(select(edges.goes_on & ~edges.nothing, state, known))
    return call(**arguments, **options, segment_ids=ids, initial_state=enters)


def _through_once(
    passing: OncePassing,
    call: Any,
    first: Any,
    ids: jax.Array,
    initial: jax.Array,
    start: jax.Array,
    runs: Runs,
    edges: _Edges,
) -> tuple[jax.Array, jax.Array]:
    """As `_through`, in one pass over the tokens: the state that enters is added to its results."""
    (arguments, options), each, several = first, runs.repeated(initial), initial.shape[1] > 1
    rows = jnp.arange(ids.shape[0])
    open_rows = edges.goes_on & ~edges.nothing if several else edges.goes_on
    entered = open_rows[:, None] & (jnp.arange(initial.shape[1]) == edges.first[:, None])
    known = each if several else start[:, None]
    arguments = {**arguments, **options, "segment_ids": ids}
    (out, final), (out_reach, final_reach) = passing.once(call, arguments, known, entered)
    over = final_reach[rows, edges.last], final[rows, edges.last]
    if several:
        over = select(edges.nothing, passing.identity(over), over)
    state = entering(passing, over, initial[:, 0], runs, edges.hops)
    state = select(open_rows, state, jnp.zeros_like(state))  # nothing of another document, if it is not finite
    out = (out + passing.reached(out_reach, state)).astype(out.dtype)
    return out, final + passing.times(final_reach, state[:, None])


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


def _first_valid(ids: jax.Array) -> jax.Array:
    """Returns [B]: the id of the first valid token, -1 where there is none."""
    index = jnp.argmax(ids >= 0, axis=1)
    return jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0].clip(-1)


def _last_valid(ids: jax.Array) -> jax.Array:
    return _first_valid(ids[:, ::-1])


def _ends(ids: jax.Array, final: jax.Array, runs: Runs) -> jax.Array:
    """Returns the final states [B, G, ...] of the whole sequence, the same on all ranks: of a segment, that of the last run
    that has a token of it; of one without tokens, that of the first run.

    Args:
      ids: of the rows of this rank's runs. final: [rows, G, ...], the states after each.
    """
    here, final = runs.here(), runs.apart(final)  # [runs, B, G, ...]
    G = final.shape[2]
    if G == 1:
        owns = jnp.broadcast_to((here == runs.parts.size - 1)[:, None, None], final.shape[:3])
    else:
        rows = jnp.arange(ids.shape[0])[:, None]
        has = jnp.zeros((ids.shape[0], G), bool).at[rows, jnp.where(ids < 0, G, ids)].set(True, mode="drop")
        part = jnp.where(runs.apart(has), here[:, None, None], 0)
        owns = jax.lax.pmax(part.max(0), runs.axis) == here[:, None, None]
    owns = owns.reshape(*owns.shape, *(1,) * (final.ndim - 3))
    return jax.lax.psum(jnp.where(owns, final, 0).sum(0), runs.axis)
