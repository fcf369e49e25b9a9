"""The experts of one device and all rows that are theirs: sorted by expert, multiplied, weighed and added up, in passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels
from ejdist.costs import Traffic
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.rows import (
    DispatchSpec,
    Plan,
    Scheme,
    add,
    combined,
    over_chunks,
    plan_of,
    room_of,
    summed,
    taken,
    wide,
    within,
)
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import vary_alike


class Pairs(NamedTuple):
    """The pairs of one chunk of a pass.

    Attributes:
      pair: [S], the pair in each place, -1 for none. slot: [M, k], the place of a pair, -1 if it is not among these.
      sizes: [E], the rows of each expert.
    """

    pair: jax.Array
    slot: jax.Array
    sizes: jax.Array


@dataclass(frozen=True)
class Local(Scheme):
    """One device has all experts, or all rows of its experts: nothing is sent. Rows are weighed and added up where they are."""

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        return "one device" if math.prod(sizes) > 1 else None

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        return (room_of(shape.buffer * shape.pairs, shape.pairs, chunks),)

    def plan(self, job: DispatchSpec, experts: jax.Array, weights: jax.Array) -> Plan:
        return plan_of(experts, job.num_experts)

    def need(self, job: DispatchSpec, plan: Plan) -> jax.Array:
        return plan.sizes.sum(dtype=jnp.int32)[None]

    def pairs(self, job: DispatchSpec, plan: Plan, q: jax.Array) -> Pairs:
        """Returns chunk q of all."""
        room = job.rooms[0]
        low = q * room
        slot = plan.slots - low
        # -1 past the end. A slice, since a gather checks every index, by a kernel that XLA cannot compile for v5p.
        pair = lax.dynamic_slice_in_dim(jnp.pad(plan.pairs, (0, room), constant_values=-1), low, room)
        here = (plan.slots >= 0) & (slot >= 0) & (slot < room)
        return Pairs(pair, jnp.where(here, slot, -1), within(plan.sizes, low, low + room))

    def forward(
        self, job: DispatchSpec, passes: jax.Array, plan: Plan, x: Any, weights: Any, params: Any, keep: bool = False
    ) -> tuple[jax.Array, Any]:
        flat_params = _Params.of(params)

        def visit(q: jax.Array, keep: bool = False) -> tuple[jax.Array, Any]:
            w = self.pairs(job, plan, q)
            applied = _Made.of(job, flat_params, x, w, keep)
            return wide(combined(applied.y, w.slot, weights)), applied if keep else None

        def first() -> tuple[jax.Array, Any]:
            chunks = [visit(jnp.int32(i), keep) for i in range(job.chunks)]
            return functools.reduce(add, [out for out, _ in chunks]), [kept for _, kept in chunks] if keep else None

        return summed(
            job, passes[0], x, first, lambda: over_chunks(job, lambda q: visit(q)[0]), self._single(job, weights)
        )

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
        flat_params = _Params.of(params)

        def visit(q: jax.Array, applied_of: Callable) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            w = self.pairs(job, plan, q)
            made = applied_of(w)
            d_rows, d_weight = cotangents(made.y, d_out, w, weights)
            d_own, d_rows = made.pull(flat_params, d_rows)
            d_x = d_rows if job.gathers else combined(d_rows, w.slot)
            return wide(d_x), d_weight, [wide(a) for a in d_own]

        def again() -> Callable:
            tokens = x()
            return lambda w: _Made.of(job, flat_params, tokens, w, True)

        def first() -> tuple[Any, None]:
            of = [lambda _, made=made: made for made in kept] if kept is not None else [again()] * job.chunks
            return functools.reduce(add, [visit(jnp.int32(i), of[i]) for i in range(job.chunks)]), None

        def further() -> Callable:
            made = again()
            return over_chunks(job, lambda q: visit(q, made))

        like = d_out, weights, flat_params.own
        (d_x, d_weights, d_own), _ = summed(job, passes[0], like, first, further, self._single(job, weights))
        return d_x, d_weights, flat_params.tree_of(d_own)

    @staticmethod
    def _single(job: DispatchSpec, weights: jax.Array) -> bool:
        return job.rooms[0] * job.chunks >= weights.size

    def cost(self, shape: ExchangeShape) -> Traffic:
        return Traffic()

    def memory(self, shape: ExchangeShape) -> int:
        # Sorted rows, outputs and gradients, and what is between; and gate, up and their product.
        return 5 * shape.wide + 5 * shape.narrow

    def arriving(self, shape: ExchangeShape) -> float:
        return shape.rows


def cotangents(rows: jax.Array, d: jax.Array, pairs: Pairs, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of `combined(rows, pairs.slot, weights)`: of rows, in their dtype, and of weights [M, k]."""

    def plain(rows: jax.Array, d: jax.Array, pairs: Pairs, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.where(pairs.pair >= 0, weights.reshape(-1)[jnp.maximum(pairs.pair, 0)], 0)
        d = taken(d, pairs.pair, weights.shape[1])
        d_weights = jnp.sum(wide(rows) * wide(d), axis=1)
        d_weights = jnp.where(pairs.slot >= 0, d_weights[jnp.maximum(pairs.slot, 0)], 0)
        return (wide(d) * weight[:, None]).astype(rows.dtype), d_weights

    def by_kernel(rows: jax.Array, d: jax.Array, pairs: Pairs, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return kernels.combine_rows(rows, pairs.slot, pairs.pair, weights)

        d_rows, d_weights = jax.vjp(total, rows, weights)[1](d.astype(rows.dtype))
        return d_rows, wide(d_weights)

    # Rows may be parts of sums over other axes. Then gradients of weights are, too, and whoever asked adds them up.
    rows, d, weights = vary_alike((rows, d, weights))
    return lax.platform_dependent(rows, d, pairs, weights, cuda=by_kernel, default=plain)


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


def floats_of(params: Any) -> Any:
    """Returns the params with None for leaves that are not floats."""
    flat = _Params.of(params)
    return flat.tree_of(flat.own)


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
    def of(cls, job: DispatchSpec, params: _Params, x: jax.Array, pairs: Pairs, keep: bool) -> _Made:
        """Args: x: the tokens [M, D] that the pairs are of."""
        rows = x if job.gathers else taken(x, pairs.pair, pairs.slot.shape[1])
        if not keep:
            return cls(_applied(job, params.whole(params.own), rows, pairs), [], None, ())
        y, pull = jax.vjp(lambda arrays, rows: _applied(job, params.whole(arrays), rows, pairs), params.own, rows)
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


def _applied(job: DispatchSpec, params: Any, x: jax.Array, pairs: Pairs) -> jax.Array:
    count = pairs.pair.size
    if job.gathers:
        tokens = jnp.where(pairs.pair < 0, -1, pairs.pair // pairs.slot.shape[1])
        y = job.apply(params, x, pairs.sizes, rows=tokens, slots=pairs.slot)
    else:
        y = job.apply(params, x, pairs.sizes)
    if y.ndim != 2 or y.shape[0] != count:
        raise ValueError(
            f"exchange: argument 'apply' must return a row for each of its {count} rows, got shape {y.shape}"
        )
    return y
