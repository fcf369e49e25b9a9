"""An optimizer of one's own: Lion (Chen et al. 2023, arXiv:2302.06675), the sign of a mixture of gradient and momentum.

Clipping, decoupled weight decay and the schedule are those of the recipe. It keeps one moment, half of AdamW's memory.

python -m launch.train plugins=[examples.own_optimizer] recipe=long_context optimizer.name=lion \
    optimizer.learning_rate=3e-4 optimizer.lion.beta2=0.98 run.dir=outputs/lion
"""

from __future__ import annotations

from dataclasses import dataclass

import optax

from ejdist.plugins import register_optimizer


@dataclass
class LionSection:
    """The section `optimizer.lion` of a recipe."""

    beta1: float = 0.9  # share of the momentum in the direction of a step
    beta2: float = 0.99  # decay of the momentum

    def validate(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.lion.{name} must be in [0, 1), got {getattr(self, name)}")


# Each number's update reads that number's gradient and momentum alone: optimizer.offload=host may stream it.
register_optimizer("lion", lambda s: optax.scale_by_lion(s.beta1, s.beta2), LionSection, elementwise=True)
