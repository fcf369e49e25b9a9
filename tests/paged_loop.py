"""Paged attention as a loop in NumPy, float64, and what its tests share."""

import itertools

import jax
import numpy as np

from kernels.ops.paged_attention import PagedAttentionConfig, op

RNG = np.random.default_rng(0)
# Blocks so small that a request has several, and a step has pairs of several requests and of one.
SMALL = PagedAttentionConfig(block_q=2, block_k=4, parallel=3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


PAGE = {"key_cache": normal(8, 4, 2, 16), "value_cache": normal(8, 4, 2, 16)}
TABLES, LENS = np.int32([[5, 0, 3], [1, 7, 0], [2, 2, 2]]), np.int32([9, 4, 1])
CUTS = np.int32([0, 5, 6, 7])
QUERY = normal(7, 4, 16)


def loop(
    query,
    key_cache,
    cuts,
    lens,
    tables,
    value_cache=None,
    k_scale=1.0,
    v_scale=1.0,
    softmax_aux=None,
    alibi_slopes=None,
    softmax_scale=None,
    logits_soft_cap=None,
    causal=True,
    window=None,
    starts=None,
):
    """Returns [M, N, Hv], float64: a loop over requests, queries, heads and keys, each key looked up in its page."""
    M, N, H = query.shape
    wide = [None if x is None else np.asarray(x, np.float64) for x in (query, key_cache, value_cache)]
    q, keys, values = wide
    if values is None:
        keys, values = keys[..., :H], keys[..., H:]
    keys, values = (
        x * np.broadcast_to(np.asarray(s, np.float64), x.shape[:3])[..., None]
        for x, s in ((keys, k_scale), (values, v_scale))
    )
    C, K = keys.shape[1:3]
    left, right = (None, None) if window is None else window
    out = np.zeros((M, N, values.shape[3]))
    for r, (begin, end) in enumerate(itertools.pairwise(np.asarray(cuts))):
        for row, n in itertools.product(range(begin, end), range(N)):
            i = lens[r] - (end - begin) + row - begin
            logits, seen = [], []
            for j in range(0 if starts is None else starts[r], min(lens[r], len(tables[r]) * C)):
                if (causal and j > i) or (left is not None and j < i - left) or (right is not None and j > i + right):
                    continue
                page, entry = tables[r][j // C], j % C
                x = q[row, n] @ keys[page, entry, n // (N // K)] * (softmax_scale or 1 / np.sqrt(H))
                x = x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap)
                logits.append(x if alibi_slopes is None else x - alibi_slopes[n] * abs(i - j))
                seen.append(values[page, entry, n // (N // K)])
            if seen:
                sinks = [] if softmax_aux is None else list(softmax_aux[n])
                weights = np.exp(np.array(logits + sinks) - max(logits + sinks))
                out[row, n] = weights[: len(seen)] @ np.array(seen) / weights.sum()
    return out


def numbers(arguments):
    return {n: np.asarray(x) if isinstance(x, jax.Array) else x for n, x in arguments.items()}


def wanted(which, arguments):
    """Returns what the loop says of a case of one of the operations that attend."""
    a = numbers(arguments)
    if which is op:
        a["cuts"], a["lens"], a["tables"] = (a.pop(n) for n in ("query_start_loc", "kv_lens", "block_tables"))
        return loop(**a)
    B, T, N, H = a["query"].shape
    a["query"], a["cuts"], a["lens"] = a["query"].reshape(B * T, N, H), T * np.arange(B + 1), a.pop("kv_lens")
    a["tables"], a["starts"] = a.pop("block_tables", np.arange(B)[:, None]), a.pop("kv_starts", None)
    return loop(**a).reshape(B, T, N, -1)
