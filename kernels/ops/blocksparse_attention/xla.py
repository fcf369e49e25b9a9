"""Block-sparse attention in plain XLA: only set blocks are computed, forward and backward, O(S) memory, any device.

A lane is a block of queries of one list of blocks: of all rows and heads where they share the mask, else of one row or head.
Its set key blocks are brought to the front, and a loop goes over those alone, so the trip counts, which may be known only at
run time, are the cost. Lanes that take as long run side by side: they are sorted by how many blocks they have.
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
    # The logits of what runs side by side should stay in a CPU's cache; on an accelerator each step is a kernel of its own, so
    # it is as wide as 64 MiB of them allow.
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
    """Returns the greatest divisor of n that is not above the limit."""
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


class _Plan(NamedTuple):
    """What every lane needs. A table has an entry for each block, so that a lane reads one by its number."""

    shape: tuple[
        Any, int, int, int
    ]  # lists of blocks by row and by head (each 1 where shared), query blocks, key blocks
    size: tuple[int, int]  # of a block
    inner: tuple[Any, int, int, int]  # of a lane: rows, key heads, query heads of each; key heads of the tables of keys
    length: int  # of the keys
    lanes: jax.Array  # int32 [steps, lanes side by side]; -1 is none
    order: jax.Array  # int32 [lanes, key blocks], the set ones first
    count: jax.Array  # int32 [lanes]: how many are set
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
    """Returns [lanes, rows, block, key heads, query heads of each, ...] of x [B, T, N, ...]."""
    (rows, heads, blocks, _), (block, _), (b, k, g, _) = plan.shape, plan.size, plan.inner
    x = _padded(x, 1, blocks * block).reshape(rows, b, blocks, block, heads, k, g, *x.shape[3:])
    x = x.transpose(0, 4, 2, 1, 3, 5, 6, *range(7, x.ndim))
    return x.reshape(-1, *x.shape[3:])


def _of_lanes(x: jax.Array, plan: _Plan, length: int) -> jax.Array:
    """Returns [B, T, N, ...] of what the lanes gave, [steps, lanes side by side, rows, block, key heads, query heads, ...]."""
    (rows, heads, blocks, _), (block, _), (b, k, g, _) = plan.shape, plan.size, plan.inner
    x = x.reshape(-1, *x.shape[2:])
    x = x[jnp.argsort(jnp.where(plan.lanes < 0, x.shape[0], plan.lanes).ravel(), stable=True)[: rows * heads * blocks]]
    x = x.reshape(rows, heads, blocks, b, block, k, g, *x.shape[5:])
    x = x.transpose(0, 3, 2, 4, 1, 5, 6, *range(7, x.ndim))
    return x.reshape(rows * b, blocks * block, heads * k * g, *x.shape[7:])[:, :length]


def _key_table(x: jax.Array, plan: _Plan) -> jax.Array:
    """Returns [entries, rows, block, key heads, H] of x [B, S, K, H]."""
    (rows, _, _, blocks), (_, block), (b, k, _, tables) = plan.shape, plan.size, plan.inner
    x = _padded(x, 1, blocks * block).reshape(rows, b, blocks, block, tables, k, x.shape[-1])
    return x.transpose(0, 4, 2, 1, 3, 5, 6).reshape(-1, b, block, k, x.shape[-1])


def _of_keys(x: jax.Array, plan: _Plan) -> jax.Array:
    """Returns [B, S, K, H] of a table of keys."""
    (rows, _, _, blocks), (_, block), (b, k, _, tables) = plan.shape, plan.size, plan.inner
    x = x.reshape(rows, tables, blocks, b, block, k, x.shape[-1]).transpose(0, 3, 2, 4, 1, 5, 6)
    return x.reshape(rows * b, blocks * block, tables * k, x.shape[-1])[:, : plan.length]


def _entry(plan: _Plan, lane: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the entry of key block j in the tables of keys, for a lane."""
    _, heads, q_blocks, k_blocks = plan.shape
    tables = plan.inner[3]
    of = lane // q_blocks
    return (of // heads * tables + of % heads * tables // heads) * k_blocks + j


def _seen(plan: _Plan, lane: jax.Array, j: jax.Array) -> jax.Array:
    """Returns bool [rows | 1, key heads | 1, query heads | 1, block of queries, block of keys]: what the mask lets through."""
    (rows, heads, q_blocks, _), (block_q, block_k), (_, k, g, _) = plan.shape, plan.size, plan.inner
    i, row, head = lane % q_blocks, lane // (q_blocks * heads), lane // q_blocks % heads

    def mine(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
        """Returns [rows | 1, size]: of the lane's own rows."""
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
    """Returns (logits float32 [rows, key heads, query heads, block of queries, block of keys], -inf where masked; the
    derivative of the soft cap)."""
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
        anchor = jnp.where(new == -jnp.inf, 0, new)  # a row that has seen no key yet
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
        some = total != 0  # of a NaN too, so that lse is one
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
    # A row with no key gives nothing, whatever the cotangents of its infinite lse may be.
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

            # One lane after the other: several may have the same keys, and a scatter would add in any order.
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
        return "it needs the size of B, which is a symbol here, where each row has a block mask of its own"
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
