"""AdamW with warmup-cosine and warmup-stable-decay schedules, through optax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("warmup_cosine", "wsd", "constant")


@dataclass
class OptimizerConfig:
    """The section `optimizer`.

    Raises (by `build`):
      ValueError: naming the field and the remedy.
    """

    learning_rate: float = 3e-4  # the peak
    schedule: str = "warmup_cosine"  # or wsd (warmup-stable-decay), or constant (after warmup)
    warmup_steps: int = 100
    decay_steps: int = 0  # wsd: the last so many steps go down; 0 for a fifth of the run
    final_fraction: float = 0.1  # learning rate at the end, as a fraction of the peak
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # decoupled; of matrices only, see `decayed`
    clip_norm: float | None = 1.0  # global norm of the gradient; null for no clipping


class Optimizer(NamedTuple):
    """An optax transformation, and the learning rate at a step, which a training log shows."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    schedule: Callable[[Any], jax.Array]


def build_schedule(section: OptimizerConfig, total_steps: int) -> Callable[[Any], jax.Array]:
    """Returns step (from 0) -> learning rate.

    Warmup is linear and its first step is not lost at zero: it has rate peak / warmup_steps. Then a cosine down to
    `final_fraction` at `total_steps` (Loshchilov and Hutter, 2016), or the peak until the last `decay_steps` and then a
    line down to it (Hu et al., MiniCPM, 2024).
    """
    peak, warmup = section.learning_rate, section.warmup_steps
    if section.schedule not in SCHEDULES:
        raise ValueError(f"optimizer.schedule = {section.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
    if peak <= 0:
        raise ValueError(f"optimizer.learning_rate must be positive, got {peak}")
    if not 0 <= section.final_fraction <= 1:
        raise ValueError(f"optimizer.final_fraction must be in [0, 1], got {section.final_fraction}")
    if total_steps < 1 or not 0 <= warmup < max(total_steps, 1):
        raise ValueError(
            f"optimizer.warmup_steps = {warmup} must be at least 0 and less than the {total_steps} steps of the run; "
            "warm up for fewer steps or run more"
        )
    final = peak * section.final_fraction
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if section.schedule == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    if section.schedule == "warmup_cosine":
        fall = optax.cosine_decay_schedule(peak, total_steps - warmup, alpha=section.final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    decay = section.decay_steps or max(total_steps // 5, 1)
    if not 0 < decay <= total_steps - warmup:
        raise ValueError(
            f"optimizer.decay_steps = {decay} does not fit into the {total_steps - warmup} steps after warmup; "
            "shorten one of them or run more steps"
        )
    fall = optax.linear_schedule(peak, final, decay)
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, total_steps - decay])


def decayed(params: Any) -> Any:
    """Returns a tree of bools, true where weight decay applies: matrices and the embedding, not norms and biases.

    By name, because layers are stacked and a stack of biases has the shape of a matrix: parameters called `...norm` or
    `...bias` are left alone.
    """
    name = lambda path: jax.tree_util.keystr(path[-1:], simple=True)  # noqa: E731
    return jax.tree.map_with_path(lambda path, _: not name(path).endswith(("norm", "bias")), params)


def build(section: OptimizerConfig, total_steps: int) -> Optimizer:
    """Returns AdamW (Loshchilov and Hutter, 2017): clipping by global norm, float32 moments, masked decoupled decay."""
    if section.clip_norm is not None and section.clip_norm <= 0:
        raise ValueError(f"optimizer.clip_norm must be positive, or null for no clipping, got {section.clip_norm}")
    for name in ("b1", "b2"):
        if not 0 <= getattr(section, name) < 1:
            raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(section, name)}")
    if section.weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay must not be negative, got {section.weight_decay}")
    schedule = build_schedule(section, total_steps)
    adamw = optax.adamw(
        schedule,
        b1=section.b1,
        b2=section.b2,
        eps=section.eps,
        weight_decay=section.weight_decay,
        mu_dtype=jnp.float32,
        mask=decayed,
    )
    clip = optax.identity() if section.clip_norm is None else optax.clip_by_global_norm(section.clip_norm)
    transformation = optax.chain(clip, adamw)
    return Optimizer(transformation.init, transformation.update, lambda step: jnp.asarray(schedule(step), jnp.float32))
