"""What a run says of a decoder's products in 8 bits."""

from __future__ import annotations

from typing import Any

from ejdist.models.config import DecoderShape
from ejdist.models.stack import narrow_matrices, why_stay


def told_of_precision(c: Any) -> list[str]:
    """Returns what a run logs of products in 8 bits: nothing where there are none, or where the model is not a decoder."""
    narrow, rest = narrow_matrices(c) if isinstance(c, DecoderShape) else ((), ())
    if not narrow:
        return []
    head = ", and of losses with the output projection," if c.precision_head else ""
    line = f"model.precision = {c.precision}: products of {', '.join(narrow)}{head} are in 8 bits"
    if rest:
        line += f"; {', '.join(rest)} stay in {c.compute_dtype}"
    reasons = {name: why for name, why in why_stay(c).items() if why is not None}
    for why in dict.fromkeys(reasons.values()):
        line += f"; {', '.join(name for name, of in reasons.items() if of == why)}: {why}"
    return [line]
