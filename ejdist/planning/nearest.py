"""What would fit in the place of a plan that does not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.planning.candidates import ACCUMULATION, BATCH, REMAT, SAVED
from ejdist.planning.measured import Measured
from ejdist.planning.ranking import Predicted
from ejdist.planning.search import search
from ejdist.planning.targets import Target


def nearest(
    sections: Any,
    target: Target,
    given: Collection[str],
    measured: Measured | None = None,
    documents: Documents = ONE_DOCUMENT,
) -> list[tuple[str, Predicted, dict[str, str]]]:
    """Returns plans that fit, each with one thing changed: (what was changed, the plan, what to give in place of
    what was given). All are predicted, and none is compiled. Where neither another remat policy nor more microbatches are
    enough, both, and then with the keys of the optimizer that save memory."""
    plans = []

    def attempt(
        what: str, s: Any, on: Target, keys: Collection[str], extra: dict[str, str], save: bool = False
    ) -> bool:
        try:
            best = search(s, on, keys, None, measured=measured, documents=documents, save=save).best
        except ValueError:
            return False
        if best is not None:
            plans.append((what, best, extra | {k: v for k, v in best.candidate.overrides().items() if k not in keys}))
        return best is not None

    def freed(what: str, keys: Collection[str]) -> bool:
        """Attempts other values of keys that are given, of the same tokens on the same devices; activations may then be kept on
        the host."""
        free = fixed_keys & {*keys}
        return bool(free) and attempt(what, sections, target, fixed_keys - free, {}, save=True)

    fixed_keys = set(given)
    freed("another remat policy", [REMAT])
    freed("more microbatches", [ACCUMULATION])
    if not plans and {REMAT, ACCUMULATION} <= fixed_keys:
        freed("another remat policy and more microbatches", [REMAT, ACCUMULATION])
    if not plans:
        freed("the optimizer's memory saved", [REMAT, ACCUMULATION, *SAVED])
    if any(key.startswith("mesh.") for key in fixed_keys):
        attempt("another mesh", sections, target, {k for k in fixed_keys if not k.startswith("mesh.")}, {})
    if BATCH in fixed_keys:
        attempt("another batch", sections, target, fixed_keys - {ACCUMULATION, BATCH}, {})
    length = sections.data.sequence_length
    for part in (2, 4, 8, 16, 32, 64):
        shorter = replace(sections, data=replace(sections.data, sequence_length=length // part))
        if length % part == 0 and attempt(
            "fewer tokens", shorter, target, fixed_keys, {"data.sequence_length": str(length // part)}
        ):
            break
    for times in (2, 4, 8):
        count = target.count * times
        if not target.shape and count > target.per_host and count % target.per_host:
            continue  # hosts of which one has fewer GPUs
        free = {k for k in fixed_keys if not k.startswith("mesh.")}
        # Chips of a larger slice are as those of this one; its shape is the reader's to choose.
        if attempt(f"{count} devices", sections, replace(target, count=count), free, {}):
            break
    return plans
