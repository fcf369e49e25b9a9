"""linear_attention with one decay per head, for NVIDIA GPUs in Triton: an adapter of `kernels/engines/scan`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.triton_calls import sizes_refused
from kernels.ops.linear_attention.contract import op, work


def _tokens(query, key, value, g, g_gamma, segment_ids, initial_state) -> scalar.Tokens:
    return scalar.Tokens(query, key, value, _decay(query, g, g_gamma), None, None, segment_ids, _state(initial_state))


def _state(initial_state: Any) -> Any:
    return None if initial_state is None else initial_state.astype(jnp.float32)


def _decay(query: jax.Array, g: Any, g_gamma: Any) -> jax.Array | None:
    """Returns the log decay of each head and token, float32 [B, T, N]; None if nothing decays."""
    parts = [x.astype(jnp.float32) for x in (g, g_gamma) if x is not None]
    return jnp.broadcast_to(sum(parts[1:], parts[0]), query.shape[:3]) if parts else None


def _scale(query: jax.Array, softmax_scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def rejects(call):
    return sizes_refused(call.dims, call.query, call.key, call.value)


def forward(query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg):
    x = _tokens(query, key, value, g, g_gamma, segment_ids, initial_state)
    cost = work(op.bind(query, key, value, num_states=num_states))[0]
    return scalar.forward(x, query.shape[2], num_states, _scale(query, softmax_scale), cfg, cost)


def backward(saved, query, key, value, g, g_gamma, segment_ids, initial_state, softmax_scale, num_states, cfg):
    x = _tokens(query, key, value, g, g_gamma, segment_ids, initial_state)
    cost = work(op.bind(query, key, value, num_states=num_states))[1]
    scale = _scale(query, softmax_scale)
    d = scalar.backward(x, saved.d_out, saved.d_final_state, query.shape[2], num_states, scale, cfg, cost)
    gradients = {"query": d["q"], "key": d["k"], "value": d["v"]}
    gradients |= {} if g is None else {"g": d["a"]}
    gradients |= {} if g_gamma is None else {"g_gamma": jnp.sum(d["a"], axis=(0, 1))}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=scalar.heuristic,
    candidates=scalar.candidates,
)
