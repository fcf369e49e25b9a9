"""The variants of attention in plain XLA, any device, with memory linear in the length.

Variants that are softmax attention on other arrays call the public function `flash_attention`, on XLA too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import key_range
from kernels.engines.attention.ranges import KeyRange, visible
from kernels.engines.attention.tiles import active_tiles
from kernels.engines.matmul.dot import dot
from kernels.framework.execute import backward_of
from kernels.ops.attention_variants.composed import differential, flash_of, mixture
from kernels.ops.attention_variants.contract import (
    centred,
    check_square,
    differential_op,
    linformer_op,
    log_features,
    mixture_op,
    performer_op,
    quantized_op,
)
from kernels.ops.attention_variants.quantize import quantized

EVERYWHERE: Any = {"platforms": {"cpu", "cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}
CHUNK, BLOCK = 64, 256  # tokens per chunk (performer), and per block (quantised attention)


_flash = flash_of("xla")


# -- Linformer ---------------------------------------------------------------------------------------------------------


def linformer_forward(query, key, value, key_projection, value_projection, key_mask, softmax_scale):
    if key_mask is not None:
        key, value = (jnp.where(key_mask[:, :, None, None], x, 0) for x in (key, value))
    keys = dot("ps,bskh->bpkh", key_projection, key).astype(key.dtype)
    values = dot("ps,bskv->bpkv", value_projection, value).astype(value.dtype)
    return _flash(query, keys, values, None, softmax_scale)


# -- Performer ---------------------------------------------------------------------------------------------------------


def performer_forward(query, key, value, features, key_mask, causal, softmax_scale):
    """The sums over keys of phi(k) v^T and phi(k), stored divided by exp(c), with c the largest log feature so far, so
    that neither they nor the weights overflow; c cancels in the quotient."""
    T, N, K = query.shape[1], query.shape[2], key.shape[2]
    check_square(T, key.shape[1], causal)
    q = log_features(query, features, softmax_scale)
    q = q.reshape(*q.shape[:2], K, N // K, -1)
    k = log_features(key, features, softmax_scale)
    if key_mask is not None:
        k = jnp.where(key_mask[:, :, None, None], k, -jnp.inf)
    v = value.astype(jnp.float32)
    if not causal:
        state = _with_keys(_nothing(k, v), k, v)
        out = _divided(*_read(q, state)[:2])
    else:
        out = _chunks(q, k, v)[:, :T]
    return out.reshape(*query.shape[:3], -1).astype(query.dtype)


def _nothing(k, v):
    B, _, K, P = k.shape
    none = jnp.full((B, K, P), -jnp.inf, jnp.float32)
    return none, jnp.zeros_like(none), jnp.zeros((B, K, P, v.shape[-1]), jnp.float32)


def _with_keys(state, k, v):
    """Returns (c, sum of phi(k), sum of phi(k) v^T) after adding the keys of k [B, s, K, P]."""
    c, total, sums = state
    new = jax.lax.stop_gradient(jnp.maximum(c, jnp.max(k, axis=1)))
    anchor = jnp.where(new == -jnp.inf, 0, new)
    phi, old = jnp.exp(k - anchor[:, None]), jnp.exp(c - anchor)
    return new, old * total + jnp.sum(phi, axis=1), old[..., None] * sums + dot("bskp,bskv->bkpv", phi, v)


def _finite(c):
    """Returns logarithms with 0 in place of -inf, since -inf - -inf is NaN."""
    return jnp.where(c == -jnp.inf, 0, c)


def _scaled(q, c):
    """Returns (exp(q + c) of each query divided by its largest, [B, t, K, G, P]; the logarithm of that, [B, t, K,
    G])."""
    x = q + c[:, None, :, None]
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1))
    return jnp.exp(x - _finite(largest)[..., None]), largest


def _read(q, state):
    """Returns (weighted sums of values, sums of weights, the logarithm of their common divisor) of each query."""
    c, total, sums = state
    weights, largest = _scaled(q, c)
    return dot("btkgp,bkpv->btkgv", weights, sums), dot("btkgp,bkp->btkg", weights, total), largest


def _divided(sums, total):
    return jnp.where((total != 0)[..., None], sums / jnp.where(total != 0, total, 1)[..., None], 0)


def _diagonal(q, k, v):
    """Returns the same as `_read`, for each query's own token."""
    x = q + k[:, :, :, None]
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1))
    total = jnp.sum(jnp.exp(x - _finite(largest)[..., None]), axis=-1)
    return total[..., None] * v[:, :, :, None], total, largest


def _across(q, k, v, m):
    """Returns the same as `_read`, for the contribution of the first half of each block of 2 m tokens to the second.

    Keys are divided by the largest of their half, all of which these queries see, never by a later one. So however
    different keys are, the largest weight that a query sees is 1.
    """

    def half(x, which):
        return x.reshape(-1, 2, m, *x.shape[2:])[:, which]

    def with_nothing(x, nothing=0.0):
        return jnp.stack([jnp.full_like(x, nothing), x], axis=1).reshape(*q.shape[:2], *x.shape[2:])

    first = half(k, 0)
    c = jax.lax.stop_gradient(jnp.max(first, axis=1))
    weights, largest = _scaled(half(q, 1), c)
    scores = dot("btkgp,bskp->bkgts", weights, jnp.exp(first - _finite(c)[:, None]))
    sums, total = dot("bkgts,bskv->btkgv", scores, half(v, 0)), jnp.moveaxis(jnp.sum(scores, axis=-1), 3, 1)
    return with_nothing(sums), with_nothing(total), with_nothing(largest, -jnp.inf)


def _joined(parts):
    """Combines parts as returned by `_read` into (sums, total), all divided by the largest divisor."""
    top = _finite(functools.reduce(jnp.maximum, [largest for *_, largest in parts]))
    shares = [jnp.exp(largest - top) for *_, largest in parts]
    return (
        sum(share[..., None] * sums for share, (sums, _, _) in zip(shares, parts)),
        sum(share * total for share, (_, total, _) in zip(shares, parts)),
    )


def _chunks(q, k, v):
    """Returns the causal form: a chunk reads earlier tokens from the state, and its own keys by recursive halving."""
    size = min(CHUNK, 1 << (q.shape[1] - 1).bit_length())

    def split(x, fill=0.0):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    halves = [1 << n for n in range(size.bit_length() - 1)]

    @jax.checkpoint  # the backward stores only the state at each chunk's start, and nothing quadratic in the chunk
    def chunk(state, x):
        q, k, v = x
        parts = [_read(q, state), _diagonal(q, k, v), *(_across(q, k, v, m) for m in halves)]
        return _with_keys(state, k, v), _divided(*_joined(parts))

    _, out = jax.lax.scan(chunk, _nothing(k, v), (split(q), split(k, -jnp.inf), split(v)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *out.shape[3:])


# -- quantised attention -----------------------------------------------------------------------------------------------


def quantized_forward(query, key, value, mask, softmax_scale, block_size):
    B, T, N, H = query.shape
    S, K, Hv = key.shape[1], key.shape[2], value.shape[3]
    scale = 1 / math.sqrt(H) if softmax_scale is None else softmax_scale
    keys = key_range(mask, T, S)
    q, q_scale = quantized(query, block_size)
    k, k_scale = quantized(centred(key), block_size)
    block_q, block_k = min(BLOCK, T), min(BLOCK, S)
    active = jnp.asarray(active_tiles(keys, block_q, block_k))
    rows = {"x": q, "scale": q_scale, "real": jnp.ones((1, T), bool), **keys.of_queries()}
    columns = {"x": k, "scale": k_scale, "value": value, "real": jnp.ones((1, S), bool), **keys.of_keys()}

    def split(x, size):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    rows = {n: split(x, block_q) for n, x in rows.items()}
    columns = {n: split(x, block_k) for n, x in columns.items()}

    def query_block(_, x):
        row, needed = x
        heads = row["x"].reshape(B, block_q, K, N // K, H)
        row_scale = jnp.moveaxis(row["scale"].reshape(B, block_q, K, N // K), 1, 3)[..., None] * scale

        def pair(carry, column):
            largest, total, out = carry
            integers = jnp.einsum("btkgh,bskh->bkgts", heads, column["x"], preferred_element_type=jnp.int32)
            x = integers.astype(jnp.float32) * row_scale * column["scale"].swapaxes(1, 2)[:, :, None, None]
            seen = visible(keys._replace(**{n: x for n, x in (row | column).items() if n in KeyRange._fields}))
            seen &= row["real"][:, :, None] & column["real"][:, None]
            x = jnp.where(seen[:, None, None], x, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(x, axis=-1))
            anchor = jnp.where(new == -jnp.inf, 0, new)
            p, rescale = jnp.exp(x - anchor[..., None]), jnp.exp(largest - anchor)
            values = dot("bkgts,bskv->bkgtv", p.astype(value.dtype), column["value"])
            return new, total * rescale + jnp.sum(p, axis=-1), out * rescale[..., None] + values

        def key_block(carry, x):
            column, is_active = x
            return jax.lax.cond(is_active, pair, lambda carry, _: carry, carry, column), None

        start = jnp.full((B, K, N // K, block_q), -jnp.inf, jnp.float32)
        start = start, jnp.zeros_like(start), jnp.zeros((*start.shape, Hv), jnp.float32)
        (_, total, out), _ = jax.lax.scan(key_block, start, (columns, needed))
        return None, jnp.moveaxis(_divided(out, total), 3, 1).astype(query.dtype)

    _, out = jax.lax.scan(query_block, None, (rows, active))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, N, Hv)[:, :T]


def quantized_backward(saved, query, key, value, mask, softmax_scale, block_size):
    """Straight-through: the gradient of attention on the original arrays, whose forward is recomputed for its lse."""
    del block_size
    _, pull = jax.vjp(lambda q, k, v: _flash(q, k, v, mask, softmax_scale), query, key, value)
    return dict(zip(("query", "key", "value"), pull(saved.d_out), strict=True))


def _dense(call):
    if call.mask is not None and call.mask.attention_mask is not None:
        return "its mask is dense; use segments, positions or windows"
    return None


differential_op.register(*differential("xla"), name="xla", symbolic={"B"}, **EVERYWHERE)
linformer_op.register(
    linformer_forward, backward_of(linformer_op, linformer_forward), name="xla", symbolic={"B"}, **EVERYWHERE
)
performer_op.register(
    performer_forward, backward_of(performer_op, performer_forward), name="xla", symbolic={"B"}, **EVERYWHERE
)
mixture_op.register(*mixture("xla"), name="xla", symbolic={"B"}, **EVERYWHERE)
quantized_op.register(quantized_forward, quantized_backward, name="xla", symbolic={"B"}, rejects=_dense, **EVERYWHERE)
