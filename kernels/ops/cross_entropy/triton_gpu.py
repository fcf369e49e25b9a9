"""Cross entropy on GPUs: one pass over a block of logits for all outputs, and one for their gradient; matmuls are XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.rows import vocabulary
from kernels.engines.rows.softmax_triton import LANE, LN_2, exp, exp_of, finite, joined, log2_of_lanes, tanh
from kernels.framework.work import Work
from kernels.ops.cross_entropy import blocks
from kernels.ops.cross_entropy.contract import CrossEntropyConfig, logits_op
from kernels.toolchains.triton import triton_launch


@triton.jit
def _more(ptr, cols, largest, total, plain, V: tl.constexpr, CAP: tl.constexpr, MASKED):
    """Returns what the lanes have with one tile more: largest entry, sum of exponentials, sum."""
    if MASKED:
        x = tl.load(ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(ptr + cols).to(tl.float32)
    if CAP > 0:
        x = CAP * tanh(x / CAP)
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
    CAP: tl.constexpr,  # 0: none
    BLOCK_V: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane has a largest entry and a sum of its own, so that nothing is exchanged until the end.
    largest = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V // LANE], tl.float32)
    plain = tl.zeros([BLOCK_V // LANE], tl.float32)
    # Only the last tile is masked: the exponentials are as many as the arithmetic units make while the logits are read.
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for start in range(0, WHOLE, BLOCK_V):
        largest, total, plain = _more(logits_ptr + row * V, start + cols, largest, total, plain, V, CAP, False)
    if WHOLE < V:
        largest, total, plain = _more(logits_ptr + row * V, WHOLE + cols, largest, total, plain, V, CAP, True)
    tl.store(lse_ptr + row, log2_of_lanes(largest, total) * LN_2)
    tl.store(mean_logit_ptr + row, tl.sum(plain, axis=0) / V)
    target = tl.load(targets_ptr + row)
    there = (target >= 0) & (target < V)
    at_target = tl.load(logits_ptr + row * V + target, mask=there, other=0.0).to(tl.float32)
    if CAP > 0:
        at_target = CAP * tanh(at_target / CAP)
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
    CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
    slope = 1.0
    if CAP > 0:
        bent = tanh(x / CAP)
        x, slope = CAP * bent, 1.0 - bent * bent
    lse, d_lse = tl.load(lse_ptr + row), tl.load(d_lse_ptr + row)
    d = exp(x - finite(lse)) * d_lse + tl.load(d_mean_logit_ptr + row) / V
    d += tl.where(cols == tl.load(targets_ptr + row), tl.load(d_target_logit_ptr + row), 0.0)
    tl.store(d_logits_ptr + row * V + cols, (d * slope).to(d_logits_ptr.dtype.element_ty), mask=cols < V)


def _outputs(logits, targets, cap, cfg):
    """Returns the outputs of the contract, of logits [rows, V]."""
    rows, V = logits.shape
    return triton_launch(
        cross_entropy_fwd_kernel,
        logits,
        targets,
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.float32),) * 3,
        grid=(rows,),
        num_warps=cfg.num_warps,
        work=Work(4 * logits.size, logits.size * logits.dtype.itemsize + 16 * rows),
        V=V,
        CAP=cap or 0.0,
        BLOCK_V=cfg.block_vocab,
        LANE=LANE,
    )


def _pull(logits, targets, per_token, dtype, cap, cfg):
    """Returns the gradient of logits [rows, V]."""
    rows, V = logits.shape
    (d_logits,) = triton_launch(
        cross_entropy_bwd_kernel,
        logits,
        targets,
        *per_token,
        out_shape=(jax.ShapeDtypeStruct(logits.shape, dtype),),
        grid=(rows, triton.cdiv(V, cfg.block_vocab)),
        num_warps=cfg.num_warps,
        work=Work(4 * logits.size, logits.size * (logits.dtype.itemsize + jnp.dtype(dtype).itemsize) + 20 * rows),
        V=V,
        CAP=cap or 0.0,
        BLOCK_V=cfg.block_vocab,
    )
    return d_logits


def forward_logits(logits, targets, logits_soft_cap, cfg):
    outputs = _outputs(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), logits_soft_cap, cfg)
    return tuple(x.reshape(targets.shape) for x in outputs)


def backward_logits(saved, logits, targets, logits_soft_cap, cfg):
    per_token = [saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit")]
    rows = logits.reshape(-1, logits.shape[-1])
    d = _pull(rows, targets.reshape(-1), per_token, logits.dtype, logits_soft_cap, cfg)
    return {"logits": d.reshape(logits.shape)}


def _config(call, rows, most):
    block_vocab = max(16, min(most, triton.next_power_of_2(call.dims["V"])))
    # 8 float32 of a thread: of 16 bits that is one load.
    return CrossEntropyConfig(rows, block_vocab, max(1, min(16, block_vocab // 256)))


def heuristic(call, platform):
    return _config(
        call, vocabulary.block_rows(call, blocks.BLOCK_ELEMENTS) if "hidden" in call.arguments else None, 2048
    )


def candidates(call):
    rows = vocabulary.candidates(call, blocks.MOST_ROWS) if "hidden" in call.arguments else [None]
    return list(dict.fromkeys(_config(call, r, most) for r in rows for most in (2048, 1024, 4096)))


def rejects(call):
    if any(x.size == 0 for x in (call.arguments.get(n) for n in ("hidden", "lm_head", "logits")) if x is not None):
        return "an array has no elements"
    if call.logits_soft_cap is not None and call.logits_soft_cap <= 0:
        return "logits_soft_cap is not positive"
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
