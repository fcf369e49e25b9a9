"""Experts over devices or all of them on each: the best plan of either kind, which is faster, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ejdist.experts.schemes import SCHEMES
from ejdist.models.mixture import has_experts
from ejdist.planning.candidates import DISPATCH
from ejdist.planning.ranking import Predicted, ranked


def refusal(sections: Any, sizes: tuple[int, ...]) -> str | None:
    """Returns why tokens cannot get to experts over axes of these sizes as the recipe says; None where they can."""
    return sections.experts.refusal(sizes) if has_experts(sections.model) else None


def precision_refusal(sections: Any) -> str | None:
    """Returns why rows of `experts.exchange` cannot travel by `experts.dispatch` over any devices; None where they can."""
    return sections.experts.precision_refusal() if has_experts(sections.model) else None


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


def compared(
    sections: Any, over: Predicted | None, on_each: Predicted | None, given: Collection[str] = (DISPATCH,)
) -> str:
    """Returns the line that says which kind is faster, by how much, why, and what would change it, of plans that fit.

    Args:
      given: keys that stay as the recipe has them.
    """
    e = sections.experts
    scheme = SCHEMES[e.dispatch]() if e.dispatch in SCHEMES and DISPATCH in given else None
    needs = None if scheme is None else scheme.refusal((2,) * len(e.axes))
    if over is None and needs is not None:
        return (
            f"experts: none are split over devices, as {DISPATCH} = {e.dispatch!r} is for experts on {needs}, and "
            f"experts.axes = {list(e.axes)}; leave {DISPATCH} out, or use auto"
        )
    if over is None or on_each is None:
        return f"experts: no plan fits with them {'split over devices' if over is None else 'all on each device'}"
    sizes, ranks = over.candidate.sizes, ranks_of(sections, over)
    along = " ".join(f"mesh.{axis}={sizes[axis]}" for axis in sections.experts.axes if sizes.get(axis, 1) > 1)
    per = over.tokens / on_each.tokens  # seconds of the other plan for as many tokens
    lost = over.time.total - on_each.time.total * per
    way, weights, others = over.time.waits_exchange, over.time.waits_experts, on_each.time.waits_experts * per
    text = (
        f"experts over {ranks} devices ({along}): {over.rate:,.0f} tokens/s, all on each device: {on_each.rate:,.0f}; of "
        f"a step of {over.time.total:.3g} s, {way:.3g} s is waiting for tokens and {weights:.3g} s for experts' weights "
        f"({others:.3g} s if every device held all experts)"
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
