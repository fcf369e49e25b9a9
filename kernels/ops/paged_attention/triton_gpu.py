"""Paged attention for NVIDIA GPUs in Triton: the contracts in the form of the paged engine, and rows written into pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
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
    lse_op,
    op,
    page_op,
)
from kernels.ops.paged_attention.forms import forms_of, int32
from kernels.toolchains.triton import compute_capability, triton_launch

# Columns of a slot that one program of the append writes.
COLUMNS = 1024


def _keys(call: Call) -> int:
    return call.dims["S"] if "S" in call.dims else call.block_tables.shape[1] * call.dims["C"]


def _is_tall(call: Call) -> bool:
    """Returns whether flash attention's kernel for Hopper takes the call, or its long requests."""
    if "block_tables" not in call.arguments or call.op_name == lse_op.name:
        return False
    caches, scales = (call.key_cache, call.value_cache), (call.k_scale, call.v_scale)
    each = call.query.shape[1] if call.query.ndim == 4 else None
    most = _most_queries(each, call.query.shape[0], call.kv_lens.shape[0])
    return is_tall(call.query, most, caches, scales, call.alibi_slopes, call.softmax_scale, call.logits_soft_cap)


def _most_queries(each: int | None, rows: int, requests: int) -> int:
    """Returns how many queries one request may have, for the choice of tiles: `each`; in a ragged batch all rows, or one where
    there are no more rows than requests."""
    return each or (rows if rows > requests > 0 else 1)


def _check_tall(name: str, query: Any, requests: Requests, *how: Any) -> None:
    """Raises ValueError where flash attention's kernel for Hopper, which cfg selects, does not take the call."""
    most = _most_queries(requests.each, query.shape[0], requests.lens.shape[0])
    if requests.tables is None or not is_tall(query, most, *how):
        raise ValueError(
            f"{name}: argument 'cfg': mixed_num_warps = {HOPPER} selects flash attention's kernel for Hopper, which does not "
            f"take this call: it takes requests of {TALL} queries or more, over pages of 8, 16, 32, ... slots of the queries' "
            "own 16-bit dtype, without scales or slopes; use 4 or 8"
        )


def _heuristic(call: Call, platform: str) -> PagedAttentionConfig:
    H = call.dims["H"]
    width = max(padded_width(H), padded_width(call.dims.get("Hv", call.key_cache.shape[-1] - H)))
    few, many = tiles(width, _keys(call), call.query.dtype.itemsize, str(call.key_cache.dtype))
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


def _attend(name, query, caches, scales, softmax_aux, alibi_slopes, requests, cfg, options):
    tall, warps = False, cfg.mixed_num_warps
    if warps == HOPPER:
        _check_tall(
            name, query, requests, caches, scales, alibi_slopes, options["softmax_scale"], options["logits_soft_cap"]
        )
        tall, warps = compute_capability() == 90, 8  # other GPUs take the other kernel
    if tall and requests.each is not None:
        M, N, H = query.shape
        rows = query.reshape(-1, requests.each, N, H)
        return attend_tall(rows, caches, softmax_aux, requests, **options).reshape(M, N, -1)
    arrays = query, caches, scales, softmax_aux, alibi_slopes, requests
    return attend(*arrays, *_tiles(cfg, warps), cfg.parallel, tall=tall, **options)[0]


def _tiles(cfg: Any, warps: int) -> tuple[Tile, Tile]:
    few = Tile(16, cfg.block_k, cfg.num_warps, cfg.num_stages)
    return few, Tile(cfg.mixed_rows, cfg.mixed_block_k, warps, cfg.mixed_num_stages)


def page_attention_with_lse(
    query, key_cache, kv_lens, block_tables, value_cache, k_scale, v_scale, softmax_aux, alibi_slopes, softmax_scale,
    logits_soft_cap, causal, window, cfg,
):  # fmt: skip
    if cfg.mixed_num_warps == HOPPER:
        raise ValueError(
            f"{lse_op.name}: argument 'cfg': mixed_num_warps = {HOPPER} selects flash attention's kernel for Hopper, which "
            "returns no lse over pages; use 4 or 8"
        )
    B, T, N, H = query.shape
    requests = Requests(int32(kv_lens), int32(block_tables), each=T)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": causal, "window": window}
    arrays = query.reshape(B * T, N, H), (key_cache, value_cache), (k_scale, v_scale), softmax_aux, alibi_slopes
    tiles_of_cfg = _tiles(cfg, cfg.mixed_num_warps)
    out, lse = attend(*arrays, requests, *tiles_of_cfg, cfg.parallel, log=True, **options)
    return out.reshape(B, T, N, -1), lse.reshape(B, T, N)


def append_to_cache(key, value, slots, key_cache, value_cache, k_scale, v_scale):
    (M, K, H), HV, (pages, C) = key.shape, value.shape[2], key_cache.shape[:2]
    slots = int32(slots)
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
paged_attention, page_attention, decode_attention = forms_of(_attend)
op.register(paged_attention, **_TUNED)
page_op.register(page_attention, **_TUNED)
lse_op.register(page_attention_with_lse, **_TUNED)
decode_op.register(decode_attention, **_TUNED)
append_op.register(append_to_cache, **_ON)
append_and_attend_op.register(append_and_attend_of(append_to_cache, paged_attention), **_TUNED)
