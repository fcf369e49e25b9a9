"""RWKV-4's time mix for NVIDIA GPUs in Triton, an adapter of `kernels/engines/scan`. Cells have matmuls, and are XLA's."""

from __future__ import annotations

from kernels.engines.scan import triton_mix_calls as mix
from kernels.ops.recurrent.contract import rwkv4_op, work_rwkv4


def forward(w, u, k, v, segment_ids, initial_state, num_states, cfg):
    cost = work_rwkv4(rwkv4_op.bind(w, u, k, v, num_states=num_states))[0]
    return mix.forward(mix.Mix(w, u, k, v, segment_ids, initial_state, num_states), cfg, cost)


def backward(saved, w, u, k, v, segment_ids, initial_state, num_states, cfg):
    cost = work_rwkv4(rwkv4_op.bind(w, u, k, v, num_states=num_states))[1]
    tokens = mix.Mix(w, u, k, v, segment_ids, initial_state, num_states)
    return mix.backward(tokens, saved.d_out, saved.d_final_state, cfg, cost)


rwkv4_op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=mix.rejects,
    heuristic=mix.heuristic,
    candidates=mix.candidates,
)
