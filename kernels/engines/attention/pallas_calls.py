"""Prepares an attention call for the Pallas kernels: what is compiled in, the prefetched scalars, and the arrays with their
index maps.

A head is stored as [T, H] if its width fills whole lanes; otherwise as [H, T], with tokens along lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import Edge, Interval
from kernels.engines.attention.tiles import FIRST, LAST, spans

__all__ = [
    "BEYOND",
    "LANES",
    "SMEM_BYTES",
    "Blocks",
    "Call",
    "Input",
    "Output",
    "Plan",
    "heads_first",
    "most_visits",
    "of_keys",
    "of_queries",
    "per_query",
    "prepare",
    "tokens_first",
]

LANES = 128
# The position of padded keys, beyond every other.
BEYOND = 2**30
# The scalar memory that lists of pairs may take.
SMEM_BYTES = 640 * 2**10


class Blocks(NamedTuple):
    """The layout of a block mask, for tiles that hold several blocks. The scalars `blocks` store one bit per block.

    Attributes:
      size: queries and keys per block.
      inside: the maximum number of blocks that a tile overlaps, along queries and along keys.
      rows, heads: batch rows and query heads with their own block mask; 1 if all share one.
      height: block rows per mask. words: integers per block row.
    """

    size: tuple[int, int]
    inside: tuple[int, int]
    rows: int
    heads: int
    height: int
    words: int


@dataclass(frozen=True)
class Plan:
    """The compile-time constants of a kernel."""

    op: str  # name of the operation, part of the kernels' names
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
    ends: tuple[Edge | str | None, ...]  # those of `Interval`: a constant, the name of an input, or None if unbounded
    placed: bool  # whether positions are data
    segments: bool
    dense: bool
    bias: bool
    alibi: bool
    sinks: bool
    blocks: Blocks | None = None

    @property
    def width(self) -> int:
        """The dim of a query or key block that holds the head width. The other dim holds the tokens."""
        return _width(self.H)

    @property
    def value_width(self) -> int:
        """The dim of a value or output block that holds the head width."""
        return _width(self.Hv)

    @property
    def upper(self) -> bool:
        """Whether visible positions have an upper bound. Padded keys need one, to stay beyond it."""
        return self.ends[1] is not None or self.S % self.block_k > 0

    @property
    def masked(self) -> bool:
        masks = self.upper or any(end is not None for end in self.ends) or self.segments or self.dense
        return masks or self.blocks is not None


@dataclass(frozen=True)
class Input:
    """An array in HBM, and the index map that returns a pair's block of it."""

    name: str
    array: Any
    block: tuple[int | None, ...]
    index_map: Callable[[Any, Any, Any, Any], tuple]  # takes batch row, query head, query block, key block


class Output(NamedTuple):
    """An array that a kernel writes, and the index map that returns a pair's block of it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    index_map: Callable[[Any, Any, Any, Any], tuple]


class Call(NamedTuple):
    """A call in the form that the kernels take."""

    plan: Plan
    scalars: dict[str, jax.Array]  # 1-D, prefetched
    inputs: tuple[Input, ...]
    mask: MaskInfo  # resolved
    B: int
    G: int


def _pad(x: jax.Array, dim: int, block: int, value: int = 0) -> jax.Array:
    missing = -x.shape[dim] % block
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)], constant_values=value)


def _width(H: int) -> int:
    """Returns the dim that holds the width H of a head: 1 in [T, H], or 0 in [H, T], used if H does not fill whole lanes.

    As [T, H], heads of 64 would be padded to twice their memory. XLA stores such arrays as [H, T] too, so it makes no copy.
    """
    return 1 if H % LANES == 0 else 0


def heads_first(x: jax.Array, block: int) -> jax.Array:
    """Returns x [B, T, N, H] as [B, N, T, H] or [B, N, H, T], with T padded to whole blocks."""
    if _width(x.shape[3]) == 1:
        return _pad(x.swapaxes(1, 2), 2, block)
    return _pad(x.transpose(0, 2, 3, 1), 3, block)


def tokens_first(x: jax.Array, H: int, T: int) -> jax.Array:
    """Returns the output of `heads_first` as [B, T, N, H] again."""
    return x[:, :, :T].swapaxes(1, 2) if _width(H) == 1 else x[..., :T].transpose(0, 3, 1, 2)


def of_queries(H: int, block: int) -> tuple[tuple, Callable]:
    """Returns the query block of an array from `heads_first`, and its index map."""
    if _width(H) == 1:
        return (None, None, block, H), lambda b, n, i, j: (b, n, i, 0)
    return (None, None, H, block), lambda b, n, i, j: (b, n, 0, i)


def of_keys(H: int, block: int, G: int) -> tuple[tuple, Callable]:
    """Returns the key block of an array from `heads_first`, and its index map, which takes a query head."""
    if _width(H) == 1:
        return (None, None, block, H), lambda b, n, i, j: (b, lax.div(n, G), j, 0)
    return (None, None, H, block), lambda b, n, i, j: (b, lax.div(n, G), 0, j)


def per_query(x: jax.Array, block: int, value: Any = 0) -> jax.Array:
    """Returns x [B, T, N] as [B, N, 1, T], with T padded to whole blocks."""
    return _pad(x.swapaxes(1, 2)[:, :, None], 3, block, value)


def prepare(
    op: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: MaskInfo | None,
    softmax_aux: jax.Array | None,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
    tile: tuple[int, int],
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    dropout_seed: jax.Array | None = None,
    dropout_prob: float = 0.0,
    blocks: tuple[Blocks, jax.Array] | None = None,
) -> Call:
    """Converts the arguments of the operation `op` to a `Call`, with tiles of (queries, keys).

    Args:
      blocks: the layout of a block mask if tiles hold several blocks, and its bits, int32 [rows * heads * height * words].
    """
    (B, T, N, H), (S, K, Hv) = query.shape, (key.shape[1], key.shape[2], value.shape[3])
    bq, bk = tile
    G = N // K
    mask = MaskInfo() if mask is None else mask.resolved()
    keys = mask.key_range(T, S)
    ends = {name: getattr(keys, name) for name in Interval._fields}
    plan = Plan(
        op=op,
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
        blocks=None if blocks is None else blocks[0],
    )
    scalars, inputs = {}, []
    if blocks is not None:
        scalars["blocks"] = blocks[1]
    if alibi_slopes is not None:
        scalars["slopes"] = jnp.broadcast_to(alibi_slopes.astype(jnp.float32), (B, N)).reshape(-1)
    if softmax_aux is not None:
        # Sinks come before the first key: weight exp(sink), value zero.
        scalars["sinks"] = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)
    if dropout_prob > 0 and dropout_seed is not None:
        scalars["seeds"] = lax.bitcast_convert_type(jnp.broadcast_to(dropout_seed, (B, N)), jnp.int32).reshape(-1)

    inputs.append(Input("query", heads_first(query, bq), *of_queries(H, bq)))
    inputs.append(Input("key", heads_first(key, bk), *of_keys(H, bk, G)))
    inputs.append(Input("value", heads_first(value, bk), *of_keys(Hv, bk, G)))

    def vector(name: str, x: Any, block: int, of_queries: bool, beyond: int = 0) -> None:
        x = _pad(jnp.asarray(x, jnp.int32)[:, None], 2, block, beyond)
        rows = x.shape[0] > 1
        inputs.append(Input(name, x, (None, 1, block), lambda b, n, i, j: (b * rows, 0, i if of_queries else j)))

    def vectors(name: str, of_queries: Any, of_keys: Any, beyond: int) -> None:
        vector(f"q_{name}", of_queries, bq, True)
        vector(f"k_{name}", of_keys, bk, False, beyond)

    if plan.placed:
        vectors("positions", mask.q_positions, mask.kv_positions, BEYOND)
    for name in plan.ends:
        if isinstance(name, str):
            vector(name, ends[name], bq, True)
    if plan.segments:
        # Padding among queries must not equal padding among keys.
        vectors("segments", jnp.where(keys.q_segments < 0, -2, keys.q_segments), keys.k_segments, -1)
    for name, x in (("bias", bias), ("dense", mask.attention_mask)):
        if x is None:
            continue
        x = x.swapaxes(2, 3)
        if name == "dense":  # bytes, unless it is broadcast over queries or keys
            x = x.astype(jnp.int8 if 1 not in x.shape[2:] else jnp.int32)
        x = x if x.shape[2] == 1 else _pad(x, 2, bk)
        x = x if x.shape[3] == 1 else _pad(x, 3, bq)
        inputs.append(_of_pairs(name, x, bq, bk))
    return Call(plan, scalars, tuple(inputs), mask, B, G)


def most_visits(mask: MaskInfo, T: int, S: int, block_q: int, block_k: int) -> tuple[int, int]:
    """Returns the maximum number of visits per row, by queries and by keys, from the rules that read no arrays."""
    rules = mask.loosened(mask.data_fields)
    by_queries, by_keys = (
        int(np.maximum(x[..., LAST] - x[..., FIRST], 1).sum()) for x in spans(rules, T, S, block_q, block_k)
    )
    return by_queries, by_keys


def _of_pairs(name: str, x: jax.Array, block_q: int, block_k: int) -> Input:
    """Returns the input for a bias or dense mask [#B, #N, #S, #T]."""
    rows, heads, k, q = (size > 1 for size in x.shape)
    block = (None, None, block_k if k else 1, block_q if q else 1)
    return Input(name, x, block, lambda b, n, i, j: (b * rows, n * heads, j * k, i * q))
