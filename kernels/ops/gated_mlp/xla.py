"""A gated MLP in plain XLA, any device. Nothing of width F is saved for the backward, which recomputes it from x."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kernels.ops.gated_mlp.contract import GatedMLPConfig, activation_of, activation_op, gated_activation, op
from kernels.ops.gated_mlp.matmuls import block_tokens, by_block, gradients_through, hidden, output


def _pull(gate, up, d, activation):
    """Returns the gradients of gate and up, float32."""
    act, pull = jax.vjp(activation_of(activation), gate.astype(jnp.float32))
    d = d.astype(jnp.float32)
    return pull(d * up.astype(jnp.float32))[0], d * act


def backward_activation(saved, gate, up, activation):
    d_gate, d_up = _pull(gate, up, saved.d_out, activation)
    return {"gate": d_gate, "up": d_up}


def forward(x, gate, up, down, activation, cfg):
    def block(x):
        return output(gated_activation(*hidden(x, gate, up), activation=activation), down)

    return by_block(block, x, cfg.block_tokens)


def backward(saved, x, gate, up, down, activation, cfg):
    def pull(g, u, dh):
        return gated_activation(g, u, activation=activation), *_pull(g, u, dh, activation)

    return gradients_through(pull, saved.d_out, x, gate, up, down, cfg.block_tokens)


def heuristic(call, platform):
    return GatedMLPConfig(block_tokens=block_tokens(math.prod(call.dims["lead"]), call.dims["F"]))


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
op.register(forward, backward, heuristic=heuristic, **EVERYWHERE)
activation_op.register(gated_activation, backward_activation, name="xla", **EVERYWHERE)
