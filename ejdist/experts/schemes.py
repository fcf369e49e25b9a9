"""Schemes of expert parallelism: what is sent between the ranks, and when. A scheme is a class and its line in `SCHEMES`.

Sources: D. Lepikhin et al., *GShard*, 2020, arXiv:2006.16668 (experts over devices by all-to-all); C. Hwang et al., *Tutel*,
2022, arXiv:2206.03382 (all-to-all in two levels; in parts that overlap with the products).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, RAGGED_ALL_TO_ALL, REDUCE_SCATTER, Traffic
from ejdist.experts.by_rank import ByRank, RankPlan, Turn
from ejdist.experts.cost import ExchangeShape, reached
from ejdist.experts.narrow import BF16, PRECISIONS, arrays_of, bytes_of, narrowed, sent
from ejdist.experts.own import Local
from ejdist.experts.rows import DispatchSpec, Plan, Scheme, add, before, plan_of, room_of, wide
from kernels.framework.dispatch import vary_alike


@dataclass(frozen=True)
class AllToAll(ByRank):
    """A pass sends an equal number of rows between each pair of ranks: one dense all-to-all each way."""

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        one = room_of(shape.buffer * shape.tokens * shape.reached / shape.ranks, shape.tokens, chunks)
        return one, room_of(shape.buffer * shape.pairs, shape.ranks * one * chunks * shape.top_k, chunks)

    def fullest(self, job: DispatchSpec, plan: RankPlan) -> jax.Array:
        return plan.between.max()

    def most(self, job: DispatchSpec, tokens: int) -> int:
        return tokens

    def turn(self, job: DispatchSpec, plan: RankPlan, q: jax.Array) -> Turn:
        n, c, mine = plan.between.shape[1], job.rooms[0], plan.between[0]
        first = before(mine, 0)
        offsets = q * c + jnp.arange(c)
        # The rows for rank r begin at first[r]; this turn has those at `offsets`.
        pair = plan.rows.pairs.at[first[:, None] + offsets].get(mode="fill", fill_value=-1)
        pair = jnp.where(offsets < mine[:, None], pair, -1).reshape(-1)
        to = jnp.minimum(plan.rank, n - 1)
        index = plan.rows.slots - first[to] - q * c
        here = (plan.rank < n) & (index >= 0) & (index < c)
        return Turn(pair, jnp.where(here, to * c + index, -1))

    def dispatch(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, self.axis(job), 0, 0, tiled=True)

    def combine(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        return self.dispatch(job, turn, x)

    def arrived(self, shape: ExchangeShape) -> list[int]:
        return [shape.ranks * self.rooms(shape, 1)[0]]

    def travel(self, shape: ExchangeShape) -> list[tuple[str, int, float, int | None]]:
        rows = shape.ranks * self.rooms(shape, 1)[0]
        return [(axis, size, rows, shape.own(shape.ranks)) for axis, size in shape.over]

    def cost(self, shape: ExchangeShape) -> Traffic:
        return self.traffic(shape, ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return self.at_work(shape)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


@dataclass(frozen=True)
class TwoLevel(AllToAll):
    """The dense all-to-all in two levels, for an axis (hosts, devices of a host): a token goes once to a host, to the device
    that has there the place of its own, and from that device once to each rank of the host."""

    stepwise = True

    def axis(self, job: DispatchSpec) -> tuple[str, ...]:
        return job.axis[:1]

    def inner(self, job: DispatchSpec) -> DispatchSpec:
        num_experts = job.num_experts // self._ranks(job)
        return replace(
            job, axis=job.axis[1:], scheme=AllToAll(), num_experts=num_experts, rooms=job.rooms[1:], chunks=1
        )

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        hosts, devices = self._levels(shape)
        per_host = reached(hosts, shape.top_k, shape.num_experts, shape.max_ranks)
        one = room_of(shape.buffer * shape.tokens * per_host / hosts, shape.tokens, chunks)
        # A rank gets as many rows as without levels, here from the devices of its own host alone.
        balanced = shape.buffer * shape.tokens * shape.reached / devices
        two = room_of(balanced, hosts * one * chunks, chunks)
        return one, two, room_of(shape.buffer * shape.pairs, devices * two * chunks * shape.top_k, chunks)

    @staticmethod
    def _levels(shape: ExchangeShape) -> tuple[int, int]:
        hosts = shape.over[0][1]
        return hosts, shape.ranks // hosts

    def arrived(self, shape: ExchangeShape) -> list[int]:
        hosts, devices = self._levels(shape)
        one, two, _ = self.rooms(shape, 1)
        return [hosts * one, devices * two]

    def travel(self, shape: ExchangeShape) -> list[tuple[str, int, float, int | None]]:
        hosts, devices = self._levels(shape)
        one, two, _ = self.rooms(shape, 1)
        levels = (hosts * one, shape.own(hosts)), (devices * two, shape.own(shape.ranks))
        return [(axis, size, *levels[min(i, 1)]) for i, (axis, size) in enumerate(shape.over)]

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        return "two axes" if len(sizes) < 2 else None


@dataclass(frozen=True)
class RaggedAllToAll(ByRank):
    """A pass delivers a fixed number of rows to each rank, from any ranks: only rows that exist are sent."""

    needs_all_sizes = True

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        one = room_of(shape.buffer * shape.tokens * shape.reached, shape.tokens * shape.ranks, chunks)
        return one, room_of(shape.buffer * shape.pairs, one * chunks * shape.top_k, chunks)

    def fullest(self, job: DispatchSpec, plan: RankPlan) -> jax.Array:
        return plan.between.sum(0).max()

    def most(self, job: DispatchSpec, tokens: int) -> int:
        return tokens * job.ranks

    def turn(self, job: DispatchSpec, plan: RankPlan, q: jax.Array) -> Turn:
        n, me, R = job.ranks, job.rank, job.rooms[0]
        between = plan.between
        # All rows for a rank form a queue, those of rank 0 first; this turn is [q R, (q + 1) R) of each queue.
        line = before(between, 0)
        low, high = (jnp.clip(edge - line, 0, between) for edge in (q * R, (q + 1) * R))
        home = before(between, 1) + low  # where they begin in the sender's order
        away = line + low - q * R  # where they begin in the receiver's buffer
        slots, to = plan.rows.slots, jnp.minimum(plan.rank, n - 1)
        index = slots - home[me][to]
        here = (plan.rank < n) & (index >= 0) & (index < (high - low)[me][to])
        # A token meets no more ranks than there are.
        pair = plan.rows.pairs[: slots.shape[0] * min(n, slots.shape[1])]
        return Turn(pair, jnp.where(here, slots, -1), (home, high - low, away))

    def dispatch(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        home, sizes, away = turn.moves
        return _ragged(x, job.rooms[0], home, sizes, away, job)

    def combine(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        home, sizes, away = turn.moves
        return _ragged(x, turn.pair.size, away.T, sizes.T, home.T, job)

    def arrived(self, shape: ExchangeShape) -> list[int]:
        return [self.rooms(shape, 1)[0]]

    def travel(self, shape: ExchangeShape) -> list[tuple[str, int, float, int | None]]:
        rows = shape.tokens * shape.reached
        return [(axis, size, rows, shape.own(shape.ranks)) for axis, size in shape.over]

    def cost(self, shape: ExchangeShape) -> Traffic:
        return self.traffic(shape, RAGGED_ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return self.at_work(shape)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


def _ragged(x: jax.Array, rows: int, start: jax.Array, sizes: jax.Array, to: jax.Array, job: DispatchSpec) -> jax.Array:
    """Returns [rows, ...] with, from each rank i, sizes[i, me] rows of its x from start[i, me] on, at to[i, me]; 0 elsewhere.

    XLA has no ragged all-to-all for the CPU: there every rank gathers everything and selects its rows.
    """
    me = job.rank

    def ragged(x: jax.Array, start: jax.Array, sizes: jax.Array, to: jax.Array) -> jax.Array:
        out = vary_alike(jnp.zeros((rows, *x.shape[1:]), x.dtype), x)
        return lax.ragged_all_to_all(x, out, start[me], sizes[me], to[me], sizes[:, me], axis_name=job.axis)

    def gathered(x: jax.Array, start: jax.Array, sizes: jax.Array, to: jax.Array) -> jax.Array:
        every, index = lax.all_gather(x, job.axis), jnp.arange(rows)[:, None]
        holds = (index >= to[:, me]) & (index < (to + sizes)[:, me])
        source = jnp.argmax(holds, axis=1)
        row = jnp.clip((start - to)[source, me] + index[:, 0], 0, x.shape[0] - 1)
        return jnp.where(holds.any(1).reshape(-1, *(1,) * (x.ndim - 1)), every[source, row], 0)

    return lax.platform_dependent(x, *vary_alike((start, sizes, to), x), cpu=gathered, default=ragged)


# -- gathered tokens ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather(Scheme):
    """Every rank gathers all tokens and computes its experts' part of every sum; a reduce-scatter adds the parts.

    A token is sent once per rank however many experts it has. Only the products run in passes, not the communication. Chunks
    split the tokens. Sums are sent in the dtype of the tokens.
    """

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        pairs = -(-shape.tokens // chunks) * shape.top_k  # of a rank, in the largest chunk
        return (room_of(shape.buffer * pairs, shape.ranks * pairs, 1),)

    def held(self, job: DispatchSpec) -> np.ndarray:
        return np.asarray(job.rooms)

    def plan(self, job: DispatchSpec, experts: jax.Array, weights: jax.Array) -> tuple[Plan, ...]:
        parts = [self._gather(job, part) - job.rank * job.own for part in self._chunks(job, experts)]
        return tuple(plan_of(part, job.own) for part in parts)

    def need(self, job: DispatchSpec, plan: tuple[Plan, ...]) -> jax.Array:
        return functools.reduce(jnp.maximum, [part.sizes.sum(dtype=jnp.int32)[None] for part in plan])

    def forward(
        self, job: DispatchSpec, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        inner = self._inner(job)
        out, residuals = [], []
        for part, x_part, w_part in zip(plan, self._chunks(job, x), self._chunks(job, weights), strict=True):
            every, w = self._tokens(job, x_part), self._gather(job, w_part)
            sums, part_residuals = inner.scheme.forward(inner, passes, part, every, w, params, keep)
            out.append(self._scatter(job, sums))
            residuals.append(part_residuals)
        return jnp.concatenate(out), residuals if keep else None

    def backward(
        self,
        job: DispatchSpec,
        passes: jax.Array,
        plan: Any,
        kept: Any,
        x: Callable,
        weights: Any,
        params: Any,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        inner = self._inner(job)
        d_x, d_weights, d_params = [], [], []
        parts = (self._chunks(job, a) for a in (weights, d_out))
        for i, (part, *chunk) in enumerate(zip(plan, *parts, strict=True)):
            w, d = (self._gather(job, a) for a in chunk)

            def every(i: int = i) -> jax.Array:
                return self._tokens(job, self._chunks(job, x())[i])

            grads = inner.scheme.backward(inner, passes, part, kept[i], every, w, params, d)
            d_x.append(self._scatter(job, grads[0]))
            d_weights.append(self._scatter(job, grads[1]))
            d_params.append(jax.tree.map(wide, grads[2]))
        return jnp.concatenate(d_x), jnp.concatenate(d_weights), functools.reduce(add, d_params)

    def precision_refusal(self, precision: str) -> str | None:
        how = PRECISIONS[precision]
        return "adds rows up on their way back" if how.sums or how.gradients else None

    def cost(self, shape: ExchangeShape) -> Traffic:
        total, gathered, narrow = Traffic(), shape.tokens, PRECISIONS[shape.precision].tokens
        times, tokens = 1 + shape.again, bytes_of(shape.width, shape.itemsize, narrow)
        for axis, size in shape.over:  # each device of an inner axis sends its own tokens over the outer axes
            other, gathered = gathered * (size - 1), gathered * size
            total.add(axis, ALL_GATHER, other * (times * tokens + shape.row), times * arrays_of(narrow) + 1)
            total.add(axis, REDUCE_SCATTER, 2 * other * shape.row, 2)
        return total

    def memory(self, shape: ExchangeShape) -> int:
        tokens = shape.tokens * shape.row
        # Tokens and cotangents of all ranks, the latter also sorted, and sums in float32; rows are computed from them on the
        # fly.
        return 3 * shape.wide + 3 * shape.narrow + shape.ranks * (3 * tokens + 4 * tokens // shape.itemsize)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.tokens * shape.ranks

    @staticmethod
    def _inner(job: DispatchSpec) -> DispatchSpec:
        """Returns the settings for applying this rank's experts to the gathered tokens, where nothing is sent."""
        return replace(job, axis=(), scheme=Local(), num_experts=job.own, chunks=1)

    @staticmethod
    def _chunks(job: DispatchSpec, x: jax.Array) -> list[jax.Array]:
        edges = [i * x.shape[0] // job.chunks for i in range(job.chunks + 1)]
        return [x[a:b] for a, b in itertools.pairwise(edges) if b > a]

    def _tokens(self, job: DispatchSpec, x: jax.Array) -> jax.Array:
        dtype = PRECISIONS[job.precision].tokens
        return sent(functools.partial(self._gather, job), narrowed(x, dtype), dtype, x)

    @staticmethod
    def _gather(job: DispatchSpec, x: jax.Array) -> jax.Array:
        with jax.named_scope("dispatch"):
            return lax.all_gather(x, job.axis, axis=0, tiled=True)

    @staticmethod
    def _scatter(job: DispatchSpec, x: jax.Array) -> jax.Array:
        with jax.named_scope("combine"):
            return lax.psum_scatter(x, job.axis, scatter_dimension=0, tiled=True)


LOCAL = "local"
# A plan's search starts with the first.
SCHEMES: dict[str, type[Scheme]] = {
    "all_to_all": AllToAll,
    "ragged_all_to_all": RaggedAllToAll,
    "all_gather": AllGather,
    "two_level": TwoLevel,
    LOCAL: Local,
}


def fitting(sizes: tuple[int, ...], precision: str = BF16) -> list[str]:
    """Returns the names of the schemes that fit axes of these sizes and rows of that precision, in the order of `SCHEMES`."""
    fit = [name for name, scheme in SCHEMES.items() if scheme().refusal(sizes) is None]
    return [name for name in fit if SCHEMES[name]().precision_refusal(precision) is None]


def scheme_of(scheme: Any) -> Scheme:
    """Returns the scheme of a name; a Scheme is returned as it is.

    Raises:
      ValueError: the name is unknown.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if isinstance(scheme, str) and scheme in SCHEMES:
        return SCHEMES[scheme]()
    raise ValueError(
        f"exchange: argument 'scheme' = {scheme!r} is unknown; use 'auto', one of {', '.join(SCHEMES)}, or a Scheme such as "
        "AllToAll()"
    )
