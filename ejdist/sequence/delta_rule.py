"""Delta rules and RWKV-7 with the sequence split: what a rank does to a state is S -> A S + b, A [H, H] a product of matrices.

Columns of the state are independent, and an output is linear in them. So one call of the operation, from the state [0 | I]
and with values [v | 0], ends in [b | A], and its outputs are those of a state that enters as 0, beside the vectors that the
entering state is multiplied with, one for each token. There is one pass over the tokens, to which that product is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sequence.state_passing import Linear, StatePassing
from ejdist.sharded import ShardedFunction, sharded
from kernels.framework.contract import Op
from kernels.ops.delta_rule import op, pool_op, rwkv7_op


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

    def once(
        self, call: Callable[..., Any], arguments: dict[str, Any], initial: jax.Array, entered: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        value, H = arguments[self.value], arguments[self.key].shape[-1]
        Hv = value.shape[-1]
        entered = entered[:, :, None, None, None]
        identity = jnp.broadcast_to(jnp.eye(H, dtype=initial.dtype), (*initial.shape[:-1], H))
        state = jnp.concatenate([jnp.where(entered, 0, initial), jnp.where(entered, identity, 0)], -1)
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, H)))
        out, final = call(**{**arguments, self.value: value, "initial_state": state})
        return (out[..., :Hv], final[..., :Hv]), (out[..., Hv:], final[..., Hv:])

    def reached(self, reach: jax.Array, state: jax.Array) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST if reach.dtype == jnp.float32 else None
        return jnp.einsum("btnh,bnhv->btnv", reach.astype(jnp.float32), state, precision=precision)

    def identity(self, like: Any) -> Any:
        return jnp.broadcast_to(jnp.eye(like[0].shape[-1], dtype=like[0].dtype), like[0].shape), jnp.zeros_like(like[1])


@dataclass(frozen=True)
class _OrPool(StatePassing):
    """The same, and one token of each request, whose state is where it is: it needs no other rank."""

    def __call__(self, axes: dict[str, tuple[str, ...]], **arguments: Any) -> Any:
        if "state_pool" not in arguments:
            return super().__call__(axes, **arguments)
        arguments.pop("order", None)
        return pool_op(**arguments)


def _split(function: Any, op: Op, key: str, value: str) -> ShardedFunction:
    return sharded(function, local=StatePassing(op, Transitions(op, key, value)), handles=("T",), follows="fixed")


delta_rule = _split(kernels.delta_rule, op, "key", "value")
gated_delta_rule = _split(kernels.gated_delta_rule, op, "key", "value")
kernel_delta_attention = _split(kernels.kernel_delta_attention, op, "key", "value")
ragged_gated_delta_rule = sharded(
    kernels.ragged_gated_delta_rule,
    local=_OrPool(op, Transitions(op, "key", "value")),
    handles=("T",),
    follows="fixed",
)
rwkv7 = _split(kernels.rwkv7, rwkv7_op, "k", "v")
FUNCTIONS = (delta_rule, gated_delta_rule, kernel_delta_attention, ragged_gated_delta_rule, rwkv7)
