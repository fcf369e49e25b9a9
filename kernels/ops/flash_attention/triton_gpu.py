"""Flash attention for NVIDIA GPUs in Triton: how its kernels are launched, and with which blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from kernels.engines.attention.gluon_gradients import specialised_gradient_kernel
from kernels.engines.attention.gluon_kernels import specialised_forward_kernel
from kernels.engines.attention.gluon_parts import BLOCK, BLOCK_OF_SUMS
from kernels.engines.attention.gluon_parts import ROW as ROW_OF_STATISTICS
from kernels.engines.attention.gluon_wide import specialised_wide_gradient_kernel
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import Edge, Interval, KeyRange
from kernels.engines.attention.tiles import spans
from kernels.engines.attention.triton_gradients import (
    bias_gradient_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from kernels.engines.attention.triton_kernels import forward_kernel
from kernels.engines.attention.triton_parts import OFFSET, POSITION, ROW, Options
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.execute import Saved
from kernels.framework.platforms import Unsupported
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.flash_attention.contract import op
from kernels.ops.flash_attention.xla import FEATURES, sink_gradient
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

WIDEST = 256
# Warps of a program of Hopper's kernels, which specialise them: three warpgroups. A plain program has a power of two.
SPECIALISED = 12
# Queries of a block of three warpgroups, which the forward of heads up to 64 can have; others have two.
THREE_WARPGROUPS = 192
# Tokens from which on they are faster: of fewer, blocks of so many queries have too many hidden pairs.
LONG = 4096
# What a program of theirs may have of shared memory, less what is not tiles.
SHARED_MEMORY = 220 * 1024
# The most heads whose programs run side by side: keys that are read, or queries, then stay in the cache. In the backward of
# wide heads the sums of several do not: one head at a time is a third faster on an H200 at 32k. That of narrow heads is as
# fast with 8 there, and faster at 8k.
SIDE_BY_SIDE = {
    specialised_forward_kernel.fn.__name__: 8,
    specialised_gradient_kernel.fn.__name__: 8,
    specialised_wide_gradient_kernel.fn.__name__: 1,
}
# What those kernels do not take, by the argument that asks for it.
_NOT_SPECIALISED = {
    "bias": "bias_ptr", "alibi_slopes": "slope_ptr", "dropout_prob": "seed_ptr", "attention_mask": "dense_ptr",
}  # fmt: skip


class _Call(NamedTuple):
    """A call as its kernels take it: arrays that are given, by the names of kernels' parameters, and what is compiled in."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    mask: MaskInfo

    def params(self, given: Any, itemsize: int) -> Any:
        """Returns the tiles to launch with: those of the plain kernels where Hopper's are given, and cannot be launched because
        it is not compiled for Hopper.

        Raises:
          ValueError: Hopper's are given, and have no kernel for the call.
        """
        if given.num_warps != SPECIALISED:
            return given
        H, HV = self.options["H"], self.options["HV"]
        direction = "bwd_params" if isinstance(given, BwdParams) else "fwd_params"
        made = getattr(_specialised(H, HV, itemsize, self.options["SCALE"], self.options["CAP"]), direction)
        asks = [name for name, array in _NOT_SPECIALISED.items() if self.arrays[array] is not None]
        # The backward has blocks of 64 queries wherever it has larger ones, the forward of narrow heads a third warpgroup.
        queries = {made.q_blocksize}
        if isinstance(given, BwdParams):
            queries.add(64)
        elif _width(H) <= 64:
            queries.add(THREE_WARPGROUPS)
        blocks = given.q_blocksize in queries and given.kv_blocksize == made.kv_blocksize
        if asks or not blocks or made.num_warps != SPECIALISED:
            raise ValueError(
                f"flash_attention: argument 'cfg': {direction} has {SPECIALISED} warps, those of the kernel for Hopper, with "
                f"blocks of {given.q_blocksize} queries and {given.kv_blocksize} keys"
                + (f"; it does not take {' or '.join(asks)}" if asks else f"; of this call it has {made}")
                + ": use 4 or 8 warps"
            )
        if compute_capability() != 90:
            return getattr(_plain(_width(max(H, HV)), itemsize), direction)
        return given

    def spans(self, q_block: int, k_block: int) -> tuple[jax.Array, jax.Array]:
        by_query, by_key = spans(self.mask, self.options["T"], self.options["S"], q_block, k_block)
        return jnp.asarray(by_query), jnp.asarray(by_key)

    def launch(
        self, kernel: Any, first: tuple, spans: jax.Array, blocks: tuple[int, int], params: FwdParams, **rest: Any
    ):
        """Returns the outputs of a kernel whose parameters are `first`, the spans and the arrays that it names.

        A block that stays in a program and one that passes are of `blocks` queries and keys.
        """
        warps, stages = params.num_warps or 4, params.num_stages or 2
        return self.launch_with(kernel, first, spans, blocks, num_warps=warps, num_stages=stages, **rest)

    def launch_specialised(
        self, kernel: Any, first: tuple, spans: jax.Array, blocks: tuple[int, int], heads: int, **rest: Any
    ):
        """Likewise of a kernel of Hopper, whose programs are those of so many heads."""
        most = SIDE_BY_SIDE[kernel.fn.__name__]
        side = next(n for n in (8, 4, 2, 1) if n <= most and heads % n == 0)
        return self.launch_with(kernel, first, spans, blocks, HEADS=side, **rest)

    def with_lists(self, index: jax.Array, order: jax.Array) -> _Call:
        """Returns the call over lists of tiles, whose ends kernels take for spans."""
        batch, heads = index.shape[:2]
        lists = {"LIST_BATCH": 0 if batch == 1 else heads, "LIST_HEAD": 0 if heads == 1 else 1}
        return self._replace(
            arrays={**self.arrays, "index_ptr": index, "order_ptr": order}, options={**self.options, **lists}
        )

    def launch_with(self, kernel: Any, first: tuple, spans: jax.Array, blocks: tuple[int, int], **rest: Any):
        q_block, k_block = blocks
        options = Options(**self.options, SPAN_BATCH=_stride(spans, 0), BLOCK_Q=q_block, BLOCK_K=k_block)
        names = [p.name for p in kernel.params if not p.is_constexpr]
        arrays = {name: value for name, value in self.arrays.items() if name in names}
        return triton_launch(kernel, *first, spans, O=options, **arrays, **rest)


def _stride(x: Any, dim: int) -> int:
    """Returns entries from one index of a dim to the next, 0 where there is only one, or no array."""
    return 0 if x is None or x.shape[dim] == 1 else math.prod(x.shape[dim + 1 :])


def _prepare(
    query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
) -> _Call:
    (B, T, N, H), (S, K), HV = query.shape, key.shape[1:3], value.shape[3]
    mask = MaskInfo() if mask is None else mask.resolved()
    keys = mask.key_range(T, S)
    seed = dropout_seed if dropout_prob > 0 else None
    dense = None if mask.attention_mask is None else mask.attention_mask.astype(jnp.int8)
    ends, coded = _ends(keys)
    arrays = {
        "q_at_ptr": mask.q_positions,
        "k_at_ptr": mask.kv_positions,
        "q_segment_ptr": mask.q_segment_ids,
        "k_segment_ptr": mask.kv_segment_ids,
        "ends_ptr": ends,
    }
    arrays = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    batch = {name.removesuffix("_ptr").upper() + "_BATCH": _stride(x, 0) for name, x in arrays.items()}
    arrays |= {"dense_ptr": dense, "bias_ptr": bias, "slope_ptr": alibi_slopes, "seed_ptr": seed}
    arrays |= {"index_ptr": None, "order_ptr": None}  # lists of tiles, in place of spans
    strides = {
        f"{name}_{part}": _stride(x, dim)
        for name, x in (("DENSE", dense), ("BIAS", bias))
        for dim, part in enumerate(("BATCH", "HEAD", "ROW", "COLUMN"))
    }
    options = dict(
        B=B,
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        HV=HV,
        SCALE=_scale(softmax_scale, H),
        CAP=logits_soft_cap,
        EXACT=logits_soft_cap is not None and _exact(query, cfg),
        **coded,
        SEGMENTS=mask.q_segment_ids is not None,
        THRESHOLD=min(round(dropout_prob * 2**32), 2**32 - 1),
        FACTOR=1 / (1 - dropout_prob),
        SLOPE_BATCH=_stride(alibi_slopes, 0),
        SEED_BATCH=_stride(seed, 0),
        SEED_HEAD=_stride(seed, 1),
        BLOCK_H=_width(H),
        BLOCK_V=_width(HV),
        **batch,
        **strides,
    )
    return _Call(arrays, options, mask)


def _ends(keys: KeyRange) -> tuple[Any, dict[str, tuple[int, int] | None]]:
    """Returns the ends of a range that are arrays, int32 [B|1, ends, T] or None, and `Options` of all of them."""
    coded: dict[str, tuple[int, int] | None] = {}
    arrays: list[Any] = []
    for name in Interval._fields:
        end = getattr(keys, name)
        if isinstance(end, Edge):
            coded[name.upper()] = (OFFSET if end.moves else POSITION).value, end.offset
        elif end is not None:
            coded[name.upper()] = ROW.value, len(arrays)
            arrays.append(end)
        else:
            coded[name.upper()] = None
    return jnp.stack(jnp.broadcast_arrays(*arrays), 1) if arrays else None, coded


def _exact(query: Any, cfg: FlashAttentionConfig) -> bool:
    """Returns whether a soft cap takes more than the instruction for tanh: where weights in 16 bits are more exact than what it
    is off by, and where the plain kernels, which have no such instruction, make the other direction."""
    return query.dtype == jnp.float16 or {cfg.fwd_params.num_warps, cfg.bwd_params.num_warps} != {SPECIALISED}


def _work(query, key, value, mask, matmuls: tuple[int, int]) -> Work:
    """Returns the work of so many products over the width of keys, and of values: of all pairs, or of half of them."""
    (B, T, N, H), S, HV = query.shape, key.shape[1], value.shape[3]
    pairs = B * N * T * S // (2 if mask.key_range(T, S).high is not None else 1)
    return Work(2 * pairs * (matmuls[0] * H + matmuls[1] * HV), 2 * nbytes(query, key, value))


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
    deterministic,  # as it always is: only a backward adds in any order
    cfg,
):
    call = _prepare(
        query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
    )
    (B, T, N, _), params = query.shape, call.params(cfg.fwd_params, query.dtype.itemsize)
    blocks = params.q_blocksize, params.kv_blocksize
    rest: dict[str, Any] = {
        "sink_ptr": None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1),
        "work": _work(query, key, value, call.mask, (1, 1)),
    }
    out = jax.ShapeDtypeStruct((B, T, N, value.shape[3]), query.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    spans, options, tiles = call.spans(*blocks)[0], call.options, triton.cdiv(T, blocks[0]) * N * B
    if params.num_warps != SPECIALISED:
        plain = (query, key, value), spans, blocks, params
        return call.launch(forward_kernel, *plain, out_shape=out, grid=(tiles,), **rest)
    panel, tall = _panel(options["H"], options["HV"]), options["BLOCK_V"]
    wide = triton.cdiv(options["H"], panel) * panel
    arrays = _block_of(query, 64, panel), _block_of(key, blocks[1], panel), _block_of(value, blocks[1], tall)
    *results, _ = call.launch_specialised(
        specialised_forward_kernel,
        (jnp.zeros(1, jnp.int32), *arrays),
        spans,
        blocks,
        N,
        out_shape=(*out, jax.ShapeDtypeStruct((1,), jnp.int32)),
        input_output_aliases={0: 2},
        grid=(min(tiles, MULTIPROCESSORS),),
        STAGES=params.num_stages,
        QUEUED=2 if _bytes_of(2, params, wide, tall) <= SHARED_MEMORY else 1,
        ATTENDING=160 if blocks[0] == THREE_WARPGROUPS else 240,
        LOADING=24,
        **rest,
    )
    return tuple(results)


def _bytes_of(queued: int, params: FwdParams, wide: int, tall: int) -> int:
    """Returns the bytes of the forward's tiles on Hopper: of so many blocks of queries, and of stages of keys and values."""
    assert params.q_blocksize and params.kv_blocksize and params.num_stages
    return 2 * (queued * params.q_blocksize * wide + params.num_stages * params.kv_blocksize * (wide + tall))


def _block_of(x: jax.Array, rows: int, width: int, layout: Any = BLOCK) -> Any:
    return tensor_descriptor(x, x.shape, (1, rows, 1, width), layout.value)


def statistics_by_head(call: _Call, saved: Saved, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns minus lse and minus delta [B * N, length] as Hopper's kernels add them: of a row without a key, and of one past
    the last, such that its weights are zero, whatever its cotangents are."""
    B, T, N = saved.lse.shape

    def by_head(x: jax.Array, fill: float) -> jax.Array:
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, length - T)), constant_values=fill)
        return x.reshape(B * N, length)

    # Flat, so that they have no other layout, and behind a barrier: XLA would make delta where it is turned, and take seven
    # times as long for the sum that it is.
    flat = jax.lax.optimization_barrier((saved.lse.reshape(-1), saved.delta.reshape(-1)))
    lse, delta = (x.reshape(B, T, N) for x in flat)
    some = lse != -jnp.inf
    unit = call.options["SCALE"] if call.options["CAP"] is None else math.log(2)
    lse = by_head(jnp.where(some, lse * (-1 / unit), -jnp.inf), -jnp.inf)
    return lse, by_head(jnp.where(some, -delta, 0), 0)


def _specialised_gradients(call: _Call, saved: Saved, query, key, value, params: Any) -> dict[str, jax.Array]:
    (B, T), (S, K) = query.shape[:2], key.shape[1:3]
    q_block, k_block = blocks = params.q_blocksize, params.kv_blocksize
    wide, tall = call.options["BLOCK_H"], call.options["BLOCK_V"]
    length = triton.cdiv(T, q_block) * q_block
    lse, delta = (
        tensor_descriptor(x, x.shape, (1, q_block), ROW_OF_STATISTICS.value)
        for x in statistics_by_head(call, saved, length)
    )
    sums = jnp.zeros(query.shape, jnp.float32)
    if wide <= 128:
        kernel, columns, how = specialised_gradient_kernel, wide, {"num_warps": 8, "LOADING": 24}
    else:  # as many columns as TMA swizzles; registers with which products do not wait for one another, and little spills
        kernel, columns = specialised_wide_gradient_kernel, 32
        how = {"num_warps": 4, "DIFFERENTIATING": 216, "ADDING": 64}
    arrays = (
        _block_of(sums, q_block, columns, BLOCK_OF_SUMS),
        _block_of(saved.d_out.astype(query.dtype), q_block, tall),
        _block_of(query, q_block, wide),
        _block_of(key, k_block, wide),
        _block_of(value, k_block, tall),
        lse,
        delta,
    )
    d_key, d_value, d_query = call.launch_specialised(
        kernel,
        arrays,
        call.spans(*blocks)[1],
        blocks,
        K,
        out_shape=(
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
        ),
        input_output_aliases={0: 2},
        grid=(triton.cdiv(S, k_block) * K * B,),
        work=_work(query, key, value, call.mask, (3, 2)),
        STAGES=params.num_stages,
        **how,
    )
    d_query = (d_query * call.options["SCALE"]).astype(query.dtype)
    return {"query": d_query, "key": d_key, "value": d_value}


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
    call = _prepare(
        query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
    )
    if deterministic and cfg.bwd_params.num_warps == SPECIALISED:
        raise Unsupported(
            f"flash_attention on triton_gpu: cfg.bwd_params.num_warps = {SPECIALISED} is not for deterministic=True: that "
            "kernel adds the gradient of the queries in any order; leave num_warps out, or give 4 or 8"
        )
    (B, T, N, _), S, K = query.shape, *key.shape[1:3]
    params = call.params(cfg.bwd_params, query.dtype.itemsize)
    if params.num_warps == SPECIALISED:
        gradients = _specialised_gradients(call, saved, query, key, value, params)
        if softmax_aux is not None:
            gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
        return gradients
    # What stays in a program is as large in both passes, and so is what passes by: queries in one, keys in the other.
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
        work=_work(query, key, value, call.mask, (2, 1)),
    )
    d_key, d_value = call.launch(
        key_gradient_kernel,
        first,
        call.spans(moving, staying)[1],
        (moving, staying),
        params,
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        grid=(triton.cdiv(S, staying) * K * B,),
        work=_work(query, key, value, call.mask, (2, 2)),
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
                work=_work(query, key, value, call.mask, (1, 1)),
            )
        gradients["bias"] = d_bias[0]
    if alibi_slopes is not None:
        slopes = d_slope.sum(-1)
        gradients["alibi_slopes"] = slopes if alibi_slopes.shape[0] == B else slopes.sum(0, keepdims=True)
    if softmax_aux is not None:
        gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return gradients


# -- configurations ---------------------------------------------------------------------------------------------------


def _config(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> FlashAttentionConfig:
    return FlashAttentionConfig(FwdParams(*forward), BwdParams(*backward))


def _plain(width: int, itemsize: int) -> FlashAttentionConfig:
    """Returns the tiles of the plain kernels for heads that are padded to so many entries."""
    if itemsize == 4:  # multiplied outside of the matrix units, in true float32
        forward = (32, 32, 8, 2) if width <= 64 else (32, 16, 4, 2)
        return _config(forward, (32, 32, 8, 2) if width <= 128 else (16, 16, 4, 2))
    if width <= 128:
        return _config((64, 64, 4, 3), (64, 64, 4, 2))
    return _config((128, 64, 8, 2), (64, 64, 8, 2))


def _specialised(H: int, HV: int, itemsize: int, scale: float, cap: float | None) -> FlashAttentionConfig:
    """Returns the tiles of Hopper's kernels for heads of so many entries, or those of the plain ones where Hopper has none."""
    wide, tall = _width(H), _width(HV)
    plain = _plain(max(wide, tall), itemsize)
    # TMA reads heads that begin every 16 bytes.
    if itemsize != 2 or H % 8 or HV % 8 or not 64 <= tall <= wide or scale <= 0:
        return plain
    keys = 128 if wide <= 128 else 64
    # Under a soft cap twice the queries are more than registers hold.
    backward = (128, 2) if wide <= 64 and cap is None else (64, 3 if wide <= 128 else 2)
    forward = 64 if _panel(H, HV) == 256 else 128
    return _config((128, forward, SPECIALISED, 2), (backward[0], keys, SPECIALISED, backward[1]))


def _panel(H: int, HV: int) -> int:
    """Returns the columns of a tile of queries or keys in Hopper's forward.

    Heads of 129 to 192 lie in three tiles, so that they are multiplied as the 192 that they are, and leave room for 128 keys;
    the output, which leaves through the tiles of the queries, must fit in two of them.
    """
    return 64 if 128 < H <= 192 and _width(HV) <= 128 else _width(H)


def _width(entries: int) -> int:
    return max(16, triton.next_power_of_2(entries))


def _scale(softmax_scale: float | None, entries: int) -> float:
    return 1 / math.sqrt(entries) if softmax_scale is None else float(softmax_scale)


def _heuristic(call: Any, platform: str) -> FlashAttentionConfig:
    H, HV, itemsize = call.dims["H"], call.dims["Hv"], call.query.dtype.itemsize
    plain = _plain(_width(max(H, HV)), itemsize)
    dense = call.mask is not None and call.mask.attention_mask is not None
    if dense or call.bias is not None or call.alibi_slopes is not None or call.dropout_prob > 0 or call.dims["T"] <= 64:
        return plain
    found = _specialised(H, HV, itemsize, _scale(call.softmax_scale, H), call.logits_soft_cap)
    if found.fwd_params.num_warps == SPECIALISED and _width(H) <= 64 and _is_long_and_plain(call):
        three = dataclasses.replace(found.fwd_params, q_blocksize=THREE_WARPGROUPS)
        found = FlashAttentionConfig(three, found.bwd_params)
    # The backward of one pass is not deterministic.
    return FlashAttentionConfig(found.fwd_params, plain.bwd_params) if call.deterministic else found


def _is_long_and_plain(call: Any) -> bool:
    """Returns whether three warpgroups are faster: of long rows, without what takes more registers than each then has."""
    mask = MaskInfo() if call.mask is None else call.mask
    more = set(mask.used) - {"causal", "q_positions", "kv_positions"}
    bare = not more and call.softmax_aux is None and call.logits_soft_cap is None
    return min(call.dims["T"], call.dims["S"]) >= LONG and bare


def _candidates(call: Any) -> list[FlashAttentionConfig]:
    H, itemsize = call.dims["H"], call.query.dtype.itemsize
    first = _heuristic(call, "cuda")
    found = [first]
    if first.fwd_params.num_warps == SPECIALISED and _width(H) <= 64:
        both = (dataclasses.replace(first.fwd_params, q_blocksize=queries) for queries in (128, THREE_WARPGROUPS))
        found += [FlashAttentionConfig(forward, first.bwd_params) for forward in both]
    found.append(_plain(_width(max(H, call.dims["Hv"])), itemsize))
    if itemsize == 2:
        others = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)]
        backwards = [(64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (64, 64, 8, 2)]
        found += [_config(*pair) for pair in zip(others, backwards, strict=True)]
    return list(dict.fromkeys(found))


def _rejects(call: Any) -> str | None:
    for name in ("H", "Hv"):
        if call.dims[name] > WIDEST:
            return f"{name} = {call.dims[name]} is more than the {WIDEST} that a program holds"
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
