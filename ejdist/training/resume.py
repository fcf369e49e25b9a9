"""Checks that a recipe may resume the run in run.dir: every key that affects the losses must be unchanged.

A key affects the losses unless its section declares otherwise, see `ejdist.sections`.

Only `run.steps` may change. The schedule depends on it, so a change is allowed if the rates of all steps run so far stay the
same under the new total: the run is then the one that would have had that total from the start. This holds for a constant rate,
and for wsd before its decay. Otherwise `run.extend` confirms the change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.paths import ELSEWHERE
from ejdist.sections import keys_of
from ejdist.training.optimizer import OptimizerSection, make_schedule
from ejdist.training.program import RunSection, TrainSections

_STEPS = "run.steps"


def _as_stored(value: Any) -> Any:
    """Returns a value as it comes back from a checkpoint, through JSON."""
    return json.loads(json.dumps(value))


def fingerprint(sections: TrainSections) -> dict[str, Any]:
    """Returns the recipe keys that a checkpoint stores: those that affect the losses, and those marked as recorded."""
    return {key.name: _as_stored(key.value) for key in keys_of(sections) if key.recorded}


def _changes(stored: dict[str, Any], sections: TrainSections) -> list[str]:
    """Returns a phrase for each key that affects the losses and differs from the fingerprint."""
    found = []
    keys = {key.name: key for key in keys_of(sections)}
    for name, key in sorted(keys.items()):
        if not key.decides:
            continue
        # A key that did not exist then behaved as its default does now.
        was = stored.get(name, _as_stored(key.default))
        if _as_stored(key.canonical(was)) != _as_stored(key.canonical(key.value)):
            since = "" if name in stored else " (the default: that run has no such key)"
            found.append(f"{name}: was {was}{since}, is {_as_stored(key.value)}")
    gone = sorted(set(stored) - set(keys))
    return found + [f"{name}: was {stored[name]}, and there is no such key now" for name in gone]


def changed_rate(section: OptimizerSection, old: int, new: int, made: int) -> tuple[int, float, float] | None:
    """Returns (step, its learning rate, the rate under the new total) for the first of the `made` steps whose rate differs
    between a run of `old` and one of `new` steps; None if there is none. Steps count from 1."""
    steps = np.arange(made)
    was, would = (np.broadcast_to(np.asarray(make_schedule(section, n)(steps)), made) for n in (old, new))
    different = np.flatnonzero(was != would)
    if not different.size:
        return None
    first = int(different[0])
    return first + 1, float(was[first]), float(would[first])


def check_same_run(stored: dict[str, Any], sections: TrainSections, made: int, where: Path) -> None:
    """Raises ValueError, naming the keys, if the run with this fingerprint and `made` steps may not resume with this recipe."""
    changed = _changes(stored, sections)
    old, new = stored.get(_STEPS), sections.run.steps
    if old == new and not changed:
        return
    if changed or not isinstance(old, int) or new < made:
        if old != new:
            changed.append(f"{_STEPS}: was {old}, is {new}")
        raise ValueError(
            f"the run in {where} was started with another recipe: {'; '.join(changed[:5])}; restore it, or {ELSEWHERE}"
        )
    rate = changed_rate(sections.optimizer, old, new, made)
    if rate is None or (sections.run.extend and new > old):
        return
    step, was, would = rate
    remedy = f"restore {_STEPS}, or {ELSEWHERE}"
    if new > old:
        remedy = f"set run.extend=true to resume anyway, with the rates of the new {_STEPS} from here on; or {remedy}"
    raise ValueError(
        f"the run in {where} has {made} steps with {_STEPS}: was {old}, is {new}; with {new} their learning rates would "
        f"differ under optimizer.schedule={sections.optimizer.schedule} (step {step} had {was:.9g}, not "
        f"{would:.9g}), so the losses would match neither run; {remedy}"
    )


def how_to_continue(run: RunSection, optimizer: OptimizerSection, made: int) -> str:
    """Returns the keys to raise for more steps, for a run that has run all of its steps."""
    keys = []
    if made >= run.steps:
        doubled = changed_rate(optimizer, run.steps, 2 * run.steps, made)
        keys.append("run.steps" if doubled is None else "run.steps with run.extend=true")
    if run.stop_after is not None and run.stop_after <= made:
        keys.append("run.stop_after")
    return f"raise {' and '.join(keys)}"
