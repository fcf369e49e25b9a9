"""Passes of expert parallelism: what every scheme shares that sends rows to the experts of other ranks and back.

A pair is a token and one of its choices, m * k + j. Pairs are sorted by expert, and so by the rank that has it. What a pass can
take is bounded by shapes; what is left over goes in the next pass, and all ranks make the same number of passes. So memory is
that of one pass whatever the router does, and every pair arrives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejdist.experts.cost import Costed
from ejdist.experts.metrics import expert_counts
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import vary_alike


@dataclass(frozen=True)
class Job:
    """What is the same on all ranks of an exchange.

    Attributes:
      apply: (params, rows [R, D], group_sizes [E / ranks]) -> rows [R, D'].
      axis: mesh axes that the experts are split over, the major one first; () for one device.
      buffer: rows that a pass can take, as a multiple of those that each rank has where all experts have as many.
      chunks: parts of a pass; none waits for another, so that one travels while another is multiplied.
      single: whether a pass has room for whatever comes, so that there is no other.
    """

    apply: Callable
    axis: tuple[str, ...]
    scheme: Scheme
    num_experts: int
    buffer: float
    chunks: int
    single: bool = False

    @property
    def ranks(self) -> int:
        return lax.axis_size(self.axis) if self.axis else 1

    @property
    def rank(self) -> Any:
        return lax.axis_index(self.axis) if self.axis else 0

    @property
    def own(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.ranks


class Scheme(Costed):
    """How tokens meet experts, forward and backward. Stateless, frozen, hashable; never differentiated.

    Below, x is [M, D], weights [M, k] and experts [M, k] of this rank; an expert of num_experts is none.
    """

    def plan(self, job: Job, experts: jax.Array) -> Any:
        """Returns a pytree of integers: where everything goes."""
        raise NotImplementedError

    def demand(self, job: Job, plan: Any, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        """Returns (rows, rows that a pass has room for, rows that may ever come) of the fullest places."""
        raise NotImplementedError

    def forward(
        self, job: Job, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        """Returns the weighted sums [M, D'] of what the experts make of the tokens, in the dtype of x, and, with `keep`, what
        a backward needs of the first pass."""
        raise NotImplementedError

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
        """Returns the gradients of x, weights, and the floats of params (None for others), in the dtypes of d_out, weights and
        params. `kept` is what the forward kept; x() is asked for where there are further passes."""
        raise NotImplementedError


def summed(job: Job, passes: jax.Array, like: Any, first: Any, further: Callable) -> Any:
    """Returns first + part(1) + ... + part(passes - 1), part = further(), in the dtypes of `like`. The first stands outside the
    loop: most steps need no other, and then nothing of it is in memory in float32."""

    def narrow(total: Any) -> Any:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), total, like)

    def loop(first: Any) -> Any:
        part = further()

        def more(state: Any) -> Any:
            i, total = state
            return i + 1, add(total, part(i))

        start = jnp.int32(1), jax.tree.map(wide, first)
        return narrow(lax.while_loop(lambda state: state[0] < passes, more, start)[1])

    first = narrow(first)
    return first if job.single else lax.cond(passes > 1, loop, lambda first: first, first)


def add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# -- rows that travel ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Where the pairs of this rank stand in the order of their experts; those that have none are last.

    Attributes:
      order: [M * k], the pairs in that order. place: [M, k], the inverse. expert: [M, k], num_experts for none.
      sizes: [ranks, E], the pairs of every rank for every expert.
    """

    order: jax.Array
    place: jax.Array
    expert: jax.Array
    sizes: jax.Array


def inverse(order: jax.Array) -> jax.Array:
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def before(sizes: jax.Array, dim: int) -> jax.Array:
    """Returns the sum of the entries before each."""
    return jnp.cumsum(sizes, axis=dim) - sizes


def order_of(experts: jax.Array) -> jax.Array:
    """Returns the pairs in the order of their experts, stable. (`jnp.argsort` of jax 0.11 loses that it varies over a mesh.)"""
    keys = experts.reshape(-1).astype(jnp.uint32)  # without a sign: what GPUs sort fastest
    return lax.sort((keys, vary_alike(jnp.arange(keys.size, dtype=jnp.int32), keys)), num_keys=1, is_stable=True)[1]


def plan_of(experts: jax.Array, num_experts: int, axis: tuple[str, ...]) -> Plan:
    """Returns where the pairs of experts [M, k] stand; all ranks of the axis learn of each other's numbers."""
    order = order_of(experts)
    sizes = expert_counts(experts, num_experts)[None]
    sizes = lax.all_gather(sizes, axis, axis=0, tiled=True) if axis else sizes
    return Plan(order, inverse(order).reshape(experts.shape), experts, sizes)


def within(sizes: jax.Array, low: Any, high: Any) -> jax.Array:
    """Returns how many rows of each block are among [low, high) of all; blocks follow each other in the last dim."""
    ends = jnp.cumsum(sizes, axis=-1)
    return jnp.clip(ends, low, high) - jnp.clip(ends - sizes, low, high)


def block_of(starts: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the last block that begins at or before each place, or the first. One kernel, where a search has a loop."""
    return jnp.maximum(jnp.sum(starts <= at[:, None], axis=1, dtype=jnp.int32) - 1, 0)


class ByExpert(NamedTuple):
    """Where rows stand that arrived from rank after rank, each rank's by expert, when those of an expert are put together.

    Both orders are of the same blocks (rank, expert), whose sizes are known: there is nothing to sort.

    Attributes:
      source: [R], the place among those that arrived, -1 past the last. place: [R], the inverse; anything where no row is.
    """

    source: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, start: jax.Array, rows: int) -> ByExpert:
        """From sizes [ranks, E / ranks] of blocks, the places [ranks] where those of a rank begin, and R."""
        at = jnp.arange(rows)
        here = start[:, None] + before(sizes, 1)
        there = before(sizes.T.reshape(-1), 0).reshape(sizes.T.shape).T
        block = block_of(there.T.reshape(-1), at)
        source = (here - there).T.reshape(-1)[block] + at
        block = block_of(here.reshape(-1), at)
        place = jnp.minimum((there - here).reshape(-1)[block] + at, rows - 1)
        return cls(jnp.where(at < sizes.sum(), source, -1), place)


class Window(NamedTuple):
    """The pairs of one chunk of a pass.

    Attributes:
      pair: [S], the pair in each place of what is sent, -1 for none. slot: [M, k], the place of a pair, -1 for not this time.
      sizes: [E / ranks], the rows that arrive for each expert. by: how they are put together; None where they are already.
      moves: what `there` and `back` need to know.
    """

    pair: jax.Array
    slot: jax.Array
    sizes: jax.Array
    by: ByExpert | None
    moves: Any = ()


def taken(x: jax.Array, pair: jax.Array, top_k: int) -> jax.Array:
    """Returns the rows of x [M, ...] of the tokens of some pairs; 0 where there is none."""
    rows = x[jnp.maximum(pair, 0) // top_k]
    return jnp.where((pair >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


def combined(rows: jax.Array, slot: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns, for each token, the sum of its choices' rows, each times its weight. Nothing of [M, k, D] is made."""

    def total(rows: jax.Array, slot: jax.Array, weights: jax.Array | None, after: Callable = lambda x: x) -> jax.Array:
        total: Any = 0
        for j in range(slot.shape[1]):
            row = wide(rows[jnp.maximum(slot[:, j], 0)])
            row = row if weights is None else row * weights[:, j, None].astype(row.dtype)
            total, slot = after((total + jnp.where((slot[:, j] >= 0)[:, None], row, 0), slot))
        return total

    # A TPU fuses no gather with a sum, so all of them would be made first. There each waits for the sum of those before it.
    one_by_one = functools.partial(total, after=lax.optimization_barrier)
    return lax.platform_dependent(rows, slot, weights, tpu=one_by_one, default=total)


class Rows(Scheme):
    """A row for each pair travels to its expert, and what is made of it travels back. Weights are applied at home."""

    def window(self, job: Job, plan: Plan, q: jax.Array) -> Window:
        raise NotImplementedError

    def there(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        """Returns the rows [R, ...] that arrive here, where [S, ...] are sent."""
        raise NotImplementedError

    def back(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        """Returns the rows [S, ...] at home, from [R, ...] where they were sent to."""
        raise NotImplementedError

    def plan(self, job: Job, experts: jax.Array) -> Plan:
        return plan_of(experts, job.num_experts, job.axis)

    def forward(
        self, job: Job, passes: jax.Array, plan: Plan, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        own = _Params.of(params)

        def visit(q: jax.Array, keep: bool = False) -> tuple[jax.Array, Any]:
            w = self.window(job, plan, q)
            rows = self._rows(job, w, taken(x, w.pair, weights.shape[1]))
            made = _Made.of(job, own, rows, w.sizes, keep)
            return combined(self._home(job, w, made.y), w.slot, weights), made if keep else None

        chunks = [visit(jnp.int32(i), keep) for i in range(job.chunks)]
        first = functools.reduce(add, [out for out, _ in chunks])
        out = summed(job, passes, x, first, lambda: self._over_chunks(job, lambda q: visit(q)[0]))
        return out, [made for _, made in chunks] if keep else None

    def backward(
        self,
        job: Job,
        passes: jax.Array,
        plan: Plan,
        kept: Any,
        x: Callable,
        weights: Any,
        params: Any,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        top_k, own = weights.shape[1], _Params.of(params)

        def visit(q: jax.Array, made: Callable) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            w = self.window(job, plan, q)
            weight = jnp.where(w.pair >= 0, weights.reshape(-1)[jnp.maximum(w.pair, 0)], 0)
            d, weight = (self._rows(job, w, a) for a in (taken(d_out, w.pair, top_k), weight))
            by = made(w)
            d_own, d_rows = by.pull(own, (wide(d) * weight[:, None]).astype(by.y.dtype))
            d_weight = jnp.sum(wide(by.y) * wide(d), axis=1)
            d_rows, d_weight = (self._home(job, w, a) for a in (d_rows, d_weight))
            d_weight = jnp.where(w.slot >= 0, d_weight[jnp.maximum(w.slot, 0)], 0)
            return combined(d_rows, w.slot), d_weight, [wide(a) for a in d_own]

        def further() -> Callable:
            tokens = x()

            def again(w: Window) -> _Made:
                return _Made.of(job, own, self._rows(job, w, taken(tokens, w.pair, top_k)), w.sizes, True)

            return self._over_chunks(job, lambda q: visit(q, again))

        first = functools.reduce(add, [visit(jnp.int32(i), lambda _, i=i: kept[i]) for i in range(job.chunks)])
        d_x, d_weights, d_own = summed(job, passes, (d_out, weights, own.own), first, further)
        return d_x, d_weights, own.tree_of(d_own)

    @staticmethod
    def _over_chunks(job: Job, visit: Callable) -> Callable:
        """Returns the sum of the chunks of pass p, as a function of p."""
        return lambda p: functools.reduce(add, [visit(p * job.chunks + i) for i in range(job.chunks)])

    def _rows(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        """Returns what is sent as `apply` wants it: the rows of a group together, zeros last."""
        if window.by is None:
            return x
        with jax.named_scope("dispatch"):
            x = self.there(job, window, x)
        return taken(x, window.by.source, 1)

    def _home(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        if window.by is None:
            return x
        with jax.named_scope("combine"):
            return self.back(job, window, x[window.by.place])


class _Params(NamedTuple):
    """The params of `apply`, their floats apart."""

    leaves: list[Any]
    floats: list[int]
    tree: Any

    @classmethod
    def of(cls, params: Any) -> _Params:
        leaves, tree = jax.tree.flatten(params)
        return cls(leaves, [i for i, leaf in enumerate(leaves) if is_float_array(leaf)], tree)

    @property
    def own(self) -> list[jax.Array]:
        return [self.leaves[i] for i in self.floats]

    def whole(self, own: list[jax.Array]) -> Any:
        found = dict(zip(self.floats, own, strict=True))
        return self.tree.unflatten([found.get(i, leaf) for i, leaf in enumerate(self.leaves)])

    def tree_of(self, own: list[jax.Array]) -> Any:
        """Returns a tree like that of the params, None for what is no float."""
        found = dict(zip(self.floats, own, strict=True))
        return self.tree.unflatten([found.get(i) for i in range(len(self.leaves))])


@functools.partial(jax.tree_util.register_dataclass, data_fields=("y", "leaves"), meta_fields=("tree", "params"))
@dataclass(frozen=True)
class _Made:
    """What the experts made of rows, and what the backward needs for it; params are not among what is kept.

    Attributes:
      y: [R, D']. leaves: of the pullback `tree`, without those that are params. params: (its leaf, which param) of these.
    """

    y: jax.Array
    leaves: list[jax.Array]
    tree: Any
    params: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, job: Job, params: _Params, rows: jax.Array, sizes: jax.Array, keep: bool) -> _Made:
        if not keep:
            return cls(_applied(job, params.whole(params.own), rows, sizes), [], None, ())
        y, pull = jax.vjp(lambda own, rows: _applied(job, params.whole(own), rows, sizes), params.own, rows)
        leaves, tree = jax.tree.flatten(pull)
        known = {id(leaf): i for i, leaf in enumerate(params.leaves)}
        again = tuple((i, known[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in known)
        return cls(y, [leaf for leaf in leaves if id(leaf) not in known], tree, again)

    def pull(self, params: _Params, d: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        rest, known = iter(self.leaves), dict(self.params)
        leaves = [params.leaves[known[i]] if i in known else next(rest) for i in range(len(self.leaves) + len(known))]
        return jax.tree.unflatten(self.tree, leaves)(d)


def _applied(job: Job, params: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    y = job.apply(params, rows, sizes)
    if y.ndim != 2 or y.shape[0] != rows.shape[0]:
        raise ValueError(
            f"exchange: argument 'apply' must return a row for each of its {rows.shape[0]} rows, got shape {y.shape}"
        )
    return y


def room(job: Job, balanced: float, most: int) -> int:
    """Returns the rows that one chunk of a pass has in a place where `balanced` come if all experts have as many, and never
    more than `most`."""
    return max(-(-min(math.ceil(job.buffer * balanced), most) // job.chunks), 1)
