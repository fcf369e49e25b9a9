"""Lists of the key tiles that each query tile visits, and vice versa, computed from a block mask and an ordinary mask.

A tile is what a kernel processes at once. On GPUs it divides a block; on TPUs it may overlap several blocks. The blocks and the
bounds of the mask tell for each pair of tiles whether it is hidden, full (every pair of tokens attends) or masked (the kernel
must evaluate the mask). A list contains the tiles that are not hidden, full ones first, so two numbers per list suffice, and
the loop over full tiles never evaluates the mask.

All of it is O(pairs of tiles) and computed on the device, because a block mask may be traced: on GPUs by two small Triton
kernels (`triton_lists.py`), elsewhere by sums and a scatter. Tiles are sorted only by the length of their lists: those with the
longest lists start first, so that none of them runs alone at the end.
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

# The kinds of pairs of tiles.
HIDDEN, MASKED, FULL = range(3)


class TileMap(NamedTuple):
    """Lists of tiles: for each tile along one dim, the tiles along the other dim that it visits. Lists that rows or heads share
    are stored once.

    Attributes:
      index: int32 [#B, #N, tiles, tiles of the other dim]: the visited tiles, full ones first. Entries past the end of a list
        are undefined.
      ends: int32 [#B, #N, tiles, 2]: the number of full tiles in a list, and of all tiles.
      order: int32 [#B, #N | #K, tiles]: the tiles, those with the longest lists first. If a program processes a tile for all
        query heads of a key head, they are ordered by the sums over these heads, per key head.
    """

    index: jax.Array
    ends: jax.Array
    order: jax.Array


def held(size: int, tile: int) -> int:
    """Returns the maximum number of blocks of a size that one side of a tile overlaps.

    >>> held(256, 128), held(64, 128), held(96, 128)
    (1, 2, 3)
    """
    return -(-(size - math.gcd(size, tile) + tile) // size)


def _of_tiles(blocks: jax.Array, dim: int, size: int, tile: int, length: int, every: bool) -> jax.Array:
    """Returns, for each tile along a dim of blocks, whether any (with `every`, whether each) block that it overlaps is set."""
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
    """Returns int8 [#B, #N, query tiles, key tiles]: HIDDEN, MASKED or FULL, for tiles of (queries, keys).

    Args:
      block_mask: bool [#B, #N, query blocks, key blocks].
      lengths: numbers of queries and of keys.
      block_size: (queries, keys) per block. A tile may be within a block, or overlap several.
    """
    visited = whole = jnp.asarray(block_mask)
    for side in (0, 1):
        how = block_size[side], tile[side], lengths[side]
        visited, whole = (_of_tiles(x, 2 + side, *how, every) for x, every in ((visited, False), (whole, True)))
    some, every = meetings(key_range(mask, *lengths), *tile)
    visited &= some[:, None]
    return jnp.where(visited, jnp.where(whole & every[:, None], FULL, MASKED), HIDDEN).astype(jnp.int8)


def tile_map(kinds: jax.Array, group: int = 1) -> TileMap:
    """Returns the lists of the tiles along dim 2 of `kinds`; for the other tiles pass `kinds.swapaxes(2, 3)`.

    Args:
      group: number of heads that are ordered together, if each has its own lists.
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
