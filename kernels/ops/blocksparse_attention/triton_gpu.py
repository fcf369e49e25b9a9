"""Block-sparse attention for NVIDIA GPUs: the kernels of flash attention over lists of tiles, forward and backward.

A tile divides a block, so the kernels know nothing of blocks: they loop over a list of tiles (`tiles.py`) instead of a span.
The backward has two passes with separate lists and accumulates nothing in memory, so results are bitwise reproducible.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.gluon_kernels import warp_specialized_fwd_kernel
from kernels.engines.attention.gluon_parts import ROW
from kernels.engines.attention.gluon_pass_keys import warp_specialized_dkdv_kernel
from kernels.engines.attention.gluon_pass_queries import warp_specialized_dq_kernel
from kernels.engines.attention.gluon_passes import PADDED, ROWS
from kernels.engines.attention.softmax import sink_gradient
from kernels.engines.attention.triton_calls import (
    SHARED_MEMORY,
    WARP_SPECIALIZED,
    WIDEST,
    block_of,
    bytes_of,
    padded_width,
    plain_tiles,
    prepare,
    scale_of,
    statistics_by_head,
    warp_specialized_tiles,
)
from kernels.engines.attention.triton_gradients import key_gradient_kernel, query_gradient_kernel
from kernels.engines.attention.triton_kernels import forward_kernel
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.execute import Saved
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.blocksparse_attention import tiles, triton_lists
from kernels.ops.blocksparse_attention.contract import FEATURES, BlockSparseConfig, check_blocks, op
from kernels.toolchains.triton import compute_capability, tensor_descriptor

# The shortest side of a block: the minimum number of rows of a Triton product.
SHORTEST = 16
# The widest heads of the Hopper kernels over lists: for wider ones the gradients of keys and values do not fit the registers
# of a warpgroup.
WIDEST_SPECIALISED = 128
# Registers per thread at the start of a program that shares its multiprocessor with another one.
SHARING = 128


class _Blocks:
    """A call in the kernels' form, with the lists of its tiles."""

    def __init__(self, query, key, value, block_mask, mask, block_size, softmax_scale, logits_soft_cap, cfg):
        (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
        check_blocks(block_mask, block_size, B, T, S, N, K)
        _check_tiles(block_size, cfg)
        self.call = prepare(query, key, value, mask, None, None, None, softmax_scale, logits_soft_cap, 0.0, cfg)
        self._block_mask, self._block_size, self._group = block_mask, block_size, N // K

    def _kinds(self, tile: tuple[int, int]) -> jax.Array:
        lengths = self.call.options["T"], self.call.options["S"]
        return tiles.kinds(self._block_mask, self.call.mask, lengths, self._block_size, tile)

    def by_query(self, tile: tuple[int, int]) -> tuple[Any, jax.Array]:
        """Returns (the call with the lists of query tiles, the ends of the lists)."""
        tile_map = triton_lists.lists(self._kinds(tile))
        return self.call.with_lists(tile_map.index, tile_map.order), tile_map.ends

    def by_key(self, tile: tuple[int, int]) -> tuple[Any, jax.Array]:
        """Returns the same for key tiles."""
        tile_map = triton_lists.lists(self._kinds(tile).swapaxes(2, 3), self._group)
        return self.call.with_lists(tile_map.index, tile_map.order), tile_map.ends


def _check_tiles(block_size: tuple[int, int], cfg: BlockSparseConfig) -> None:
    """Raises ValueError if the tiles of a configuration do not divide the blocks, or the Hopper kernels do not support them."""
    for name in ("fwd_params", "bwd_params"):
        params = getattr(cfg, name)
        sides = _tile(params)
        if uneven := [side for side in sides if side & (side - 1)]:
            raise ValueError(
                f"blocksparse_attention: argument 'cfg': {name}: the side of a tile = {uneven[0]} is not a power of 2"
            )
        if any(size % side for size, side in zip(block_size, sides, strict=True)):
            raise ValueError(
                f"blocksparse_attention: argument 'cfg': {name} has tiles of {sides[0]} queries and {sides[1]} keys, which do "
                f"not divide blocks of {block_size}: a tile must be within one block; use sides that divide those of a block"
            )
        if params.num_warps == WARP_SPECIALIZED and not set(sides) <= {64, 128}:
            raise ValueError(
                f"blocksparse_attention: argument 'cfg': {name} has {WARP_SPECIALIZED} warps, which select "
                f"the Hopper kernels, with tiles of {sides[0]} queries and {sides[1]} keys: they need 64 or 128 of each; use "
                "4 or 8 warps for other tiles"
            )


def _tile(params: FwdParams) -> tuple[int, int]:
    """Returns (queries, keys) per tile."""
    assert params.q_blocksize and params.kv_blocksize
    return params.q_blocksize, params.kv_blocksize


def _is_warp_specialized(params: FwdParams) -> bool:
    """Returns whether the Hopper kernels run: the configuration selects them, and the program is compiled for Hopper."""
    return params.num_warps == WARP_SPECIALIZED and compute_capability() == 90


def _plain(call: Any, params: FwdParams, itemsize: int) -> FwdParams:
    """Returns the tiles for the plain kernels; if `params` is for the Hopper kernels, tiles that divide its tiles."""
    if params.num_warps != WARP_SPECIALIZED:
        return params
    config = _plain_config(call.options["BLOCK_H"], itemsize, _tile(params))
    return config.bwd_params if isinstance(params, BwdParams) else config.fwd_params


def _work(query, key, value, block_mask, matmuls: tuple[int, int]) -> Work:
    """Returns the work of `matmuls` products over the widths of keys and of values, assuming that a tenth of the blocks are
    set: the actual number is known only at run time."""
    (B, T, N, H), S, HV = query.shape, key.shape[1], value.shape[3]
    return Work(2 * (B * N * T * S // 10) * (matmuls[0] * H + matmuls[1] * HV), 2 * nbytes(query, key, value))


def _side_by_side(heads: int, most: int) -> int:
    """Returns the number of heads whose programs run side by side, so that the keys that they share stay in the cache."""
    return next(n for n in (8, 4, 2, 1) if n <= most and heads % n == 0)


def forward(query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg):
    blocks = _Blocks(query, key, value, block_mask, mask, block_size, softmax_scale, logits_soft_cap, cfg)
    (B, T, N, _), K, params = query.shape, key.shape[2], cfg.fwd_params
    rest: dict[str, Any] = {
        "sink_ptr": None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1),
        "work": _work(query, key, value, block_mask, (1, 1)),
    }
    out = jax.ShapeDtypeStruct((B, T, N, value.shape[3]), query.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    if not _is_warp_specialized(params):
        params = _plain(blocks.call, params, query.dtype.itemsize)
        tile = _tile(params)
        call, ends = blocks.by_query(tile)
        grid = (math.ceil(T / tile[0]) * N * B,)
        return call.launch(forward_kernel, (query, key, value), ends, tile, params, out_shape=out, grid=grid, **rest)
    tile = _tile(params)
    call, ends = blocks.by_query(tile)
    wide, tall = call.options["BLOCK_H"], call.options["BLOCK_V"]
    one = tile[0] == ROWS.value  # one warpgroup attends, and two programs share a multiprocessor
    room = SHARED_MEMORY // (2 if one else 1)
    *results, _ = call.launch_with(
        warp_specialized_fwd_kernel,
        (
            jnp.zeros(1, jnp.int32),
            block_of(query, ROWS.value, wide),
            block_of(key, tile[1], wide),
            block_of(value, tile[1], tall),
        ),
        ends,
        tile,
        out_shape=(*out, jax.ShapeDtypeStruct((1,), jnp.int32)),
        input_output_aliases={0: 2},
        grid=(min(math.ceil(T / tile[0]) * N * B, MULTIPROCESSORS * (2 if one else 1)),),
        max_registers=SHARING if one else None,
        HEADS=_side_by_side(N, N // K),
        STAGES=params.num_stages,
        QUEUED=2 if bytes_of(2, params, wide, tall) <= room else 1,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        **rest,
    )
    return tuple(results)


def backward(
    saved: Saved, query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg
):
    blocks = _Blocks(query, key, value, block_mask, mask, block_size, softmax_scale, logits_soft_cap, cfg)
    run = _warp_specialized_gradients if _is_warp_specialized(cfg.bwd_params) else _plain_gradients
    gradients = run(blocks, saved, query, key, value, block_mask, cfg.bwd_params)
    if softmax_aux is not None:
        gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return gradients


def _plain_gradients(blocks, saved, query, key, value, block_mask, params) -> dict[str, jax.Array]:
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    params = _plain(blocks.call, params, query.dtype.itemsize)
    tile = _tile(params)
    first = saved.d_out.astype(query.dtype), saved.lse, saved.delta, query, key, value
    call, ends = blocks.by_query(tile)
    parts = jax.ShapeDtypeStruct((B, N, 1), jnp.float32)  # for the gradient of slopes, unused in this operation
    d_query, _ = call.launch(
        query_gradient_kernel,
        (None, *first),
        ends,
        tile,
        params,
        out_shape=(jax.ShapeDtypeStruct(query.shape, query.dtype), parts),
        grid=(math.ceil(T / tile[0]) * N * B,),
        work=_work(query, key, value, block_mask, (2, 1)),
    )
    call, ends = blocks.by_key(tile)
    d_key, d_value = call.launch(
        key_gradient_kernel,
        first,
        ends,
        tile,
        params,
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        grid=(math.ceil(S / tile[1]) * K * B,),
        work=_work(query, key, value, block_mask, (2, 2)),
    )
    return {"query": d_query, "key": d_key, "value": d_value}


def _warp_specialized_gradients(blocks, saved, query, key, value, block_mask, params) -> dict[str, jax.Array]:
    (B, T, N, _), (S, K), rows = query.shape, key.shape[1:3], ROWS.value
    q_tile, k_tile = _tile(params)
    wide, tall = blocks.call.options["BLOCK_H"], blocks.call.options["BLOCK_V"]
    lse, delta = statistics_by_head(blocks.call, saved, math.ceil(T / PADDED.value) * PADDED.value)
    arrays = (
        block_of(saved.d_out.astype(query.dtype), rows, tall),
        block_of(query, rows, wide),
        block_of(key, rows, wide),
        block_of(value, rows, tall),
    )

    def how(staying: int) -> dict[str, Any]:
        one = staying == rows
        return {
            "STAGES": 2 if one else params.num_stages,
            "max_registers": SHARING if one else None,
            "CONSUMER_REGISTERS": 240,
            "PRODUCER_REGISTERS": 24,
        }

    call, ends = blocks.by_query((q_tile, rows))
    (d_query,) = call.launch_with(
        warp_specialized_dq_kernel,
        (*arrays, lse, delta),
        ends,
        (q_tile, rows),
        out_shape=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        grid=(math.ceil(T / q_tile) * N * B,),
        work=_work(query, key, value, block_mask, (2, 1)),
        HEADS=_side_by_side(N, N // K),
        **how(q_tile),
    )
    call, ends = blocks.by_key((rows, k_tile))
    d_key, d_value = call.launch_with(
        warp_specialized_dkdv_kernel,
        (*arrays, *(tensor_descriptor(x, x.shape, (1, rows), ROW.value) for x in (lse, delta))),
        ends,
        (rows, k_tile),
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        grid=(math.ceil(S / k_tile) * K * B,),
        work=_work(query, key, value, block_mask, (2, 2)),
        HEADS=1,
        **how(k_tile),
    )
    return {"query": d_query, "key": d_key, "value": d_value}


# -- configurations -----------------------------------------------------------------------------------------------------


def _side(size: int, most: int) -> int:
    """Returns the longest side of a tile that divides the side of a block, a power of two."""
    return min(size & -size, most)


def _plain_config(width: int, itemsize: int, block_size: tuple[int, int]) -> BlockSparseConfig:
    """Returns the tiles of the plain kernels for heads padded to `width` entries."""
    default = plain_tiles(width, itemsize)

    def params(kind: type, of: FwdParams) -> Any:
        sides = (_side(size, most) for size, most in zip(block_size, _tile(of), strict=True))
        return kind(*sides, 4 if min(block_size) < 64 else of.num_warps, of.num_stages)

    return BlockSparseConfig(
        fwd_params=params(FwdParams, default.fwd_params), bwd_params=params(BwdParams, default.bwd_params)
    )


def _heuristic(call: Any, platform: str) -> BlockSparseConfig:
    H, HV, itemsize, mask = call.dims["H"], call.dims["Hv"], call.query.dtype.itemsize, call.mask
    width = padded_width(max(H, HV))
    scale = scale_of(call.softmax_scale, H)
    specialised = warp_specialized_tiles(H, HV, itemsize, scale, call.logits_soft_cap).fwd_params
    looked_at = mask is not None and mask.attention_mask is not None
    if (
        specialised.num_warps != WARP_SPECIALIZED
        or width > WIDEST_SPECIALISED
        or looked_at
        or any(n % 64 for n in call.block_size)
    ):
        return _plain_config(width, itemsize, call.block_size)
    q_tile, k_tile = (_side(size, 128) for size in call.block_size)
    forward = FwdParams(q_tile, 64 if q_tile == 64 else k_tile, WARP_SPECIALIZED, 2)
    return BlockSparseConfig(fwd_params=forward, bwd_params=BwdParams(q_tile, k_tile, WARP_SPECIALIZED, 3))


def _candidates(call: Any) -> list[BlockSparseConfig]:
    first = _heuristic(call, "cuda")
    width = padded_width(max(call.dims["H"], call.dims["Hv"]))
    return list(dict.fromkeys([first, _plain_config(width, call.query.dtype.itemsize, call.block_size)]))


def _rejects(call: Any) -> str | None:
    for name in ("H", "Hv"):
        if call.dims[name] > WIDEST:
            return f"{name} = {call.dims[name]} exceeds the maximum of {WIDEST}"
    if any(size % SHORTEST for size in call.block_size):
        return f"block_size = {call.block_size} must be multiples of {SHORTEST}, the minimum number of rows of a tile"
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
)
