"""Whether a recipe may go on with the run that is in run.dir: whatever decides the losses must be what it was.

`run.steps` alone may change. The learning rate of a step depends on it through the schedule, so it is allowed where the rates
of all the steps made are the same under the new total: then this is the run that would have had that total from the start.
It is so with a constant rate, and with wsd before its decay. Elsewhere `run.extend` says that it is meant.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.optimizer import OptimizerSection, make_schedule
from ejdist.training.places import ELSEWHERE
from ejdist.training.program import RunSection, TrainSections
from ejdist.weights.match import flat

_STEPS = "run.steps"
# Where parameters came from is kept, and decides nothing once there is a checkpoint: the folder may have moved since.
_INIT_FROM = "model.init_from"


def _deciding(sections: TrainSections) -> dict[str, Any]:
    found = flat(sections.model, "model.") | flat(sections.optimizer, "optimizer.")
    found |= {"accumulation": sections.accumulation, "z_loss": sections.z_loss}
    # Of how tokens get to experts, what drops some.
    return {k: v for k, v in found.items() if k != "model.remat"} | {"experts.capacity": sections.experts.capacity}


def fingerprint(sections: TrainSections) -> dict[str, Any]:
    """Returns what must not change when a run goes on: what decides the losses, and not where or how fast."""
    return json.loads(json.dumps({_STEPS: sections.run.steps} | _deciding(sections)))


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
    now = fingerprint(sections)
    # A key that did not exist then had the meaning that its default has.
    plain = replace(
        sections, model=type(sections.model)(), optimizer=type(sections.optimizer)(), experts=type(sections.experts)()
    )
    stored = {k: v for k, v in fingerprint(plain).items() if k not in (_STEPS, "accumulation", "z_loss")} | stored
    changed = [k for k in sorted({*stored, *now}) if stored.get(k) != now.get(k) and k != _INIT_FROM]
    old, new = stored.get(_STEPS), sections.run.steps
    if not changed:
        return
    if changed != [_STEPS] or not isinstance(old, int) or new < made:
        told = "; ".join(f"{k}: was {stored.get(k)}, is {now.get(k)}" for k in changed[:5])
        raise ValueError(f"the run in {where} was started with another recipe: {told}; restore it, or {ELSEWHERE}")
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


def how_to_go_on(run: RunSection, optimizer: OptimizerSection, made: int) -> str:
    """Returns what to change for more steps, of a run that has made as many as it was to."""
    keys = []
    if made >= run.steps:
        doubled = changed_rate(optimizer, run.steps, 2 * run.steps, made)
        keys.append("run.steps" if doubled is None else "run.steps with run.extend=true")
    if run.stop_after is not None and run.stop_after <= made:
        keys.append("run.stop_after")
    return f"raise {' and '.join(keys)}"
