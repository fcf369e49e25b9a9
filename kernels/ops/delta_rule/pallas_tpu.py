"""The delta rules for TPUs in Pallas: an adapter of `kernels/engines/scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.scan import pallas_channel_calls as channels
from kernels.engines.scan import pallas_decode as decode
from kernels.engines.scan import pallas_delta_calls as delta
from kernels.engines.scan import pallas_dplr_calls as dplr
from kernels.engines.scan.delta_tokens import DplrTokens
from kernels.engines.scan.one_token import Token, one_token
from kernels.engines.scan.one_token import gradients as gradients_of
from kernels.framework.execute import backward_of
from kernels.ops.delta_rule.contract import (
    NORM_EPS,
    check_states,
    normalized,
    op,
    rwkv7_op,
    rwkv7_work,
    scale_of,
    work,
)
from kernels.ops.delta_rule.pool import pool_op, pool_work


def _unit(x: jax.Array) -> jax.Array:
    return normalized(x.astype(jnp.float32)).astype(x.dtype)


def _launches(query, key, value, beta, g, segment_ids, initial_state, softmax_scale, num_states, cfg, cost):
    """Returns the launches of a call: those of decays of channels where g has more than one."""
    check_states("delta_rule", initial_state, segment_ids, num_states)
    per_channel = g is not None and g.shape[-1] != 1
    a = None if g is None else g if per_channel else g[..., 0].astype(jnp.float32)
    entries = None if initial_state is None else initial_state.astype(jnp.float32)
    x = delta.Tokens(query, key, value, beta.astype(jnp.float32), a, segment_ids, entries)
    scale = scale_of(softmax_scale, query.shape[-1])
    return (channels.ChannelLaunches if per_channel else delta.Launches)(x, num_states, scale, cfg, cost)


def _one_token(call):
    """Returns why a call of one token, but several states, is refused, or None."""
    return f"one token would take the work of a chunk of {delta.CHUNK}" if call.dims["T"] == 1 else None


def rejects(call):
    if 0 in call.dims.values():
        return "an array has no elements"
    if one_token(call.dims["T"], call.num_states):
        return decode.refused(call.dims)
    if why := _one_token(call):
        return why
    if call.g is not None and call.g.shape[-1] > 1:
        return channels.refused(call.dims, call.num_states, call.dtype, True)
    return delta.refused(call)


def _token(query, key, value, beta, g, use_qk_l2norm):
    a = g[..., 0] if g is not None and g.shape[-1] == 1 else g
    return Token(query, key, value, a, beta, delta=True, norm_eps=NORM_EPS if use_qk_l2norm else 0.0)


def _forwards(query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg):
    cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[0]
    if use_qk_l2norm:
        query, key = _unit(query), _unit(key)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return _launches(query, key, value, beta, g, *options)


def forward(
    query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    if one_token(query.shape[1], num_states):
        check_states("delta_rule", initial_state, segment_ids, num_states)
        cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[0]
        token, scale = _token(query, key, value, beta, g, use_qk_l2norm), scale_of(softmax_scale, query.shape[-1])
        return decode.decode(token, value.shape[2], segment_ids, initial_state, scale, cost)
    options = (segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg)
    return _forwards(query, key, value, beta, g, *options).forward(value.dtype)


def forward_with_residuals(
    query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    options = (segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg)
    return _forwards(query, key, value, beta, g, *options).keeping(value.dtype)


def keeps(call, cfg):
    if one_token(call.dims["T"], call.num_states):
        return {}
    heads = call.dims["N"] if call.g is not None and call.g.shape[-1] > 1 else call.dims["K"]
    return delta.kept_of(call.dims, heads, call.num_states, call.dtype, True)


def backward(
    saved, query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    if one_token(query.shape[1], num_states):
        arrays = {"query": query, "key": key, "value": value, "beta": beta, "g": g}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return gradients_of(op, saved, arrays, softmax_scale=softmax_scale, use_qk_l2norm=use_qk_l2norm)
    cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[1]
    pull = None
    if use_qk_l2norm:
        (query, key), pull = jax.vjp(lambda q, k: (_unit(q), _unit(k)), query, key)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    d = _launches(query, key, value, beta, g, *options).backward(saved.d_out, saved.d_final_state, saved)
    dq, dk = (d[name].astype(query.dtype) for name in ("q", "k"))
    dq, dk = (dq, dk) if pull is None else pull((dq, dk))
    gradients = {"query": dq, "key": dk, "value": d["v"].astype(value.dtype), "beta": d["beta"]}
    gradients |= {} if g is None else {"g": d["a"].reshape(g.shape)}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


def pool_rejects(call):
    return decode.refused(call.dims)


def pool_forward(
    query, key, value, beta, state_pool, state_indices, g, has_initial_state, softmax_scale, use_qk_l2norm
):  # fmt: skip
    cost = pool_work(pool_op.bind(query, key, value, beta, state_pool, state_indices, g))[0]
    token, scale = _token(query, key, value, beta, g, use_qk_l2norm), scale_of(softmax_scale, query.shape[-1])
    return decode.ragged_decode(token, state_pool, state_indices, has_initial_state, scale, cost)


def _rwkv7_launches(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg, direction):
    check_states("rwkv7", initial_state, segment_ids, num_states)
    cost = rwkv7_work(rwkv7_op.bind(r, w, k, v, a, b, num_states=num_states))[direction]
    entries = None if initial_state is None else initial_state.astype(jnp.float32)
    x = DplrTokens(r, w, k, v, a, b, segment_ids, entries)
    return dplr.DplrLaunches(x, num_states, scale_of(softmax_scale, r.shape[-1]), cfg, cost)


def rwkv7_rejects(call):
    if 0 in call.dims.values():
        return "an array has no elements"
    if one_token(call.dims["T"], call.num_states):
        return decode.refused(call.dims)
    return _one_token(call) or dplr.refused(call.dims, call.num_states, call.dtype)


def rwkv7_forward(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    if one_token(r.shape[1], num_states):
        check_states("rwkv7", initial_state, segment_ids, num_states)
        cost = rwkv7_work(rwkv7_op.bind(r, w, k, v, a, b, num_states=num_states))[0]
        token, scale = Token(r, k, v, w, read=a, back=b), scale_of(softmax_scale, r.shape[-1])
        return decode.decode(token, v.shape[2], segment_ids, initial_state, scale, cost)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, 0)
    return _rwkv7_launches(r, w, k, v, a, b, *options).forward(v.dtype)


def rwkv7_forward_with_residuals(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, 0)
    return _rwkv7_launches(r, w, k, v, a, b, *options).keeping(v.dtype)


def rwkv7_keeps(call, cfg):
    if one_token(call.dims["T"], call.num_states):
        return {}
    return dplr.kept_of(call.dims, call.num_states, call.dtype)


def rwkv7_backward(saved, r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    if one_token(r.shape[1], num_states):
        arrays = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return gradients_of(rwkv7_op, saved, arrays, softmax_scale=softmax_scale)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, 1)
    d = _rwkv7_launches(r, w, k, v, a, b, *options).backward(saved.d_out, saved.d_final_state, saved)
    gradients = {"r": d["q"]} | {name: d[name] for name in "wkvab"}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    keeps=keeps,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=delta.heuristic,
    candidates=delta.candidates,
)
rwkv7_op.register(
    rwkv7_forward,
    rwkv7_backward,
    forward_with_residuals=rwkv7_forward_with_residuals,
    keeps=rwkv7_keeps,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rwkv7_rejects,
    heuristic=delta.heuristic,
    candidates=delta.candidates,
)
pool_op.register(
    pool_forward,
    backward_of(pool_op, pool_op.function),
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=pool_rejects,
)
