"""Floating-point operations of a training step, counted from the mask that is actually used.

Two conventions are in use, and at long context they differ by 2 and more, so every number here says which it is:

- `causal`: attention counts the (query, key) pairs that the mask lets through, exactly: causality, windows, documents;
- `full`: attention counts the whole square of every row in every layer, whatever the mask.

Both count a multiply and an add as two operations, forward plus backward as three times the forward, and nothing twice
that is computed twice (remat, or scores in the backward of flash attention): model FLOPs (Chowdhery et al., PaLM, 2022,
appendix B). Matmuls with parameters count every position, padding too, because it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ejdist.models.config import DecoderConfig
from ejdist.models.decoder import declare

# Dense bfloat16 peak of one device, as published by its maker, in FLOP/s. A key is found inside `device_kind`.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
}


def visible_pairs(segment_ids: np.ndarray, window: int | None = None) -> int:
    """Returns how many (query, key) pairs a causal mask lets through, over all rows of segment_ids [B, T].

    A pair counts if both have the same id, not -1, the key is not later, and fewer than `window` tokens before. For n
    tokens of a document that is n (n + 1) / 2 without a window, and with one of W < n: W (W + 1) / 2 + (n - W) W.
    Only the lengths of documents matter, so any permutation of the sequence gives the same count; a document must be
    one run of neighbours before it.
    """
    total = 0
    for row in np.asarray(segment_ids):
        n = np.bincount(row[row >= 0]).astype(np.int64)
        w = n if window is None else np.minimum(n, window)
        total += int(np.sum(w * (w + 1) // 2 + (n - w) * w))
    return total


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step, forward and backward, of the global batch."""

    matmul: int  # with parameters
    attention_causal: int  # of the pairs that the mask lets through
    attention_full: int  # of the whole square

    @property
    def causal(self) -> int:
        """All of it, attention counted exactly."""
        return self.matmul + self.attention_causal

    @property
    def full(self) -> int:
        """All of it, attention counted as the whole square."""
        return self.matmul + self.attention_full


def matmul_flops_per_token(config: DecoderConfig) -> int:
    """Returns the forward FLOPs of a token in matmuls with parameters: two for each weight that multiplies it.

    The embedding is looked up, not multiplied, unless it is the output projection too; norms and biases are no matmuls.
    """
    declared = declare(config)
    matrices = sum(p.size for p in declared["layers"].values() if isinstance(p.init, float))
    head = declared["embedding"] if config.tie_embeddings else declared["lm_head"]
    return 2 * (matrices + head.size)


def step_flops(config: DecoderConfig, segment_ids: np.ndarray) -> StepFlops:
    """Returns the FLOPs of a step on a batch with these segment_ids [B, T], in the batch's order or any other."""
    rows, length = np.shape(segment_ids)
    # Scores and weighted values: two matmuls of head_dim per pair and query head.
    per_pair = 2 * 2 * config.num_heads * config.head_dim
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    pairs = {window: visible_pairs(segment_ids, window) for window in set(windows)}
    return StepFlops(
        matmul=3 * matmul_flops_per_token(config) * rows * length,
        attention_causal=3 * per_pair * sum(pairs[window] for window in windows),
        attention_full=3 * per_pair * config.num_layers * rows * length**2,
    )


def peak_flops(device_kind: str) -> float | None:
    """Returns the published dense bfloat16 peak of a device (`jax.Device.device_kind`) in FLOP/s, None if not known."""
    matches = [name for name in PEAK_FLOPS if name.lower() in device_kind.lower()]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def utilisation(flops: StepFlops, step_seconds: float, num_devices: int, peak: float | None) -> dict[str, float | None]:
    """Returns tflops_per_device (of the causal convention), mfu_causal and mfu_full.

    Args:
      peak: FLOP/s of one device, published (`peak_flops`) or measured; None where there is none to compare with, and
        then the two utilisations are None.
    """
    causal, full = (f / step_seconds / num_devices for f in (flops.causal, flops.full))
    return {
        "tflops_per_device": causal / 1e12,
        "mfu_causal": causal / peak if peak else None,
        "mfu_full": full / peak if peak else None,
    }
