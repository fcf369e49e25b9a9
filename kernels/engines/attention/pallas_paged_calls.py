"""Launches attention over pages on TPUs: computes the lists of tiles, and brings arrays to the form of the kernel."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.pallas_paged import paged_kernel
from kernels.engines.attention.pallas_paged_copies import LANES, LOG2E, Paged, Tile
from kernels.engines.attention.ranges import interval_of
from kernels.framework.work import Work, nbytes
from kernels.toolchains.pallas import pallas_launch

__all__ = ["LANES", "MOST_PIECE", "Requests", "Sizes", "attend", "can_be_flat", "piece_of"]

VMEM_BYTES = 48 * 2**20
# Scalar memory that the tables of a launch may take; requests with more take several.
TABLE_BYTES = 512 * 2**10
# Most slots copied at once; longer pages are copied in pieces.
MOST_PIECE = 512
# Cores of a chip that may share a launch.
PARTS = 2
# Most rows of a product of all heads.
MOST_FLAT = 64


class Sizes(NamedTuple):
    """How one instance runs: queries of a tile, keys of a block, and blocks of its ring."""

    tokens: int
    keys: int
    buffers: int


def piece_of(slots: int) -> int:
    """Returns how many slots of a page are copied at once: all, or the largest divisor up to `MOST_PIECE`."""
    return next(n for n in range(min(slots, MOST_PIECE), 0, -1) if slots % n == 0)


def can_be_flat(N: int, heads: int, itemsize: int) -> bool:
    """Returns whether one product can take all heads."""
    return N <= MOST_FLAT and _matrix(heads, itemsize)


def _matrix(heads: int, itemsize: int) -> bool:
    """Returns whether the heads of all slots are rows of a matrix without a change of layout: they must fill whole words and
    tiles."""
    return heads * itemsize >= 4 and (heads % 8 == 0 or heads in (1, 2, 4))


def attend(
    op: str,
    query: jax.Array,
    caches: tuple[jax.Array, jax.Array | None],
    scales: tuple[jax.Array | None, jax.Array | None],
    softmax_aux: jax.Array | None,
    alibi_slopes: jax.Array | None,
    requests: Requests,
    few: Sizes,
    many: Sizes,
    *,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    within: int | None = None,
    log: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns attention [M, N, HV] of the queries [M, N, H] of requests over their keys, as the contracts of paged attention,
    and with `log` the log-sum-exp of its logits, [M, N] (of requests with `each` queries).

    Args:
      caches, scales: of keys and values [pages, C, K, width], and [#pages, #C, #K] or None; without the second cache a slot has
        its key in the first H numbers and its value in the others.
      few, many: sizes for requests with one query, and with more.
      within: HV, if the value of a slot is the first HV numbers of its key, and there is no second cache.
    """
    (key, value), (M, N, H), (pages, C, K, width) = caches, query.shape, caches[0].shape
    HV = within or (width - H if value is None else value.shape[3])
    form = "within" if within else "apart" if value is not None else "paired" if HV == H else "joined"
    keys = interval_of(MaskInfo(causal=causal, window=window), np.zeros(1, np.int32))
    piece = piece_of(C)
    pieces = C // piece
    one = K == 1 and form != "paired" and piece % (32 // key.dtype.itemsize) == 0
    base = Paged(
        N=N,
        K=K,
        H=H,
        HV=HV,
        C=piece,
        pages=pages * pieces,
        pieces=pieces,
        longest=pieces * (1 if requests.tables is None else requests.tables.shape[1]),
        tables=requests.tables is not None,
        form=form,
        tokens=1,
        block=1,
        buffers=2,
        parts=1,
        flat=False,
        scale=1 / math.sqrt(H) if softmax_scale is None else softmax_scale,
        cap=logits_soft_cap,
        low=None if keys.low is None else keys.low.offset,
        high=None if keys.high is None else keys.high.offset,
        k_scales=_of_slots(scales[0]),
        v_scales=_of_slots(scales[1]),
        slopes=alibi_slopes is not None,
        sinks=softmax_aux is not None,
        rows_of_slots=one,
        lse=log,
    )
    # A scale of a whole head is a factor of its queries, or of its outputs.
    if scales[0] is not None and not base.k_scales:
        query = (query.astype(jnp.float32) * _of_heads(scales[0], N, K)).astype(query.dtype)
    slots = (base.pages, piece) if one else (base.pages, piece, base.heads)
    arrays = {"query": query, "key": key.reshape(*slots, -1)}
    if value is not None:
        arrays["value"] = value.reshape(*slots, HV)
    extra = {"k_scale": scales[0] if base.k_scales else None, "v_scale": scales[1] if base.v_scales else None}
    if alibi_slopes is not None:
        extra["slopes"] = alibi_slopes.astype(jnp.float32) * LOG2E
    if softmax_aux is not None:
        extra["sinks"] = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1) * LOG2E
    # Rows of no request are 0; where there are none, each is written.
    start = jnp.zeros if requests.each is None else jax.lax.empty
    outs = (start((M, N, HV), query.dtype),)
    if log:  # equal in all lanes
        outs += (start((M, N, LANES), jnp.float32),)
    flat = one or can_be_flat(N, base.heads, key.dtype.itemsize)
    for sizes, least, most in _instances(M, requests, few, many):
        o = replace(
            base,
            tokens=sizes.tokens,
            block=max(1, min(sizes.keys // piece, base.longest)),
            buffers=sizes.buffers,
            flat=flat and sizes.tokens == 1,
        )
        for part in _launches(requests):
            outs = _launch(op, o, arrays, extra, part, (least, most), outs)
    out = outs[0]
    if scales[1] is not None and not base.v_scales:
        out = (out.astype(jnp.float32) * _of_heads(scales[1], N, K)).astype(out.dtype)
    return out, *(x[..., 0] for x in outs[1:])


def _of_slots(scale: jax.Array | None) -> bool:
    return scale is not None and scale.shape[:2] != (1, 1)


def _of_heads(scale: jax.Array, N: int, K: int) -> jax.Array:
    """Returns scales [1, 1, K|1] as [N, 1]."""
    return jnp.repeat(jnp.broadcast_to(scale.astype(jnp.float32).reshape(-1), (K,)), N // K)[:, None]


def _instances(M: int, requests: Requests, few: Sizes, many: Sizes) -> list[tuple[Sizes, int, int]]:
    """Returns the sizes and the numbers of queries of the requests that each instance serves."""
    if requests.each is not None:
        return [(few, 1, 1)] if requests.each == 1 else [(many, 1, requests.each)]
    return [(few, 1, 1), (many, 2, M)] if M > 1 else [(few, 1, 1)]


class _Part(NamedTuple):
    """Requests of one launch: first row, rows, keys and length of each, and their tables."""

    begin: jax.Array
    count: jax.Array
    start: jax.Array
    lens: jax.Array
    tables: jax.Array | None


def _launches(requests: Requests) -> list[_Part]:
    """Returns the requests in parts whose tables fit in scalar memory."""
    lens = requests.lens
    R = lens.shape[0]
    if requests.cuts is None:
        each = requests.each or 1
        begin = jnp.arange(R, dtype=jnp.int32) * each
        count = jnp.full_like(begin, each)
    else:
        begin, count = requests.cuts[:-1], requests.cuts[1:] - requests.cuts[:-1]
    start = jnp.zeros_like(lens) if requests.starts is None else requests.starts
    if requests.tables is None:
        return [_Part(begin, count, start, lens, None)]
    whole = _Part(begin, count, start, lens, requests.tables)
    step = max(1, TABLE_BYTES // (4 * requests.tables.shape[1]))
    return [jax.tree.map(lambda x, r=r: x[r : r + step], whole) for r in range(0, R, step)]


def tiles_of(o: Paged, part: _Part, served: tuple[int, int], length: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the tiles of a part, int32 [length * FIELDS], how many there are, int32 [1])."""
    least, most = served
    tiles = jnp.where((part.count >= least) & (part.count <= most), -(-part.count // o.tokens), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(length, dtype=jnp.int32)
    r = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    r = jnp.minimum(r, tiles.shape[0] - 1)
    ahead = (index - ends[r] + tiles[r]) * o.tokens
    tokens = jnp.minimum(part.count[r] - ahead, o.tokens)
    position = part.lens[r] - part.count[r] + ahead
    first = jnp.maximum(part.start[r], 0)
    last = jnp.minimum(part.lens[r], o.longest * o.C)
    if o.low is not None:
        first = jnp.maximum(first, position + o.low)
    if o.high is not None:
        last = jnp.minimum(last, position + tokens + o.high)
    # A tile that sees no key has one block, of which nothing is read.
    blocks = -(-o.longest // o.block)
    begin = jnp.clip(first // o.keys, 0, blocks - 1)
    last = jnp.maximum(last, 0)
    end = jnp.maximum(-(-last // o.keys), begin + 1)
    tile = Tile(r, part.begin[r] + ahead, tokens, position, begin, end, first, last)
    return jnp.stack(tile, axis=1).reshape(-1), ends[-1:]


def _launch(
    op, o: Paged, arrays, extra, part: _Part, served: tuple[int, int], outs: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns the outputs with the rows of the requests that an instance serves."""
    out = outs[0]
    M, R = out.shape[0], part.lens.shape[0]
    most = min(R * -(-served[1] // o.tokens), M // o.tokens + min(R, M // served[0]))
    o = replace(o, parts=min(PARTS, most))
    steps = -(-most // o.parts)
    tiles, total = tiles_of(o, part, served, steps * o.parts)
    tables = jnp.zeros((1,), jnp.int32) if part.tables is None else part.tables.reshape(-1)
    dtype, columns = out.dtype, o.C * o.stride
    inputs = dict(arrays)
    for name in ("k_scale", "v_scale"):
        if (scale := extra[name]) is not None:
            inputs[name] = _columns(o, scale)
    anywhere = len(inputs)
    for name in ("slopes", "sinks"):
        if name in extra:
            inputs[name] = _by_row(o, extra[name])
    scalars = {"tiles": tiles, "total": total, "tables": tables}
    ring = functools.partial(_ring, o)
    scratch = {
        "query_ring": pltpu.VMEM((o.buffers, o.tokens, o.N, o.H), dtype),
        "key_ring": ring(arrays["key"]),
        **({"value_ring": ring(arrays["value"])} if "value" in arrays else {}),
        **{
            f"{n}_ring": pltpu.VMEM((o.buffers, o.block, o.units, columns), jnp.float32)
            for n in ("k_scale", "v_scale")
            if n in inputs
        },
        **_words(o, arrays),
        "rows": pltpu.VMEM((o.units, o.rows, o.H), dtype),
        "largest": pltpu.VMEM((o.units, o.rows, LANES), jnp.float32),
        "weight": pltpu.VMEM((o.units, o.rows, LANES), jnp.float32),
        "sum": pltpu.VMEM((o.units, o.rows, o.HV), jnp.float32),
        "result": pltpu.VMEM((o.tokens, o.N, o.HV), dtype),
        **({"logs": pltpu.VMEM((o.tokens, o.N, LANES), jnp.float32)} if o.lse else {}),
        "ahead": pltpu.SMEM((5,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((o.buffers,)),
        "asked": pltpu.SemaphoreType.DMA((o.buffers,)),
        "written": pltpu.SemaphoreType.DMA,
    }  # fmt: skip
    results = ["out", "lse"][: len(outs)]
    names = [*scalars, *inputs, *(f"{name} before" for name in results), *results, *scratch]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    specs = [hbm if i < anywhere else pl.BlockSpec(memory_space=pltpu.VMEM) for i in range(len(inputs))]
    slot = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for n, x in arrays.items() if n != "query")
    keys = R * o.longest * o.C
    return pallas_launch(
        functools.partial(paged_kernel, o, names),
        *scalars.values(),
        *inputs.values(),
        *outs,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(o.parts, steps),
            in_specs=[*specs, *[hbm] * len(outs)],
            out_specs=(hbm,) * len(outs),
            scratch_shapes=list(scratch.values()),
        ),
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_BYTES,
        input_output_aliases={len(scalars) + len(inputs) + i: i for i in range(len(outs))},
        work=Work(
            2 * most * o.tokens * o.N * (o.H + o.HV) * o.longest * o.C, keys * slot + nbytes(*outs, arrays["query"])
        ),
        check_bounds=False,  # numbers of pages are clipped
        name=f"{op}_{'decode' if o.tokens == 1 else 'mixed'}_kernel",
    )


def _ring(o: Paged, cache: jax.Array) -> Any:
    return pltpu.VMEM((o.buffers, o.block, *cache.shape[1:]), cache.dtype)


def _words(o: Paged, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the room for a block in words of 32 bits, where heads fill such words and are picked one by one."""
    dtype = arrays["query"].dtype
    each = 4 // dtype.itemsize
    if o.flat or o.rows_of_slots or o.heads % each or not _matrix(o.heads, arrays["key"].dtype.itemsize):
        return {}
    kept = jnp.float32 if each == 1 else jnp.uint32
    return {
        f"{name}_words": pltpu.VMEM((o.keys * o.heads // each, arrays[name].shape[3]), kept)
        for name in ("key", "value")
        if name in arrays
    }


def _columns(o: Paged, scale: jax.Array) -> jax.Array:
    """Returns scales [#pages, #C, #K] as float32 [pieces, units, columns of a piece]."""
    whole = jnp.broadcast_to(scale.astype(jnp.float32), (o.pages // o.pieces, o.C * o.pieces, o.K))
    each = whole.reshape(o.pages, o.C, o.K)
    if not o.flat:
        return each.swapaxes(1, 2)
    return jnp.repeat(each, o.heads // o.K, axis=2).reshape(o.pages, 1, o.C * o.heads)


def _by_row(o: Paged, x: jax.Array) -> jax.Array:
    """Returns one number a query head, [N], as that of each row of each product, [units, rows, 1]."""
    return jnp.tile(x.reshape(o.units, 1, -1), (1, o.tokens, 1)).reshape(o.units, o.rows, 1)
