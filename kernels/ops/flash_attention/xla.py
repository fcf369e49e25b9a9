"""Blockwise flash attention in plain XLA, forward and backward: O(S) memory, masked blocks skipped, any device.

A scan over query blocks, with an inner loop over each block's active key blocks only, whose trip count comes from
`active_tiles`. The backward makes one pass over the same pairs: dQ belongs to the query block, dK and dV accumulate in
float32 in the carry, so each pair takes five matmuls.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.dropout import dropout_scale
from kernels.engines.attention.masks import MASK_FEATURES, key_range
from kernels.engines.attention.ranges import KeyRange, visible
from kernels.engines.attention.softmax import sink_gradient
from kernels.engines.attention.tiles import active_tiles, listed
from kernels.engines.matmul.dot import dot
from kernels.framework.binding import Call
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.execute import Saved, backward_of
from kernels.ops.flash_attention.contract import attention, attention_op, op


def _heuristic(call: Call, platform: str) -> FlashAttentionConfig:
    # On a CPU the logits of a pair of blocks, over all rows and heads, should stay in cache, but a long sequence should
    # not have so many pairs that the loop overhead dominates. On an accelerator each operation on a pair is a separate
    # kernel, so blocks are as large as 128 MiB of logits allow.
    elements, largest = (2**17, 256) if platform == "cpu" else (2**25, 2048)
    side = math.isqrt(elements // (call.dims["B"] * call.dims["N"]))
    sizes = []
    for length in (call.dims["T"], call.dims["S"]):
        block = min(largest, max(64, _power_of_two(side), _power_of_two(length // 64)))
        sizes.append(min(block, max(16, _power_of_two(2 * length - 1))))
    q, k = sizes
    return FlashAttentionConfig(FwdParams(q_blocksize=q, kv_blocksize=k), BwdParams(q_blocksize=q, kv_blocksize=k))


def _power_of_two(n: int) -> int:
    """Returns the largest power of two that is at most n, and at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def _candidates(call: Call) -> list[FlashAttentionConfig]:
    sizes = [n for n in (64, 128, 256, 512, 1024) if n <= max(call.dims["T"], call.dims["S"])]
    return [
        FlashAttentionConfig(FwdParams(q_blocksize=n, kv_blocksize=m), BwdParams(q_blocksize=n, kv_blocksize=m))
        for n in sizes
        for m in sizes
    ]


class _Blocks(NamedTuple):
    """Inputs of each pair of blocks, padded to whole blocks along T and S."""

    block_q: int
    block_k: int
    # int32 [query blocks, key blocks], the active key blocks of each query block first; or [query blocks, 1], the first active
    # one, if the active ones are contiguous.
    order: Any
    count: Any  # int32 [query blocks]: the number of active ones
    rows: dict[str, jax.Array]  # per-query arrays, [query blocks, ..., block_q, ...]
    columns: dict[str, jax.Array]  # per-key arrays, padded
    pairs: dict[str, jax.Array]  # bias and dense mask, padded unless broadcast


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    missing = size - x.shape[dim]
    return x if missing == 0 else jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


def _split(x: jax.Array, block: int) -> jax.Array:
    """Returns x [B, T, ...] as blocks [n, B, block, ...], padded with zeros."""
    n = -(-x.shape[1] // block)
    x = _pad(x, 1, n * block)
    return jnp.moveaxis(x.reshape(x.shape[0], n, block, *x.shape[2:]), 1, 0)


def _prepare(query, key, value, mask, bias, block_q, block_k) -> tuple[KeyRange, _Blocks]:
    T, S = query.shape[1], key.shape[1]
    keys = key_range(mask, T, S)
    active = active_tiles(keys, block_q, block_k)
    order, count = _compacted(active)
    rows = {n: jnp.asarray(x) for n, x in keys.of_queries().items()}
    columns = {n: jnp.asarray(x) for n, x in keys.of_keys().items()}
    whole_q, whole_k = active.shape[0] * block_q, active.shape[1] * block_k
    # A padded index is past the end, which distinguishes padding from data.
    rows["index"] = jnp.arange(whole_q, dtype=jnp.int32)[None]
    columns["index"] = jnp.arange(whole_k, dtype=jnp.int32)[None]
    rows = {n: _split(x, block_q) for n, x in rows.items()}
    columns = {n: _pad(x, 1, whole_k) for n, x in columns.items()} | {
        "key": _pad(key, 1, whole_k),
        "value": _pad(value, 1, whole_k),
    }
    pairs = {}
    for name, x in (("bias", bias), ("attention_mask", keys.dense)):
        if x is not None:
            x = _pad(x, 2, whole_q) if x.shape[2] > 1 or T == 1 else x
            pairs[name] = _pad(x, 3, whole_k) if x.shape[3] > 1 or S == 1 else x
    return keys, _Blocks(block_q, block_k, order, count, rows, columns, pairs)


def _compacted(active: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (order, count) of `_Blocks` for the pattern bool [query blocks, key blocks]."""
    if isinstance(active, np.ndarray):
        first, count = active.argmax(1), active.sum(1)
        index = np.arange(active.shape[1])
        if ((index >= first[:, None]) & (index < (first + count)[:, None]) == active).all():
            # Causal, window, chunk: the program contains nothing of the size of the pattern.
            return jnp.asarray(first[:, None], jnp.int32), jnp.asarray(count, jnp.int32)
    return listed(jnp.asarray(active))


def _nth(order: jax.Array, n: jax.Array) -> jax.Array:
    return order[0] + n if order.shape[0] == 1 else order[n]


def _column_block(blocks: _Blocks, j: jax.Array) -> dict[str, jax.Array]:
    start = j * blocks.block_k
    return {n: jax.lax.dynamic_slice_in_dim(x, start, blocks.block_k, 1) for n, x in blocks.columns.items()}


def _pair_start(x: jax.Array, blocks: _Blocks, i: jax.Array, j: jax.Array) -> tuple[tuple, tuple]:
    rows = blocks.block_q if x.shape[2] > 1 else 1
    columns = blocks.block_k if x.shape[3] > 1 else 1
    zero = jnp.zeros_like(i)
    start = (zero, zero, i * rows if x.shape[2] > 1 else zero, j * columns if x.shape[3] > 1 else zero)
    return start, (x.shape[0], x.shape[1], rows, columns)


def _heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns x [B|1, N|1, ...] as [B|1, K|1, G|1, ...]."""
    groups = (1, 1) if x.shape[1] == 1 else (num_kv_heads, x.shape[1] // num_kv_heads)
    return x.reshape(x.shape[0], *groups, *x.shape[2:])


class _Logits(NamedTuple):
    value: jax.Array  # float32 [B, K, G, block_q, block_k], -inf where masked
    softcap_grad: jax.Array | None  # derivative of the soft cap
    distance: jax.Array | None  # |i - j|, for the gradient of ALiBi slopes


def _logits(q, row, column, i, j, keys, blocks, limits, alibi_slopes, scale, cap) -> _Logits:
    """Returns the logits of one pair of blocks. q is [B, block_q, K, G, H]; limits is (T, S)."""
    num_kv_heads = q.shape[2]
    x = dot("btkgh,bskh->bkgts", q, column["key"]) * scale
    softcap_grad = None
    if cap is not None:
        capped = jnp.tanh(x / cap)
        x, softcap_grad = cap * capped, 1 - capped * capped
    if "bias" in blocks.pairs:
        block = jax.lax.dynamic_slice(blocks.pairs["bias"], *_pair_start(blocks.pairs["bias"], blocks, i, j))
        x = x + _heads(block.astype(jnp.float32), num_kv_heads)
    distance = None
    if alibi_slopes is not None:
        distance = jnp.abs(row["q_positions"][:, :, None] - column["k_positions"][:, None]).astype(jnp.float32)
        x = x - _heads(alibi_slopes.astype(jnp.float32)[:, :, None, None], num_kv_heads) * distance[:, None, None]
    block_ranges = {n: x for n, x in (row | column).items() if n in KeyRange._fields}
    seen = visible(keys._replace(**block_ranges))
    seen &= (row["index"] < limits[0])[:, :, None] & (column["index"] < limits[1])[:, None]
    seen = seen[:, None, None]
    if "attention_mask" in blocks.pairs:
        dense = blocks.pairs["attention_mask"]
        seen = seen & _heads(jax.lax.dynamic_slice(dense, *_pair_start(dense, blocks, i, j)), num_kv_heads)
    return _Logits(jnp.where(seen, x, -jnp.inf), softcap_grad, distance)


def _keep(dropout_seed, row, column, probability, num_kv_heads):
    if probability == 0:
        return None
    return _heads(dropout_scale(dropout_seed, row["q_positions"], column["k_positions"], probability), num_kv_heads)


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
    deterministic,  # always deterministic: no atomic adds
    cfg,
):
    B, T, N, H = query.shape
    S, K, Hv = key.shape[1], key.shape[2], value.shape[3]
    G = N // K
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    keys, blocks = _prepare(query, key, value, mask, bias, cfg.fwd_params.q_blocksize, cfg.fwd_params.kv_blocksize)
    if softmax_aux is None:
        m0, l0 = -jnp.inf, 0.0
        sink = jnp.full((1, K, G, 1), m0, jnp.float32)
    else:
        # Sinks act as the first keys of every row: weight exp(sink), value zero.
        sink = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1).reshape(1, K, G, 1)
        l0 = 1.0

    def query_block(_, x):
        i, q, row, order, count = x
        q = q.reshape(B, blocks.block_q, K, G, H)
        largest = jnp.broadcast_to(sink, (B, K, G, blocks.block_q))
        total = jnp.full_like(largest, l0)
        out = jnp.zeros((B, K, G, blocks.block_q, Hv), jnp.float32)

        def key_block(n, carry):
            largest, total, out = carry
            j = _nth(order, n)
            column = _column_block(blocks, j)
            s = _logits(q, row, column, i, j, keys, blocks, (T, S), alibi_slopes, scale, logits_soft_cap).value
            new = jnp.maximum(largest, jnp.max(s, axis=-1))
            anchor = jnp.where(new == -jnp.inf, 0, new)  # a row that has not seen any key yet
            p = jnp.exp(s - anchor[..., None])
            rescale = jnp.exp(largest - anchor)
            total = total * rescale + jnp.sum(p, axis=-1)
            keep = _keep(dropout_seed, row, column, dropout_prob, K)
            p = p if keep is None else p * keep
            pv = dot("bkgts,bskv->bkgtv", p.astype(value.dtype), column["value"])
            return new, total, out * rescale[..., None] + pv

        largest, total, out = jax.lax.fori_loop(0, count, key_block, (largest, total, out))
        some = total != 0  # true for NaN too, so that lse becomes NaN
        lse = jnp.where(some, largest + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
        out = out / jnp.where(some, total, 1)[..., None]
        out = jnp.moveaxis(out, 3, 1).reshape(B, blocks.block_q, N, Hv).astype(query.dtype)
        return None, (out, jnp.moveaxis(lse, 3, 1).reshape(B, blocks.block_q, N))

    index = jnp.arange(blocks.order.shape[0], dtype=jnp.int32)
    xs = (index, _split(query, blocks.block_q), blocks.rows, blocks.order, blocks.count)
    _, (out, lse) = jax.lax.scan(query_block, None, xs)
    out, lse = [jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :T] for x in (out, lse)]
    return out, lse


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
    deterministic,  # always deterministic: no atomic adds
    cfg,
):
    B, T, N, H = query.shape
    S, K, Hv = key.shape[1], key.shape[2], value.shape[3]
    G = N // K
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    keys, blocks = _prepare(query, key, value, mask, bias, cfg.bwd_params.q_blocksize, cfg.bwd_params.kv_blocksize)

    def per_row(x):
        """Returns x [B, T, N] as [n, B, K, G, block_q]."""
        x = _split(x, blocks.block_q)
        return jnp.moveaxis(x.reshape(*x.shape[:3], K, G), 2, 4)

    sums = {
        "key": jnp.zeros(blocks.columns["key"].shape, jnp.float32),
        "value": jnp.zeros(blocks.columns["value"].shape, jnp.float32),
    }
    if bias is not None:
        sums["bias"] = jnp.zeros(blocks.pairs["bias"].shape, jnp.float32)
    if alibi_slopes is not None:
        sums["alibi_slopes"] = jnp.zeros((B, K, G), jnp.float32)

    def query_block(sums, x):
        i, q, d_out, lse, delta, row, order, count = x
        q = q.reshape(B, blocks.block_q, K, G, H)
        d_out = d_out.reshape(B, blocks.block_q, K, G, Hv)
        some = lse != -jnp.inf
        anchor = jnp.where(some, lse, 0)[..., None]
        # A row without keys contributes nothing, whatever the cotangents of its infinite lse are.
        delta = jnp.where(some, delta, 0)[..., None]
        some = some[..., None]

        def key_block(n, carry):
            dq, sums = carry
            j = _nth(order, n)
            column = _column_block(blocks, j)
            s = _logits(q, row, column, i, j, keys, blocks, (T, S), alibi_slopes, scale, logits_soft_cap)
            p = jnp.where(some, jnp.exp(s.value - anchor), 0)
            dp = dot("btkgv,bskv->bkgts", d_out, column["value"])
            keep = _keep(dropout_seed, row, column, dropout_prob, K)
            dropped = p if keep is None else p * keep
            ds = p * ((dp if keep is None else dp * keep) - delta)
            raw = ds if s.softcap_grad is None else ds * s.softcap_grad
            raw = (raw * scale).astype(query.dtype)
            dk = dot("bkgts,btkgh->bskh", raw, q)
            dv = dot("bkgts,btkgv->bskv", dropped.astype(value.dtype), d_out)
            new = {"key": _add(sums["key"], dk, j, blocks), "value": _add(sums["value"], dv, j, blocks)}
            if bias is not None:
                new["bias"] = _add_pair(sums["bias"], ds.reshape(B, N, *ds.shape[3:]), i, j, blocks)
            if s.distance is not None:
                new["alibi_slopes"] = sums["alibi_slopes"] - jnp.sum(ds * s.distance[:, None, None], axis=(3, 4))
            return dq + dot("bkgts,bskh->btkgh", raw, column["key"]), new

        dq, sums = jax.lax.fori_loop(0, count, key_block, (jnp.zeros(q.shape, jnp.float32), sums))
        return sums, dq.reshape(B, blocks.block_q, N, H).astype(query.dtype)

    index = jnp.arange(blocks.order.shape[0], dtype=jnp.int32)
    # Padded rows have lse = -inf, so they contribute nothing.
    lse = jnp.pad(saved.lse, ((0, 0), (0, -T % blocks.block_q), (0, 0)), constant_values=-jnp.inf)
    d_out = saved.d_out.astype(query.dtype)
    split = (_split(x, blocks.block_q) for x in (query, d_out))
    xs = (index, *split, per_row(lse), per_row(saved.delta), blocks.rows, blocks.order, blocks.count)
    sums, dq = jax.lax.scan(query_block, sums, xs)
    gradients = {
        "query": jnp.moveaxis(dq, 0, 1).reshape(B, -1, N, H)[:, :T],
        "key": sums["key"][:, :S],
        "value": sums["value"][:, :S],
    }
    if bias is not None:
        gradients["bias"] = sums["bias"][:, :, : bias.shape[2], : bias.shape[3]]
    if alibi_slopes is not None:
        slopes = sums["alibi_slopes"].reshape(B, N)
        gradients["alibi_slopes"] = slopes if alibi_slopes.shape[0] == B else slopes.sum(0, keepdims=True)
    if softmax_aux is not None:
        gradients["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return gradients


def _add(total: jax.Array, part: jax.Array, j: jax.Array, blocks: _Blocks) -> jax.Array:
    start = j * blocks.block_k
    old = jax.lax.dynamic_slice_in_dim(total, start, blocks.block_k, 1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 1)


def _add_pair(total: jax.Array, part: jax.Array, i: jax.Array, j: jax.Array, blocks: _Blocks) -> jax.Array:
    start, size = _pair_start(total, blocks, i, j)
    part = part.sum([d for d in range(4) if size[d] == 1 and part.shape[d] > 1], keepdims=True)
    return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, start, size) + part, start)


EVERYWHERE: Any = {"platforms": {"cpu", "cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}
FEATURES = {*MASK_FEATURES, "gqa", "cross_attention", "value_width"}

op.register(
    forward,
    backward,
    features=FEATURES,
    symbolic={"B"},
    heuristic=_heuristic,
    candidates=_candidates,
    **EVERYWHERE,
)
attention_op.register(
    attention, backward_of(attention_op, attention), name="xla", features=FEATURES, symbolic={"B"}, **EVERYWHERE
)
