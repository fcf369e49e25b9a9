"""The hops of a ring on Hopper, see `hops.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.tiles import FIRST, LAST
from kernels.engines.attention.triton_calls import (
    WARP_SPECIALIZED,
    Call,
    prepare,
    warp_specialized_forward,
)
from kernels.engines.attention.triton_work import work_of_call
from kernels.framework.config import KernelConfig
from kernels.framework.execute import Saved
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.flash_attention.hops import TILE, Heads
from kernels.ops.flash_attention.triton_gpu import warp_specialized_gradients
from kernels.toolchains.triton import compute_capability

# Blocks of queries for each multiprocessor up to which all heads run side by side. 32,768 tokens of 32 heads are 62: a hop over
# one document took 1.03 times as long on an H200 with all of them.
FEW = 32


def fitting(call: Any, cfg: KernelConfig) -> KernelConfig | None:
    """Returns the configuration of the hops of calls like this one, from that of a call by itself; None where that is not of
    Hopper's kernels, or heads are wider than a tile."""
    try:
        if compute_capability() != 90:
            return None
    except RuntimeError:  # no GPU is here, and nobody compiles for one
        return None
    forward, backward = cfg.fwd_params, cfg.bwd_params
    widest = max(call.dims["H"], call.dims["Hv"])
    if {forward.num_warps, backward.num_warps} != {WARP_SPECIALIZED} or widest > TILE:
        return None
    return replace(cfg, fwd_params=replace(forward, q_blocksize=TILE))


def _prepared(
    query: Any,
    key: Any,
    value: Any,
    mask: MaskInfo,
    of_tiles: MaskInfo,
    options: dict[str, Any],
    cfg: KernelConfig,
    heads: Heads | None,
    of_keys: Heads | None = None,
) -> Call:
    scale, cap = options["softmax_scale"], options["logits_soft_cap"]
    joined, width = value is None, query.shape[3]
    first, count = (0, key.shape[2]) if of_keys is None else of_keys
    widths = (width, key.shape[3] - width) if value is None else (width, value.shape[3])
    key, value = (jax.ShapeDtypeStruct((*key.shape[:2], count, n), key.dtype) for n in widths)
    call = prepare(query, key, value, mask, None, None, None, scale, cap, 0.0, cfg)
    more = {"JOINED": joined, "RUNS": mask.q_positions is not None}
    call = call._replace(of_tiles=of_tiles.resolved(), options={**call.options, **more})
    return call if heads is None else call.of_heads(*heads, first)


def _longest_first(call: Call, spans: jax.Array) -> Call:
    """Returns a call whose blocks come in the order of how many others they meet. A launch has few blocks for each
    multiprocessor, and of packed documents a long one may be last: of the keys of four ranks with 8,192 tokens, documents of
    4,096 and two key heads a launch, the last program of the backward would end 1.5 times as late."""
    order = jnp.argsort(spans[..., FIRST] - spans[..., LAST], axis=-1).astype(jnp.int32)
    options = {**call.options, "LIST_BATCH": min(order.shape[0] - 1, 1)}
    return call._replace(arrays={**call.arrays, "order_ptr": order}, options=options)


def _side_by_side(call: Call) -> int | None:
    """Returns how many heads of a forward run side by side. Of few blocks all, so that the longest of all heads come first: of
    eight at a time the last eight begin with theirs when others are through, and a launch of 16 heads over the packed keys of
    eight ranks takes 1.3 times as long. Of many blocks None, as a call by itself has it: their end is a small part, and more of
    what they read stays in the cache."""
    heads = call.options["PART"] or call.options["N"]
    blocks = triton.cdiv(call.options["T"], TILE) * heads * call.options["B"]
    return heads if blocks <= FEW * MULTIPROCESSORS else None


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    mask: MaskInfo,
    of_tiles: MaskInfo,
    sofar: tuple[jax.Array, jax.Array] | None,
    into: tuple[jax.Array, jax.Array] | None,
    table: jax.Array | None,
    dtype: Any,
    options: dict[str, Any],
    cfg: KernelConfig,
    heads: Heads | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `Hops.attend`."""
    call = _prepared(query, key, value, mask, of_tiles, options, cfg, heads)
    call = call if table is None else call.with_tiles(table)
    call = _longest_first(call, call.spans(TILE, cfg.fwd_params.kv_blocksize or TILE)[0])
    how = {
        "side": _side_by_side(call),
        "sofar": sofar,
        "into": into,
        "dtype": dtype,
        "sink_ptr": None,
        "work": work_of_call(call, query.dtype, (1, 1)),
    }
    return warp_specialized_forward(call, cfg.fwd_params, query, key, value, **how)


def pull(
    saved: dict[str, jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    mask: MaskInfo,
    of_tiles: MaskInfo,
    sums: jax.Array,
    options: dict[str, Any],
    cfg: KernelConfig,
    heads: Heads | None = None,
    of_keys: Heads | None = None,
) -> tuple[jax.Array, ...]:
    """As `Hops.pull`."""
    call = _prepared(query, key, value, mask, of_tiles, options, cfg, heads, of_keys)
    call = _longest_first(call, call.spans(cfg.bwd_params.q_blocksize or TILE, cfg.bwd_params.kv_blocksize or TILE)[1])
    grads = warp_specialized_gradients(call, Saved(saved), query, key, value, cfg.bwd_params, sums)
    return grads[:2] if value is None else grads
