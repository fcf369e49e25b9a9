"""Lists of the blocks that tiles of queries read, and of the queries that read tiles of keys. All are O(T) in memory.

Queries side by side name many of the same blocks, so a tile of them reads the union once: each block with the queries that
named it. The transposed lists are the pairs (query, block) sorted by the tile of keys, queries ascending. They are cut into
parts: the first block, which most queries name, is spread over many programs, and sums are in a fixed order.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.ops.native_sparse_attention.blocks import overlapped, power
from kernels.ops.native_sparse_attention.triton_sizes import Sizes, place_of
from kernels.toolchains.triton import triton_launch

# Entries of a part of a transposed list.
PART = 1024


class Lists(NamedTuple):
    """What tiles of queries read.

    Attributes:
      first: int32 [B, T, K, NAMED], the first token of each block that a query reads; -1 for none, and where it is named again.
      union: int32 [B, K, tiles, BLOCK_Q * NAMED], the first tokens of the blocks of a tile of queries.
      members: likewise; bit q is whether query q of the tile reads the block.
      ends: int32 [B, K, tiles], the lengths of these lists.
    """

    first: jax.Array
    union: jax.Array
    members: jax.Array
    ends: jax.Array


class Pairs(NamedTuple):
    """The same pairs by tiles of keys, in groups of B * K * key tiles.

    Attributes:
      order: int32 [pairs], indices of `Lists.first`, flat, times the tiles that a block may lie in; sorted by group.
      bounds: int32 [groups + 1], where each group begins.
      group: int32 [parts], the group of each part; past the last one the number of groups.
      part: int32 [groups + 1], the first part of each group.
    """

    order: jax.Array
    bounds: jax.Array
    group: jax.Array
    part: jax.Array


@triton.jit
def _first_tokens(indices_ptr, counts_ptr, starts_ptr, q_start, b, t, head, i, O: tl.constexpr):
    """Returns the first tokens of the blocks i of queries t, which broadcast; -1 for none and for those past the query."""
    valid = (t < O.T) & (i < O.NAMED)
    place = (b.to(tl.int64) * O.T + t) * O.K + head
    block = tl.load(indices_ptr + place * O.NAMED + i, mask=valid, other=-1)
    if counts_ptr is not None:
        valid = valid & (i < tl.load(counts_ptr + place, mask=t < O.T, other=0))
    position = q_start + t
    start = position * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b.to(tl.int64) * O.S + position, mask=t < O.T, other=-1)
    # Blocks are compared, not tokens: the first token of one far past the end would overflow.
    valid = valid & (start >= 0) & (block >= 0) & (block <= (position - start) // O.SIZE)
    return tl.where(valid, start + tl.where(valid, block, 0) * O.SIZE, -1)


@triton.jit
def block_list_kernel(
    indices_ptr,  # [B, T, K, NAMED]
    counts_ptr,  # [B, T, K], or None
    starts_ptr,  # [B, S], or None
    q_start_ptr,  # [1]
    first_ptr,  # [B, T, K, NAMED]
    union_ptr,  # [B, K, tiles, BLOCK_Q * NAMED]
    members_ptr,  # likewise
    ends_ptr,  # [B, K, tiles]
    O: tl.constexpr,  # `Sizes`
    BLOCK_N: tl.constexpr,  # NAMED, padded
):
    TILES: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    tile, head, b = place_of(tl.program_id(0), TILES, O)
    q_start = tl.load(q_start_ptr)
    p = tl.arange(0, O.BLOCK_Q * BLOCK_N)
    t, i = tile * O.BLOCK_Q + p // BLOCK_N, p % BLOCK_N
    first = _first_tokens(indices_ptr, counts_ptr, starts_ptr, q_start, b, t, head, i, O)
    other = tl.arange(0, BLOCK_N)
    members = p * 0
    again = p < 0  # named before, by the same query or by one before it
    repeated = p < 0  # named before by the same query
    for q in range(O.BLOCK_Q):
        of_query = _first_tokens(
            indices_ptr, counts_ptr, starts_ptr, q_start, b, tile * O.BLOCK_Q + q + other * 0, head, other, O
        )
        same = (first[:, None] == of_query[None, :]).to(tl.int32)
        before = same * (other[None, :] < i[:, None]).to(tl.int32)
        named = tl.max(same, axis=1)
        twice = (p // BLOCK_N == q) & (tl.max(before, axis=1) > 0)
        members = members | (named << q)
        repeated = repeated | twice
        again = again | twice | ((p // BLOCK_N > q) & (named > 0))
    place = (b.to(tl.int64) * O.T + t) * O.K + head
    tl.store(first_ptr + place * O.NAMED + i, tl.where(repeated, -1, first), mask=(t < O.T) & (i < O.NAMED))
    new = ((first >= 0) & (again == 0)).to(tl.int32)
    row = (b * O.K + head) * TILES + tile
    where = row.to(tl.int64) * (O.BLOCK_Q * O.NAMED) + tl.cumsum(new, axis=0) - 1
    tl.store(union_ptr + where, first, mask=new > 0)
    tl.store(members_ptr + where, members, mask=new > 0)
    tl.store(ends_ptr + row, tl.sum(new, axis=0))


def lists_of(
    indices: jax.Array, counts: jax.Array | None, starts: jax.Array | None, q_start: jax.Array, sizes: Sizes
) -> Lists:
    """Returns the lists of tiles of queries."""
    block_n = power(sizes.NAMED)
    union = (sizes.B, sizes.K, sizes.tiles, sizes.BLOCK_Q * sizes.NAMED)
    shapes = indices.shape, union, union, union[:3]
    arrays = [None if x is None else x.astype(jnp.int32) for x in (indices, counts, starts, q_start.reshape(1))]
    return Lists(
        *triton_launch(
            block_list_kernel,
            *arrays,
            out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
            grid=(sizes.B * sizes.K * sizes.tiles,),
            num_warps=max(1, min(8, sizes.BLOCK_Q * block_n**2 // 1024)),
            O=sizes,
            BLOCK_N=block_n,
        )
    )


def pairs_of(first: jax.Array, sizes: Sizes, aligned: bool) -> Pairs:
    """Returns the lists of tiles of keys."""
    tiles, block = sizes.key_tiles, sizes.BLOCK_K
    groups = sizes.B * sizes.K * tiles
    tile = first[..., None] // block + jnp.arange(overlapped(sizes.SIZE, sizes.BLOCK_K, aligned), dtype=jnp.int32)
    last = jnp.minimum(first + sizes.SIZE, sizes.S) - 1
    row = jnp.arange(sizes.B, dtype=jnp.int32)[:, None] * sizes.K + jnp.arange(sizes.K, dtype=jnp.int32)
    group = row[:, None, :, None, None] * tiles + tile
    group = jnp.where((first >= 0)[..., None] & (tile <= (last // block)[..., None]), group, groups).reshape(-1)
    index = jnp.arange(group.size, dtype=jnp.int32)
    group, order = jax.lax.sort((group, index), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(group, jnp.arange(groups + 1, dtype=jnp.int32)).astype(jnp.int32)
    # Every group has a part, which writes its zeros.
    parts = jnp.maximum(1, -(-(bounds[1:] - bounds[:-1]) // PART))
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    most = groups + math.ceil(index.size / PART)
    of_part = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right").astype(jnp.int32)
    return Pairs(order, bounds, of_part, jnp.pad(ends, (1, 0)))
