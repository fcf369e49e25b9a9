"""The contract of block-sparse attention, over canonical arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kernels.engines.attention.masks import MaskInfo, features_of_masks
from kernels.engines.attention.pairs import visible_pairs
from kernels.engines.attention.softmax import backward_inputs
from kernels.framework.binding import Call
from kernels.framework.config import BwdParams, FwdParams, Tunables
from kernels.framework.contract import Op
from kernels.framework.padding import Padding
from kernels.framework.work import Work, nbytes
from kernels.ops.blocksparse_attention.cases import CASES


@dataclass(frozen=True)
class BlockSparseConfig(Tunables):
    """Tunables, which do not affect the result; None leaves the choice to the configuration chain.

    Attributes:
      block: XLA: the longest side of a block that is computed at once; longer blocks of the mask are cut into equal parts.
      lanes: XLA: query blocks that are processed side by side.
      fwd_params, bwd_params: kernels: tiles of queries and keys, and the warps and stages of a program.
    """

    block: int | None = None
    lanes: int | None = None
    fwd_params: FwdParams = field(default_factory=FwdParams)
    bwd_params: BwdParams = field(default_factory=BwdParams)


def blocksparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    block_mask: Bool[Array, "#B #N _ _"],
    mask: MaskInfo | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    *,
    block_size: tuple[int, int] = (64, 64),
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns (out, lse) of attention in which query i sees key j iff block_mask[b, n, i // block_size[0], j // block_size[1]]
    is set and `mask` lets the pair through.

    Logits, sinks and rows without keys are as in flash attention: logits = cap(softmax_scale * q.k), query head n reads key
    head n // (N / K), and a row with no key (and no sink) has out = 0 and lse = -inf. The last block along either dim may be
    partial. Accumulation is in float32.
    """
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    check_blocks(block_mask, block_size, B, T, S, N, K)
    mask = MaskInfo() if mask is None else mask
    mask.check(B, T, S, N)
    q = query.reshape(B, T, K, N // K, H)
    logits = dot("btkgh,bskh->bkgts", q, key).reshape(B, N, T, S)
    logits = logits * (1 / math.sqrt(H) if softmax_scale is None else softmax_scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    blocks = jnp.repeat(jnp.repeat(block_mask, block_size[0], 2)[:, :, :T], block_size[1], 3)[..., :S]
    seen = jnp.broadcast_to(blocks & mask.visible(T, S), logits.shape)

    largest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    sinks = None if softmax_aux is None else softmax_aux.astype(accumulate)[None, :, None, :]
    if sinks is not None:
        largest = jnp.maximum(largest, jnp.max(sinks, axis=-1, keepdims=True))
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, largest) - largest), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.sum(jnp.exp(sinks - largest), axis=-1, keepdims=True)
    some = total != 0  # true for NaN too, so that lse becomes NaN
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0].swapaxes(1, 2)
    weights = (weights / total).astype(value.dtype).reshape(B, K, N // K, T, S)
    return dot("bkgts,bskv->btkgv", weights, value).reshape(B, T, N, -1).astype(query.dtype), lse


def sides_of(block_size: Any, of: str = "blocksparse_attention") -> tuple[int, int]:
    """Returns (queries, keys) per block, from such a tuple or from one integer for both.

    Raises:
      ValueError: it is neither; the message begins with `of`.
    """
    sides = (block_size, block_size) if _is_size(block_size) else block_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2 or not all(map(_is_size, sides)):
        raise ValueError(
            f"{of}: argument 'block_size' must be a positive integer, or (queries, keys) of a block, got {block_size!r}"
        )
    return int(sides[0]), int(sides[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value > 0)


def check_blocks(block_mask: Any, block_size: tuple[int, int], B: Any, T: int, S: int, N: int, K: int) -> None:
    """Raises ValueError, naming the argument, if blocks or heads do not fit the queries and keys."""
    if N % K:
        raise ValueError(
            f"blocksparse_attention: argument 'query' has N = {N} heads and 'key' has K = {K}: the query heads must be a "
            "multiple of the key heads"
        )
    if not isinstance(block_size, tuple) or len(block_size) != 2 or any(n < 1 for n in block_size):
        raise ValueError(
            "blocksparse_attention: argument 'block_size' must be (queries, keys) of a block, both positive, got "
            f"{block_size!r}"
        )
    blocks = (-(-T // block_size[0]), -(-S // block_size[1]))
    if block_mask.shape[0] not in (1, B) or block_mask.shape[1] not in (1, N) or tuple(block_mask.shape[2:]) != blocks:
        raise ValueError(
            f"blocksparse_attention: argument 'block_mask' of shape {tuple(block_mask.shape)} must be [{B} or 1, {N} or 1, "
            f"{blocks[0]}, {blocks[1]}]: one entry per block of {block_size[0]} of the {T} queries and block of "
            f"{block_size[1]} of the {S} keys; pass another 'block_size', or a mask of that shape"
        )


def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the einsum, accumulated in at least float32; float32 inputs use true float32 on every device."""
    accumulate = jnp.promote_types(a.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == accumulate else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=accumulate)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the pairs in set blocks that `mask` lets through: 2 matmuls forward, 5 backward, and every array
    read or written once. If the values of the block mask are unknown, all blocks count as set."""
    B, T, S, N, H, Hv = (call.dims[d] for d in ("B", "T", "S", "N", "H", "Hv"))
    pairs = visible_pairs(call.mask, B, N, T, S)
    if not isinstance(call.block_mask, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        blocks = np.asarray(call.block_mask)
        rows, columns = (
            np.minimum(size, length - size * np.arange(n))
            for size, length, n in zip(call.block_size, (T, S), blocks.shape[2:], strict=True)
        )
        inside = int(np.einsum("bnij,i,j->", blocks.astype(np.int64), rows, columns))
        pairs = min(pairs, inside * (B // blocks.shape[0]) * (N // blocks.shape[1]))
    queries = nbytes(call.query) // H
    out, lse, keys = queries * Hv, 4 * B * T * N, nbytes(call.key, call.value)
    extra = nbytes(call.softmax_aux)
    forward = Work(2 * pairs * (H + Hv), queries * H + keys + extra + nbytes(call.block_mask) + out + lse)
    backward = Work(
        pairs * (6 * H + 4 * Hv), 2 * (queries * H + keys + extra) + nbytes(call.block_mask) + 2 * out + lse
    )
    return forward, backward


FEATURES = {
    **features_of_masks(),
    "gqa": lambda call: call.dims["N"] != call.dims["K"],
    "cross_attention": lambda call: call.dims["T"] != call.dims["S"],
    "value_width": lambda call: call.dims["H"] != call.dims["Hv"],
    "mask_per_row": lambda call: call.block_mask.shape[0] != 1,
    "mask_per_head": lambda call: call.block_mask.shape[1] != 1,
}

op = Op(
    blocksparse_attention,
    outputs=("out", "lse"),
    residuals=("out", "lse"),
    backward_inputs=backward_inputs,
    padding=Padding(("value",)),
    features=FEATURES,
    # Query head n reads key head n // (N / K): with both split alike, a device has the key heads that its query heads read.
    local_dims={"B", "N", "K"},
    tied_dims=(("N", "K"),),
    see_also={"T": "blocksparse_attention", "S": "blocksparse_attention"},
    ordered=True,  # adjacent tokens form a block
    same_dtype=("query", "key", "value"),
    config=BlockSparseConfig,
    cases=CASES,
    work=work,
)
