"""Native sparse attention in NumPy float64, query by query: the oracle of the operation and of its layer."""

import itertools

import numpy as np


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def loop(
    query, key, value, g_cmp=None, g_slc=None, g_swa=None, *, block_size, block_counts=None, block_indices=None, **rest
):
    """Returns the output in float64: for each query the tokens of each branch are listed, one by one."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    (b_, t_, n_, h), (s_, k_) = q.shape, k.shape[1:3]
    scale = rest.get("softmax_scale") or 1 / np.sqrt(h)
    out = np.zeros((b_, t_, n_, v.shape[-1]))
    for b, t in np.ndindex(b_, t_):
        at = s_ - t_ + t
        begin = document_of(rest, b, at)
        if begin is None:
            continue
        own = (at - begin) // block_size
        tokens_of = [
            [j for j in range(begin + c * block_size, begin + (c + 1) * block_size) if j <= at] for c in range(own + 1)
        ]
        whole = [c for c in range(own + 1) if begin + (c + 1) * block_size - 1 <= at]
        for kv in range(k_):
            heads = range(kv * (n_ // k_), (kv + 1) * (n_ // k_))
            mean_k = [k[b, tokens_of[c], kv].mean(0) for c in whole]
            mean_v = [v[b, tokens_of[c], kv].mean(0) for c in whole]
            weights = {n: softmax(np.array([m @ q[b, t, n] * scale for m in mean_k])) if whole else [] for n in heads}
            if block_indices is None:
                rank = {c: np.mean([weights[n][c] for n in heads]) if c in whole else 0.0 for c in range(own + 1)}
                rank |= {c: 9.0 - i for i, c in reversed(list(enumerate((own, 0, own - 1)))) if c >= 0}
                named = sorted(rank, key=lambda c: (-rank[c], c))
                most = 16 if block_counts is None else block_counts
            else:
                row = block_indices[b, t if block_indices.shape[1] == t_ else t // block_size, kv]
                named, most = list(row), len(row) if block_counts is None else block_counts
            most = most if np.ndim(most) == 0 else most[b, t, kv]
            chosen = {c for c in named[:most] if 0 <= c <= own}
            branches = [(g_slc, [j for c in sorted(chosen) for j in tokens_of[c]])]
            if rest.get("sliding_window"):
                branches.append((g_swa, [j for j in range(begin, at + 1) if j > at - rest["sliding_window"]]))
            for n in heads:
                if g_cmp is not None and whole:
                    out[b, t, n] += g_cmp[b, t, n] * (weights[n] @ np.array(mean_v))
                for gate, js in branches:
                    if js:
                        p = softmax(k[b, js, kv] @ q[b, t, n] * scale)
                        out[b, t, n] += (1 if gate is None else gate[b, t, n]) * (p @ v[b, js, kv])
    return out


def document_of(rest, b, at):
    """Returns the place of the first token of the document that a token is in, None for padding."""
    if "cu_seqlens" in rest:
        return next((i for i, j in itertools.pairwise(rest["cu_seqlens"]) if i <= at < j), None)
    if "segment_ids" not in rest:
        return 0
    ids, begin = rest["segment_ids"][b], at
    while begin and ids[begin - 1] == ids[at]:
        begin -= 1
    return None if ids[at] < 0 else begin
