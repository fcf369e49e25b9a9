"""What every scheme of expert parallelism shares: passes and their sums, and the experts of a device that has the rows.

A pair is a token and one of its choices, m * k + j. Pairs are sorted by expert. Shapes limit the rows of a pass; the rest go in
the next pass, and all ranks run the same number of passes. So memory is that of one pass whatever the router does, and every
pair arrives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejdist.experts.cost import Costed
from ejdist.experts.metrics import expert_counts
from ejdist.experts.narrow import BF16
from kernels.framework.dispatch import vary_alike, varying_axes


@dataclass(frozen=True)
class DispatchSpec:
    """The settings of an exchange, the same on all ranks.

    Attributes:
      apply: (params, rows [R, D], group_sizes [E / ranks]) -> rows [R, D'].
      axis: mesh axes that the experts are sharded over, the major one first; () for one device.
      num_experts: of all ranks of the axis.
      rooms: rows that a chunk of a pass has room for, see `Costed.rooms`.
      chunks: independent parts of a pass, so that one is sent while another is multiplied.
      precision: of the rows that travel, a name of `narrow.PRECISIONS`.
      looped: it runs inside a pass of another that is not the first, so its first pass needs no copy of the program.
    """

    apply: Callable
    axis: tuple[str, ...]
    scheme: Scheme
    num_experts: int
    rooms: tuple[int, ...]
    chunks: int
    precision: str = BF16
    looped: bool = False

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

    Below, x is [M, D], weights [M, k] and experts [M, k] on this rank; expert number num_experts means no expert. `passes` are
    int32 [levels], one for each of `job.rooms`: what `passes_of` says of `need`.
    """

    def plan(self, job: DispatchSpec, experts: jax.Array, weights: jax.Array) -> Any:
        """Returns a pytree of arrays without gradients: the destinations of all pairs, and what goes beside them."""
        raise NotImplementedError

    def need(self, job: DispatchSpec, plan: Any) -> jax.Array:
        """Returns int32 [levels]: the rows that the fullest place of this rank needs. Inner levels are those of the first pass,
        the fullest there is."""
        raise NotImplementedError

    def held(self, job: DispatchSpec) -> np.ndarray:
        """Returns [levels], the rows that a place has room for in a pass."""
        return np.asarray([job.rooms[0] * job.chunks, *job.rooms[1:]])

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
        params. `kept` are the residuals of the forward, or None: then all of it is computed again, as it is of further passes.
        x() is called only where it is."""
        raise NotImplementedError


def passes_of(job: DispatchSpec, rows: jax.Array) -> jax.Array:
    """Returns the passes [levels] that bring so many rows, the most of any rank, to their places."""
    return jnp.maximum(-(-rows // job.scheme.held(job)), 1).astype(jnp.int32)


def agreed(rows: jax.Array) -> jax.Array:
    """Returns the maximum over all ranks of the mesh whose values may differ. All of them run the same number of passes, with
    other tokens too: `apply` may communicate with them."""
    axes, manual = varying_axes(rows), jax.sharding.get_abstract_mesh().manual_axes
    if manual and not varying_axes(lax.axis_index(manual[0])):  # a `shard_map` without check_vma
        axes = frozenset(manual)
    return lax.pmax(rows, tuple(sorted(axes, key=str))) if axes else rows


def summed(
    job: DispatchSpec, passes: jax.Array, like: Any, first: Callable, further: Callable, single: bool = False
) -> tuple[Any, Any]:
    """Returns (first + part(1) + ... + part(passes - 1), part = further(), in the dtypes of `like`; what first() has beside).

    The first is outside of the loop, so that the compiler may overlap it with what is around, and most steps need no other:
    then no float32 copy of it is allocated. A looped job is inside a loop itself, and so are all of its passes.

    Args:
      first: () -> (the first pass, something beside). single: no other pass is ever needed.
    """

    def narrow(total: Any) -> Any:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), total, like)

    def loop(start: int, total: Any) -> Any:
        part = further()

        def more(state: Any) -> Any:
            i, total = state
            return i + 1, add(total, part(i))

        return narrow(lax.while_loop(lambda state: state[0] < passes, more, (jnp.int32(start), total))[1])

    if job.looped and not single:
        return loop(0, jax.tree.map(_zeros, jax.eval_shape(further(), jnp.int32(0)))), None
    total, beside = first()
    total = narrow(total)
    if single:
        return total, beside
    return lax.cond(passes > 1, lambda total: loop(1, jax.tree.map(wide, total)), lambda total: total, total), beside


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros that vary over the axes of a `shard_map` that the array itself would vary over."""
    zeros = jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32))
    kind = getattr(shape, "manual_axis_type", None)
    axes = () if kind is None else tuple(sorted(kind.varying, key=str))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# -- rows in their order -----------------------------------------------------------------------------------------------------


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


def over_chunks(job: DispatchSpec, visit: Callable) -> Callable:
    """Returns the sum of the chunks of pass p, as a function of p."""
    return lambda p: functools.reduce(add, [visit(p * job.chunks + i) for i in range(job.chunks)])


def room_of(rows: float, most: int, chunks: int) -> int:
    """Returns the rows that one of `chunks` parts of a pass has room for: of so many in all, and of no more than `most`."""
    return max(-(-min(math.ceil(rows), most) // chunks), 1)
