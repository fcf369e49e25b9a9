"""One step of training: forward, loss, gradient, update, metrics. No mesh axis, backend or recipe key is in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def microbatches(batch: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Returns [count, B / count, ...] of each array; microbatch i has rows i, i + count, ..., so that every device keeps
    its share of each."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % count:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {count} equal microbatches; change one of the two"
        )
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def make_train_step(
    loss: Callable[[Any, dict], tuple[jax.Array, dict[str, jax.Array]]],
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    place: Callable[[Any], Any] = lambda gradients: gradients,
) -> Callable[[TrainState, dict], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function (state, batch) -> (state, metrics).

    Args:
      loss: (params, batch) -> (sum over tokens, sums to report, with "tokens" among them).
      accumulation: microbatches whose gradients are summed, in float32, before the one update. The result is the mean over
        all tokens of the batch, whatever the number.
      place: applied to the gradients of each microbatch. On a mesh, puts them where the parameters lie: left alone, the
        compiler is free to keep a sum whole on every device.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def gradient(params: Any, batch: dict) -> Any:
        value, grads = differentiate(params, batch)
        return value, place(grads)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        if accumulation == 1:
            (_, sums), grads = gradient(state.params, batch)
        else:

            def add(total: Any, part: dict) -> tuple[Any, None]:
                (_, sums), grads = gradient(state.params, part)
                return jax.tree.map(jnp.add, total, (sums, grads)), None

            parts = microbatches(batch, accumulation)
            shapes = jax.eval_shape(lambda p: gradient(state.params, p), jax.tree.map(lambda x: x[0], parts))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0][1], shapes[1]))
            (sums, grads), _ = jax.lax.scan(add, zeros, parts)
        count = jnp.maximum(sums["tokens"], 1)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": sums["loss"] / count,
            "z_loss": sums["z_loss"] / count,
            "tokens": sums["tokens"],
            "grad_norm": optax.tree.norm(grads),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
