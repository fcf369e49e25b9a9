"""Lists of the tiles of keys that tiles of queries read, and of the tiles of queries that read a tile of keys, for TPUs.

A TPU reads whole tiles: BLOCK_Q neighbouring queries with the heads of a key head are one, and BLOCK_K keys from a multiple of
BLOCK_K another. A list has the union of what its queries read; the kernels mask each query to its own blocks. The transposed
lists are cut into parts, because every query reads the first block, and scalar memory is small. All of it is O(T) in memory.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.attention.pallas_calls import LANES
from kernels.ops.native_sparse_attention.blocks import CallSizes, overlapped, power

# What stands before the entries of a list: how many there are, and whether it begins and ends what is summed for one tile.
LENGTH, BEGINS, ENDS, HEADER = 0, 1, 2, 3
# Entries of a part of a transposed list.
PART = 512
# The first token of no block.
NONE = -(2**30)
# Rows of a table: the blocks of a query, padded to whole registers, then these.
POSITION, OFFSET, LSE, DELTA, REST = 0, 1, 2, 3, 8


@dataclass(frozen=True)
class Sizes(CallSizes):
    """Compile-time sizes of the kernels.

    Attributes:
      ALIGNED: whether blocks begin at multiples of their size among the keys.
      PIECES, Q_PIECES: tiles of keys, and of queries, that are multiplied at once.
    """

    ALIGNED: bool
    PIECES: int
    Q_PIECES: int

    @property
    def rows(self) -> int:
        """Rows of a tile of queries, query heads of a query side by side, padded to whole lanes."""
        return -(-self.BLOCK_Q * (self.N // self.K) // LANES) * LANES

    @property
    def crossed(self) -> int:
        """The maximum number of tiles of keys that a block lies in."""
        return overlapped(self.SIZE, self.BLOCK_K, self.ALIGNED)

    @property
    def inside(self) -> int:
        """The maximum number of blocks of a document that a tile of keys overlaps."""
        return overlapped(self.BLOCK_K, self.SIZE, self.ALIGNED)

    @property
    def listed(self) -> int:
        """The maximum number of tiles of keys that a tile of queries reads."""
        return min(self.BLOCK_Q * self.NAMED * self.crossed, self.key_tiles)

    @property
    def parts(self) -> int:
        """The maximum number of parts of the lists of a row of the batch and a key head."""
        return self.key_tiles + self.tiles * self.listed // PART

    @property
    def named_rows(self) -> int:
        return -(-self.NAMED // 8) * 8


class Selected(NamedTuple):
    """What each query reads.

    Attributes:
      first: int32 [B, T, K, NAMED], the first token of each of its blocks; `NONE` for none. A block may be there twice.
      position: int32 [T], its place among the keys; past all of them if it comes after them.
      start: int32 [B, T], the first token of its document; -1 for padding.
    """

    first: jax.Array
    position: jax.Array
    start: jax.Array


def places(starts: jax.Array, q_start: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Returns the place of each query among the keys, int32 [T], and the first token of its document, [B, T]."""
    position = q_start.astype(jnp.int32) + jnp.arange(sizes.T, dtype=jnp.int32)
    return position, jnp.take(starts, position, axis=1, mode="clip").astype(jnp.int32)


def selected(
    indices: jax.Array, counts: jax.Array | None, starts: jax.Array, q_start: jax.Array, sizes: Sizes
) -> Selected:
    """Returns what each query reads, given the contract's arguments."""
    position, start = places(starts, q_start, sizes)
    begin = start[..., None, None]
    # Blocks are compared, not tokens: the first token of one far past the end would overflow.
    valid = (begin >= 0) & (indices >= 0) & (indices <= (position[:, None, None] - begin) // sizes.SIZE)
    if counts is not None:
        valid &= jnp.arange(sizes.NAMED) < counts[..., None]
    first = begin + jnp.where(valid, indices, 0).astype(jnp.int32) * sizes.SIZE
    return Selected(jnp.where(valid, first, NONE), position, start)


def _with_header(entries: jax.Array, length: jax.Array, begins: jax.Array, ends: jax.Array, pieces: int) -> jax.Array:
    """Returns lists [rows, n, 1, HEADER + entries]. Past its end a list repeats its first entry, which copies may read."""
    count = entries.shape[-1]
    entries = jnp.where(jnp.arange(count) < length[..., None], entries, entries[..., :1])
    entries = jnp.pad(entries, ((0, 0), (0, 0), (0, -count % pieces)), mode="edge")
    flags = (x.astype(jnp.int32)[..., None] for x in (length, begins, ends))
    return jnp.concatenate([*flags, entries], axis=-1)[:, :, None]


def by_queries(what: Selected, sizes: Sizes) -> jax.Array:
    """Returns the lists of tiles of queries, int32 [B * K, tiles, 1, HEADER + entries]: tiles of keys, ascending."""
    o, none = sizes, sizes.key_tiles
    first = what.first[..., None]
    tile = first // o.BLOCK_K + jnp.arange(o.crossed, dtype=jnp.int32)
    last = (jnp.minimum(first + o.SIZE, o.S) - 1) // o.BLOCK_K
    tile = jnp.where((first >= 0) & (tile <= last), tile, none).reshape(o.B, o.T, o.K, -1).swapaxes(1, 2)
    tile = jnp.pad(tile, ((0, 0), (0, 0), (0, o.tiles * o.BLOCK_Q - o.T), (0, 0)), constant_values=none)
    tile = jax.lax.sort(tile.reshape(o.B * o.K, o.tiles, -1), is_stable=False)
    again = jnp.pad(tile[..., 1:] == tile[..., :-1], ((0, 0), (0, 0), (1, 0)))
    tile = jax.lax.sort(jnp.where(again, none, tile), is_stable=False)[..., : o.listed]
    every = jnp.ones(tile.shape[:2], jnp.int32)
    length = jnp.sum(tile < none, axis=-1, dtype=jnp.int32)
    return _with_header(jnp.minimum(tile, none - 1), length, every, every, o.PIECES)


def by_keys(lists: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Returns (the parts of the lists of tiles of keys, int32 [B * K, parts, 1, HEADER + PART]: tiles of queries, ascending;
    the tile of keys of each part, int32 [B * K * parts])."""
    o, none = sizes, sizes.key_tiles
    lists = lists[:, :, 0]
    entries, width = lists[..., HEADER : HEADER + o.listed], o.tiles * o.listed
    keys = jnp.where(jnp.arange(o.listed) < lists[..., :1], entries, none).reshape(-1, width)
    tile = jnp.broadcast_to(jnp.arange(o.tiles, dtype=jnp.int32)[:, None], (o.tiles, o.listed)).reshape(-1)
    keys, tile = jax.lax.sort((keys, jnp.broadcast_to(tile, keys.shape)), dimension=1, num_keys=1, is_stable=True)
    find = functools.partial(jnp.searchsorted, side="left")
    bounds = jax.vmap(find, (0, None))(keys, jnp.arange(none + 1, dtype=jnp.int32)).astype(jnp.int32)
    # Every tile has a part, which writes its zeros. So there are at most as many as `Sizes.parts`.
    parts = jnp.maximum(1, -(-(bounds[:, 1:] - bounds[:, :-1]) // PART))
    ends = jnp.cumsum(parts, axis=1, dtype=jnp.int32)
    index = jnp.arange(o.parts, dtype=jnp.int32)
    of_part = jax.vmap(functools.partial(jnp.searchsorted, side="right"), (0, None))(ends, index).astype(jnp.int32)
    used = of_part < none
    group = jnp.minimum(of_part, none - 1)
    number = index - jnp.take_along_axis(ends - parts, group, 1)
    begin = jnp.take_along_axis(bounds, group, 1) + number * PART
    length = jnp.clip(jnp.take_along_axis(bounds, group + 1, 1) - begin, 0, PART)
    begins = used & (number == 0)
    is_last = used & (number == jnp.take_along_axis(parts, group, 1) - 1)
    # Past the last part nothing is read; its tile stays, so that no other is written.
    begin, length = jnp.where(used, begin, 0), jnp.where(used, length, 0)
    tile = jnp.pad(tile, ((0, 0), (0, PART)))
    one = jax.vmap(lambda row, begin: jax.lax.dynamic_slice_in_dim(row, begin, PART), (None, 0))
    return _with_header(jax.vmap(one)(tile, begin), length, begins, is_last, o.Q_PIECES), group.reshape(-1)


def _of_rows(x: jax.Array, sizes: Sizes, fill: float) -> jax.Array:
    """Returns x [B, T, K, G, ...] as [B * K * tiles, rows, ...]."""
    o = sizes
    rest = x.shape[4:]
    x = jnp.pad(
        x.swapaxes(1, 2),
        [(0, 0), (0, 0), (0, o.tiles * o.BLOCK_Q - o.T)] + [(0, 0)] * (1 + len(rest)),
        constant_values=fill,
    )
    x = x.reshape(o.B * o.K * o.tiles, -1, *rest)
    return jnp.pad(x, [(0, 0), (0, o.rows - x.shape[1])] + [(0, 0)] * len(rest), constant_values=fill)


def tiles_of_queries(x: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns x [B, T, N, width] as [B * K * tiles, rows, width], the width padded to whole lanes."""
    o = sizes
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % LANES)))
    return _of_rows(x.reshape(o.B, o.T, o.K, -1, x.shape[3]), o, 0)


def of_tiles(x: jax.Array, sizes: Sizes, width: int) -> jax.Array:
    """Returns [B, T, N, width] of [B * K * tiles, rows, wide]: the way back."""
    o, G = sizes, sizes.N // sizes.K
    x = x[:, : o.BLOCK_Q * G, :width].reshape(o.B, o.K, o.tiles * o.BLOCK_Q, G, width)[:, :, : o.T]
    return x.swapaxes(1, 2).reshape(o.B, o.T, o.N, width)


def tiles_of_keys(x: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns x [B, S, K, width] as [B * K * key tiles, BLOCK_K, width], the width padded to whole lanes."""
    o = sizes
    pad = ((0, 0), (0, 0), (0, o.key_tiles * o.BLOCK_K - o.S), (0, -x.shape[3] % LANES))
    return jnp.pad(x.swapaxes(1, 2), pad).reshape(o.B * o.K * o.key_tiles, o.BLOCK_K, -1)


def of_key_tiles(x: jax.Array, sizes: Sizes, width: int) -> jax.Array:
    """Returns [B, S, K, width]: the way back."""
    o = sizes
    return x.reshape(o.B, o.K, -1, x.shape[2])[:, :, : o.S, :width].swapaxes(1, 2)


def tables(what: Selected, sizes: Sizes, lse: jax.Array | None = None, delta: jax.Array | None = None) -> jax.Array:
    """Returns int32 [B * K * tiles, named_rows + REST, rows]: of each row its blocks' first tokens, then `POSITION`, `OFFSET`
    (that of its document's blocks) and the bits of `LSE` and `DELTA`, [B, T, N]."""
    o, G = sizes, sizes.N // sizes.K
    first = jnp.pad(what.first, ((0, 0), (0, 0), (0, 0), (0, o.named_rows - o.NAMED)), constant_values=NONE)
    # Rows of padding are before every key, and have no weights.
    rest: list[tuple[jax.Array, float]] = [
        (jnp.minimum(what.position, o.S - 1)[:, None, None], -1),
        ((what.start % o.SIZE)[..., None, None], 0),
    ]
    for x, fill in ((lse, jnp.inf), (delta, 0)):
        if x is not None:
            rest.append((x.astype(jnp.float32).reshape(o.B, o.T, o.K, G), fill))
    columns = [_of_rows(jnp.broadcast_to(first[:, :, :, None], (o.B, o.T, o.K, G, o.named_rows)), o, NONE)]
    for x, fill in rest:
        column = _of_rows(jnp.broadcast_to(x, (o.B, o.T, o.K, G)), o, fill)[..., None]
        columns.append(jax.lax.bitcast_convert_type(column, jnp.int32))
    last = REST - len(rest)
    return jnp.pad(jnp.concatenate(columns, axis=-1), ((0, 0), (0, 0), (0, last))).swapaxes(1, 2)


def sizes_of(call_sizes: tuple[int, ...], named: int, size: int, scale: float | None, aligned: bool, cfg) -> Sizes:
    """Returns the sizes of a call.

    Args:
      call_sizes: B, T, S, N, K, H and Hv. named: blocks that a query names at most. size: tokens of a block.
    """
    B, T, S, N, K, H, HV = call_sizes
    block_k = keys_of(size)
    scale = 1 / math.sqrt(H) if scale is None else scale
    block_q = min(max(1, cfg.block_rows // (N // K)), T)
    pieces = max(1, min(cfg.block_keys // block_k, block_q * named * overlapped(size, block_k, aligned)))
    q_pieces = max(1, min(cfg.backward_rows // max(cfg.block_rows, 1), -(-T // block_q)))
    return Sizes(B, T, S, N, K, H, HV, named, size, scale, block_q, block_k, aligned, pieces, q_pieces)


def keys_of(size: int) -> int:
    """Returns the keys of a tile for blocks of a size: whole registers of 16-bit numbers, one block where that fits."""
    return power(min(size, LANES), 16)
