"""State spaces and their convolution with the sequence split: states pass between ranks, and of a convolution a halo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.state_passing import Linear, StatePassing, halo
from ejdist.sharded import sharded
from kernels.framework.dispatch import vary_alike
from kernels.ops.state_space import conv_op, v1_op, v2_op


def _final(op: Any, arguments: dict[str, Any], valid: jax.Array) -> jax.Array:
    """Returns the state [B, ...] after the valid tokens, from none."""
    return op(**arguments, segment_ids=jnp.where(valid, 0, -1))[1][:, 0]


@dataclass(frozen=True)
class Mamba2(Linear):
    """A is a number a head, exp(A sum dt); b is one matmul over the tokens."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        (rows, _, heads, width), B = arguments["x"].shape, arguments["B"]
        return jnp.zeros((rows, heads, B.shape[3], width), jnp.float32)

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        x, dt, A, B = (arguments[n].astype(jnp.float32) for n in ("x", "dt", "A", "B"))
        dt, B = jnp.where(valid[..., None], dt, 0), jnp.where(valid[..., None, None], B, 0)
        x = jnp.where(valid[..., None, None], x, 0)
        until_end = jnp.cumsum((dt * A)[:, ::-1], axis=1)[:, ::-1]
        after = jnp.pad(until_end[:, 1:], ((0, 0), (0, 1), (0, 0)))
        values = (x * (dt * jnp.exp(after))[..., None]).reshape(*x.shape[:2], B.shape[2], -1, x.shape[3])
        b = jnp.einsum("btkh,btkrp->bkrhp", B, values, precision=jax.lax.Precision.HIGHEST)
        return jnp.exp(until_end[:, 0])[..., None, None], b.reshape(self.start(arguments).shape)


@dataclass(frozen=True)
class Mamba(Linear):
    """A is a number for each of the state, exp(A sum dt); b is the operation's own final state."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        return jnp.zeros((arguments["x"].shape[0], *arguments["A"].shape), jnp.float32)

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        steps = jnp.sum(jnp.where(valid[..., None], arguments["dt"].astype(jnp.float32), 0), axis=1)
        return jnp.exp(steps[..., None] * arguments["A"].astype(jnp.float32)), _final(v1_op, arguments, valid)


@dataclass(frozen=True)
class Window(Linear):
    """The last W - 1 inputs: a rank with m tokens moves the state by m places and puts its own behind. A is m, int [B]."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        return jnp.zeros(
            (arguments["x"].shape[0], arguments["x"].shape[2], arguments["weight"].shape[1] - 1), jnp.float32
        )

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        return jnp.sum(valid, axis=1), _final(conv_op, arguments, valid)

    def times(self, a: jax.Array, state: jax.Array) -> jax.Array:
        index = jnp.arange(state.shape[2]) + a[:, None]
        moved = jnp.take_along_axis(state, index[:, None].clip(0, max(state.shape[2] - 1, 0)), axis=2)
        return jnp.where((index < state.shape[2])[:, None], moved, 0)

    def after(self, then: jax.Array, first: jax.Array) -> jax.Array:
        return then + first

    def constant(self, state: jax.Array, like: Any) -> Any:
        return jnp.full_like(like[0], state.shape[2]), state


@dataclass(frozen=True)
class Convolution:
    """What runs on a shard: where rows are one segment the state is the end of the rank before, one hop away."""

    def __call__(
        self,
        axes: dict[str, tuple[str, ...]],
        *,
        x: jax.Array,
        weight: jax.Array,
        order: Order | None = None,
        **arguments: Any,
    ) -> Any:
        axis, history = axes["T"], weight.shape[1] - 1
        several = order is not None and order.runs(x.shape[1]).shape[1] > 1
        if not axis or several or "segment_ids" in arguments or not 0 < history <= x.shape[1]:
            return StatePassing(conv_op, Window())(axes, order=order, x=x, weight=weight, **arguments)
        initial = arguments.pop("initial_state", None)
        before = jnp.swapaxes(halo(x, axis, history), 1, 2).astype(jnp.float32)[:, None]
        if initial is not None:
            before = jnp.where(exchange.rank(axis) == 0, initial.astype(jnp.float32), before)
        out, final = conv_op(x=x, weight=weight, initial_state=before, **arguments)
        last = exchange.rank(axis) == jax.lax.axis_size(axis) - 1
        return out, jax.lax.psum(jnp.where(last, *vary_alike((final, jnp.zeros_like(final)))), axis)


state_space_v2 = sharded(kernels.state_space_v2, local=StatePassing(v2_op, Mamba2()), handles=("T",), follows="fixed")
state_space_v1 = sharded(kernels.state_space_v1, local=StatePassing(v1_op, Mamba()), handles=("T",), follows="fixed")
causal_conv1d = sharded(kernels.causal_conv1d, local=Convolution(), handles=("T",), follows="fixed")
