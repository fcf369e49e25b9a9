"""Experts as a loop over tokens and choices, in NumPy float64, which knows nothing of the code that it is the oracle of.

`route` and `moe` are the router and the layer, whose gradients are to be had by differences. `run` is the exchange of tokens
that have chosen, with the gradients written out by hand. Both are the same expert, `_expert`, over the same `_pairs`.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

B, T, D, E, F, Fs = 2, 7, 5, 8, 3, 4
IDS = np.array([[4, 4, 4, 9, 9, -1, 4], [0, -1, 1, 1, 1, -1, -1]])  # a document that goes on, one of one token, padding
DEEPSEEK = {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "routed_scaling_factor": 2.5, "balance": "sequence"}
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_expert_gate")


def inputs(seed=0, experts=E, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {
        "x": (B, T, D), "router": (D, experts), "gate": (experts, D, F), "up": (experts, D, F), "down": (experts, F, D),
        "fused": (experts, D, 2, F), "fused_bias": (experts, 2, F),
        "router_bias": (experts,), "gate_bias": (experts, F), "up_bias": (experts, F), "down_bias": (experts, D),
        "shared_gate": (D, Fs), "shared_up": (D, Fs), "shared_down": (Fs, D), "shared_expert_gate": (D, 1),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def chosen(arrays, *names):
    if "fused" in names:  # gate and up in one array
        fused = {"gate": arrays["fused"]} | ({"gate_bias": arrays["fused_bias"]} if "gate_bias" in names else {})
        return {n: arrays[n] for n in ("x", "router", "down", *names) if n not in ("fused", "gate_bias")} | fused
    return {n: arrays[n] for n in ("x", "router", "gate", "up", "down", *names)}


_erf = np.vectorize(math.erf)


def _softplus(x):
    return np.logaddexp(0, x)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


SCORES = {
    "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    "sigmoid": _sigmoid,
    "sqrtsoftplus": lambda x: np.sqrt(_softplus(x)),
}
ACTIVATIONS = {"silu": lambda x: x * _sigmoid(x), "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2}


def _best(values, count, allowed):
    """Returns the indices of the largest of the allowed values, of equal ones the first."""
    return sorted(allowed, key=lambda i: (-values[i], i))[:count]


def _choose(choice, top_k, num_groups, topk_groups, group_top):
    members = np.arange(len(choice)).reshape(num_groups, -1)
    if num_groups == 1:
        return _best(choice, top_k, range(len(choice)))
    worth = [sum(sorted(choice[g], reverse=True)[:group_top]) for g in members]
    kept = _best(worth, topk_groups, range(num_groups))
    return _best(choice, top_k, [e for g in kept for e in members[g]])


class Stats(NamedTuple):
    """What `ejdist.experts.Stats` says, by the same names."""

    tokens: int
    counts: np.ndarray
    probabilities: np.ndarray
    balance_loss: float
    z_loss: float
    entropy: float
    max_violation: float
    dead_experts: int
    rank_counts: np.ndarray
    host_counts: np.ndarray
    rank_tokens: np.ndarray
    extra_passes: int = 0
    high_water: float = 0.0
    dropped: int = 0


def _pairs(experts, num_experts, capacity=None):
    """Yields (token, choice, expert, whether the expert has room) of what was chosen; it takes the first `capacity`."""
    taken = np.zeros(num_experts, int)
    for m, j in np.ndindex(experts.shape):
        e = experts[m, j]
        if 0 <= e < num_experts:
            taken[e] += 1
            yield m, j, e, capacity is None or taken[e] <= capacity


def _expert(row, gate, up, down, inner, gate_bias=0.0, up_bias=0.0, down_bias=0.0):
    return inner(row @ gate + gate_bias, row @ up + up_bias) @ down + down_bias


def _balance(counts, probabilities):
    """Returns E sum_e f_e P_e of a list of tokens' probabilities, times their number."""
    total = sum(counts)
    return (
        len(counts) * sum(c / total * sum(p[e] for p in probabilities) for e, c in enumerate(counts)) if total else 0.0
    )


def route(
    x, router, *, top_k, score="softmax", normalize=True, bias=0.0, router_bias=0.0, num_groups=1, topk_groups=None,
    group_top=2, routed_scaling_factor=1.0, segment_ids=None, balance="batch", load=None, forced_balance=False,
):  # fmt: skip
    rows, length, _ = x.shape
    E = router.shape[1]
    experts, weights = np.full((rows, length, top_k), -1), np.zeros((rows, length, top_k))
    counts, z, entropy, tokens = [0] * E, 0.0, 0.0, 0
    sequences = defaultdict(lambda: ([0] * E, []))
    for b in range(rows):
        for t in range(length):
            document = 0 if segment_ids is None else segment_ids[b, t]
            if document < 0:
                continue
            logits = x[b, t] @ router + router_bias
            scores = SCORES[score](logits)
            if forced_balance:
                found = [(tokens * top_k + j) % E for j in range(top_k)]
            else:
                found = _choose(scores + bias, top_k, num_groups, topk_groups, group_top)
            w = scores[found]
            experts[b, t], weights[b, t] = found, routed_scaling_factor * (w / w.sum() if normalize else w)
            p = scores / scores.sum()
            chosen, probabilities = sequences[b, document]
            probabilities.append(p)
            for e in found:
                counts[e] += 1
                chosen[e] += 1
            z += np.log(np.exp(logits).sum()) ** 2
            entropy -= (p * np.log(p)).sum()
            tokens += 1
    every = [p for _, probabilities in sequences.values() for p in probabilities]
    if balance == "sequence":
        loss = sum(_balance(chosen, probabilities) for chosen, probabilities in sequences.values())
    else:
        loss = _balance(counts if load is None else list(load), every)
    stats = Stats(
        tokens=tokens, counts=np.array(counts), probabilities=sum(every, np.zeros(E)), balance_loss=loss, z_loss=z,
        entropy=entropy, max_violation=max(counts) / (tokens * top_k / E) - 1 if tokens else 0.0,
        dead_experts=counts.count(0), rank_counts=np.array([sum(counts)]),
        host_counts=np.array([sum(counts)]), rank_tokens=np.array([tokens]),
    )  # fmt: skip
    return experts, weights, stats


def moe(
    x, router, gate, up=None, down=None, *, activation="silu", alpha=1.702, limit=7.0, gate_bias=None, up_bias=None,
    down_bias=None, shared_gate=None, shared_up=None, shared_down=None, shared_expert_gate=None, capacity=None, **routing,
):  # fmt: skip
    def inner(g, u):
        if activation != "clamped_swiglu":
            return ACTIVATIONS[activation](g) * u
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        return g * _sigmoid(alpha * g) * (u + 1)

    if up is None:
        gate, up = gate[:, :, 0], gate[:, :, 1]
        gate_bias, up_bias = (None, None) if gate_bias is None else (gate_bias[:, 0], gate_bias[:, 1])
    biases = [np.zeros(len(gate)) if b is None else b for b in (gate_bias, up_bias, down_bias)]
    experts, weights, stats = route(x, router, **routing)
    rows, k, E = x.reshape(-1, x.shape[2]), experts.shape[2], router.shape[1]
    room = None if capacity is None else math.ceil(capacity * k * len(rows) / E)
    out, dropped = np.zeros_like(rows), 0
    for m, j, e, fits in _pairs(experts.reshape(-1, k), E, room):
        dropped += not fits
        if fits:
            y = _expert(rows[m], gate[e], up[e], down[e], inner, *(b[e] for b in biases))
            out[m] += weights.reshape(-1, k)[m, j] * y
    for m in np.flatnonzero(experts[..., 0].reshape(-1) >= 0) if shared_gate is not None else ():
        always = _expert(rows[m], shared_gate, shared_up, shared_down, inner)
        out[m] += always if shared_expert_gate is None else _sigmoid(rows[m] @ shared_expert_gate) * always
    return out.reshape(x.shape), stats._replace(dropped=dropped)


class Layer(NamedTuple):
    """Tokens, what they chose, and gated experts: silu(x gate) * (x up), times down."""

    x: np.ndarray  # [M, D]
    experts: np.ndarray  # [M, k]
    weights: np.ndarray  # [M, k]
    gate: np.ndarray  # [E, D, F]
    up: np.ndarray  # [E, D, F]
    down: np.ndarray  # [E, F, D]

    def random(rng, tokens, top_k, num_experts, width=6, hidden=4, experts=None):
        """Returns a layer; choices of a token differ, and about one in eight is none (-1)."""
        if experts is None:
            experts = np.stack([rng.permutation(max(num_experts, top_k))[:top_k] for _ in range(tokens)]) % num_experts
            experts = np.where(rng.random(experts.shape) < 0.12, -1, experts)
        shapes = (tokens, width), experts.shape, *[(num_experts, width, hidden)] * 2, (num_experts, hidden, width)
        x, w, gate, up, down = (rng.standard_normal(s).astype(np.float32) for s in shapes)
        return Layer(x, experts.astype(np.int32), w, gate, up, down)


def run(layer, d_out, capacity=None):
    """Returns (out, {name: gradient}, dropped), where an expert takes the first `capacity` of its tokens."""
    x, experts, weights, gate, up, down = (np.asarray(a, np.float64 if i != 1 else None) for i, a in enumerate(layer))
    out, d_out = np.zeros((len(x), down.shape[2])), np.asarray(d_out, np.float64)
    d = {n: np.zeros(getattr(layer, n).shape) for n in ("x", "weights", "gate", "up", "down")}
    dropped = 0
    for m, j, e, fits in _pairs(experts, len(gate), capacity):
        dropped += not fits
        if not fits:
            continue
        y = _expert(x[m], gate[e], up[e], down[e], lambda g, u: ACTIVATIONS["silu"](g) * u)
        out[m] += weights[m, j] * y
        d["weights"][m, j] = d_out[m] @ y
        dy = weights[m, j] * d_out[m]
        a, b = x[m] @ gate[e], x[m] @ up[e]
        s = _sigmoid(a)
        d["down"][e] += np.outer(a * s * b, dy)
        dh = down[e] @ dy
        da, db = dh * b * (s + a * s * (1 - s)), dh * a * s
        d["gate"][e] += np.outer(x[m], da)
        d["up"][e] += np.outer(x[m], db)
        d["x"][m] += gate[e] @ da + up[e] @ db
    return out, d, dropped
