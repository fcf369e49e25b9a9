"""Latent attention in plain XLA, any device: `flash_mla` with its attention on XLA, and loops over a cache and over pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.ops.multi_latent_attention import decode
from kernels.ops.multi_latent_attention.composed import mla
from kernels.ops.multi_latent_attention.contract import decode_op, op, paged_op

EVERYWHERE: Any = {"platforms": {"cpu", "cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}


def paged_forward(
    query,
    query_rope,
    kv_cache,
    kv_lens,
    block_tables,
    query_start_loc,
    softmax_scale,
    sliding_window,
    logits_soft_cap,
):
    """A tile is a few new tokens of one request. Tiles of similar length are grouped, and a group loops over as many
    blocks of entries as its longest tile needs: the cost follows kv_lens, and the memory does not depend on them."""
    M, N, R = query.shape
    pages, C, width = kv_cache.shape
    requests, table_width = block_tables.shape
    block_q = min(16, max(1, M // requests))
    pages_of_block = max(1, min(table_width, ENTRIES // C))
    block_k = pages_of_block * C
    tiles = _tiles(kv_lens, query_start_loc, M, block_q, block_k, table_width * C, sliding_window)
    joined = jnp.concatenate([query, query_rope], -1)
    lane, page = jnp.arange(block_q), jnp.arange(pages_of_block)

    def group(out, tile):
        token = tile["token"][:, None] + lane
        position = tile["position"][:, None] + lane
        real = lane < tile["tokens"][:, None]
        rows = joined[jnp.where(real, token, 0)].reshape(-1, block_q * N, width)
        length = tile["length"][:, None]
        tables = block_tables[tile["request"]]

        def block(n, carry):
            largest, total, sums = carry
            j = tile["first"] + n
            slots = jnp.minimum(j[:, None] * pages_of_block + page, table_width - 1)
            ids = jnp.clip(jnp.take_along_axis(tables, slots, axis=1), 0, pages - 1)
            entry = j[:, None] * block_k + jnp.arange(block_k)
            # Unwritten entries, which may be NaN, must not be multiplied by weight 0.
            entries = jnp.where((entry < length)[..., None], kv_cache[ids].reshape(-1, block_k, width), 0)
            logits = dot("pqw,pkw->pqk", rows, entries).reshape(-1, block_q, N, block_k) * softmax_scale
            if logits_soft_cap is not None:
                logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
            seen = (entry < length)[:, None] & (entry[:, None] <= position[..., None]) & real[..., None]
            if sliding_window is not None:
                seen &= entry[:, None] > position[..., None] - sliding_window
            logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(logits, axis=-1))
            anchor = jnp.where(new == -jnp.inf, 0, new)  # a token that has not seen anything yet
            p, rescale = jnp.exp(logits - anchor[..., None]), jnp.exp(largest - anchor)
            flat = p.reshape(-1, block_q * N, block_k).astype(kv_cache.dtype)
            values = dot("pqk,pkr->pqr", flat, entries[..., :R]).reshape(-1, block_q, N, R)
            return new, total * rescale + jnp.sum(p, axis=-1), sums * rescale[..., None] + values

        start = jnp.full((token.shape[0], block_q, N), -jnp.inf, jnp.float32)
        start = start, jnp.zeros_like(start), jnp.zeros((*start.shape, R), jnp.float32)
        _, total, sums = jax.lax.fori_loop(0, jnp.max(tile["blocks"]), block, start)
        values = (sums / jnp.where(total != 0, total, 1)[..., None]).astype(query.dtype)
        return out.at[jnp.where(real, token, M)].set(values, mode="drop"), None

    return jax.lax.scan(group, jnp.zeros_like(query), tiles)[0]


# Entries of a cache that a step of a group reads for each of its tiles, and tiles per group.
ENTRIES, TILES = 128, 8


def _tiles(kv_lens, query_start_loc, M, block_q, block_k, room, sliding_window):
    """Returns the tiles in groups [groups, TILES], those with the most blocks first.

    Args:
      room: number of entries that fit in the pages of a table; lengths beyond it are clipped.
    """
    counts = jnp.diff(query_start_loc)
    needed = -(-counts // block_q)
    ends = jnp.cumsum(needed)
    size = M // block_q + kv_lens.shape[0]  # an upper bound: every request has at most one partial tile
    tile = jnp.arange(-(-size // TILES) * TILES)
    request = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), kv_lens.shape[0] - 1)
    before = (tile - (ends - needed)[request]) * block_q
    tokens = jnp.where(tile < ends[-1], jnp.clip(counts[request] - before, 0, block_q), 0)
    position = kv_lens[request] - counts[request] + before
    first = jnp.zeros_like(tile)
    if sliding_window is not None:
        first = jnp.maximum(position - sliding_window + 1, 0) // block_k
    length = jnp.minimum(kv_lens[request], room)
    last = jnp.minimum(position + tokens, length)
    blocks = jnp.where(tokens > 0, jnp.maximum(-(-last // block_k) - first, 0), 0)
    tiles = {"request": request, "token": query_start_loc[request] + before, "tokens": tokens, "position": position}
    order = jnp.argsort(-blocks, stable=True)
    tiles |= {"length": length, "first": first, "blocks": blocks}
    return {n: x[order].reshape(-1, TILES) for n, x in tiles.items()}


op.register(*mla("xla"), name="xla", symbolic={"B"}, **EVERYWHERE)
decode_op.register(decode.forward, decode.backward, name="xla", symbolic={"B"}, **EVERYWHERE)
paged_op.register(paged_forward, name="xla", symbolic=set(), **EVERYWHERE)
