"""Launches the Triton kernel of latent attention over pages."""

from __future__ import annotations

import jax
import numpy as np

from kernels.engines.attention import triton_paged_plan as paged
from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.ranges import interval_of
from kernels.engines.attention.triton_calls import padded_width
from kernels.engines.attention.triton_paged_calls import FEW, FILLS, REQUESTS, Tile, instances, launch
from kernels.engines.attention.triton_paged_latent import latent_kernel
from kernels.engines.attention.triton_paged_plan import Paged
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.triton import compute_capability

# Most heads of a tile, by compute capability: what fits into shared memory beside blocks of entries. In float32 FEW.
HEADS = {80: 64, 86: 16, 89: 16, 90: 128}
# Programs that share the columns of a tile, by its rows and the bytes of a number; else one.
PARTS = {(64, 2): 2, (128, 2): 2}
# Programs that entries are split for, by the rows of a tile: as many as run at once, or twice that.
PROGRAMS = {FEW: 4 * MULTIPROCESSORS, 32: 2 * MULTIPROCESSORS, 64: MULTIPROCESSORS, 128: MULTIPROCESSORS // 2}
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
) -> jax.Array:
    """Returns latent attention [M, N, R] of absorbed queries [M, N, R] of requests over pages [pages, C, R + Hr]."""
    (M, N, H), (pages, C, width) = query.shape, cache.shape
    assert requests.tables is not None
    R, longest = requests.tables.shape
    most = HEADS.get(compute_capability(), HEADS[90])
    most = most if query.dtype.itemsize == 2 else min(most, FEW)
    groups = next(k for k in range(1, N + 1) if N % k == 0 and N // k <= most)
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
    arrays = query, query_rope, cache, requests.cuts, requests.lens, requests.starts, requests.tables
    rope, out = max(16, power_of_two(width - H)), None
    for o, tile in instances(base, few, many, PROGRAMS[few.rows], M):
        parts = PARTS.get((o.BLOCK_M, query.dtype.itemsize), 1)
        out = launch(latent_kernel, o, tile, arrays, requests, out, parts, BLOCK_ROPE=rope, PARTS=parts)
    assert out is not None
    return out


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
