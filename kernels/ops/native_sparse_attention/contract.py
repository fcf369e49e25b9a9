"""The contract of native sparse attention, over canonical arguments. Dense: it evaluates every pair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.padding import Padding
from kernels.framework.work import Work, nbytes
from kernels.ops.native_sparse_attention.cases import CASES


@dataclass(frozen=True)
class NativeSparseConfig(Tunables):
    """Tunables; None leaves the choice to the configuration chain.

    Attributes:
      chunk: queries processed at once (XLA).
      block_rows: rows of a tile of the selected branch, neighbouring queries times the heads of a group (Triton, Pallas).
      block_keys: keys of the selected branch that are multiplied at once; backward_rows: rows, for a tile of keys (Pallas).
      num_warps, num_stages: of programs for tiles of queries. dq_num_stages: of those of their gradient.
      backward_num_warps, backward_num_stages: of programs for tiles of keys. On TPUs stages are buffers of copies, and warps
        are not used.
    """

    chunk: int | None = None
    block_rows: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    dq_num_stages: int | None = None
    backward_num_warps: int | None = None
    backward_num_stages: int | None = None
    block_keys: int | None = None
    backward_rows: int | None = None


def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    g_cmp: Float[Array, "B T N"] | None = None,
    g_slc: Float[Array, "B T N"] | None = None,
    g_swa: Float[Array, "B T N"] | None = None,
    block_indices: Int[Array, "B T K _"] | None = None,
    block_counts: Int[Array, "B T K"] | None = None,
    starts: Int[Array, "B S"] | None = None,
    q_start: Int[Array, ""] | None = None,
    *,
    block_size: int = 64,
    num_blocks: int = 16,
    window: int = 0,
    softmax_scale: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Returns g_cmp * compressed + g_slc * selected + g_swa * sliding, three attentions of the same queries.

    All are causal within a document. Blocks of `block_size` tokens are counted from the start of a document.
    - compressed: softmax attention over the mean key and value of each block that has ended by the query. Omitted
      without g_cmp.
    - selected: softmax attention over the tokens of the blocks in `block_indices`, per query and key head: the first
      `block_counts` of them. -1 is no block, and a repeated block counts once. By default blocks are chosen: the
      query's own, the document's first, the one before the query's own, and then those with the largest weight in the
      compressed softmax, averaged over the query heads of the key head, up to `num_blocks` (or `block_counts`). The
      choice has no gradient. Without g_slc its gate is 1.
    - sliding: softmax attention over the last `window` tokens. Omitted with window = 0; without g_swa its gate is 1.

    `starts` is the index of the first token of each token's document, whose tokens are contiguous; -1 is padding, which
    sees nothing. Query t is at index q_start + t of the keys; default S - T, so that the last query is at the last key.
    A softmax over nothing gives 0. Accumulation is in float32.
    """
    compute_dtype = jnp.promote_types(query.dtype, jnp.float32)
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    check_sizes(N, K, T, S, block_size, num_blocks, window)
    q = query.astype(compute_dtype).reshape(B, T, K, N // K, H)
    keys, values = key.astype(compute_dtype), value.astype(compute_dtype)
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    starts = jnp.zeros((B, S), jnp.int32) if starts is None else starts
    i = (S - T if q_start is None else q_start) + jnp.arange(T)
    j = jnp.arange(S)
    of_query = jnp.take(starts, i, axis=1)[:, :, None]  # [B, T, 1]
    # [B, T, S]: whether a query sees a token, and the token's block in its document.
    seen = (starts[:, None] == of_query) & (of_query >= 0) & (j <= i[:, None])
    block = (j - of_query) // block_size

    def attend(k, v, visible):
        """Returns (out [B, T, N, Hv], weights [B, T, K, G, S]); visible is [B, T, K | 1, S]."""
        logits = dot("btkgh,bskh->btkgs", q, k) * scale
        visible = jnp.broadcast_to(visible[:, :, :, None], logits.shape)
        largest = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
        weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        return dot("btkgs,bskv->btkgv", weights, v).reshape(B, T, N, -1), weights

    # A block is stored at its last token; the mean at other tokens is never used.
    last = (starts >= 0) & ((j - starts) % block_size == block_size - 1)
    mean = ((j <= j[:, None]) & (j > j[:, None] - block_size)).astype(compute_dtype) / block_size
    mean_keys, mean_values = (dot("st,btkh->bskh", mean, x) for x in (keys, values))
    compressed, weights = attend(mean_keys, mean_values, (seen & last[:, None])[:, :, None])
    if block_indices is None:
        block_indices = jax.lax.stop_gradient(_chosen(weights, block, i, of_query, block_size, num_blocks))
    if block_counts is not None:
        within = jnp.arange(block_indices.shape[-1]) < block_counts[..., None]
        block_indices = jnp.where(within, block_indices, -1)
    named = jnp.any(block_indices[..., None] == block[:, :, None, None], axis=3)  # [B, T, K, S]
    selected, _ = attend(keys, values, seen[:, :, None] & named)
    out = selected if g_slc is None else g_slc.astype(compute_dtype)[..., None] * selected
    if g_cmp is not None:
        out = out + g_cmp.astype(compute_dtype)[..., None] * compressed
    if window > 0:
        sliding, _ = attend(keys, values, (seen & (j > i[:, None] - window))[:, :, None])
        out = out + (sliding if g_swa is None else g_swa.astype(compute_dtype)[..., None] * sliding)
    return out.astype(query.dtype)


def _chosen(weights, block, i, of_query, block_size, num_blocks):
    """Returns int [B, T, K, num_blocks or fewer], the chosen blocks, best first; -1 for none.

    weights is [B, T, K, G, S]; a block's weight is stored at its last token.
    """
    count = -(-block.shape[-1] // block_size)
    c = jnp.arange(count)
    of_block = (block[..., None] == c).astype(weights.dtype)  # [B, T, S, blocks]
    importance = dot("btks,btsc->btkc", jnp.mean(weights, axis=3), of_block)
    own_block = ((i[:, None] - of_query) // block_size)[:, :, None]  # [B, T, 1, 1]
    score = ranked(importance, c, jnp.where(of_query[..., None] >= 0, own_block, -1))
    best, indices = jax.lax.top_k(score, min(num_blocks, count))
    return jnp.where(best >= 0, indices, -1)


def ranked(importance: jax.Array, block: jax.Array, own_block: jax.Array) -> jax.Array:
    """Returns the score for choosing blocks: the weight, at most 1; more for blocks that are always chosen; -1 for
    blocks after the query's own."""
    forced = jnp.where(
        block == own_block, 4.0, jnp.where(block == 0, 3.0, jnp.where(block == own_block - 1, 2.0, importance))
    )
    return jnp.where((block >= 0) & (block <= own_block), forced, -1.0)


def check_sizes(N: int, K: int, T: int, S: int, block_size: int, num_blocks: int, window: int) -> None:
    """Raises ValueError, naming the argument, for inconsistent sizes."""
    what = "native_sparse_attention: argument"
    if N % K:
        raise ValueError(
            f"{what} 'query' has N = {N} heads and 'key' has K = {K}: the query heads must be a multiple of the key heads"
        )
    if T > S:
        raise ValueError(
            f"{what} 'query' has {T} tokens and 'key' has {S}: the queries are the last tokens of the keys, so there "
            "cannot be more of them"
        )
    for name, value, least in (("block_size", block_size, 1), ("num_blocks", num_blocks, 1), ("window", window, 0)):
        if value < least:
            raise ValueError(f"{what} {name!r} must be at least {least}, got {value}")


def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the einsum of float32 numbers in true float32."""
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the pairs that the branches evaluate, with one document per row: 2 matmuls forward, 5
    backward, and the compressed logits, which the choice of blocks needs even without that branch."""
    B, T, S, N, H, Hv = (call.dims[d] for d in ("B", "T", "S", "N", "H", "Hv"))
    size = call.block_size
    chosen = call.block_indices is None
    blocks = call.num_blocks if chosen else call.block_indices.shape[-1]
    tokens = [min(t + 1, blocks * size) + min(t + 1, call.window) for t in range(S - T, S)]
    ended = B * N * sum((t + 1) // size for t in range(S - T, S))
    pairs = B * N * sum(tokens) + (ended if call.g_cmp is not None else 0)
    logits = 2 * H * ended if chosen and call.g_cmp is None else 0
    queries = nbytes(call.query) // H
    gates = nbytes(call.g_cmp, call.g_slc, call.g_swa)
    integers = nbytes(call.block_indices, call.block_counts, call.starts, call.q_start)
    out, keys = queries * Hv, nbytes(call.key, call.value)
    forward = Work(2 * pairs * (H + Hv) + logits, queries * H + keys + gates + integers + out)
    backward = Work(pairs * (6 * H + 4 * Hv) + logits, 2 * (queries * H + keys + gates) + integers + out)
    return forward, backward


_HERE = "native_sparse_attention"


def _padding(query: Any, starts: jax.Array | None, q_start: jax.Array | None, **others: Any) -> dict[str, Any]:
    if starts is None:
        return {}
    T, S = query.shape[1], starts.shape[1]
    places = (S - T if q_start is None else q_start) + jnp.arange(T)
    return {"T": jnp.take(starts, places, axis=1, mode="clip"), "S": starts}


op = Op(
    native_sparse_attention,
    # 0 times NaN is NaN, and a block's mean key includes all of its tokens.
    padding=Padding(("key", "value", "g_cmp", "g_slc", "g_swa"), _padding),
    # Query head n reads key head n // (N / K): with both split alike, a device has the key heads that its query heads
    # read.
    local_dims={"B", "N", "K"},
    tied_dims=(("N", "K"),),
    together=True,  # the query heads of a key head choose blocks by the mean of their weights
    see_also={"T": _HERE, "S": _HERE},
    ordered=True,  # adjacent tokens form a block
    same_dtype=("query", "key", "value"),
    config=NativeSparseConfig,
    cases=CASES,
    work=work,
)
