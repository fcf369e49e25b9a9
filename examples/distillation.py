"""Distillation from a teacher (Hinton, Vinyals and Dean 2015, arXiv:1503.02531): the KL divergence of each next token.

    loss = (1 - share) cross entropy + share temperature² KL(teacher || student), both at that temperature

The teacher is a run of this project or a folder of published weights, with the same vocabulary; its logits are never stored.

python -m launch.train plugins=[examples.distillation] recipe=long_context loss=distill distill.teacher=outputs/large \
    z_loss=0 run.dir=outputs/small
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejdist.models.model import Metric
from ejdist.plugins import BoundModel, LossTerms, Reference, register_loss
from ejdist.sections import operational


@dataclass
class DistillSection:
    """The section `distill` of a recipe."""

    # The run.dir of a run, or a folder of published weights. A run that has a checkpoint has the teacher's parameters there.
    teacher: str | None = operational(None, recorded=True)
    share: float = 0.5  # of the divergence in the loss; the cross entropy has the rest
    temperature: float = 2.0  # divides the logits of both models

    def validate(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"distill.share must be in [0, 1], got {self.share}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"distill.temperature must be positive, got {self.temperature}")


def references(section: DistillSection) -> dict[str, Reference]:
    """Returns the teacher."""
    if section.teacher is None:
        raise ValueError("distill.teacher is missing: give the run.dir of a run, or a folder of published weights")
    return {"teacher": Reference(section.teacher)}


def distill(
    student: BoundModel, batch: Mapping[str, jax.Array], section: DistillSection, teacher: BoundModel
) -> LossTerms:
    """Returns the loss over the counted tokens of a microbatch."""
    hidden, layers = student.hidden(batch)
    head, cap = student.projection()
    teacher_head, teacher_cap = teacher.projection()
    divergence = student.ops.fused_kl_divergence(
        hidden,
        head,
        teacher.hidden(batch)[0],
        teacher_head,
        targets=batch["targets"],
        temperature=section.temperature,
        logits_soft_cap=cap,
        teacher_logits_soft_cap=teacher_cap,
        reduction="none",
    )
    divergence = section.temperature**2 * divergence.sum()
    cross_entropy = student.ops.fused_token_losses(hidden, head, batch["targets"], logits_soft_cap=cap).loss.sum()
    return LossTerms(
        total=(1 - section.share) * cross_entropy + section.share * divergence,
        count=jnp.sum(batch["targets"] >= 0),
        layers=layers,
        metrics={"cross_entropy": Metric(cross_entropy, "mean"), "divergence": Metric(divergence, "mean")},
    )


register_loss("distill", distill, DistillSection, references=references)
