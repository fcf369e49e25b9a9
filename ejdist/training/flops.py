"""Floating-point operations of a training step, counted from the mask in use.

Two conventions, both named because they differ by 2x at long context. causal: attention counts exactly the (query, key)
pairs that the mask lets through. full: attention counts T x T pairs in every layer, whatever the mask. Both count a
multiply-add as 2, the backward as twice the forward, no recomputation, and neither norms nor the embedding lookup. A matmul
with a frozen parameter has one product in its backward, and is counted with it. A reference of a loss has one forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ejdist.models.model import CAUSAL, Flops
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import keys_of_causal

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
    masks = {mask for p in (*whole, *forward) for _, mask in p.attends}
    pairs = {mask: visible_pairs(segment_ids, mask) for mask in masks}
    exact, square = 0.0, 0.0
    for times, of in ((3.0, whole), (1.0, forward)):
        exact += times * sum(pair * pairs[mask] for p in of for pair, mask in p.attends)
        square += times * sum(p.pair for p in of) * rows * length * length
    tokens = 3.0 * matmul_flops_per_token(whole) - sum(p.frozen for p in whole) + matmul_flops_per_token(forward)
    return StepFlops(causal=tokens * rows * length + exact, full=tokens * rows * length + square)
