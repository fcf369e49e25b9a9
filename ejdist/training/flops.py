"""Floating-point operations of a training step, counted from the mask that was used.

Two conventions, both named because they differ by 2x at long context. causal: attention counts exactly the (query, key)
pairs that the mask lets through. full: attention counts T x T pairs in every layer, whatever the mask. Both count a
multiply-add as 2, the backward as twice the forward, no recomputation, and neither norms nor the embedding lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ejdist.models.decoder import DecoderConfig, declare

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

    Only the lengths of the documents matter, so a batch that was permuted gives the same count.

    Args:
      segment_ids: int [B, T], -1 for padding; before any permutation each document is one run of neighbours.
      window: keys that a query sees, itself included; None for all before it.
    """
    total = 0
    for row in np.asarray(segment_ids):
        n = np.bincount(row[row >= 0]).astype(np.int64)
        w = n if window is None else np.minimum(n, window)
        # The first w queries see 1, 2, ..., w keys; the others w each.
        total += int(np.sum(w * (w + 1) // 2 + (n - w) * w))
    return total


def matmul_flops_per_token(config: DecoderConfig) -> int:
    """Returns the forward FLOPs of a token in matmuls with parameters: two for each weight that multiplies it.

    The embedding is looked up, not multiplied, unless it is the output projection too; norms and biases multiply nothing.
    """
    declared = declare(config)
    matrices = sum(p.size for p in declared["layers"].values() if p.init == "normal")
    head = declared["embedding" if config.tie_embeddings else "lm_head"]
    return 2 * (matrices + head.size)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward over one global batch, by both conventions."""

    causal: float
    full: float


def step_flops(config: DecoderConfig, segment_ids: np.ndarray) -> StepFlops:
    """Returns the FLOPs of a training step on a batch with those segments, int [B, T].

    Matmuls with parameters count every position, padding too, because it is computed.
    """
    rows, length = segment_ids.shape
    windows = config.windows()
    of_layer = [windows[layer % len(windows)] for layer in range(config.num_layers)]
    pairs = {window: visible_pairs(segment_ids, window) for window in set(of_layer)}
    exact = sum(pairs[window] for window in of_layer)
    square = config.num_layers * rows * length * length
    matmuls = matmul_flops_per_token(config) * rows * length
    # Two matmuls of head_dim per pair and head.
    attention = 2 * 2 * config.num_heads * config.head_dim
    return StepFlops(causal=3.0 * (matmuls + attention * exact), full=3.0 * (matmuls + attention * square))
