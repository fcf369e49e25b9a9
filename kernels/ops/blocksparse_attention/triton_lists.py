"""Two Triton kernels that compute lists of tiles, like `tiles.tile_map`, in a few microseconds: one lists the visited tiles of
each tile, the other ranks tiles by the length of their lists."""

# Triton declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.ops.blocksparse_attention.tiles import FULL, HIDDEN, MASKED, TileMap
from kernels.toolchains.triton import triton_launch

_HIDDEN, _MASKED, _FULL = (tl.constexpr(kind) for kind in (HIDDEN, MASKED, FULL))
AT_ONCE = 1024  # entries of a list that a program processes at a time
RANKED = 64  # tiles that a program ranks


@triton.jit
def tile_list_kernel(
    kinds_ptr,  # [lists, OTHERS] int8
    index_ptr,  # [lists, OTHERS]
    ends_ptr,  # [lists, 2]
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    full = 0
    for begin in range(0, OTHERS, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(kinds_ptr + row * OTHERS + tile, mask=tile < OTHERS, other=_HIDDEN)
        full += tl.sum((kind == _FULL).to(tl.int32), axis=0)
    next_full, next_masked = 0, full
    for begin in range(0, OTHERS, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(kinds_ptr + row * OTHERS + tile, mask=tile < OTHERS, other=_HIDDEN)
        is_full, is_masked = (kind == _FULL).to(tl.int32), (kind == _MASKED).to(tl.int32)
        place = (
            tl.where(kind == _FULL, next_full + tl.cumsum(is_full, axis=0), next_masked + tl.cumsum(is_masked, axis=0))
            - 1
        )
        tl.store(index_ptr + row * OTHERS + place, tile, mask=kind != _HIDDEN)
        next_full += tl.sum(is_full, axis=0)
        next_masked += tl.sum(is_masked, axis=0)
    tl.store(ends_ptr + row * 2, full)
    tl.store(ends_ptr + row * 2 + 1, next_masked)


@triton.jit
def longest_first_kernel(
    ends_ptr,  # [lists, TILES, 2]
    order_ptr,  # [lists / GROUP, TILES]
    TILES: tl.constexpr,
    GROUP: tl.constexpr,  # lists of a tile whose lengths are added
    BLOCK: tl.constexpr,
):
    """A tile's rank is the number of tiles with longer lists, or with equally long lists and a lower index, so ranks differ."""
    PARTS: tl.constexpr = (TILES + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    tile = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    ends_ptr += row * (GROUP * TILES * 2) + 1
    length = tl.zeros([BLOCK], tl.int32)
    for g in range(GROUP):
        length += tl.load(ends_ptr + (g * TILES + tile) * 2, mask=tile < TILES, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, TILES, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        others = tl.zeros([BLOCK], tl.int32)
        for g in range(GROUP):
            others += tl.load(ends_ptr + (g * TILES + other) * 2, mask=other < TILES, other=0)
        longer = others[None, :] > length[:, None]
        earlier = (others[None, :] == length[:, None]) & (other[None, :] < tile[:, None])
        rank += tl.sum(((longer | earlier) & (other < TILES)[None, :]).to(tl.int32), axis=1)
    tl.store(order_ptr + row * TILES + rank, tile, mask=tile < TILES)


def lists(kinds: jax.Array, group: int = 1) -> TileMap:
    """Returns the same as `tile_map`, computed by the two kernels."""
    batch, heads, tiles, others = kinds.shape
    group = 1 if heads == 1 else group
    block = min(AT_ONCE, triton.next_power_of_2(others))
    index, ends = triton_launch(
        tile_list_kernel,
        kinds,
        out_shape=(
            jax.ShapeDtypeStruct(kinds.shape, jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, tiles, 2), jnp.int32),
        ),
        grid=(batch * heads * tiles,),
        num_warps=max(1, min(4, block // 256)),
        OTHERS=others,
        BLOCK=block,
    )
    (order,) = triton_launch(
        longest_first_kernel,
        ends,
        out_shape=(jax.ShapeDtypeStruct((batch, heads // group, tiles), jnp.int32),),
        grid=(batch * heads // group * math.ceil(tiles / RANKED),),
        num_warps=4,
        TILES=tiles,
        GROUP=group,
        BLOCK=RANKED,
    )
    return TileMap(index, ends, order)
