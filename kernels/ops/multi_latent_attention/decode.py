"""Decoding over a cache of latents in plain XLA, forward and backward.

The heads of a row's tokens are the rows of one matmul with a block of its entries, so an entry is read once for all of
them. The number of blocks follows the longest row and the window, so the cost follows kv_lens. No pairs are stored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.engines.attention.ranges import KeyRange, ends_at, interval_of, visible
from kernels.engines.matmul.dot import dot

ENTRIES = 256  # entries of each row per step


class _Rows:
    """Shared by both directions: queries [B, T N, R + Hr], and the range of blocks."""

    def __init__(self, query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap):
        B, T, N, R = query.shape
        S = kv_cache.shape[1]
        self.query = jnp.concatenate([query, query_rope], -1).reshape(B, T * N, -1)
        self.cache, self.R, self.block = kv_cache, R, min(ENTRIES, S)
        self.scale, self.cap = softmax_scale, logits_soft_cap
        self.length = jnp.minimum(kv_lens.astype(jnp.int32), S)
        # A cache that is a part of a longer one has fewer entries than kv_lens.
        self.position = jnp.repeat(kv_lens.astype(jnp.int32)[:, None] - T + jnp.arange(T, dtype=jnp.int32), N, axis=1)
        self.last = -(-jnp.max(self.length, initial=0) // self.block)
        self.first = jnp.int32(0)
        self.sees = interval_of(MaskInfo(causal=True, window=window_of(sliding_window)), self.position)
        if self.sees.low is not None:
            seen_first = jnp.maximum(jnp.min(ends_at(self.sees.low, self.position)), 0)
            self.first = jnp.minimum(seen_first // self.block, self.last)

    def pairs(self, j: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns (first entry, entries [B, block, R + Hr], logits [B, T N, block], which of them are visible)."""
        start = jnp.minimum(j * self.block, self.cache.shape[1] - self.block)
        index = start + jnp.arange(self.block, dtype=jnp.int32)
        valid = (index >= j * self.block) & (index < self.length[:, None])
        # Unwritten entries, which may be NaN, must not be multiplied by weight 0.
        entries = jax.lax.dynamic_slice_in_dim(self.cache, start, self.block, axis=1)
        entries = jnp.where(valid[..., None], entries, 0)
        logits = dot("bqw,bkw->bqk", self.query, entries) * self.scale
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits / self.cap)
        seen = valid[:, None] & visible(KeyRange(self.position, index[None], *self.sees))
        return start, entries, logits, seen


def forward(query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap):
    """Returns (out, lse), with the running maximum, denominator and sum of flash attention."""
    B, T, N, R = query.shape
    rows = _Rows(query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap)

    def block(j, carry):
        largest, total, sums = carry
        _, entries, logits, seen = rows.pairs(j)
        logits = jnp.where(seen, logits, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(logits, axis=-1))
        anchor = jnp.where(new == -jnp.inf, 0, new)  # a token that has not seen anything yet
        p, rescale = jnp.exp(logits - anchor[..., None]), jnp.exp(largest - anchor)
        values = dot("bqk,bkr->bqr", p.astype(kv_cache.dtype), entries[..., :R])
        return new, total * rescale + jnp.sum(p, axis=-1), sums * rescale[..., None] + values

    start = jnp.full((B, T * N), -jnp.inf, jnp.float32)
    start = start, jnp.zeros_like(start), jnp.zeros((B, T * N, R), jnp.float32)
    largest, total, sums = jax.lax.fori_loop(rows.first, rows.last, block, start)
    some = total != 0  # true for NaN too, so that lse becomes NaN
    total = jnp.where(some, total, 1)
    out = (sums / total[..., None]).astype(query.dtype)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)
    return out.reshape(query.shape), lse.reshape(B, T, N)


def backward(saved, query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap):
    """Returns the gradients. Weights are exp(logits - lse), recomputed block by block; delta = rowsum(d_out * out) -
    d_lse."""
    B, T, N, R = query.shape
    rows = _Rows(query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap)
    lse, delta = (x.reshape(B, T * N, 1) for x in (saved.lse, saved.delta))
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    d_out = saved.d_out.astype(query.dtype).reshape(B, T * N, R)

    def block(j, carry):
        d_query, d_cache = carry
        start, entries, logits, seen = rows.pairs(j)
        p = jnp.where(seen, jnp.exp(logits - lse), 0)
        d = p * (dot("bqr,bkr->bqk", d_out, entries[..., :R]) - delta)
        if logits_soft_cap is not None:
            d = d * (1 - (logits / logits_soft_cap) ** 2)
        d = (d * softmax_scale).astype(kv_cache.dtype)
        d_query = d_query + dot("bqk,bkw->bqw", d, entries)
        d_keys = dot("bqk,bqw->bkw", d, rows.query)
        d_keys = d_keys.at[..., :R].add(dot("bqk,bqr->bkr", p.astype(kv_cache.dtype), d_out))
        # The last block may overlap the previous one: its gradient there is 0.
        old = jax.lax.dynamic_slice_in_dim(d_cache, start, rows.block, axis=1)
        return d_query, jax.lax.dynamic_update_slice_in_dim(d_cache, old + d_keys, start, axis=1)

    start = jnp.zeros(rows.query.shape, jnp.float32), jnp.zeros(kv_cache.shape, jnp.float32)
    d_query, d_cache = jax.lax.fori_loop(rows.first, rows.last, block, start)
    d_query = d_query.reshape(B, T, N, -1)
    return {"query": d_query[..., :R], "query_rope": d_query[..., R:], "kv_cache": d_cache}
