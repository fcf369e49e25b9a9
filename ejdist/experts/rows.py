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

from kernels._core.binding import is_float_array
from kernels._core.dispatch import vary_alike


@dataclass(frozen=True)
class Job:
    """What is the same on all ranks of an exchange.

    Attributes:
      apply: (params, rows [R, D], group_sizes [E / ranks]) -> rows [R, D'].
      axis: mesh axes that the experts are split over, the major one first; () for one device.
      buffer: rows that a pass can take, as a multiple of those that each rank has where all experts have as many.
      chunks: parts of a pass; none waits for another, so that one travels while another is multiplied.
    """

    apply: Callable
    axis: tuple[str, ...]
    scheme: Scheme
    num_experts: int
    buffer: float
    chunks: int

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


class Scheme:
    """How tokens meet experts, forward and backward. Stateless, frozen, hashable; never differentiated.

    Below, x is [M, D], weights [M, k] and experts [M, k] of this rank; an expert of num_experts is none.
    """

    def plan(self, job: Job, experts: jax.Array) -> Any:
        """Returns a pytree of integers: where everything goes."""
        raise NotImplementedError

    def demand(self, job: Job, plan: Any, tokens: int, top_k: int) -> list[tuple[jax.Array, int]]:
        """Returns (rows, rows that a pass has room for) of the fullest places."""
        raise NotImplementedError

    def forward(self, job: Job, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any) -> jax.Array:
        """Returns the weighted sums [M, D'] of what the experts make of the tokens, in float32 or wider."""
        raise NotImplementedError

    def backward(
        self, job: Job, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Returns the gradients of x, weights, and the floats of params (None for others), in float32 or wider."""
        raise NotImplementedError


def summed(passes: jax.Array, part: Callable) -> Any:
    """Returns the sum of part(0) ... part(passes - 1). The first stands outside the loop: most steps need no other."""

    def more(state: Any) -> Any:
        i, total = state
        return i + 1, add(total, part(i))

    return lax.while_loop(lambda state: state[0] < passes, more, (jnp.int32(1), part(jnp.int32(0))))[1]


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


class Window(NamedTuple):
    """The pairs of one chunk of a pass.

    Attributes:
      pair: [S], the pair in each place of what is sent, -1 for none. slot: [M, k], the place of a pair, -1 for not this time.
      group: [R], the expert, of this rank's, of each row that arrives; their number for a place that is empty.
      moves: what `there` and `back` need to know.
    """

    pair: jax.Array
    slot: jax.Array
    group: jax.Array
    moves: Any = ()


def count(experts: jax.Array, num_experts: int) -> jax.Array:
    """Returns [E]: how many pairs an expert has."""
    zeros = vary_alike(jnp.zeros(num_experts, jnp.int32), experts)
    return zeros.at[experts.reshape(-1)].add(1, mode="drop")


def _inverse(order: jax.Array) -> jax.Array:
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def before(sizes: jax.Array, dim: int) -> jax.Array:
    """Returns the sum of the entries before each."""
    return jnp.cumsum(sizes, axis=dim) - sizes


def plan_of(experts: jax.Array, num_experts: int, axis: tuple[str, ...]) -> Plan:
    order = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    sizes = count(experts, num_experts)[None]
    sizes = lax.all_gather(sizes, axis, axis=0, tiled=True) if axis else sizes
    return Plan(order, _inverse(order).reshape(experts.shape), experts, sizes)


def taken(x: jax.Array, pair: jax.Array, top_k: int) -> jax.Array:
    """Returns the rows of x [M, ...] of the tokens of some pairs; 0 where there is none."""
    rows = x[jnp.maximum(pair, 0) // top_k]
    return jnp.where((pair >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


def combined(rows: jax.Array, slot: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns, for each token, the sum of its choices' rows, each times its weight. Nothing of [M, k, D] is made."""
    total: Any = 0
    for j in range(slot.shape[1]):
        row = wide(rows[jnp.maximum(slot[:, j], 0)])
        row = row if weights is None else row * weights[:, j, None].astype(row.dtype)
        total = total + jnp.where((slot[:, j] >= 0)[:, None], row, 0)
    return total


class _Sorted(NamedTuple):
    """Rows that have arrived, as `apply` wants them: those of a group together, empty places last."""

    perm: jax.Array
    inverse: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, group: jax.Array, groups: int) -> _Sorted:
        perm = jnp.argsort(group, stable=True)
        return cls(perm, _inverse(perm), count(group, groups))


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

    def forward(self, job: Job, passes: jax.Array, plan: Plan, x: Any, weights: Any, params: Any) -> jax.Array:
        def visit(q: jax.Array) -> jax.Array:
            w = self.window(job, plan, q)
            arrived = self._there(job, w, taken(x, w.pair, weights.shape[1]))
            by = _Sorted.of(w.group, job.own)
            y = _applied(job, params, arrived[by.perm], by.sizes)
            return combined(self._back(job, w, y[by.inverse]), w.slot, weights)

        return summed(passes, self._over_chunks(job, visit))

    def backward(
        self, job: Job, passes: jax.Array, plan: Plan, x: Any, weights: Any, params: Any, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        top_k = weights.shape[1]
        leaves, tree = jax.tree.flatten(params)
        floats = [i for i, leaf in enumerate(leaves) if is_float_array(leaf)]

        def visit(q: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            w = self.window(job, plan, q)
            by = _Sorted.of(w.group, job.own)
            weight = jnp.where(w.pair >= 0, weights.reshape(-1)[jnp.maximum(w.pair, 0)], 0)
            sent = taken(x, w.pair, top_k), taken(d_out, w.pair, top_k), weight
            rows, d, weight = (self._there(job, w, a)[by.perm] for a in sent)

            def of(own: list[jax.Array], rows: jax.Array) -> jax.Array:
                whole = list(leaves)
                for i, leaf in zip(floats, own, strict=True):
                    whole[i] = leaf
                return _applied(job, jax.tree.unflatten(tree, whole), rows, by.sizes)

            y, pull = jax.vjp(of, [leaves[i] for i in floats], rows)
            d_own, d_rows = pull((wide(d) * weight[:, None]).astype(y.dtype))
            d_weight = jnp.sum(wide(y) * wide(d), axis=1)
            d_rows, d_weight = (self._back(job, w, a[by.inverse]) for a in (d_rows, d_weight))
            d_weight = jnp.where(w.slot >= 0, d_weight[jnp.maximum(w.slot, 0)], 0)
            return combined(d_rows, w.slot), d_weight, [wide(a) for a in d_own]

        d_x, d_weights, d_own = summed(passes, self._over_chunks(job, visit))
        grads: list[Any] = [None] * len(leaves)
        for i, d in zip(floats, d_own, strict=True):
            grads[i] = d
        return d_x, d_weights, jax.tree.unflatten(tree, grads)

    @staticmethod
    def _over_chunks(job: Job, visit: Callable) -> Callable:
        """Returns the sum of the chunks of pass p, as a function of p."""
        return lambda p: functools.reduce(add, [visit(p * job.chunks + i) for i in range(job.chunks)])

    def _there(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        with jax.named_scope("dispatch"):
            return self.there(job, window, x)

    def _back(self, job: Job, window: Window, x: jax.Array) -> jax.Array:
        with jax.named_scope("combine"):
            return self.back(job, window, x)


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
