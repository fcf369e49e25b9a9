"""Experts over devices or all of them on each: the best plan of either kind, which is faster, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ejdist.planning.ranking import Predicted, ranked


def ranks_of(sections: Any, plan: Predicted) -> int:
    """Returns over how many devices the experts of a plan are split."""
    return math.prod(plan.candidate.sizes.get(axis, 1) for axis in sections.experts.axes)


def of_each_kind(sections: Any, plans: Sequence[Predicted]) -> tuple[Predicted | None, Predicted | None]:
    """Returns the best plan with experts over devices, and the best with all of them on each; None where there is none."""
    best: dict[bool, Predicted] = {}
    for over in (True, False):
        kind = [p for p in plans if (ranks_of(sections, p) > 1) == over]
        if kind:
            best[over] = ranked(kind)[0]
    return best.get(True), best.get(False)


def compared(sections: Any, over: Predicted | None, on_each: Predicted | None) -> str:
    """Returns the line that says which kind is faster, by how much, why, and what would change it, of plans that fit."""
    if over is None or on_each is None:
        return f"experts: no plan fits with them {'split over devices' if over is None else 'all on each device'}"
    sizes, ranks = over.candidate.sizes, ranks_of(sections, over)
    along = " ".join(f"mesh.{axis}={sizes[axis]}" for axis in sections.experts.axes if sizes.get(axis, 1) > 1)
    per = over.tokens / on_each.tokens  # seconds of the other plan for as many tokens
    lost = over.time.total - on_each.time.total * per
    way, weights, others = over.time.waits_exchange, over.time.waits_experts, on_each.time.waits_experts * per
    text = (
        f"experts over {ranks} devices ({along}): {over.rate:,.0f} tokens/s, all on each device: {on_each.rate:,.0f}; of "
        f"{over.time.total:.3g} s tokens wait {way:.3g} s on their way, and for the experts' weights {weights:.3g} s in "
        f"place of {others:.3g} s"
    )
    return text if over.rate >= on_each.rate else f"{text}; {_change(over, on_each, lost)}"


def _change(over: Predicted, on_each: Predicted, lost: float) -> str:
    """Returns what would make experts over devices as fast: a faster exchange, or fewer tokens for each gather of weights.

    Args:
      lost: seconds by which a step with experts over devices takes longer than as many tokens of the other plan.
    """
    (sent, alone), waits, options = over.time.exchange, over.time.waits_exchange, []
    if lost < waits:
        rate = sent / alone / 1e9
        options.append(
            f"with an exchange of {rate * waits / (waits - lost):,.0f} GB/s a device, which has {rate:,.0f}, or with "
            f"{lost / waits:.0%} of its wait hidden"
        )
    gathered = on_each.time.waits_experts * over.tokens / on_each.tokens
    if gathered > 0:
        tokens = on_each.tokens / on_each.candidate.accumulation / on_each.candidate.devices
        options.append(
            f"below about {tokens * gathered / (gathered + lost):,.0f} tokens of a device between gathers, of which it has "
            f"{tokens:,.0f}"
        )
    return "as fast " + ", or ".join(options) if options else "slower even if the exchange took no time"
