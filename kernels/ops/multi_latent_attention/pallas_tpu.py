"""Attention to cached latents on TPUs in Pallas: the engine over pages, with one head of keys that begin with values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kernels.engines.attention.pallas_paged_calls import LANES, MOST_PIECE, Requests, Sizes, attend, piece_of
from kernels.framework.measured import power_of_two
from kernels.ops.multi_latent_attention.contract import decode_op, paged_op

# Bytes of a block of entries, and rows of a tile: query heads times tokens.
BLOCK_BYTES, ROWS = 2**19, 256
# Blocks on their way or in use, of requests with one token and with more.
FEW, MANY = 4, 2
# Least slots of a piece of a page.
LEAST_PIECE = 16


def _attend(name, query, query_rope, kv_cache, requests, softmax_scale, sliding_window, logits_soft_cap, log):
    """Returns ([M, N, R], and with `log` the lse [M, N]) of queries in two parts over a cache [pages, C, R + Hr]."""
    M, N, R = query.shape
    longest = kv_cache.shape[1] * (1 if requests.tables is None else requests.tables.shape[1])
    entry = -(-kv_cache.shape[2] // LANES) * LANES * kv_cache.dtype.itemsize
    keys = max(16, min(power_of_two(BLOCK_BYTES // entry), power_of_two(longest)))
    tokens = max(2, min(ROWS // power_of_two(N), power_of_two(requests.each or M)))
    joined = jnp.concatenate([query, query_rope], -1)
    window = None if sliding_window is None else (sliding_window - 1, 0)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "causal": True, "window": window}
    sizes = Sizes(1, keys, FEW), Sizes(tokens, keys, MANY)
    caches = kv_cache[:, :, None], None
    return attend(name, joined, caches, (None, None), None, None, requests, *sizes, within=R, log=log, **options)


def multi_latent_ragged_page_attention(
    query, query_rope, kv_cache, kv_lens, block_tables, query_start_loc, softmax_scale, sliding_window, logits_soft_cap
):
    lens, tables, cuts = (x.astype(jnp.int32) for x in (kv_lens, block_tables, query_start_loc))
    how = softmax_scale, sliding_window, logits_soft_cap, False
    return _attend(paged_op.name, query, query_rope, kv_cache, Requests(lens, tables, cuts), *how)[0]


def mla_decode(query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap):
    """A row of the cache is one page."""
    B, T, N, _ = query.shape
    rows, turned = (x.reshape(B * T, N, -1) for x in (query, query_rope))
    requests, how = Requests(kv_lens.astype(jnp.int32), None, each=T), (softmax_scale, sliding_window, logits_soft_cap)
    out, lse = _attend(decode_op.name, rows, turned, kv_cache, requests, *how, True)
    return out.reshape(query.shape), lse.reshape(B, T, N)


def _rejects(call: Any) -> str | None:
    arrays = (getattr(call, name, None) for name in ("query", "query_rope", "kv_cache", "block_tables"))
    if any(x is not None and 0 in x.shape for x in arrays):
        return "an array has no elements"
    slots = call.kv_cache.shape[1]
    if (piece := piece_of(slots)) < min(slots, LEAST_PIECE):
        return (
            f"{slots:,} entries would be copied in pieces of {piece}, as nothing else up to {MOST_PIECE} divides them; use "
            f"a multiple of {MOST_PIECE}"
        )
    return None


_ON: dict[str, Any] = {"platforms": {"tpu"}, "dtypes": {"float32", "bfloat16"}, "rejects": _rejects}
paged_op.register(multi_latent_ragged_page_attention, **_ON)
decode_op.register(mla_decode, **_ON)
