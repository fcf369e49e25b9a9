"""Schemes of expert parallelism: what travels between the ranks, and when. A scheme is a class here and its name below.

Sources: D. Lepikhin et al., *GShard*, 2020, arXiv:2006.16668 (experts over devices by all-to-all); C. Hwang et al., *Tutel*,
2022, arXiv:2206.03382 (all-to-all in two levels; in parts that overlap with the products).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, RAGGED_ALL_TO_ALL, REDUCE_SCATTER, Traffic
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.rows import ByExpert, Job, Plan, Rows, Scheme, Window, add, before, plan_of, room, wide, within
from kernels.framework.dispatch import vary_alike


def _sent(shape: ExchangeShape, rows: float, collective: str) -> Traffic:
    """Returns the traffic of rows that are spread over all ranks: there and back, forward and backward."""
    sent, times = Traffic(), 4 + shape.again
    for axis, size in shape.over:  # of these rows, those that go to another place along this axis
        sent.add(axis, collective, times * rows * shape.row * (size - 1) / size, times)
    return sent


def _rows_at_work(shape: ExchangeShape) -> int:
    """Returns the bytes of rows that were sent, that arrived, in the order of experts, what was made of them, and gradients; of
    gate, up and their product."""
    return 5 * shape.wide + 5 * shape.narrow


@dataclass(frozen=True)
class AllToAll(Rows):
    """A pass takes as many rows from each rank to each other: one dense all-to-all there, and one back."""

    @staticmethod
    def _room(job: Job, pairs: int) -> int:
        return room(job, pairs / job.ranks, pairs)

    def demand(self, job: Job, plan: Plan, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        between = plan.sizes.reshape(job.ranks, job.ranks, job.own).sum(-1)
        pairs = tokens * top_k
        return [(between.max(), self._room(job, pairs) * job.chunks, pairs)]

    def window(self, job: Job, plan: Plan, q: jax.Array) -> Window:
        n, c = job.ranks, self._room(job, plan.order.size)
        sizes = plan.sizes.reshape(n, n, job.own)
        mine = sizes[job.rank].sum(-1)
        first = before(mine, 0)
        at = q * c + jnp.arange(c)
        # What goes to rank r stands from first[r] on; this window has the rows `at` of it.
        there = jnp.minimum(first[:, None] + at, plan.order.size - 1)
        pair = jnp.where(at < mine[:, None], plan.order[there], -1).reshape(-1)
        to = jnp.minimum(plan.expert // job.own, n - 1)
        index = plan.place - first[to] - q * c
        sent = (plan.expert < job.num_experts) & (index >= 0) & (index < c)
        slot = jnp.where(sent, to * c + index, -1)
        arriving = within(sizes[:, job.rank], q * c, (q + 1) * c)
        by = ByExpert.of(arriving, jnp.arange(n) * c, n * c) if job.axis else None
        return Window(pair, slot, arriving.sum(0), by)

    def there(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, job.axis, 0, 0, tiled=True) if job.axis else x

    def back(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        return self.there(job, window, x)

    def cost(self, shape: ExchangeShape) -> Traffic:
        return _sent(shape, shape.rows, ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return _rows_at_work(shape)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


@dataclass(frozen=True)
class Local(AllToAll):
    """One device has all experts: nothing travels."""

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        return "one device" if math.prod(sizes) > 1 else None

    def cost(self, shape: ExchangeShape) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class TwoLevel(AllToAll):
    """The dense all-to-all in two steps, for an axis (hosts, devices of a host): first among the devices of a host, then
    between hosts, so that a device sends one message to another host, and not one for each device there."""

    stepwise = True

    def there(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        outer, inner = job.axis[:1], job.axis[1:]
        x = x.reshape(lax.axis_size(outer), lax.axis_size(inner), -1, *x.shape[1:])
        x = lax.all_to_all(x, inner, 1, 1, tiled=True)
        x = lax.all_to_all(x, outer, 0, 0, tiled=True)
        return x.reshape(-1, *x.shape[3:])

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        return "two axes" if len(sizes) < 2 else None

    def cost(self, shape: ExchangeShape) -> Traffic:
        return _sent(shape, shape.rows, ALL_TO_ALL)


@dataclass(frozen=True)
class RaggedAllToAll(Rows):
    """A pass takes as many rows to each rank, from whom they may come: only rows that exist travel."""

    @staticmethod
    def _room(job: Job, pairs: int) -> int:
        return room(job, pairs, pairs * job.ranks)

    def demand(self, job: Job, plan: Plan, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        arriving = plan.sizes.reshape(job.ranks, job.ranks, job.own).sum((0, 2))
        pairs = tokens * top_k
        return [(arriving.max(), self._room(job, pairs) * job.chunks, pairs * job.ranks)]

    def window(self, job: Job, plan: Plan, q: jax.Array) -> Window:
        n, me, R = job.ranks, job.rank, self._room(job, plan.order.size)
        between = plan.sizes.reshape(n, n, job.own).sum(-1)  # from, to
        # All rows for a rank stand in one line, those of rank 0 first; this window is [q R, (q + 1) R) of each line.
        line = before(between, 0)
        low, high = (jnp.clip(edge - line, 0, between) for edge in (q * R, (q + 1) * R))
        home = before(between, 1) + low  # where, in the order of the sender, they begin
        away = line + low - q * R  # where, in the window of the receiver
        to = jnp.minimum(plan.expert // job.own, n - 1)
        index = plan.place - home[me][to]
        sent = (plan.expert < job.num_experts) & (index >= 0) & (index < (high - low)[me][to])
        slot = jnp.where(sent, plan.place, -1)
        arriving = within(plan.sizes.reshape(n, n, job.own)[:, me].reshape(-1), q * R, (q + 1) * R).reshape(n, job.own)
        by = ByExpert.of(arriving, away[:, me], R)
        return Window(plan.order, slot, arriving.sum(0), by, (home, high - low, away))

    def there(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        home, sizes, away = window.moves
        return _ragged(x, self._room(job, window.pair.size), home, sizes, away, job)

    def back(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        home, sizes, away = window.moves
        return _ragged(x, window.pair.size, away.T, sizes.T, home.T, job)

    def cost(self, shape: ExchangeShape) -> Traffic:
        return _sent(shape, shape.pairs, RAGGED_ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return _rows_at_work(shape)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


def _ragged(x: jax.Array, rows: int, start: jax.Array, sizes: jax.Array, to: jax.Array, job: Job) -> jax.Array:
    """Returns [rows, ...]: from each rank i the rows start[i, me] ... of its x, sizes[i, me] of them, at to[i, me]; else 0.

    XLA has no ragged all-to-all for the CPU: there every rank gathers everything and takes its own.
    """
    me = job.rank

    def ragged(x: jax.Array, start: jax.Array, sizes: jax.Array, to: jax.Array) -> jax.Array:
        out = vary_alike(jnp.zeros((rows, *x.shape[1:]), x.dtype), x)
        return lax.ragged_all_to_all(x, out, start[me], sizes[me], to[me], sizes[:, me], axis_name=job.axis)

    def gathered(x: jax.Array, start: jax.Array, sizes: jax.Array, to: jax.Array) -> jax.Array:
        every, at = lax.all_gather(x, job.axis), jnp.arange(rows)[:, None]
        holds = (at >= to[:, me]) & (at < (to + sizes)[:, me])
        source = jnp.argmax(holds, axis=1)
        row = jnp.clip((start - to)[source, me] + at[:, 0], 0, x.shape[0] - 1)
        return jnp.where(holds.any(1).reshape(-1, *(1,) * (x.ndim - 1)), every[source, row], 0)

    return lax.platform_dependent(x, *vary_alike((start, sizes, to), x), cpu=gathered, default=ragged)


# -- tokens that are gathered ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather(Scheme):
    """Every rank gathers all tokens and makes its experts' part of every sum; the parts are added up where the tokens are.

    A token travels once however many experts it has, and no row waits for another pass on its way: only the products are made
    in passes. Chunks are of tokens. Sums travel in the dtype of the tokens.
    """

    def plan(self, job: Job, experts: jax.Array) -> tuple[Plan, ...]:
        return tuple(self._own(job, plan_of(part, job.num_experts, job.axis)) for part in self._chunks(job, experts))

    def _own(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan of this rank's experts for the tokens of all ranks. Each rank has sorted its own."""
        n, pairs, mine = job.ranks, plan.order.size, job.rank * job.own
        order, place, expert = (self._gather(job, a) for a in (plan.order, plan.place, plan.expert))
        sizes = lax.dynamic_slice_in_dim(plan.sizes, mine, job.own, axis=1)
        first = jnp.arange(n) * pairs + lax.dynamic_slice_in_dim(before(plan.sizes, 1), mine, 1, axis=1)[:, 0]
        by = ByExpert.of(sizes, first, n * pairs)
        # Pair p of rank i is pair i * pairs + p of all.
        source = jnp.maximum(by.source, 0)
        order = order[source] + source // pairs * pairs
        rank = jnp.arange(place.shape[0])[:, None] // (place.shape[0] // n)
        here = (expert >= mine) & (expert < mine + job.own)
        return Plan(order, by.place[place + rank * pairs], jnp.where(here, expert - mine, job.own), sizes.sum(0)[None])

    def demand(self, job: Job, plan: tuple[Plan, ...], tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        inner = self._inner(job)
        return [d for part in plan for d in inner.scheme.demand(inner, part, *part.place.shape)]

    def forward(
        self, job: Job, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        inner = self._inner(job)
        out, kept = [], []
        for part, x_part, w_part in zip(plan, self._chunks(job, x), self._chunks(job, weights), strict=True):
            every, w = self._gather(job, x_part), self._gather(job, w_part)
            sums, made = inner.scheme.forward(inner, passes, part, every, w, params, keep)
            out.append(self._scatter(job, sums))
            kept.append(made)
        return jnp.concatenate(out), kept if keep else None

    def backward(
        self,
        job: Job,
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
        for i, (part, *own) in enumerate(zip(plan, *parts, strict=True)):
            w, d = (self._gather(job, a) for a in own)

            def every(i: int = i) -> jax.Array:
                return self._gather(job, self._chunks(job, x())[i])

            found = inner.scheme.backward(inner, passes, part, kept[i], every, w, params, d)
            d_x.append(self._scatter(job, found[0]))
            d_weights.append(self._scatter(job, found[1]))
            d_params.append(jax.tree.map(wide, found[2]))
        return jnp.concatenate(d_x), jnp.concatenate(d_weights), functools.reduce(add, d_params)

    def cost(self, shape: ExchangeShape) -> Traffic:
        sent, gathered = Traffic(), shape.tokens
        for axis, size in shape.over:  # each device of an inner axis brings its own tokens over the outer ones
            other, gathered = gathered * shape.row * (size - 1), gathered * size
            sent.add(axis, ALL_GATHER, (2 + shape.again) * other, 2 + shape.again)
            sent.add(axis, REDUCE_SCATTER, 2 * other, 2)
        return sent

    def memory(self, shape: ExchangeShape) -> int:
        tokens = shape.tokens * shape.row
        # Tokens and cotangents of all ranks, the latter sorted, and sums in float32; rows are made of them on the spot.
        return 3 * shape.wide + 3 * shape.narrow + shape.ranks * (3 * tokens + 4 * tokens // shape.itemsize)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.tokens * shape.ranks

    @staticmethod
    def _inner(job: Job) -> Job:
        """Returns the exchange of gathered tokens with this rank's own experts, in which nothing travels."""
        return replace(job, axis=(), scheme=Local(), num_experts=job.own, buffer=job.buffer / job.ranks, chunks=1)

    @staticmethod
    def _chunks(job: Job, x: jax.Array) -> list[jax.Array]:
        edges = [i * x.shape[0] // job.chunks for i in range(job.chunks + 1)]
        return [x[a:b] for a, b in itertools.pairwise(edges) if b > a]

    @staticmethod
    def _gather(job: Job, x: jax.Array) -> jax.Array:
        with jax.named_scope("dispatch"):
            return lax.all_gather(x, job.axis, axis=0, tiled=True)

    @staticmethod
    def _scatter(job: Job, x: jax.Array) -> jax.Array:
        with jax.named_scope("combine"):
            return lax.psum_scatter(x, job.axis, scatter_dimension=0, tiled=True)


LOCAL = "local"
# The first is where a plan begins.
SCHEMES: dict[str, type[Scheme]] = {
    "all_to_all": AllToAll,
    "ragged_all_to_all": RaggedAllToAll,
    "all_gather": AllGather,
    "two_level": TwoLevel,
    LOCAL: Local,
}


def fitting(sizes: tuple[int, ...]) -> list[str]:
    """Returns the schemes that experts over axes of these sizes may have, as `SCHEMES` lists them."""
    return [name for name, scheme in SCHEMES.items() if scheme().refusal(sizes) is None]


def scheme_of(scheme: Any) -> Scheme:
    """Returns the scheme by name, or the one given.

    Raises:
      ValueError: there is none of that name.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if isinstance(scheme, str) and scheme in SCHEMES:
        return SCHEMES[scheme]()
    raise ValueError(
        f"exchange: argument 'scheme' = {scheme!r} is unknown; use 'auto', one of {', '.join(SCHEMES)}, or a Scheme such as "
        "AllToAll()"
    )
