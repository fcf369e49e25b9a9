"""Block-sparse attention in plain XLA: only set blocks are computed, forward and backward, O(S) memory, any device.

A lane is a query block with its list of key blocks: for all rows and heads if they share the mask, else for one row or head.
Its set key blocks are sorted to the front, and a loop visits only these, so the cost follows the trip counts, which may be
known only at run time. Lanes are sorted by their number of blocks, so that lanes of similar length run side by side.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import key_range
from kernels.engines.attention.ranges import KeyRange, visible
from kernels.engines.attention.tiles import active_tiles, listed
from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.ops.blocksparse_attention.contract import FEATURES, BlockSparseConfig, check_blocks, dot, op


def _heuristic(call: Call, platform: str) -> BlockSparseConfig:
    # On a CPU the logits of the lanes that run side by side should stay in cache. On an accelerator each step is a separate
    # kernel, so as many lanes run as 64 MiB of logits allow.
    longest, elements = (256, 2**17) if platform == "cpu" else (512, 2**24)
    rows, heads = (
        n if m == 1 else 1 for n, m in zip((call.dims["B"], call.dims["N"]), call.block_mask.shape, strict=False)
    )
    side = _divisor(call.block_size[0], longest) * _divisor(call.block_size[1], longest)
    lanes = 1 if not isinstance(rows, int) else max(1, elements // (rows * heads * side))
    return BlockSparseConfig(longest, min(lanes, 1024))


def _candidates(call: Call) -> list[BlockSparseConfig]:
    return [BlockSparseConfig(block, lanes) for block in (64, 128, 256, 512) for lanes in (1, 8, 64)]


def _divisor(n: int, limit: int) -> int:
    """Returns the largest divisor of n that is at most `limit`."""
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


class _Plan(NamedTuple):
    """What all lanes share. Tables have one entry per block, which lanes read by index."""

    shape: tuple[Any, int, int, int]  # rows and heads with separate block masks (1 if shared), query blocks, key blocks
    size: tuple[int, int]  # (queries, keys) per block
    inner: tuple[Any, int, int, int]  # per lane: rows, key heads, query heads per key head; key heads of the key tables
    length: int  # number of keys
    lanes: jax.Array  # int32 [steps, lanes side by side]; -1: no lane
    order: jax.Array  # int32 [lanes, key blocks], set blocks first
    count: jax.Array  # int32 [lanes]: number of set blocks
    keys: KeyRange  # padded to whole blocks


def _plan(query, key, block_mask, mask, block_size, cfg) -> _Plan:
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    check_blocks(block_mask, block_size, B, T, S, N, K)
    keys = key_range(mask, T, S)
    size = _divisor(block_size[0], cfg.block), _divisor(block_size[1], cfg.block)
    q_blocks, k_blocks = -(-T // size[0]), -(-S // size[1])
    for dim in (0, 1):
        block_mask = jnp.repeat(block_mask, block_size[dim] // size[dim], 2 + dim)
    active = block_mask[:, :, :q_blocks, :k_blocks] & jnp.asarray(active_tiles(keys, *size))
    shape: Any = active.shape
    order, count = listed(active.reshape(-1, k_blocks))
    side_by_side = min(cfg.lanes, count.shape[0])
    lanes = jnp.argsort(-count, stable=True).astype(jnp.int32)
    lanes = jnp.pad(lanes, (0, -lanes.shape[0] % side_by_side), constant_values=-1).reshape(-1, side_by_side)
    k, g = (K, N // K) if shape[1] == 1 else (1, 1)
    inner = (B // shape[0], k, g, K // k)
    whole_q, whole_k = q_blocks * size[0], k_blocks * size[1]
    changes = {n: _padded(jnp.asarray(x), 1, whole_q) for n, x in keys.of_queries().items()}
    changes |= {n: _padded(jnp.asarray(x), 1, whole_k) for n, x in keys.of_keys().items()}
    dense = keys.dense
    if dense is not None:
        for dim, length, whole in ((2, T, whole_q), (3, S, whole_k)):
            dense = _padded(dense, dim, whole) if dense.shape[dim] == length else dense
        changes["dense"] = dense
    return _Plan(shape, size, inner, S, lanes, order, count, keys._replace(**changes))


def _padded(x: jax.Array, dim: int, size: int) -> jax.Array:
    missing = size - x.shape[dim]
    return x if missing == 0 else jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


def _query_table(x: jax.Array, plan: _Plan) -> jax.Array:
    """Returns x [B, T, N, ...] as [lanes, rows, block, key heads, query heads per key head, ...]."""
    (rows, heads, blocks, _), (block, _), (b, k, g, _) = plan.shape, plan.size, plan.inner
    x = _padded(x, 1, blocks * block).reshape(rows, b, blocks, block, heads, k, g, *x.shape[3:])
    x = x.transpose(0, 4, 2, 1, 3, 5, 6, *range(7, x.ndim))
    return x.reshape(-1, *x.shape[3:])


def _of_lanes(x: jax.Array, plan: _Plan, length: int) -> jax.Array:
    """Returns the lanes' results, [steps, lanes side by side, rows, block, key heads, query heads, ...], as [B, T, N, ...]."""
    (rows, heads, blocks, _), (block, _), (b, k, g, _) = plan.shape, plan.size, plan.inner
    x = x.reshape(-1, *x.shape[2:])
    x = x[jnp.argsort(jnp.where(plan.lanes < 0, x.shape[0], plan.lanes).ravel(), stable=True)[: rows * heads * blocks]]
    x = x.reshape(rows, heads, blocks, b, block, k, g, *x.shape[5:])
    x = x.transpose(0, 3, 2, 4, 1, 5, 6, *range(7, x.ndim))
    return x.reshape(rows * b, blocks * block, heads * k * g, *x.shape[7:])[:, :length]


def _key_table(x: jax.Array, plan: _Plan) -> jax.Array:
    """Returns x [B, S, K, H] as a table of keys, [entries, rows, block, key heads, H]."""
    (rows, _, _, blocks), (_, block), (b, k, _, tables) = plan.shape, plan.size, plan.inner
    x = _padded(x, 1, blocks * block).reshape(rows, b, blocks, block, tables, k, x.shape[-1])
    return x.transpose(0, 4, 2, 1, 3, 5, 6).reshape(-1, b, block, k, x.shape[-1])


def _of_keys(x: jax.Array, plan: _Plan) -> jax.Array:
    """Returns a table of keys as [B, S, K, H]."""
    (rows, _, _, blocks), (_, block), (b, k, _, tables) = plan.shape, plan.size, plan.inner
    x = x.reshape(rows, tables, blocks, b, block, k, x.shape[-1]).transpose(0, 3, 2, 4, 1, 5, 6)
    return x.reshape(rows * b, blocks * block, tables * k, x.shape[-1])[:, : plan.length]


def _entry(plan: _Plan, lane: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the index of a lane's key block j in the tables of keys."""
    _, heads, q_blocks, k_blocks = plan.shape
    tables = plan.inner[3]
    of = lane // q_blocks
    return (of // heads * tables + of % heads * tables // heads) * k_blocks + j


def _seen(plan: _Plan, lane: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the pairs that the mask lets through, bool [rows | 1, key heads | 1, query heads | 1, query block, key block]."""
    (rows, heads, q_blocks, _), (block_q, block_k), (_, k, g, _) = plan.shape, plan.size, plan.inner
    i, row, head = lane % q_blocks, lane // (q_blocks * heads), lane // q_blocks % heads

    def mine(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
        """Returns the slice [rows | 1, size] for the lane's own rows."""
        x = jax.lax.dynamic_slice_in_dim(x, start, size, 1)
        return x if rows == 1 or x.shape[0] == 1 else jax.lax.dynamic_slice_in_dim(x, row, 1, 0)

    here = {n: mine(x, i * block_q, block_q) for n, x in plan.keys.of_queries().items()}
    here |= {n: mine(x, j * block_k, block_k) for n, x in plan.keys.of_keys().items()}
    seen = visible(plan.keys._replace(**here))
    seen &= (j * block_k + jnp.arange(block_k) < plan.length)[None, None]
    seen = seen[:, None, None]
    dense = plan.keys.dense
    if dense is not None:
        offsets = (row if rows > 1 else 0, head if heads > 1 else 0, i * block_q, j * block_k)
        whole = (1 if rows > 1 else dense.shape[0], 1 if heads > 1 else dense.shape[1], block_q, block_k)
        start = [jnp.int32(0) if n == 1 else jnp.int32(a) for n, a in zip(dense.shape, offsets, strict=True)]
        dense_block = jax.lax.dynamic_slice(dense, start, [min(n, w) for n, w in zip(dense.shape, whole, strict=True)])
        seen = seen & dense_block.reshape(
            dense_block.shape[0], *((1, 1) if dense_block.shape[1] == 1 else (k, g)), *dense_block.shape[2:]
        )
    return seen


def _logits(plan: _Plan, lane, j, live, q, keys, scale, cap) -> tuple[jax.Array, jax.Array | None]:
    """Returns (logits float32 [rows, key heads, query heads, query block, key block], -inf where masked; the derivative of the
    soft cap)."""
    x, slope = dot("btkgh,bskh->bkgts", q, keys) * scale, None
    if cap is not None:
        bent = jnp.tanh(x / cap)
        x, slope = cap * bent, 1 - bent * bent
    return jnp.where(live & _seen(plan, lane, j), x, -jnp.inf), slope


def forward(query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg):
    T, N, H = query.shape[1:]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    plan = _plan(query, key, block_mask, mask, block_size, cfg)
    b, k, g, _ = plan.inner
    queries, keys, values = _query_table(query, plan), _key_table(key, plan), _key_table(value, plan)
    # The sinks are the first "keys" of every row: weight exp(sink), value zero.
    none = jnp.full(N, -jnp.inf) if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)
    sinks = none.reshape(plan.shape[1], k, g, 1)

    def attend(lane, q, j, live, largest, total, out):
        entry = _entry(plan, lane, j)
        s, _ = _logits(plan, lane, j, live, q, keys[entry], scale, logits_soft_cap)
        new = jnp.maximum(largest, jnp.max(s, axis=-1))
        anchor = jnp.where(new == -jnp.inf, 0, new)  # a row that has not seen any key yet
        p, rescale = jnp.exp(s - anchor[..., None]), jnp.exp(largest - anchor)
        pv = dot("bkgts,bskv->bkgtv", p.astype(value.dtype), values[entry])
        return new, total * rescale + jnp.sum(p, axis=-1), out * rescale[..., None] + pv

    def step(_, lanes):
        count, order = jnp.where(lanes < 0, 0, plan.count[lanes]), plan.order[lanes]
        lane = jnp.maximum(lanes, 0)
        q = queries[lane]
        largest = jnp.broadcast_to(
            sinks[lane // plan.shape[2] % plan.shape[1]][:, None], (*lane.shape, b, k, g, plan.size[0])
        )
        total = jnp.full_like(largest, 0.0 if softmax_aux is None else 1.0)
        out = jnp.zeros((*largest.shape, values.shape[-1]), jnp.float32)

        def nth(n, carry):
            return jax.vmap(attend)(lane, q, order[:, n], n < count, *carry)

        largest, total, out = jax.lax.fori_loop(0, jnp.max(count), nth, (largest, total, out))
        some = total != 0  # true for NaN too, so that lse becomes NaN
        lse = jnp.where(some, largest + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
        out = (out / jnp.where(some, total, 1)[..., None]).astype(query.dtype)
        return None, (jnp.moveaxis(out, 4, 2), jnp.moveaxis(lse, 4, 2))

    _, (out, lse) = jax.lax.scan(step, None, plan.lanes)
    return _of_lanes(out, plan, T), _of_lanes(lse, plan, T)


def backward(
    saved: Saved, query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg
):
    T, _, H = query.shape[1:]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    plan = _plan(query, key, block_mask, mask, block_size, cfg)
    queries, keys, values = _query_table(query, plan), _key_table(key, plan), _key_table(value, plan)
    d_outs = _query_table(saved.d_out.astype(query.dtype), plan)
    # A row without keys contributes nothing, whatever the cotangents of its infinite lse are.
    some = saved.lse != -jnp.inf
    lses = _query_table(jnp.where(some, saved.lse, jnp.inf), plan)
    deltas = _query_table(jnp.where(some, saved.delta, 0), plan)

    def pull(lane, q, d_out, lse, delta, j, live):
        entry = _entry(plan, lane, j)
        s, slope = _logits(plan, lane, j, live, q, keys[entry], scale, logits_soft_cap)
        p = jnp.exp(s - lse[..., None])
        ds = p * (dot("btkgv,bskv->bkgts", d_out, values[entry]) - delta[..., None])
        ds = ((ds if slope is None else ds * slope) * scale).astype(query.dtype)
        dq = dot("bkgts,bskh->btkgh", ds, keys[entry])
        dk = dot("bkgts,btkgh->bskh", ds, q)
        return entry, dq, dk, dot("bkgts,btkgv->bskv", p.astype(value.dtype), d_out)

    def step(sums, lanes):
        count, order = jnp.where(lanes < 0, 0, plan.count[lanes]), plan.order[lanes]
        lane = jnp.maximum(lanes, 0)
        q, d_out = queries[lane], d_outs[lane]
        lse, delta = (jnp.moveaxis(x[lane], 2, 4) for x in (lses, deltas))

        def nth(n, carry):
            dq, sums = carry
            entries, more, *parts = jax.vmap(pull)(lane, q, d_out, lse, delta, order[:, n], n < count)

            # One lane after another: lanes may share keys, and a scatter would add in arbitrary order.
            def add(r, sums):
                return tuple(x.at[entries[r]].add(part[r]) for x, part in zip(sums, parts, strict=True))

            return dq + more, jax.lax.fori_loop(0, lanes.shape[0], add, sums)

        dq, sums = jax.lax.fori_loop(0, jnp.max(count), nth, (jnp.zeros(q.shape, jnp.float32), sums))
        return sums, dq.astype(query.dtype)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (keys, values))
    (dk, dv), dq = jax.lax.scan(step, zeros, plan.lanes)
    gradients = {"query": _of_lanes(dq, plan, T), "key": _of_keys(dk, plan), "value": _of_keys(dv, plan)}
    if softmax_aux is not None:
        # A sink has weight exp(sink - lse) and value zero, so ds = -weight * delta.
        lse, delta = jnp.where(some, saved.lse, jnp.inf)[..., None], jnp.where(some, saved.delta, 0)[..., None]
        weight = jnp.exp(softmax_aux.astype(jnp.float32)[None, None] - lse)
        gradients["softmax_aux"] = -jnp.sum(weight * delta, axis=(0, 1))
    return gradients


def _rejects(call: Call) -> str | None:
    if call.block_mask.shape[0] != 1 and not isinstance(call.dims["B"], int):
        return "it needs the size of B, which is symbolic here, because each row has its own block mask"
    return None


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    features=FEATURES,
    symbolic={"B"},
    rejects=_rejects,
    heuristic=_heuristic,
    candidates=_candidates,
)
