"""Which tiles of keys a kernel's tile of queries visits, and the other way around, as lists: from blocks and a mask.

A tile is what a kernel has at once. On GPUs it divides a block, so that all of its pairs are in one block; on TPUs it may have
tokens of several. Of a pair of tiles it is known, from the blocks and from the bounds of the mask, whether it is hidden,
whether every pair of it attends (full), or whether masks have to be looked at (masked). A list has the tiles that are not
hidden, the full ones first, so that a kernel needs two numbers to know what to look at; what does not look at the mask stays
in one run.

Everything is O(pairs of tiles) and made where the arrays are, because a block mask may be traced: on a GPU by two small Triton
kernels (`triton_lists.py`), elsewhere by sums and a scatter. Nothing is sorted but tiles by the length of their list, which is
the order in which they are handed out: the longest first, so that none is begun last.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo, key_range
from kernels.engines.attention.tiles import meetings

# What a pair of tiles is.
HIDDEN, MASKED, FULL = range(3)


class TileMap(NamedTuple):
    """Lists of tiles, a list for each tile of one side of a head; lists that rows or heads share are there once.

    Attributes:
      index: int32 [#B, #N, tiles, tiles of the other side]: the visited ones, the full ones first. What is past a list's
        length has no meaning.
      ends: int32 [#B, #N, tiles, 2]: how many of a list are full, and how many there are.
      order: int32 [#B, #N | #K, tiles]: the tiles, those with the longest lists first. Where a program has a tile for all
        query heads of a key head, it is the order of the sums of their lists, and has an entry for each key head.
    """

    index: jax.Array
    ends: jax.Array
    order: jax.Array


def held(size: int, tile: int) -> int:
    """Returns the most blocks of that size that a side of a tile has tokens of.

    >>> held(256, 128), held(64, 128), held(96, 128)
    (1, 2, 3)
    """
    return -(-(size - math.gcd(size, tile) + tile) // size)


def _of_tiles(blocks: jax.Array, dim: int, size: int, tile: int, length: int, every: bool) -> jax.Array:
    """Returns of each tile along a dim of blocks whether any block that it has tokens of is set, or `every` one."""
    count = -(-length // tile)
    if size % tile == 0:
        return jax.lax.slice_in_dim(jnp.repeat(blocks, size // tile, dim), 0, count, axis=dim)
    start = tile * np.arange(count)
    last = (np.minimum(start + tile, length) - 1) // size
    inside = np.minimum(start[:, None] // size + np.arange(held(size, tile)), last[:, None])
    parts = [jnp.take(blocks, index, axis=dim) for index in inside.T]
    return functools.reduce(jnp.logical_and if every else jnp.logical_or, parts)


def kinds(
    block_mask: jax.Array,
    mask: MaskInfo | None,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    tile: tuple[int, int],
) -> jax.Array:
    """Returns int8 [#B, #N, query tiles, key tiles]: HIDDEN, MASKED or FULL, of tiles of (queries, keys).

    Args:
      block_mask: bool [#B, #N, query blocks, key blocks].
      lengths: of the queries and of the keys.
      block_size: of a block. A tile may lie in one, or have tokens of several.
    """
    visited = whole = jnp.asarray(block_mask)
    for side in (0, 1):
        how = block_size[side], tile[side], lengths[side]
        visited, whole = (_of_tiles(x, 2 + side, *how, every) for x, every in ((visited, False), (whole, True)))
    some, every = meetings(key_range(mask, *lengths), *tile)
    visited &= some[:, None]
    return jnp.where(visited, jnp.where(whole & every[:, None], FULL, MASKED), HIDDEN).astype(jnp.int8)


def tile_map(kinds: jax.Array, group: int = 1) -> TileMap:
    """Returns the lists of the tiles of the first side of `kinds`; those of the other side are of `kinds.swapaxes(2, 3)`.

    Args:
      group: heads that are ordered as one, where each has a list.
    """
    others = kinds.shape[-1]
    full, masked = kinds == FULL, kinds == MASKED
    ends = jnp.stack([full.sum(-1, dtype=jnp.int32), (full | masked).sum(-1, dtype=jnp.int32)], -1)
    before_full, before_masked = (jnp.cumsum(x, -1, dtype=jnp.int32) - 1 for x in (full, masked))
    place = jnp.where(full, before_full, jnp.where(masked, before_masked + ends[..., :1], others)).reshape(-1, others)
    rows = jnp.arange(place.shape[0])[:, None]
    tiles = jnp.broadcast_to(jnp.arange(others, dtype=jnp.int32), place.shape)
    index = jnp.zeros(place.shape, jnp.int32).at[rows, place].set(tiles, mode="drop", unique_indices=False)
    return TileMap(
        index.reshape(kinds.shape), ends, jnp.argsort(-_summed(ends[..., 1], group), axis=-1).astype(jnp.int32)
    )


def _summed(count: jax.Array, group: int) -> jax.Array:
    batch, heads, tiles = count.shape
    return count if heads == 1 else count.reshape(batch, heads // group, group, tiles).sum(2)
