"""linear_attention for TPUs in Pallas: an adapter of `kernels/engines/scan`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kernels.engines.scan import pallas_channel_calls as channels
from kernels.engines.scan import pallas_decode as decode
from kernels.engines.scan import pallas_delta_calls as delta
from kernels.engines.scan import pallas_linear_calls as linear
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.one_token import Token, one_token
from kernels.engines.scan.one_token import gradients as gradients_of
from kernels.ops.linear_attention.contract import op, work


def _decays(query, g, g_gamma, gk):
    """Returns log decays [B, T, N], or of channels [B, T, N, H], or None."""
    heads: list[Any] = [x.astype(jnp.float32) for x in (g, g_gamma) if x is not None]
    a = jnp.broadcast_to(sum(heads[1:], heads[0]), query.shape[:3]) if heads else None
    if gk is None or a is None:
        return a if gk is None else gk
    return a[..., None] + gk.astype(jnp.float32)


def _scale(query, softmax_scale):
    return query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _launches(
    query, key, value, g, g_gamma, gk, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg, cost
):  # fmt: skip
    """Returns the launches of a call: those of decays of channels where there are any, or a bonus."""
    state = None if initial_state is None else initial_state.astype(jnp.float32)
    scale = _scale(query, softmax_scale)
    a = _decays(query, g, g_gamma, gk)
    if gk is None and bonus is None:
        x = linear.Tokens(query, key, value, a, None, None, segment_ids, state)
        return linear.Launches(x, query.shape[2], num_states, scale, cfg, cost)
    if gk is None:
        a = jnp.zeros(query.shape, jnp.float32) if a is None else jnp.broadcast_to(a[..., None], query.shape)
    x = channels.Tokens(query, key, value, None, a, segment_ids, state)
    return channels.ChannelLaunches(x, num_states, scale, cfg, cost, bonus)


def _one_decay(call):
    return call.gk is None and call.bonus is None


def rejects(call):
    if one_token(call.dims["T"], call.num_states):
        return decode.refused(call.dims)
    if _one_decay(call) or call.dims["T"] == 1:
        return linear.refused(call.dims, call.query, call.key, call.value)
    return channels.refused(call.dims, call.num_states, call.dtype, False)


def forward(query, key, value, g, g_gamma, gk, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg):
    cost = work(op.bind(query, key, value, g, gk, num_states=num_states))[0]
    if one_token(query.shape[1], num_states):
        token = Token(query, key, value, _decays(query, g, g_gamma, gk), bonus=bonus)
        return decode.decode(token, query.shape[2], segment_ids, initial_state, _scale(query, softmax_scale), cost)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    run = _launches(query, key, value, g, g_gamma, gk, bonus, *options)
    return run.forward(value.dtype)


def forward_with_residuals(
    query, key, value, g, g_gamma, gk, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg
):  # fmt: skip
    cost = work(op.bind(query, key, value, g, gk, num_states=num_states))[0]
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return _launches(query, key, value, g, g_gamma, gk, bonus, *options).keeping(value.dtype)


def keeps(call, cfg):
    if one_token(call.dims["T"], call.num_states):
        return {}
    if _one_decay(call):
        return linear.kept(call, cfg)
    return delta.kept_of(call.dims, call.dims["N"], call.num_states, str(call.key.dtype), False)


def backward(
    saved, query, key, value, g, g_gamma, gk, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg
):  # fmt: skip
    if one_token(query.shape[1], num_states):
        arrays = {"query": query, "key": key, "value": value, "g": g, "gk": gk, "g_gamma": g_gamma, "bonus": bonus}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return gradients_of(op, saved, arrays, softmax_scale=softmax_scale)
    cost = work(op.bind(query, key, value, g, gk, num_states=num_states))[1]
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    run = _launches(query, key, value, g, g_gamma, gk, bonus, *options)
    d = run.backward(saved.d_out, saved.d_final_state, saved)
    gradients = {"query": d["q"], "key": d["k"], "value": d["v"]}
    gradients |= {} if gk is None else {"gk": d["a"]}
    of_heads = d["a"] if d["a"].ndim == 3 else jnp.sum(d["a"], axis=3, dtype=jnp.float32)
    gradients |= {} if g is None else {"g": of_heads}
    gradients |= {} if g_gamma is None else {"g_gamma": jnp.sum(of_heads, axis=(0, 1))}
    gradients |= {} if bonus is None else {"bonus": d["bonus"]}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


def heuristic(call, platform):
    return linear.heuristic(call, platform) if _one_decay(call) else ChunkConfig(channels.CHUNK)


def candidates(call):
    return linear.candidates(call) if _one_decay(call) else [heuristic(call, "tpu")]


op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    keeps=keeps,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
