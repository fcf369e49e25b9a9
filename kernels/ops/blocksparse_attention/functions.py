"""Public function: block-sparse attention with the field's usual arguments, converted to the contract's form."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import is_array
from kernels.framework.public import Prepared, public
from kernels.ops.blocksparse_attention.contract import check_blocks, op, sides_of
from kernels.ops.flash_attention import flash_attention


def _blocks(block_mask: Any, sparsity_mask: Any) -> Any:
    """Returns the pattern as bool [B|1, N|1, query blocks, key blocks]."""
    if (block_mask is None) == (sparsity_mask is None):
        raise ValueError(
            "blocksparse_attention: argument 'block_mask' selects the blocks, and 'sparsity_mask' is another name for it: pass "
            f"one of them, got {'neither' if block_mask is None else 'both'}"
        )
    name, pattern = ("block_mask", block_mask) if sparsity_mask is None else ("sparsity_mask", sparsity_mask)
    try:
        pattern = pattern if is_array(pattern) else np.asarray(pattern)
    except ValueError:
        raise ValueError(
            f"blocksparse_attention: argument {name!r} has rows of different lengths, got {pattern!r}"
        ) from None
    if not (jax.dtypes.issubdtype(pattern.dtype, np.bool_) or jax.dtypes.issubdtype(pattern.dtype, np.integer)):
        raise ValueError(
            f"blocksparse_attention: argument {name!r} must be boolean or 0/1 integers, true where a block is computed, got "
            f"{pattern.dtype}"
        )
    if pattern.ndim not in (2, 4):
        raise ValueError(
            f"blocksparse_attention: argument {name!r} must be [query blocks, key blocks] or [B or 1, N or 1, query blocks, "
            f"key blocks], got shape {pattern.shape}; a mask per head is {name}[None], a mask per row {name}[:, None]"
        )
    pattern = pattern if pattern.ndim == 4 else pattern[None, None]
    return pattern if pattern.dtype == bool else pattern != 0


@public(op, module="BlockSparseAttention")
def blocksparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_mask: Any = None,
    block_size: int | tuple[int, int] = 64,
    causal: bool = False,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    sparsity_mask: Any = None,
    attention_mask: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    return_lse: bool = False,
) -> Prepared:
    """Returns attention [B, T, N, Hv] over the set pairs of blocks; with `return_lse` also the log-sum-exp, float32 [B, T, N].

    Only set pairs are computed, forward and backward. All other masks apply within them, and pairs of blocks that those hide
    entirely are skipped too. A query without keys gives 0. Gradients flow to query, key, value and softmax_aux.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv]. N must be a multiple of K (GQA).
      block_mask: bool, or integers 0 and 1, [T / block_size, S / block_size] rounded up, or [B or 1, N or 1, ...]: whether the
        queries of a block see the keys of a block. May be traced. For patterns see `local_blocks` and the others in its file.
      block_size: tokens per block, or (queries, keys). It affects the result; `cfg` sets how much is computed at once.
      sparsity_mask: another name for block_mask.
      causal, sliding_window, chunk_size, softmax_scale, logits_soft_cap, softmax_aux, attention_mask, mask_info,
        cum_seqlens_q, cum_seqlens_k, q_segment_ids, kv_segment_ids, q_positions, kv_positions: as in `flash_attention`.
        Blocks are counted along the arrays, whatever the positions are.
      cfg: `BlockSparseConfig`.

    Raises:
      ValueError: names the invalid argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> from kernels.ops.blocksparse_attention import local_blocks
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> blocksparse_attention(x, x, x, local_blocks(4, before=1, after=0), 2, causal=True).shape
    (1, 8, 2, 4)
    """
    size, blocks = sides_of(block_size), _blocks(block_mask, sparsity_mask)
    # Every other argument means the same as in flash attention.
    prepared = flash_attention.prepare(
        query,
        key,
        value,
        attention_mask=attention_mask,
        causal=causal,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        logits_soft_cap=logits_soft_cap,
        cum_seqlens_q=cum_seqlens_q,
        cum_seqlens_k=cum_seqlens_k,
        softmax_aux=softmax_aux,
        mask_info=mask_info,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_positions=q_positions,
        kv_positions=kv_positions,
    )
    flash = prepared.call
    check_blocks(blocks, size, *(flash.dims[d] for d in "BTSNK"))
    names = ("query", "key", "value", "mask", "softmax_aux", "softmax_scale", "logits_soft_cap")
    arguments = {n: flash.arguments[n] for n in names if flash.arguments[n] is not None}
    call = op.bind(**arguments, block_mask=blocks, block_size=size)
    return Prepared(call, returns=("out", "lse") if return_lse else "out", cuts=prepared.cuts)
