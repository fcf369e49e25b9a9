"""Launches the Triton and Gluon kernels of flash attention on NVIDIA GPUs, and chooses their block sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton

from kernels.engines.attention.gluon_gradients import warp_specialized_bwd_kernel
from kernels.engines.attention.gluon_parts import BLOCK_OF_SUMS
from kernels.engines.attention.gluon_parts import ROW as ROW_OF_STATISTICS
from kernels.engines.attention.gluon_wide import warp_specialized_wide_bwd_kernel
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.softmax import sink_gradient
from kernels.engines.attention.triton_calls import (
    THREE_WARPGROUPS,
    WARP_SPECIALIZED,
    WIDEST,
    Call,
    block_of,
    config_of,
    padded_width,
    plain_tiles,
    prepare,
    scale_of,
    statistics_by_head,
    warp_specialized_forward,
    warp_specialized_tiles,
)
from kernels.engines.attention.triton_gradients import (
    bias_gradient_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from kernels.engines.attention.triton_kernels import forward_kernel
from kernels.engines.attention.triton_shares import ENOUGH, makespan
from kernels.engines.attention.triton_work import work_of, work_of_call
from kernels.framework.config import BwdParams
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.execute import Saved
from kernels.framework.platforms import Unsupported
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.flash_attention.contract import op
from kernels.ops.flash_attention.xla import FEATURES
from kernels.toolchains.triton import compute_capability, tensor_descriptor

# Length from which they are faster: in shorter rows, such large blocks have too many hidden pairs.
LONG = 4096
# How many times as fast as two they are in rows of all keys and in causal ones, of which more is hidden, where none of the
# device is idle: fitted to seven shapes on an H200, of each of which the faster is then chosen.
TWO_WARPGROUPS, THREE_OF_ALL, THREE_OF_CAUSAL = 128, 1.17, 1.08
# Features that the warp-specialized kernels lack, by argument.
_NOT_SPECIALISED = {
    "bias": "bias_ptr", "alibi_slopes": "slope_ptr", "dropout_prob": "seed_ptr", "attention_mask": "dense_ptr",
}  # fmt: skip


def _params(call: Call, params: Any, itemsize: int) -> Any:
    """Returns the tiles to launch with: the plain kernels' tiles if warp-specialized ones are given but the call is not
    compiled for Hopper.

    Raises:
      ValueError: warp-specialized tiles are given that have no kernel for the call.
    """
    if params.num_warps != WARP_SPECIALIZED:
        return params
    H, HV = call.options["H"], call.options["HV"]
    direction = "bwd_params" if isinstance(params, BwdParams) else "fwd_params"
    defaults = getattr(warp_specialized_tiles(H, HV, itemsize, call.options["SCALE"], call.options["CAP"]), direction)
    asks = [name for name, array in _NOT_SPECIALISED.items() if call.arrays[array] is not None]
    # The backward also allows blocks of 64 queries, and the forward of narrow heads a third warpgroup.
    queries = {defaults.q_blocksize}
    if isinstance(params, BwdParams):
        queries.add(64)
    elif padded_width(H) <= 64:
        queries.add(THREE_WARPGROUPS)
    blocks = params.q_blocksize in queries and params.kv_blocksize == defaults.kv_blocksize
    if asks or not blocks or defaults.num_warps != WARP_SPECIALIZED:
        raise ValueError(
            f"flash_attention: argument 'cfg': {direction} has {WARP_SPECIALIZED} warps, which select the Hopper kernel, with "
            f"blocks of {params.q_blocksize} queries and {params.kv_blocksize} keys"
            + (f"; it does not take {' or '.join(asks)}" if asks else f"; for this call it has {defaults}")
            + ": use 4 or 8 warps"
        )
    if compute_capability() != 90:
        return getattr(plain_tiles(padded_width(max(H, HV)), itemsize), direction)
    return params


def forward(
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,  # always deterministic: only a backward uses atomic adds
    cfg,
):
    call = prepare(
        query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
    )
    (B, T, N, _), params = query.shape, _params(call, cfg.fwd_params, query.dtype.itemsize)
    blocks = params.q_blocksize, params.kv_blocksize
    rest: dict[str, Any] = {
        "sink_ptr": None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1),
        "work": work_of(query, key, value, call.mask, (1, 1)),
    }
    if params.num_warps == WARP_SPECIALIZED:
        return warp_specialized_forward(call, params, query, key, value, **rest)
    out = jax.ShapeDtypeStruct((B, T, N, value.shape[3]), query.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    grid = (triton.cdiv(T, blocks[0]) * N * B,)
    plain = (query, key, value), call.spans(*blocks)[0], blocks, params
    return call.launch(forward_kernel, *plain, out_shape=out, grid=grid, **rest)


def warp_specialized_gradients(
    call: Call, saved: Saved, query, key, value, params: Any, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (`sums`, float32 like the queries, with the gradient of the queries over their scale added in its place; those of
    the keys and of the values). Where `value` is None and values are beside keys, their gradients are too."""
    (B, T), S, K = query.shape[:2], key.shape[1], call.options["K"]
    q_block, k_block = blocks = params.q_blocksize, params.kv_blocksize
    wide, tall = call.options["BLOCK_H"], call.options["BLOCK_V"]
    length = triton.cdiv(T, q_block) * q_block
    lse, delta = (
        tensor_descriptor(x, x.shape, (1, q_block), ROW_OF_STATISTICS.value)
        for x in statistics_by_head(call, saved, length)
    )
    if wide <= 128:
        kernel, columns, how = warp_specialized_bwd_kernel, wide, {"num_warps": 8, "PRODUCER_REGISTERS": 24}
    else:  # as many columns as TMA swizzles; registers chosen so that products are not serialised and little spills
        kernel, columns = warp_specialized_wide_bwd_kernel, 32
        how = {"num_warps": 4, "KEY_REGISTERS": 216, "QUERY_REGISTERS": 64}
    arrays = (
        block_of(sums, q_block, columns, BLOCK_OF_SUMS),
        block_of(saved.d_out.astype(query.dtype), q_block, tall),
        block_of(query, q_block, wide),
        block_of(key, k_block, wide),
        block_of(key if value is None else value, k_block, tall),
        lse,
        delta,
    )
    spans, work = call.known_spans(*blocks)[1], work_of_call(call, query.dtype, (3, 2))
    call = call.shared(spans, length // q_block, params.shares)
    shares, spans = call.options["SHARES"], jnp.asarray(spans)

    def gradient_of(x: jax.Array | None) -> jax.ShapeDtypeStruct:
        if x is None:
            return jax.ShapeDtypeStruct((1,), query.dtype)
        shape = (B, S, K * shares, x.shape[3])
        return jax.ShapeDtypeStruct(shape, x.dtype if shares == 1 else jnp.float32)

    d_key, d_value, d_query = call.launch_with(
        kernel,
        arrays,
        spans,
        blocks,
        side_ptr=call.side_by_side(spans, q_block, query.dtype.itemsize),
        out_shape=(
            gradient_of(key),
            gradient_of(value),
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
        ),
        aliases={"dq_desc": 2},
        grid=(triton.cdiv(S, k_block) * K * shares * B,),
        work=work,
        STAGES=params.num_stages,
        **how,
    )
    if shares > 1:
        grads = (d_key, d_value) if value is not None else (d_key,)
        d_key, d_value = [*(x.reshape(B, S, K, shares, -1).sum(3).astype(key.dtype) for x in grads), d_value][:2]
    return d_query, d_key, d_value


def backward(
    saved: Saved,
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,
    cfg,
):
    call = prepare(
        query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
    )
    if deterministic and cfg.bwd_params.num_warps == WARP_SPECIALIZED:
        raise Unsupported(
            f"flash_attention on triton_gpu: cfg.bwd_params.num_warps = {WARP_SPECIALIZED} does not support "
            "deterministic=True: that kernel adds the gradient of the queries in arbitrary order; omit num_warps, or "
            "use 4 or 8"
        )
    (B, T, N, _), S, K = query.shape, *key.shape[1:3]
    params = _params(call, cfg.bwd_params, query.dtype.itemsize)
    if params.num_warps == WARP_SPECIALIZED:
        sums = jnp.zeros(query.shape, jnp.float32)
        sums, d_key, d_value = warp_specialized_gradients(call, saved, query, key, value, params, sums)
        d_query = (sums * call.options["SCALE"]).astype(query.dtype)
        gradients = {"query": d_query, "key": d_key, "value": d_value}
        if softmax_aux is not None:
            gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
        return gradients
    # Resident blocks have the same size in both passes, and so have streamed ones: queries in one, keys in the other.
    moving, staying = params.q_blocksize, params.kv_blocksize
    first = saved.d_out.astype(query.dtype), saved.lse, saved.delta, query, key, value
    whole = bias is not None and bias.shape == (B, N, T, S)
    d_bias = jnp.zeros(bias.shape, jnp.float32) if whole else None
    parts = 1 if alibi_slopes is None else triton.cdiv(T, staying)
    out_shape = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((B, N, parts), jnp.float32),
    ]
    if whole:
        out_shape.append(jax.ShapeDtypeStruct(bias.shape, jnp.float32))
    d_query, d_slope, *d_bias = call.launch(
        query_gradient_kernel,
        (d_bias, *first),
        call.spans(staying, moving)[0],
        (staying, moving),
        params,
        out_shape=tuple(out_shape),
        input_output_aliases={0: 2} if whole else {},
        grid=(triton.cdiv(T, staying) * N * B,),
        work=work_of(query, key, value, call.mask, (2, 1)),
    )
    d_key, d_value = call.launch(
        key_gradient_kernel,
        first,
        call.spans(moving, staying)[1],
        (moving, staying),
        params,
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        grid=(triton.cdiv(S, staying) * K * B,),
        work=work_of(query, key, value, call.mask, (2, 2)),
    )
    gradients = {"query": d_query, "key": d_key, "value": d_value}
    if bias is not None:
        if not whole:
            blocks = tuple(1 if n == 1 else triton.cdiv(n, staying) for n in bias.shape[2:])
            d_bias = call.launch(
                bias_gradient_kernel,
                first,
                call.spans(staying, staying)[0],
                (staying, staying),
                params,
                out_shape=(jax.ShapeDtypeStruct(bias.shape, jnp.float32),),
                grid=(math.prod((*bias.shape[:2], *blocks)),),
                work=work_of(query, key, value, call.mask, (1, 1)),
            )
        gradients["bias"] = d_bias[0]
    if alibi_slopes is not None:
        slopes = d_slope.sum(-1)
        gradients["alibi_slopes"] = slopes if alibi_slopes.shape[0] == B else slopes.sum(0, keepdims=True)
    if softmax_aux is not None:
        gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return gradients


# -- configurations ---------------------------------------------------------------------------------------------------


def _heuristic(call: Any, platform: str) -> FlashAttentionConfig:
    H, HV, itemsize = call.dims["H"], call.dims["Hv"], call.query.dtype.itemsize
    plain = plain_tiles(padded_width(max(H, HV)), itemsize)
    dense = call.mask is not None and call.mask.attention_mask is not None
    if dense or call.bias is not None or call.alibi_slopes is not None or call.dropout_prob > 0 or call.dims["T"] <= 64:
        return plain
    config = warp_specialized_tiles(H, HV, itemsize, scale_of(call.softmax_scale, H), call.logits_soft_cap)
    if config.fwd_params.num_warps == WARP_SPECIALIZED and padded_width(H) <= 64 and _suits_three(call):
        three = dataclasses.replace(config.fwd_params, q_blocksize=THREE_WARPGROUPS)
        config = FlashAttentionConfig(three, config.bwd_params)
    # The one-pass backward is not deterministic.
    return FlashAttentionConfig(config.fwd_params, plain.bwd_params) if call.deterministic else config


def _suits_three(call: Any) -> bool:
    """Returns whether three warpgroups are faster: in long rows, without features that need more registers, where their larger
    tiles leave no more of the device idle at the end than they gain."""
    mask = MaskInfo() if call.mask is None else call.mask
    more = set(mask.used) - {"causal", "q_positions", "kv_positions"}
    bare = not more and call.softmax_aux is None and call.logits_soft_cap is None
    T, S = call.dims["T"], call.dims["S"]
    if min(T, S) < LONG or not bare:
        return False
    heads, blocks = call.dims["B"] * call.dims["N"], -(-T // THREE_WARPGROUPS)
    if blocks * heads >= ENOUGH * MULTIPROCESSORS or mask.q_positions is not None or mask.kv_positions is not None:
        return True

    def time(queries: int) -> float:
        ends = np.minimum(np.arange(-(-T // queries), 0, -1) * queries, T)
        keys = np.clip(ends + S - T, 0, S) if mask.causal else np.full(len(ends), S)
        # The first block of keys of a tile, whose products and weights follow one another, takes twice as long.
        return queries * makespan(np.ceil(keys / 128)[None] + 1, heads, heads)

    return time(THREE_WARPGROUPS) < (THREE_OF_CAUSAL if mask.causal else THREE_OF_ALL) * time(TWO_WARPGROUPS)


def _candidates(call: Any) -> list[FlashAttentionConfig]:
    H, itemsize = call.dims["H"], call.query.dtype.itemsize
    first = _heuristic(call, "cuda")
    configs = [first]
    if first.fwd_params.num_warps == WARP_SPECIALIZED and padded_width(H) <= 64:
        both = (dataclasses.replace(first.fwd_params, q_blocksize=queries) for queries in (128, THREE_WARPGROUPS))
        configs += [FlashAttentionConfig(forward, first.bwd_params) for forward in both]
    configs.append(plain_tiles(padded_width(max(H, call.dims["Hv"])), itemsize))
    if itemsize == 2:
        others = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)]
        backwards = [(64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (64, 64, 8, 2)]
        configs += [config_of(*pair) for pair in zip(others, backwards, strict=True)]
    return list(dict.fromkeys(configs))


def _rejects(call: Any) -> str | None:
    for name in ("H", "Hv"):
        if call.dims[name] > WIDEST:
            return f"{name} = {call.dims[name]} exceeds the maximum of {WIDEST}"
    return None


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    features=FEATURES,
    rejects=_rejects,
    heuristic=_heuristic,
    candidates=_candidates,
    version=2,
)
