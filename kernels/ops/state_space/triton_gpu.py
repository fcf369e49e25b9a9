"""State spaces for NVIDIA GPUs in Triton, adapters of `kernels/engines/scan`, and the convolution by its own kernels."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.engines.scan import triton_decode as decode
from kernels.engines.scan import triton_diagonal_calls as diagonal
from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.triton_calls import sizes_refused
from kernels.ops.state_space import conv_rows, triton_conv_calls
from kernels.ops.state_space.contract import conv_op, v1_op, v2_op, work_v1, work_v2


def _tokens(x, dt, A, B, C, D, segment_ids, initial_state) -> scalar.Tokens:
    """Returns the arguments of the engine: C are queries, B keys and x values, which dt weighs."""
    dt = dt.astype(jnp.float32)
    initial_state = None if initial_state is None else initial_state.astype(jnp.float32)
    return scalar.Tokens(C, B, x, dt * A.astype(jnp.float32), dt, D, segment_ids, initial_state)


def rejects(call):
    return sizes_refused(call.dims, call.x, call.B, call.C)


def forward(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    cost = work_v2(v2_op.bind(x, dt, A, B, C, D, num_states=num_states))[0]
    if decode.one_token(x.shape[1], num_states):
        dt = dt.astype(jnp.float32)
        token = decode.Token(C, B, x, dt * A.astype(jnp.float32), dt, D)
        return decode.decode(token, x.shape[2], segment_ids, initial_state, 1.0, cfg, cost)
    tokens = _tokens(x, dt, A, B, C, D, segment_ids, initial_state)
    return scalar.forward(scalar.Launches(tokens, x.shape[2], num_states, 1.0, cfg, cost))


def backward(saved, x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    if decode.one_token(x.shape[1], num_states):
        arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return decode.gradients(v2_op, saved, arrays)
    tokens = _tokens(x, dt, A, B, C, D, segment_ids, initial_state)
    cost = work_v2(v2_op.bind(x, dt, A, B, C, D, num_states=num_states))[1]
    run = scalar.Launches(tokens, x.shape[2], num_states, 1.0, cfg, cost)
    d = scalar.backward(run, saved.d_out, saved.d_final_state)
    gradients = {"x": d["v"], "B": d["k"], "C": d["q"], "dt": d["w"] + d["a"] * A.astype(jnp.float32)}
    # Padding has no gradient, and its dt may be anything.
    gradients["A"] = jnp.sum(d["a"] * jnp.where(d["a"] == 0, 0, dt.astype(jnp.float32)), axis=(0, 1))
    gradients |= {} if D is None else {"D": d["skip"]}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


heuristic = decode.heuristic(scalar.heuristic)
v2_op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=decode.candidates(scalar.candidates, heuristic),
)


def v1_forward(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    cost = work_v1(v1_op.bind(x, dt, A, B, C, D, num_states=num_states))[0]
    return diagonal.forward(diagonal.Scan(x, dt, A, B, C, D, segment_ids, initial_state, num_states), cfg, cost)


def v1_backward(saved, x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
    scan = diagonal.Scan(x, dt, A, B, C, D, segment_ids, initial_state, num_states)
    cost = work_v1(v1_op.bind(x, dt, A, B, C, D, num_states=num_states))[1]
    d = diagonal.backward(scan, saved.d_out, saved.d_final_state, cfg, cost)
    return d if D is None else {"D": d.pop("skip")} | d


v1_op.register(
    v1_forward,
    v1_backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=diagonal.rejects,
    heuristic=diagonal.heuristic,
    candidates=diagonal.candidates,
)
conv_op.register(
    triton_conv_calls.forward,
    triton_conv_calls.backward,
    name="triton_gpu",
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=conv_rows.refused,
    heuristic=triton_conv_calls.heuristic,
    candidates=triton_conv_calls.candidates,
)
