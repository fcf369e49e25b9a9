"""State spaces for TPUs in Pallas: state_space_v2, an adapter of `kernels/engines/scan`, and the convolution."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.engines.scan import pallas_decode as decode
from kernels.engines.scan import pallas_linear_calls as linear
from kernels.engines.scan.one_token import Token, one_token
from kernels.engines.scan.one_token import gradients as gradients_of
from kernels.ops.state_space import pallas_conv_calls
from kernels.ops.state_space.contract import conv_op, v2_op, work_v2


def _launches(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg, cost):
    """Returns the launches of a call: C are queries, B keys and x values, which dt weighs."""
    dt = dt.astype(jnp.float32)
    initial_state = None if initial_state is None else initial_state.astype(jnp.float32)
    tokens = linear.Tokens(C, B, x, dt * A.astype(jnp.float32), dt, D, segment_ids, initial_state)
    return linear.Launches(tokens, x.shape[2], num_states, 1.0, cfg, cost)


def rejects(call):
    if one_token(call.dims["T"], call.num_states):
        return decode.refused(call.dims)
    return linear.refused(call.dims, call.x, call.B, call.C)


def forward(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    cost = work_v2(v2_op.bind(x, dt, A, B, C, D, num_states=num_states))[0]
    if one_token(x.shape[1], num_states):
        dt = dt.astype(jnp.float32)
        token = Token(C, B, x, dt * A.astype(jnp.float32), dt, D)
        return decode.decode(token, x.shape[2], segment_ids, initial_state, 1.0, cost)
    return _launches(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg, cost).forward(x.dtype)


def keeps(call, cfg):
    return {} if one_token(call.dims["T"], call.num_states) else linear.kept(call, cfg)


def forward_with_residuals(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    cost = work_v2(v2_op.bind(x, dt, A, B, C, D, num_states=num_states))[0]
    return _launches(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg, cost).keeping(x.dtype)


def backward(saved, x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    if one_token(x.shape[1], num_states):
        arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return gradients_of(v2_op, saved, arrays)
    cost = work_v2(v2_op.bind(x, dt, A, B, C, D, num_states=num_states))[1]
    run = _launches(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg, cost)
    d = run.backward(saved.d_out, saved.d_final_state, saved)
    gradients = {"x": d["v"], "B": d["k"], "C": d["q"], "dt": d["w"] + d["a"] * A.astype(jnp.float32)}
    # Padding has no gradient, and its dt may be anything.
    gradients["A"] = jnp.sum(d["a"] * jnp.where(d["a"] == 0, 0, dt.astype(jnp.float32)), axis=(0, 1))
    gradients |= {} if D is None else {"D": d["skip"]}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


v2_op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    keeps=keeps,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=linear.heuristic,
    candidates=linear.candidates,
)
conv_op.register(
    pallas_conv_calls.forward,
    pallas_conv_calls.backward,
    platforms={"tpu"},
    name="pallas_tpu",
    dtypes={"float32", "bfloat16"},
    rejects=pallas_conv_calls.rejects,
    heuristic=pallas_conv_calls.heuristic,
    candidates=pallas_conv_calls.candidates,
)
