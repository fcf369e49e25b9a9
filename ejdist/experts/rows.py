"""The passes of expert parallelism: code shared by all schemes that send rows to the experts of other ranks and back.

A pair is a token and one of its choices, m * k + j. Pairs are sorted by expert, and so by the rank that holds it. Shapes limit
the rows of a pass; the rest go in the next pass, and all ranks run the same number of passes. So memory is that of one pass
whatever the router does, and every pair arrives.
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
class DispatchSpec:
    """The settings of an exchange, the same on all ranks.

    Attributes:
      apply: (params, rows [R, D], group_sizes [E / ranks]) -> rows [R, D'].
      axis: mesh axes that the experts are sharded over, the major one first; () for one device.
      buffer: rows that a pass can hold, as a multiple of the balanced load.
      chunks: independent parts of a pass, so that one is sent while another is multiplied.
      single: whether one pass always suffices, whatever the router does.
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
    """How tokens are dispatched to experts, forward and backward. Stateless, frozen, hashable; never differentiated.

    Below, x is [M, D], weights [M, k] and experts [M, k] on this rank; expert number num_experts means no expert.
    """

    def plan(self, job: DispatchSpec, experts: jax.Array) -> Any:
        """Returns a pytree of integer arrays: the destinations of all pairs."""
        raise NotImplementedError

    def demand(self, job: DispatchSpec, plan: Any, tokens: int, top_k: int) -> list[tuple[jax.Array, int, int]]:
        """Returns a list of (rows needed, rows that a pass can hold, most rows that can ever be needed), each a maximum over
        ranks."""
        raise NotImplementedError

    def forward(
        self, job: DispatchSpec, passes: jax.Array, plan: Any, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        """Returns (the weighted sums [M, D'] of the experts' outputs, in the dtype of x; with `keep`, the residuals of the
        first pass)."""
        raise NotImplementedError

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
        """Returns the gradients of x, weights, and the floats of params (None for others), in the dtypes of d_out, weights and
        params. `kept` are the residuals of the forward; x() is called only if there are more passes."""
        raise NotImplementedError


def summed(job: DispatchSpec, passes: jax.Array, like: Any, first: Any, further: Callable) -> Any:
    """Returns first + part(1) + ... + part(passes - 1), part = further(), in the dtypes of `like`. The first is outside the
    loop: most steps need no other pass, and then no float32 copy of it is allocated."""

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


# -- rows that are sent ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The pairs of this rank sorted by expert; pairs without one come last.

    Attributes:
      order: [M * k], the pairs in that order. place: [M, k], the inverse. expert: [M, k], num_experts for none.
      sizes: [ranks, E], the number of pairs of each rank for each expert.
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
    """Returns the pairs sorted by expert, stably. (`jnp.argsort` in jax 0.11 loses the varying axes of its input.)"""
    keys = experts.reshape(-1).astype(jnp.uint32)  # GPUs sort unsigned integers fastest
    return lax.sort((keys, vary_alike(jnp.arange(keys.size, dtype=jnp.int32), keys)), num_keys=1, is_stable=True)[1]


def plan_of(experts: jax.Array, num_experts: int, axis: tuple[str, ...]) -> Plan:
    """Returns the plan of the pairs in experts [M, k]; gathers the counts of all ranks of the axis."""
    order = order_of(experts)
    sizes = expert_counts(experts, num_experts)[None]
    sizes = lax.all_gather(sizes, axis, axis=0, tiled=True) if axis else sizes
    return Plan(order, inverse(order).reshape(experts.shape), experts, sizes)


def within(sizes: jax.Array, low: Any, high: Any) -> jax.Array:
    """Returns how many rows of each block fall in [low, high); blocks are contiguous along the last dim."""
    ends = jnp.cumsum(sizes, axis=-1)
    return jnp.clip(ends, low, high) - jnp.clip(ends - sizes, low, high)


def block_of(starts: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the last block that begins at or before each index, or the first. A single kernel; a binary search would loop."""
    return jnp.maximum(jnp.sum(starts <= at[:, None], axis=1, dtype=jnp.int32) - 1, 0)


class ByExpert(NamedTuple):
    """The permutation of received rows from (rank, expert) order to (expert, rank) order.

    Both orders consist of the same blocks, whose sizes are known, so nothing needs to be sorted.

    Attributes:
      source: [R], index among the received rows, -1 past the last. place: [R], the inverse; undefined where there is no row.
    """

    source: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, start: jax.Array, rows: int) -> ByExpert:
        """Args: block sizes [ranks, E / ranks], the index [ranks] where each rank's rows begin, and R."""
        index = jnp.arange(rows)
        here = start[:, None] + before(sizes, 1)
        by_expert = before(sizes.T.reshape(-1), 0).reshape(sizes.T.shape).T
        block = block_of(by_expert.T.reshape(-1), index)
        source = (here - by_expert).T.reshape(-1)[block] + index
        block = block_of(here.reshape(-1), index)
        place = jnp.minimum((by_expert - here).reshape(-1)[block] + index, rows - 1)
        return cls(jnp.where(index < sizes.sum(), source, -1), place)


class PassRows(NamedTuple):
    """The pairs of one chunk of a pass.

    Attributes:
      pair: [S], the pair in each send slot, -1 for none. slot: [M, k], the send slot of a pair, -1 if it is not in this pass.
      sizes: [E / ranks], the rows received for each expert. by: their permutation by expert; None if they are sorted already.
      moves: metadata for `dispatch` and `combine`.
    """

    pair: jax.Array
    slot: jax.Array
    sizes: jax.Array
    by: ByExpert | None
    moves: Any = ()


def taken(x: jax.Array, pair: jax.Array, top_k: int) -> jax.Array:
    """Returns the rows of x [M, ...] for the tokens of some pairs; 0 for pair -1."""
    rows = x[jnp.maximum(pair, 0) // top_k]
    return jnp.where((pair >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


def combined(rows: jax.Array, slot: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns the weighted sum of each token's rows, without materialising [M, k, D]."""

    def total(rows: jax.Array, slot: jax.Array, weights: jax.Array | None, after: Callable = lambda x: x) -> jax.Array:
        total: Any = 0
        for j in range(slot.shape[1]):
            row = wide(rows[jnp.maximum(slot[:, j], 0)])
            row = row if weights is None else row * weights[:, j, None].astype(row.dtype)
            total, slot = after((total + jnp.where((slot[:, j] >= 0)[:, None], row, 0), slot))
        return total

    # XLA for TPUs does not fuse a gather into a sum, so all gathers would be materialised at once; the barrier serialises them.
    one_by_one = functools.partial(total, after=lax.optimization_barrier)
    return lax.platform_dependent(rows, slot, weights, tpu=one_by_one, default=total)


class PermutationScheme(Scheme):
    """Sends a row per pair to its expert and the result back. Weights are applied on the sending rank."""

    def window(self, job: DispatchSpec, plan: Plan, q: jax.Array) -> PassRows:
        raise NotImplementedError

    def dispatch(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        """Sends the rows [S, ...], and returns the received rows [R, ...]."""
        raise NotImplementedError

    def combine(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        """Sends the rows [R, ...] back, and returns them in the order [S, ...] of `dispatch`."""
        raise NotImplementedError

    def plan(self, job: DispatchSpec, experts: jax.Array) -> Plan:
        return plan_of(experts, job.num_experts, job.axis)

    def forward(
        self, job: DispatchSpec, passes: jax.Array, plan: Plan, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        flat_params = _Params.of(params)

        def visit(q: jax.Array, keep: bool = False) -> tuple[jax.Array, Any]:
            w = self.window(job, plan, q)
            rows = self._rows(job, w, taken(x, w.pair, weights.shape[1]))
            applied = _Made.of(job, flat_params, rows, w.sizes, keep)
            return combined(self._home(job, w, applied.y), w.slot, weights), applied if keep else None

        chunks = [visit(jnp.int32(i), keep) for i in range(job.chunks)]
        first = functools.reduce(add, [out for out, _ in chunks])
        out = summed(job, passes, x, first, lambda: self._over_chunks(job, lambda q: visit(q)[0]))
        return out, [applied for _, applied in chunks] if keep else None

    def backward(
        self,
        job: DispatchSpec,
        passes: jax.Array,
        plan: Plan,
        kept: Any,
        x: Callable,
        weights: Any,
        params: Any,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        top_k, flat_params = weights.shape[1], _Params.of(params)

        def visit(q: jax.Array, applied_of: Callable) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            w = self.window(job, plan, q)
            weight = jnp.where(w.pair >= 0, weights.reshape(-1)[jnp.maximum(w.pair, 0)], 0)
            d, weight = (self._rows(job, w, a) for a in (taken(d_out, w.pair, top_k), weight))
            by = applied_of(w)
            d_own, d_rows = by.pull(flat_params, (wide(d) * weight[:, None]).astype(by.y.dtype))
            d_weight = jnp.sum(wide(by.y) * wide(d), axis=1)
            d_rows, d_weight = (self._home(job, w, a) for a in (d_rows, d_weight))
            d_weight = jnp.where(w.slot >= 0, d_weight[jnp.maximum(w.slot, 0)], 0)
            return combined(d_rows, w.slot), d_weight, [wide(a) for a in d_own]

        def further() -> Callable:
            tokens = x()

            def again(w: PassRows) -> _Made:
                return _Made.of(job, flat_params, self._rows(job, w, taken(tokens, w.pair, top_k)), w.sizes, True)

            return self._over_chunks(job, lambda q: visit(q, again))

        first = functools.reduce(add, [visit(jnp.int32(i), lambda _, i=i: kept[i]) for i in range(job.chunks)])
        d_x, d_weights, d_own = summed(job, passes, (d_out, weights, flat_params.own), first, further)
        return d_x, d_weights, flat_params.tree_of(d_own)

    @staticmethod
    def _over_chunks(job: DispatchSpec, visit: Callable) -> Callable:
        """Returns the sum of the chunks of pass p, as a function of p."""
        return lambda p: functools.reduce(add, [visit(p * job.chunks + i) for i in range(job.chunks)])

    def _rows(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        """Dispatches rows and sorts them for `apply`: by group, zeros last."""
        if window.by is None:
            return x
        with jax.named_scope("dispatch"):
            x = self.dispatch(job, window, x)
        return taken(x, window.by.source, 1)

    def _home(self, job: DispatchSpec, window: PassRows, x: jax.Array) -> jax.Array:
        if window.by is None:
            return x
        with jax.named_scope("combine"):
            return self.combine(job, window, x[window.by.place])


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

    def whole(self, arrays: list[jax.Array]) -> Any:
        by_index = dict(zip(self.floats, arrays, strict=True))
        return self.tree.unflatten([by_index.get(i, leaf) for i, leaf in enumerate(self.leaves)])

    def tree_of(self, arrays: list[jax.Array]) -> Any:
        """Returns a tree like the params, with None for leaves that are not floats."""
        by_index = dict(zip(self.floats, arrays, strict=True))
        return self.tree.unflatten([by_index.get(i) for i in range(len(self.leaves))])


@functools.partial(jax.tree_util.register_dataclass, data_fields=("y", "leaves"), meta_fields=("tree", "params"))
@dataclass(frozen=True)
class _Made:
    """The experts' outputs and their residuals, without the params.

    Attributes:
      y: [R, D']. leaves: of the pullback `tree`, without those that are params. params: (its leaf, which param) of these.
    """

    y: jax.Array
    leaves: list[jax.Array]
    tree: Any
    params: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, job: DispatchSpec, params: _Params, rows: jax.Array, sizes: jax.Array, keep: bool) -> _Made:
        if not keep:
            return cls(_applied(job, params.whole(params.own), rows, sizes), [], None, ())
        y, pull = jax.vjp(lambda arrays, rows: _applied(job, params.whole(arrays), rows, sizes), params.own, rows)
        leaves, tree = jax.tree.flatten(pull)
        index_of = {id(leaf): i for i, leaf in enumerate(params.leaves)}
        again = tuple((i, index_of[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in index_of)
        return cls(y, [leaf for leaf in leaves if id(leaf) not in index_of], tree, again)

    def pull(self, params: _Params, d: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        rest, param_of = iter(self.leaves), dict(self.params)
        leaves = [
            params.leaves[param_of[i]] if i in param_of else next(rest) for i in range(len(self.leaves) + len(param_of))
        ]
        return jax.tree.unflatten(self.tree, leaves)(d)


def _applied(job: DispatchSpec, params: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    y = job.apply(params, rows, sizes)
    if y.ndim != 2 or y.shape[0] != rows.shape[0]:
        raise ValueError(
            f"exchange: argument 'apply' must return a row for each of its {rows.shape[0]} rows, got shape {y.shape}"
        )
    return y


def buffer_rows(job: DispatchSpec, balanced: float, most: int) -> int:
    """Returns the buffer size in rows of one chunk of a pass, for a balanced load of `balanced` rows; at most `most`."""
    return max(-(-min(math.ceil(job.buffer * balanced), most) // job.chunks), 1)
