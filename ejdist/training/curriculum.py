"""A length curriculum: stages of a run, each with its own sequence length, batch, mesh and positions, one after the other.

A stage is the recipe with the keys that the stage sets, compiled as its own program. It ends with a checkpoint, which the next
stage restores on its own mesh. Parameters, optimizer state and schedule continue unchanged. The batch of a step is a pure
function of (seed, step) and the stage of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ejdist.mesh import MeshSection
from ejdist.paths import ELSEWHERE
from ejdist.sections import compared


@dataclass
class StageSection:
    """A stage of a recipe's `curriculum`. Keys that it leaves out come from the recipe. `check_history` compares stages when a
    run resumes."""

    until: int | None = compared(None)  # its last step; None in the last stage, which ends with the run
    sequence_length: int | None = compared(None)
    global_batch: int | None = compared(None)
    accumulation: int | None = compared(None)
    mesh: MeshSection | None = compared(None)  # the complete mesh: axes that are not listed have size 1
    remat: str | None = compared(None)
    rope_base: float | None = compared(None)
    rope_scaling: str | None = compared(None)
    rope_factor: float | None = compared(None)
    rope_original_length: int | None = compared(None)
    rope_low: float | None = compared(None)
    rope_high: float | None = compared(None)
    rope_attention_factor: float | None = compared(None)
    rope_truncate: bool | None = compared(None)


_ROPE = tuple(f.name for f in fields(StageSection) if f.name.startswith("rope_"))
_MODEL = (*_ROPE, "remat")
_DATA = ("sequence_length", "global_batch")


def unused(stages: Sequence[Collection[str]]) -> list[str]:
    """Returns the keys and sections of a recipe that every stage overrides, so that the recipe's own are unused.

    Args:
      stages: the keys of `StageSection` that each stage sets.
    """
    common = set.intersection(*map(set, stages)) if stages else set()
    keys = {name: f"data.{name}" for name in _DATA} | {name: f"model.{name}" for name in _MODEL}
    return sorted(keys.get(name, name) for name in common - {"until"})


def named(stage: StageSection) -> list[str]:
    """Returns the keys that a stage sets."""
    return [f.name for f in fields(stage) if getattr(stage, f.name) is not None]


def is_of(key: str, unused: Collection[str]) -> bool:
    """Returns whether a command-line key, or the group of a variant, is one of `unused` or inside one."""
    return any(key == one or key.startswith(f"{one}.") for one in unused)


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Attributes:
      number, count: its number, from 1, and the number of stages.
      start, until: it runs the steps start + 1, ..., until.
      sections: its recipe, without a curriculum.
    """

    number: int
    count: int
    start: int
    until: int
    sections: Any

    def describe(self) -> str:
        """Returns a line for the log."""
        mesh = {axis: size for axis, size in self.sections.mesh.sizes.items() if size != 1}
        data, model = self.sections.data, self.sections.model
        scaling = getattr(model, "rope_scaling", None)
        rope = [f"rope_base {model.rope_base:g}"] if hasattr(model, "rope_base") else []
        rope += [f"{scaling} by {model.rope_factor:g}"] if scaling else []
        sizes = f"{data.global_batch} x {data.sequence_length:,} tokens"
        what = ", ".join([sizes, f"mesh {mesh or 'of one'}", *rope])
        return f"stage {self.number} of {self.count}, steps {self.start + 1} to {self.until}: {what}"


def stages_of(sections: Any) -> list[Stage]:
    """Returns the stages of a recipe (`TrainSections`); a recipe without a curriculum is one stage.

    Raises:
      ValueError: a stage's keys or steps are wrong; names the key and the remedy.
    """
    given: Sequence[StageSection] = sections.curriculum
    if not given:
        return [Stage(1, 1, 0, sections.run.steps, sections)]
    found, start = [], 0
    for i, stage in enumerate(given):
        where, last = f"curriculum[{i}]", i == len(given) - 1
        until = sections.run.steps if last else stage.until
        if last and stage.until is not None:
            raise ValueError(
                f"{where}.until = {stage.until}: the last stage ends with the run, at run.steps = {sections.run.steps}; leave "
                "it out"
            )
        if until is None:
            raise ValueError(f"{where}.until is missing: every stage but the last needs its last step")
        if not start < until or (not last and until >= sections.run.steps):
            before = f"past step {start}, where the stage before ends," if i else "at least 1"
            raise ValueError(
                f"{where} ends at step {until}; that must be {before} and before run.steps = {sections.run.steps}"
                if not last
                else f"{where} would start after step {start}, and run.steps = {until}: give more steps, or leave the stage out"
            )
        found.append(Stage(i + 1, len(given), start, until, _applied(sections, stage, where)))
        start = until
    return found


def _applied(sections: Any, stage: StageSection, where: str) -> Any:
    """Returns the recipe of a stage. Raises ValueError, naming the stage's key."""
    for name in (*_DATA, "accumulation"):
        value = getattr(stage, name)
        if value is not None and value < (2 if name == "sequence_length" else 1):
            raise ValueError(f"{where}.{name} = {value} is too small")
    model = {name: getattr(stage, name) for name in _MODEL if getattr(stage, name) is not None}
    strange = [name for name in model if not hasattr(sections.model, name)]
    if strange:
        raise ValueError(f"{where}.{strange[0]} is a key of the decoder, which this recipe's model does not have")
    data = {name: getattr(stage, name) for name in _DATA if getattr(stage, name) is not None}
    return replace(
        sections,
        model=replace(sections.model, **model),
        data=replace(sections.data, **data),
        mesh=stage.mesh or sections.mesh,
        accumulation=stage.accumulation or sections.accumulation,
        curriculum=[],
    )


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """Returns the stage of a step, counted from 1; the last stage for steps past the end."""
    return next((stage for stage in stages if step <= stage.until), stages[-1])


def history(stages: Sequence[Stage], made: int) -> list[tuple[int, dict[str, Any]]]:
    """Returns the settings of the first `made` steps: [(last step, the keys that affect losses and may differ between stages)].

    Neighbours with equal settings are merged, so two plans can resume from the same checkpoint if their histories are equal,
    whatever they plan next.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for stage in stages:
        if stage.start >= made:
            break
        s = stage.sections
        values = {f"data.{name}": getattr(s.data, name) for name in _DATA} | {"accumulation": s.accumulation}
        values |= {f"model.{name}": getattr(s.model, name) for name in _ROPE if hasattr(s.model, name)}
        if found and found[-1][1] == values:
            found.pop()
        found.append((min(stage.until, made), values))
    return found


def check_history(kept: dict[str, Any], stages: Sequence[Stage], made: int, where: Any) -> None:
    """Raises ValueError, naming the step and the key, unless the steps of a run so far match this plan.

    Args:
      kept: the metadata of its checkpoint: "recipe", "data", and "stages" if it had a curriculum.
    """
    now = history(stages, made)
    one = kept["recipe"] | {f"data.{name}": kept["data"][name] for name in _DATA}
    before = [(int(until), values) for until, values in kept.get("stages") or [(made, one)]]
    for step in sorted({until for until, _ in (*before, *now)}):
        was, would = (next(values for until, values in plan if step <= until) for plan in (before, now))
        changed = [key for key in would if key in was and was[key] != would[key]]
        if changed:
            key = changed[0]
            raise ValueError(
                f"the run in {where} ran step {step} with {key} = {was[key]}, but this curriculum has "
                f"{would[key]}; restore curriculum and {key}, or {ELSEWHERE}. You may change steps after {made}"
            )
