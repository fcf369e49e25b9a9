"""Latent attention on NVIDIA GPUs: over pages, and on Hopper the forward of training.

There the forward kernel of flash attention reads the two parts of a head from arrays of their own.

Joined heads would be written and read once more: (B T N + B S K) (H + Hr) entries. The kernel stores such heads in tiles of
columns anyway, and loads the last tile from the rotary arrays; all heads of keys share theirs. The backward joins them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.paged_requests import Requests
from kernels.engines.attention.triton_calls import (
    WARP_SPECIALIZED,
    prepare,
    splits,
    warp_specialized_forward,
    warp_specialized_tiles,
)
from kernels.engines.attention.triton_paged_latent_calls import FLOAT32_WIDTH, WIDEST, attend_latent
from kernels.engines.attention.triton_work import work_of
from kernels.ops.multi_latent_attention.composed import attend_joined, mla
from kernels.ops.multi_latent_attention.contract import decode_op, op, paged_op, scale_of
from kernels.ops.multi_latent_attention.heads import up_projected
from kernels.toolchains.triton import compute_capability

_attend_joined = attend_joined("triton_gpu")


def _attend(
    parts,
    mask,
    softmax_aux,
    scale,
    logits_soft_cap,
    deterministic,  # always deterministic: only a backward uses atomic adds
):
    if compute_capability() != 90:
        return _attend_joined(parts, mask, softmax_aux, scale, logits_soft_cap, deterministic)
    query, key_value, w_kc, w_vc, query_rope, key_rope = parts
    key, value = up_projected(key_value, w_kc, w_vc)
    wide = query.shape[-1] + query_rope.shape[-1]
    queries, keys = (jax.ShapeDtypeStruct((*x.shape[:3], wide), x.dtype) for x in (query, key))
    config = warp_specialized_tiles(wide, value.shape[-1], query.dtype.itemsize, scale, logits_soft_cap)
    call = prepare(queries, keys, value, mask, None, None, None, scale, logits_soft_cap, 0.0, config)
    return warp_specialized_forward(
        call,
        config.fwd_params,
        query,
        key,
        value,
        (query_rope, key_rope[:, :, None]),
        sink_ptr=None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1),
        work=work_of(queries, keys, value, call.mask, (1, 1)),
    )


def _rejects(call: Any) -> str | None:
    H, Hr, HV = (call.dims.get(name, 0) for name in ("H", "Hr", "Hv"))
    if not splits(H, Hr, HV):
        return f"H = {H}, Hr = {Hr} and Hv = {HV}, but the kernel with separate parts is for H = 128, Hr = 8 to 64, Hv <= 128"
    if call.mask is not None and call.mask.attention_mask is not None:
        return "the kernel with separate parts takes no dense mask"
    scale = scale_of(call.softmax_scale, call.query, call.query_rope)
    tiles = warp_specialized_tiles(H + Hr, HV, call.query.dtype.itemsize, scale, call.logits_soft_cap)
    if tiles.fwd_params.num_warps != WARP_SPECIALIZED:
        return f"Hopper's kernel takes Hv = 40 to 128 in multiples of 8 and a positive scale, got Hv = {HV} and {scale}"
    return None


def multi_latent_ragged_page_attention(
    query, query_rope, kv_cache, kv_lens, block_tables, query_start_loc, softmax_scale, sliding_window, logits_soft_cap
):
    lens, tables, cuts = (x.astype(jnp.int32) for x in (kv_lens, block_tables, query_start_loc))
    options = {"softmax_scale": softmax_scale, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    return attend_latent(query, query_rope, kv_cache, Requests(lens, tables, cuts), **options)[0]


def mla_decode(query, query_rope, kv_cache, kv_lens, softmax_scale, sliding_window, logits_soft_cap):
    """A row of the cache is one page."""
    B, T, N, _ = query.shape
    options = {"softmax_scale": softmax_scale, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    rows, turned = (x.reshape(B * T, N, -1) for x in (query, query_rope))
    out, lse = attend_latent(rows, turned, kv_cache, Requests(kv_lens.astype(jnp.int32), None, each=T), **options)
    return out.reshape(query.shape), lse.reshape(B, T, N)


def _rejects_cache(call: Any) -> str | None:
    arrays = (getattr(call, name, None) for name in ("query", "query_rope", "kv_cache", "block_tables"))
    if any(x is not None and 0 in x.shape for x in arrays):
        return "an array has no elements"
    R, most = call.dims["R"], FLOAT32_WIDTH if call.query.dtype.itemsize == 4 else WIDEST
    return f"R = {R}, but latents of {call.query.dtype} are at most {most} wide" if R > most else None


paged_op.register(
    multi_latent_ragged_page_attention,
    platforms={"cuda"},
    dtypes={"bfloat16", "float16", "float32"},
    rejects=_rejects_cache,
)
decode_op.register(
    mla_decode,
    name="triton_gpu",
    platforms={"cuda"},
    dtypes={"bfloat16", "float16", "float32"},
    rejects=_rejects_cache,
)
op.register(
    *mla("triton_gpu", _attend),
    name="triton_gpu",
    symbolic=set(),
    platforms={"cuda"},
    dtypes={"bfloat16", "float16"},
    rejects=_rejects,
)
