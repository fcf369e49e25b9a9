"""Whether a decoder is a mixture of experts."""

from __future__ import annotations

from functools import lru_cache

from ejdist.models.config import DecoderShape
from ejdist.models.stack import counted_parts


@lru_cache(maxsize=64)
def has_experts(c: DecoderShape) -> bool:
    """Returns whether a part has parameters that are split over experts."""
    return any("E" in p.dims.split() for part in counted_parts(c) for p in part.declare(c).values())
