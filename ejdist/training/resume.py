"""Checks that a recipe may resume the run in run.dir: every key that affects the losses must be unchanged, or be named in
`run.allow_change`, and then holds from here on.

A key affects the losses unless its section declares otherwise, see `ejdist.sections`.

`run.steps` may change. The schedule depends on it, so a change is allowed if the rates of all steps run so far stay the same
under the new total: the run is then the one that would have had that total from the start. This holds for a constant rate, and
for wsd before its decay. Otherwise `run.extend` confirms the change.

What changed, and after which step, is kept in every later checkpoint. Steps up to the last change are facts; the recipe must
match those after it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.paths import ELSEWHERE
from ejdist.sections import keys_of
from ejdist.training.changeable import is_changeable
from ejdist.training.curriculum import CORPUS, SPAN, Stage, history, rate_in, stage_of
from ejdist.training.data import CURSOR, Data, described, described_key
from ejdist.training.optimizer import OptimizerSection, Rate
from ejdist.training.program import RunSection, TrainSections

_STEPS = "run.steps"
Changes = dict[str, list[Any]]  # key -> [was, is]


@dataclass(frozen=True)
class Past:
    """The history of a run, as its checkpoint records it.

    Attributes:
      since: the step of the last change; 0 if there was none.
      settings: of the steps up to that one, as `curriculum.history` returns them.
      changes: [{"after": step, "keys": `Changes`}], in order.
    """

    since: int = 0
    settings: tuple[Any, ...] = ()
    changes: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def of(kept: dict[str, Any]) -> Past:
        """Returns the history that a checkpoint's metadata records."""
        changes = kept.get("changes") or []
        since = changes[-1]["after"] if changes else 0
        return Past(since, tuple(part for part in kept.get("stages") or [] if part[0] <= since), tuple(changes))

    def with_change(self, kept: dict[str, Any], step: int, keys: Changes) -> Past:
        """Returns the history with a change after a step, whose checkpoint has this metadata."""
        settings = kept.get("stages") or [[step, _of_one_stage(kept)]]
        return Past(step, tuple(settings), (*self.changes, {"after": step, "keys": _as_stored(keys)}))


def _as_stored(value: Any) -> Any:
    """Returns a value as it comes back from a checkpoint, through JSON."""
    return json.loads(json.dumps(value))


def fingerprint(sections: TrainSections) -> dict[str, Any]:
    """Returns the recipe keys that a checkpoint stores: those that affect the losses, and those marked as recorded."""
    return {key.name: _as_stored(key.value) for key in keys_of(sections) if key.recorded}


def _changes(stored: dict[str, Any], sections: TrainSections) -> dict[str, tuple[str, list[Any]]]:
    """Returns name -> (a phrase, [was, is]) for each key that affects the losses and differs from the fingerprint."""
    changes = {}
    keys = {key.name: key for key in keys_of(sections)}
    for name, key in sorted(keys.items()):
        if not key.decides:
            continue
        # A key that did not exist then behaved as its default does now.
        was, now = stored.get(name, _as_stored(key.default)), _as_stored(key.value)
        if _as_stored(key.canonical(was)) != _as_stored(key.canonical(key.value)):
            since = "" if name in stored else " (the default: that run has no such key)"
            changes[name] = f"{name}: was {was}{since}, is {now}", [was, now]
    gone = sorted(set(stored) - set(keys))
    return changes | {n: (f"{n}: was {stored[n]}, and there is no such key now", [stored[n], None]) for n in gone}


def changed_rate(section: OptimizerSection, old: int, new: int, made: int) -> tuple[int, float, float] | None:
    """Returns (step, its learning rate, the rate under the new total) for the first of the `made` steps whose rate differs
    between a run of `old` and one of `new` steps; None if there is none. Steps count from 1."""
    return _first_other([(0, made, Rate(section, old), Rate(section, new))])


def _first_other(pieces: Sequence[tuple[int, int, Rate, Rate]]) -> tuple[int, float, float] | None:
    """Returns (step, its rate, the other rate) for the first step at which two rates differ, of (steps before, last, rate,
    other)."""
    for start, until, one, other in pieces:
        steps = np.arange(start, until)
        was, would = one.of(steps), other.of(steps)
        if (different := np.flatnonzero(was != would)).size:
            first = int(different[0])
            return start + first + 1, float(was[first]), float(would[first])
    return None


def _pieces(
    metadata: dict[str, Any], stages: Sequence[Stage], since: int, steps_run: int
) -> list[tuple[int, int, dict[str, Any], Stage]]:
    """Returns (steps before, last, what the checkpoint has of these steps, their stage now) of the steps after `since`."""
    before = [
        (int(until), values) for until, values in metadata.get("stages") or [(steps_run, _of_one_stage(metadata))]
    ]
    ends = sorted(
        {min(end, steps_run) for end in (*(u for u, _ in before), *(s.until for s in stages), steps_run) if end > since}
    )
    pieces, start = [], since
    for until in ends:
        values = next((values for end, values in before if until <= end), before[-1][1])
        pieces.append((start, until, values, stage_of(stages, until)))
        start = until
    return pieces


def _of_one_stage(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of all steps of a run that had no stages."""
    sizes = {f"data.{name}": metadata["data"][name] for name in ("sequence_length", "global_batch")}
    return metadata["recipe"] | sizes | {CORPUS: metadata["data"].get("corpus")}


def check_same_run(
    stored: dict[str, Any],
    sections: TrainSections,
    made: int,
    where: Path,
    *,
    allowed: Collection[str] = (),
    kept: dict[str, Any] | None = None,
    stages: Sequence[Stage] = (),
) -> Changes:
    """Returns the changes, all of keys that may change.

    Args:
      stored: the fingerprint of the run. made: its number of steps so far.
      allowed: keys that may differ from here on.
      kept, stages: the metadata of its checkpoint, and all stages now; default: it has had one.

    Raises:
      ValueError: the run may not resume with this recipe; names the keys.
    """
    differing = _changes(stored, sections)
    old, new = stored.get(_STEPS), sections.run.steps
    refused = [name for name in differing if name not in allowed]
    if refused or not isinstance(old, int) or (old != new and new < made):
        phrases = [differing[name][0] for name in refused]
        phrases += [f"{_STEPS}: was {old}, is {new}"] if old != new else []
        raise ValueError(
            f"the run in {where} was started with another recipe: {'; '.join(phrases[:5])}; restore it, "
            f"{way_out(refused, made)}or {ELSEWHERE}"
        )
    changes: Changes = {name: was_is for name, (_, was_is) in differing.items()}
    of_run, of_stage = _other_rates(stored, sections, made, kept, stages)
    if of_run is None and of_stage is None:
        return changes
    if sections.run.extend and new > old:
        return changes | {_STEPS: [old, new]}
    if of_stage is not None:
        step, was, would = of_stage
        raise ValueError(
            f"the run in {where} ran step {step} with a learning rate of {was:.9g}, and with this curriculum it would have "
            f"been {would:.9g}, because its stage ends elsewhere; restore until or {_STEPS}, or {ELSEWHERE}"
        )
    assert of_run is not None
    step, was, would = of_run
    remedy = f"restore {_STEPS}, or {ELSEWHERE}"
    if new > old:
        remedy = f"set run.extend=true to resume anyway, with the rates of the new {_STEPS} from here on; or {remedy}"
    raise ValueError(
        f"the run in {where} has {made} steps with {_STEPS}: was {old}, is {new}; with {new} their learning rates would "
        f"differ under optimizer.schedule={sections.optimizer.schedule} (step {step} had {was:.9g}, not "
        f"{would:.9g}), so the losses would match neither run; {remedy}"
    )


def _other_rates(
    stored: dict[str, Any],
    sections: TrainSections,
    steps_run: int,
    metadata: dict[str, Any] | None,
    stages: Sequence[Stage],
) -> list[tuple[int, float, float] | None]:
    """Returns what `changed_rate` does, for steps after the last change whose schedule has the same keys as then: of steps
    under the schedule of the run, and under one of a stage."""
    if metadata is None:
        metadata, stages = (
            {"recipe": stored, "data": {"sequence_length": 0, "global_batch": 0}},
            [Stage(1, 1, 0, sections.run.steps, sections)],
        )
    differing: tuple[list, list] = [], []
    for start, until, values, stage in _pieces(metadata, stages, Past.of(metadata).since, steps_run):
        was, would = rate_in(values, stage.sections.optimizer, [0, stored[_STEPS]]), stage.rate
        if was.section == would.section and was != would:
            of_stage = (was.start, was.steps) != (0, stored[_STEPS]) or (would.start, would.steps) != (
                0,
                sections.run.steps,
            )
            differing[of_stage].append((start, until, was, would))
    return [_first_other(pieces) for pieces in differing]


def way_out(keys: Collection[str], made: int) -> str:
    """Returns how to resume with other values of these keys, as part of a sentence; empty if one of them may not change."""
    if not keys or not all(is_changeable(key) for key in keys):
        return ""
    return f"set run.allow_change=[{','.join(keys)}] to resume with what it is now from step {made + 1} on, "


def check_history(
    kept: dict[str, Any],
    stages: Sequence[Stage],
    made: int,
    where: Any,
    *,
    allowed: Collection[str] = (),
    corpora: Sequence[str] = (),
) -> Changes:
    """Returns the changes, all of keys that may change, in the steps of a run since its last change.

    Args:
      kept: the metadata of its checkpoint: "recipe", "data", and "stages" if it had a curriculum.
      allowed: keys that may differ from here on.
      corpora: the fingerprint of each stage's data.

    Raises:
      ValueError: the steps do not match this plan; names the step and the key.
    """
    changes: Changes = {}
    for _, until, was, stage in _pieces(kept, stages, Past.of(kept).since, made):
        would = history([stage], until, until - 1, corpora[stage.number - 1 : stage.number])[0][1]
        differ = [key for key in would if key != SPAN and key in was and was[key] != _as_stored(would[key])]
        keys_of_one = {key: CURSOR[CORPUS][0] if key == CORPUS else (key,) for key in differ}
        refused = [key for key in differ if not set(keys_of_one[key]) & set(allowed)]
        if refused:
            key = refused[0]
            name = described_key(CORPUS) if key == CORPUS else key
            plan = "curriculum" if stage.count > 1 else "recipe"
            remedy = way_out([keys_of_one[key][0] for key in refused], made)
            raise ValueError(
                f"the run in {where} ran step {until} with {name} = {was[key]}, but this {plan} has {would[key]}; restore "
                f"{plan} and {name}, {remedy}or {ELSEWHERE}. You may change steps after {made}"
            )
        # `check_data` knows the keys of a corpus.
        changes |= {key: [was[key], _as_stored(would[key])] for key in differ if key != CORPUS}
    return changes


def check_data(
    kept: dict[str, Any], data: Data, sections: TrainSections, made: int, allowed: Collection[str]
) -> Changes:
    """Returns the changes of the data, all of keys that may change.

    Args:
      kept: the metadata of the checkpoint. data, sections: those of its step now.

    Raises:
      ValueError: the batches of the run so far would differ; names the keys.
    """
    differing = data.changes(kept["data"])
    refused = {name: was_is for name, was_is in differing.items() if not set(CURSOR[name][0]) & set(allowed)}
    if refused:
        keys = [CURSOR[name][0][0] for name in refused]
        raise ValueError(
            f"this run cannot resume with other data: {described(refused)}, {way_out(keys, made)}or start in another run.dir"
        )
    now = fingerprint(sections)
    changes: Changes = {}
    for name, (was, is_now) in differing.items():
        values = {key: [kept["recipe"].get(key), now.get(key)] for key in CURSOR[name][0]}
        other = {key: pair for key, pair in values.items() if key in kept["recipe"] and pair[0] != pair[1]}
        changes |= other or {CURSOR[name][0][0]: _as_stored([was, is_now])}
    return changes


def how_to_continue(run: RunSection, optimizer: OptimizerSection, made: int) -> str:
    """Returns the keys to raise for more steps, for a run that has run all of its steps."""
    keys = []
    if made >= run.steps:
        doubled = changed_rate(optimizer, run.steps, 2 * run.steps, made)
        keys.append("run.steps" if doubled is None else "run.steps with run.extend=true")
    if run.stop_after is not None and run.stop_after <= made:
        keys.append("run.stop_after")
    return f"raise {' and '.join(keys)}"
