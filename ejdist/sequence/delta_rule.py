"""Delta rules and RWKV-7 with the sequence split: what a rank does to a state is S -> A S + b, A [H, H] a product of matrices.

Columns of the state are independent. So one call of the operation, from the state [0 | I] and with values [v | 0], ends
in [b | A]: the map of a rank's tokens costs what these columns cost, and needs no code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sequence.state_passing import Linear, StatePassing
from ejdist.sharded import ShardedFunction, sharded
from kernels.framework.contract import Op
from kernels.ops.delta_rule import op, rwkv7_op


@dataclass(frozen=True)
class Transitions(Linear):
    """The maps (A [B, N, H, H], b [B, N, H, Hv]) of the ranks.

    Attributes:
      op: the operation; key, value: its arguments [B, T, ..., H] and [B, T, N, Hv] that a state [H, Hv] is built from.
    """

    op: Op
    key: str
    value: str

    def times(self, a: jax.Array, state: jax.Array) -> jax.Array:
        return jnp.matmul(a, state, precision=jax.lax.Precision.HIGHEST)

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        B, _, N, Hv = arguments[self.value].shape
        return jnp.zeros((B, N, arguments[self.key].shape[-1], Hv), jnp.float32)

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        value, H = arguments[self.value], arguments[self.key].shape[-1]
        B, _, N, Hv = value.shape
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, H)))
        state = jnp.broadcast_to(jnp.pad(jnp.eye(H, dtype=jnp.float32), ((0, 0), (Hv, 0))), (B, 1, N, H, Hv + H))
        ids = jnp.where(valid, 0, -1)
        widened: Any = {**arguments, self.value: value, "segment_ids": ids, "initial_state": state}
        _, final = self.op(**widened)
        return final[:, 0, ..., Hv:], final[:, 0, ..., :Hv]


def _split(function: Any, op: Op, key: str, value: str) -> ShardedFunction:
    return sharded(function, local=StatePassing(op, Transitions(op, key, value)), handles=("T",))


delta_rule = _split(kernels.delta_rule, op, "key", "value")
gated_delta_rule = _split(kernels.gated_delta_rule, op, "key", "value")
kernel_delta_attention = _split(kernels.kernel_delta_attention, op, "key", "value")
ragged_gated_delta_rule = _split(kernels.ragged_gated_delta_rule, op, "key", "value")
rwkv7 = _split(kernels.rwkv7, rwkv7_op, "k", "v")
FUNCTIONS = (delta_rule, gated_delta_rule, kernel_delta_attention, ragged_gated_delta_rule, rwkv7)
