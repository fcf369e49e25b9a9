"""Cross entropy on GPUs: one pass over a block of logits for all outputs, and one for their gradient; matmuls are XLA's."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.rows.vocabulary_triton import (
    LN_2,
    bent,
    exp,
    exp_of,
    facts,
    finite,
    joined,
    log2_of_lanes,
    passed,
)
from kernels.ops.cross_entropy.adapters import BLOCK_ELEMENTS, MOST_ROWS, PER_TOKEN, register, register_logits
from kernels.ops.cross_entropy.contract import CrossEntropyConfig


@triton.jit
def _more(ptr, cols, largest, total, plain, V: tl.constexpr, CAP: tl.constexpr, MASKED):
    """Returns the running values of the lanes after one more tile: maximum, sum of exponentials, sum."""
    if MASKED:
        x = tl.load(ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(ptr + cols).to(tl.float32)
    x, _ = bent(x, CAP)
    counted = x
    if MASKED:
        x = tl.where(cols < V, x, float("-inf"))
        counted = tl.where(cols < V, x, 0.0)
    new, rescaled = joined(x, largest)
    total = total * rescaled + tl.sum(exp_of(x, finite(new)[:, None]), axis=1)
    return new, total, plain + tl.sum(counted, axis=1)


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    target_logit_ptr,
    mean_logit_ptr,
    V: tl.constexpr,
    W: tl.constexpr,  # entries of a row in memory, V or more
    CAP: tl.constexpr,  # 0: none
    BLOCK_V: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane keeps its own maximum and sum, so lanes exchange nothing until the end.
    largest = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V // LANE], tl.float32)
    plain = tl.zeros([BLOCK_V // LANE], tl.float32)
    # Only the last tile is masked: the exponentials alone keep the arithmetic units busy while the logits are read.
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for start in range(0, WHOLE, BLOCK_V):
        largest, total, plain = _more(logits_ptr + row * W, start + cols, largest, total, plain, V, CAP, False)
    if WHOLE < V:
        largest, total, plain = _more(logits_ptr + row * W, WHOLE + cols, largest, total, plain, V, CAP, True)
    tl.store(lse_ptr + row, log2_of_lanes(largest, total) * LN_2)
    tl.store(mean_logit_ptr + row, tl.sum(plain, axis=0) / V)
    target = tl.load(targets_ptr + row)
    valid = (target >= 0) & (target < V)
    at_target = tl.load(logits_ptr + row * W + target, mask=valid, other=0.0).to(tl.float32)
    at_target, _ = bent(at_target, CAP)
    tl.store(target_logit_ptr + row, at_target)


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    d_lse_ptr,
    d_target_logit_ptr,
    d_mean_logit_ptr,
    d_logits_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * W + cols, mask=cols < V, other=0.0).to(tl.float32)
    x, slope = bent(x, CAP)
    lse, d_lse = tl.load(lse_ptr + row), tl.load(d_lse_ptr + row)
    d = exp(x - finite(lse)) * d_lse + tl.load(d_mean_logit_ptr + row) / V
    d += tl.where(cols == tl.load(targets_ptr + row), tl.load(d_target_logit_ptr + row), 0.0)
    # Products read what lies past the vocabulary, too.
    d = tl.where(cols < V, d * slope, 0.0)
    tl.store(d_logits_ptr + row * W + cols, d.to(d_logits_ptr.dtype.element_ty), mask=cols < W)


def _outputs(logits, targets, cap, cfg, V=None):
    return passed(cross_entropy_fwd_kernel, [logits], [targets], cfg, outputs=3, V=V, CAP=cap or 0.0)


def _pull(logits, row, dtype, cap, cfg, V=None):
    rows = [row[name] for name in PER_TOKEN]
    return passed(cross_entropy_bwd_kernel, [logits], rows, cfg, outputs=dtype, V=V, CAP=cap or 0.0)[0]


# 8 float32 per thread; for a 16-bit type that is one load.
FACTS = facts(CrossEntropyConfig, BLOCK_ELEMENTS, MOST_ROWS, per_warp=256)
register("triton_gpu", _outputs, _pull, widens=True, **FACTS)
register_logits("triton_gpu", _outputs, _pull, **FACTS)
