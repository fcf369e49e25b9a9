"""Recurrent layers for NVIDIA GPUs in Triton: LSTMs, and RWKV-4's time mix, an adapter of `kernels/engines/scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_mix_calls as mix
from kernels.ops.recurrent import triton_lstm_calls as lstm
from kernels.ops.recurrent.contract import op, rwkv4_op, work_rwkv4
from kernels.ops.recurrent.directions import directions, gradients_of_weights, merged


def _ends(bidirectional):
    return ("", "_reverse") if bidirectional else ("",)


def forward(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    return forward_with_residuals(*arguments)[0]


def forward_with_residuals(
    inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states
):  # fmt: skip
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    outs, finals, kept = [], [], {}
    for of in directions(*arguments):
        out, final, states = lstm.forward(of)
        outs.append(out[:, :: of.way])
        finals.append(final)
        kept |= {name + of.end: jnp.moveaxis(x, 0, 1) for name, x in states._asdict().items()}
    return (jnp.concatenate(outs, axis=-1), jnp.concatenate(finals, axis=2)), kept


def keeps(call, cfg):
    (B, T, _), w = call.inputs.shape, call.weights["weight_hh"]
    shape = (B, T + 1, w.shape[1])
    dtypes = {"hidden": w.dtype, "cells": jnp.float32}
    return {n + end: jax.ShapeDtypeStruct(shape, d) for end in _ends(call.bidirectional) for n, d in dtypes.items()}


def backward(saved, inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    ends, parts = _ends(bidirectional), []
    d_outs = jnp.split(saved.d_out, len(ends), axis=-1)
    d_finals = jnp.split(saved.d_final_state.astype(jnp.float32), len(ends), axis=2)
    for of, d_out, d_final in zip(directions(*arguments), d_outs, d_finals, strict=True):
        kept = [saved.get(name + of.end) for name in lstm.States._fields]
        states = lstm.forward(of)[2] if None in kept else lstm.States(*(jnp.moveaxis(x, 0, 1) for x in kept))
        d, hidden, d_initial = lstm.backward(of, states, d_out[:, :: of.way], d_final)
        parts.append((of, *gradients_of_weights(d, d, of.inputs, hidden, of.weights), d_initial))
    return merged(parts, segment_ids, initial_state)


def mix_forward(w, u, k, v, segment_ids, initial_state, num_states, cfg):
    cost = work_rwkv4(rwkv4_op.bind(w, u, k, v, num_states=num_states))[0]
    return mix.forward(mix.Mix(w, u, k, v, segment_ids, initial_state, num_states), cfg, cost)


def mix_backward(saved, w, u, k, v, segment_ids, initial_state, num_states, cfg):
    cost = work_rwkv4(rwkv4_op.bind(w, u, k, v, num_states=num_states))[1]
    tokens = mix.Mix(w, u, k, v, segment_ids, initial_state, num_states)
    return mix.backward(tokens, saved.d_out, saved.d_final_state, cfg, cost)


op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    keeps=keeps,
    platforms={"cuda"},
    dtypes={"bfloat16", "float16"},
    rejects=lstm.rejects,
)
rwkv4_op.register(
    mix_forward,
    mix_backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=mix.rejects,
    heuristic=mix.heuristic,
    candidates=mix.candidates,
)
