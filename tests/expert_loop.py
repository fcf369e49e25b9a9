"""Oracle of expert parallelism: NumPy, float64, a loop over tokens and choices, with the gradients written out by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
    taken, dropped = np.zeros(len(gate), int), 0
    for m in range(len(x)):
        for j, e in enumerate(experts[m]):
            if not 0 <= e < len(gate):
                continue
            taken[e] += 1
            if capacity is not None and taken[e] > capacity:
                dropped += 1
                continue
            a, b = x[m] @ gate[e], x[m] @ up[e]
            s = 1 / (1 + np.exp(-a))
            h = a * s * b
            y = h @ down[e]
            out[m] += weights[m, j] * y
            d["weights"][m, j] = d_out[m] @ y
            dy = weights[m, j] * d_out[m]
            d["down"][e] += np.outer(h, dy)
            dh = down[e] @ dy
            da, db = dh * b * (s + a * s * (1 - s)), dh * a * s
            d["gate"][e] += np.outer(x[m], da)
            d["up"][e] += np.outer(x[m], db)
            d["x"][m] += gate[e] @ da + up[e] @ db
    return out, d, dropped
