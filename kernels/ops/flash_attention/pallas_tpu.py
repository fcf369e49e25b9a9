"""Flash attention on TPUs: a grid over the pairs of blocks that exist, row by row of the batch.

Which pair a step is for is prefetched as one scalar, so that its blocks are on their way before its turn. Tiles are [keys,
queries]: what there is one of for each query (maximum, sum, lse, delta, positions) lies along lanes, where it takes no more
room than it is long, and is broadcast over sublanes for nothing. Heads whose width fills no lanes have their tokens there
too. The backward makes two passes, by queries for dQ and by keys for dK and dV, and a third one for the gradient of a bias.
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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.dropout import mix
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pallas_visits import (
    ACTIVE,
    BEGINS,
    ENDS,
    FULL,
    Step,
    Visits,
    decoded,
    united,
    visits_of,
)
from kernels.engines.attention.ranges import Edge, Interval, ends_at
from kernels.engines.attention.softmax import sink_gradient
from kernels.engines.attention.tiles import FIRST, LAST, spans
from kernels.framework.binding import Call
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.execute import Saved
from kernels.framework.work import Work, nbytes
from kernels.ops.flash_attention.contract import op
from kernels.ops.flash_attention.xla import FEATURES
from kernels.toolchains.pallas import pallas_launch

LANES = 128
# A padded key lies beyond every position that there is.
_BEYOND = 2**30
_VMEM_BYTES = 48 * 2**20
# Of scalar memory, for the list of pairs.
_SMEM_BYTES = 640 * 2**10


# -- a call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What is compiled into a kernel."""

    block_q: int
    block_k: int
    T: int
    S: int
    N: int
    H: int
    Hv: int
    scale: float
    cap: float | None
    dropout: float
    ends: tuple[Edge | str | None, ...]  # of `Interval`: compiled in, the name of an input, or open
    placed: bool  # positions are data
    segments: bool
    dense: bool
    bias: bool
    alibi: bool
    sinks: bool

    @property
    def width(self) -> int:
        """Which dim of a block of queries or keys is the width of a head. The other one is over tokens."""
        return _width(self.H)

    @property
    def value_width(self) -> int:
        """Which dim of a block of values, or of the output, is the width of a head."""
        return _width(self.Hv)

    @property
    def upper(self) -> bool:
        """Whether there is a greatest position that a query sees. Padded keys lie beyond all of them."""
        return self.ends[1] is not None or self.S % self.block_k > 0

    @property
    def masked(self) -> bool:
        return self.upper or any(end is not None for end in self.ends) or self.segments or self.dense


@dataclass(frozen=True)
class _Input:
    """An array in HBM, and where in it the block of a pair is."""

    name: str
    array: Any
    block: tuple[int | None, ...]
    at: Callable[[Any, Any, Any, Any], tuple]  # of row, query head, block of queries, block of keys


class _Call(NamedTuple):
    """A call as the kernels take it."""

    plan: _Plan
    scalars: dict[str, jax.Array]  # 1-D, prefetched
    inputs: tuple[_Input, ...]
    by_queries: Callable[[], Visits]
    by_keys: Callable[[], Visits]
    united: Callable[[bool], Visits]
    B: int
    G: int


def _pad(x: jax.Array, dim: int, block: int, value: int = 0) -> jax.Array:
    missing = -x.shape[dim] % block
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)], constant_values=value)


def _width(H: int) -> int:
    """Returns which dim of a head is its width H: of [T, H], or of [H, T] where rows of H would not fill the lanes.

    They would be padded: heads of 64 would take twice their memory. XLA lays such arrays [H, T] too, and need not copy them.
    """
    return 1 if H % LANES == 0 else 0


def _heads_first(x: jax.Array, block: int) -> jax.Array:
    """Returns [B, N, T, H] or [B, N, H, T] of x [B, T, N, H], T padded to whole blocks."""
    if _width(x.shape[3]) == 1:
        return _pad(x.swapaxes(1, 2), 2, block)
    return _pad(x.transpose(0, 2, 3, 1), 3, block)


def _tokens_first(x: jax.Array, H: int, T: int) -> jax.Array:
    """Returns [B, T, N, H] of what `_heads_first` gives."""
    return x[:, :, :T].swapaxes(1, 2) if _width(H) == 1 else x[..., :T].transpose(0, 3, 1, 2)


def _of_queries(H: int, block: int) -> tuple[tuple, Callable]:
    """Returns the block of queries of `_heads_first`, and where it is."""
    if _width(H) == 1:
        return (None, None, block, H), lambda b, n, i, j: (b, n, i, 0)
    return (None, None, H, block), lambda b, n, i, j: (b, n, 0, i)


def _of_keys(H: int, block: int, G: int) -> tuple[tuple, Callable]:
    """Returns the block of keys of `_heads_first`, and where it is for a query head."""
    if _width(H) == 1:
        return (None, None, block, H), lambda b, n, i, j: (b, lax.div(n, G), j, 0)
    return (None, None, H, block), lambda b, n, i, j: (b, lax.div(n, G), 0, j)


def _per_query(x: jax.Array, block: int, value: Any = 0) -> jax.Array:
    """Returns [B, N, 1, T] of x [B, T, N]."""
    return _pad(x.swapaxes(1, 2)[:, :, None], 3, block, value)


def _blocks(params: FwdParams, T: int, S: int) -> tuple[int, int]:
    """Returns the sizes of the blocks that share each length evenly, none of them larger than asked for."""
    sizes = []
    for length, block in ((T, params.q_blocksize), (S, params.kv_blocksize)):
        if block is None or block % LANES:
            raise ValueError(f"block sizes of queries and keys must be multiples of {LANES} on a TPU, got {params}")
        even = -(-length // -(-length // block))
        sizes.append(-(-even // LANES) * LANES)
    return sizes[0], sizes[1]


def _call(query, key, value, mask, options, params) -> _Call:
    bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob = options
    (B, T, N, H), (S, K, Hv) = query.shape, (key.shape[1], key.shape[2], value.shape[3])
    bq, bk = _blocks(params, T, S)
    G = N // K
    mask = MaskInfo() if mask is None else mask.resolved()
    keys = mask.key_range(T, S)
    ends = {name: getattr(keys, name) for name in Interval._fields}
    plan = _Plan(
        block_q=bq,
        block_k=bk,
        T=T,
        S=S,
        N=N,
        H=H,
        Hv=Hv,
        scale=1 / math.sqrt(H) if softmax_scale is None else softmax_scale,
        cap=logits_soft_cap,
        dropout=dropout_prob,
        ends=tuple(end if end is None or isinstance(end, Edge) else name for name, end in ends.items()),
        placed=mask.q_positions is not None,
        segments=keys.q_segments is not None,
        dense=mask.attention_mask is not None,
        bias=bias is not None,
        alibi=alibi_slopes is not None,
        sinks=softmax_aux is not None,
    )
    scalars, inputs = {}, []
    if alibi_slopes is not None:
        scalars["slopes"] = jnp.broadcast_to(alibi_slopes.astype(jnp.float32), (B, N)).reshape(-1)
    if softmax_aux is not None:
        # Sinks are met before the first key: weight exp(sink), no value.
        scalars["sinks"] = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)
    if dropout_prob > 0:
        scalars["seeds"] = lax.bitcast_convert_type(jnp.broadcast_to(dropout_seed, (B, N)), jnp.int32).reshape(-1)

    inputs.append(_Input("query", _heads_first(query, bq), *_of_queries(H, bq)))
    inputs.append(_Input("key", _heads_first(key, bk), *_of_keys(H, bk, G)))
    inputs.append(_Input("value", _heads_first(value, bk), *_of_keys(Hv, bk, G)))

    def vector(name: str, x: Any, block: int, of_queries: bool, beyond: int = 0) -> None:
        x = _pad(jnp.asarray(x, jnp.int32)[:, None], 2, block, beyond)
        rows = x.shape[0] > 1
        inputs.append(_Input(name, x, (None, 1, block), lambda b, n, i, j: (b * rows, 0, i if of_queries else j)))

    def vectors(name: str, of_queries: Any, of_keys: Any, beyond: int) -> None:
        vector(f"q_{name}", of_queries, bq, True)
        vector(f"k_{name}", of_keys, bk, False, beyond)

    if plan.placed:
        vectors("positions", mask.q_positions, mask.kv_positions, _BEYOND)
    for name in plan.ends:
        if isinstance(name, str):
            vector(name, ends[name], bq, True)
    if plan.segments:
        # A query that is padding equals no key, not even one that is.
        vectors("segments", jnp.where(keys.q_segments < 0, -2, keys.q_segments), keys.k_segments, -1)
    for name, x in (("bias", bias), ("dense", mask.attention_mask)):
        if x is None:
            continue
        x = x.swapaxes(2, 3)
        if name == "dense":  # bytes where there is one for each pair
            x = x.astype(jnp.int8 if 1 not in x.shape[2:] else jnp.int32)
        x = x if x.shape[2] == 1 else _pad(x, 2, bk)
        x = x if x.shape[3] == 1 else _pad(x, 3, bq)
        inputs.append(_of_pairs(name, x, bq, bk))

    whole = spans(mask, T, S, bq, bk)
    q_blocks, k_blocks = -(-T // bq), -(-S // bk)
    most = _most(mask, T, S, bq, bk)
    return _Call(
        plan,
        scalars,
        tuple(inputs),
        lambda: visits_of(whole[0], k_blocks, most[0], False),
        lambda: visits_of(whole[1], q_blocks, most[1], True),
        lambda by_keys: visits_of(united(whole[by_keys]), q_blocks if by_keys else k_blocks, most[by_keys], by_keys),
        B,
        G,
    )


def _most(mask: MaskInfo, T: int, S: int, block_q: int, block_k: int) -> tuple[int, int]:
    """Returns the most visits that a row can have, by queries and by keys: what the rules that are no data allow."""
    rules = mask.loosened(mask.data_fields)
    by_queries, by_keys = (
        int(np.maximum(x[..., LAST] - x[..., FIRST], 1).sum()) for x in spans(rules, T, S, block_q, block_k)
    )
    return by_queries, by_keys


def _of_pairs(name: str, x: jax.Array, block_q: int, block_k: int) -> _Input:
    """Returns an input [#B, #N, #S, #T]."""
    rows, heads, k, q = (size > 1 for size in x.shape)
    block = (None, None, block_k if k else 1, block_q if q else 1)
    return _Input(name, x, block, lambda b, n, i, j: (b * rows, n * heads, j * k, i * q))


# -- tiles ------------------------------------------------------------------------------------------------------------


def _dot(a: Any, b: Any, over_a: int, over_b: int) -> Any:
    # float32 means float32: no bfloat16 passes behind the caller's back.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((over_a,), (over_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _column(x: Any) -> Any:
    """Returns [n, 1] of [1, n]: what lies along lanes is turned by eight sublanes at a time."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def _positions(plan: _Plan, refs: dict[str, Any], at: Step) -> tuple[Any, Any]:
    """Returns the positions of the queries [1, block_q] and of the keys [block_k, 1]."""
    if plan.placed:
        return refs["q_positions"][...], _column(refs["k_positions"][...])
    i = lax.broadcasted_iota(jnp.int32, (1, plan.block_q), 1) + (at.i * plan.block_q + plan.S - plan.T)
    return i, lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0) + at.j * plan.block_k


def _visible(plan: _Plan, refs: dict[str, Any], at: Step, i: Any, j: Any) -> Any:
    """Returns which pairs of a tile attend."""
    seen = []
    low, high, gap_low, gap_high = (refs[end][...] if isinstance(end, str) else end for end in plan.ends)
    if plan.upper:
        limit = jnp.full_like(i, _BEYOND - 1 if plan.placed else plan.S - 1)
        seen.append(j <= (limit if high is None else jnp.minimum(ends_at(high, i), limit)))
    if low is not None:
        seen.append(j >= ends_at(low, i))
    if gap_low is not None:
        seen.append((j < ends_at(gap_low, i)) | (j > ends_at(gap_high, i)))
    if plan.segments:
        seen.append(_column(refs["k_segments"][...]) == refs["q_segments"][...])
    if plan.dense:
        seen.append(jnp.broadcast_to(refs["dense"][...].astype(jnp.int32), (plan.block_k, plan.block_q)) != 0)
    return functools.reduce(jnp.logical_and, seen)


class _Tile(NamedTuple):
    """A tile of logits, and what its gradients need."""

    x: Any  # float32 [block_k, block_q], -inf where masked
    bend: Any  # derivative of the soft cap
    distance: Any  # |i - j|
    keep: Any  # dropout: 0 or 1 / (1 - p)


def _tile(plan: _Plan, refs: dict[str, Any], at: Step, masked: bool) -> _Tile:
    x = _dot(refs["key"][...], refs["query"][...], plan.width, plan.width) * plan.scale
    bend = distance = keep = None
    if plan.cap is not None:
        bent = jnp.tanh(x / plan.cap)
        x, bend = plan.cap * bent, 1 - bent * bent
    if plan.bias:
        x = x + refs["bias"][...].astype(jnp.float32)
    if not (masked or plan.alibi or plan.dropout):
        return _Tile(x, bend, distance, keep)
    i, j = _positions(plan, refs, at)
    head = at.b * plan.N + at.n
    if plan.alibi:
        distance = jnp.abs(i - j).astype(jnp.float32)
        x = x - refs["slopes"][head] * distance
    if plan.dropout:
        keep = _keep(refs["seeds"][head], i, j, plan.dropout)
    if masked:
        x = jnp.where(_visible(plan, refs, at, i, j), x, -jnp.inf)
    return _Tile(x, bend, distance, keep)


def _keep(seed: Any, i: Any, j: Any, probability: float) -> Any:
    """Returns `dropout_scale` of a tile."""
    row = mix(seed.astype(jnp.uint32) ^ mix(i.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    bits = mix(row ^ (j.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)))
    keep = bits >= jnp.uint32(min(round(probability * 2**32), 2**32 - 1))
    return jnp.where(keep, jnp.float32(1 / (1 - probability)), jnp.float32(0))


def _each_tile(plan: _Plan, at: Step, do: Callable[[bool], None]) -> None:
    """Calls `do(masked)` for a pair that exists: where all of it attends, without looking at the mask."""
    if not plan.masked:
        pl.when(at.has(ACTIVE))(lambda: do(False))
        return
    pl.when(at.has(FULL))(lambda: do(False))
    pl.when(at.has(ACTIVE) & ~at.has(FULL))(lambda: do(True))


# -- kernels ----------------------------------------------------------------------------------------------------------


def flash_attention_fwd_kernel(plan: _Plan, refs: dict[str, Any], at: Step) -> None:
    """Writes out and lse of a block of queries; its maximum, its sum and its output turned round are kept between steps."""
    largest, total, turned = refs["largest"], refs["total"], refs["turned"]

    @pl.when(at.has(BEGINS))
    def _():
        sink = refs["sinks"][at.n] if plan.sinks else -jnp.inf
        largest[...] = jnp.full_like(largest, sink)
        total[...] = jnp.full_like(total, 1.0 if plan.sinks else 0.0)
        turned[...] = jnp.zeros_like(turned)

    def tile(masked: bool) -> None:
        x, _, _, keep = _tile(plan, refs, at, masked)
        new = jnp.maximum(largest[...], jnp.max(x, axis=0, keepdims=True))
        anchor = jnp.where(new == -jnp.inf, 0.0, new)  # a query that has seen no key yet
        p = jnp.exp(x - anchor)
        rescale = jnp.exp(largest[...] - anchor)
        largest[...] = new
        total[...] = total[...] * rescale + jnp.sum(p, axis=0, keepdims=True)
        p = p if keep is None else p * keep
        value = refs["value"][...]
        turned[...] = turned[...] * rescale + _dot(value, p.astype(value.dtype), 1 - plan.value_width, 0)

    _each_tile(plan, at, tile)

    @pl.when(at.has(ENDS))
    def _():
        some = total[...] != 0  # of a NaN too, so that lse is one
        divisor = jnp.where(some, total[...], 1.0)
        out = turned[...] / divisor
        refs["out"][...] = (out.T if plan.value_width == 1 else out).astype(refs["out"].dtype)
        refs["lse"][...] = jnp.where(some, largest[...] + jnp.log(divisor), -jnp.inf)


def _gradients(plan: _Plan, refs: dict[str, Any], at: Step, masked: bool) -> tuple[Any, Any, Any, Any]:
    """Returns (p after dropout, ds, that of q.k before the scale, |i - j|) of a tile, from lse and delta of all keys."""
    x, bend, distance, keep = _tile(plan, refs, at, masked)
    p = jnp.exp(x - refs["lse"][...])
    dp = _dot(refs["value"][...], refs["d_out"][...], plan.value_width, plan.value_width)
    dp = dp if keep is None else dp * keep
    ds = p * (dp - refs["delta"][...])
    return p if keep is None else p * keep, ds, ds if bend is None else ds * bend, distance


def flash_attention_bwd_dq_kernel(plan: _Plan, refs: dict[str, Any], at: Step) -> None:
    turned, slopes = refs["turned"], refs.get("slope_sum")

    @pl.when(at.has(BEGINS))
    def _():
        turned[...] = jnp.zeros_like(turned)
        if slopes is not None:
            slopes[...] = jnp.zeros_like(slopes)

    def tile(masked: bool) -> None:
        _, ds, raw, distance = _gradients(plan, refs, at, masked)
        key = refs["key"][...]
        turned[...] += _dot(key, raw.astype(key.dtype), 1 - plan.width, 0)
        if slopes is not None:
            slopes[...] -= jnp.sum(ds * distance, axis=0, keepdims=True)

    _each_tile(plan, at, tile)

    @pl.when(at.has(ENDS))
    def _():
        d_query = turned[...] * plan.scale
        refs["d_query"][...] = (d_query.T if plan.width == 1 else d_query).astype(refs["d_query"].dtype)
        if slopes is not None:
            refs["d_slopes"][...] = slopes[...]


def flash_attention_bwd_dkv_kernel(plan: _Plan, refs: dict[str, Any], at: Step) -> None:
    """The last dim of the grid is over the query heads of a group, whose gradients add up in the same block."""
    d_key, d_value, group = refs["key_sum"], refs["value_sum"], pl.program_id(3)

    @pl.when(at.has(BEGINS) & (group == 0))
    def _():
        d_key[...] = jnp.zeros_like(d_key)
        d_value[...] = jnp.zeros_like(d_value)

    def tile(masked: bool) -> None:
        p, _, raw, _ = _gradients(plan, refs, at, masked)
        query, d_out = refs["query"][...], refs["d_out"][...]
        d_value[...] += _dot(p.astype(d_out.dtype), d_out, 1, 1 - plan.value_width)
        d_key[...] += _dot(raw.astype(query.dtype), query, 1, 1 - plan.width)

    _each_tile(plan, at, tile)

    @pl.when(at.has(ENDS) & (group == pl.num_programs(3) - 1))
    def _():
        dk, dv = d_key[...] * plan.scale, d_value[...]
        refs["d_key"][...] = (dk if plan.width == 1 else dk.T).astype(refs["d_key"].dtype)
        refs["d_value"][...] = (dv if plan.value_width == 1 else dv.T).astype(refs["d_value"].dtype)


def flash_attention_bwd_dbias_kernel(plan: _Plan, refs: dict[str, Any], at: Step) -> None:
    """The last dim of the grid is over the rows and heads that share a bias; a bias of one key or one query is summed over
    the steps, too."""
    total, last = refs["bias_sum"], pl.program_id(3) == pl.num_programs(3) - 1
    begins, ends = at.has(BEGINS), at.has(ENDS)
    if total.shape == (1, 1):
        step = pl.program_id(2)
        begins, ends = step == 0, step == pl.num_programs(2) - 1
    elif total.shape == (plan.block_k, plan.block_q):
        begins = ends = True

    @pl.when(begins & (pl.program_id(3) == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    def tile(masked: bool) -> None:
        _, ds, _, _ = _gradients(plan, refs, at, masked)
        for dim in range(2):
            ds = jnp.sum(ds, axis=dim, keepdims=True) if total.shape[dim] == 1 else ds
        total[...] += ds

    _each_tile(plan, at, tile)

    @pl.when(ends & last)
    def _():
        refs["d_bias"][...] = total[...]


# -- launches ---------------------------------------------------------------------------------------------------------


class _Output(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    at: Callable[[Any, Any, Any, Any], tuple]


def _launch(
    kernel: Callable[[_Plan, dict[str, Any], Step], None],
    call: _Call,
    visits: Visits,
    grid: tuple[int, int, int] | tuple[int, int],
    where: Callable[..., tuple[Any, Any]],
    outputs: list[_Output],
    scratch: dict[str, tuple[int, int]],
    extra: tuple[_Input, ...] = (),
    matmuls: int = 2,
    start: jax.Array | None = None,
) -> list[jax.Array]:
    """Returns the outputs of a kernel over (rows, heads, visits) and one more dim, if the grid has it.

    Args:
      where: of the indices of the grid without the visit, the row of the batch and the query head.
      start: what is in the one output before it is written.
    """
    plan, inputs = call.plan, (*call.inputs, *extra)
    scalars = {"visits": jnp.asarray(visits.packed), **call.scalars}

    def step(packed: Any, *ids: Any) -> Step:
        b, n = where(ids[0], ids[1], *ids[3:])
        return decoded(visits, packed, b, n, ids[2])

    def spec(x: Any) -> pl.BlockSpec:
        def at(*args: Any) -> tuple:
            found = step(args[len(grid) + 1], *args[: len(grid) + 1])
            return x.at(found.b, found.n, found.i, found.j)

        return pl.BlockSpec(x.block, at)

    aliased = () if start is None else (start,)
    names = [*scalars, *(x.name for x in inputs), *("start" for _ in aliased), *(x.name for x in outputs), *scratch]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        kernel(plan, named, step(named["visits"], *(pl.program_id(d) for d in range(len(grid) + 1))))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    flops = matmuls * (plan.H + plan.Hv) * visits.length * plan.block_q * plan.block_k * call.B * plan.N
    return pallas_launch(
        body,
        *scalars.values(),
        *(x.array for x in inputs),
        *aliased,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*grid[:2], visits.steps, *grid[2:]),
            in_specs=[spec(x) for x in inputs] + [pl.BlockSpec(memory_space=pl.ANY) for _ in aliased],
            out_specs=[spec(x) for x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        dimension_semantics=("parallel", "parallel", *("arbitrary" for _ in grid[1:])),
        vmem_limit_bytes=_VMEM_BYTES,
        input_output_aliases={len(scalars) + len(inputs): 0} if aliased else None,
        work=Work(flops, nbytes(*(x.array for x in inputs), *shapes)),
        name=kernel.__name__,
    )


def forward(
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,  # as it always is: nothing is added in any order
    cfg,
):
    (B, T, N, _), Hv = query.shape, value.shape[3]
    options = (bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob)
    call = _call(query, key, value, mask, options, cfg.fwd_params)
    bq = call.plan.block_q
    rows = -(-T // bq) * bq
    out_shape = (B, N, rows, Hv) if call.plan.value_width == 1 else (B, N, Hv, rows)
    out, lse = _launch(
        flash_attention_fwd_kernel,
        call,
        call.by_queries(),
        (B, N),
        lambda b, n: (b, n),
        [
            _Output("out", out_shape, query.dtype, *_of_queries(Hv, bq)),
            _Output("lse", (B, N, 1, rows), jnp.float32, (None, None, 1, bq), lambda b, n, i, j: (b, n, 0, i)),
        ],
        {"largest": (1, bq), "total": (1, bq), "turned": (Hv, bq)},
    )
    return _tokens_first(out, Hv, T), lse[:, :, 0, :T].swapaxes(1, 2)


def backward(
    saved: Saved,
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,  # as it always is: nothing is added in any order
    cfg,
):
    (B, T, N, H), (S, K, Hv) = query.shape, (key.shape[1], key.shape[2], value.shape[3])
    options = (bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob)
    call = _call(query, key, value, mask, options, cfg.bwd_params)
    bq, bk, G = call.plan.block_q, call.plan.block_k, call.G
    # A query with no key gives nothing, whatever the cotangents of its infinite lse may be: its weights are exp(-inf).
    some = saved.lse != -jnp.inf
    per_query = ((None, None, 1, bq), lambda b, n, i, j: (b, n, 0, i))
    extra = (
        _Input("d_out", _heads_first(saved.d_out.astype(query.dtype), bq), *_of_queries(Hv, bq)),
        _Input("lse", _per_query(jnp.where(some, saved.lse, jnp.inf), bq, jnp.inf), *per_query),
        _Input("delta", _per_query(jnp.where(some, saved.delta, 0), bq), *per_query),
    )
    given = {x.name: x.array.shape for x in call.inputs}
    outputs = [_Output("d_query", given["query"], query.dtype, *_of_queries(H, bq))]
    scratch = {"turned": (H, bq)}
    if alibi_slopes is not None:
        outputs.append(_Output("d_slopes", (B, N, 1, -(-T // bq) * bq), jnp.float32, *per_query))
        scratch["slope_sum"] = (1, bq)
    dq, *of_rows = _launch(
        flash_attention_bwd_dq_kernel,
        call,
        call.by_queries(),
        (B, N),
        lambda b, n: (b, n),
        outputs,
        scratch,
        extra,
        matmuls=3,
    )
    dk, dv = _launch(
        flash_attention_bwd_dkv_kernel,
        call,
        call.by_keys(),
        (B, K, G),
        lambda b, n, g: (b, n * G + g),
        [
            _Output("d_key", given["key"], key.dtype, *_of_keys(H, bk, G)),
            _Output("d_value", given["value"], value.dtype, *_of_keys(Hv, bk, G)),
        ],
        {"key_sum": (bk, H), "value_sum": (bk, Hv)},
        extra,
        matmuls=4,
    )
    gradients = {
        "query": _tokens_first(dq, H, T),
        "key": _tokens_first(dk, H, S),
        "value": _tokens_first(dv, Hv, S),
    }
    if bias is not None:
        gradients["bias"] = _bias_gradient(call, extra, bias)
    if alibi_slopes is not None:
        slopes = of_rows[0].sum((2, 3))
        gradients["alibi_slopes"] = slopes if alibi_slopes.shape[0] == B else slopes.sum(0, keepdims=True)
    if softmax_aux is not None:
        gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return gradients


def _bias_gradient(call: _Call, extra: tuple[_Input, ...], bias: jax.Array) -> jax.Array:
    """Returns ds summed over what the bias is broadcast over: T, S, rows and heads are summed in the kernel."""
    given = next(x for x in call.inputs if x.name == "bias")
    rows, heads, k, q = given.array.shape
    shared_rows, shared_heads = call.B // rows, call.plan.N // heads
    (d_bias,) = _launch(
        flash_attention_bwd_dbias_kernel,
        call,
        call.united(q == 1 and k > 1),
        (rows, heads, shared_rows * shared_heads),
        lambda b, n, r: (b + lax.div(r, shared_heads), n + lax.rem(r, shared_heads)),
        [_Output("d_bias", given.array.shape, jnp.float32, given.block, given.at)],
        {"bias_sum": (given.block[2] or 1, given.block[3] or 1)},
        extra,
        start=jnp.zeros(given.array.shape, jnp.float32),
    )
    return d_bias[:, :, : bias.shape[3], : bias.shape[2]].swapaxes(2, 3)


# -- configurations ---------------------------------------------------------------------------------------------------


def _config(forward: tuple[int, int], backward: tuple[int, int]) -> FlashAttentionConfig:
    (q, k), (bwd_q, bwd_k) = forward, backward
    return FlashAttentionConfig(
        FwdParams(q_blocksize=q, kv_blocksize=k), BwdParams(q_blocksize=bwd_q, kv_blocksize=bwd_k)
    )


def heuristic(call: Call, platform: str) -> FlashAttentionConfig:
    # Large blocks take fewer cycles a pair in the compiler's schedules for every generation (README), and keep the list of
    # pairs of a long sequence in scalar memory. What they hold beyond a mask's edge is little of a long triangle, and much
    # of a window or of documents. In float32 every option at once, with heads of 256, would come near the limit of VMEM.
    mask = MaskInfo() if call.mask is None else call.mask
    wide = not set(mask.used) - {"causal"}
    pairs = call.dims["T"] * call.dims["S"]
    if pairs > 2**36 or (wide and pairs >= 2**26 and call.dtype == "bfloat16"):
        return _config((1024, 1024), (1024, 1024))
    return _config((512, 1024), (512, 512))


def candidates(call: Call) -> list[FlashAttentionConfig]:
    sizes = [(256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (512, 2048)]
    found = [_config(size, other) for size, other in zip(sizes, [(256, 512), *sizes[1:5], (1024, 512)], strict=True)]
    return list(dict.fromkeys([heuristic(call, "tpu"), *found]))


def rejects(call: Call) -> str | None:
    cfg, dims = heuristic(call, "tpu"), call.dims
    mask = MaskInfo() if call.mask is None else call.mask
    rows = max([1, *(getattr(mask, name).shape[0] for name in mask.data_fields if name != "attention_mask")])
    for params in (cfg.fwd_params, cfg.bwd_params):
        bq, bk = _blocks(params, dims["T"], dims["S"])
        most = max(_most(mask, dims["T"], dims["S"], bq, bk))
        if 4 * most * rows > _SMEM_BYTES:
            return (
                f"the {most:,} pairs of blocks of {rows} rows take {4 * most * rows / 2**10:,.0f} KiB of scalar memory, and "
                f"there are {_SMEM_BYTES >> 10}; split the sequence over devices (ring_attention), or the batch"
            )
    return None


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    features=FEATURES,
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
