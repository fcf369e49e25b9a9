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

import kernels
from ejdist.experts.cost import Costed
from ejdist.experts.narrow import BF16
from kernels.engines.matmul.ordering import group_order
from kernels.framework.dispatch import vary_alike, varying_axes


@dataclass(frozen=True)
class DispatchSpec:
    """The settings of an exchange, the same on all ranks.

    Attributes:
      apply: (params, rows [R, D], group_sizes [E / ranks]) -> rows [R, D']; it may be `apart.Apart`.
      axis: mesh axes that the experts are sharded over, the major one first; () for one device.
      num_experts: of all ranks of the axis.
      rooms: rows that a chunk of a pass has room for, see `Costed.rooms`.
      chunks: independent parts of a pass, so that one is sent while another is multiplied.
      precision: of the rows that travel, a name of `narrow.PRECISIONS`.
      gathers: `apply` gathers rows itself, see `exchange`.
      looped: it runs inside a pass of another that is not the first, so its first pass needs no copy of the program.
    """

    apply: Callable
    axis: tuple[str, ...]
    scheme: Scheme
    num_experts: int
    rooms: tuple[int, ...]
    chunks: int
    precision: str = BF16
    gathers: bool = False
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


class Sums(NamedTuple):
    """What passes add up.

    Attributes:
      rows: [M, D], sums of rows, in their own dtype: a pass adds to those of its tokens in float32, and leaves the others as
        they are. None of no pass, to which the first adds.
      rest: other arrays, in float32 while there are more passes.
    """

    rows: Any
    rest: Any = ()


def summed(
    job: DispatchSpec, passes: jax.Array, like: Sums, first: Callable, further: Callable, single: bool = False
) -> tuple[Sums, Any]:
    """Returns (the sums of all passes, in the dtypes of `like`; what first() has beside).

    The first is outside of the loop, so that the compiler may overlap it with what is around, and most steps need no other:
    then no float32 copy of it is allocated. A looped job is inside a loop itself, and so are all of its passes.

    Args:
      first: () -> (the first pass, something beside). further: () -> (p, sums) -> the sums with those of pass p.
      single: no other pass is ever needed.
    """

    def narrow(sums: Sums) -> Sums:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), sums, like)

    def loop(start: int, sums: Sums) -> Sums:
        part = further()

        def more(state: Any) -> Any:
            i, sums = state
            return i + 1, part(i, sums)

        return narrow(lax.while_loop(lambda state: state[0] < passes, more, (jnp.int32(start), sums))[1])

    if job.looped and not single:
        nothing = Sums(None, jax.tree.map(lambda a: jnp.zeros(a.shape, wide(a).dtype), like.rest))
        return loop(0, jax.tree.map(_zeros, jax.eval_shape(further(), jnp.int32(0), nothing))), None
    sums, beside = first()
    sums = narrow(sums)
    if single:
        return sums, beside

    def others(state: Any) -> Any:
        sums = state[1]
        return jnp.zeros_like(passes, bool), loop(1, Sums(sums.rows, jax.tree.map(wide, sums.rest)))

    # A loop of at most one round, and no `cond`: a branch that returns its operands copies them.
    return lax.while_loop(lambda state: state[0], others, (passes > 1, sums))[1], beside


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros that vary over the axes of a `shard_map` that the array itself would vary over."""
    zeros, kind = jnp.zeros(shape.shape, shape.dtype), getattr(shape, "manual_axis_type", None)
    axes = () if kind is None else tuple(sorted(kind.varying, key=str))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def added_to(total: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Returns the sum, added in float32, in the dtype of the total."""
    return rows if total is None else (wide(total) + wide(rows)).astype(total.dtype)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# -- rows in their order -----------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The pairs of this rank sorted by where they go, to experts or to ranks.

    Attributes:
      pairs: [M * k], the pairs in that order, -1 past the last that goes anywhere. slots: [M, k], the inverse; -1 for none.
      sizes: how many go to each.
    """

    pairs: jax.Array
    slots: jax.Array
    sizes: jax.Array


def plan_of(goals: jax.Array, count: int) -> Plan:
    """Returns the plan of pairs that go to goals [M, k], of so many; any other number is none."""
    order = group_order(goals, count)
    return Plan(order.pairs, order.slots, order.sizes)


def before(sizes: jax.Array, dim: int) -> jax.Array:
    """Returns the sum of the entries before each."""
    return jnp.cumsum(sizes, axis=dim) - sizes


def within(sizes: jax.Array, low: Any, high: Any) -> jax.Array:
    """Returns how many rows of each block fall in [low, high); blocks are contiguous along the last dim."""
    ends = jnp.cumsum(sizes, axis=-1)
    return jnp.clip(ends, low, high) - jnp.clip(ends - sizes, low, high)


SPREAD = ("float32", "bfloat16", "float16")  # dtypes of rows that a kernel writes to their places


def taken(x: jax.Array, pair: jax.Array, top_k: int) -> jax.Array:
    """Returns the rows of x [M, ...] for the tokens of some pairs; 0 for pair -1."""
    rows = x[jnp.maximum(pair, 0) // top_k]
    return jnp.where((pair >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


def spread(x: jax.Array, pair: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the same as `taken`, where slot [M, k] is the inverse of `pair`: the place of each pair that has one, else -1.
    Rows of no pair may hold anything.

    On NVIDIA GPUs a row is read once and written to all of its places: by place, rows would be read for each.
    """
    by_place = functools.partial(taken, top_k=slot.shape[1])

    def by_token(x: jax.Array, pair: jax.Array, slot: jax.Array) -> jax.Array:
        # What is sent is the gradient of a plain sum. No place is said to be of no token, as its row would be zeroed.
        like, some = vary_alike(jnp.zeros((len(pair), x.shape[1]), x.dtype), x), jnp.maximum(pair, 0)
        return jax.vjp(lambda rows: kernels.combine_rows(rows, slot, some), like)[1](x)[0]

    if x.ndim != 2 or str(x.dtype) not in SPREAD:
        return by_place(x, pair)
    return lax.platform_dependent(x, pair, slot, cuda=by_token, default=lambda x, pair, slot: by_place(x, pair))


def combined(
    rows: jax.Array, slot: jax.Array, weights: jax.Array | None = None, total: jax.Array | None = None
) -> jax.Array:
    """Returns the weighted sum of each token's rows, added in float32, in their dtype, without materialising [M, k, D]; with
    `total` [M, D], added to that, in its dtype."""

    def added(
        rows: jax.Array,
        slot: jax.Array,
        weights: jax.Array | None,
        total: jax.Array | None,
        after: Callable = lambda x: x,
    ) -> jax.Array:
        sums: Any = 0 if total is None else wide(total)
        for j in range(slot.shape[1]):
            row = wide(rows[jnp.maximum(slot[:, j], 0)])
            row = row if weights is None else row * weights[:, j, None].astype(row.dtype)
            sums, slot = after((sums + jnp.where((slot[:, j] >= 0)[:, None], row, 0), slot))
        return sums.astype(rows.dtype)

    if total is not None and total.dtype != rows.dtype:
        return total + combined(rows, slot, weights).astype(total.dtype)

    def by_kernel(rows: jax.Array, slot: jax.Array, weights: Any, total: Any) -> jax.Array:
        no_inverse = jnp.full(rows.shape[:1], -1, jnp.int32)  # which only its gradient needs
        return kernels.combine_rows(rows, slot, no_inverse, weights, total)

    def in_parts(rows: jax.Array, slot: jax.Array, weights: Any, total: Any) -> jax.Array:
        # XLA for TPUs does not fuse a gather into a sum, so all gathers would be materialised at once. The barrier makes one
        # after the other; in parts their float32 sums are small.
        parts = math.gcd(slot.shape[0], 16)
        split = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (slot, weights, total))
        sums = lax.map(lambda part: added(rows, *part, after=lax.optimization_barrier), split)
        return sums.reshape(-1, rows.shape[1])

    return lax.platform_dependent(rows, slot, weights, total, tpu=in_parts, cuda=by_kernel, default=added)


def over_chunks(job: DispatchSpec, visit: Callable) -> Callable:
    """Returns (p, sums) -> the sums with those of all chunks of pass p; visit is the same for a chunk, numbered through."""

    def of_pass(p: jax.Array, sums: Sums) -> Sums:
        for i in range(job.chunks):
            sums = visit(p * job.chunks + i, sums)
        return sums

    return of_pass


# Each chunk of a pass is in the program by itself, so a program of many is as many times as large, and thousands are never
# compiled. A handful hides what can be hidden, and this is well above that. No bound by the rows: those of a step of generation
# are few, and the chunks that they leave empty do no harm.
MOST_CHUNKS = 64


def room_of(rows: float, most: int, chunks: int) -> int:
    """Returns the rows that one of `chunks` parts of a pass has room for: of so many in all, and of no more than `most`."""
    return max(-(-min(math.ceil(rows), most) // chunks), 1)
