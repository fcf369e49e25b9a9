"""Tokens that travel to the ranks of their experts, once to a rank: which rows go when, what goes beside, and the way back.

A token goes to a rank if any of its choices is there, as one row. Its choices of that rank go beside it, k integers and k
weights. The rank gathers the row once for each of them, weighs what its experts make of it, adds that up in the order of the
choices, and one row returns. The token's rank adds up what came from the ranks.

Choices of one expert are one choice, with the sum of their weights, so no more go beside a row than a rank has experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejdist.costs import Traffic, Undeclared
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.narrow import PRECISIONS, arrays_of, bytes_of, narrowed, sent
from ejdist.experts.own import Local, floats_of
from ejdist.experts.rows import (
    DispatchSpec,
    Plan,
    Scheme,
    Sums,
    add,
    agreed,
    combined,
    over_chunks,
    passes_of,
    plan_of,
    spread,
    summed,
    taken,
    wide,
)

LANES = 128  # numbers of a row of registers of a TPU, to which arrays are padded there


class Turn(NamedTuple):
    """The rows of one chunk of a pass.

    Attributes:
      pair: [S], in each place of what is sent the first pair of a token and a rank, -1 for none.
      slot: [M, k], the place of such a pair, -1 if it is not in this turn, or is not the first.
      moves: metadata for `dispatch` and `combine`.
      weights: [R, k], of the rows that arrive. plan: of these rows, for the experts of this rank, or for the next level.
    """

    pair: jax.Array
    slot: jax.Array
    moves: Any = ()
    weights: Any = ()
    plan: Any = ()


class RankPlan(NamedTuple):
    """Which tokens go to which ranks.

    Attributes:
      rows: the rows sorted by rank; a row is a pair, the first of its token that is of that rank.
      rank: [M, k], of a choice; `ranks` for one that is not the first, and for none.
      between: [from, to], how many rows go from each rank to each other, where `needs_all_sizes`; else [1, to] of this rank.
      experts: [M, k], num_experts for none and for one that the token has chosen before. weights: [M, k], of both together.
      number: [M, k], how many other experts of that rank the token has chosen before. first: [M, k], the first choice of that
        rank. turns: of the first pass.
    """

    rows: Plan
    rank: jax.Array
    between: jax.Array
    experts: jax.Array
    weights: jax.Array
    number: jax.Array
    first: jax.Array
    turns: tuple[Turn, ...]


def _at(number: jax.Array, here: jax.Array, x: jax.Array, columns: int) -> jax.Array:
    """Returns [S, columns] with x[s, j] in column number[s, j] where `here`; 0 where none is."""

    # Choice by choice, so that a compiler has one elementwise pass and no reduction.
    def column(c: int) -> jax.Array:
        choices = [jnp.where(here[:, j] & (number[:, j] == c), x[:, j], 0) for j in range(x.shape[1])]
        return functools.reduce(jnp.add, choices)

    return jnp.stack([column(c) for c in range(columns)], axis=1)


def _compared(experts: jax.Array, rank: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """Returns `repeated`, whether a token has chosen an expert before, and number, weights and first of `RankPlan`, [M, k].

    Choice by choice and without a reduction, as in `_at`.
    """
    choices = range(experts.shape[1])
    by_expert, by_rank, by_weight = ([a[:, j] for j in choices] for a in (experts, rank, weights))
    repeated, numbers, sums, firsts = [], [], [], []
    for j in choices:
        again, number = jnp.zeros_like(by_expert[j], bool), jnp.zeros_like(by_rank[j])
        for i in range(j):
            again |= by_expert[i] == by_expert[j]
            number += (by_rank[i] == by_rank[j]) & ~repeated[i]
        for i in range(j):  # one that is repeated has the number of the first
            number = jnp.where((by_expert[i] == by_expert[j]) & ~repeated[i], numbers[i], number)
        first = jnp.full_like(by_rank[j], j)
        for i in reversed(range(j)):
            first = jnp.where(by_rank[i] == by_rank[j], i, first)
        alike = [jnp.where(by_expert[i] == by_expert[j], by_weight[i], 0) for i in choices]
        repeated.append(again)
        numbers.append(number)
        sums.append(functools.reduce(jnp.add, alike))
        firsts.append(first)
    repeated, number, weights, first = (jnp.stack(a, axis=1) for a in (repeated, numbers, sums, firsts))
    return repeated, number, weights, first


def _by_choice(plan: RankPlan, pair: jax.Array, *, own: int, columns: int) -> jax.Array:
    """Returns float [S, 2 columns], what goes beside the row of each pair: one more than the number of each expert that its
    token has chosen of that rank, of `own`, and the weights of these; 0 where there is none."""
    top_k = plan.experts.shape[1]
    rank = plan.rank.reshape(-1)[jnp.maximum(pair, 0)]
    experts, number, weights = (taken(a, pair, top_k) for a in (plan.experts, plan.number, plan.weights))
    local = experts - rank[:, None] * own
    here = (pair >= 0)[:, None] & (local >= 0) & (local < own)
    return jnp.concatenate([_at(number, here, a, columns) for a in (local.astype(weights.dtype) + 1, weights)], axis=1)


def _by_column(plan: RankPlan, pair: jax.Array, *, own: int, columns: int) -> jax.Array:
    """Returns the same where gathers are cheap: a token's choices are put into the order of their ranks, where those of one lie
    together, so that each column of a row is read once, and not all choices for each."""
    top_k = plan.experts.shape[1]
    choices, rank = range(top_k), plan.experts // own
    there = plan.experts < plan.rows.sizes.shape[0] * own
    ranks, valid = ([a[:, i, None] for i in choices] for a in (rank, there))
    first = functools.reduce(jnp.add, [(valid[i] & (ranks[i] < rank)).astype(jnp.int32) for i in choices])
    count = functools.reduce(jnp.add, [(valid[i] & (ranks[i] == rank)).astype(jnp.int32) for i in choices])
    local = (plan.experts - rank * own + 1).astype(plan.weights.dtype)
    in_order = [_at(first + plan.number, there, a, top_k).reshape(-1) for a in (local, plan.weights)]
    at, column = jnp.maximum(pair, 0), jnp.arange(columns)
    here = (pair >= 0)[:, None] & (column < count.reshape(-1)[at][:, None])
    place = (at // top_k * top_k + first.reshape(-1)[at])[:, None] + jnp.where(here, column, 0)
    return jnp.concatenate([jnp.where(here, a[place], 0) for a in in_order], axis=1)


class ByRank(Scheme):
    """Sends a row for each token and rank."""

    # Whether `turn` needs the number of rows that go from each rank to each other.
    needs_all_sizes: ClassVar[bool] = False

    def axis(self, job: DispatchSpec) -> tuple[str, ...]:
        """Returns the axes that rows travel along."""
        return job.axis

    def inner(self, job: DispatchSpec) -> DispatchSpec:
        """Returns the settings for what is done with the rows that arrive."""
        ranks = self._ranks(job)
        return replace(
            job, axis=(), scheme=Local(), num_experts=job.num_experts // ranks, rooms=job.rooms[1:], chunks=1
        )

    def turn(self, job: DispatchSpec, plan: RankPlan, q: jax.Array) -> Turn:
        """Returns turn q of all, without its plan."""
        raise NotImplementedError

    def fullest(self, job: DispatchSpec, plan: RankPlan) -> jax.Array:
        """Returns the rows that the fullest place of this rank needs."""
        raise NotImplementedError

    def most(self, job: DispatchSpec, tokens: int) -> int:
        """Returns the most rows that a place can ever need, with so many tokens on a rank."""
        raise NotImplementedError

    def dispatch(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        """Sends the rows [S, ...], and returns the received rows [R, ...]. Those that no token sent may hold anything."""
        raise NotImplementedError

    def combine(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        """Sends the rows [R, ...] back, and returns them in the order [S, ...] of `dispatch`."""
        raise NotImplementedError

    def travel(self, shape: ExchangeShape) -> list[tuple[str, int, float, int | None]]:
        """Returns (axis, its size, rows that a rank sends over it, its own included, experts of where they go) of a pass on its
        way to the experts."""
        raise NotImplementedError

    def _ranks(self, job: DispatchSpec) -> int:
        return lax.axis_size(self.axis(job))

    def plan(self, job: DispatchSpec, experts: jax.Array, weights: jax.Array) -> RankPlan:
        n = self._ranks(job)
        rank = jnp.minimum(experts // (job.num_experts // n), n)
        repeated, number, weights, first = _compared(experts, rank, wide(weights))
        goal = jnp.where(first < jnp.arange(experts.shape[1]), n, rank)
        rows = plan_of(goal, n)
        between = rows.sizes[None]
        between = lax.all_gather(between, self.axis(job), axis=0, tiled=True) if self.needs_all_sizes else between
        chosen = jnp.where(repeated, job.num_experts, experts)
        plan = RankPlan(rows, goal, between, chosen, weights, number, first, ())
        if job.looped and not self._single(job, experts):  # each turn is planned where it is made
            return plan
        return plan._replace(turns=tuple(self._planned(job, plan, jnp.int32(i)) for i in range(job.chunks)))

    def _planned(self, job: DispatchSpec, plan: RankPlan, q: jax.Array) -> Turn:
        """Returns turn q of all; the choices of its rows travel, and their weights."""
        turn, inner = self.turn(job, plan, q), self.inner(job)
        columns = min(plan.experts.shape[1], inner.num_experts)
        # In one array, where numbers of experts are exact; 0 is none, as where no row arrives.
        by_choice, by_column = (
            functools.partial(function, own=inner.num_experts, columns=columns) for function in (_by_choice, _by_column)
        )
        numbers = lax.platform_dependent(plan._replace(turns=()), turn.pair, cuda=by_column, default=by_choice)
        arrived = self._sent(job, turn, numbers)
        local, weights = arrived[:, :columns].astype(jnp.int32) - 1, arrived[:, columns:]
        local = jnp.where(local >= 0, local, inner.num_experts)
        return turn._replace(weights=weights, plan=inner.scheme.plan(inner, local, weights))

    def need(self, job: DispatchSpec, plan: RankPlan) -> jax.Array:
        own, inner = self.fullest(job, plan).astype(jnp.int32)[None], self.inner(job)
        if not plan.turns:
            return jnp.concatenate([own, jnp.zeros(len(inner.rooms), jnp.int32)])
        needs = [inner.scheme.need(inner, turn.plan) for turn in plan.turns]
        return jnp.concatenate([own, functools.reduce(jnp.maximum, needs)])

    def forward(
        self,
        job: DispatchSpec,
        passes: jax.Array,
        plan: RankPlan,
        x: Any,
        weights: Any,
        params: Any,
        keep: bool = False,
    ) -> tuple[jax.Array, Any]:
        how = PRECISIONS[job.precision]
        arrays = narrowed(x, how.tokens)

        def visit(job: DispatchSpec, passes: jax.Array, turn: Turn, keep: bool = False) -> tuple[jax.Array, Any]:
            inner = self.inner(job)
            rows = self._rows(job, turn, arrays, x, how.tokens)
            sums, kept = inner.scheme.forward(inner, passes, turn.plan, rows, turn.weights, params, keep)
            return self._back(job, turn, sums, how.sums), kept

        def first() -> tuple[Sums, Any]:
            chunks = [visit(job, passes[1:], turn, keep) for turn in plan.turns]
            rows = [wide(combined(rows, turn.slot)) for turn, (rows, _) in zip(plan.turns, chunks, strict=True)]
            return Sums(functools.reduce(add, rows)), [kept for _, kept in chunks] if keep else None

        def more(job: DispatchSpec, passes: jax.Array, turn: Turn, sums: Sums) -> Sums:
            return Sums(combined(visit(job, passes, turn)[0], turn.slot, None, sums.rows))

        further = functools.partial(self._further, job, plan, more)
        sums, kept = summed(job, passes[0], Sums(x), first, further, self._single(job, weights))
        return sums.rows, kept

    def backward(
        self,
        job: DispatchSpec,
        passes: jax.Array,
        plan: RankPlan,
        kept: Any,
        x: Callable,
        weights: Any,
        params: Any,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        how = PRECISIONS[job.precision]
        d_arrays = narrowed(d_out, how.gradients)

        def visit(
            job: DispatchSpec, passes: jax.Array, turn: Turn, kept: Any = None, total: jax.Array | None = None
        ) -> Sums:
            inner = self.inner(job)

            def rows() -> jax.Array:
                tokens = x()
                return self._rows(job, turn, narrowed(tokens, how.tokens), tokens, how.tokens)

            d = self._rows(job, turn, d_arrays, d_out, how.gradients)
            d_rows, d_weight, d_params = inner.scheme.backward(
                inner, passes, turn.plan, kept, rows, turn.weights, params, d
            )
            d_x = combined(self._back(job, turn, d_rows, how.gradients), turn.slot, None, total)
            return Sums(d_x, (self._numbers_back(job, plan, turn, d_weight), jax.tree.map(wide, d_params)))

        def first() -> tuple[Sums, None]:
            of = [None] * len(plan.turns) if kept is None else kept
            parts = [visit(job, passes[1:], *turn) for turn in zip(plan.turns, of, strict=True)]
            return functools.reduce(add, [Sums(wide(part.rows), part.rest) for part in parts]), None

        def more(job: DispatchSpec, passes: jax.Array, turn: Turn, sums: Sums) -> Sums:
            part = visit(job, passes, turn, None, sums.rows)
            return Sums(part.rows, add(sums.rest, part.rest))

        like = Sums(d_out, (weights, floats_of(params)))
        further = functools.partial(self._further, job, plan, more)
        sums, _ = summed(job, passes[0], like, first, further, self._single(job, weights))
        return sums.rows, *sums.rest

    def _further(self, job: DispatchSpec, plan: RankPlan, more: Callable) -> Callable:
        """Returns (p, sums) -> the sums with what the turns of pass p add, by `more`. Each is planned, and its passes agreed
        on, inside."""
        job = replace(job, looped=True)
        inner = self.inner(job)

        def of_turn(q: jax.Array, sums: Sums) -> Sums:
            turn = self._planned(job, plan, q)
            return more(job, passes_of(inner, agreed(inner.scheme.need(inner, turn.plan))), turn, sums)

        return over_chunks(job, of_turn)

    def _single(self, job: DispatchSpec, experts: jax.Array) -> bool:
        return job.rooms[0] * job.chunks >= self.most(job, experts.shape[0])

    def _rows(
        self, job: DispatchSpec, turn: Turn, arrays: list[jax.Array], like: jax.Array, dtype: str | None
    ) -> jax.Array:
        """Returns the rows that come to this rank of the tokens that `arrays` are, see `narrowed`."""
        return sent(functools.partial(self._there, job, turn), arrays, dtype, like)

    def _there(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        """Returns the rows of the tokens of x [M, ...] that come to this rank."""
        return self._sent(job, turn, spread(x, turn.pair, turn.slot))

    def _sent(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        with jax.named_scope("dispatch"):
            return self.dispatch(job, turn, x)

    def _back(self, job: DispatchSpec, turn: Turn, x: jax.Array, dtype: str | None = None) -> jax.Array:
        """Returns the rows that come back from the ranks, in their places."""
        with jax.named_scope("combine"):
            return sent(functools.partial(self.combine, job, turn), narrowed(x, dtype), dtype, x)

    def _numbers_back(self, job: DispatchSpec, plan: RankPlan, turn: Turn, x: jax.Array) -> jax.Array:
        """Returns [M, k], what comes back of numbers that are of the choices of the rows that arrived."""
        with jax.named_scope("combine"):
            x = self.combine(job, turn, x)
        slot = jnp.take_along_axis(turn.slot, plan.first, axis=1)
        number = jnp.minimum(plan.number, x.shape[1] - 1)
        return jnp.where(slot >= 0, x[jnp.maximum(slot, 0), number], 0)

    def traffic(self, shape: ExchangeShape, collective: str) -> Traffic:
        """Returns what `travel` comes to, forward and backward, by collectives of that kind."""
        how, total = PRECISIONS[shape.precision], Traffic()
        there, sums, d = (bytes_of(shape.width, shape.itemsize, t) for t in (how.tokens, how.sums, how.gradients))
        again = 1 + shape.again
        arrays = again * (arrays_of(how.tokens) + 1) + arrays_of(how.sums) + 2 * arrays_of(how.gradients) + 1
        for axis, size, rows, own in self.travel(shape):
            # Beside rows go choices and weights, and back come the gradients of the weights.
            numbers = 4 * (shape.top_k if own is None else min(shape.top_k, own))
            per_row = again * (there + 2 * numbers) + sums + 2 * d + numbers
            total.add(axis, collective, rows * per_row * (size - 1) / size, arrays)
        return total

    def at_work(self, shape: ExchangeShape) -> int:
        """Returns the bytes of the rows of experts, gathered, their outputs and gradients, of gate, up and their product, and
        of the rows that travel: cotangents and gradients, sent and arrived."""
        travelling = max(rows for _, _, rows, _ in self.travel(shape))
        return 3 * shape.wide + 5 * shape.narrow + 4 * int(travelling * shape.row)

    def arrived(self, shape: ExchangeShape) -> list[int]:
        """Returns the rows that a pass has room for where they arrive, level by level."""
        raise Undeclared(
            f"{type(self).__name__} does not declare what it costs: add 'arrived', the rows that a pass has room for, to it"
        )

    def tpu_memory(self, shape: ExchangeShape) -> int:
        """Further passes need the most, and their loops are in the program whether a step makes them or not. In the innermost
        are live the rows that arrived and their cotangents, at each level the sums of gradients in float32 so far, of rows and
        of matrices; and this pass's own: its sum in float32, with the rows of one choice on their way there. A kernel for GPUs
        makes that sum in the dtype of the rows, and reads rows of experts where they are."""
        levels, own = self.arrived(shape), shape.own(shape.ranks) or 0
        columns = min(shape.top_k, own or shape.top_k)
        if levels[-1] >= shape.ranks * shape.tokens and self.rooms(shape, 1)[-1] >= levels[-1] * columns:
            return 0  # there is room for all that can arrive
        row, wide = shape.row, 4 * shape.width
        rows = sum(n * (2 * row + wide) for n in levels) + levels[-1] * (wide + row)
        matrices = (1 + len(levels)) * 4 * 3 * own * shape.width * shape.hidden
        numbers = 5 * levels[-1] * 4 * LANES  # choices, weights and their gradients, in columns of which there are few
        in_loops = rows + 3 * shape.wide + 3 * shape.narrow + matrices + numbers
        return max(0, in_loops - self.at_work(shape))
