"""Floating-point operations of a training step, counted from the mask in use.

Two conventions, both named because they differ by 2x at long context. causal: attention counts exactly the (query, key)
pairs that the mask lets through. full: attention counts T x T pairs in every layer, whatever the mask. Both count a
multiply-add as 2, the backward as twice the forward, no recomputation, and neither norms nor the embedding lookup. A matmul
with a frozen parameter has one product in its backward, and is counted with it. A reference of a loss has one forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ejdist.models.model import CAUSAL, Flops
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import keys_of_causal

# Dense bf16 peaks by device kind, in FLOP/s, from the vendors' data sheets.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
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
    """Returns the bf16 peak of one device in FLOP/s, None if it is unknown (a CPU)."""
    matches = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(matches, key=len)] if matches else None


# Bytes/s of a device's memory, by device kind, from the vendors' data sheets. Of an A100 and GB200 as XLA lists them, see
# `ejdist/planning/chips.py`.
MEMORY = {
    "NVIDIA A100-SXM4-80GB": 2039e9,
    "NVIDIA A100-SXM4-40GB": 1555e9,
    "NVIDIA H100": 3350e9,
    "NVIDIA H200": 4800e9,
    "NVIDIA B200": 8000e9,
    "NVIDIA GB200": 7928e9,
    "TPU v4": 1228e9,
    "TPU v5 lite": 819e9,
    "TPU v5": 2765e9,
    "TPU v6 lite": 1638e9,
    "TPU7x": 7380e9,
}


def memory_rate(device_kind: str) -> float:
    """Returns the bytes/s of the memory of one device; infinite where they are unknown, so that passes over it cost nothing."""
    matches = [name for name in MEMORY if device_kind.startswith(name)]
    return MEMORY[max(matches, key=len)] if matches else math.inf


# Of the peak, what attention's kernels reached in steps on H200s, forward and backward; heads of 64 and less do as many
# exponentials for half the products.
ATTENTION, NARROW = 0.53, 0.38


def attention_share(width: int) -> float:
    """Returns the share of the peak that attention is expected to reach, with heads of that width."""
    return ATTENTION if width > 64 else NARROW


def visible_pairs(segment_ids: np.ndarray, mask: MaskInfo = CAUSAL) -> int:
    """Returns how many (query, key) pairs causal attention computes in a batch of packed documents.

    Only the lengths of the documents matter, so a permuted batch gives the same count.

    Args:
      segment_ids: int [B, T], -1 for padding; before any permutation each document is one run of neighbours.
      mask: the rules inside a document, without arrays.
    """
    segment_ids = np.asarray(segment_ids)
    pairs = _pairs_of_documents(mask, segment_ids.shape[1])
    return sum(int(pairs[np.bincount(row[row >= 0])].sum()) for row in segment_ids)


@functools.lru_cache(maxsize=64)
def _pairs_of_documents(mask: MaskInfo, longest: int) -> np.ndarray:
    """Returns int64 [longest + 1]: document length -> its number of pairs."""
    return np.concatenate([[0], np.cumsum(keys_of_causal(mask, longest))])


def matmul_flops_per_token(parts: Iterable[Flops]) -> int:
    """Returns the forward FLOPs of a token in matmuls with parameters: two for each weight that multiplies it."""
    return sum(part.token for part in parts)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward over one global batch, by both conventions."""

    causal: float
    full: float


def step_flops(parts: Iterable[Flops], segment_ids: np.ndarray) -> StepFlops:
    """Returns the FLOPs of a training step of a model with those parts on a batch with those segments, int [B, T].

    Matmuls with parameters count every position, padding too, because it is computed.
    """
    whole, forward = [], []  # parts of the trained model, and of references
    for part in parts:
        (whole if part.backward else forward).append(part)
    rows, length = segment_ids.shape
    pairs = {mask: visible_pairs(segment_ids, mask) for mask in {p.mask for p in (*whole, *forward) if p.pair}}
    exact, square = 0.0, 0.0
    for times, of in ((3.0, whole), (1.0, forward)):
        exact += times * sum(p.pair * pairs[p.mask] for p in of if p.pair)
        square += times * sum(p.pair for p in of) * rows * length * length
    tokens = 3.0 * matmul_flops_per_token(whole) - sum(p.frozen for p in whole) + matmul_flops_per_token(forward)
    return StepFlops(causal=tokens * rows * length + exact, full=tokens * rows * length + square)
