"""Compile-time options of attention over pages, and the work of each program: which part of which request, from the lengths."""

# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# What a cache holds: floats, or numbers that a scale multiplies.
PLAIN, INT8, E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True)
class Paged:
    """Compile-time options: sizes, and the options of the call by the names of the contract.

    Attributes:
      M: rows of queries. R: requests. T: queries of each, or None if they are cut by an array.
      N, K, H, HV: heads of queries and of keys, and their widths.
      C: slots of a page. PAGES: pages. LONGEST: pages of a table.
      K_WIDTH, V_WIDTH: numbers of a slot and head in the arrays of keys and of values. V_FIRST: where its value begins.
      KIND: PLAIN, INT8, E4M3 or E5M2.
      HALVES: whether int8 is multiplied as float16, see `halves_of`.
      K_SCALES, V_SCALES: strides of the scales over pages, slots and heads; 0 where one serves all.
      LOW, HIGH: offsets of the first and last key that a query sees from its own position, or None.
      SINKS: logits of each head without a value.
      LEAST, MOST: numbers of queries of the requests that are served.
      FILLS: how many programs of each head set rows without a request to 0.
      PIECES: for how many programs of each head keys are split; 0: they are not.
      LEAST_BLOCKS: least number of blocks of keys of a piece.
      QUERIES: queries of a tile, times N / K heads at most BLOCK_M rows. ROWS: how many of these may be in use.
    """

    M: int
    R: int
    T: int | None
    N: int
    K: int
    H: int
    HV: int
    C: int
    PAGES: int
    LONGEST: int
    K_WIDTH: int
    V_WIDTH: int
    V_FIRST: int
    KIND: int
    HALVES: bool
    K_SCALES: tuple[int, int, int]
    V_SCALES: tuple[int, int, int]
    SCALE: float
    CAP: float | None
    LOW: int | None
    HIGH: int | None
    SINKS: int
    LEAST: int
    MOST: int
    FILLS: int
    PIECES: int
    LEAST_BLOCKS: int
    QUERIES: int
    ROWS: int
    BLOCK_M: int
    BLOCK_K: int
    BLOCK_H: int
    BLOCK_V: int
    BLOCK_R: int


@triton.jit
def request_of(cuts_ptr, lens_ptr, starts_ptr, r, O: tl.constexpr):
    """Returns (first row, number of rows, first key, one past the last key, position of the first query) of requests r; those
    past the last one have no rows."""
    real = r < O.R
    if cuts_ptr is None:
        begin = r * O.T
        count = tl.where(real, O.T, 0)
    else:
        begin = tl.minimum(tl.maximum(tl.load(cuts_ptr + r, mask=real, other=0), 0), O.M)
        count = tl.minimum(tl.maximum(tl.load(cuts_ptr + r + 1, mask=real, other=0), begin), O.M) - begin
    length = tl.load(lens_ptr + r, mask=real, other=0)
    first = 0 * length
    if starts_ptr is not None:
        first = tl.maximum(tl.load(starts_ptr + r, mask=real, other=0), 0)
    return begin, count, first, tl.minimum(length, O.LONGEST * O.C), length - count


@triton.jit
def blocks_of(first, last, key, keys, O: tl.constexpr):
    """Returns the range of blocks of keys that queries at positions first to last see, of the keys `key` to `keys` - 1."""
    if O.LOW is not None:
        key = tl.maximum(key, first + O.LOW)
    if O.HIGH is not None:
        keys = tl.minimum(keys, last + O.HIGH + 1)
    block = key // O.BLOCK_K
    return block, tl.maximum((keys + O.BLOCK_K - 1) // O.BLOCK_K, block)


@triton.jit
def tiles_of(cuts_ptr, lens_ptr, starts_ptr, r, O: tl.constexpr):
    """Returns (number of tiles, blocks of keys that a tile may see) of requests r; no tiles for those of the other instance."""
    _, count, key, keys, place = request_of(cuts_ptr, lens_ptr, starts_ptr, r, O)
    served = (count >= O.LEAST) & (count <= O.MOST)
    block, end = blocks_of(place, place + count - 1, key, keys, O)
    return tl.where(served, (count + O.QUERIES - 1) // O.QUERIES, 0), end - block


@triton.jit
def pieces_of(blocks, each, O: tl.constexpr):
    """Returns the number of pieces of at most `each` blocks of keys."""
    if O.PIECES == 0:
        pieces = 0 * blocks + 1
    else:
        pieces = tl.maximum((blocks + each - 1) // each, 1)
    return pieces


@triton.jit
def first_of(tile, count, O: tl.constexpr):
    """Returns the first query of a tile: the last queries come first, since they usually see the most keys."""
    return ((count - 1) // O.QUERIES - tile) * O.QUERIES


@triton.jit
def plan(cuts_ptr, lens_ptr, starts_ptr, index, BY_TILE: tl.constexpr, O: tl.constexpr):
    """Returns (request, index of its first piece, place of `index` within it, pieces of each tile, number of all): of piece
    `index` of all tiles, or with BY_TILE of tile `index`, whose place is then that of the tile. There is none unless index <
    number of all.

    Requests deal out about PIECES pieces in proportion to the work of their tiles, which adds at most one for each tile.
    """
    each = 1
    if O.PIECES > 0:
        total = 0
        for first in range(0, O.R, O.BLOCK_R):
            tiles, blocks = tiles_of(cuts_ptr, lens_ptr, starts_ptr, first + tl.arange(0, O.BLOCK_R), O)
            total += tl.sum(tiles * blocks)
        each = tl.maximum((total + O.PIECES - 1) // O.PIECES, O.LEAST_BLOCKS)
    request, begins, place, split, counted, listed = 0, 0, 0, 0, 0, 0
    for first in range(0, O.R, O.BLOCK_R):
        r = first + tl.arange(0, O.BLOCK_R)
        tiles, blocks = tiles_of(cuts_ptr, lens_ptr, starts_ptr, r, O)
        pieces = pieces_of(blocks, each, O)
        items = tiles * pieces
        ends = counted + tl.cumsum(items, 0)
        if BY_TILE:
            until = listed + tl.cumsum(tiles, 0)
            here = (until > index) & (until - tiles <= index)
            place += tl.sum(tl.where(here, index - until + tiles, 0))
        else:
            here = (ends > index) & (ends - items <= index)
            place += tl.sum(tl.where(here, index - ends + items, 0))
        request += tl.sum(tl.where(here, r, 0))
        begins += tl.sum(tl.where(here, ends - items, 0))
        split += tl.sum(tl.where(here, pieces, 0))
        counted += tl.sum(items)
        listed += tl.sum(tiles)
    if BY_TILE:
        counted = listed
    return request, begins, place, split, counted


@triton.jit
def piece_of(cuts_ptr, lens_ptr, starts_ptr, request, place, split, O: tl.constexpr):
    """Returns what a piece of a tile is, of `split`, by its place among those of its request: (its first row, rows times
    heads, position of the first query, first key, one past the last key, first block of keys, one past the last)."""
    begin, count, key, keys, position = request_of(cuts_ptr, lens_ptr, starts_ptr, request, O)
    first, piece = first_of(place // split, count, O), place % split
    tokens = tl.minimum(count - first, O.QUERIES)
    block, end = blocks_of(position, position + count - 1, key, keys, O)
    each = (end - block + split - 1) // split
    low, high = blocks_of(position + first, position + first + tokens - 1, key, keys, O)
    low, high = tl.maximum(low, block + piece * each), tl.minimum(high, block + (piece + 1) * each)
    return begin + first, tokens * (O.N // O.K), position + first, key, keys, low, high
