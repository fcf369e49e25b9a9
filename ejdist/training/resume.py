"""Whether a recipe may go on with the run that is in run.dir: whatever decides the losses must be what it was.

Every key decides but those whose section says that they do not, see `ejdist.sections`.

`run.steps` alone may change. The learning rate of a step depends on it through the schedule, so it is allowed where the rates
of all the steps made are the same under the new total: then this is the run that would have had that total from the start.
It is so with a constant rate, and with wsd before its decay. Elsewhere `run.extend` says that it is meant.
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
    """Returns a value as a checkpoint gives it back."""
    return json.loads(json.dumps(value))


def fingerprint(sections: TrainSections) -> dict[str, Any]:
    """Returns what a checkpoint keeps of its recipe: the keys that decide the losses, and those that are recorded."""
    return {key.name: _as_stored(key.value) for key in keys_of(sections) if key.recorded}


def _changes(stored: dict[str, Any], sections: TrainSections) -> list[str]:
    """Returns a phrase for each key that decides, and is not what it was in the run with this fingerprint."""
    found = []
    keys = {key.name: key for key in keys_of(sections)}
    for name, key in sorted(keys.items()):
        if not key.decides:
            continue
        # A key that did not exist then had the meaning that its default has.
        was = stored.get(name, _as_stored(key.default))
        if _as_stored(key.canonical(was)) != _as_stored(key.canonical(key.value)):
            since = "" if name in stored else " (the default: that run has no such key)"
            found.append(f"{name}: was {was}{since}, is {_as_stored(key.value)}")
    gone = sorted(set(stored) - set(keys))
    return found + [f"{name}: was {stored[name]}, and there is no such key now" for name in gone]


def changed_rate(section: OptimizerSection, old: int, new: int, made: int) -> tuple[int, float, float] | None:
    """Returns (step, its learning rate, the rate that it would have had) for the first of the steps made whose rate depends
    on whether the run has `old` or `new` steps; None if none does. Steps are counted from 1."""
    steps = np.arange(made)
    was, would = (np.broadcast_to(np.asarray(make_schedule(section, n)(steps)), made) for n in (old, new))
    different = np.flatnonzero(was != would)
    if not different.size:
        return None
    first = int(different[0])
    return first + 1, float(was[first]), float(would[first])


def check_same_run(stored: dict[str, Any], sections: TrainSections, made: int, where: Path) -> None:
    """Raises ValueError, naming the keys, if the run with this fingerprint, which made so many steps, may not go on."""
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
        remedy = f"run.extend=true goes on all the same, with the rates of the new {_STEPS} from here; or {remedy}"
    raise ValueError(
        f"the run in {where} has made {made} steps with {_STEPS}: was {old}, is {new}; with {new} they would have had other "
        f"learning rates under optimizer.schedule={sections.optimizer.schedule} (step {step} had {was:.9g}, and not "
        f"{would:.9g}), so that the losses would be of neither run; {remedy}"
    )


def how_to_continue(run: RunSection, optimizer: OptimizerSection, made: int) -> str:
    """Returns what to change for more steps, of a run that has made as many as it was to."""
    keys = []
    if made >= run.steps:
        doubled = changed_rate(optimizer, run.steps, 2 * run.steps, made)
        keys.append("run.steps" if doubled is None else "run.steps with run.extend=true")
    if run.stop_after is not None and run.stop_after <= made:
        keys.append("run.stop_after")
    return f"raise {' and '.join(keys)}"
