"""The contract of multi-head latent attention (MLA), over canonical arguments. The public functions are in
`functions.py`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.attention.masks import MaskInfo, by_positions
from kernels.engines.attention.pairs import visible_pairs
from kernels.engines.attention.softmax import backward_inputs
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.padding import Padding
from kernels.framework.segments import searchsorted
from kernels.framework.work import Work, nbytes
from kernels.ops.multi_latent_attention.cases import CASES, DECODE_CASES, PAGED_CASES


def flash_mla(
    query: Float[Array, "B T N H"],
    key_value: Float[Array, "B S R"],
    w_kc: Float[Array, "R K H"],
    w_vc: Float[Array, "R K Hv"],
    query_rope: Float[Array, "B T N Hr"] | None = None,
    key_rope: Float[Array, "B S Hr"] | None = None,
    mask: MaskInfo | None = None,
    softmax_aux: Float[Array, "N sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns (out, lse): attention over the keys key_value w_kc and the values key_value w_vc, lse in float32.

    logits = cap(softmax_scale * (query . key + query_rope . key_rope)), where all heads share key_rope; softmax_scale
    defaults to 1/sqrt(H + Hr). Masks, sinks, the cap, `deterministic`, and queries without a key are as in
    `flash_attention`, which the XLA backend calls.
    """
    check_rope(query_rope, key_rope)
    N, K = query.shape[2], w_kc.shape[1]
    if N % K:
        raise ValueError(f"argument 'query' has N = {N} heads and 'w_kc' has K = {K}: N must be a multiple of K")
    key = _dot("bsr,rkh->bskh", key_value, w_kc).astype(key_value.dtype)
    value = _dot("bsr,rkv->bskv", key_value, w_vc).astype(key_value.dtype)
    logits = _dot("btnh,bsnh->bnts", query, jnp.repeat(key, N // K, axis=2))
    if query_rope is not None and key_rope is not None:
        logits = logits + _dot("btnh,bsh->bnts", query_rope, key_rope)
    mask = MaskInfo() if mask is None else mask
    mask.check(query.shape[0], query.shape[1], key.shape[1], N)
    visible = mask.visible(query.shape[1], key.shape[1])
    scale = scale_of(softmax_scale, query, query_rope)
    weights, lse = _softmax(_capped(logits * scale, logits_soft_cap), visible, softmax_aux)
    out = _dot("bnts,bsnv->btnv", weights.astype(value.dtype), jnp.repeat(value, N // K, axis=2))
    return out.astype(query.dtype), lse.swapaxes(1, 2)


def mla_decode(
    query: Float[Array, "B T N R"],
    query_rope: Float[Array, "B T N Hr"],
    kv_cache: Float[Array, "B S _"],
    kv_lens: Int[Array, " B"],
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """Returns (out, lse) of absorbed queries over a cache of latents: out in the latent space, lse in float32.

    An entry of the cache is a latent of width R followed by the rotary key of width Hr; the first kv_lens[b] entries of
    row b are valid. Query t of a row is the token at position kv_lens[b] - T + t. It sees the entries up to its own
    position, or the last `sliding_window` of them. logits = cap(softmax_scale * (query . latent + query_rope . rotary
    key)), and out is the weighted sum of latents; a query that sees nothing has out = 0 and lse = -inf. Other entries,
    even if they contain NaN, do not affect the output.
    """
    B, T, _, R = query.shape
    S, width = kv_cache.shape[1:]
    check_cache("mla_decode", width, R, query_rope.shape[-1])
    mask = decode_mask(kv_lens, T, S, sliding_window)
    kv_cache = jnp.where((jnp.arange(S) < kv_lens[:, None])[..., None], kv_cache, 0)
    logits = _dot("btnr,bsr->bnts", query, kv_cache[..., :R]) + _dot("btnh,bsh->bnts", query_rope, kv_cache[..., R:])
    weights, lse = _softmax(_capped(logits * softmax_scale, logits_soft_cap), mask.visible(T, S), None)
    out = _dot("bnts,bsr->btnr", weights.astype(kv_cache.dtype), kv_cache[..., :R])
    return out.astype(query.dtype), lse.swapaxes(1, 2)


def multi_latent_ragged_page_attention(
    query: Float[Array, "M N R"],
    query_rope: Float[Array, "M N Hr"],
    kv_cache: Float[Array, "pages C _"],
    kv_lens: Int[Array, " requests"],
    block_tables: Int[Array, "requests _"],
    query_start_loc: Int[Array, " requests+1"],
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Float[Array, "M N R"]:
    """Returns `mla_decode` for requests with different numbers of tokens over paged caches: out in the latent space.
    Forward only.

    Rows query_start_loc[r] to query_start_loc[r + 1] of query are the newest tokens of request r; rows past the last
    request have out = 0. Request r has kv_lens[r] entries: entry j is kv_cache[block_tables[r, j // C], j % C], a
    latent followed by its rotary key. Tables and pages past the last entry may hold anything.
    """
    check_cache("multi_latent_ragged_page_attention", kv_cache.shape[2], query.shape[2], query_rope.shape[2])
    M, _, R = query.shape
    row = jnp.arange(M)
    request = searchsorted(query_start_loc, row, side="right") - 1
    real = (request >= 0) & (request < kv_lens.shape[0])
    request = jnp.clip(request, 0, kv_lens.shape[0] - 1)
    length = kv_lens[request]
    position = length - query_start_loc[request + 1] + row
    pages = kv_cache[jnp.clip(block_tables, 0, kv_cache.shape[0] - 1)]  # [requests, pages per request, C, width]
    entries = pages.reshape(pages.shape[0], -1, pages.shape[-1])[request]  # [M, S, width]
    entry = jnp.arange(entries.shape[1])[None]
    seen = real[:, None] & (entry < length[:, None]) & (entry <= position[:, None])
    if sliding_window is not None:
        seen &= entry > position[:, None] - sliding_window
    entries = jnp.where(seen[..., None], entries, 0)
    logits = _dot("mnr,msr->mns", query, entries[..., :R]) + _dot("mnh,msh->mns", query_rope, entries[..., R:])
    logits = _capped(logits * softmax_scale, logits_soft_cap)
    weights, _ = _softmax(logits[:, :, None], seen[:, None, None], None)
    return _dot("mns,msr->mnr", weights[:, :, 0].astype(kv_cache.dtype), entries[..., :R]).astype(query.dtype)


def check_rope(query_rope: Any, key_rope: Any) -> None:
    """Raises ValueError if only one of the two is given."""
    if (query_rope is None) != (key_rope is None):
        passed, lacks = ("query_rope", "key_rope") if key_rope is None else ("key_rope", "query_rope")
        raise ValueError(f"flash_mla: argument {passed!r} is given without {lacks!r}; pass both or neither")


def check_cache(name: str, width: int, rank: int, rope: int) -> None:
    """Raises ValueError if the entries of a cache are not a latent and a rotary key."""
    if width != rank + rope:
        raise ValueError(
            f"{name}: argument 'kv_cache' has entries of width {width}, but a latent and a rotary key have R + Hr = {rank} + "
            f"{rope} = {rank + rope}: the latent first, then the key, in one array"
        )


def scale_of(softmax_scale: float | None, query: jax.Array, query_rope: jax.Array | None) -> float:
    """Returns the scale of the logits; by default 1/sqrt of the width of the full head."""
    width = query.shape[-1] + (0 if query_rope is None else query_rope.shape[-1])
    return 1 / math.sqrt(width) if softmax_scale is None else softmax_scale


def decode_mask(kv_lens: jax.Array, queries: int, entries: int, sliding_window: int | None) -> MaskInfo:
    """Returns the mask of the cache entries that each of the last queries sees."""
    positions = jnp.arange(entries, dtype=jnp.int32)[None]
    lengths = kv_lens.astype(jnp.int32)[:, None]
    return MaskInfo(
        q_segment_ids=jnp.zeros((1, queries), jnp.int32),
        kv_segment_ids=jnp.where(positions < lengths, 0, -1),
        q_positions=lengths - queries + jnp.arange(queries, dtype=jnp.int32)[None],
        kv_positions=positions,
        causal=True,
        window=None if sliding_window is None else (sliding_window - 1, 0),
    )


def _capped(logits: jax.Array, cap: float | None) -> jax.Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _softmax(logits: jax.Array, visible: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (weights [B, N, T, S], lse [B, N, T]) of the visible logits and the sinks [N, sinks]."""
    visible = jnp.broadcast_to(visible, logits.shape)
    largest = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    extra = None if sinks is None else sinks.astype(logits.dtype)[None, :, None]
    if extra is not None:
        largest = jnp.maximum(largest, jnp.max(extra, axis=-1, keepdims=True))
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    # Masked logits are replaced before the exponential, so that neither it nor its gradient overflows.
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if extra is not None:
        total = total + jnp.sum(jnp.exp(extra - largest), axis=-1, keepdims=True)
    some = total != 0  # true for NaN too, so that lse becomes NaN
    total = jnp.where(some, total, 1)
    return weights / total, jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(accumulate), b.astype(accumulate)
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the visible pairs (2 matmuls forward, 5 backward) and of the up-projections: once forward; in
    the backward once more, because keys and values are recomputed, and two products for each gradient."""
    B, T, S, N, K, H, Hv, R = (call.dims[d] for d in ("B", "T", "S", "N", "K", "H", "Hv", "R"))
    width = H + call.dims.get("Hr", 0)
    pairs = visible_pairs(call.mask, B, N, T, S)
    up = 2 * B * S * R * K * (H + Hv)
    inputs = nbytes(call.query, call.key_value, call.w_kc, call.w_vc, call.query_rope, call.key_rope, call.softmax_aux)
    out, lse = nbytes(call.query) // H * Hv, 4 * B * T * N
    forward = Work(2 * pairs * (width + Hv) + up, inputs + out + lse)
    return forward, Work(pairs * (6 * width + 4 * Hv) + 3 * up, 2 * inputs + 2 * out + lse)


def decode_work(call: Call) -> tuple[Work, Work]:
    """Returns the work over the whole cache, an upper bound if kv_lens are shorter: every entry is read once."""
    B, T, S, N, R, Hr = (call.dims[d] for d in ("B", "T", "S", "N", "R", "Hr"))
    pairs = B * T * N * S
    inputs = nbytes(call.query, call.query_rope, call.kv_cache)
    out = nbytes(call.query) + 4 * B * T * N
    forward = Work(2 * pairs * (2 * R + Hr), inputs + out)
    return forward, Work(pairs * (10 * R + 6 * Hr), 2 * inputs + 2 * out)


def paged_work(call: Call) -> tuple[Work, Work]:
    """Returns the work with full tables, an upper bound, because kv_lens are data. Each token sees all of its
    request."""
    tables = call.dims["requests"] * call.block_tables.shape[1] * call.dims["C"]
    width = call.kv_cache.shape[2]
    per_request = -(-call.dims["M"] // call.dims["requests"])
    pairs = per_request * call.dims["N"] * tables
    moved = (
        nbytes(call.query) * 2
        + nbytes(call.query_rope)
        + nbytes(call.kv_cache) // call.dims["pages"] // call.dims["C"] * tables
    )
    return Work(2 * pairs * (width + call.dims["R"]), moved), Work(0, 0)


op = Op(
    flash_mla,
    outputs=("out", "lse"),
    residuals=("out", "lse"),
    backward_inputs=backward_inputs,
    padding=Padding(("key_value",)),
    local_dims={"B", "N", "K"},
    tied_dims=(("N", "K"),),
    see_also={"T": "flash_mla", "S": "flash_mla"},
    ordered=by_positions,
    weights=("w_kc", "w_vc"),
    same_dtype=("query", "key_value", "w_kc", "w_vc", "query_rope", "key_rope"),
    priority=("triton_gpu", "composed", "xla"),
    cases=CASES,
    work=work,
)
decode_op = Op(
    mla_decode,
    outputs=("out", "lse"),
    residuals=("out", "lse"),
    backward_inputs=backward_inputs,
    local_dims={"B", "N"},
    see_also={"S": "mla_decode"},
    ordered=True,  # entries of a cache are counted from its first token
    same_dtype=("query", "query_rope", "kv_cache"),
    cases=DECODE_CASES,
    work=decode_work,
)
paged_op = Op(
    multi_latent_ragged_page_attention,
    local_dims={"N"},
    same_dtype=("query", "query_rope", "kv_cache"),
    cases=PAGED_CASES,
    work=paged_work,
)
