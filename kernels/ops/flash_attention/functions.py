"""Public functions: flash attention with the field's usual arguments, converted to the contract's form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.dropout import expand_dropout_seed
from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.framework import segments
from kernels.framework.binding import ARRAYS, is_array, is_float_array
from kernels.framework.config import KernelConfig
from kernels.framework.public import Prepared, public
from kernels.ops.flash_attention.contract import attention_op, backward_inputs, op


@public(op)
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    alibi_slopes: jax.Array | None = None,
    sink_tokens: int | None = None,
    mask_info: MaskInfo | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Prepared:
    """Returns the attention output [B, T, N, Hv]; with `return_lse` also the log-sum-exp, float32 [B, T, N].

    All given masks apply together. Gradients flow to query, key, value, bias, softmax_aux and alibi_slopes.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv]. N must be a multiple of K (GQA).
      attention_mask: bool [B, S] (not padding), [B, T, S] or [B, N, T, S].
      bias: added to the logits, broadcastable to [B, N, T, S].
      causal: a query sees keys up to its own position; bottom-right aligned when T != S.
      softmax_scale: default 1/sqrt(H).
      dropout_prob, dropout_seed: attention dropout. The seed may be traced; default 0. The mask depends only on the
        seed, batch row, head and positions.
      sliding_window: W for exactly W keys i - W < j <= i, or (left, right), None for an unbounded side.
      chunk_size: a query sees only keys in its own chunk of that many positions.
      logits_soft_cap: c in c * tanh(logits / c).
      cum_seqlens_q, cum_seqlens_k: [0, n1, n1 + n2, ...], cumulative lengths along a packed axis; the batch must be 1.
      softmax_aux: attention sinks, [N] or [N, n]: logits that contribute to the denominator and have no value.
      alibi_slopes: [N] or [B, N]; slope * |i - j| is subtracted from the logits.
      sink_tokens: the first n tokens of each sequence stay visible in addition to the window (Xiao et al., 2023).
      mask_info: `MaskInfo`.
      q_segment_ids, kv_segment_ids: int [B, T], [B, S]; a pair attends if its ids are equal and >= 0. -1 is padding,
        whose values (even NaN) affect no other output and no gradient.
      q_positions, kv_positions: int [B, T], [B, S]; positions for causal, window and chunk, if not 0, 1, 2, ...
      deterministic: bitwise reproducible results, forward and backward, for the same program, inputs and device,
        possibly at the cost of speed. Backends that add gradients in arbitrary order are skipped, and raise if
        requested by name.

    Raises:
      ValueError: names the invalid argument. Unsupported: no backend can run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> flash_attention(x, x, x, causal=True).shape
    (1, 8, 2, 4)
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, ARRAYS) or x.ndim != 4:
            shape = getattr(x, "shape", type(x).__name__)
            raise ValueError(f"argument {name!r} must be [batch, length, heads, width], got {shape}")
        if 0 in x.shape:
            raise ValueError(f"argument {name!r} of shape {x.shape} is empty; skip the call")
    for name, x in (("softmax_aux", softmax_aux), ("alibi_slopes", alibi_slopes)):
        if x is not None and not is_array(x):
            raise ValueError(f"argument {name!r} must be an array, got {type(x).__name__}")
    for name, x in (
        ("causal", causal),
        ("logits_soft_cap", logits_soft_cap),
        ("dropout_prob", dropout_prob),
        ("deterministic", deterministic),
    ):
        if isinstance(x, jax.Array):
            raise ValueError(f"argument {name!r} is compiled into the program and must be a Python value, not an array")
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise ValueError(f"argument 'mask_info' must be a MaskInfo, got {type(mask_info).__name__}")
    B, T, N, _ = query.shape
    S, K = key.shape[1], key.shape[2]
    if N % K:
        raise ValueError(
            f"argument 'query' has N = {N} heads and 'key' has K = {K}: the query heads must be a multiple of the key heads"
        )
    if not 0 <= dropout_prob < 1:
        raise ValueError(f"argument 'dropout_prob' must be in [0, 1), got {dropout_prob}")
    if logits_soft_cap is not None and logits_soft_cap <= 0:
        raise ValueError(f"argument 'logits_soft_cap' must be positive, got {logits_soft_cap}; use None for no cap")
    window = window_of(sliding_window)
    mask = MaskInfo(causal=bool(causal), window=window, sink_tokens=sink_tokens, chunk_size=chunk_size)
    parts = [] if mask_info is None else [mask_info]
    if q_segment_ids is not None or kv_segment_ids is not None:
        if q_segment_ids is None or (kv_segment_ids is None and T != S):
            raise ValueError("arguments 'q_segment_ids' and 'kv_segment_ids' must be given together")
        parts.append(MaskInfo.from_segments(q_segment_ids, kv_segment_ids))
    if q_positions is not None or kv_positions is not None:
        if q_positions is None or (kv_positions is None and T != S):
            raise ValueError("arguments 'q_positions' and 'kv_positions' must be given together")
        q_at = segments.integers(q_positions, "q_positions")
        k_at = q_at if kv_positions is None else segments.integers(kv_positions, "kv_positions")
        parts.append(MaskInfo(q_positions=q_at, kv_positions=k_at))
    if cum_seqlens_q is not None or cum_seqlens_k is not None:
        parts.append(_packed(query, key, cum_seqlens_q, cum_seqlens_k))
    if attention_mask is not None:
        parts.append(_of_attention_mask(attention_mask, B, T, S))
    for part in parts:
        part.check(B, T, S, N)
        mask = mask.combine(part)
    if not parts:  # masks that fit do so together
        mask.check(B, T, S, N)
    if mask.sink_tokens is not None and mask.window is None:
        raise ValueError(
            f"argument 'sink_tokens' = {mask.sink_tokens} keeps tokens visible in addition to a window: pass "
            "'sliding_window'"
        )
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value}
    if mask.used:
        arguments["mask"] = mask
    if bias is not None:
        arguments["bias"] = bias
    if softmax_aux is not None:
        arguments["softmax_aux"] = softmax_aux[:, None] if softmax_aux.ndim == 1 else softmax_aux
        if arguments["softmax_aux"].ndim != 2 or arguments["softmax_aux"].shape[0] != N or 0 in softmax_aux.shape:
            raise ValueError(
                f"argument 'softmax_aux' must be [N] or [N, sinks] with N = {N}, got {softmax_aux.shape}; use None for no sinks"
            )
    if alibi_slopes is not None:
        arguments["alibi_slopes"] = alibi_slopes[None] if alibi_slopes.ndim == 1 else alibi_slopes
    if dropout_prob > 0:
        seed: Any = 0 if dropout_seed is None else dropout_seed
        expanded = is_array(seed) and seed.ndim == 2
        arguments["dropout_seed"] = seed if expanded else expand_dropout_seed(seed, B, N)
        arguments["dropout_prob"] = float(dropout_prob)
    if softmax_scale is not None:
        arguments["softmax_scale"] = softmax_scale
    if logits_soft_cap is not None:
        arguments["logits_soft_cap"] = float(logits_soft_cap)
    if deterministic:
        arguments["deterministic"] = deterministic
    cuts = "" if cum_seqlens_q is None else "cum_seqlens_q"
    return Prepared(op.bind(**arguments), returns=("out", "lse") if return_lse else "out", cuts=cuts)


def _packed(query: jax.Array, key: jax.Array, cum_seqlens_q: Any, cum_seqlens_k: Any) -> MaskInfo:
    if query.shape[0] != 1:
        raise ValueError(
            f"argument 'cum_seqlens_q' splits one packed axis, so the batch must be 1, got {query.shape[0]}: reshape "
            "query, key and value to [1, total, heads, width], or pass segment ids per row"
        )
    if cum_seqlens_q is None or (cum_seqlens_k is None and query.shape[1] != key.shape[1]):
        raise ValueError("arguments 'cum_seqlens_q' and 'cum_seqlens_k' must be given together")
    return MaskInfo.from_cu_seqlens(cum_seqlens_q, query.shape[1], cum_seqlens_k, key.shape[1])


def _of_attention_mask(attention_mask: Any, batch: int, q_length: int, kv_length: int) -> MaskInfo:
    mask = jnp.asarray(attention_mask)
    pairs = "for pairs pass [B, T, S]: add a dim to [T, S] with attention_mask[None]"
    if mask.ndim == 2 and not (mask.shape[1] == kv_length and mask.shape[0] in (1, batch)):
        raise ValueError(
            f"argument 'attention_mask' of shape {mask.shape} must be [B, S] = ({batch}, {kv_length}), true for tokens that "
            f"are not padding; {pairs}"
        )
    if mask.ndim == 2 and batch == q_length > 1:
        raise ValueError(
            f"argument 'attention_mask' of shape {mask.shape} could be [B, S] or [T, S], since B = T = {batch}: pass "
            f"padding as q_segment_ids (-1 for padding), and {pairs}"
        )
    if mask.ndim == 2 and q_length != kv_length:
        # [B, S] marks keys only: with T != S the queries are other tokens, all valid.
        return MaskInfo.from_attention_mask(mask[:, None, None, :])
    return MaskInfo.from_attention_mask(mask)


def flash_attention_backward(
    d_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    lse: jax.Array,
    delta: jax.Array | None = None,
    out: jax.Array | None = None,
    platform: str | None = None,
    cfg: KernelConfig | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Returns the gradients of one block of attention by name, given the log-sum-exp over all blocks.

    This is the block backward of ring and blockwise attention: `lse` may cover more keys than `key` contains.

    Args:
      d_out: cotangent of the output, [B, T, N, Hv].
      lse: float32 [B, T, N], over all keys that the rows see.
      delta: float32 [B, T, N], rowsum(d_out * out) of the full output, minus the cotangent of lse if it has one.
      out: the full output, instead of delta.
      options: as in `flash_attention`.

    Raises:
      ValueError: neither or both of delta and out are given, or an argument does not fit.
    """
    if (delta is None) == (out is None):
        raise ValueError("pass exactly one of the arguments 'delta' and 'out'")
    if "return_lse" in options:
        raise ValueError("argument 'return_lse' applies to a forward, but this returns gradients; omit it")
    call = flash_attention.prepare(query, key, value, **options).call
    rows = query.shape[:3]
    whole = (*rows, value.shape[3])
    last: Any = ("delta", delta, rows) if out is None else ("out", out, whole)
    for name, x, shape in (("d_out", d_out, whole), ("lse", lse, rows), last):
        if not is_float_array(x) or x.shape != shape:
            got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
            raise ValueError(f"argument {name!r} must be a float array of shape {shape}, got {got}")
    if out is None:
        saved = {"d_out": d_out, "lse": lse, "delta": delta}
    else:
        saved = backward_inputs({"out": out, "lse": lse}, {"d_out": d_out})
    return op.backward(saved, **call.arguments, platform=platform, cfg=cfg)


@public(op)
def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    *,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    deterministic: bool = False,
) -> Prepared:
    """Returns attention [B, T, N, Hv]: `flash_attention` under PyTorch's name, with fewer arguments.

    >>> import jax.numpy as jnp
    >>> query, key, value = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2, 1, 4)), jnp.array([[[[1.0]], [[3.0]]]])
    >>> print(scaled_dot_product_attention(query, key, value, causal=True)[0, :, 0, 0])
    [1. 2.]
    """
    return flash_attention.prepare(**locals())


@public(attention_op)
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    deterministic: bool = False,
) -> Prepared:
    """Returns (out [B, T, N, Hv], weights float32 [B, N, T, S]), for inspecting the attention weights.

    The weights are the softmax over keys and sinks, before dropout. They take O(T * S) memory. The output is the same
    as that of `flash_attention`; both outputs have gradients.

    >>> import jax.numpy as jnp
    >>> query, key, value = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2, 1, 4)), jnp.array([[[[1.0]], [[3.0]]]])
    >>> out, weights = attention(query, key, value, causal=True)
    >>> print(out[0, :, 0, 0], *weights[0, 0])
    [1. 2.] [1. 0.] [0.5 0.5]
    """
    call = flash_attention.prepare(**locals()).call
    return Prepared(attention_op.bind(**call.arguments), returns=("out", "weights"))
