"""Long prompts over pages on Hopper: flash attention's kernel, loading its blocks of keys from pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.triton_calls import (
    WARP_SPECIALIZED,
    prepare,
    scale_of,
    takes_pages,
    warp_specialized_forward,
    warp_specialized_tiles,
)
from kernels.engines.attention.triton_work import work_of

# Queries of a request from which flash attention's kernel for Hopper takes them: one tile of it.
TALL = 128


def attend_tall(
    query: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    softmax_aux: jax.Array | None,
    requests: Requests,
    before: jax.Array | None = None,
    *,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
) -> jax.Array:
    """Returns attention of T queries of each request [B, T, N, H]; or of a ragged batch [M, N, H] the array `before`, with the
    rows of requests of `TALL` queries or more in its memory. See `is_tall`."""
    (N, H), (_, C, K, _), HV = query.shape[-2:], caches[0].shape, caches[1].shape[3]
    assert requests.tables is not None
    S = requests.tables.shape[1] * C
    cfg = warp_specialized_tiles(H, HV, query.dtype.itemsize, scale_of(softmax_scale, H), logits_soft_cap)
    assert cfg.fwd_params.q_blocksize
    lens, tables, rows = requests.lens, requests.tables, None
    if requests.cuts is None:
        T = query.shape[1]
        positions = lens[:, None] - T + jnp.arange(T, dtype=jnp.int32)
    else:
        request, places, positions = tiles_of_long(requests.cuts, lens, query.shape[0], cfg.fwd_params.q_blocksize)
        assert before is not None
        lens, tables, query, rows = lens[request], tables[request], query[None], (places, before[None])
    B, T = positions.shape
    queries = jax.ShapeDtypeStruct((B, T, N, H), query.dtype)
    keys, values = (jax.ShapeDtypeStruct((B, S, K, width), query.dtype) for width in (H, HV))
    slots = jnp.arange(S, dtype=jnp.int32)[None]
    mask = MaskInfo(causal=causal, window=window, q_positions=positions, kv_positions=slots)
    if not causal:
        there = jnp.where(slots < lens[:, None], 0, -1)
        mask = mask.replace(q_segment_ids=jnp.zeros((1, T), jnp.int32), kv_segment_ids=there)
    call = prepare(queries, keys, values, mask, None, None, None, softmax_scale, logits_soft_cap, 0.0, cfg)
    sinks = None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)
    pages = tables, jnp.minimum(lens, S)  # no token is past the table
    how = {"pages": pages, "rows": rows, "sink_ptr": sinks, "work": work_of(queries, keys, values, mask, (1, 1))}
    out, _ = warp_specialized_forward(call, cfg.fwd_params, query, *caches, **how)
    return out if requests.cuts is None else out[0]


def tiles_of_long(cuts: jax.Array, lens: jax.Array, M: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tiles of `rows` queries of requests that have `TALL` or more, as many as there can be: the request of each
    [tiles], (first row, number of rows) [1 + tiles, 2] after how many there are, and positions of queries [tiles, rows].

    A request's last queries, which usually see the most keys, come first. Rows of a tile past its request's last repeat its
    position, so that no more keys are met than those of the request.
    """
    R = lens.shape[0]
    begins = jnp.clip(cuts[:-1], 0, M)
    counts = jnp.clip(cuts[1:], begins, M) - begins
    until = jnp.cumsum(jnp.where(counts >= TALL, -(-counts // rows), 0), dtype=jnp.int32)
    index = jnp.arange(M // rows + min(R, M // TALL), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(until[None] <= index[:, None], axis=1, dtype=jnp.int32), R - 1)
    first, count = (until[request] - 1 - index) * rows, counts[request]
    places = jnp.stack([begins[request] + first, jnp.minimum(count - first, rows)], axis=1)
    total = jnp.stack([until[-1], jnp.zeros_like(until[-1])])
    row = jnp.minimum(first[:, None] + jnp.arange(rows, dtype=jnp.int32), count[:, None] - 1)
    return request, jnp.concatenate([total[None], places]), (lens[request] - count)[:, None] + row


def is_tall(
    query: jax.Array,
    most: int,
    caches: tuple[jax.Array, jax.Array | None],
    scales: tuple[jax.Array | None, jax.Array | None],
    alibi_slopes: jax.Array | None,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
) -> bool:
    """Returns whether `attend_tall` takes requests of at most `most` queries, or those of them that are long: from `TALL` on,
    where fewer leave its tiles empty, and pages of the queries' own dtype."""
    key_cache, value_cache = caches
    if value_cache is None or alibi_slopes is not None or scales != (None, None):
        return False
    H = query.shape[-1]
    sizes = H, value_cache.shape[3], query.dtype.itemsize, scale_of(softmax_scale, H), logits_soft_cap
    forward = warp_specialized_tiles(*sizes).fwd_params
    return (
        most >= TALL
        and key_cache.dtype == value_cache.dtype == query.dtype
        and forward.num_warps == WARP_SPECIALIZED
        and takes_pages(key_cache.shape[1], forward.kv_blocksize or 0)
    )
