"""The contracts of paged attention: attention of queries over keys stored in pages, and the update of the pages.

All compute `flash_attention` over the keys that a block table refers to; they differ in the layout of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.flash_attention import flash_attention
from kernels.ops.paged_attention import cases
from kernels.ops.paged_attention.cache import dequantised, slots_of_new, written

Window = tuple[int | None, int | None]
# `mixed_num_warps` that select flash attention's kernel for Hopper, which loads its blocks of keys from pages.
HOPPER = 12
# One definition for every attention-like operation: serving computes what training computes.
ATTENTION = flash_attention.op.function


@dataclass(frozen=True)
class PagedAttentionConfig(Tunables):
    """Tunables of the engines; None leaves the choice to the configuration chain.

    Attributes:
      block_q: queries of one request per tile; XLA's alone.
      block_k: keys that a tile processes per step.
      parallel: what works at once, on one request (split-KV) or several: in XLA's engine pairs of a tile and a block of keys
        that one step computes, in Triton's the programs that keys are split for.
      num_warps, num_stages: warps of a Triton program, and depth of its software pipeline; in Pallas blocks of keys on
        their way or in use.
      mixed_rows, mixed_block_k, mixed_num_warps, mixed_num_stages: rows (queries times the heads of a group), keys, warps and
        stages of the tiles of requests with many queries, in Triton and Pallas, which have two kinds. 12 warps over pages
        are flash attention's kernel for Hopper, for requests of 128 queries or more.
    """

    block_q: int | None = None
    block_k: int | None = None
    parallel: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    mixed_rows: int | None = None
    mixed_block_k: int | None = None
    mixed_num_warps: int | None = None
    mixed_num_stages: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_warps", "mixed_rows", "mixed_block_k", "mixed_num_warps"):
            size = getattr(self, name)
            if size is not None and size & (size - 1) and (name, size) != ("mixed_num_warps", HOPPER):
                raise ValueError(
                    f"argument 'cfg': PagedAttentionConfig.{name} = {size} is not a power of 2; use one, or None"
                )


def paged_attention(
    query: Float[Array, "M N H"],
    key_cache: Shaped[Array, "pages C K _"],
    query_start_loc: Int[Array, " requests+1"],
    kv_lens: Int[Array, " requests"],
    block_tables: Int[Array, "requests _"],
    value_cache: Shaped[Array, "pages C K Hv"] | None = None,
    k_scale: Float[Array, "#pages #C #K"] | None = None,
    v_scale: Float[Array, "#pages #C #K"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> Float[Array, "M N Hv"]:
    """Returns attention of the rows query_start_loc[r] ... query_start_loc[r + 1] - 1, the last tokens of request r,
    over its kv_lens[r] keys. Rows without a request are 0.

    Position p of request r is entry p % C of page block_tables[r, p // C]. There are no keys past the last page of a
    table. Slots that are not keys of a request, even if they contain NaN, affect none of its outputs. Without
    `value_cache`, a slot of `key_cache` has the key in its first H numbers and the value in the others. The values of
    an int8 or 8-bit float cache are its numbers times `k_scale`, `v_scale`, rounded to the dtype of `query`. The rest
    is as in `flash_attention`: positions are bottom-right aligned, so the last row of a request is at position
    kv_lens[r] - 1.
    """
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    more = (value_cache, k_scale, v_scale, softmax_aux, alibi_slopes)
    return _with_lse(query, key_cache, query_start_loc, kv_lens, block_tables, *more, **options)[0]


def _with_lse(
    query: Any,
    key_cache: Any,
    query_start_loc: Any,
    kv_lens: Any,
    block_tables: Any,
    value_cache: Any,
    k_scale: Any,
    v_scale: Any,
    softmax_aux: Any,
    alibi_slopes: Any,
    *,
    softmax_scale: float | None,
    logits_soft_cap: float | None,
    causal: bool,
    window: Window | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [M, N, Hv], lse [M, N]) of `paged_attention`; the lse of a row without a request is -inf."""
    M, _, H = query.shape
    pages, C = key_cache.shape[:2]
    if value_cache is None:
        key_cache, value_cache = key_cache[..., :H], key_cache[..., H:]
    place = jnp.arange(M)
    j = jnp.arange(block_tables.shape[1] * C)
    slopes = None if alibi_slopes is None else alibi_slopes[None]

    def of_request(begin: Any, end: Any, kv_len: Any, table: Any) -> tuple[jax.Array, jax.Array]:
        def gathered(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
            whole = dequantised(cache, scale, query.dtype)[jnp.clip(table, 0, pages - 1)]
            return jnp.where((j < kv_len)[:, None, None], whole.reshape(-1, *whole.shape[2:]), 0)[None]

        in_request = (place >= begin) & (place < end)
        mask = MaskInfo(
            causal=causal,
            window=window,
            q_segment_ids=jnp.where(in_request, 0, -1)[None],
            kv_segment_ids=jnp.where(j < kv_len, 0, -1)[None],
            q_positions=(kv_len - (end - begin) + place - begin)[None],
            kv_positions=j[None],
        )
        key, value = gathered(key_cache, k_scale), gathered(value_cache, v_scale)
        options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap}
        out, lse = ATTENTION(query[None], key, value, mask, None, softmax_aux, slopes, **options)
        return jnp.where(in_request[:, None, None], out[0], 0), jnp.where(in_request[:, None], lse[0], -jnp.inf)

    out, lse = jax.vmap(of_request)(query_start_loc[:-1], query_start_loc[1:], kv_lens, block_tables)
    return jnp.sum(out, axis=0), jnp.max(lse, axis=0)


def page_attention(
    query: Float[Array, "B T N H"],
    key_cache: Shaped[Array, "pages C K _"],
    kv_lens: Int[Array, " B"],
    block_tables: Int[Array, "B _"],
    value_cache: Shaped[Array, "pages C K Hv"] | None = None,
    k_scale: Float[Array, "#pages #C #K"] | None = None,
    v_scale: Float[Array, "#pages #C #K"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> Float[Array, "B T N Hv"]:
    """Returns `paged_attention` for B requests with T queries each, which can be split over devices."""
    B, T = query.shape[:2]
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    more = (value_cache, k_scale, v_scale, softmax_aux, alibi_slopes)
    rows = query.reshape(B * T, *query.shape[2:])
    out = paged_attention(rows, key_cache, T * jnp.arange(B + 1), kv_lens, block_tables, *more, **options)
    return out.reshape(B, T, *out.shape[1:])


def page_attention_with_lse(
    query: Float[Array, "B T N H"],
    key_cache: Shaped[Array, "pages C K _"],
    kv_lens: Int[Array, " B"],
    block_tables: Int[Array, "B _"],
    value_cache: Shaped[Array, "pages C K Hv"] | None = None,
    k_scale: Float[Array, "#pages #C #K"] | None = None,
    v_scale: Float[Array, "#pages #C #K"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns (out, lse): `page_attention`, and in float32 the log of the sum of the exponentials of a query's logits and
    sinks, -inf where it has neither. With it, attention to other keys of the same request can be merged exactly."""
    B, T = query.shape[:2]
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    more = (value_cache, k_scale, v_scale, softmax_aux, alibi_slopes)
    rows = query.reshape(B * T, *query.shape[2:])
    out, lse = _with_lse(rows, key_cache, T * jnp.arange(B + 1), kv_lens, block_tables, *more, **options)
    return out.reshape(B, T, *out.shape[1:]), lse.reshape(B, T, -1)


def decode_attention(
    query: Float[Array, "B T N H"],
    key_cache: Shaped[Array, "B S K H"],
    value_cache: Shaped[Array, "B S K Hv"],
    kv_lens: Int[Array, " B"],
    kv_starts: Int[Array, " B"] | None = None,
    k_scale: Float[Array, "#B #S #K"] | None = None,
    v_scale: Float[Array, "#B #S #K"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> Float[Array, "B T N Hv"]:
    """Returns attention of T queries, the last tokens of each row, over the keys kv_starts[b] ... kv_lens[b] - 1 of a
    cache with S slots per row; `kv_starts` is 0 by default, and the last query is at position kv_lens[b] - 1."""
    B, T = query.shape[:2]
    S = key_cache.shape[1]
    j = jnp.arange(S)
    starts = jnp.zeros_like(kv_lens) if kv_starts is None else kv_starts
    valid = (j >= starts[:, None]) & (j < kv_lens[:, None])
    key, value = (
        jnp.where(valid[..., None, None], dequantised(cache, scale, query.dtype), 0)
        for cache, scale in ((key_cache, k_scale), (value_cache, v_scale))
    )
    mask = MaskInfo(
        causal=causal,
        window=window,
        q_segment_ids=jnp.zeros((B, T), jnp.int32),
        kv_segment_ids=jnp.where(valid, 0, -1),
        q_positions=kv_lens[:, None] - T + jnp.arange(T),
        kv_positions=jnp.broadcast_to(j, (B, S)),
    )
    slopes = None if alibi_slopes is None else alibi_slopes[None]
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap}
    return ATTENTION(query, key, value, mask, None, softmax_aux, slopes, **options)[0]


def append_to_cache(
    key: Float[Array, "M K H"],
    value: Float[Array, "M K Hv"],
    slots: Int[Array, " M"],
    key_cache: Shaped[Array, "pages C K H"],
    value_cache: Shaped[Array, "pages C K Hv"],
    k_scale: Float[Array, "#pages #C #K"] | None = None,
    v_scale: Float[Array, "#pages #C #K"] | None = None,
) -> tuple[Shaped[Array, "pages C K H"], Shaped[Array, "pages C K Hv"]]:
    """Returns the caches with row m of `key` and `value` in slot slots[m] (entry s % C of page s // C), and all other
    slots unchanged, bit for bit. A slot that is negative or past the end is not written. For an int8 or 8-bit float
    cache, rows are divided by the scale, rounded and saturated."""
    return written(key_cache, key, slots, k_scale), written(value_cache, value, slots, v_scale)


def append_and_attend(
    query: Float[Array, "M N H"],
    key: Float[Array, "M K H"],
    value: Float[Array, "M K Hv"],
    key_cache: Shaped[Array, "pages C K H"],
    value_cache: Shaped[Array, "pages C K Hv"],
    query_start_loc: Int[Array, " requests+1"],
    kv_lens: Int[Array, " requests"],
    block_tables: Int[Array, "requests _"],
    k_scale: Float[Array, "#pages #C #K"] | None = None,
    v_scale: Float[Array, "#pages #C #K"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> tuple[Float[Array, "M N Hv"], Shaped[Array, "pages C K H"], Shaped[Array, "pages C K Hv"]]:
    """Returns (out, new key cache, new value cache): `append_to_cache` of every row at its request's last positions,
    then `paged_attention` over the new caches, including the new keys as stored there."""
    slots = slots_of_new(query_start_loc, kv_lens, block_tables, key_cache.shape[1], key.shape[0])
    caches = append_to_cache(key, value, slots, key_cache, value_cache, k_scale, v_scale)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    where = (query_start_loc, kv_lens, block_tables, caches[1])
    out = paged_attention(query, caches[0], *where, k_scale, v_scale, softmax_aux, alibi_slopes, **options)
    return (out, *caches)


def _work(call: Call) -> tuple[Work, Work]:
    """Returns the work of attention over full tables, an upper bound, because lengths are data."""
    *_, N, H = call.query.shape
    dense = "block_tables" not in call.arguments
    keys = call.dims["S"] if dense else call.block_tables.shape[1] * call.dims["C"]
    # A token's slot: its numbers, and its scales.
    values = call.value_cache
    width = call.key_cache.shape[-1] + (0 if values is None else values.shape[-1])
    slot = call.dims["K"] * width * call.key_cache.dtype.itemsize
    requests = call.kv_lens.shape[0]
    rows = nbytes(call.query) // (N * H * call.query.dtype.itemsize)
    out = rows * N * (width - H) * call.query.dtype.itemsize
    new = nbytes(call.arguments.get("key"), call.arguments.get("value"))
    every = nbytes(call.query, call.k_scale, call.v_scale, call.softmax_aux, call.alibi_slopes) + out + 2 * new
    return Work(2 * rows * N * keys * width, every + requests * keys * slot), Work(0, 0)


def _work_of_append(call: Call) -> tuple[Work, Work]:
    """Returns the work of the new rows alone: with donated caches, the other slots cost nothing."""
    rows = sum(x.size * (x.dtype.itemsize + cache.dtype.itemsize) for x, cache in _pairs(call))
    return Work(0, rows + nbytes(call.slots)), Work(0, 0)


def _pairs(call: Call) -> tuple[tuple[Any, Any], ...]:
    return ((call.key, call.key_cache), (call.value, call.value_cache))


_HEADS: dict[str, Any] = {"tied_dims": (("N", "K"),), "config": PagedAttentionConfig}
op = Op(paged_attention, local_dims={"N", "K"}, cases=cases.RAGGED, work=_work, **_HEADS)
# Queries are the last tokens of a request, and entries of a cache are counted from its first token.
page_op = Op(
    page_attention,
    local_dims={"B", "N", "K"},
    see_also={"pages": "page_attention"},
    ordered=True,
    cases=cases.PAGES,
    work=_work,
    **_HEADS,
)
lse_op = Op(
    page_attention_with_lse,
    outputs=("out", "lse"),
    local_dims={"B", "N", "K"},
    see_also={"pages": "page_attention"},
    ordered=True,
    cases=cases.WITH_LSE,
    work=_work,
    **_HEADS,
)
decode_op = Op(decode_attention, local_dims={"B", "N", "K"}, ordered=True, cases=cases.DENSE, work=_work, **_HEADS)
append_op = Op(
    append_to_cache,
    outputs=("new_key_cache", "new_value_cache"),
    local_dims={"K"},
    see_also={"pages": "append_to_cache"},
    cases=cases.APPEND,
    work=_work_of_append,
)
append_and_attend_op = Op(
    append_and_attend,
    outputs=("out", "new_key_cache", "new_value_cache"),
    local_dims={"N", "K"},
    cases=cases.APPEND_AND_ATTEND,
    work=_work,
    **_HEADS,
)
