"""Projection and log-softmax in blocks of tokens, in plain XLA: at most block_rows x V logits exist at one time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kernels._core.execute import backward_of
from kernels.ops.cross_entropy.contract import CrossEntropyConfig, cross_entropy_of_logits, logits_op, op

# Logits of one block, in elements: 2^26 float32 are 256 MiB. Every block reads lm_head and, in the backward, reads and
# writes its float32 gradient, so below about a thousand rows the matmuls wait for memory whatever the vocabulary.
_BLOCK_ELEMENTS, _LEAST_ROWS = 2**26, 1024


def _heuristic(call, platform):
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // call.dims["V"] // 128 * 128)
    return CrossEntropyConfig(block_rows=max(1, min(math.prod(call.dims["lead"]), rows)))


def _candidates(call):
    tokens = math.prod(call.dims["lead"])
    rows = (r for r in (256, 512, 1024, 2048, 4096, 8192) if r < tokens)
    return [CrossEntropyConfig(block_rows=r) for r in (*rows, max(1, tokens))]


def _dot(subscripts, a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x, rows, fill=0):
    """Returns [n, rows, ...] of x [T, ...], padded."""
    n = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, rows, *x.shape[1:])


def _logits(hidden, lm_head, cap):
    """Returns (logits, derivative of the cap or None)."""
    logits = _dot("td,dv->tv", hidden, lm_head)
    if cap is None:
        return logits, None
    bent = jnp.tanh(logits / cap)
    return cap * bent, 1 - bent * bent


def forward(hidden, lm_head, targets, logits_soft_cap, cfg):
    V, lead = lm_head.shape[1], targets.shape
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def block(_, x):
        h, t = x
        logits, _ = _logits(h, lm_head, logits_soft_cap)
        at_target = jnp.take_along_axis(logits, jnp.clip(t, 0, V - 1)[:, None], axis=1)[:, 0]
        at_target = jnp.where((t >= 0) & (t < V), at_target, 0)
        return None, (jax.nn.logsumexp(logits, axis=-1), at_target, jnp.mean(logits, axis=-1))

    _, outputs = jax.lax.scan(block, None, (_blocks(hidden, cfg.block_rows), _blocks(targets, cfg.block_rows, -1)))
    return tuple(x.reshape(-1)[: hidden.shape[0]].reshape(lead) for x in outputs)


def backward(saved, hidden, lm_head, targets, logits_soft_cap, cfg):
    V, shape = lm_head.shape[1], hidden.shape
    hidden, targets = hidden.reshape(-1, shape[-1]), targets.reshape(-1)

    def block(d_head, x):
        h, t, lse, d_lse, d_target, d_mean = x
        logits, slope = _logits(h, lm_head, logits_soft_cap)
        d = jnp.exp(logits - lse[:, None]) * d_lse[:, None] + d_mean[:, None] / V
        # One entry a row; a comparison fuses into the expression, where a scatter would be a pass of its own.
        d = d + jnp.where(jnp.arange(V) == t[:, None], d_target[:, None], 0)
        d = (d if slope is None else d * slope).astype(h.dtype)
        return d_head + _dot("td,tv->dv", h, d), _dot("tv,dv->td", d, lm_head).astype(h.dtype)

    rows = cfg.block_rows
    # A padded row has cotangents of zero, and lse = 0 keeps its exponential finite.
    per_token = (saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit"))
    xs = (_blocks(hidden, rows), _blocks(targets, rows, -1), *(_blocks(x, rows) for x in per_token))
    d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
    return {"hidden": d_hidden.reshape(-1, shape[-1])[: hidden.shape[0]].reshape(shape), "lm_head": d_head}


EVERYWHERE = {"platforms": {"cpu", "cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}

op.register(forward, backward, heuristic=_heuristic, candidates=_candidates, symbolic={"lead"}, **EVERYWHERE)
# The caller has the logits already, so differentiating costs no memory that is not spent.
logits_op.register(
    cross_entropy_of_logits,
    backward_of(logits_op, cross_entropy_of_logits),
    name="xla",
    symbolic={"lead"},
    **EVERYWHERE,
)
