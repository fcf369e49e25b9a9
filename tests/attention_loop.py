"""Attention as loops over NumPy float64 and Python integers: what DESIGN means, written a second time with nothing shared."""

import math

import numpy as np


def sees(mask, i, j, b, n, T, S):
    """Returns whether query i of row b, head n, sees key j, by reading the fields of a mask one by one."""

    def row(x):
        return np.asarray(x)[b if np.shape(x)[0] > 1 else 0]

    segments = mask.q_segment_ids is not None
    if segments:
        q_ids, k_ids = row(mask.q_segment_ids), row(mask.kv_segment_ids)
        if q_ids[i] != k_ids[j] or q_ids[i] < 0:
            return False
    if mask.q_positions is not None:
        at, of = int(row(mask.q_positions)[i]), int(row(mask.kv_positions)[j])
    else:
        at, of = i + S - T, j
    if mask.causal and of > at:
        in_prefix = mask.prefix_lengths is not None and of < int(
            np.asarray(mask.prefix_lengths)[b % np.size(mask.prefix_lengths)]
        )
        if not in_prefix:
            return False
    if mask.window is not None:
        left, right = mask.window
        if left is not None and of < at - left and not _is_sink(mask, i, j, b, of):
            return False
        if right is not None and of > at + right:
            return False
    if mask.chunk_size is not None:
        if segments and (mask.q_positions is None or mask.packed):
            same = int(q_ids[i])
            of = sum(1 for x in k_ids[:j] if x == same)
            at = sum(1 for x in q_ids[:i] if x == same) + sum(k_ids == same) - sum(q_ids == same)
        if at // mask.chunk_size != of // mask.chunk_size:
            return False
    if mask.attention_mask is not None:
        m = np.asarray(mask.attention_mask)
        where = tuple(x if size > 1 else 0 for x, size in zip((b, n, i, j), m.shape, strict=True))
        return bool(m[where])
    return True


def _is_sink(mask, i, j, b, position):
    """Returns whether key j is one of the first `sink_tokens` of the sequence of query i."""
    if mask.sink_tokens is None:
        return False
    if mask.q_segment_ids is None or (mask.q_positions is not None and not mask.packed):
        return position < mask.sink_tokens
    q_ids, k_ids = (np.asarray(x)[b % len(x)] for x in (mask.q_segment_ids, mask.kv_segment_ids))
    return sum(1 for x in k_ids[:j] if x == q_ids[i]) < mask.sink_tokens


def visible(mask, B, N, T, S):
    """Returns bool [B, N, T, S] by asking about every pair."""
    heads = N if mask.attention_mask is not None else 1
    seen = [
        [[[sees(mask, i, j, b, n, T, S) for j in range(S)] for i in range(T)] for n in range(heads)] for b in range(B)
    ]
    return np.broadcast_to(np.array(seen), (B, N, T, S))


def _mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def kept(seed, q_position, k_position, probability):
    """Returns whether dropout keeps a weight, in Python integers."""
    row = _mix(int(seed) ^ _mix(int(q_position) * 0x9E3779B1 % 2**32))
    return _mix(row ^ (int(k_position) * 0x85EBCA77 % 2**32)) >= round(probability * 2**32)


def plan(B, N, T, S, mask=None, dropout_seed=None, dropout_prob=0.0):
    """Returns what does not depend on the float arguments: (visible, distance, dropout scale), each [B, N, T, S]."""
    from kernels.engines.attention.masks import MaskInfo

    mask = MaskInfo() if mask is None else mask
    q, k = ((np.arange(T) + S - T)[None], np.arange(S)[None])
    if mask.q_positions is not None:
        q, k = np.asarray(mask.q_positions, np.int64), np.asarray(mask.kv_positions, np.int64)
    q, k = np.broadcast_to(q, (B, T)), np.broadcast_to(k, (B, S))
    scale = np.ones((B, N, T, S))
    if dropout_prob:
        seeds = np.broadcast_to(np.asarray(dropout_seed), (B, N))
        for b, n, i, j in np.ndindex(B, N, T, S):
            scale[b, n, i, j] = kept(seeds[b, n], q[b, i], k[b, j], dropout_prob) / (1 - dropout_prob)
    distance = np.broadcast_to(np.abs(q[:, None, :, None] - k[:, None, None, :]), (B, N, T, S))
    return visible(mask, B, N, T, S), distance, scale


def attention(
    seen,
    distance,
    dropout,
    query,
    key,
    value,
    bias=None,
    softmax_aux=None,
    alibi_slopes=None,
    softmax_scale=None,
    cap=None,
):
    """Returns (out [B, T, N, Hv], lse [B, T, N]) in float64, a row at a time."""
    (B, T, N, H), (_, S, K, Hv) = query.shape, value.shape
    out, lse = np.zeros((B, T, N, Hv)), np.full((B, T, N), -np.inf)
    bias = None if bias is None else np.broadcast_to(bias, (B, N, T, S))
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (B, N))
    for b, n, i in np.ndindex(B, N, T):
        kv = n // (N // K)
        x = key[b, :, kv] @ query[b, i, n] * (1 / math.sqrt(H) if softmax_scale is None else softmax_scale)
        x = x if cap is None else cap * np.tanh(x / cap)
        x = x if bias is None else x + bias[b, n, i]
        x = x if slopes is None else x - slopes[b, n] * distance[b, n, i]
        x = x[seen[b, n, i]]
        everything = x if softmax_aux is None else np.concatenate([x, softmax_aux[n]])
        if everything.size == 0:
            continue
        top = everything.max()
        lse[b, i, n] = top + np.log(np.exp(everything - top).sum())
        weights = np.exp(x - lse[b, i, n]) * dropout[b, n, i][seen[b, n, i]]
        out[b, i, n] = weights @ value[b, seen[b, n, i], kv]
    return out, lse
