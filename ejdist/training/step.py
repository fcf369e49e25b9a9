"""The training step: forward, loss, gradient, update, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ejdist.training.optimizer import Optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes: `step` (int32, updates made so far), parameters, the optimizer's state."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(params: Any, optimizer: Optimizer) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def _microbatches(batch: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Returns the batch as [count, B / count, ...]. Rows are dealt out in turn, so that a device which holds
    neighbouring rows holds its share of every part.
    """
    rows = next(iter(batch.values())).shape[0]
    if rows % count:
        raise ValueError(f"the global batch of {rows} rows cannot be split into {count} equal microbatches: change one")
    return {k: x.reshape(rows // count, count, *x.shape[1:]).swapaxes(0, 1) for k, x in batch.items()}


def make_train_step(
    loss: Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]],
    optimizer: Optimizer,
    *,
    accumulation: int = 1,
    place: Callable[[Any], Any] = lambda gradients: gradients,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns (state, batch) -> (state, metrics), a pure function; jit it with the state donated.

    Args:
      loss: (params, batch) -> (sum to differentiate, {"loss", "z_loss", "tokens"} sums), as `decoder.loss` bound to its
        configuration.
      accumulation: parts that the batch's rows are split into; gradients add up in float32.
      place: applied to gradients; on a mesh, puts them where the parameters are.

    Loss and gradient are the mean over all counted tokens of the whole batch, however it is split. Metrics are scalars
    on the device: loss, z_loss, grad_norm (before clipping), learning_rate, tokens.
    """
    differentiate = jax.grad(loss, has_aux=True)

    def sums(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        gradients, terms = differentiate(params, batch)
        return place(jax.tree.map(lambda g: g.astype(jnp.float32), gradients)), terms

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        if accumulation == 1:
            gradients, terms = sums(state.params, batch)
        else:
            parts = _microbatches(batch, accumulation)
            shapes = jax.eval_shape(sums, state.params, {k: x[0] for k, x in parts.items()})
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            add = lambda total, part: (jax.tree.map(jnp.add, total, sums(state.params, part)), None)  # noqa: E731
            (gradients, terms), _ = jax.lax.scan(add, (place(zeros[0]), zeros[1]), parts)
        tokens = jnp.maximum(terms["tokens"], 1)
        gradients = jax.tree.map(lambda g: g / tokens, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        metrics = {
            "loss": terms["loss"] / tokens,
            "z_loss": terms["z_loss"] / tokens,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": optimizer.schedule(state.step),
            "tokens": terms["tokens"],
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step
