"""The router and the layer of experts as a loop over tokens and experts, in NumPy: the oracle of `route` and `moe`."""

import math
from collections import defaultdict

import numpy as np

from ejdist.experts import Stats

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
    )  # fmt: skip
    return experts, weights, stats


def moe(
    x, router, gate, up=None, down=None, *, activation="silu", alpha=1.702, limit=7.0, gate_bias=None, up_bias=None,
    down_bias=None, shared_gate=None, shared_up=None, shared_down=None, shared_expert_gate=None, **routing,
):  # fmt: skip
    def inner(g, u):
        if activation != "clamped_swiglu":
            return ACTIVATIONS[activation](g) * u
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        return g * _sigmoid(alpha * g) * (u + 1)

    def of(array, e):
        return 0.0 if array is None else array[e]

    if up is None:
        gate, up = gate[:, :, 0], gate[:, :, 1]
        gate_bias, up_bias = (None, None) if gate_bias is None else (gate_bias[:, 0], gate_bias[:, 1])
    experts, weights, stats = route(x, router, **routing)
    out = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        if experts[b, t, 0] < 0:
            continue
        row = x[b, t]
        for e, w in zip(experts[b, t], weights[b, t], strict=True):
            hidden = inner(row @ gate[e] + of(gate_bias, e), row @ up[e] + of(up_bias, e))
            out[b, t] += w * (hidden @ down[e] + of(down_bias, e))
        if shared_gate is not None:
            always = inner(row @ shared_gate, row @ shared_up) @ shared_down
            out[b, t] += always if shared_expert_gate is None else _sigmoid(row @ shared_expert_gate) * always
    return out, stats
