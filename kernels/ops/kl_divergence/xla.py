"""Two projections and their softmaxes in blocks of tokens, in plain XLA: 2 x block_rows x V logits exist at one time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.rows.vocabulary import block_rows, candidates
from kernels.ops.kl_divergence import blocks
from kernels.ops.kl_divergence.contract import KLDivergenceConfig, logits_op


def _bent(logits, cap, temperature):
    """Returns (logits under the softmax, their derivative)."""
    logits = logits.astype(jnp.float32)
    if cap is None:
        return logits / temperature, 1 / temperature
    tanh = jnp.tanh(logits / cap)
    return cap / temperature * tanh, (1 - tanh * tanh) / temperature


def _softmax(z, lse):
    """Returns exp(z - lse), 0 where a row has no entry that is not masked out."""
    return jnp.exp(z - jnp.where(lse == -jnp.inf, 0, lse)[:, None])


def _outputs(student, teacher, reverse):
    """Returns the outputs of the contract, of logits [rows, V]."""
    lse = jax.nn.logsumexp(student, axis=-1), jax.nn.logsumexp(teacher, axis=-1)
    (p, lse_p), (q, _) = _ordered(student, teacher, *lse, reverse)
    share = _softmax(p, lse_p)
    return *lse, jnp.sum(jnp.where(share > 0, share * (p - q), 0), axis=-1)


def _ordered(student, teacher, student_lse, teacher_lse, reverse):
    pair = (teacher, teacher_lse), (student, student_lse)
    return pair[::-1] if reverse else pair


def _pull(student, slope, teacher, row, reverse):
    """Returns the gradient of the student's logits [rows, V]; `row` has residuals and cotangents, [rows] each."""
    own = _softmax(student, row["student_lse"])
    d = row["d_student_lse"][:, None] * own
    d_gap, gap = row["d_gap"][:, None], row["gap"][:, None]
    if reverse:  # p is the student: through the probabilities, and through the logits that they weigh
        more = jnp.where(own > 0, own * (1 + (student - teacher) - gap), 0)
        # The gap of a token that is not counted may be infinite, and its cotangent is 0.
        d = d + jnp.where(d_gap == 0, 0, d_gap * more)
    else:
        d = d - d_gap * _softmax(teacher, row["teacher_lse"])
    return d * slope


def _outputs_of(student, teacher, how, cfg=None):
    """Returns the outputs of the contract, of raw logits [rows, V]."""
    reverse, temperature, cap, teacher_cap = how
    student, _ = _bent(student, cap, temperature)
    teacher, _ = _bent(teacher, teacher_cap, temperature)
    return _outputs(student, teacher, reverse)


def _pull_of(student, teacher, row, dtype, how, cfg=None):
    """Returns the gradient of the student's raw logits [rows, V]."""
    reverse, temperature, cap, teacher_cap = how
    student, slope = _bent(student, cap, temperature)
    teacher, _ = _bent(teacher, teacher_cap, temperature)
    return _pull(student, slope, teacher, row, reverse).astype(dtype)


def forward_logits(logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap):
    lead, V = logits.shape[:-1], logits.shape[-1]
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    return tuple(x.reshape(lead) for x in _outputs_of(logits.reshape(-1, V), teacher_logits.reshape(-1, V), how))


def backward_logits(saved, logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap):
    V, row = logits.shape[-1], {name: saved[name].reshape(-1) for name in blocks.PER_ROW}
    how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
    d = _pull_of(logits.reshape(-1, V), teacher_logits.reshape(-1, V), row, logits.dtype, how)
    return {"logits": d.reshape(logits.shape)}


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
blocks.register(
    "xla",
    _outputs_of,
    _pull_of,
    heuristic=lambda call, platform: KLDivergenceConfig(block_rows=block_rows(call, blocks.BLOCK_ELEMENTS)),
    candidates=lambda call: [KLDivergenceConfig(block_rows=rows) for rows in candidates(call, blocks.MOST_ROWS)],
    **EVERYWHERE,
)
logits_op.register(forward_logits, backward_logits, **EVERYWHERE)
