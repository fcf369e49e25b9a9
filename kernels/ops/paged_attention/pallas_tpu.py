"""Paged attention on TPUs in Pallas: the contracts in the form of the paged engine, and rows written into pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernels.engines.attention import pallas_paged_calls as calls
from kernels.engines.attention.pallas_paged_append import append
from kernels.engines.attention.pallas_paged_calls import Requests, Sizes, attend
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.ops.paged_attention.cache import append_and_attend_of, quantised, scale_of_slots
from kernels.ops.paged_attention.contract import (
    PagedAttentionConfig,
    append_and_attend_op,
    append_op,
    decode_op,
    lse_op,
    op,
    page_op,
)
from kernels.ops.paged_attention.forms import forms_of, int32

# Bytes of a block of keys and values, and rows of a tile of many queries.
BLOCK_BYTES, ROWS = 2**20, 256
# Least slots of a piece of a page.
LEAST_PIECE = 16
# Scalar memory that the slots of rows to write may take.
SLOT_BYTES = 512 * 2**10


def heuristic(call: Call, platform: str) -> PagedAttentionConfig:
    dims = call.dims
    N, K = dims["N"], dims["K"]
    width = sum(
        -(-x.shape[-1] // calls.LANES) * calls.LANES for x in (call.key_cache, call.value_cache) if x is not None
    )
    slot = K * width * call.key_cache.dtype.itemsize
    keys = dims["S"] if "S" in dims else call.block_tables.shape[1] * dims["C"]
    block = max(16, min(512, power_of_two(BLOCK_BYTES // slot), power_of_two(keys)))
    queries = call.query.shape[1] if call.query.ndim == 4 else call.query.shape[0]
    rows = min(ROWS, power_of_two(queries) * (N // K))
    return PagedAttentionConfig(
        block_k=block, num_stages=4, mixed_rows=power_of_two(rows), mixed_block_k=block, mixed_num_stages=2
    )


def candidates(call: Call) -> list[PagedAttentionConfig]:
    best = heuristic(call, "tpu")
    listed = [best]
    listed += [replace(best, block_k=k, num_stages=n) for k in (64, 128, 256, 512) for n in (2, 3, 4)]
    listed += [replace(best, mixed_rows=m, mixed_block_k=k) for m in (64, 128, 256, 512) for k in (128, 256, 512)]
    return list(dict.fromkeys(listed))


def _attend(name, query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options):
    return _attend_with_lse(name, query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options, log=False)[
        0
    ]


def _attend_with_lse(name, query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options, log=True):
    group = query.shape[1] // caches[0].shape[2]
    few = Sizes(1, cfg.block_k, cfg.num_stages)
    many = Sizes(max(2, cfg.mixed_rows // group), cfg.mixed_block_k, cfg.mixed_num_stages)
    return attend(name, query, caches, scales, softmax_aux, alibi_slopes, requests, few, many, log=log, **options)


def page_attention_with_lse(
    query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    B, T, N, H = query.shape
    requests = Requests(int32(kv_lens), int32(block_tables), each=T)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    arrays = query.reshape(B * T, N, H), (key_cache, value_cache), (k_scale, v_scale), softmax_aux, alibi_slopes
    out, lse = _attend_with_lse(lse_op.name, *arrays, requests, cfg, options)
    return out.reshape(B, T, N, -1), lse.reshape(B, T, N)


def append_to_cache(key, value, slots, key_cache, value_cache, k_scale, v_scale):
    slots, (pages, C) = int32(slots), key_cache.shape[:2]
    key = quantised(key, scale_of_slots(k_scale, slots, pages, C), key_cache.dtype)
    value = quantised(value, scale_of_slots(v_scale, slots, pages, C), value_cache.dtype)
    return append(key, value, slots, key_cache, value_cache)


def _rejects(call: Call) -> str | None:
    if any(x is not None and 0 in x.shape for x in (call.arguments.get("query"), call.key_cache)):
        return "an array has no elements"
    slots = call.arguments.get("slots")
    rows = 0 if slots is None else slots.shape[0]
    if 4 * rows > SLOT_BYTES:
        return (
            f"the slots of {rows:,} rows do not fit in {SLOT_BYTES >> 10} KiB of scalar memory; write fewer at a time"
        )
    slots = call.key_cache.shape[1]
    if "query" in call.arguments and (piece := calls.piece_of(slots)) < min(slots, LEAST_PIECE):
        return (
            f"{slots:,} slots would be copied in pieces of {piece}, as nothing else up to {calls.MOST_PIECE} divides them; "
            f"allocate a multiple of {calls.MOST_PIECE}"
        )
    return None


_ON: dict[str, Any] = {"platforms": {"tpu"}, "dtypes": {"float32", "bfloat16"}, "rejects": _rejects}
_TUNED: dict[str, Any] = {"heuristic": heuristic, "candidates": candidates, **_ON}
paged_attention, page_attention, decode_attention = forms_of(_attend)
op.register(paged_attention, **_TUNED)
page_op.register(page_attention, **_TUNED)
lse_op.register(page_attention_with_lse, **_TUNED)
decode_op.register(decode_attention, **_TUNED)
append_op.register(append_to_cache, **_ON)
append_and_attend_op.register(append_and_attend_of(append_to_cache, paged_attention), **_TUNED)
