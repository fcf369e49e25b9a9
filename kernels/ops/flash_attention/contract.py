"""The contract of flash attention, over canonical arguments. The public functions are in `functions.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.attention import softmax
from kernels.engines.attention.dropout import dropout_scale
from kernels.engines.attention.masks import MaskInfo, by_positions, features_of_masks
from kernels.engines.attention.pairs import visible_pairs
from kernels.framework.binding import Call
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two
from kernels.framework.padding import Padding
from kernels.framework.work import Work, nbytes
from kernels.ops.flash_attention.cases import CASES, SLOW, WITH_WEIGHTS


def flash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: MaskInfo | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, "#B N"] | None = None,
    dropout_seed: Int[Array, "#B #N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    deterministic: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns (out, lse): out = sum_j p_j v_j with p = softmax of the logits over the visible keys, lse in float32.

    logits = cap(softmax_scale * q.k) + bias - slope * |i - j|, cap(x) = c tanh(x / c); softmax_scale defaults to
    1/sqrt(H). Query head n reads key head n // (N / K). Sinks `softmax_aux` join the denominator once, uncapped, and
    have no value. A query with no key (and no sink) gives out = 0 and lse = -inf. Dropout scales the remaining weights
    by 1/(1-p) and leaves lse unchanged. Accumulation is in float32. Values at negative segment ids, even NaN, affect
    nothing else, and the outputs there have no gradient (`Op(padding=...)`).

    `deterministic` requests bitwise reproducible results in both directions, for the same program, inputs and device.
    It does not change the values: here it has no effect, and a backend that adds in arbitrary order does not accept it.
    """
    weights, lse = _weights(query, key, mask, bias, softmax_aux, alibi_slopes, softmax_scale, logits_soft_cap)
    return _output(weights, query, value, mask, dropout_seed, dropout_prob), lse


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: MaskInfo | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    alibi_slopes: Float[Array, "#B N"] | None = None,
    dropout_seed: Int[Array, "#B #N"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    deterministic: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:
    """Returns (out, weights): the output of `flash_attention`, and the softmax over keys and sinks, before dropout, in
    float32. `deterministic` is as in `flash_attention`."""
    weights, _ = _weights(query, key, mask, bias, softmax_aux, alibi_slopes, softmax_scale, logits_soft_cap)
    return _output(weights, query, value, mask, dropout_seed, dropout_prob), weights


def _weights(query, key, mask, bias, softmax_aux, alibi_slopes, softmax_scale, logits_soft_cap):
    """Returns (weights [B, N, T, S], lse [B, T, N]), at least float32."""
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    if N % K:
        raise ValueError(
            f"argument 'query' has N = {N} heads and 'key' has K = {K}: the query heads must be a multiple of the key heads"
        )
    mask = MaskInfo() if mask is None else mask
    mask.check(B, T, S, N)
    q = query.reshape(B, T, K, N // K, H)
    logits = _dot("btkgh,bskh->bkgts", q, key, accumulate).reshape(B, N, T, S)
    logits = logits * (1 / math.sqrt(H) if softmax_scale is None else softmax_scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + bias.astype(accumulate)
    i, j = (jnp.asarray(p) for p in mask.positions(T, S))
    if alibi_slopes is not None:
        distance = jnp.abs(i[:, :, None] - j[:, None, :]).astype(accumulate)
        logits = logits - alibi_slopes.astype(accumulate)[:, :, None, None] * distance[:, None]
    visible = jnp.broadcast_to(mask.visible(T, S), logits.shape)

    # Masked logits are replaced before the exponential, so that neither it nor its gradient can overflow there.
    largest = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    sinks = None if softmax_aux is None else softmax_aux.astype(accumulate)[None, :, None, :]
    if sinks is not None:
        largest = jnp.maximum(largest, jnp.max(sinks, axis=-1, keepdims=True))
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.sum(jnp.exp(sinks - largest), axis=-1, keepdims=True)
    some = total != 0  # true for NaN too, so that lse becomes NaN
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0].swapaxes(1, 2)
    return weights / total, lse


def _output(weights, query, value, mask, dropout_seed, dropout_prob):
    """Returns the weighted sum of the values, [B, T, N, Hv] in the dtype of query."""
    if dropout_prob > 0 and dropout_seed is None:
        raise ValueError("argument 'dropout_seed' is required with dropout_prob > 0: see expand_dropout_seed")
    B, N, T, S = weights.shape
    K = value.shape[2]
    if dropout_prob > 0:
        i, j = (jnp.asarray(p) for p in (MaskInfo() if mask is None else mask).positions(T, S))
        weights = weights * dropout_scale(dropout_seed, i, j, dropout_prob)
    weights = weights.astype(value.dtype).reshape(B, K, N // K, T, S)
    out = _dot("bkgts,bskv->btkgv", weights, value, jnp.promote_types(query.dtype, jnp.float32))
    return out.reshape(B, T, N, -1).astype(query.dtype)


def _dot(subscripts: str, a: jax.Array, b: jax.Array, accumulate: jnp.dtype) -> jax.Array:
    # float32 means true float32 on every device; narrower types are exact in one pass anyway.
    precision = jax.lax.Precision.HIGHEST if a.dtype == accumulate else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=accumulate)


def backward_inputs(residuals: dict, cotangents: dict) -> dict:
    """Returns `softmax.backward_inputs`, plus `out` if lse has no cotangent, so that delta depends on `out` alone."""
    saved = softmax.backward_inputs(residuals, cotangents)
    return saved if "d_lse" in cotangents else saved | {"out": residuals["out"]}


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the visible pairs: 2 matmuls forward (logits, values), 5 backward (logits recomputed, and the
    gradients of weights, values, keys and queries), and of each array read or written once."""
    B, T, S, N, H, Hv = (call.dims[d] for d in ("B", "T", "S", "N", "H", "Hv"))
    pairs = visible_pairs(call.mask, B, N, T, S)
    queries = nbytes(call.query) // H
    out, lse, keys = queries * Hv, 4 * B * T * N, nbytes(call.key, call.value)
    extra = nbytes(call.bias, call.softmax_aux, call.alibi_slopes)
    forward = Work(2 * pairs * (H + Hv), queries * H + keys + extra + out + lse)
    # Reads the arrays of the forward and the cotangent of out; writes a gradient for each input.
    backward = Work(pairs * (6 * H + 4 * Hv), 2 * (queries * H + keys + extra) + 2 * out + lse)
    return forward, backward


def work_with_weights(call: Call) -> tuple[Work, Work]:
    """Returns the work of `attention`: that of flash attention, plus writing the weights and reading their
    cotangents."""
    weights = Work(0, 4 * call.dims["B"] * call.dims["N"] * call.dims["T"] * call.dims["S"])
    forward, backward = work(call)
    return forward + weights, backward + weights


def uses_gqa(call: Call) -> bool:
    return call.dims["N"] != call.dims["K"]


FEATURES = {
    **features_of_masks(),
    "gqa": uses_gqa,
    "cross_attention": lambda call: call.dims["T"] != call.dims["S"],
    "value_width": lambda call: call.dims["H"] != call.dims["Hv"],
}


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call, such as "bfloat16 causal heads<=128 keys<16384": the masks and terms added
    to the logits, the tile width of a head, and the number of keys. Grouped heads share the key of ungrouped ones."""
    used = [name for name, uses in FEATURES.items() if name != "gqa" and uses(call)]
    used += [n for n in ("bias", "softmax_aux", "alibi_slopes", "logits_soft_cap") if getattr(call, n) is not None]
    used += [n for n in ("dropout_prob", "deterministic") if getattr(call, n)]
    width = power_of_two(max(call.dims["H"], call.dims["Hv"]))
    length = bucket(call.dims["S"], 1024, 4096, 16384)
    return " ".join([call.dtype, *(used or ["full"]), f"heads<={width}", f"keys{length}"])


_RING = "ring_attention"
# Query head n reads key head n // (N / K): with both split alike, a device has the key heads that its query heads read.
_ON_A_MESH: Any = {
    "local_dims": {"B", "N", "K"},
    "tied_dims": (("N", "K"),),
    "see_also": {"T": _RING, "S": _RING},
    "ordered": by_positions,
    "same_dtype": ("query", "key", "value"),
}

op = Op(
    flash_attention,
    outputs=("out", "lse"),
    priority=("cudnn_gpu", "triton_gpu", "pallas_tpu", "xla"),
    residuals=("out", "lse"),
    backward_inputs=backward_inputs,
    padding=Padding(
        ("value",)
    ),  # masked logits are replaced by `where`, so NaN there is harmless; 0 times a NaN value is not
    features=FEATURES,
    autotune_key=autotune_key,
    config=FlashAttentionConfig,
    cases=CASES,
    work=work,
    **_ON_A_MESH,
)

# Dense by definition, so it runs on XLA everywhere, as the contract itself: most cases run only in the full grid.
attention_op = Op(
    attention,
    outputs=("out", "weights"),
    padding=Padding(("value",)),
    features=FEATURES,
    cases=tuple(
        dataclasses.replace(c, tags=c.tags if "smoke" in c.tags else SLOW) for c in CASES if c.name in WITH_WEIGHTS
    ),
    work=work_with_weights,
    **_ON_A_MESH,
)
