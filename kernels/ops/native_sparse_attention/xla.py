"""Native sparse attention in plain XLA: gathers what a chunk of queries reads, with memory linear in the length.

A scan over chunks of queries. For each, the means of all blocks are evaluated (T x S / block_size pairs, which the
method requires), the tokens of the selected blocks are gathered for each query and key head, and the window is one
slice. The backward loops over the same chunks: it gathers again, differentiates the attention of the chunk with respect
to the gathered arrays, and adds the result at their original positions, in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.ops.native_sparse_attention.blocks import block_rows, means, spread
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, check_sizes, op, ranked
from kernels.ops.native_sparse_attention.parts import choice_op, selected_op


def _heuristic(call: Call, platform: str) -> NativeSparseConfig:
    # On a CPU the gathered arrays of a chunk and its weights should stay in cache; accelerators need few, large steps.
    elements = 2**19 if platform == "cpu" else 2**26
    rows, N, K, S = (n if isinstance(n, int) else 1 for n in (call.dims[d] for d in ("B", "N", "K", "S")))
    named = call.num_blocks if call.block_indices is None else call.block_indices.shape[-1]
    tokens = min(named * call.block_size, S)
    others = 0 if call.op_name == selected_op.name else S // max(call.block_size, 1) + call.window
    seen = tokens + others
    each = max(1, rows * (K * tokens * (call.dims["H"] + call.dims["Hv"]) + N * seen))
    return NativeSparseConfig(max(8, min(elements // each, 1024)))


def _candidates(call: Call) -> list[NativeSparseConfig]:
    return [NativeSparseConfig(n) for n in (8, 16, 32, 64, 128, 256, 512)]


class _Static(NamedTuple):
    """Sizes of a call."""

    block_size: int
    num_blocks: int
    window: int
    scale: float
    chunk: int
    length: int  # number of keys


class _Keys(NamedTuple):
    """The arrays that are read, padded so that every slice is within bounds."""

    tokens: tuple[jax.Array, jax.Array]  # keys and values [B, K, front + S + back, H]
    means: tuple[jax.Array, jax.Array]  # of blocks, float32 [B, K, slots, H]
    starts: jax.Array  # of documents, [B, front + S + back]; -2 where there is no token
    ends: jax.Array  # index of the last token of the block in each slot, [B, slots]; past the end for empty slots
    of_slot: jax.Array  # start of the document of the block in each slot, [B, slots]


class _Read(NamedTuple):
    """The inputs of a chunk of queries: arrays that are differentiated, and which of their entries each query sees."""

    selected: tuple[jax.Array, jax.Array]  # [B, K, chunk, blocks, block_size, H]
    sliding: tuple[jax.Array, jax.Array]  # [B, K, chunk + window - 1, H]
    sees_means: jax.Array  # [B, 1, 1, chunk, slots]
    sees_selected: jax.Array  # [B, K, 1, chunk, blocks, block_size]
    sees_sliding: jax.Array  # [B, 1, 1, chunk, chunk + window - 1]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # float32 means true float32. Lower-precision operands are exact in one pass; they are upcast because XLA's CPU
    # runtime rejects some products of bfloat16 with float32 sums ("BF16 x BF16 = F32"), depending on what it fused into
    # them.
    precision = jax.lax.Precision.HIGHEST if a.dtype == b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32), precision=precision)


def _front(static: _Static) -> int:
    return max(static.window - 1, 0)


def _keys(key, value, starts, static: _Static) -> _Keys:
    rows, ends, of_slot = block_rows(starts, static.block_size)
    pad = (_front(static), max(static.chunk, static.block_size))
    tokens = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), pad, (0, 0))) for x in (key, value)]
    of_blocks = [means(x, rows) for x in (key, value)]
    padded = jnp.pad(starts, ((0, 0), pad), constant_values=-2)
    return _Keys((tokens[0], tokens[1]), (of_blocks[0], of_blocks[1]), padded, ends, of_slot)


def _weights(logits: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns the softmax over the last dim, or 0 if nothing is visible."""
    x = jnp.where(visible, logits, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    e = jnp.exp(x - jnp.where(jnp.isfinite(largest), largest, 0))
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


def _compressed_weights(q: jax.Array, means: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Returns logits float32 [B, K, G, chunk, slots] for q [B, chunk, K, G, H]. In float32, because they rank
    blocks."""
    return _weights(_dot("bckgh,bksh->bkgcs", q.astype(jnp.float32), means) * scale, visible)


def _attention(floats: dict[str, Any], read: _Read, static: _Static) -> jax.Array:
    """Returns the output of a chunk, float32 [B, chunk, K, G, Hv], as a function of everything in `floats`."""
    q = floats["query"]
    B, C, K, G, _ = q.shape

    def gated(gate: str, out: jax.Array) -> jax.Array:
        if gate not in floats:
            return out
        return floats[gate].astype(jnp.float32).reshape(B, C, K, G, 1) * out

    keys, values = floats["selected"]
    logits = _dot("bckgh,bkcnsh->bkgcns", q, keys) * static.scale
    flat = (*logits.shape[:4], -1)
    visible = jnp.broadcast_to(read.sees_selected, logits.shape).reshape(flat)
    p = _weights(logits.reshape(flat), visible).reshape(logits.shape)
    out = gated("g_slc", _dot("bkgcns,bkcnsv->bckgv", p.astype(values.dtype), values))
    if "g_cmp" in floats:
        means, of_values = floats["means"]
        p = _compressed_weights(q, means, read.sees_means, static.scale)
        out = out + gated("g_cmp", _dot("bkgcs,bksv->bckgv", p, of_values))
    if static.window > 0:
        keys, values = floats["sliding"]
        p = _weights(_dot("bckgh,bksh->bkgcs", q, keys) * static.scale, read.sees_sliding)
        out = out + gated("g_swa", _dot("bkgcs,bksv->bckgv", p.astype(values.dtype), values))
    return out


def _blocks_of(x: dict[str, Any], keys: _Keys, sees_means: jax.Array, static: _Static) -> jax.Array:
    """Returns the selected blocks of a chunk, int32 [B, K, chunk, blocks], without duplicates, -1 for none."""
    size = static.block_size
    if "block_indices" in x:
        indices = x["block_indices"].transpose(0, 2, 1, 3)
    else:
        p = _compressed_weights(x["query"], keys.means[0], sees_means, static.scale)
        # One extra slot: the query's own block may end past all complete blocks.
        importance = jnp.pad(jnp.mean(p, axis=2), ((0, 0), (0, 0), (0, 0), (0, 1)))
        start = x["start"][:, None, :, None]
        # Block c of a document is stored alone in slot c + first.
        block = jnp.arange(importance.shape[-1], dtype=jnp.int32) - (start + size - 1) // size
        own_block = jnp.where(start >= 0, (x["position"][:, None] - start) // size, -1)
        best, slot = jax.lax.top_k(
            ranked(importance, block, own_block), min(static.num_blocks, importance.shape[-1] - 1)
        )
        indices = jnp.where(best >= 0, slot - (start + size - 1) // size, -1)
    if "block_counts" in x:
        counts = x["block_counts"].swapaxes(1, 2)[..., None]
        indices = jnp.where(jnp.arange(indices.shape[-1]) < counts, indices, -1)
    if "block_indices" in x:  # those from the caller may contain duplicates
        indices = jnp.sort(indices, axis=-1)
        again = indices[..., 1:] == indices[..., :-1]
        indices = jnp.where(jnp.pad(again, ((0, 0), (0, 0), (0, 0), (1, 0))), -1, indices)
    return indices.astype(jnp.int32)


def _sees_means(x: dict[str, Any], keys: _Keys) -> jax.Array:
    """Returns which means the queries of a chunk see, [B, 1, 1, chunk, slots]."""
    position, start = x["position"], x["start"]  # [chunk], [B, chunk]
    sees = (keys.of_slot[:, None] == start[..., None]) & (keys.ends[:, None] <= position[:, None])
    return (sees & (start >= 0)[..., None])[:, None, None]


def _read(x: dict[str, Any], keys: _Keys, static: _Static) -> tuple[_Read, jax.Array, jax.Array]:
    """Returns (inputs of a chunk, the rows of the first tokens of its blocks [B, K, chunk x blocks], that of its
    window)."""
    size, front = static.block_size, _front(static)
    position, start, sees_means = x["position"], x["start"], _sees_means(x, keys)
    blocks = _blocks_of(x, keys, sees_means, static)
    begin = start[:, None, :, None]
    # Compares blocks, not tokens: the first token of a block far past the end would overflow.
    named = (blocks >= 0) & (begin >= 0) & (blocks <= (position[:, None] - begin) // size)
    first = begin + jnp.where(named, blocks, 0) * size
    place = first[..., None] + jnp.arange(size)
    last = jnp.minimum(position, static.length - 1)  # queries may be after all keys, which may end within a block
    sees_selected = (named[..., None] & (place <= last[:, None, None]))[:, :, None]
    rows = front + jnp.where(named, first, 0)
    rows = rows.reshape(*rows.shape[:2], -1)

    def gathered(tokens: jax.Array) -> jax.Array:
        one = jax.vmap(lambda x, row: jax.lax.dynamic_slice_in_dim(x, row, size, 0), (None, 0))
        return jax.vmap(jax.vmap(one))(tokens, rows).reshape(*blocks.shape, size, tokens.shape[-1])

    from_row = position[0]  # in the padded arrays, where the window of the first query starts
    width = static.chunk + front
    slid = [jax.lax.dynamic_slice_in_dim(t, from_row, width, 2) for t in keys.tokens]
    j = from_row - front + jnp.arange(width)
    inside = jax.lax.dynamic_slice_in_dim(keys.starts, from_row, width, 1)[:, None] == start[..., None]
    near = (j <= position[:, None]) & (j > position[:, None] - static.window)
    sees_sliding = (inside & near & (start >= 0)[..., None])[:, None, None]
    tokens = [gathered(t) for t in keys.tokens]
    return _Read((tokens[0], tokens[1]), (slid[0], slid[1]), sees_means, sees_selected, sees_sliding), rows, from_row


def _chunks(static: _Static, starts, q_start, **arrays) -> dict[str, jax.Array]:
    """Returns the arrays of each chunk of queries, [chunks, B, chunk, ...]; queries past the end see nothing."""
    T = arrays["query"].shape[1]
    count = -(-T // static.chunk)
    first = jnp.asarray(static.length - T if q_start is None else q_start, jnp.int32)
    position = first + jnp.arange(count * static.chunk, dtype=jnp.int32)
    valid = jnp.arange(count * static.chunk) < T
    start = jnp.where(valid, jnp.take(starts, jnp.clip(position, 0, static.length - 1), axis=1), -1)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, count * static.chunk - x.shape[1] if d == 1 else 0) for d in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], count, static.chunk, *x.shape[2:]), 1, 0)

    chunks = {name: split(x) for name, x in arrays.items() if x is not None}
    return chunks | {"position": position.reshape(count, static.chunk), "start": split(start)}


def _joined(x: jax.Array, length: int) -> jax.Array:
    """Returns chunks [chunks, B, chunk, ...] as [B, length, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


GATES = ("g_cmp", "g_slc", "g_swa")


def _prepared(query, key, value, starts, q_start, block_size, num_blocks, window, softmax_scale, cfg, **arrays):
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    check_sizes(N, K, T, S, block_size, num_blocks, window)
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    static = _Static(block_size, num_blocks, window, scale, min(cfg.chunk, T), S)
    starts = jnp.zeros((B, S), jnp.int32) if starts is None else starts.astype(jnp.int32)
    keys = _keys(key, value, starts, static)
    chunks = _chunks(static, starts, q_start, query=query.reshape(B, T, K, N // K, H), **arrays)
    return static, keys, starts, chunks


def _floats(x: dict[str, jax.Array], keys: _Keys, read: _Read, static: _Static) -> dict[str, Any]:
    """Returns the arrays that the output of a chunk is differentiated with respect to."""
    arrays: dict[str, Any] = {n: x[n] for n in ("query", *GATES) if n in x} | {"selected": read.selected}
    arrays |= {"means": keys.means} if "g_cmp" in x else {}
    return arrays | ({"sliding": read.sliding} if static.window > 0 else {})


def forward(
    query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
    softmax_scale, cfg,
):  # fmt: skip
    arrays = {
        "g_cmp": g_cmp,
        "g_slc": g_slc,
        "g_swa": g_swa,
        "block_indices": block_indices,
        "block_counts": block_counts,
    }
    static, keys, _, chunks = _prepared(
        query, key, value, starts, q_start, block_size, num_blocks, window, softmax_scale, cfg, **arrays
    )

    def step(_, x):
        read, _, _ = _read(x, keys, static)
        return None, _attention(_floats(x, keys, read, static), read, static).astype(query.dtype)

    _, out = jax.lax.scan(step, None, chunks)
    return _joined(out, query.shape[1]).reshape(*query.shape[:3], -1)


def backward(
    saved: Saved, query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks,
    window, softmax_scale, cfg,
):  # fmt: skip
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    arrays = {
        "g_cmp": g_cmp,
        "g_slc": g_slc,
        "g_swa": g_swa,
        "block_indices": block_indices,
        "block_counts": block_counts,
    }
    arrays["d_out"] = saved.d_out.reshape(B, T, K, N // K, -1)
    static, keys, starts, chunks = _prepared(
        query, key, value, starts, q_start, block_size, num_blocks, window, softmax_scale, cfg, **arrays
    )

    def step(sums, x):
        read, first, from_row = _read(x, keys, static)
        floats = _floats(x, keys, read, static)
        (d,) = jax.vjp(lambda floats: _attention(floats, read, static), floats)[1](x["d_out"].astype(jnp.float32))
        tokens = [_add_blocks(total, first, part) for total, part in zip(sums["tokens"], d["selected"], strict=True)]
        if static.window > 0:
            tokens = [_add_slice(total, from_row, part) for total, part in zip(tokens, d["sliding"], strict=True)]
        means = [a + b for a, b in zip(sums["means"], d["means"], strict=True)] if "means" in d else sums["means"]
        return {"tokens": tokens, "means": means}, {n: d[n] for n in ("query", *GATES) if n in d}

    zeros = {
        n: [jnp.zeros(x.shape, jnp.float32) for x in xs] for n, xs in (("tokens", keys.tokens), ("means", keys.means))
    }
    sums, by_chunk = jax.lax.scan(step, zeros, chunks)
    gradients = {n: _joined(x, T) for n, x in by_chunk.items()}
    gradients["query"] = gradients["query"].reshape(query.shape)
    front = _front(static)
    for name, like, total, of_means in zip(("key", "value"), (key, value), sums["tokens"], sums["means"], strict=True):
        total = total[:, :, front : front + S].swapaxes(1, 2)
        if g_cmp is not None:
            total = total + spread(of_means, starts, keys.ends, keys.of_slot, block_size)
        gradients[name] = total.astype(like.dtype)
    return gradients


def _add_blocks(total: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
    """Returns total [B, K, rows, H] with part [B, K, chunk, blocks, block_size, H] added at the rows starting at
    `first`."""
    dims = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))

    def one(total: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.scatter_add(total, first[:, None], part, dims, mode="promise_in_bounds")

    part = part.astype(jnp.float32).reshape(*first.shape, *part.shape[4:])
    return jax.vmap(jax.vmap(one))(total, first, part)


def _add_slice(total: jax.Array, row: jax.Array, part: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(total, row, part.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, row, 2)


# The choice and the selected branch as operations of their own, for keys that are split over devices.


def choice(query, means, starts, q_start, block_size, num_blocks, softmax_scale):
    (B, T, N, H), (K, slots) = query.shape, means.shape[1:3]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    chunk = max(1, min(T, 2**22 // (B * N * slots)))
    static = _Static(block_size, num_blocks, 0, scale, chunk, starts.shape[1])
    _, ends, of_slot = block_rows(starts, block_size)
    keys = _Keys((means, means), (means, means), starts, ends, of_slot)

    def step(_, x):
        return None, _blocks_of(x, keys, _sees_means(x, keys), static).swapaxes(1, 2)

    _, blocks = jax.lax.scan(step, None, _chunks(static, starts, q_start, query=query.reshape(B, T, K, N // K, H)))
    return _joined(blocks, T)


def _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg, **arrays):
    """Returns (static, keys, chunks of queries)."""
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    static = _Static(block_size, 1, 0, scale, min(cfg.chunk, T), S)
    starts = jnp.zeros((B, S), jnp.int32) if starts is None else starts.astype(jnp.int32)
    arrays |= {"query": query.reshape(B, T, K, N // K, H), "block_indices": block_indices}
    return static, _keys(key, value, starts, static), _chunks(static, starts, q_start, **arrays)


def _logits(q: jax.Array, read: _Read, static: _Static) -> jax.Array:
    """Returns the logits of a chunk, float32 [B, K, G, chunk, blocks, block_size], -inf where a query does not see a key."""
    logits = _dot("bckgh,bkcnsh->bkgcns", q, read.selected[0]) * static.scale
    return jnp.where(read.sees_selected, logits, -jnp.inf)


def selected_forward(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg):
    static, keys, chunks = _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg)

    def step(_, x):
        read, _, _ = _read(x, keys, static)
        logits, values = _logits(x["query"], read, static), read.selected[1]
        lse = jax.nn.logsumexp(logits, axis=(-2, -1))
        p = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None, None])
        out = _dot("bkgcns,bkcnsv->bckgv", p.astype(values.dtype), values)
        return None, (out.astype(query.dtype), lse.transpose(0, 3, 1, 2))

    _, (out, lse) = jax.lax.scan(step, None, chunks)
    T = query.shape[1]
    return _joined(out, T).reshape(*query.shape[:3], -1), _joined(lse, T).reshape(query.shape[:3])


def selected_backward(
    saved: Saved, query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg
):  # fmt: skip
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    rows = {"lse": saved.lse, "delta": saved.delta, "d_out": saved.d_out}
    rows = {n: x.reshape(B, T, K, N // K, *x.shape[3:]) for n, x in rows.items()}
    static, keys, chunks = _selected(
        query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg, **rows
    )

    def step(sums, x):
        read, first, _ = _read(x, keys, static)
        (of_keys, values), q, d_out = read.selected, x["query"], x["d_out"].astype(jnp.float32)
        lse, delta = (x[n].transpose(0, 2, 3, 1)[..., None, None] for n in ("lse", "delta"))
        p = jnp.exp(_logits(q, read, static) - jnp.where(jnp.isfinite(lse), lse, 0))
        ds = p * (_dot("bckgv,bkcnsv->bkgcns", d_out, values) - delta) * static.scale
        parts = _dot("bkgcns,bckgh->bkcnsh", ds, q), _dot("bkgcns,bckgv->bkcnsv", p, d_out)
        sums = [_add_blocks(total, first, part) for total, part in zip(sums, parts, strict=True)]
        return sums, _dot("bkgcns,bkcnsh->bckgh", ds, of_keys)

    sums, d_query = jax.lax.scan(step, [jnp.zeros(x.shape, jnp.float32) for x in keys.tokens], chunks)
    of_keys, of_values = (x[:, :, :S].swapaxes(1, 2) for x in sums)
    gradients = {"query": _joined(d_query, T).reshape(query.shape), "key": of_keys, "value": of_values}
    return {n: x.astype(query.dtype) for n, x in gradients.items()}


_WHERE: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B"},
}
op.register(forward, backward, heuristic=_heuristic, candidates=_candidates, **_WHERE)
choice_op.register(choice, platforms=_WHERE["platforms"], dtypes=_WHERE["dtypes"])
selected_op.register(selected_forward, selected_backward, heuristic=_heuristic, candidates=_candidates, **_WHERE)
