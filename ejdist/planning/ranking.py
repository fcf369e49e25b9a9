"""Ranks the predicted plans, and says why the runners-up come after the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ejdist.models.share import hides
from ejdist.planning.candidates import Candidate
from ejdist.planning.memory import Memory
from ejdist.planning.step_time import StepTime
from ejdist.sequence.schemes import scheme_of

ALIKE = 0.02  # a plan that is faster by less is no reason for a larger batch
OTHERS = 3  # runners-up that are printed


@dataclass(frozen=True)
class Predicted:
    """A candidate, and what is expected of it on a device."""

    candidate: Candidate
    memory: Memory
    time: StepTime
    tokens: int  # of a step

    @property
    def rate(self) -> float:
        """Tokens a second, of all devices."""
        return self.tokens / self.time.total


def ranked(found: Sequence[Predicted]) -> list[Predicted]:
    """Returns the predictions, best first: by tokens a second; among those within 2% of the fastest that is left, the smallest
    batch, then the least memory, then a scheme whose transfers hide under work."""
    left, order = sorted(found, key=lambda p: -p.rate), []
    while left:
        fastest = left[0].rate
        alike = [p for p in left if p.rate >= fastest * (1 - ALIKE)]
        order += sorted(alike, key=lambda p: (p.candidate.global_batch, p.memory.total, _waits(p.candidate)))
        left = left[len(alike) :]
    return order


def _waits(candidate: Candidate) -> bool:
    """Returns whether attention waits for the transfers of the scheme that was chosen."""
    return candidate.scheme is not None and not hides(scheme_of(candidate.scheme))


def different(best: Predicted, order: Sequence[Predicted]) -> list[Predicted]:
    """Returns the runners-up: the next best plans, each with a mesh or remat policy that no plan before it has."""
    seen, others = {(best.candidate.mesh, best.candidate.remat)}, []
    for plan in order:
        kind = plan.candidate.mesh, plan.candidate.remat
        if kind not in seen:
            seen.add(kind)
            others.append(plan)
    return others[:OTHERS]


def why_later(best: Predicted, other: Predicted) -> str:
    """Returns why a plan comes after the best one, by the rules of `ranked`."""
    if other.rate < best.rate * (1 - ALIKE):
        # Of as many tokens, since batches differ.
        longer = {
            n: s * best.tokens / other.tokens - best.time.seconds.get(n, 0.0) for n, s in other.time.seconds.items()
        }
        name = max(longer, key=lambda n: longer[n])
        return f"{1 - other.rate / best.rate:.1%} slower: {name} takes {longer[name]:.3g} s more for as many tokens"
    if other.candidate.global_batch != best.candidate.global_batch:
        rows = other.candidate.global_batch
        return f"as fast within {ALIKE:.0%}, with a batch of {rows} rows in place of {best.candidate.global_batch}"
    more = (other.memory.total - best.memory.total) / 2**30
    if more > 0:
        return f"as fast within {ALIKE:.0%}, with {more:.2g} GiB more on a device"
    if _waits(other.candidate) and not _waits(best.candidate):
        return f"as fast within {ALIKE:.0%}, but attention waits for its transfers"
    return f"as fast within {ALIKE:.0%}, with nothing less"
