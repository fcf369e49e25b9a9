"""One training step: forward, loss, gradient, update, metrics. It knows no mesh axis, backend or recipe key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ejdist.models.model import Metrics, StepContext
from ejdist.training.offload import at_once
from ejdist.training.rounding import random_bits, rounded, seed_of


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array
    params: Any
    opt_state: Any
    buffers: Any  # state that changes without a gradient, such as the bias of a router


def init_state(params: Any, optimizer: optax.GradientTransformation, buffers: Any = None) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), {} if buffers is None else buffers)


def microbatches(batch: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Reshapes each array to [count, B / count, ...]; microbatch i has rows i, i + count, ..., so that every device keeps its
    share of each."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % count:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {count} equal microbatches; change either number"
        )
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def make_train_step(
    loss: Callable[..., tuple[jax.Array, Metrics]],
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    accumulate: str = "float32",
    place: Callable[[Any], Any] = lambda gradients: gradients,
    update: Callable[[Any, dict[str, jax.Array]], Any] = lambda buffers, seen: buffers,
    report: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda numbers: {},
    schedule: Callable[[jax.Array], jax.Array] | None = None,
    skip: Collection[str] = (),
    stream: Callable[..., tuple[Any, Any]] = at_once,
    clip: Callable[[Any, dict[str, jax.Array]], Any] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function (state, batch, limits=None) -> (state, metrics).

    Args:
      loss: (params, batch, context=StepContext) -> (sum over tokens, metrics, with "tokens" among them); with "terms", the sum
        is over these.
      accumulation: microbatches whose gradients are summed before the one update. The result is the mean over all tokens of
        the batch, whatever the number.
      accumulate: dtype of that sum, float32 or bfloat16, to which each sum is rounded stochastically.
      place: applied to the gradients of each microbatch. On a mesh, shards them like the parameters: without it the compiler
        may keep a replicated sum on every device.
      update: (buffers, the "update" metrics of the whole batch) -> buffers; once per step.
      report: (metrics of the whole batch) -> metrics derived from them.
      schedule: steps before this one -> the learning rate, which is added to the metrics, so that the host need not compute it,
        which on an accelerator would wait for the step.
      skip: when not to apply the update: "nonfinite", if the loss or the gradient norm is not finite; "spike", if one of them
        exceeds `limits`, float32[2]: the largest loss and gradient norm of a good step. Parameters, moments, buffers and the
        optimizer's update count then stay unchanged; the step count and the schedule advance. Adds "skipped" to the metrics.
      stream: applies the update part by part, see `ejdist.training.offload.Offload.stream`.
      clip: (the new parameters, the metrics of the whole batch) -> parameters, see `ejdist.training.qk_clip`.
    """
    if unknown := sorted(set(skip) - {"nonfinite", "spike"}):
        raise ValueError(f"skip has {unknown[0]!r}; there are nonfinite and spike")
    differentiate = jax.value_and_grad(loss, has_aux=True)
    apply = optax.with_extra_args_support(optimizer).update

    def gradient(state: TrainState, batch: dict, microbatch: Any) -> tuple[Metrics, Any]:
        context = StepContext(state.step, microbatch, state.buffers)
        (_, metrics), grads = differentiate(state.params, batch, context=context)
        return metrics, place(grads)

    def train_step(
        state: TrainState, batch: dict[str, jax.Array], limits: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        if accumulation == 1:
            sums, grads = gradient(state, batch, jnp.int32(0))
        else:

            def add(total: Any, part: Any) -> tuple[Any, None]:
                (metrics, grad_sum), (more, grads) = total, gradient(state, *part)
                # Without the barrier XLA hoists the reduction out of the loop, which keeps unsharded gradients on every device
                # until then. For some programs its TPU compiler also fails.
                grads = jax.lax.optimization_barrier(grads)
                joined = {name: m.plus(more[name]) for name, m in metrics.items()}
                return (joined, _plus(grad_sum, grads, state.step, part[1])), None

            parts = microbatches(batch, accumulation), jnp.arange(accumulation, dtype=jnp.int32)
            shapes = jax.eval_shape(lambda p: gradient(state, *p), jax.tree.map(lambda x: x[0], parts))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, accumulate), shapes[1])
            (sums, grads), _ = jax.lax.scan(add, ({name: m.start() for name, m in shapes[0].items()}, zeros), parts)
        # A custom loss may be a mean over something else.
        count = jnp.maximum(sums.get("terms", sums["tokens"]).value, 1)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(_mean(grads, count))
        metrics = {name: m.reported(count) for name, m in sums.items() if m.how != "update"}
        metrics |= report(metrics)
        metrics["grad_norm"] = norm
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        wrong = None
        if skip:
            wrong = _is_wrong(metrics["loss"], norm, limits, skip)
            metrics["skipped"] = wrong.astype(jnp.int32)

        def updated(grads: Any, opt_state: Any, params: Any, row: Any = None) -> tuple[Any, Any]:
            """Returns (parameters, optimizer state) after the update of some parameters, or of a row of each."""
            updates, new = apply(_mean(grads, count), opt_state, params, norm=norm, row=row)
            result = optax.apply_updates(params, updates), new
            return result if wrong is None else _unless(wrong, result, (params, opt_state))

        with jax.named_scope("optimizer"):
            params, opt_state = stream(updated, grads, state.opt_state, state.params)
            if clip is not None:
                smaller = clip(params, metrics)
                params = smaller if wrong is None else _unless(wrong, smaller, params)
        buffers = update(state.buffers, {name: m.value for name, m in sums.items() if m.how == "update"})
        if wrong is not None:
            buffers = _unless(wrong, buffers, state.buffers)
        return TrainState(state.step + 1, params, opt_state, buffers), metrics

    return train_step


def _is_wrong(loss: jax.Array, norm: jax.Array, limits: jax.Array | None, skip: Collection[str]) -> jax.Array:
    wrong = jnp.bool_(False)
    if "nonfinite" in skip:
        wrong |= ~(jnp.isfinite(loss) & jnp.isfinite(norm))
    if "spike" in skip:
        if limits is None:
            raise ValueError("a step that skips spikes takes limits, float32[2], after the batch")
        wrong |= (loss > limits[0]) | (norm > limits[1])
    return wrong


def _unless(wrong: jax.Array, new: Any, old: Any) -> Any:
    """Returns the old tree if the new one is wrong, except for the counter of the learning rate schedule, which advances."""

    def counts_steps(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    def one(new: Any, old: Any) -> Any:
        return new if counts_steps(new) else jnp.where(wrong, old, new)

    return jax.tree.map(one, new, old, is_leaf=counts_steps)


def _mean(grads: Any, count: jax.Array) -> Any:
    return jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads)


def _plus(total: Any, grads: Any, step: jax.Array, microbatch: jax.Array) -> Any:
    """Returns the sum of two gradients in the dtype of the first. bfloat16 is rounded stochastically: rounded to the nearest,
    what a microbatch adds would be lost once the sum is 256 times as large."""

    def one(path: Any, total: jax.Array, g: jax.Array) -> jax.Array:
        if total.dtype != jnp.bfloat16:
            return total + g
        name = f"gradient.{jax.tree_util.keystr(path, simple=True, separator='.')}"
        both = total.astype(jnp.float32) + g.astype(jnp.float32)
        return rounded(both, random_bits(seed_of(name, step, microbatch), both.shape))

    return jax.tree_util.tree_map_with_path(one, total, grads)


def state_shardings(shapes: Any, placed: Any, whole: Any) -> Any:
    """Returns a sharding for each leaf of the state: moments are sharded like their parameters, which are `placed`, the rest is
    `whole`."""
    structure = jax.tree.structure(placed)

    def is_params(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    def like_params(x: Any) -> Any:
        # An optimizer of a plugin may keep less of a parameter, such as the means of its rows.
        return jax.tree.map(
            lambda m, p, placement: placement if m.shape == p.shape else whole, x, shapes.params, placed
        )

    return jax.tree.map(lambda x: like_params(x) if is_params(x) else whole, shapes, is_leaf=is_params)
