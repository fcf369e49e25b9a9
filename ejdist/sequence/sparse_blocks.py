"""Native sparse attention over ranks by its blocks: each rank makes the means of the blocks that end on it, all ranks gather
the means, and each receives the tokens of the blocks that its queries select, and those of their windows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Traffic
from ejdist.sequence import exchange
from ejdist.sequence.cost import AttentionShape
from ejdist.sequence.group_cast import capacity
from ejdist.sequence.selected import Static, plan_of, selected
from kernels import flash_attention
from kernels.engines.attention.masks import MaskInfo
from kernels.framework.padding import zeroed
from kernels.ops.native_sparse_attention import block_rows, choice_op, means


def attended(
    axis: tuple[str, ...],
    buffer: float,
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g_cmp: jax.Array | None = None,
    g_slc: jax.Array | None = None,
    g_swa: jax.Array | None = None,
    block_indices: jax.Array | None = None,
    block_counts: jax.Array | None = None,
    starts: jax.Array | None = None,
    block_size: int = 64,
    num_blocks: int = 16,
    window: int = 0,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Returns the output of this rank's queries. Arguments are the contract's, of this rank's tokens in contiguous order, but
    `starts`, [B, S], are those of all ranks."""
    (B, T), ranks = query.shape[:2], exchange.size(axis)
    if starts is None:
        starts = jnp.zeros((B, ranks * T), jnp.int32)
    first, blocks, scale = exchange.rank(axis) * T, T // block_size, {"softmax_scale": softmax_scale}
    start = jax.lax.dynamic_slice_in_dim(starts, first, T, 1)
    # 0 times NaN is NaN, here and in gradients.
    query, key, value = (zeroed(x, start) for x in (query, key, value))
    g_cmp, g_slc, g_swa = (None if x is None else zeroed(x, start) for x in (g_cmp, g_slc, g_swa))
    front = front_of(block_size, window, T, ranks)
    key, value = (jnp.concatenate([before(x, front, axis), x], 1) for x in (key, value))
    near_key, near_value = (x[:, front - block_size :] for x in (key, value))
    rows, ends, of_slot = block_rows(starts, block_size)
    rows = jax.lax.dynamic_slice_in_dim(rows, exchange.rank(axis) * blocks, blocks, 1) - (first - block_size)
    rows = jnp.clip(rows, 0, near_key.shape[1] - 1)
    index = jnp.broadcast_to(first + jnp.arange(T, dtype=jnp.int32), (B, T))

    def every_mean(x: jax.Array) -> jax.Array:
        return exchange.gather(means(x, rows), axis, dim=2)

    of_keys = every_mean(near_key)  # without a use for them a compiler leaves them out
    if block_indices is None:
        arrays = [jax.lax.stop_gradient(x) for x in (query, of_keys)]
        sizes = {"block_size": block_size, "num_blocks": num_blocks}
        block_indices = choice_op(*arrays, starts, first, **sizes, **scale, platform=platform)
    if block_counts is not None:
        within = jnp.arange(block_indices.shape[-1]) < block_counts[..., None]
        block_indices = jnp.where(within, block_indices, -1)
    static = Static(axis, block_size, capacity(buffer, ranks, blocks), softmax_scale, platform, cfg)
    plan = plan_of(static, block_indices, starts, rows)
    out = _gated(g_slc, selected(static, query, near_key, near_value, plan))
    if g_cmp is not None:
        keys = [x.swapaxes(1, 2).astype(query.dtype) for x in (of_keys, every_mean(near_value))]
        mask = MaskInfo(start, of_slot, index, ends, causal=True)  # a block is where its last token is
        out += _gated(g_cmp, flash_attention(query, *keys, mask_info=mask, platform=platform, **scale))
    if window > 0:
        seen = min(window - 1, front)
        places = first - seen + jnp.arange(seen + T)
        of_key = jnp.where(places >= 0, jnp.take(starts, places, axis=1, mode="clip"), -1)
        mask = MaskInfo(start, of_key, causal=True, window=(window - 1, 0))
        keys = [x[:, front - seen :] for x in (key, value)]
        out += _gated(g_swa, flash_attention(query, *keys, mask_info=mask, platform=platform, **scale))
    return jnp.where((start >= 0)[..., None, None], out, 0).astype(query.dtype)


def front_of(block_size: int, window: int, own: int, ranks: int) -> int:
    """Returns how many tokens before a rank's own it is sent: those of a window, and of a block that ends on it."""
    return min(max(block_size, window - 1), (ranks - 1) * own)


def cost(shape: AttentionShape, own: int, block_size: int, window: int, buffer: float, share: float = 1.0) -> Traffic:
    """Returns what a rank sends for a layer, forward and backward, besides the integers that say what is needed.

    Args:
      own: a rank's tokens of a row. share: of another rank's blocks, the most that a rank needs.
    """
    sent, keys, ranks = Traffic(), shape.travelling, shape.ranks
    blocks = own // block_size
    room, others = capacity(buffer, ranks, blocks), ranks - 1
    front, times = front_of(block_size, window, own, ranks), shape.forwards + 1
    sent.add(shape.axis, PERMUTE, times * keys * front / own, times * 2 * -(-front // own))
    of_means = 4 * keys / shape.itemsize / block_size * others  # in float32
    sent.add(shape.axis, ALL_GATHER, shape.forwards * of_means, shape.forwards * 2)
    sent.add(shape.axis, REDUCE_SCATTER, of_means, 2)
    # Blocks again for the backward, and their gradients the other way, in the dtype of the keys.
    passes = max(1, -(-math.ceil(share * blocks) // room))
    turns = (times + 1) * passes
    sent.add(shape.axis, ALL_TO_ALL, turns * keys * room / blocks * others, turns)
    return sent


def _gated(gate: jax.Array | None, out: jax.Array) -> jax.Array:
    out = out.astype(jnp.float32)
    return out if gate is None else gate.astype(jnp.float32)[..., None] * out


def before(x: jax.Array, tokens: int, axis: tuple[str, ...]) -> jax.Array:
    """Returns the tokens that come before a rank's own, [B, tokens, ...]: of the first rank, those of the last one."""
    own, parts = x.shape[1], []
    for hop in range(1, -(-tokens // own) + 1):
        some = min(own, tokens - (hop - 1) * own)
        parts.insert(0, exchange.shift(x[:, own - some :], axis, hop))
    return jnp.concatenate(parts, 1)
