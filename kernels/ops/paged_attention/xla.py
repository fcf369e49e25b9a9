"""Paged attention in plain XLA: a list of (tile of queries, block of keys) pairs whose length follows the lengths.

Queries of one request form tiles of `block_q`. Each tile is paired with the blocks of keys that one of its queries
sees, and no others; the list contains these pairs. Each step of a loop takes `parallel` of them, gathers their slots
from the pages, and merges their results into the running maximum, denominator and output of their tiles. The number of
steps is data. The pairs of a step may belong to one request (split-KV, with the combine inside the step) or to many (a
batch); so neither a long request nor many short ones leave the device idle, and the size of a table costs nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import KeyRange, ends_at, interval_of, visible
from kernels.engines.matmul.dot import dot
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.select import NOMINAL_SIZE
from kernels.ops.paged_attention.cache import append_and_attend_of, dequantised, written
from kernels.ops.paged_attention.contract import (
    PagedAttentionConfig,
    append_and_attend_op,
    append_op,
    decode_op,
    lse_op,
    op,
    page_op,
)

_LAST = jnp.iinfo(jnp.int32).max


def _concrete(size: Any) -> int:
    return size if isinstance(size, int) else NOMINAL_SIZE


def _shape(call: Call) -> tuple[int, int, int]:
    """Returns (queries per request on average, number of queries, maximum number of keys of a request)."""
    rows, requests = _concrete(call.query.shape[0]), _concrete(call.kv_lens.shape[0])
    if "T" in call.dims:
        rows *= _concrete(call.query.shape[1])
    keys = call.dims["S"] if "S" in call.dims else call.block_tables.shape[1] * call.dims["C"]
    return -(-rows // requests), rows, _concrete(keys)


def _heuristic(call: Call, platform: str) -> PagedAttentionConfig:
    # On a CPU a step's logits should stay in cache. On an accelerator each operation of a step is a separate kernel, so a
    # step is as large as 32 MiB of logits allow.
    logits, tile, block, pairs = (2**17, 32, 128, 8) if platform == "cpu" else (2**23, 128, 512, 64)
    each, rows, keys = _shape(call)
    block_q, block_k = min(tile, power_of_two(each)), min(block, power_of_two(keys))
    fits = max(1, logits // (block_q * block_k * call.dims["N"]))
    num_pairs = (rows // block_q + _concrete(call.kv_lens.shape[0])) * -(-keys // block_k)
    return PagedAttentionConfig(block_q, block_k, max(1, min(pairs, fits, num_pairs)))


def _candidates(call: Call) -> list[PagedAttentionConfig]:
    each, _, keys = _shape(call)
    tiles = sorted({min(n, power_of_two(each)) for n in (1, 16, 64, 128)})
    blocks = sorted({min(n, power_of_two(keys)) for n in (64, 128, 256, 512)})
    return [PagedAttentionConfig(q, k, n) for q in tiles for k in blocks for n in (1, 8, 32, 128)]


class _Requests(NamedTuple):
    """The ranges of the queries and keys of each request, int32 [requests], and its pages."""

    begin: jax.Array  # its first row of the queries
    count: jax.Array  # its number of rows
    kv_start: jax.Array  # its keys are kv_start ... kv_end - 1,
    kv_end: jax.Array
    kv_len: jax.Array  # and the last query is at kv_len - 1
    tables: jax.Array  # [requests, max pages]


class _Tiles(NamedTuple):
    """int32 [tiles]. Those that exist come first."""

    request: jax.Array
    first: jax.Array  # index of its first query within the request
    block: jax.Array  # its first block of keys
    begin: jax.Array  # its pairs are begin ... end - 1 of the list: at least one for a valid tile
    end: jax.Array


class _Options(NamedTuple):
    scale: float
    cap: float | None
    mask: MaskInfo
    block_q: int
    block_k: int
    parallel: int


def _tiles(requests: _Requests, num_tiles: Any, o: _Options) -> _Tiles:
    each = -(-requests.count // o.block_q)
    last = jnp.cumsum(each, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    r = jnp.sum(last[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    r = jnp.minimum(r, requests.count.shape[0] - 1)
    first = (tile - last[r] + each[r]) * o.block_q
    # The range starts with the keys of the first query and ends with those of the last.
    offset = requests.kv_len[r] - requests.count[r]
    low, high = offset + first, offset + jnp.minimum(first + o.block_q, requests.count[r]) - 1
    begin, end = requests.kv_start[r], requests.kv_end[r]
    first_sees, last_sees = interval_of(o.mask, low), interval_of(o.mask, high)
    if first_sees.low is not None:
        begin = jnp.maximum(begin, ends_at(first_sees.low, low))
    if last_sees.high is not None:
        end = jnp.minimum(end, ends_at(last_sees.high, high) + 1)
    block = jnp.maximum(begin, 0) // o.block_k
    pairs = jnp.where(tile < last[-1], jnp.maximum(-(-end // o.block_k) - block, 1), 0)
    ends = jnp.cumsum(pairs, dtype=jnp.int32)
    return _Tiles(r, first, block, ends - pairs, ends)


def _flat(x: jax.Array | None) -> jax.Array | None:
    """Returns pages [pages, C, ...] as slots [pages * C, ...]; a scale shared by all slots stays [1, ...]."""
    return None if x is None else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _gathered(slots, valid, caches, scales, width, dtype) -> list[jax.Array]:
    """Returns keys and values [pairs, block_k, K, H and Hv], with 0 in slots that are not keys, which may hold NaN."""

    def rows(x: jax.Array) -> jax.Array:
        return x.at[slots].get(mode="promise_in_bounds")

    def meant(x: jax.Array, scale: Any) -> jax.Array:
        if scale is not None and scale.shape[0] > 1:  # otherwise all slots share one
            scale = rows(scale)
        return jnp.where(valid[..., None, None], dequantised(x, scale, dtype), 0)

    keys = rows(caches[0])
    values = keys[..., width:] if caches[1] is None else rows(caches[1])
    return [meant(keys[..., :width], scales[0]), meant(values, scales[1])]


def _spread(scale: jax.Array | None, cache: jax.Array) -> jax.Array | None:
    """Returns the scale of every slot [pages, C, K|1], or one shared by all [1, 1, K|1]."""
    if scale is None or scale.shape[:2] == (1, 1):
        return scale
    return jnp.broadcast_to(scale, (*cache.shape[:2], scale.shape[2]))


def _attend(query, caches, scales, requests, num_tiles, softmax_aux, alibi_slopes, o: _Options):
    """Returns float32 (out [M, N, Hv], lse [M, N]).

    query is [M, N, H]; caches are (keys, values or None) [pages, C, K, width]."""
    M, N, H = query.shape
    pages, C, K, _ = caches[0].shape
    G, W = N // K, o.parallel
    Hv = caches[0].shape[3] - H if caches[1] is None else caches[1].shape[3]
    scales = [_flat(_spread(s, caches[0])) for s in scales]
    flat = [_flat(x) for x in caches]
    t = _tiles(requests, num_tiles, o)
    total = t.end[-1]
    # Padded so that a step can slice `parallel` tiles from any index.
    ends = jnp.pad(t.end, (0, W), constant_values=_LAST)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32).reshape(K, G, 1, 1)
    place = jnp.arange(o.block_q, dtype=jnp.int32)

    def pairs_of_step(step, tile):
        """Returns (tile of each pair relative to `tile`, whether the pair is valid, its largest logits, denominators
        and outputs)."""
        item = step * W + jnp.arange(W, dtype=jnp.int32)
        real = item < total
        local = jnp.sum(jax.lax.dynamic_slice_in_dim(ends, tile, W)[None] <= item[:, None], axis=1)
        local = jnp.minimum(local, W - 1)
        tiles = jax.tree.map(lambda x: x[jnp.minimum(tile + local, x.shape[0] - 1)], t)
        begin, count, kv_start, kv_end, kv_len = (x[tiles.request] for x in requests[:-1])
        j = (tiles.block + item - tiles.begin)[:, None] * o.block_k + jnp.arange(o.block_k, dtype=jnp.int32)
        page = jnp.clip(j // C, 0, requests.tables.shape[1] - 1)
        number = requests.tables[tiles.request[:, None], page]
        slots = jnp.clip(number, 0, pages - 1) * C + j % C
        valid = (j >= kv_start[:, None]) & (j < kv_end[:, None]) & real[:, None]
        key, value = _gathered(slots, valid, flat, scales, H, query.dtype)
        row = tiles.first[:, None] + place
        q = query[jnp.clip(begin[:, None] + row, 0, M - 1)].reshape(W, o.block_q, K, G, H)
        i = (kv_len - count)[:, None] + row
        x = dot("wqkgh,wskh->wkgqs", q, key) * o.scale
        if o.cap is not None:
            x = o.cap * jnp.tanh(x / o.cap)
        if slopes is not None:
            x = x - slopes * jnp.abs(i[:, :, None] - j[:, None]).astype(jnp.float32)[:, None, None]
        seen = visible(KeyRange(i, j, *interval_of(o.mask, i))) & valid[:, None] & (row < count[:, None])[:, :, None]
        x = jnp.where(seen[:, None, None], x, -jnp.inf)
        m = jnp.max(x, axis=-1)
        p = jnp.exp(x - _finite(m)[..., None])
        out = dot("wkgqs,wskv->wkgqv", p.astype(value.dtype), value)
        return local, real, m, jnp.sum(p, axis=-1), out

    def step(index, carry):
        tile, *sums = carry
        local, real, m, weight, out = pairs_of_step(index, tile)
        old = [jax.lax.dynamic_slice_in_dim(x, tile, W) for x in sums]
        in_tile = (local[None] == jnp.arange(W)[:, None]) & real[None]  # [tile, pair]

        def gathered(x, reduce, nothing):
            # By selection, not a matmul: 0 times NaN would spread it from one request to another.
            return reduce(jnp.where(in_tile.reshape(W, W, *[1] * (x.ndim - 1)), x[None], nothing), axis=1)

        largest = jnp.maximum(old[0], gathered(m, jnp.max, -jnp.inf))
        before, after = jnp.exp(old[0] - _finite(largest)), jnp.exp(m - _finite(largest)[local])
        new = (
            largest,
            old[1] * before + gathered(weight * after, jnp.sum, 0),
            old[2] * before[..., None] + gathered(out * after[..., None], jnp.sum, 0),
        )
        sums = [jax.lax.dynamic_update_slice_in_dim(x, y, tile, 0) for x, y in zip(sums, new, strict=True)]
        passed = jnp.sum(jax.lax.dynamic_slice_in_dim(ends, tile, W) <= (index + 1) * W, dtype=jnp.int32)
        return (tile + passed, *sums)

    shape = (num_tiles + W, K, G, o.block_q)
    zeros = jnp.zeros((*shape, Hv), jnp.float32)
    start = (jnp.int32(0), zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
    _, m, weight, out = jax.lax.fori_loop(0, -(-total // W), step, start)
    if softmax_aux is not None:
        sinks = softmax_aux.astype(jnp.float32).reshape(K, G, 1, -1)
        largest = jnp.maximum(m, jnp.max(sinks, axis=-1))
        before = jnp.exp(m - _finite(largest))
        weight = weight * before + jnp.sum(jnp.exp(sinks - _finite(largest)[..., None]), axis=-1)
        out, m = out * before[..., None], largest
    some = weight != 0  # true for NaN too
    weight = jnp.where(some, weight, 1)
    lse = jnp.where(some, _finite(m) + jnp.log(weight), -jnp.inf)[..., None]
    out, lse = (_rows(x[:num_tiles], t, requests, M) for x in (out / weight[..., None], lse))
    return out, lse[..., 0]


def _finite(m: jax.Array) -> jax.Array:
    """Returns the largest logits, with 0 in place of -inf, since -inf - -inf is NaN."""
    return jnp.where(m == -jnp.inf, 0, m)


def _rows(out: jax.Array, t: _Tiles, requests: _Requests, num_rows: Any) -> jax.Array:
    """Returns tiles [tiles, K, G, block_q, Hv] as [M, N, Hv]; rows without a request are 0."""
    tiles, K, G, block_q, Hv = out.shape
    place = t.first[:, None] + jnp.arange(block_q, dtype=jnp.int32)
    real = (t.begin < t.end)[:, None] & (place < requests.count[t.request][:, None])
    row = jnp.where(real, requests.begin[t.request][:, None] + place, num_rows)
    flat = jnp.moveaxis(out, 3, 1).reshape(tiles * block_q, K * G, Hv)
    return jnp.zeros((num_rows, K * G, Hv), out.dtype).at[row.reshape(-1)].set(flat, mode="drop")


def _options(width, softmax_scale, logits_soft_cap, causal, window, cfg) -> _Options:
    scale = 1 / math.sqrt(width) if softmax_scale is None else softmax_scale
    return _Options(
        scale, logits_soft_cap, MaskInfo(causal=causal, window=window), cfg.block_q, cfg.block_k, cfg.parallel
    )


def paged_attention(
    query, key_cache, query_start_loc, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux,
    alibi_slopes, softmax_scale, logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    o = _options(query.shape[-1], softmax_scale, logits_soft_cap, causal, window, cfg)
    cuts, lens = query_start_loc.astype(jnp.int32), kv_lens.astype(jnp.int32)
    tables = block_tables.astype(jnp.int32)
    M = query.shape[0]
    begin = jnp.clip(cuts[:-1], 0, M)
    count = jnp.clip(cuts[1:], begin, M) - begin
    kv_end = jnp.minimum(lens, tables.shape[1] * key_cache.shape[1])
    requests = _Requests(begin, count, jnp.zeros_like(lens), kv_end, lens, tables)
    num_tiles = M // o.block_q + lens.shape[0]  # a request's last tile may be partial
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    out, _ = _attend(query, caches, scales, requests, num_tiles, softmax_aux, alibi_slopes, o)
    return out.astype(query.dtype)


def _of_rows(query, caches, scales, kv_starts, kv_lens, tables, softmax_aux, alibi_slopes, o: _Options):
    """Returns attention of B requests with T queries each, and its lse."""
    B, T, N, _ = query.shape
    lens, tables = kv_lens.astype(jnp.int32), tables.astype(jnp.int32)
    begin = jnp.arange(B, dtype=jnp.int32) * T
    kv_start = jnp.zeros_like(lens) if kv_starts is None else kv_starts.astype(jnp.int32)
    kv_end = jnp.minimum(lens, tables.shape[1] * caches[0].shape[1])
    requests = _Requests(begin, jnp.full_like(begin, T), kv_start, kv_end, lens, tables)
    rows = query.reshape(B * T, N, query.shape[3])
    num_tiles = B * -(-T // o.block_q)
    out, lse = _attend(rows, caches, scales, requests, num_tiles, softmax_aux, alibi_slopes, o)
    return out.reshape(B, T, N, -1).astype(query.dtype), lse.reshape(B, T, N)


def page_attention_with_lse(
    query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    o = _options(query.shape[-1], softmax_scale, logits_soft_cap, causal, window, cfg)
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    return _of_rows(query, caches, scales, None, kv_lens, block_tables, softmax_aux, alibi_slopes, o)


def page_attention(
    query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    return page_attention_with_lse(
        query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
        logits_soft_cap, causal, window, cfg,
    )[0]  # fmt: skip


def decode_attention(
    query, key_cache, value_cache, kv_lens, kv_starts, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    # A row of a dense cache is one page, as long as the cache.
    o = _options(query.shape[-1], softmax_scale, logits_soft_cap, causal, window, cfg)
    tables = jnp.arange(query.shape[0], dtype=jnp.int32)[:, None]
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    return _of_rows(query, caches, scales, kv_starts, kv_lens, tables, softmax_aux, alibi_slopes, o)[0]


def append_to_cache(key, value, slots, key_cache, value_cache, k_scale, v_scale):
    return written(key_cache, key, slots, k_scale), written(value_cache, value, slots, v_scale)


_ON: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
}
_TUNED: dict[str, Any] = {"heuristic": _heuristic, "candidates": _candidates, **_ON}
op.register(paged_attention, symbolic={"M", "requests", "pages"}, **_TUNED)
page_op.register(page_attention, symbolic={"B", "pages"}, **_TUNED)
lse_op.register(page_attention_with_lse, symbolic={"B", "pages"}, **_TUNED)
decode_op.register(decode_attention, symbolic={"B"}, **_TUNED)
append_op.register(append_to_cache, symbolic={"M", "pages"}, **_ON)
append_and_attend_op.register(
    append_and_attend_of(append_to_cache, paged_attention), symbolic={"M", "requests", "pages"}, **_TUNED
)
