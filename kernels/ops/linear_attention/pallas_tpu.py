"""linear_attention for TPUs in Pallas: an adapter of `kernels/engines/scan`, for one decay per head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kernels.engines.scan import pallas_linear_calls as linear
from kernels.ops.linear_attention.contract import op, work


def _launches(query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg, cost):
    state = None if initial_state is None else initial_state.astype(jnp.float32)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    parts: list[Any] = [x.astype(jnp.float32) for x in (g, g_gamma) if x is not None]
    decay = jnp.broadcast_to(sum(parts[1:], parts[0]), query.shape[:3]) if parts else None
    x = linear.Tokens(query, key, value, decay, None, None, segment_ids, state)
    return linear.Launches(x, query.shape[2], num_states, scale, cfg, cost)


def rejects(call):
    return linear.refused(call.dims, call.query, call.key, call.value)


def forward(query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg):
    cost = work(op.bind(query, key, value, num_states=num_states))[0]
    run = _launches(query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return linear.forward(run)


def backward(saved, query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg):
    cost = work(op.bind(query, key, value, num_states=num_states))[1]
    run = _launches(query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    d = linear.backward(run, saved.d_out, saved.d_final_state)
    gradients = {"query": d["q"], "key": d["k"], "value": d["v"]}
    gradients |= {} if g is None else {"g": d["a"]}
    gradients |= {} if g_gamma is None else {"g_gamma": jnp.sum(d["a"], axis=(0, 1))}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=linear.heuristic,
    candidates=linear.candidates,
)
