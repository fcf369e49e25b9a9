"""KL divergence on GPUs: one pass over both models' logits for all outputs, and one for the gradient; matmuls are XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.rows import vocabulary
from kernels.engines.rows.softmax_triton import LANE, LN_2, exp, exp_of, finite, joined, log2_of_lanes, tanh
from kernels.framework.work import Work
from kernels.ops.kl_divergence import blocks
from kernels.ops.kl_divergence.contract import KLDivergenceConfig, logits_op
from kernels.toolchains.triton import triton_launch


@triton.jit
def _bent(x, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Returns (logits under the softmax, their derivative)."""
    slope = 1.0 / TEMPERATURE
    if CAP > 0:
        bent = tanh(x / CAP)
        z, slope = bent * (CAP / TEMPERATURE), (1.0 - bent * bent) / TEMPERATURE
    else:
        z = x / TEMPERATURE
    return z, slope


@triton.jit
def _logits(ptr, cols, V: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr, MASKED):
    """Returns a tile of what is under the softmax; -inf past the vocabulary."""
    if MASKED:
        raw = tl.load(ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    else:
        raw = tl.load(ptr + cols).to(tl.float32)
    z, _ = _bent(raw, CAP, TEMPERATURE)
    if MASKED:
        z = tl.where(cols < V, z, float("-inf"))
    return z


@triton.jit
def _more(p, q, largest_p, largest_q, total_p, total_q, gap):
    """Returns what the lanes have with one tile more: largest entries, sums of exponentials, p's sum of its distance to q."""
    new_p, rescaled_p = joined(p, largest_p)
    new_q, rescaled_q = joined(q, largest_q)
    share = exp_of(p, finite(new_p)[:, None])
    # An entry that p gives nothing counts nothing, and a sum that is 0 stays 0 however far q is.
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
    REVERSE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    CAP: tl.constexpr,  # 0: none
    TEACHER_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_ptr, q_ptr = student_ptr + row * V, teacher_ptr + row * V
    if not REVERSE:
        p_ptr, q_ptr = q_ptr, p_ptr
    P_CAP: tl.constexpr = CAP if REVERSE else TEACHER_CAP
    Q_CAP: tl.constexpr = TEACHER_CAP if REVERSE else CAP
    cols = tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane has largest entries and sums of its own, so that nothing is exchanged until the end.
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
    REVERSE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = row * V + cols
    raw = tl.load(student_ptr + at, mask=cols < V, other=0.0).to(tl.float32)
    student, slope = _bent(raw, CAP, TEMPERATURE)
    raw = tl.load(teacher_ptr + at, mask=cols < V, other=0.0).to(tl.float32)
    teacher, _ = _bent(raw, TEACHER_CAP, TEMPERATURE)
    d_gap, gap = tl.load(d_gap_ptr + row), tl.load(gap_ptr + row)
    own = exp(student - finite(tl.load(student_lse_ptr + row)))
    d = tl.load(d_student_lse_ptr + row) * own
    if REVERSE:
        more = tl.where(own > 0, own * (1.0 + (student - teacher) - gap), 0.0)
        # The gap of a token that is not counted may be infinite, and its cotangent is 0.
        d += tl.where(d_gap == 0.0, 0.0, d_gap * more)
    else:
        d -= d_gap * exp(teacher - finite(tl.load(teacher_lse_ptr + row)))
    tl.store(d_logits_ptr + at, (d * slope).to(d_logits_ptr.dtype.element_ty), mask=cols < V)


def _options(how):
    reverse, temperature, cap, teacher_cap = how
    return {"REVERSE": reverse, "TEMPERATURE": temperature, "CAP": cap or 0.0, "TEACHER_CAP": teacher_cap or 0.0}


def _outputs(student, teacher, how, cfg):
    """Returns the outputs of the contract, of raw logits [rows, V]."""
    rows, V = student.shape
    return triton_launch(
        kl_divergence_fwd_kernel,
        student,
        teacher,
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.float32),) * 3,
        grid=(rows,),
        num_warps=cfg.num_warps,
        work=Work(8 * student.size, student.size * (student.dtype.itemsize + teacher.dtype.itemsize) + 12 * rows),
        V=V,
        BLOCK_V=cfg.block_vocab,
        LANE=LANE,
        **_options(how),
    )


def _pull(student, teacher, row, dtype, how, cfg):
    """Returns the gradient of the student's raw logits [rows, V]."""
    rows, V = student.shape
    sizes = student.dtype.itemsize + teacher.dtype.itemsize + jnp.dtype(dtype).itemsize
    (d_logits,) = triton_launch(
        kl_divergence_bwd_kernel,
        student,
        teacher,
        *(row[name] for name in blocks.PER_ROW),
        out_shape=(jax.ShapeDtypeStruct(student.shape, dtype),),
        grid=(rows, triton.cdiv(V, cfg.block_vocab)),
        num_warps=cfg.num_warps,
        work=Work(8 * student.size, student.size * sizes + 20 * rows),
        V=V,
        BLOCK_V=cfg.block_vocab,
        **_options(how),
    )
    return d_logits


def forward_logits(logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
    lead, V = logits.shape[:-1], logits.shape[-1]
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    return tuple(x.reshape(lead) for x in _outputs(logits.reshape(-1, V), teacher_logits.reshape(-1, V), how, cfg))


def backward_logits(saved, logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
    V, row = logits.shape[-1], {name: saved[name].reshape(-1) for name in blocks.PER_ROW}
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    d = _pull(logits.reshape(-1, V), teacher_logits.reshape(-1, V), row, logits.dtype, how, cfg)
    return {"logits": d.reshape(logits.shape)}


def _config(call, rows, most):
    block_vocab = max(16, min(most, triton.next_power_of_2(call.dims["V"])))
    # 16 float32 of each model in a thread: of 16 bits that are two loads of each.
    return KLDivergenceConfig(rows, block_vocab, max(1, min(16, block_vocab // 512)))


def heuristic(call, platform):
    return _config(
        call, vocabulary.block_rows(call, blocks.BLOCK_ELEMENTS) if "hidden" in call.arguments else None, 2048
    )


def candidates(call):
    rows = vocabulary.candidates(call, blocks.MOST_ROWS) if "hidden" in call.arguments else [None]
    return list(dict.fromkeys(_config(call, r, most) for r in rows for most in (2048, 1024, 4096)))


def rejects(call):
    arrays = (call.arguments.get(n) for n in ("hidden", "teacher_hidden", "lm_head", "logits"))
    if any(x.size == 0 for x in arrays if x is not None):
        return "an array has no elements"
    if any(cap is not None and cap <= 0 for cap in (call.logits_soft_cap, call.teacher_logits_soft_cap)):
        return "a soft cap is not positive"
    return None


FACTS: Any = {
    "platforms": {"cuda"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
blocks.register("triton_gpu", _outputs, _pull, **FACTS)
logits_op.register(forward_logits, backward_logits, **FACTS)
