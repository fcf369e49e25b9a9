"""KL divergence on GPUs: one pass over both models' logits for all outputs, and one for the gradient; matmuls are XLA's."""

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
from kernels.ops.kl_divergence.adapters import BLOCK_ELEMENTS, MOST_ROWS, PER_TOKEN, register, register_logits
from kernels.ops.kl_divergence.contract import KLDivergenceConfig


@triton.jit
def _logits(ptr, cols, V: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr, MASKED):
    """Returns a tile of the inputs of the softmax; -inf past the vocabulary."""
    if MASKED:
        raw = tl.load(ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    else:
        raw = tl.load(ptr + cols).to(tl.float32)
    z, _ = bent(raw, CAP, TEMPERATURE)
    if MASKED:
        z = tl.where(cols < V, z, float("-inf"))
    return z


@triton.jit
def _more(p, q, largest_p, largest_q, total_p, total_q, gap):
    """Returns the running values of the lanes after one more tile: maxima, sums of exponentials, p's weighted gap to q."""
    new_p, rescaled_p = joined(p, largest_p)
    new_q, rescaled_q = joined(q, largest_q)
    share = exp_of(p, finite(new_p)[:, None])
    # An entry with p = 0 contributes nothing, however small q is.
    apart = tl.where(share > 0, share * (p - q), 0.0)
    gap = tl.where(rescaled_p > 0, gap * rescaled_p, 0.0) + tl.sum(apart, axis=1)
    total_p = total_p * rescaled_p + tl.sum(share, axis=1)
    total_q = total_q * rescaled_q + tl.sum(exp_of(q, finite(new_q)[:, None]), axis=1)
    return new_p, new_q, total_p, total_q, gap


@triton.jit
def kl_divergence_fwd_kernel(
    student_ptr,
    teacher_ptr,
    student_lse_ptr,
    teacher_lse_ptr,
    gap_ptr,
    V: tl.constexpr,
    W: tl.constexpr,  # entries of a row in memory, V or more
    REVERSE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    CAP: tl.constexpr,  # 0: none
    TEACHER_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_ptr, q_ptr = student_ptr + row * W, teacher_ptr + row * W
    if not REVERSE:
        p_ptr, q_ptr = q_ptr, p_ptr
    P_CAP: tl.constexpr = CAP if REVERSE else TEACHER_CAP
    Q_CAP: tl.constexpr = TEACHER_CAP if REVERSE else CAP
    cols = tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane keeps its own maxima and sums, so lanes exchange nothing until the end.
    largest_p = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    largest_q = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    total_p = tl.zeros([BLOCK_V // LANE], tl.float32)
    total_q = tl.zeros([BLOCK_V // LANE], tl.float32)
    gap = tl.zeros([BLOCK_V // LANE], tl.float32)
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for start in range(0, WHOLE, BLOCK_V):
        p = _logits(p_ptr, start + cols, V, P_CAP, TEMPERATURE, False)
        q = _logits(q_ptr, start + cols, V, Q_CAP, TEMPERATURE, False)
        largest_p, largest_q, total_p, total_q, gap = _more(p, q, largest_p, largest_q, total_p, total_q, gap)
    if WHOLE < V:
        p = _logits(p_ptr, WHOLE + cols, V, P_CAP, TEMPERATURE, True)
        q = _logits(q_ptr, WHOLE + cols, V, Q_CAP, TEMPERATURE, True)
        largest_p, largest_q, total_p, total_q, gap = _more(p, q, largest_p, largest_q, total_p, total_q, gap)
    log2_p, log2_q = log2_of_lanes(largest_p, total_p), log2_of_lanes(largest_q, total_q)
    part = tl.exp2(largest_p - finite(log2_p))
    tl.store(gap_ptr + row, tl.sum(tl.where(part > 0, gap * part, 0.0), axis=0))
    if REVERSE:
        tl.store(student_lse_ptr + row, log2_p * LN_2)
        tl.store(teacher_lse_ptr + row, log2_q * LN_2)
    else:
        tl.store(student_lse_ptr + row, log2_q * LN_2)
        tl.store(teacher_lse_ptr + row, log2_p * LN_2)


@triton.jit
def kl_divergence_bwd_kernel(
    student_ptr,
    teacher_ptr,
    student_lse_ptr,
    teacher_lse_ptr,
    gap_ptr,
    d_student_lse_ptr,
    d_gap_ptr,
    d_logits_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    REVERSE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = row * W + cols
    raw = tl.load(student_ptr + offsets, mask=cols < V, other=0.0).to(tl.float32)
    student, slope = bent(raw, CAP, TEMPERATURE)
    raw = tl.load(teacher_ptr + offsets, mask=cols < V, other=0.0).to(tl.float32)
    teacher, _ = bent(raw, TEACHER_CAP, TEMPERATURE)
    d_gap, gap = tl.load(d_gap_ptr + row), tl.load(gap_ptr + row)
    share = exp(student - finite(tl.load(student_lse_ptr + row)))
    d = tl.load(d_student_lse_ptr + row) * share
    if REVERSE:
        more = tl.where(share > 0, share * (1.0 + (student - teacher) - gap), 0.0)
        # The gap of an ignored token may be infinite; its cotangent is 0.
        d += tl.where(d_gap == 0.0, 0.0, d_gap * more)
    else:
        d -= d_gap * exp(teacher - finite(tl.load(teacher_lse_ptr + row)))
    # Products read what lies past the vocabulary, too.
    d = tl.where(cols < V, d * slope, 0.0)
    tl.store(d_logits_ptr + offsets, d.to(d_logits_ptr.dtype.element_ty), mask=cols < W)


def _options(how):
    return {
        "REVERSE": how.reverse,
        "TEMPERATURE": how.temperature,
        "CAP": how.cap or 0.0,
        "TEACHER_CAP": how.teacher_cap or 0.0,
    }


def _outputs(student, teacher, how, cfg, V=None):
    return passed(kl_divergence_fwd_kernel, [student, teacher], [], cfg, outputs=3, V=V, **_options(how))


def _pull(student, teacher, row, dtype, how, cfg, V=None):
    rows = [row[name] for name in PER_TOKEN]
    return passed(kl_divergence_bwd_kernel, [student, teacher], rows, cfg, outputs=dtype, V=V, **_options(how))[0]


# 16 float32 of each model per thread; for a 16-bit type those are two loads each.
FACTS = facts(KLDivergenceConfig, BLOCK_ELEMENTS, MOST_ROWS, per_warp=512)
register("triton_gpu", _outputs, _pull, widens=True, **FACTS)
register_logits("triton_gpu", _outputs, _pull, **FACTS)
