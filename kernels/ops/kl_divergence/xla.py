"""Two projections and their softmaxes in blocks of tokens, in plain XLA: 2 x block_rows x V logits exist at one time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kernels.ops.kl_divergence.contract import KLDivergenceConfig, logits_op, op

# Logits of one block of each model, in elements: 2^25 float32 are 128 MiB. Every block reads both heads and, in the backward,
# reads and writes a float32 gradient, so below about a thousand rows the matmuls wait for memory whatever the vocabulary.
_BLOCK_ELEMENTS, _LEAST_ROWS = 2**25, 1024


def _heuristic(call, platform):
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // call.dims["V"] // 128 * 128)
    return KLDivergenceConfig(block_rows=max(1, min(math.prod(call.dims["lead"]), rows)))


def _candidates(call):
    tokens = math.prod(call.dims["lead"])
    rows = (r for r in (256, 512, 1024, 2048, 4096) if r < tokens)
    return [KLDivergenceConfig(block_rows=r) for r in (*rows, max(1, tokens))]


def _dot(subscripts, a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x, rows):
    """Returns [n, rows, ...] of x [T, ...], padded with zeros."""
    n = -(-x.shape[0] // rows)
    return jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1)).reshape(n, rows, *x.shape[1:])


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


_PER_ROW = ("student_lse", "teacher_lse", "gap", "d_student_lse", "d_gap")


def forward(
    hidden,
    lm_head,
    teacher_hidden,
    teacher_lm_head,
    reverse,
    temperature,
    logits_soft_cap,
    teacher_logits_soft_cap,
    cfg,
):
    lead = hidden.shape[:-1]
    hidden, teacher_hidden = (x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden))

    def block(_, x):
        student, _ = _bent(_dot("td,dv->tv", x[0], lm_head), logits_soft_cap, temperature)
        teacher, _ = _bent(_dot("td,dv->tv", x[1], teacher_lm_head), teacher_logits_soft_cap, temperature)
        return None, _outputs(student, teacher, reverse)

    _, outputs = jax.lax.scan(block, None, tuple(_blocks(x, cfg.block_rows) for x in (hidden, teacher_hidden)))
    return tuple(x.reshape(-1)[: hidden.shape[0]].reshape(lead) for x in outputs)


def backward(
    saved,
    hidden,
    lm_head,
    teacher_hidden,
    teacher_lm_head,
    reverse,
    temperature,
    logits_soft_cap,
    teacher_logits_soft_cap,
    cfg,
):
    shape, rows = hidden.shape, cfg.block_rows
    hidden, teacher_hidden = (x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden))

    def block(d_head, x):
        h, t, row = x
        student, slope = _bent(_dot("td,dv->tv", h, lm_head), logits_soft_cap, temperature)
        teacher, _ = _bent(_dot("td,dv->tv", t, teacher_lm_head), teacher_logits_soft_cap, temperature)
        d = _pull(student, slope, teacher, row, reverse).astype(h.dtype)
        return d_head + _dot("td,tv->dv", h, d), _dot("tv,dv->td", d, lm_head).astype(h.dtype)

    # A padded row has cotangents of zero, and residuals of zero keep its exponentials finite.
    row = {name: _blocks(saved[name].reshape(-1), rows) for name in _PER_ROW}
    xs = (_blocks(hidden, rows), _blocks(teacher_hidden, rows), row)
    d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
    return {"hidden": d_hidden.reshape(-1, shape[-1])[: hidden.shape[0]].reshape(shape), "lm_head": d_head}


def forward_logits(logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap):
    lead, V = logits.shape[:-1], logits.shape[-1]
    student, _ = _bent(logits.reshape(-1, V), logits_soft_cap, temperature)
    teacher, _ = _bent(teacher_logits.reshape(-1, V), teacher_logits_soft_cap, temperature)
    return tuple(x.reshape(lead) for x in _outputs(student, teacher, reverse))


def backward_logits(saved, logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap):
    V = logits.shape[-1]
    student, slope = _bent(logits.reshape(-1, V), logits_soft_cap, temperature)
    teacher, _ = _bent(teacher_logits.reshape(-1, V), teacher_logits_soft_cap, temperature)
    row = {name: saved[name].reshape(-1) for name in _PER_ROW}
    return {"logits": _pull(student, slope, teacher, row, reverse).reshape(logits.shape)}


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
op.register(forward, backward, heuristic=_heuristic, candidates=_candidates, **EVERYWHERE)
logits_op.register(forward_logits, backward_logits, **EVERYWHERE)
