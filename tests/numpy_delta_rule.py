"""The delta rules in NumPy, float64, a row, head and token at a time, and arrays to call them with."""

import numpy as np

import kernels

RNG = np.random.default_rng(0)
NAMES = {"delta_rule": ("query", "key", "value", "beta"), "rwkv7": ("r", "w", "k", "v", "a", "b")}
NAMES["gated_delta_rule"] = NAMES["kernel_delta_attention"] = (*NAMES["delta_rule"], "g")


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def decays(rng, *shape, low=1e-4, high=20.0):
    return -np.exp(rng.uniform(np.log(low), np.log(high), shape))


def arrays(name, B=1, T=9, K=1, N=2, H=4, Hv=3, seed=0, beta=2.0, **spread):
    """Returns the arrays of a function, float32: keys of norm 1, decays of all sizes."""
    rng = np.random.default_rng(seed)
    if name == "rwkv7":
        a = {"r": unit(rng, B, T, N, H), "w": decays(rng, B, T, N, H, **spread), "k": unit(rng, B, T, N, H)}
        a |= {"v": rng.standard_normal((B, T, N, Hv)), "a": -unit(rng, B, T, N, H)}
        a["b"] = unit(rng, B, T, N, H) * rng.random((B, T, N, H))
    else:
        a = {"query": unit(rng, B, T, K, H), "key": unit(rng, B, T, K, H), "value": rng.standard_normal((B, T, N, Hv))}
        a["beta"] = beta * rng.random((B, T, N))
        if name == "gated_delta_rule":
            a["g"] = decays(rng, B, T, N, **spread)
        if name == "kernel_delta_attention":
            a["g"] = decays(rng, B, T, N, H, **spread)
    return {n: x.astype(np.float32) for n, x in a.items()}


def numpy_loop(name, a, state=None, ids=None, scale=None, l2norm=False):
    """Returns (out, final states [B, N, H, Hv]) in float64: one row, head and token at a time, the formulas as documented."""
    a = {n: np.asarray(x, np.float64) for n, x in a.items()}
    q, k, v = (a["r"], a["k"], a["v"]) if name == "rwkv7" else (a["query"], a["key"], a["value"])
    (B, T, N, Hv), H, per = v.shape, q.shape[-1], v.shape[2] // k.shape[2]
    scale = H**-0.5 if scale is None else scale
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    out, finals = np.zeros((B, T, N, Hv)), np.zeros((B, N, H, Hv))
    for b, n in np.ndindex(B, N):
        S = np.zeros((H, Hv)) if state is None else np.asarray(state[b, n], np.float64)
        before = None
        for t in range(T):
            now = 0 if ids is None else ids[b, t]
            if now < 0:
                continue
            if before is not None and now != before:
                S = np.zeros((H, Hv))
            before = now
            qt, kt, vt = q[b, t, n // per], k[b, t, n // per], v[b, t, n]
            if name == "rwkv7":
                read = S.T @ a["a"][b, t, n]
                S = np.exp(a["w"][b, t, n])[:, None] * S + np.outer(a["b"][b, t, n], read) + np.outer(kt, vt)
            else:
                g = np.broadcast_to(a["g"][b, t, n], (H,)) if "g" in a else np.zeros(H)
                S = np.exp(g)[:, None] * S
                S = S + a["beta"][b, t, n] * np.outer(kt, vt - S.T @ kt)
            out[b, t, n] = scale * S.T @ qt
        finals[b, n] = S
    return out, finals


def call(name, a, **options):
    return getattr(kernels, name)(*(a[n] for n in NAMES[name]), **options)


IDS = np.array([[0, 0, 1, -1, 1, 2, 0, -1, -1], [-1, 3, 3, 3, 3, 3, 3, 3, -1]])
STATE = RNG.standard_normal((2, 2, 4, 3)).astype(np.float32)
