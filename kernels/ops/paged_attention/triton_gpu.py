"""Paged attention for NVIDIA GPUs in Triton: the contracts in the form of the paged engine, and rows written into pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.triton_calls import padded_width
from kernels.engines.attention.triton_paged_append import append_kernel
from kernels.engines.attention.triton_paged_calls import KINDS, PROGRAMS, Tile, attend, bits_of, tiles
from kernels.engines.attention.triton_paged_tall import TALL, attend_tall, is_tall
from kernels.framework.binding import Call
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.paged_attention.cache import append_and_attend_of, quantised, scale_of_slots
from kernels.ops.paged_attention.contract import (
    HOPPER,
    PagedAttentionConfig,
    append_and_attend_op,
    append_op,
    decode_op,
    op,
    page_op,
)
from kernels.toolchains.triton import compute_capability, triton_launch

# The compile-time options of a call, in the order of the contracts.
_OPTIONS = "softmax_scale", "logits_soft_cap", "causal", "window"
# Columns of a slot that one program of the append writes.
COLUMNS = 1024


def _keys(call: Call) -> int:
    return call.dims["S"] if "S" in call.dims else call.block_tables.shape[1] * call.dims["C"]


def _is_tall(call: Call) -> bool:
    """Returns whether flash attention's kernel for Hopper takes the call, or the long requests of it."""
    if "block_tables" not in call.arguments:
        return False
    caches, scales = (call.key_cache, call.value_cache), (call.k_scale, call.v_scale)
    most = _most_queries(call.query, call.kv_lens)
    return is_tall(call.query, most, caches, scales, call.alibi_slopes, call.softmax_scale, call.logits_soft_cap)


def _most_queries(query: Any, lens: Any) -> int:
    """Returns how many queries a request may have, as far as tiles are for it: T of [B, T, N, H]; of rows [M, N, H] all, or one
    where there are no more of them than requests."""
    rows, requests = query.shape[-3], lens.shape[0]
    return rows if query.ndim == 4 or rows > requests > 0 else 1


def _with_its_kernel(
    function: str, cfg: PagedAttentionConfig, query: Any, lens: Any, *how: Any
) -> tuple[PagedAttentionConfig, bool]:
    """Returns (cfg for the other kernel, whether flash attention's takes the call). Raises ValueError where it is asked for and
    cannot."""
    if cfg.mixed_num_warps != HOPPER:
        return cfg, False
    if not is_tall(query, _most_queries(query, lens), *how):
        raise ValueError(
            f"{function}: argument 'cfg': {HOPPER} mixed_num_warps select flash attention's kernel for Hopper, which "
            f"does not take this call: it takes {TALL} queries of a request or more, over pages of 8, 16, 32, ... slots of "
            "the queries' own 16-bit dtype, without scales or slopes; use 4 or 8"
        )
    return replace(cfg, mixed_num_warps=8), compute_capability() == 90  # others have the other kernel


def _heuristic(call: Call, platform: str) -> PagedAttentionConfig:
    H = call.dims["H"]
    width = max(padded_width(H), padded_width(call.dims.get("Hv", call.key_cache.shape[-1] - H)))
    few, many = tiles(width, _keys(call), call.query.dtype.itemsize, call.key_cache.dtype.itemsize)
    if _is_tall(call):
        many = many._replace(num_warps=HOPPER)
    return PagedAttentionConfig(
        block_k=few.keys,
        parallel=PROGRAMS,
        num_warps=few.num_warps,
        num_stages=few.num_stages,
        mixed_rows=many.rows,
        mixed_block_k=many.keys,
        mixed_num_warps=many.num_warps,
        mixed_num_stages=many.num_stages,
    )


def _candidates(call: Call) -> list[PagedAttentionConfig]:
    """Returns tiles of both kinds: one varies at a time, since most calls have only one of them."""
    best = _heuristic(call, "cuda")
    few = [(k, w, s) for k in (32, 64, 128) for w, s in ((1, 5), (2, 3), (2, 5), (4, 3), (4, 5), (4, 7))]
    many = [(64, 32, 4, 3), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)]
    listed = [best]
    listed += [replace(best, block_k=k, num_warps=w, num_stages=s) for k, w, s in few]
    listed += [replace(best, parallel=n * MULTIPROCESSORS) for n in (3, 12, 24)]
    listed += [
        replace(best, mixed_rows=m, mixed_block_k=k, mixed_num_warps=w, mixed_num_stages=s) for m, k, w, s in many
    ]
    return list(dict.fromkeys(listed))


def _attend(
    query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, softmax_scale, logits_soft_cap, causal, window,
    tall=False,
):  # fmt: skip
    few = Tile(16, cfg.block_k, cfg.num_warps, cfg.num_stages)
    many = Tile(cfg.mixed_rows, cfg.mixed_block_k, cfg.mixed_num_warps, cfg.mixed_num_stages)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    arrays = query, caches, scales, softmax_aux, alibi_slopes, requests
    return attend(*arrays, few, many, cfg.parallel, tall=tall, **options)


def _int32(x: Any) -> Any:
    return None if x is None else x.astype(jnp.int32)


def paged_attention(
    query, key_cache, query_start_loc, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux,
    alibi_slopes, softmax_scale, logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    requests = Requests(_int32(kv_lens), _int32(block_tables), _int32(query_start_loc))
    options = (softmax_scale, logits_soft_cap, causal, window)
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    cfg, tall = _with_its_kernel("paged_attention", cfg, query, kv_lens, caches, scales, alibi_slopes, *options[:2])
    return _attend(query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, *options, tall)


def _of_rows(query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, *options):
    """Returns attention of B requests with T queries each."""
    B, T, N, H = query.shape
    requests = requests._replace(each=T)
    out = _attend(query.reshape(B * T, N, H), caches, scales, softmax_aux, alibi_slopes, requests, cfg, *options)
    return out.reshape(B, T, N, -1)


def page_attention(
    query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    requests = Requests(_int32(kv_lens), _int32(block_tables))
    options = (softmax_scale, logits_soft_cap, causal, window)
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    cfg, tall = _with_its_kernel("page_attention", cfg, query, kv_lens, caches, scales, alibi_slopes, *options[:2])
    if tall:
        return attend_tall(query, caches, softmax_aux, requests, **dict(zip(_OPTIONS, options, strict=True)))
    return _of_rows(query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, *options)


def decode_attention(
    query, key_cache, value_cache, kv_lens, kv_starts, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    # A row of a dense cache is one page, as long as the cache.
    requests = Requests(_int32(kv_lens), None, starts=_int32(kv_starts))
    options = (softmax_scale, logits_soft_cap, causal, window)
    return _of_rows(
        query, (key_cache, value_cache), (k_scale, v_scale), softmax_aux, alibi_slopes, requests, cfg, *options
    )


def append_to_cache(key, value, slots, key_cache, value_cache, k_scale, v_scale):
    (M, K, H), HV, (pages, C) = key.shape, value.shape[2], key_cache.shape[:2]
    slots = _int32(slots)
    rows = [
        quantised(x, scale_of_slots(scale, slots, pages, C), cache.dtype)
        for x, scale, cache in ((key, k_scale, key_cache), (value, v_scale, value_cache))
    ]
    widest = K * max(H, HV)
    block = min(COLUMNS, triton.next_power_of_2(widest))
    caches = [bits_of(x) for x in (key_cache, value_cache)]
    results = triton_launch(
        append_kernel,
        *map(bits_of, rows),
        slots,
        *caches,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
        grid=(M * triton.cdiv(widest, block),),
        num_warps=max(1, min(4, block // 256)),
        input_output_aliases={3: 0, 4: 1},
        SLOTS=pages * C,
        KEY=K * H,
        VALUE=K * HV,
        KIND=KINDS.get(str(key_cache.dtype), 0),
        BLOCK=block,
    )
    kept = key_cache.dtype
    return tuple(x if x.dtype == kept else jax.lax.bitcast_convert_type(x, kept) for x in results)


def _rejects(call: Call) -> str | None:
    dtype = str(call.key_cache.dtype)
    if call.key_cache.dtype.itemsize == 1 and dtype not in KINDS:
        return f"the cache is {dtype}; 8-bit caches are {', '.join(KINDS)}"
    if any(x is not None and 0 in x.shape for x in (call.arguments.get("query"), call.key_cache)):
        return "an array has no elements"
    return None


_ON: dict[str, Any] = {"platforms": {"cuda"}, "dtypes": {"float32", "bfloat16", "float16"}, "rejects": _rejects}
_TUNED: dict[str, Any] = {"heuristic": _heuristic, "candidates": _candidates, **_ON}
op.register(paged_attention, **_TUNED)
page_op.register(page_attention, **_TUNED)
decode_op.register(decode_attention, **_TUNED)
append_op.register(append_to_cache, **_ON)
append_and_attend_op.register(append_and_attend_of(append_to_cache, paged_attention), **_TUNED)
