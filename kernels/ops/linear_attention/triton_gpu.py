"""linear_attention for NVIDIA GPUs in Triton: an adapter of `kernels/engines/scan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan import triton_decode as decode
from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.triton_calls import sizes_refused
from kernels.ops.linear_attention.contract import op, work


def _launches(
    query, key, value, g, gk, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg, cost
):
    """Returns the launches of a call, which are those of decays of channels where there is one or a bonus."""
    state = None if initial_state is None else initial_state.astype(jnp.float32)
    bonus = None if bonus is None else bonus.astype(jnp.float32)
    decay = _decay(query, g, gk, g_gamma, bonus)
    x = scalar.Tokens(query, key, value, decay, None, None, segment_ids, state, bonus)
    return (scalar if gk is None and bonus is None else channels).Launches(
        x, query.shape[2], num_states, _scale(query, softmax_scale), cfg, cost
    )


def _scale(query: jax.Array, softmax_scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _decay(query: jax.Array, g: Any, gk: Any, g_gamma: Any, bonus: Any) -> jax.Array | None:
    """Returns the log decay of each head and token, float32 [B, T, N], or of each channel in any dtype; None for none."""
    parts = [x.astype(jnp.float32) for x in (g, g_gamma) if x is not None]
    total = sum(parts[1:], parts[0]) if parts else None
    if gk is None and bonus is None:
        return None if total is None else jnp.broadcast_to(total, query.shape[:3])
    if total is not None:
        gk = total[..., None] if gk is None else gk.astype(jnp.float32) + total[..., None]
    return jnp.broadcast_to(jnp.zeros((), jnp.float32) if gk is None else gk, query.shape)


def _of_heads(call: Any) -> bool:
    return call.gk is None and call.bonus is None


def _of_chunks(call: Any, platform: str) -> Any:
    if not _of_heads(call):
        return channels.heuristic(call, platform)
    return scalar.on_hopper(call, scalar.heuristic(call, platform))


def _others(call: Any) -> Any:
    if not _of_heads(call):
        return channels.candidates(call)
    # What a field leaves open the default would fill in: these are Triton's walks.
    in_triton = (replace(cfg, hopper_walks=False) for cfg in scalar.candidates(call))
    return list(dict.fromkeys([_of_chunks(call, "cuda"), *in_triton]))


def rejects(call):
    return sizes_refused(call.dims, call.query, call.key, call.value)


def forward(query, key, value, g, gk, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg):
    cost = work(op.bind(query, key, value, num_states=num_states))[0]
    if decode.one_token(query.shape[1], num_states):
        # One factor for all channels stays one number of a head.
        a = _decay(query, g, gk, g_gamma, None)
        token, scale = decode.Token(query, key, value, a, bonus=bonus), _scale(query, softmax_scale)
        return decode.decode(token, query.shape[2], segment_ids, initial_state, scale, cfg, cost)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return scalar.forward(_launches(query, key, value, g, gk, g_gamma, bonus, *options))


def backward(
    saved, query, key, value, g, gk, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg
):
    if decode.one_token(query.shape[1], num_states):
        arrays = {"query": query, "key": key, "value": value, "g": g, "gk": gk, "g_gamma": g_gamma, "bonus": bonus}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return decode.gradients(op, saved, arrays, softmax_scale=softmax_scale)
    cost = work(op.bind(query, key, value, num_states=num_states))[1]
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    run = _launches(query, key, value, g, gk, g_gamma, bonus, *options)
    d = scalar.backward(run, saved.d_out, saved.d_final_state)
    gradients, da = {"query": d["q"], "key": d["k"], "value": d["v"]}, d["a"]
    if gk is not None:
        gradients["gk"] = da
    if da is not None and da.ndim == 4:
        da = jnp.sum(da, axis=-1, dtype=jnp.float32)
    gradients |= {} if g is None else {"g": da}
    gradients |= {} if g_gamma is None else {"g_gamma": jnp.sum(da, axis=(0, 1))}
    gradients |= {} if bonus is None else {"bonus": d["bonus"]}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


heuristic = decode.heuristic(_of_chunks)
op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=decode.candidates(_others, heuristic),
)
