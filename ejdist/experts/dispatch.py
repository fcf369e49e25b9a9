"""Dispatch and combine: sends every token to the experts that it chose, on whatever rank they are, and returns their sum.

Exact: rows that do not fit the buffer go in more passes of the same loop, as many as the fullest rank of the mesh needs. The
gradient runs the same passes. It saves the residuals of the first pass and recomputes the others, so memory is bounded by the
buffer in both directions. Derivation and traffic: dispatch.md in this folder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejdist.experts.choice import choose
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.metrics import expert_counts
from ejdist.experts.narrow import BF16, check_precision
from ejdist.experts.own import Local
from ejdist.experts.rows import MOST_CHUNKS, DispatchSpec, Scheme, agreed, passes_of
from ejdist.experts.schemes import SCHEMES, TwoLevel, scheme_of
from ejdist.mesh import axis_is_bound
from kernels.engines.matmul.ordering import group_order
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import reverse_only, vary_alike, varying_axes
from kernels.framework.platforms import Unsupported


class Stats(NamedTuple):
    """Statistics of an exchange. Sum `dropped` and `counts` over ranks with different tokens.

    Attributes:
      extra_passes: int32, overflow passes beyond the first, the same on all ranks; 0 if the buffer was large enough.
      high_water: float32, buffer utilization, the same on all ranks: rows for the fullest slot of the buffer over its size.
        Above 1 it took more passes; far below 1 the buffer could be smaller.
      dropped: int32, choices of this rank's tokens that exceeded `capacity`; 0 without it.
      counts: int32 [E], choices of this rank's tokens for each expert, including dropped ones.
    """

    extra_passes: jax.Array
    high_water: jax.Array
    dropped: jax.Array
    counts: jax.Array


def exchange(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Any,
    apply: Callable[[Any, jax.Array, jax.Array], jax.Array],
    *,
    axis: str | tuple[str, ...] | None,
    num_experts: int,
    scheme: str | Scheme = "auto",
    buffer: float = 1.25,
    chunks: int = 1,
    capacity: float | None = None,
    precision: str = BF16,
    max_ranks: int | None = None,
    gathers: bool = False,
) -> tuple[jax.Array, Stats]:
    """Returns (out, stats): out[m] = sum over j of weights[m, j] * expert experts[m, j] of x[m], [M, D'] in x's dtype.

    Runs inside a `shard_map` over the axis, on a rank's own arrays. Expert e is on rank e // (num_experts / ranks). It is
    differentiable once, in x, weights and the floats of params. It saves residuals of the size of the buffer, the received rows
    and the residuals of `apply`; `jax.checkpoint` recomputes them, without the combine.

    Args:
      x: [M, D], the tokens of this rank.
      experts: int [M, k]. Values outside [0, num_experts), such as -1, choose no expert, as for padding.
      weights: float [M, k]. Sums are in float32.
      params: pytree of this rank's experts, each leaf [num_experts / ranks, ...].
      apply: (params, rows [R, D], group_sizes [num_experts / ranks]) -> rows [R, D'], each computed from its own row by its
        group's expert. Rows are sorted by group; rows after the last group are zero, and their results are ignored. A pure
        function that closes over no array. It may communicate over other axes.
      axis: mesh axes that experts are sharded over, the major one first. None: this device has all experts.
      scheme: one of SCHEMES, "auto" (`ejdist.experts.choice`), or a Scheme. "two_level" takes (hosts, devices of a host).
      buffer: rows that a pass can hold, as a multiple of the balanced load.
      chunks: independent parts of a pass, so that one is sent while another is multiplied; at most 64.
      precision: of the rows that travel: "bf16" is the dtype of x; "fp8" sends tokens and sums as e4m3 with scales per 128 of a
        row, and gradients in the dtype of x; "fp8_tokens" tokens alone; "fp8_both" gradients too.
      max_ranks: on how many ranks the experts of a token are at most, as the router limits them; None: on any. The buffer is
        then made for so many, and a token that is on more takes other passes as always.
      gathers: `apply` gathers rows itself: it is called with tokens in their place, and `rows=`, `slots=` as in
        `kernels.grouped_matmul`, so that they are never in memory in their order. Rows that no index names may hold anything.
      capacity: limits an expert to ceil(capacity * k * tokens of all ranks / num_experts) tokens: the first ones of the first
        ranks. The others are dropped, and counted. Default: nothing is dropped.

    Raises:
      ValueError: naming the argument. Unsupported: a second derivative.
    """
    axis, ranks = _axis(axis)
    _check(x, experts, weights, params, num_experts, ranks, buffer, chunks, capacity)
    check_precision("exchange: argument 'precision' ('exchange' of `moe`)", precision)
    if max_ranks is not None and (isinstance(max_ranks, bool) or not isinstance(max_ranks, int) or max_ranks < 1):
        raise ValueError(f"exchange: argument 'max_ranks' must be None, or an integer of at least 1, got {max_ranks!r}")
    top_k = experts.shape[1]
    sizes = tuple(lax.axis_size(a) for a in axis)
    if scheme == "auto":
        scheme = choose(
            axis_sizes=sizes, tokens=x.shape[0], top_k=top_k, width=x.shape[1], itemsize=x.dtype.itemsize, buffer=buffer,
            num_experts=num_experts, max_ranks=max_ranks, precision=precision,
        ).scheme  # fmt: skip
    fitting = _fitting(scheme_of(scheme), axis, ranks)
    if (why := fitting.precision_refusal(precision)) is not None:
        raise ValueError(
            f"exchange: argument 'precision' ('exchange' of `moe`) = {precision!r} has 8-bit sums, but the scheme {scheme!r} "
            f"{why}; use 'fp8_tokens' or another scheme"
        )
    shape = ExchangeShape(
        tuple(zip(axis, sizes, strict=True)), x.shape[0], top_k, x.shape[1], 0, x.dtype.itemsize, float(buffer),
        num_experts=num_experts, max_ranks=max_ranks,
    )  # fmt: skip
    # Arrays replicated over some ranks have cotangents that differ: the transpose of this cast sums them.
    x, experts, weights = vary_alike((x, experts, weights), lax.axis_index(axis) if axis else 0)
    axis = axis if ranks > 1 else ()  # over one rank no collective is needed
    rooms = fitting.rooms(shape, int(chunks))
    job = DispatchSpec(apply, axis, fitting, num_experts, rooms, int(chunks), precision, gathers)
    params = jax.tree.map(lambda p: vary_alike(p, x), params)
    x, weights, params = reverse_only("exchange", (x, weights, params))
    experts = experts.astype(jnp.int32)  # num_experts may not fit a narrower dtype
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    counts, dropped = expert_counts(experts, num_experts), vary_alike(jnp.int32(0), experts)
    if capacity is not None:
        kept = _within(job, experts, counts, math.ceil(capacity * experts.size * ranks / num_experts))
        experts, dropped = jnp.where(kept, experts, num_experts), jnp.sum((experts < num_experts) & ~kept)
    out, passes, rows = run(job, x, experts, weights, params)
    utilization = jnp.max(rows / fitting.held(job)).astype(jnp.float32)
    return out, Stats(jnp.sum(passes - 1), utilization, dropped.astype(jnp.int32), counts)


def run(
    job: DispatchSpec, x: jax.Array, experts: jax.Array, weights: jax.Array, params: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (out, passes, rows) of an exchange with these settings; passes and rows are [levels], see `Scheme.need`."""
    plan = job.scheme.plan(job, experts, lax.stop_gradient(weights))
    rows = agreed(job.scheme.need(job, plan))
    passes = passes_of(job, rows)
    return _exchanged(job, passes, plan, x, weights, params), passes, rows


def _within(job: DispatchSpec, experts: jax.Array, counts: jax.Array, limit: int) -> jax.Array:
    """Returns bool [M, k]: whether a choice is among the first `limit` of its expert, over all ranks."""
    before = 0
    if job.axis:
        every = lax.all_gather(counts, job.axis)
        before = jnp.sum(jnp.where(jnp.arange(job.ranks)[:, None] < job.rank, every, 0), axis=0)
    expert = jnp.minimum(experts, job.num_experts - 1)
    # The index among this rank's choices of the same expert.
    index = group_order(experts, job.num_experts).slots - (jnp.cumsum(counts) - counts)[expert]
    return (experts < job.num_experts) & (index < (limit - before + jnp.zeros_like(counts))[expert])


# -- differentiation -------------------------------------------------------------------------------------------------------


def _once(function: Callable) -> Callable:
    """Returns the function, which raises when differentiated again: it is already part of a gradient."""
    once = jax.custom_jvp(function, nondiff_argnums=(0,))

    @once.defjvp
    def refuse(job: DispatchSpec, primals: Any, tangents: Any) -> Any:
        raise Unsupported(
            "exchange: second derivatives are not supported, nor those of `moe` on several devices, which calls it; stop the "
            "outer derivative with jax.lax.stop_gradient, or differentiate a sum over experts on one device"
        )

    return once


@_once
def _forward(job: DispatchSpec, passes: Any, plan: Any, x: Any, weights: Any, params: Any) -> tuple[jax.Array, Any]:
    return job.scheme.forward(job, passes, plan, x, weights, params, keep=True)


@_once
def _backward(
    job: DispatchSpec, passes: Any, plan: Any, kept: Any, x: Any, weights: Any, params: Any, d_out: Any
) -> Any:
    return job.scheme.backward(job, passes, plan, kept, lambda: x, weights, params, d_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(
    job: DispatchSpec, passes: jax.Array, plan: Any, x: jax.Array, weights: jax.Array, params: Any
) -> jax.Array:
    return job.scheme.forward(job, passes, plan, x, weights, params)[0]


def _exchanged_fwd(job, passes, plan, x, weights, params):
    out, kept = _forward(job, passes, plan, x, weights, params)
    return out, (passes, plan, kept, x, weights, params)


def _exchanged_bwd(job, residuals, d_out):
    passes, plan, kept, x, weights, params = residuals
    d_x, d_weights, d_params = _backward(job, passes, plan, kept, x, weights, params, d_out.astype(x.dtype))
    d_params = jax.tree.map(lambda p, d: None if d is None else _settled(d, p), params, d_params)
    return None, None, _settled(d_x, x), _settled(d_weights, weights), d_params


def _settled(d: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the gradient of an array, summed over axes where the array is replicated (tp, for instance)."""
    parts = tuple(sorted(varying_axes(d) - varying_axes(like), key=str))
    return (lax.psum(d, parts) if parts else d).astype(like.dtype)


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)


# -- what is refused -------------------------------------------------------------------------------------------------------


def _axis(axis: Any) -> tuple[tuple[str, ...], int]:
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not all(isinstance(a, str) for a in names) or len(set(names)) < len(names):
        raise ValueError(
            f"exchange: argument 'axis' = {axis!r} must be the name of a mesh axis, a tuple of different names, or None"
        )
    for name in names:
        if not axis_is_bound(name):
            raise ValueError(
                f"exchange: argument 'axis' names {name!r}, over which this call is not mapped; call it inside a shard_map "
                "over that axis, or give None for one device"
            )
    return names, math.prod(lax.axis_size(a) for a in names)


def _fitting(scheme: Scheme, axis: tuple[str, ...], ranks: int) -> Scheme:
    """Returns the scheme; on one rank, where nothing is sent, `local`."""
    if isinstance(scheme, TwoLevel) and len(axis) < 2:
        raise ValueError(
            "exchange: argument 'scheme' ('dispatch' of `moe`) = 'two_level' needs an 'axis' of two names, (hosts, devices of "
            f"a host), got {axis}; use 'all_to_all' for one"
        )
    if isinstance(scheme, Local) and ranks > 1:
        raise ValueError(
            f"exchange: argument 'scheme' ('dispatch' of `moe`) = 'local' is for one rank, but 'axis' = {axis} has {ranks}; "
            f"use one of {', '.join(n for n, s in SCHEMES.items() if s is not Local)}"
        )
    return Local() if ranks == 1 else scheme


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, (bool, np.bool_)) and math.isfinite(value)


def check_buffer(buffer: Any, chunks: Any, capacity: Any, top_k: int) -> None:
    """Raises ValueError, naming the argument, for an impossible buffer size."""

    def refuse(name: str, must: str, got: Any) -> None:
        raise ValueError(f"exchange: argument {name!r} must be {must}, got {got!r}")

    if not _number(buffer) or buffer <= 0:
        refuse("buffer", "a number above 0, a multiple of the balanced number of rows (1.25)", buffer)
    if isinstance(chunks, bool) or not isinstance(chunks, (int, np.integer)) or not 1 <= chunks <= MOST_CHUNKS:
        refuse("chunks", f"an integer of at least 1 and at most {MOST_CHUNKS} (each is compiled on its own)", chunks)
    if capacity is not None and (not _number(capacity) or capacity * top_k < 1):
        least = f"1 / {top_k}, which is room for one choice of every token"
        refuse("capacity", f"None, or a number of at least {least}", capacity)


def _check(
    x: Any,
    experts: Any,
    weights: Any,
    params: Any,
    num_experts: Any,
    ranks: int,
    buffer: Any,
    chunks: Any,
    capacity: Any,
) -> None:
    def refuse(name: str, must: str, got: Any) -> None:
        raise ValueError(f"exchange: argument {name!r} must be {must}, got {got}")

    def kind(a: Any) -> str:
        return f"{a.dtype} of shape {a.shape}" if hasattr(a, "dtype") else type(a).__name__

    if not is_float_array(x) or x.ndim != 2 or not x.shape[0]:
        refuse("x", "a float array [tokens, features] with at least one token", kind(x))
    if not hasattr(experts, "dtype") or not jnp.issubdtype(experts.dtype, jnp.integer) or experts.ndim != 2:
        refuse("experts", "an integer array [tokens, choices]", kind(experts))
    if experts.shape[0] != x.shape[0] or not experts.shape[1]:
        refuse("experts", f"[{x.shape[0]}, choices], a row for each token of 'x'", kind(experts))
    if not is_float_array(weights) or weights.shape != experts.shape:
        refuse("weights", f"a float array of the shape {experts.shape} of 'experts'", kind(weights))
    if isinstance(num_experts, bool) or not isinstance(num_experts, (int, np.integer)) or num_experts < 1:
        refuse("num_experts", "a positive integer", repr(num_experts))
    if num_experts % ranks:
        raise ValueError(
            f"exchange: argument 'num_experts' = {num_experts} cannot be divided over {ranks} ranks; use a multiple of "
            f"{ranks}, or an axis of fewer ranks"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "ndim") or not leaf.ndim or leaf.shape[0] != num_experts // ranks:
            where = f"params{jax.tree_util.keystr(path)}"
            refuse(
                where, f"of {num_experts // ranks} experts, its first dim: {num_experts} over {ranks} ranks", kind(leaf)
            )
    check_buffer(buffer, chunks, capacity, experts.shape[1])
