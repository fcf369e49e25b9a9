"""One new token of native sparse attention over pages: it reads a mean of each block, the blocks that it chooses, and a window.

Beside keys and values a page has the sums of its tokens in float32, one for each part that a page and a block have in common.
They follow the tokens, whoever writes them: a request that begins with pages of another one has their sums as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.generation.rows import Rows
from ejdist.models.ops import Ops
from kernels.ops.native_sparse_attention import ranked


def units_of(page: int, block: int) -> int:
    """Returns how many sums a page has."""
    return page // math.gcd(page, block)


def summed(sums: jax.Array, stack: jax.Array, tables: jax.Array, rows: Rows) -> jax.Array:
    """Returns the sums of pages, [ranks, layers, pages, units, K, H] float32, after a step that wrote the last tokens of each
    row. That of a part which is not full yet may be anything: it is made anew with each token.

    Args:
      stack: the pages of all ranks and layers, [all pages, page, K, H]. tables: the numbers of each row's in it.
    """
    (B, T), page = rows.entries.shape, stack.shape[1]
    touched = min((T + page - 2) // page + 1, tables.shape[1])  # by T tokens side by side
    number = (rows.lengths[:, None] - 1) // page - jnp.arange(touched)
    pages = jnp.take_along_axis(tables, jnp.maximum(number, 0), axis=1)
    parts = stack[pages].astype(jnp.float32).reshape(B, touched, sums.shape[3], -1, *sums.shape[4:]).sum(3)
    rank, layer, page_of_layer = jnp.unravel_index(pages, sums.shape[:3])
    # Where they lie: as an array of all pages with one sum each, XLA on CPUs would copy it in every step.
    return sums.at[jnp.where(number >= 0, rank, sums.shape[0]), layer, page_of_layer].set(parts, mode="drop")


def attended(
    query: jax.Array,
    gates: Sequence[jax.Array],
    stacks: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    tables: jax.Array,
    rows: Rows,
    ops: Ops,
    *,
    block_size: int,
    block_counts: int,
    sliding_window: int,
    softmax_scale: float | None = None,
) -> jax.Array:
    """Returns native sparse attention of one token of each row, [B, 1, N, H]; 0 for a row without a request.

    Args:
      gates: of the compressed, the selected and the sliding branch, [B, 1, N] each.
      stacks, sums, tables: of keys and values, see `summed`; sums as [all pages, units, K, H].
    """
    (B, _, N, H), (page, K) = query.shape, stacks[0].shape[1:3]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    q, length = query.reshape(B, K, N // K, H), rows.lengths[:, None]
    key_means, value_means = (_means(x, tables, page, block_size) for x in sums)
    block = jnp.arange(key_means.shape[1])
    ended = (block < length // block_size)[:, None, None]
    p = _weights(_dot("bkgh,bckh->bkgc", q, key_means) * scale, ended)
    value_means = jnp.where(ended.reshape(*ended.shape[::3], 1, 1), value_means, 0)  # what was there before may be NaN
    compressed = _dot("bkgc,bckh->bkgh", p, value_means)

    latest = (length - 1) // block_size
    score = ranked(jnp.mean(p, axis=2), block, latest[:, None])
    best, chosen = jax.lax.top_k(score, min(block_counts, block.size))
    place = chosen[..., None] * block_size + jnp.arange(block_size)
    seen = ((best >= 0)[..., None] & (place < length[:, None, None])).reshape(B, K, 1, -1)
    place = jnp.where(best[..., None] >= 0, place, 0).reshape(B, K, -1)
    at = jax.vmap(lambda table, place: table[place // page] * page + place % page)(tables, place)
    # A batch of gathers over the heads: each reads its own tokens, where they lie.
    of_head = jax.vmap(lambda x, at: x[at], (1, 1), 1)
    keys, values = (of_head(x.reshape(-1, *x.shape[2:]), at) for x in stacks)
    p = _weights(_dot("bkgh,bkth->bkgt", q, keys) * scale, seen)
    selected = _dot("bkgt,bkth->bkgh", p.astype(values.dtype), jnp.where(seen.swapaxes(2, 3), values, 0))

    options = {"softmax_scale": scale, "sliding_window": sliding_window}
    sliding = ops.page_attention(query, *stacks, kv_lens=rows.lengths, block_tables=tables, **options)
    branches = [x.reshape(query.shape).astype(jnp.float32) for x in (compressed, selected, sliding)]
    out = sum(gate.astype(jnp.float32)[..., None] * x for gate, x in zip(gates, branches, strict=True))
    return jnp.where((rows.lengths > 0)[:, None, None, None], out, 0).astype(query.dtype)


def _means(sums: jax.Array, tables: jax.Array, page: int, size: int) -> jax.Array:
    """Returns the means of the blocks of each row, float32 [B, blocks, K, H]; of those that have not ended anything."""
    each = sums[tables]
    parts = each.reshape(each.shape[0], -1, *each.shape[3:])
    together = size // math.gcd(page, size)
    parts = jnp.pad(parts, ((0, 0), (0, -parts.shape[1] % together), (0, 0), (0, 0)))
    return parts.reshape(parts.shape[0], -1, together, *parts.shape[2:]).sum(2) / size


def _weights(logits: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the softmax over the last dim of what is seen; 0 where nothing is."""
    x = jnp.where(seen, logits, -jnp.inf)
    largest = jnp.max(x, axis=-1, keepdims=True)
    e = jnp.where(seen, jnp.exp(x - jnp.where(jnp.isfinite(largest), largest, 0)), 0)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


def _dot(subscripts: str, a: Any, b: Any) -> jax.Array:
    # Numbers of 16 bits are exact in one pass; float32 means true float32.
    precision = jax.lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32), precision=precision)
