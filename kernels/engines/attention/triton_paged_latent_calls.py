"""Launches the Triton kernel of latent attention over pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention import triton_paged_plan as paged
from kernels.engines.attention.gluon_latent import warp_specialized_latent_kernel
from kernels.engines.attention.gluon_latent_turned import turned_latent_kernel
from kernels.engines.attention.gluon_parts import BLOCK
from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.ranges import interval_of
from kernels.engines.attention.triton_calls import PANEL, padded_width, takes_pages
from kernels.engines.attention.triton_paged_calls import (
    FEW,
    FILLS,
    REQUESTS,
    Tile,
    instances,
    launch,
    merged,
    most_tiles,
    rooms_of,
)
from kernels.engines.attention.triton_paged_latent import latent_kernel, list_kernel
from kernels.engines.attention.triton_paged_plan import Paged
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

# Most heads of a tile, by compute capability: what fits into shared memory beside blocks of entries. In float32 FEW.
HEADS = {80: 64, 86: 16, 89: 16, 90: 128}
# Programs that share the columns of a tile, by its rows and the bytes of a number; else one.
PARTS = {(64, 2): 2, (128, 2): 2}
# Programs that entries are split for, by the rows of a tile: as many as run at once, or twice that.
PROGRAMS = {FEW: 4 * MULTIPROCESSORS, 32: 2 * MULTIPROCESSORS, 64: MULTIPROCESSORS, 128: MULTIPROCESSORS // 2}
# Rows and entries of a block of the kernel for Hopper, warps of its first warpgroup, and blocks on their way or in use:
# beside the queries they fill shared memory. Widths of latents that it takes.
HOPPER, HOPPER_WIDTHS = Tile(64, 32, 4, 4), (128, 256, 512)
# Its programs: one fills a multiprocessor. A few fewer than those, so that powers of 2 of requests need no second round.
HOPPER_PROGRAMS = 128
# Tiles of the kernel for Hopper of few rows, and most requests of a call. Its programs: one fills a multiprocessor.
TURNED, TURNED_REQUESTS, TURNED_PROGRAMS = Tile(FEW, 64, 4, 2), 64, MULTIPROCESSORS
# Least columns of a program: those of one step of a product.
LEAST_WIDTH = 16
# Widest latent: a program has the outputs of its rows in registers; in float32 there are no tensor cores.
WIDEST, FLOAT32_WIDTH = 512, 128


def attend_latent(
    query: jax.Array,
    query_rope: jax.Array,
    cache: jax.Array,
    requests: Requests,
    *,
    softmax_scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> tuple[jax.Array, ...]:
    """Returns latent attention [M, N, R] of absorbed queries [M, N, R] of requests over pages [pages, C, R + Hr]; of requests
    that all have as many queries, also its lse [M, N]."""
    (M, N, H), (pages, C, width) = query.shape, cache.shape
    R, longest = requests.lens.shape[0], 1 if requests.tables is None else requests.tables.shape[1]
    most = HEADS.get(compute_capability(), HEADS[90])
    most = most if query.dtype.itemsize == 2 else min(most, FEW)
    groups = groups_of(N, most)
    hopper = takes_hopper(query, query_rope, cache, requests.tables is not None, N // groups_of(N, HOPPER.rows))
    if hopper:
        groups = groups_of(N, HOPPER.rows)
    keys = interval_of(MaskInfo(causal=True, window=window_of(sliding_window)), np.zeros(1, np.int32))
    base = Paged(
        M=M,
        R=R,
        T=requests.each,
        N=N,
        K=groups,
        H=H,
        HV=H,
        C=C,
        PAGES=pages,
        LONGEST=longest,
        K_WIDTH=width,
        V_WIDTH=width,
        V_FIRST=0,
        KIND=paged.PLAIN.value,
        HALVES=False,
        K_SCALES=(0, 0, 0),
        V_SCALES=(0, 0, 0),
        SCALE=softmax_scale,
        CAP=logits_soft_cap,
        LOW=None if keys.low is None else keys.low.offset,
        HIGH=0,
        SINKS=0,
        LEAST=1,
        MOST=M,
        FILLS=0 if requests.cuts is None else FILLS,
        PIECES=0,
        LEAST_BLOCKS=1,
        QUERIES=1,
        ROWS=1,
        BLOCK_M=FEW,
        BLOCK_K=FEW,
        BLOCK_H=padded_width(H),
        BLOCK_V=padded_width(H),
        BLOCK_R=min(power_of_two(R), REQUESTS),
    )
    few, many = tiles(N // groups, most, longest * C, C, query.dtype.itemsize)
    if hopper:
        few = many = HOPPER
    turned = takes_turned(query, query_rope, cache, requests, few, groups)
    if turned:
        few = TURNED._replace(rows=few.rows)
    arrays = query, query_rope, cache, requests.cuts, requests.lens, requests.starts, requests.tables
    rope, out, log = max(16, power_of_two(width - H)), None, requests.each is not None
    results: tuple[jax.Array, ...] = ()
    programs = HOPPER_PROGRAMS if hopper else PROGRAMS[few.rows]
    for o, tile in instances(base, few, many, programs, M):
        if hopper:
            results = on_hopper(o, tile, query, query_rope, cache, requests, out)
        elif turned and o.BLOCK_M == few.rows:
            results = on_hopper_turned(o, tile, query, query_rope, cache, requests, out)
        else:
            parts = min(PARTS.get((o.BLOCK_M, query.dtype.itemsize), 1), o.BLOCK_H // LEAST_WIDTH)
            how: dict[str, Any] = {"BLOCK_ROPE": rope, "PARTS": parts} | ({} if log else {"log_ptr": None})
            results = launch(latent_kernel, o, tile, arrays, requests, out, parts, log, **how)
        out = results[0]
    return results


def groups_of(heads: int, most: int) -> int:
    """Returns the fewest groups of heads such that a tile holds the heads of one group."""
    return next(k for k in range(1, heads + 1) if heads % k == 0 and heads // k <= most)


def takes_hopper(query: jax.Array, query_rope: jax.Array, cache: jax.Array, paged: bool, heads: int) -> bool:
    """Returns whether Hopper's kernel takes a call: the heads of a query fill more than half of a tile's rows, and
    two warpgroups can share the latents. TMA needs rows that are multiples of 16 bytes, and copies parts of pages."""
    slots, H, rope = cache.shape[1], query.shape[2], query_rope.shape[2]
    return (
        compute_capability() == 90
        and query.dtype.itemsize == 2
        and 2 * heads > HOPPER.rows
        and H in HOPPER_WIDTHS
        and rope % 8 == 0
        and 0 < rope <= PANEL
        and (takes_pages(slots, HOPPER.keys) or (slots >= HOPPER.keys and not paged))
    )


def on_hopper(
    o: Paged,
    tile: Tile,
    query: jax.Array,
    query_rope: jax.Array,
    cache: jax.Array,
    requests: Requests,
    before: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns the output of an instance by the kernel for Hopper, in that of the one before it if there is one; and its lse, as
    `attend_latent`."""
    pieces = most_tiles(o) + o.PIECES
    listed = jax.ShapeDtypeStruct((pieces + o.FILLS, 8), jnp.int32)
    lengths = requests.cuts, requests.lens, requests.starts
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    named: dict[str, Any] = {} if before is None else {"out_ptr": None}
    items, out = triton_launch(
        list_kernel,
        *lengths,
        before,
        out_shape=(listed, out),
        grid=((pieces + o.FILLS) * o.K,),
        num_warps=4,
        input_output_aliases={} if before is None else {sum(x is not None for x in lengths): 1},
        O=o,
        **named,
    )
    pages, slots, width = cache.shape
    operands = (
        tensor_descriptor(query, (o.M * o.N, o.H), (tile.rows, o.H), SWIZZLED.value),
        tensor_descriptor(query_rope, (o.M * o.N, width - o.H), (tile.rows, PANEL), SWIZZLED.value),
        tensor_descriptor(cache, (pages, slots, 1, width), (1, min(slots, o.BLOCK_K), 1, PANEL), BLOCK.value),
        items,
        requests.tables,
        out,
    )
    log = requests.each is not None
    logless: dict[str, Any] = {} if log else {"log_ptr": None}
    logs = [jax.ShapeDtypeStruct((o.M, o.N), jnp.float32)] * log
    part, lse, *rest = triton_launch(
        warp_specialized_latent_kernel,
        *operands,
        out_shape=(*rooms_of(o), *logs, out),
        grid=(pieces * o.K,),
        num_warps=tile.num_warps,
        input_output_aliases={sum(x is not None for x in operands) - 1: 2 + log},
        O=o,
        STAGES=tile.num_stages,
        CONSUMER_REGISTERS=208,
        PRODUCER_REGISTERS=40,
        **logless,
    )
    return merged(o, requests, rest[-1], part, lse, *rest[:-1])


def takes_turned(
    query: jax.Array, query_rope: jax.Array, cache: jax.Array, requests: Requests, few: Tile, groups: int
) -> bool:
    """Returns whether Hopper's kernel for few rows takes the tiles of requests with few queries, of one group of heads."""
    slots, H, rope = cache.shape[1], query.shape[2], query_rope.shape[2]
    return (
        compute_capability() == 90
        and query.dtype.itemsize == 2
        and few.rows in (16, 32)
        and groups == 1
        and requests.lens.shape[0] <= TURNED_REQUESTS
        and H in HOPPER_WIDTHS
        and rope % 8 == 0
        and 0 < rope <= PANEL
        and (takes_pages(slots, TURNED.keys) or (slots >= TURNED.keys and requests.tables is None))
    )


def on_hopper_turned(
    o: Paged,
    tile: Tile,
    query: jax.Array,
    query_rope: jax.Array,
    cache: jax.Array,
    requests: Requests,
    before: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns the output of an instance by the kernel for Hopper and few rows, in that of the one before it if there is one;
    and its lse, as `attend_latent`."""
    # A request, which is one tile here, adds at most one piece to those that entries are split for: no second round.
    o = replace(o, PIECES=o.PIECES and max(1, TURNED_PROGRAMS - o.R), LEAST_BLOCKS=1)
    pages, slots, width = cache.shape
    log = requests.each is not None
    operands = (
        tensor_descriptor(query, (o.M * o.N, o.H), (tile.rows, o.H), SWIZZLED.value),
        tensor_descriptor(query_rope, (o.M * o.N, width - o.H), (tile.rows, PANEL), SWIZZLED.value),
        tensor_descriptor(cache, (pages, slots, 1, width), (1, min(slots, o.BLOCK_K), 1, PANEL), BLOCK.value),
        requests.cuts,
        requests.lens,
        requests.tables,
        before,
    )
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    logs = [jax.ShapeDtypeStruct((o.M, o.N), jnp.float32)] * log
    named: dict[str, Any] = {} if log else {"log_ptr": None}
    aliases: dict[int, int] = {}
    shapes = [out, *rooms_of(o), *logs]
    if before is not None:
        shapes = [*shapes[1:], out]
        aliases, named = {sum(x is not None for x in operands) - 1: 2 + log}, named | {"out_ptr": None}
    results = triton_launch(
        turned_latent_kernel,
        *operands,
        out_shape=tuple(shapes),
        grid=(most_tiles(o) + o.PIECES + o.FILLS,),
        num_warps=tile.num_warps,
        input_output_aliases=aliases,
        O=o,
        STAGES=tile.num_stages,
        PRODUCER_REGISTERS=40,
        **named,
    )
    if before is not None:
        results = (results[-1], *results[:-1])
    return merged(o, requests, *results)


def tiles(heads: int, most: int, entries: int, slots: int, itemsize: int) -> tuple[Tile, Tile]:
    """Returns the tiles of both instances, for that many heads of a query, of which a tile has `most`, at most `entries`
    entries of a request, and pages of that many slots.

    A block of 32 entries of 576 numbers is 36 KiB. With three stages two blocks are on their way or in use beside queries, for
    which Triton needs five where a block lies in several pages: numbers of pages, which it loads ahead, take half of them.
    Beside 128 rows of queries there is room for one stage less. MLA of 128 heads, 64 requests of 8,192 entries, on an H200:
    701 us with such tiles, 779 with 64 rows, 1,478 with 32.
    """
    block = min(32 if itemsize == 2 else 16, max(16, power_of_two(entries)))
    whole, rows = slots % block == 0, max(FEW, power_of_two(heads))
    few = Tile(rows, block, 8 if rows == 32 or itemsize == 4 else 4, 3 if whole else 5)
    if itemsize == 4 or most == FEW:
        return few, few
    tall = Tile(most, block, 8, 2 if whole else 3)
    return tall if rows == most else few, tall
