"""Floating-point operations of a training step, counted from the mask that was used.

Two conventions, both named because they differ by 2x at long context. causal: attention counts exactly the (query, key)
pairs that the mask lets through. full: attention counts T x T pairs in every layer, whatever the mask. Both count a
multiply-add as 2, the backward as twice the forward, no recomputation, and neither norms nor the embedding lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ejdist.models.decoder import DecoderConfig

# Dense bf16 peaks by device kind, in FLOP/s, from the vendors' data sheets.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bf16 peak of one device in FLOP/s, None where it is not known (a CPU)."""
    found = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(found, key=len)] if found else None


def visible_pairs(segment_ids: np.ndarray, window: int | None = None) -> int:
    """Returns how many (query, key) pairs causal attention computes in a batch of packed documents.

    Args:
      segment_ids: int [B, T] in the original order, equal ids adjacent, -1 for padding.
      window: keys that a query sees, itself included; None for all before it.
    """
    total = 0
    for row in np.asarray(segment_ids):
        edges = np.flatnonzero(np.diff(row)) + 1
        starts = np.concatenate([[0], edges])
        lengths = np.diff(np.concatenate([starts, [row.size]]))
        n = lengths[row[starts] >= 0].astype(np.int64)
        w = n if window is None else np.minimum(n, window)
        # The first w queries see 1, 2, ..., w keys; the others w each.
        total += int(np.sum(w * (w + 1) // 2 + (n - w) * w))
    return total


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward over one global batch, by both conventions."""

    causal: float
    full: float


def step_flops(config: DecoderConfig, segment_ids: np.ndarray) -> StepFlops:
    """Returns the FLOPs of a training step on a batch with those segments (int [B, T], in the original order)."""
    c = config
    rows, length = segment_ids.shape
    per_token = (
        c.model_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.model_dim * c.ffn_dim
    ) * c.num_layers + c.model_dim * c.vocab_size
    matmuls = 2 * per_token * rows * length
    repeats = c.num_layers // len(c.layer_pattern)
    pairs = {window: visible_pairs(segment_ids, window) for window in set(c.windows())}
    exact = repeats * sum(pairs[window] for window in c.windows())
    square = c.num_layers * rows * length * length
    # Two matmuls of head_dim per pair and head.
    attention = 2 * 2 * c.num_heads * c.head_dim
    return StepFlops(causal=3.0 * (matmuls + attention * exact), full=3.0 * (matmuls + attention * square))
