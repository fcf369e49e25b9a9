"""The section `model.mtp` of a recipe: multi-token prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(unsafe_hash=True)
class AheadShape:
    """Tokens that are predicted beyond the next, in training: see ejdist/models/ahead.py."""

    modules: int = 0  # behind the model: 0, or 1 for one more token (DeepSeek-V3)
    weight: float = 0.3  # of their loss beside the model's own; DeepSeek-V3 took 0.3, and 0.1 towards the end

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if self.modules not in (0, 1):
            raise ValueError(f"model.mtp.modules = {self.modules} must be 0 or 1: one module stands behind a model")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"model.mtp.weight must be positive, got {self.weight}; model.mtp.modules=0 for none")
        if not self.modules and self.weight != AheadShape.weight:
            raise ValueError(f"model.mtp.weight = {self.weight} is of the module of model.mtp.modules=1: give that too")
