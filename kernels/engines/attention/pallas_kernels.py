"""The Pallas kernels of attention. Tiles are [keys, queries]: per-query values (maximum, sum, lse, delta, positions) are stored
along lanes, which wastes no memory and makes their broadcast over sublanes free."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.attention.dropout import mix
from kernels.engines.attention.pallas_calls import BEYOND, Blocks, Plan
from kernels.engines.attention.pallas_visits import ACTIVE, BEGINS, ENDS, FULL, Step
from kernels.engines.attention.ranges import ends_at

__all__ = ["bwd_dbias_kernel", "bwd_dkv_kernel", "bwd_dq_kernel", "dot", "fwd_kernel"]


def dot(a: Any, b: Any, over_a: int, over_b: int) -> Any:
    # float32 means true float32, without bfloat16 passes.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((over_a,), (over_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _column(x: Any) -> Any:
    """Returns x [1, n] as [n, 1]: transposes lanes to sublanes, eight at a time."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def _positions(plan: Plan, refs: dict[str, Any], step: Step) -> tuple[Any, Any]:
    """Returns the positions of the queries [1, block_q] and of the keys [block_k, 1]."""
    if plan.placed:
        return refs["q_positions"][...], _column(refs["k_positions"][...])
    i = lax.broadcasted_iota(jnp.int32, (1, plan.block_q), 1) + (step.i * plan.block_q + plan.S - plan.T)
    return i, lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0) + step.j * plan.block_k


def _visible(plan: Plan, refs: dict[str, Any], step: Step, i: Any, j: Any) -> Any:
    """Returns which pairs of a tile attend."""
    seen = []
    low, high, gap_low, gap_high = (refs[end][...] if isinstance(end, str) else end for end in plan.ends)
    if plan.upper:
        limit = jnp.full_like(i, BEYOND - 1 if plan.placed else plan.S - 1)
        seen.append(j <= (limit if high is None else jnp.minimum(ends_at(high, i), limit)))
    if low is not None:
        seen.append(j >= ends_at(low, i))
    if gap_low is not None:
        seen.append((j < ends_at(gap_low, i)) | (j > ends_at(gap_high, i)))
    if plan.segments:
        seen.append(_column(refs["k_segments"][...]) == refs["q_segments"][...])
    if plan.dense:
        seen.append(jnp.broadcast_to(refs["dense"][...].astype(jnp.int32), (plan.block_k, plan.block_q)) != 0)
    if plan.blocks is not None:
        seen.append(_set(plan, plan.blocks, refs["blocks"], step))
    return functools.reduce(jnp.logical_and, seen)


def _block_of(tokens: Any, index: Any, tile: int, size: int, inside: int) -> tuple[Any, Any]:
    """Returns the first block that a tile overlaps, and for each token how many blocks after that its own block is."""
    start = index * tile
    if inside == 1 or tile % size == 0:
        ends = [m * size for m in range(1, inside)]
    else:
        ends = [m * size - lax.rem(start, size) for m in range(1, inside)]
    after = sum(((tokens >= end).astype(jnp.int32) for end in ends), jnp.zeros_like(tokens))
    return lax.div(start, size), after


def _set(plan: Plan, blocks: Blocks, bits: Any, step: Step) -> Any:
    """Returns which pairs of a tile are in set blocks."""
    queries = lax.broadcasted_iota(jnp.int32, (1, plan.block_q), 1)
    keys = lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0)
    row, q_after = _block_of(queries, step.i, plan.block_q, blocks.size[0], blocks.inside[0])
    column, k_after = _block_of(keys, step.j, plan.block_k, blocks.size[1], blocks.inside[1])
    of = step.b if blocks.rows > 1 else 0
    of = of * blocks.heads + step.n if blocks.heads > 1 else of
    word, shift = (of * blocks.height + row) * blocks.words + (column >> 5), column & 31

    # Whether the bits of a tile may continue in the next integer.
    split = plan.block_k % blocks.size[1] > 0 or 32 % blocks.inside[1] > 0

    def of_row(m: int) -> Any:
        """Returns int32 [block_k, block_q]: the lowest bit tells whether the key's block is set in block row m of the tile."""
        row_bits = lax.shift_right_logical(bits[word + m * blocks.words], shift)
        if split:  # shifted twice, because a shift by 32 would do nothing
            row_bits |= (bits[word + m * blocks.words + 1] << (31 - shift)) << 1
        row_bits = lax.shift_right_logical(jnp.broadcast_to(row_bits, k_after.shape), k_after)
        return jnp.broadcast_to(row_bits, (plan.block_k, plan.block_q))

    q_after = jnp.broadcast_to(q_after, (plan.block_k, plan.block_q))
    block_bits = of_row(0)
    for m in range(1, blocks.inside[0]):
        block_bits = jnp.where(q_after >= m, of_row(m), block_bits)
    return (block_bits & 1) != 0


class _Tile(NamedTuple):
    """A tile of logits, and the factors that its gradients need."""

    x: Any  # float32 [block_k, block_q], -inf where masked
    bend: Any  # derivative of the soft cap
    distance: Any  # |i - j|
    keep: Any  # dropout: 0 or 1 / (1 - p)


def _tile(plan: Plan, refs: dict[str, Any], step: Step, masked: bool) -> _Tile:
    x = dot(refs["key"][...], refs["query"][...], plan.width, plan.width) * plan.scale
    bend = distance = keep = None
    if plan.cap is not None:
        bent = jnp.tanh(x / plan.cap)
        x, bend = plan.cap * bent, 1 - bent * bent
    if plan.bias:
        x = x + refs["bias"][...].astype(jnp.float32)
    if not (masked or plan.alibi or plan.dropout):
        return _Tile(x, bend, distance, keep)
    i, j = _positions(plan, refs, step)
    head = step.b * plan.N + step.n
    if plan.alibi:
        distance = jnp.abs(i - j).astype(jnp.float32)
        x = x - refs["slopes"][head] * distance
    if plan.dropout:
        keep = _keep(refs["seeds"][head], i, j, plan.dropout)
    if masked:
        x = jnp.where(_visible(plan, refs, step, i, j), x, -jnp.inf)
    return _Tile(x, bend, distance, keep)


def _keep(seed: Any, i: Any, j: Any, probability: float) -> Any:
    """Returns `dropout_scale` of a tile."""
    row = mix(seed.astype(jnp.uint32) ^ mix(i.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    bits = mix(row ^ (j.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)))
    keep = bits >= jnp.uint32(min(round(probability * 2**32), 2**32 - 1))
    return jnp.where(keep, jnp.float32(1 / (1 - probability)), jnp.float32(0))


def _each_tile(plan: Plan, step: Step, do: Callable[[bool], None]) -> None:
    """Calls `do(masked)` if any pair of the tile attends; `masked` is False if all do, so the mask is not evaluated."""
    if not plan.masked:
        pl.when(step.has(ACTIVE))(lambda: do(False))
        return
    pl.when(step.has(FULL))(lambda: do(False))
    pl.when(step.has(ACTIVE) & ~step.has(FULL))(lambda: do(True))


# -- kernels ----------------------------------------------------------------------------------------------------------


def fwd_kernel(plan: Plan, refs: dict[str, Any], step: Step) -> None:
    """Writes out and lse of a query block. Its running maximum, sum and transposed output are carried between steps."""
    largest, total, turned = refs["largest"], refs["total"], refs["turned"]

    @pl.when(step.has(BEGINS))
    def _():
        sink = refs["sinks"][step.n] if plan.sinks else -jnp.inf
        largest[...] = jnp.full_like(largest, sink)
        total[...] = jnp.full_like(total, 1.0 if plan.sinks else 0.0)
        turned[...] = jnp.zeros_like(turned)

    def tile(masked: bool) -> None:
        x, _, _, keep = _tile(plan, refs, step, masked)
        new = jnp.maximum(largest[...], jnp.max(x, axis=0, keepdims=True))
        anchor = jnp.where(new == -jnp.inf, 0.0, new)  # a query that has not seen any key yet
        p = jnp.exp(x - anchor)
        rescale = jnp.exp(largest[...] - anchor)
        largest[...] = new
        total[...] = total[...] * rescale + jnp.sum(p, axis=0, keepdims=True)
        p = p if keep is None else p * keep
        value = refs["value"][...]
        turned[...] = turned[...] * rescale + dot(value, p.astype(value.dtype), 1 - plan.value_width, 0)

    _each_tile(plan, step, tile)

    @pl.when(step.has(ENDS))
    def _():
        some = total[...] != 0  # true for NaN too, so that lse becomes NaN
        divisor = jnp.where(some, total[...], 1.0)
        out = turned[...] / divisor
        refs["out"][...] = (out.T if plan.value_width == 1 else out).astype(refs["out"].dtype)
        refs["lse"][...] = jnp.where(some, largest[...] + jnp.log(divisor), -jnp.inf)


def _gradients(plan: Plan, refs: dict[str, Any], step: Step, masked: bool) -> tuple[Any, Any, Any, Any]:
    """Returns (p after dropout, ds, gradient of q.k before the scale, |i - j|) of a tile, given lse and delta of all keys."""
    x, bend, distance, keep = _tile(plan, refs, step, masked)
    p = jnp.exp(x - refs["lse"][...])
    dp = dot(refs["value"][...], refs["d_out"][...], plan.value_width, plan.value_width)
    dp = dp if keep is None else dp * keep
    ds = p * (dp - refs["delta"][...])
    return p if keep is None else p * keep, ds, ds if bend is None else ds * bend, distance


def bwd_dq_kernel(plan: Plan, refs: dict[str, Any], step: Step) -> None:
    """Writes the gradient of a query block and, with ALiBi, each query's contribution to the gradient of the slopes."""
    turned, slopes = refs["turned"], refs.get("slope_sum")

    @pl.when(step.has(BEGINS))
    def _():
        turned[...] = jnp.zeros_like(turned)
        if slopes is not None:
            slopes[...] = jnp.zeros_like(slopes)

    def tile(masked: bool) -> None:
        _, ds, raw, distance = _gradients(plan, refs, step, masked)
        key = refs["key"][...]
        turned[...] += dot(key, raw.astype(key.dtype), 1 - plan.width, 0)
        if slopes is not None:
            slopes[...] -= jnp.sum(ds * distance, axis=0, keepdims=True)

    _each_tile(plan, step, tile)

    @pl.when(step.has(ENDS))
    def _():
        d_query = turned[...] * plan.scale
        refs["d_query"][...] = (d_query.T if plan.width == 1 else d_query).astype(refs["d_query"].dtype)
        if slopes is not None:
            refs["d_slopes"][...] = slopes[...]


def bwd_dkv_kernel(plan: Plan, refs: dict[str, Any], step: Step) -> None:
    """Writes the gradients of a key block. The last grid dim iterates over the query heads of a group, whose gradients
    accumulate in the same block."""
    d_key, d_value, group = refs["key_sum"], refs["value_sum"], pl.program_id(3)

    @pl.when(step.has(BEGINS) & (group == 0))
    def _():
        d_key[...] = jnp.zeros_like(d_key)
        d_value[...] = jnp.zeros_like(d_value)

    def tile(masked: bool) -> None:
        p, _, raw, _ = _gradients(plan, refs, step, masked)
        query, d_out = refs["query"][...], refs["d_out"][...]
        d_value[...] += dot(p.astype(d_out.dtype), d_out, 1, 1 - plan.value_width)
        d_key[...] += dot(raw.astype(query.dtype), query, 1, 1 - plan.width)

    _each_tile(plan, step, tile)

    @pl.when(step.has(ENDS) & (group == pl.num_programs(3) - 1))
    def _():
        dk, dv = d_key[...] * plan.scale, d_value[...]
        refs["d_key"][...] = (dk if plan.width == 1 else dk.T).astype(refs["d_key"].dtype)
        refs["d_value"][...] = (dv if plan.value_width == 1 else dv.T).astype(refs["d_value"].dtype)


def bwd_dbias_kernel(plan: Plan, refs: dict[str, Any], step: Step) -> None:
    """Writes the gradient of a bias. The last grid dim iterates over the rows and heads that share it. A bias broadcast over
    queries or keys is also summed over steps."""
    total, last = refs["bias_sum"], pl.program_id(3) == pl.num_programs(3) - 1
    begins, ends = step.has(BEGINS), step.has(ENDS)
    if total.shape == (1, 1):
        visit = pl.program_id(2)
        begins, ends = visit == 0, visit == pl.num_programs(2) - 1
    elif total.shape == (plan.block_k, plan.block_q):
        begins = ends = True

    @pl.when(begins & (pl.program_id(3) == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    def tile(masked: bool) -> None:
        _, ds, _, _ = _gradients(plan, refs, step, masked)
        for dim in range(2):
            ds = jnp.sum(ds, axis=dim, keepdims=True) if total.shape[dim] == 1 else ds
        total[...] += ds

    _each_tile(plan, step, tile)

    @pl.when(ends & last)
    def _():
        refs["d_bias"][...] = total[...]
