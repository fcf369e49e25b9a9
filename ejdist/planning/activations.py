"""The parts of a model's layers as the planner counts them: how many layers have each, and the bytes that each declares."""

from __future__ import annotations

from ejdist.models.config import DecoderShape
from ejdist.models.part import Costs, Part
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts


def bytes_of(c: DecoderShape, share: Share) -> dict[Part, PartBytes]:
    """Returns part -> its bytes in one layer. Raises `Undeclared`, naming the part, where it declares none."""
    return {part: Costs(part).memory(c, share) for part in counted_parts(c)}
