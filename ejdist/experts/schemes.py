"""Schemes of expert parallelism: what is sent between the ranks, and when. A scheme is a class and its line in `SCHEMES`.

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
from ejdist.experts.rows import (
    ByExpert,
    DispatchSpec,
    PassRows,
    PermutationScheme,
    Plan,
    Scheme,
    add,
    before,
    buffer_rows,
    plan_of,
    wide,
    within,
)
from kernels.framework.dispatch import vary_alike


def _sent(shape: ExchangeShape, rows: float, collective: str) -> Traffic:
    """Returns the traffic of rows that are spread over all ranks: dispatch and combine, forward and backward."""
    sent, times = Traffic(), 4 + shape.again
    for axis, size in shape.over:  # the rows that change their index along this axis
        sent.add(axis, collective, times * rows * shape.row * (size - 1) / size, times)
    return sent


def _rows_at_work(shape: ExchangeShape) -> int:
    """Returns the bytes of the sent, received and sorted rows, the outputs and gradients; and of gate, up and their product."""
    return 5 * shape.wide + 5 * shape.narrow


@dataclass(frozen=True)
class AllToAll(PermutationScheme):
    """A pass sends an equal number of rows between each pair of ranks: one dense all-to-all each way."""

    @staticmethod
    def _buffer_rows(job: DispatchSpec, pairs: int) -> int:
        return buffer_rows(job, pairs / job.ranks, pairs)

    def demand(self, job: DispatchSpec, plan: Plan, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        between = plan.sizes.reshape(job.ranks, job.ranks, job.own).sum(-1)
        pairs = tokens * top_k
        return [(between.max(), self._buffer_rows(job, pairs) * job.chunks, pairs)]

    def window(self, job: DispatchSpec, plan: Plan, q: jax.Array) -> PassRows:
        n, c = job.ranks, self._buffer_rows(job, plan.order.size)
        sizes = plan.sizes.reshape(n, n, job.own)
        mine = sizes[job.rank].sum(-1)
        first = before(mine, 0)
        offsets = q * c + jnp.arange(c)
        # The rows for rank r begin at first[r]; this chunk has those at `offsets`.
        source = jnp.minimum(first[:, None] + offsets, plan.order.size - 1)
        pair = jnp.where(offsets < mine[:, None], plan.order[source], -1).reshape(-1)
        to = jnp.minimum(plan.expert // job.own, n - 1)
        index = plan.place - first[to] - q * c
        sent = (plan.expert < job.num_experts) & (index >= 0) & (index < c)
        slot = jnp.where(sent, to * c + index, -1)
        arriving = within(sizes[:, job.rank], q * c, (q + 1) * c)
        by = ByExpert.of(arriving, jnp.arange(n) * c, n * c) if job.axis else None
        return PassRows(pair, slot, arriving.sum(0), by)

    def dispatch(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, job.axis, 0, 0, tiled=True) if job.axis else x

    def combine(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        return self.dispatch(job, window, x)

    def cost(self, shape: ExchangeShape) -> Traffic:
        return _sent(shape, shape.rows, ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return _rows_at_work(shape)

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


@dataclass(frozen=True)
class Local(AllToAll):
    """One device has all experts: nothing is sent."""

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        return "one device" if math.prod(sizes) > 1 else None

    def cost(self, shape: ExchangeShape) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class TwoLevel(AllToAll):
    """The dense all-to-all in two steps, for an axis (hosts, devices of a host): first between the devices of a host, then
    between hosts, so that a device sends one message per host instead of one per device."""

    stepwise = True

    def dispatch(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
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
class RaggedAllToAll(PermutationScheme):
    """A pass delivers a fixed number of rows to each rank, from any ranks: only rows that exist are sent."""

    @staticmethod
    def _buffer_rows(job: DispatchSpec, pairs: int) -> int:
        return buffer_rows(job, pairs, pairs * job.ranks)

    def demand(self, job: DispatchSpec, plan: Plan, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        arriving = plan.sizes.reshape(job.ranks, job.ranks, job.own).sum((0, 2))
        pairs = tokens * top_k
        return [(arriving.max(), self._buffer_rows(job, pairs) * job.chunks, pairs * job.ranks)]

    def window(self, job: DispatchSpec, plan: Plan, q: jax.Array) -> PassRows:
        n, me, R = job.ranks, job.rank, self._buffer_rows(job, plan.order.size)
        between = plan.sizes.reshape(n, n, job.own).sum(-1)  # from, to
        # All rows for a rank form a queue, those of rank 0 first; this chunk is [q R, (q + 1) R) of each queue.
        line = before(between, 0)
        low, high = (jnp.clip(edge - line, 0, between) for edge in (q * R, (q + 1) * R))
        home = before(between, 1) + low  # where they begin in the sender's order
        away = line + low - q * R  # where they begin in the receiver's buffer
        to = jnp.minimum(plan.expert // job.own, n - 1)
        index = plan.place - home[me][to]
        sent = (plan.expert < job.num_experts) & (index >= 0) & (index < (high - low)[me][to])
        slot = jnp.where(sent, plan.place, -1)
        arriving = within(plan.sizes.reshape(n, n, job.own)[:, me].reshape(-1), q * R, (q + 1) * R).reshape(n, job.own)
        by = ByExpert.of(arriving, away[:, me], R)
        return PassRows(plan.order, slot, arriving.sum(0), by, (home, high - low, away))

    def dispatch(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        home, sizes, away = window.moves
        return _ragged(x, self._buffer_rows(job, window.pair.size), home, sizes, away, job)

    def combine(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        home, sizes, away = window.moves
        return _ragged(x, window.pair.size, away.T, sizes.T, home.T, job)

    def cost(self, shape: ExchangeShape) -> Traffic:
        return _sent(shape, shape.pairs, RAGGED_ALL_TO_ALL)

    def memory(self, shape: ExchangeShape) -> int:
        return _rows_at_work(shape)

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

    def plan(self, job: DispatchSpec, experts: jax.Array) -> tuple[Plan, ...]:
        return tuple(self._own(job, plan_of(part, job.num_experts, job.axis)) for part in self._chunks(job, experts))

    def _own(self, job: DispatchSpec, plan: Plan) -> Plan:
        """Returns the plan of this rank's experts for the tokens of all ranks, which each rank has sorted for its own."""
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

    def demand(
        self, job: DispatchSpec, plan: tuple[Plan, ...], tokens: int, top_k: int
    ) -> list[tuple[jax.Array, int, int]]:
        inner = self._inner(job)
        return [d for part in plan for d in inner.scheme.demand(inner, part, *part.place.shape)]

    def forward(
        self, job: DispatchSpec, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        inner = self._inner(job)
        out, residuals = [], []
        for part, x_part, w_part in zip(plan, self._chunks(job, x), self._chunks(job, weights), strict=True):
            every, w = self._gather(job, x_part), self._gather(job, w_part)
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
                return self._gather(job, self._chunks(job, x())[i])

            grads = inner.scheme.backward(inner, passes, part, kept[i], every, w, params, d)
            d_x.append(self._scatter(job, grads[0]))
            d_weights.append(self._scatter(job, grads[1]))
            d_params.append(jax.tree.map(wide, grads[2]))
        return jnp.concatenate(d_x), jnp.concatenate(d_weights), functools.reduce(add, d_params)

    def cost(self, shape: ExchangeShape) -> Traffic:
        sent, gathered = Traffic(), shape.tokens
        for axis, size in shape.over:  # each device of an inner axis sends its own tokens over the outer axes
            other, gathered = gathered * shape.row * (size - 1), gathered * size
            sent.add(axis, ALL_GATHER, (2 + shape.again) * other, 2 + shape.again)
            sent.add(axis, REDUCE_SCATTER, 2 * other, 2)
        return sent

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
        return replace(job, axis=(), scheme=Local(), num_experts=job.own, buffer=job.buffer / job.ranks, chunks=1)

    @staticmethod
    def _chunks(job: DispatchSpec, x: jax.Array) -> list[jax.Array]:
        edges = [i * x.shape[0] // job.chunks for i in range(job.chunks + 1)]
        return [x[a:b] for a, b in itertools.pairwise(edges) if b > a]

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


def fitting(sizes: tuple[int, ...]) -> list[str]:
    """Returns the names of the schemes that fit axes of these sizes, in the order of `SCHEMES`."""
    return [name for name, scheme in SCHEMES.items() if scheme().refusal(sizes) is None]


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
