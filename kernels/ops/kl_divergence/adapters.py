"""The KL divergence on every toolchain: adapts functions of both models' logits to the parameters of the contracts.

A backend provides two functions of logits [rows, V]; the arrays in `row` are [rows]:
  outputs: (student, teacher, how, cfg) -> (student_lse, teacher_lse, gap), [rows] each.
  pull: (student, teacher, row, dtype, how, cfg) -> the gradient of the student's, in that dtype; `row` has `PER_TOKEN`.

Of a backend that says `widens`, logits may be [rows, V and a few more], and both functions take V, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.rows.vocabulary import bent, flat, gradients_by_block, outputs_by_block, shares, widened
from kernels.ops.kl_divergence.contract import logits_op, op

# Logits of one block of each model: 2^25 float32 are 128 MiB.
BLOCK_ELEMENTS, MOST_ROWS = 2**25, 4096
PER_TOKEN = ("student_lse", "teacher_lse", "gap", "d_student_lse", "d_gap")


class How(NamedTuple):
    """The options of the contracts."""

    reverse: bool
    temperature: float
    cap: float | None
    teacher_cap: float | None


def gradient(student: jax.Array, teacher: jax.Array, row: Mapping[str, Any], how: How) -> jax.Array:
    """Returns the gradient of a tile of the student's logits, float32; `row`: [rows, 1] of `PER_TOKEN`."""
    x, slope = bent(student, how.cap, how.temperature)
    other, _ = bent(teacher, how.teacher_cap, how.temperature)
    share, d_gap = shares(x, row["student_lse"]), row["d_gap"]
    d = row["d_student_lse"] * share
    if how.reverse:  # p is the student: the gradient flows through the probabilities and through the logits
        more = jnp.where(share > 0, share * (1 + (x - other) - row["gap"]), 0.0)
        # The gap of an ignored token may be infinite; its cotangent is 0.
        d = d + jnp.where(d_gap == 0, 0.0, d_gap * more)
    else:
        d = d - d_gap * shares(other, row["teacher_lse"])
    return d * slope


def register_logits(name: str, outputs_of: Callable, pull: Callable, **facts: Any) -> None:
    """Registers a backend of the operation on existing logits."""

    def forward(logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
        how = How(reverse, temperature, logits_soft_cap, teacher_logits_soft_cap)
        outputs = outputs_of(flat(logits), flat(teacher_logits), how, cfg)
        return tuple(x.reshape(logits.shape[:-1]) for x in outputs)

    def backward(saved, logits, teacher_logits, reverse, temperature, logits_soft_cap, teacher_logits_soft_cap, cfg):
        how = How(reverse, temperature, logits_soft_cap, teacher_logits_soft_cap)
        row = {name: saved[name].reshape(-1) for name in PER_TOKEN}
        d = pull(flat(logits), flat(teacher_logits), row, logits.dtype, how, cfg)
        return {"logits": d.reshape(logits.shape)}

    logits_op.register(forward, backward, name=name, **facts)


def register(name: str, outputs_of: Callable, pull: Callable, *, widens: bool = False, **facts: Any) -> None:
    """Registers a backend of the operation on hidden states.

    Args:
      widens: whether its functions take logits with columns past the vocabulary, see `widened`.
    """

    def read(*models: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, int]]:
        """Returns the models whose logits its functions read, and what else they are called with."""
        return (widened(models), {"V": models[0][1].shape[1]}) if widens else (models, {})

    def forward(
        hidden,
        lm_head,
        teacher_hidden,
        teacher_lm_head,
        reverse,
        temperature,
        logits_soft_cap,
        teacher_logits_soft_cap,
        cfg,
    ):
        how = How(reverse, temperature, logits_soft_cap, teacher_logits_soft_cap)
        models, also = read((hidden, lm_head), (teacher_hidden, teacher_lm_head))
        return outputs_by_block(models, {}, cfg.block_rows, lambda logits, _: outputs_of(*logits, how, cfg, **also))

    def backward(
        saved,
        hidden,
        lm_head,
        teacher_hidden,
        teacher_lm_head,
        reverse,
        temperature,
        logits_soft_cap,
        teacher_logits_soft_cap,
        cfg,
    ):
        how = How(reverse, temperature, logits_soft_cap, teacher_logits_soft_cap)
        models, also = read((hidden, lm_head), (teacher_hidden, teacher_lm_head))

        def pulled(logits: list, row: Any) -> Any:
            return pull(*logits, row, hidden.dtype, how, cfg, **also), ()

        # A padded row has cotangents of zero, and residuals of zero keep its exponentials finite.
        row = {name: saved[name] for name in PER_TOKEN}
        d_hidden, d_head, _ = gradients_by_block(models, row, cfg.block_rows, pulled)
        return {"hidden": d_hidden, "lm_head": d_head[:, : lm_head.shape[1]]}

    op.register(forward, backward, name=name, **facts)
