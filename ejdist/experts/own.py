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

from ejdist.costs import Traffic
from ejdist.experts.apart import Apart, apart_gradients, cotangents
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.rows import (
    DispatchSpec,
    Plan,
    Scheme,
    Sums,
    add,
    added_to,
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


class Pairs(NamedTuple):
    """The pairs of one chunk of a pass.

    Attributes:
      pair: [S], the pair in each place, -1 for none. slot: [M, k], the place of a pair, -1 if it is not among these.
      sizes: [E], the rows of each expert.
    """

    pair: jax.Array
    slot: jax.Array
    sizes: jax.Array

    @property
    def tokens(self) -> jax.Array:
        """[S], the token of each pair, -1 for none."""
        return jnp.where(self.pair < 0, -1, self.pair // self.slot.shape[1])

    @property
    def places(self) -> dict[str, jax.Array]:
        return {"sizes": self.sizes, "rows": self.tokens, "slots": self.slot}


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

        def made(q: jax.Array, keep: bool = False) -> tuple[Pairs, _Made]:
            w = self.pairs(job, plan, q)
            return w, _Made.of(job, flat_params, x, w, keep)

        def first() -> tuple[Sums, Any]:
            chunks = [made(jnp.int32(i), keep) for i in range(job.chunks)]
            rows = functools.reduce(add, [wide(combined(of.y, w.slot, weights)) for w, of in chunks])
            return Sums(rows), [of for _, of in chunks] if keep else None

        def visit(q: jax.Array, sums: Sums) -> Sums:
            w, of = made(q)
            return Sums(combined(of.y, w.slot, weights, sums.rows))

        further = functools.partial(over_chunks, job, visit)
        sums, kept = summed(job, passes[0], Sums(x), first, further, self._single(job, weights))
        return sums.rows, kept

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

        def visit(q: jax.Array, applied_of: Callable, total: jax.Array | None = None) -> Sums:
            w = self.pairs(job, plan, q)
            made = applied_of(w)
            if made.hidden is None:
                d_rows, d_weight = cotangents(made.y, d_out, w, weights)
                d_own, d_rows = made.pull(flat_params, d_rows)
                d_x = added_to(total, d_rows) if job.gathers else combined(d_rows, w.slot, None, total)
            else:
                d_own, d_x, d_weight = apart_gradients(job.apply, made, flat_params, d_out, w, weights, total)
            return Sums(d_x, (d_weight, [wide(a) for a in d_own]))

        def again() -> Callable:
            tokens = x()
            return lambda w: _Made.of(job, flat_params, tokens, w, True)

        def first() -> tuple[Sums, None]:
            of = [lambda _, made=made: made for made in kept] if kept is not None else [again()] * job.chunks
            chunks = [visit(jnp.int32(i), of[i]) for i in range(job.chunks)]
            return functools.reduce(add, [Sums(wide(part.rows), part.rest) for part in chunks]), None

        def further() -> Callable:
            made = again()

            def more(q: jax.Array, sums: Sums) -> Sums:
                part = visit(q, made, sums.rows)
                return Sums(part.rows, add(sums.rest, part.rest))

            return over_chunks(job, more)

        like = Sums(d_out, (weights, flat_params.own))
        sums, _ = summed(job, passes[0], like, first, further, self._single(job, weights))
        d_weights, d_own = sums.rest
        return sums.rows, d_weights, flat_params.tree_of(d_own)

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


class _Params(NamedTuple):
    """The params of `apply`, their floats apart."""

    leaves: list[Any]
    floats: list[int]
    tree: Any

    @classmethod
    def of(cls, params: Any) -> _Params:
        leaves, tree = jax.tree.flatten(params)
        return cls(leaves, [i for i, leaf in enumerate(leaves) if is_float_array(leaf)], tree)

    def place(self, name: str) -> int:
        """Returns which of the floats is params[name]."""
        leaf = self.whole(self.own)[name]
        return next(i for i, own in enumerate(self.own) if own is leaf)

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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("y", "leaves", "hidden", "x", "kept"), meta_fields=("tree", "params")
)
@dataclass(frozen=True)
class _Made:
    """The experts' outputs and their residuals, without the params.

    Attributes:
      y: [R, D']. leaves: of the pullback `tree`, without those that are params. params: (its leaf, which param) of these.
      hidden: what the last product multiplies, where `apply` has that apart; the pullback is then of this alone.
      x, kept: where this is a gated product: the tokens, and what its backward takes. There is no pullback.
    """

    y: jax.Array
    leaves: list[jax.Array]
    tree: Any
    params: tuple[tuple[int, int], ...]
    hidden: Any = None
    x: Any = None
    kept: Any = None

    @classmethod
    def of(cls, job: DispatchSpec, params: _Params, x: jax.Array, pairs: Pairs, keep: bool) -> _Made:
        """Args: x: the tokens [M, D] that the pairs are of."""
        rows = x if job.gathers else taken(x, pairs.pair, pairs.slot.shape[1])
        named = params.whole(params.own)
        if not keep:
            return cls(_applied(job, named, rows, pairs), [], None, ())
        apply = job.apply if job.gathers and isinstance(job.apply, Apart) and job.apply.is_product(named) else None
        if apply is not None and apply.gated(named) is not None:
            hidden, kept = apply.hidden_keeping(named, x, pairs.places)
            return cls(apply.last(named, hidden, pairs.sizes), [], None, (), hidden, x, kept)

        def function(arrays: list[jax.Array], rows: jax.Array) -> jax.Array:
            whole = params.whole(arrays)
            return _applied(job, whole, rows, pairs) if apply is None else apply.hidden(whole, rows, pairs.places)

        y, pull = jax.vjp(function, params.own, rows)
        leaves, tree = jax.tree.flatten(pull)
        index_of = {id(leaf): i for i, leaf in enumerate(params.leaves)}
        again = tuple((i, index_of[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in index_of)
        leaves = [leaf for leaf in leaves if id(leaf) not in index_of]
        if apply is not None:
            return cls(apply.last(named, y, pairs.sizes), leaves, tree, again, y)
        return cls(y, leaves, tree, again)

    def pull(self, params: _Params, d: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        rest, param_of = iter(self.leaves), dict(self.params)
        leaves = [
            params.leaves[param_of[i]] if i in param_of else next(rest) for i in range(len(self.leaves) + len(param_of))
        ]
        return jax.tree.unflatten(self.tree, leaves)(d)


def _applied(job: DispatchSpec, params: Any, x: jax.Array, pairs: Pairs) -> jax.Array:
    count = pairs.pair.size
    if job.gathers:
        y = job.apply(params, x, pairs.sizes, rows=pairs.tokens, slots=pairs.slot)
    else:
        y = job.apply(params, x, pairs.sizes)
    if y.ndim != 2 or y.shape[0] != count:
        raise ValueError(
            f"exchange: argument 'apply' must return a row for each of its {count} rows, got shape {y.shape}"
        )
    return y
