"""Chooses blocks in Triton: the best weights of the compressed softmax, averaged over the query heads of a key head.

A program has a few queries with all heads of a key head, and goes over the block means twice: first for the log-sum-exp of each
row, then for the weights, of which it holds the best so far in registers. So memory has the result alone. The block means are
float32; products take them as two terms of the queries' type, which lose nothing that ranks blocks.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.attention.triton_parts import LOG2E, rows_of
from kernels.ops.native_sparse_attention.blocks import power
from kernels.ops.native_sparse_attention.triton_sizes import Sizes, place_of, queries_of, rows_of_tile
from kernels.toolchains.triton import triton_launch

# Rows of a tile, and block means that it looks at together, by the bytes of a number.
TILES = {2: (128, 64), 4: (32, 32)}
# A candidate is the bits of its weight, then its slot: of equal weights the first. What is no candidate is below all of them.
_NONE = tl.constexpr(-(2**62))
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _logits(q, high_ptr, low_ptr, slots, begin, end, O: tl.constexpr, SLOTS: tl.constexpr):
    """Returns logits in units of log 2, -inf outside of each row's slots."""
    high = rows_of(high_ptr, slots, 1, 0, O.H, SLOTS, O.BLOCK_H)
    x = tl.dot(q, tl.trans(high), input_precision="ieee")
    if low_ptr is not None:
        low = rows_of(low_ptr, slots, 1, 0, O.H, SLOTS, O.BLOCK_H)
        x = tl.dot(q, tl.trans(low), x, input_precision="ieee")
    seen = (slots[None, :] >= begin[:, None]) & (slots[None, :] < end[:, None])
    return tl.where(seen, x * (O.SCALE * LOG2E), float("-inf"))


@triton.jit
def choice_kernel(
    q_ptr,  # [B, T, N, H]
    high_ptr,  # [B, K, SLOTS, H]: block means, rounded
    low_ptr,  # what the rounding left, or None
    starts_ptr,  # [B, S], or None
    q_start_ptr,  # [1]
    chosen_ptr,  # [B, T, K, NAMED]
    O: tl.constexpr,  # `Sizes`
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,  # NAMED, padded
):
    TILES: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    G: tl.constexpr = O.N // O.K
    ROWS: tl.constexpr = O.BLOCK_Q * O.BLOCK_G
    tile, head, b = place_of(tl.program_id(0), TILES, O)
    b64 = b.to(tl.int64)
    q_start = tl.load(q_start_ptr)
    t, n, _ = rows_of_tile(tile, head, O)
    query = tile * O.BLOCK_Q + tl.arange(0, O.BLOCK_Q)
    position = q_start + t
    of_query = q_start + query
    start, of_start = t * 0, query * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b64 * O.S + position, mask=t < O.T, other=-1)
        of_start = tl.load(starts_ptr + b64 * O.S + of_query, mask=query < O.T, other=-1)
    # The blocks of a document have consecutive slots.
    valid = (t < O.T) & (start >= 0)
    begin = (start + O.SIZE - 1) // O.SIZE
    end = tl.where(valid, begin + (position - start + 1) // O.SIZE, 0)
    some = (query < O.T) & (of_start >= 0)
    first_slot = (of_start + O.SIZE - 1) // O.SIZE
    own = tl.where(some, (of_query - of_start) // O.SIZE, -1)
    q = rows_of(q_ptr + b64 * (O.T * O.N * O.H), t, O.N, n, O.H, O.T, O.BLOCK_H)
    row = (b64 * O.K + head) * (SLOTS * O.H)
    high_ptr += row
    if low_ptr is not None:
        low_ptr += row
    low_end = tl.min(tl.where(end > begin, begin, SLOTS), axis=0) // BLOCK_S * BLOCK_S
    high_end = tl.max(end, axis=0)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for s in range(low_end, high_end, BLOCK_S):
        x = _logits(q, high_ptr, low_ptr, s + tl.arange(0, BLOCK_S), begin, end, O, SLOTS)
        new = tl.maximum(row_max, tl.max(x, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        row_sum = row_sum * tl.exp2(row_max - anchor) + tl.sum(tl.exp2(x - anchor[:, None]), axis=1)
        row_max = new
    # Rows without a block, padded heads among them, have no weights.
    share = tl.where(row_sum > 0, 1.0 / (G * tl.where(row_sum > 0, row_sum, 1.0)), 0.0)
    anchor = tl.where(row_max == float("-inf"), 0.0, row_max)

    i = tl.arange(0, BLOCK_N)
    best = tl.zeros([O.BLOCK_Q, BLOCK_N], tl.int64) - (1 + i)[None, :]
    for s in range(low_end, high_end, BLOCK_S):
        slots = s + tl.arange(0, BLOCK_S)
        x = _logits(q, high_ptr, low_ptr, slots, begin, end, O, SLOTS)
        weights = tl.exp2(x - anchor[:, None]) * share[:, None]
        mean = tl.sum(tl.reshape(weights, [O.BLOCK_Q, O.BLOCK_G, BLOCK_S]), axis=1)
        # Not those that are always chosen: the first, the query's own, and the one before it.
        block = slots[None, :] - first_slot[:, None]
        candidate = (block >= 1) & (block <= own[:, None] - 2)
        bits = (mean.to(tl.int32, bitcast=True) + 1).to(tl.int64) << 32
        ranked = bits - slots[None, :].to(tl.int64) + _LAST
        ranked = tl.where(candidate, ranked, _NONE)
        largest, worst = tl.max(ranked, axis=1), tl.min(best, axis=1)
        while tl.max((largest > worst).to(tl.int32), axis=0) > 0:
            replaced = (best == worst[:, None]) & (largest > worst)[:, None]
            best = tl.where(replaced, largest[:, None], best)
            ranked = tl.where(ranked == largest[:, None], _NONE, ranked)
            largest, worst = tl.max(ranked, axis=1), tl.min(best, axis=1)

    best = tl.sort(best, descending=True)
    always = tl.minimum(own + 1, 3)
    place = (b64 * O.T + query) * O.K + head
    forced = tl.where(i[None, :] == 0, own[:, None], tl.where(i[None, :] == 1, 0, own[:, None] - 1))
    inside = (query < O.T)[:, None] & (i < O.NAMED)[None, :]
    tl.store(chosen_ptr + place[:, None] * O.NAMED + i[None, :], forced, mask=inside & (i[None, :] < always[:, None]))
    chosen = (~best & _LAST).to(tl.int32) - first_slot[:, None]
    chosen = tl.where(best > 0, chosen, -1)
    after = i[None, :] + always[:, None]
    inside = (query < O.T)[:, None] & (after < O.NAMED)
    tl.store(chosen_ptr + place[:, None] * O.NAMED + after, chosen, mask=inside)


def chosen_blocks(
    query: jax.Array, of_keys: jax.Array, starts: jax.Array | None, q_start: jax.Array, sizes: Sizes
) -> jax.Array:
    """Returns int32 [B, T, K, NAMED], the chosen blocks, best first, -1 for none.

    Args:
      of_keys: float32 [B, K, slots, H], the means of the keys of complete blocks, see `blocks.py`.
    """
    rows, together = TILES[query.dtype.itemsize]
    queries = queries_of(rows, sizes.N // sizes.K, rows)
    high = of_keys.astype(query.dtype)
    rest = of_keys - high.astype(jnp.float32)
    (chosen,) = triton_launch(
        choice_kernel,
        query,
        high,
        None if query.dtype == jnp.float32 else rest.astype(query.dtype),
        None if starts is None else starts.astype(jnp.int32),
        q_start.reshape(1),
        out_shape=(jax.ShapeDtypeStruct((sizes.B, sizes.T, sizes.K, sizes.NAMED), jnp.int32),),
        grid=(sizes.B * sizes.K * -(-sizes.T // queries),),
        num_warps=8,
        num_stages=2,
        O=dataclasses.replace(sizes, BLOCK_Q=queries),
        SLOTS=of_keys.shape[2],
        BLOCK_S=together,
        BLOCK_N=power(sizes.NAMED),
    )
    return chosen
