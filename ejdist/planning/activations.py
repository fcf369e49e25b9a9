"""The parts of a model's layers as the planner counts them: how many layers have each, and the bytes that each declares."""

from __future__ import annotations

import functools

from ejdist.models.config import DecoderShape
from ejdist.models.part import Costs, Part
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts


@functools.lru_cache(maxsize=64)
def has_experts(c: DecoderShape) -> bool:
    """Returns whether a part has parameters that are split over experts."""
    return any("E" in p.dims.split() for part in counted_parts(c) for p in part.declare(c).values())


def bytes_of(c: DecoderShape, share: Share) -> dict[Part, PartBytes]:
    """Returns part -> its bytes in one layer. Raises `Undeclared`, naming the part, where it declares none."""
    return {part: Costs(part).memory(c, share) for part in counted_parts(c)}
