"""Launches the Triton kernels of attention over pages: their arguments, grids and tile sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from kernels.engines.attention import triton_paged_plan as paged
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.ranges import interval_of
from kernels.engines.attention.triton_calls import padded_width, scale_of
from kernels.engines.attention.triton_paged import paged_kernel, paged_merge_kernel
from kernels.engines.attention.triton_paged_plan import Paged
from kernels.engines.attention.triton_paged_tall import TALL, attend_tall
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.triton import compute_capability, triton_launch

# Rows of a tile of requests with few queries, the least of a product on tensor cores; and of prompts.
FEW, MANY = 16, 128
# Numbers that an 8-bit cache may hold, by the name of its dtype.
KINDS = {"int8": paged.INT8.value, "float8_e4m3fn": paged.E4M3.value, "float8_e5m2": paged.E5M2.value}
# The first compute capability for which Triton has e4m3.
FLOAT8 = 89
# Programs that keys are split for: twice the three that a multiprocessor runs at once.
PROGRAMS = 6 * MULTIPROCESSORS
# Least keys of a piece: what is written and merged of it stays small beside what it reads.
LEAST_KEYS = 256
# Requests whose lengths are summed at once.
REQUESTS = 1024
# Programs of each head that fill rows without a request.
FILLS = 16
# Pieces that are merged at once, and if a tile is likely to have as many alone; numbers of them; and rows of tall tiles.
PIECES, MOST_PIECES, MERGED, ROWS = 32, 128, 4096, {MANY: 8}
# Pieces of two rows of latents that one program merges at once, with all their columns.
PIECES_OF_TWO = 4


def bits_of(x: jax.Array) -> jax.Array:
    """Returns an array that kernels can have a pointer to: 8-bit floats that Triton knows only on later GPUs as their bits."""
    hidden = x.dtype == jnp.float8_e4m3fn and compute_capability() < FLOAT8
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if hidden else x


class Tile(NamedTuple):
    """How one instance runs: rows and keys of a tile, warps, and stages of its loop over keys."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def attend(
    query: jax.Array,
    caches: tuple[jax.Array, jax.Array | None],
    scales: tuple[jax.Array | None, jax.Array | None],
    softmax_aux: jax.Array | None,
    alibi_slopes: jax.Array | None,
    requests: Requests,
    few: Tile,
    many: Tile,
    programs: int,
    *,
    tall: bool = False,
    log: bool = False,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
) -> tuple[jax.Array, ...]:
    """Returns attention [M, N, HV] of the queries [M, N, H] of requests over their keys, as the contracts of paged attention;
    with `log`, for requests that all have as many queries, also its lse [M, N].

    Args:
      caches, scales: of keys and values [pages, C, K, width], and [#pages, #C, #K] or None; without the second cache a slot has
        its key in the first H numbers and its value in the others.
      few, many: tiles of the two instances. programs: how many programs keys are split for.
      tall: whether requests of `TALL` queries or more take flash attention's kernel for Hopper, see `is_tall`.
    """
    (key_cache, value_cache), (k_scale, v_scale) = caches, scales
    (M, N, H), (pages, C, K, width) = query.shape, key_cache.shape
    R = requests.lens.shape[0]
    values = key_cache if value_cache is None else value_cache
    first = H if value_cache is None else 0
    HV = values.shape[3] - first
    keys = interval_of(MaskInfo(causal=causal, window=window), np.zeros(1, np.int32))
    longest = 1 if requests.tables is None else requests.tables.shape[1]
    # float16 has room for weights, but for none that scales of slots make small.
    v_strides = _strides(v_scale)
    halves = str(key_cache.dtype) == "int8" and query.dtype.itemsize == 2 and not any(v_strides[:2])
    base = Paged(
        M=M,
        R=R,
        T=requests.each,
        N=N,
        K=K,
        H=H,
        HV=HV,
        C=C,
        PAGES=pages,
        LONGEST=longest,
        K_WIDTH=width,
        V_WIDTH=values.shape[3],
        V_FIRST=first,
        KIND=KINDS.get(str(key_cache.dtype), paged.PLAIN.value),
        HALVES=halves,
        K_SCALES=_strides(k_scale),
        V_SCALES=v_strides,
        SCALE=scale_of(softmax_scale, H),
        CAP=logits_soft_cap,
        LOW=None if keys.low is None else keys.low.offset,
        HIGH=None if keys.high is None else keys.high.offset,
        SINKS=0 if softmax_aux is None else softmax_aux.shape[1],
        LEAST=1,
        MOST=M,
        FILLS=0 if requests.cuts is None else FILLS,
        PIECES=0,
        LEAST_BLOCKS=1,
        QUERIES=1,
        ROWS=1,
        BLOCK_M=FEW,
        BLOCK_K=FEW,
        BLOCK_H=max(32 if halves else 16, padded_width(H)),  # least of a product of bytes on tensor cores
        BLOCK_V=padded_width(HV),
        BLOCK_R=min(power_of_two(R), REQUESTS),
    )
    key_cache, values = bits_of(key_cache), bits_of(values)
    arrays = (
        query,
        key_cache,
        values,
        k_scale,
        v_scale,
        requests.cuts,
        requests.lens,
        requests.starts,
        requests.tables,
    )
    out, results = None, ()
    logless: dict[str, Any] = {} if log else {"log_ptr": None}
    for o, tile in instances(base, few, many, programs, TALL - 1 if tall else M):
        arguments = (*arrays, softmax_aux, alibi_slopes)
        out, *_ = results = launch(paged_kernel, o, tile, arguments, requests, out, log=log, **logless)
    if tall:
        options = {
            "softmax_scale": softmax_scale,
            "logits_soft_cap": logits_soft_cap,
            "causal": causal,
            "window": window,
        }
        return (attend_tall(query, (key_cache, values), softmax_aux, requests, out, **options),)
    return results


def instances(base: Paged, few: Tile, many: Tile, programs: int, most_queries: int) -> list[tuple[Paged, Tile]]:
    """Returns the instances that serve a call: that of few queries where requests may have so few, and that of many. Of a
    ragged batch, requests of more than `most_queries` are left to another kernel."""
    G = base.N // base.K
    short = max(few.rows, power_of_two(G))
    most = short // G  # queries of a request that one such tile holds
    longest = base.M if base.T is None else base.T
    if longest <= most or (base.T is None and base.M <= base.R):
        ranges = [(few._replace(rows=short), 1, longest)]
    elif base.T is not None:
        ranges = [(many, 1, longest)]
    else:
        ranges = [(few._replace(rows=short), 1, most), (many, most + 1, min(base.M, most_queries))]
    listed = []
    for tile, least, longest in ranges:
        rows = max(tile.rows, power_of_two(G))
        queries = rows // G
        used = min(queries, longest) * G
        o = replace(base, LEAST=least, MOST=longest, QUERIES=queries, ROWS=used, BLOCK_M=rows, BLOCK_K=tile.keys)
        blocks = triton.cdiv(base.LONGEST * base.C, tile.keys)
        least_blocks = max(1, LEAST_KEYS // tile.keys)
        pieces = triton.cdiv(programs, base.K)
        # Not split: where no request is long enough, or tiles of many queries are many whatever the lengths.
        crowded = (rows > short or least > 1) and (most_tiles(o) if base.T else base.M // queries) >= 2 * pieces
        splits = blocks > least_blocks and not crowded
        listed.append((replace(o, PIECES=pieces if splits else 0, LEAST_BLOCKS=least_blocks), tile._replace(rows=rows)))
    # The last one, whose tiles are the tallest, fills the rows that belong to no request.
    return [(replace(o, FILLS=0), tile) for o, tile in listed[:-1]] + listed[-1:]


def most_tiles(o: Paged) -> int:
    """Returns how many tiles the requests of an instance may have, whatever their lengths."""
    each = triton.cdiv(o.MOST, o.QUERIES)
    if o.T is not None:
        return o.R * each
    return min(o.R * each, o.M // o.QUERIES + min(o.R, o.M // o.LEAST))


def launch(
    kernel: Any,
    o: Paged,
    tile: Tile,
    arrays: tuple[Any, ...],
    requests: Requests,
    before: jax.Array | None,
    parts: int = 1,
    log: bool = False,
    **more: Any,
) -> tuple[jax.Array, ...]:
    """Returns the output of an instance, in that of the one before it if there is one, and with `log` its lse, with its pieces
    merged.

    Args:
      arrays: the kernel's inputs, queries first. parts: programs of a tile's columns. more: the kernel's constexprs beside O.
    """
    query = arrays[0]
    pieces = most_tiles(o) + o.PIECES + o.FILLS
    shapes = rooms_of(o)
    out = jax.ShapeDtypeStruct((o.M, o.N, o.HV), query.dtype)
    aliases: dict[int, int] = {}
    named: dict[str, Any] = {}
    if before is None:
        shapes = [out, *shapes] + [jax.ShapeDtypeStruct((o.M, o.N), jnp.float32)] * log
    else:
        shapes = [*shapes, out]
        aliases, named = {sum(x is not None for x in arrays): 2}, {"out_ptr": None}
    results = triton_launch(
        kernel,
        *arrays,
        before,
        out_shape=tuple(shapes),
        grid=(pieces * o.K * parts,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        input_output_aliases=aliases,
        O=o,
        **named,
        **more,
    )
    return merged(o, requests, *(results if before is None else (results[2], *results[:2])))


def rooms_of(o: Paged) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays of an instance's pieces: their outputs, and lse in units of log 2."""
    rooms = most_tiles(o) + o.PIECES if o.PIECES else 1
    return [
        jax.ShapeDtypeStruct((rooms, o.K, o.BLOCK_M, o.HV), jnp.float32),
        jax.ShapeDtypeStruct((rooms, o.K, o.BLOCK_M), jnp.float32),
    ]


def merged(
    o: Paged, requests: Requests, out: jax.Array, part: jax.Array, lse: jax.Array, log: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Returns the output of an instance, and its lse if there is one, with the rows of tiles that are split."""
    results = (out,) if log is None else (out, log)
    if not o.PIECES:
        return results
    rows, pieces, columns = merge_tile(o)
    operands = (part, lse, requests.cuts, requests.lens, requests.starts, out, log)
    first = sum(x is not None for x in operands) - len(results)
    return triton_launch(
        paged_merge_kernel,
        *operands,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results),
        grid=(most_tiles(o) * o.K * triton.cdiv(o.ROWS, rows), o.BLOCK_V // columns),
        num_warps=4,
        input_output_aliases={first + i: i for i in range(len(results))},
        O=o,
        BLOCK_P=pieces,
        BLOCK_ROWS=rows,
        BLOCK_C=columns,
    )


def merge_tile(o: Paged) -> tuple[int, int, int]:
    """Returns (rows, pieces, columns) that a program merges at once. The more pieces a tile is likely to have, the fewer
    columns: few programs that load one after another wait for memory, as when one long request is split for all of a GPU."""
    rows = ROWS.get(o.BLOCK_M, 1)
    blocks = triton.cdiv(o.LONGEST * o.C, o.BLOCK_K)
    likely = min(triton.cdiv(o.PIECES, most_tiles(o)), triton.cdiv(blocks, o.LEAST_BLOCKS))
    # Every program searches for its tile. Of few pieces it takes all columns, and of wide ones two rows: 64 requests of 8,192
    # latents take 10 us on an H200 so, and 67 with a program for each row and 128 columns.
    least = MERGED // max(MERGED // PIECES, o.BLOCK_V)
    pieces = max(least, min(MOST_PIECES if rows == 1 else PIECES, power_of_two(likely)))
    columns = min(o.BLOCK_V, MERGED // pieces)
    if rows == 1 and pieces == 2 * PIECES_OF_TWO and columns == o.BLOCK_V:
        rows = 2
    return rows, max(1, min(pieces // rows, power_of_two(o.PIECES))), columns


def _strides(scale: jax.Array | None) -> tuple[int, int, int]:
    """Returns the strides of scales [#pages, #C, #K], 0 where one serves all."""
    if scale is None:
        return (0, 0, 0)
    _, slots, heads = scale.shape
    strides = (slots * heads, heads, 1)
    return tuple(0 if size == 1 else stride for size, stride in zip(scale.shape, strides, strict=True))  # pyrefly: ignore


# -- tiles ---------------------------------------------------------------------------------------------------------------


def tiles(width: int, keys: int, itemsize: int, cache: str) -> tuple[Tile, Tile]:
    """Returns the tiles of both instances, for heads padded to `width` entries, at most `keys` keys of a request, and a cache
    of that dtype.

    Numbers of pages are loaded ahead of what they lead to, and Triton gives each of the two half of the stages: with 5, two
    blocks of keys and values are on their way or in use, and with 3 one. Three programs of few rows fit on a multiprocessor.
    """
    most = max(16, power_of_two(keys))
    if itemsize == 4:  # multiplied in true float32, without tensor cores
        block = min(32 if width <= 64 else 16, most)
        return Tile(FEW, block, 8, 3), Tile(32 if width <= 128 else 16, block, 8 if width <= 64 else 4, 2)
    few = min(64 if width <= 128 else 32, most)
    # int8 waits for what converts it: half as many warps, each with twice the work, took 331 us for 367 on an H200.
    return Tile(FEW, few, 2 if cache == "int8" else 4, 5), Tile(
        MANY if width <= 128 else 64, min(64 if width <= 128 else 32, most), 8, 5
    )
