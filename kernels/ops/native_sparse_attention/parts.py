"""The contracts of two parts of native sparse attention, for keys that are split over devices: which blocks are chosen, by
means that came from all of them; and the selected branch over some of the keys, whose results merge by their log-sum-exps."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.attention.softmax import backward_inputs
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.native_sparse_attention.blocks import block_rows
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, dot, ranked


def native_sparse_choice(
    query: Float[Array, "B T N H"],
    means: Float[Array, "B K _ H"],
    starts: Int[Array, "B S"],
    q_start: Int[Array, ""],
    *,
    block_size: int = 64,
    num_blocks: int = 16,
    softmax_scale: float | None = None,
) -> Int[Array, "B T K _"]:
    """Returns the blocks that `native_sparse_attention` chooses, best first, -1 for none.

    `means` are float32, of the keys of complete blocks, each in its slot (`blocks.py`); `starts` are those of all keys. Query t
    is at index q_start + t of them. There is no gradient.
    """
    (B, T, N, H), (K, slots) = query.shape, means.shape[1:3]
    q = query.astype(jnp.float32).reshape(B, T, K, N // K, H)
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    index = q_start + jnp.arange(T)
    start = jnp.take(starts, index, axis=1)[:, :, None]
    _, ends, of_slot = block_rows(starts, block_size)
    visible = (of_slot[:, None] == start) & (ends[:, None] <= index[:, None]) & (start >= 0)
    visible = visible[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(visible, dot("btkgh,bksh->btkgs", q, means) * scale, -jnp.inf))
    weights = jnp.where(visible, weights, 0)
    # A query's own block may end past all complete ones.
    importance = jnp.pad(jnp.mean(weights, axis=3), ((0, 0), (0, 0), (0, 0), (0, 1)))
    before = ((start + block_size - 1) // block_size)[..., None]
    own_block = jnp.where(start >= 0, (index[:, None] - start) // block_size, -1)[..., None]
    best, slot = jax.lax.top_k(ranked(importance, jnp.arange(slots + 1) - before, own_block), min(num_blocks, slots))
    return jnp.where(best >= 0, slot - before, -1).astype(jnp.int32)


def native_sparse_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    block_indices: Int[Array, "B T K _"],
    starts: Int[Array, "B S"] | None = None,
    q_start: Int[Array, ""] | None = None,
    *,
    block_size: int = 64,
    softmax_scale: float | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns (out, lse) of the selected branch of `native_sparse_attention`, without its gate; lse is float32.

    Without `starts` the keys are one document, and q_start may be past its end: queries that are after all keys, of which there
    may be fewer than queries. A query without a key has out 0 and lse -inf.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    index, j = (S - T if q_start is None else q_start) + jnp.arange(T), jnp.arange(S)
    seen, start = jnp.broadcast_to(j <= index[:, None], (B, T, S)), jnp.zeros((B, T, 1), jnp.int32)
    if starts is not None:
        start = jnp.take(starts, index, axis=1)[:, :, None]
        seen &= (starts[:, None] == start) & (start >= 0)
    block = jnp.where(seen, (j - start) // block_size, -1)
    named = jnp.any(block_indices[..., None] == block[:, :, None, None], axis=3)  # [B, T, K, S]
    visible = (named & seen[:, :, None])[:, :, :, None]
    q = query.astype(dtype).reshape(B, T, K, N // K, H)
    logits = jnp.where(visible, dot("btkgh,bskh->btkgs", q, key.astype(dtype)) * scale, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1)
    out = dot("btkgs,bskv->btkgv", weights / safe, value.astype(dtype)).reshape(B, T, N, -1)
    lse = jnp.where(some, jnp.log(safe) + largest, -jnp.inf).reshape(B, T, N)
    return out.astype(query.dtype), lse.astype(jnp.float32)


def selected_work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the blocks that are named, all of them whole: 2 matmuls forward, 5 backward."""
    B, T, N, H, Hv = (call.dims[d] for d in ("B", "T", "N", "H", "Hv"))
    pairs = B * T * N * call.block_indices.shape[-1] * call.block_size
    queries, integers = nbytes(call.query) // H, nbytes(call.block_indices, call.starts, call.q_start)
    keys, out, lse = nbytes(call.key, call.value), queries * Hv, 4 * B * T * N
    forward = Work(2 * pairs * (H + Hv), queries * H + keys + integers + out + lse)
    return forward, Work(pairs * (6 * H + 4 * Hv), 2 * (queries * H + keys) + integers + 2 * out + lse)


_ON_A_MESH = {"tied_dims": (("N", "K"),), "ordered": True}
choice_op = Op(
    native_sparse_choice,
    title="native_sparse_attention (its choice of blocks)",
    no_gradient=("query", "means"),
    local_dims={"B", "N", "K"},
    together=True,
    **_ON_A_MESH,
)
selected_op = Op(
    native_sparse_selected,
    title="native_sparse_attention (its selected branch)",
    outputs=("out", "lse"),
    residuals=("out", "lse"),
    backward_inputs=backward_inputs,
    local_dims={"B", "N", "K"},
    same_dtype=("query", "key", "value"),
    config=NativeSparseConfig,
    work=selected_work,
    **_ON_A_MESH,
)
