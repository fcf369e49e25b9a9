"""A curriculum: stages of a run, each with its own data, learning rate, sequence length, batch, mesh and positions, one after
the other.

A stage is the recipe with the keys that the stage sets, compiled as its own program. It ends with a checkpoint, which the next
stage restores on its own mesh. Parameters and optimizer state continue unchanged; so does the schedule, unless the stage has
its own. The batch of a step is a pure function of the seed, the step and the stages up to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ejdist.mesh import MeshSection
from ejdist.sections import compared
from ejdist.training.optimizer import Rate


@dataclass
class StageSection:
    """A stage of a recipe's `curriculum`. Keys that it leaves out come from the recipe. `check_history` compares stages when a
    run resumes."""

    until: int | None = compared(None)  # its last step; None in the last stage, which ends with the run
    sequence_length: int | None = compared(None)
    global_batch: int | None = compared(None)
    accumulation: int | None = compared(None)
    # Its data, where they are not the recipe's; keys that it leaves out, such as data.tokenizer, are the recipe's.
    source: Any = compared(None)
    mixture: Any = compared(None)
    weights_by: str | None = compared(None)
    format: str | None = compared(None)
    loss_on: str | None = compared(None)
    packing: str | None = compared(None)
    too_long: str | None = compared(None)
    text_key: str | None = compared(None)
    # Its own learning rate: with any of these, a schedule over the steps of the stage.
    learning_rate: float | None = compared(None)
    schedule: str | None = compared(None)
    warmup_steps: int | None = compared(None)
    decay_fraction: float | None = compared(None)
    final_ratio: float | None = compared(None)
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


ROPE = tuple(f.name for f in fields(StageSection) if f.name.startswith("rope_"))
_MODEL = (*ROPE, "remat")
_SIZES = ("sequence_length", "global_batch")
_CORPUS = ("source", "mixture", "weights_by", "format", "loss_on", "packing", "too_long", "text_key")
_DATA = (*_SIZES, *_CORPUS)
_RATE = ("learning_rate", "schedule", "warmup_steps", "decay_fraction", "final_ratio")
# The section of the recipe that has a key of a stage.
SECTION_OF = dict.fromkeys(_DATA, "data") | dict.fromkeys(_MODEL, "model") | dict.fromkeys(_RATE, "optimizer")


def unused(stages: Sequence[Collection[str]]) -> list[str]:
    """Returns the keys and sections of a recipe that every stage overrides, so that the recipe's own are unused.

    Args:
      stages: the keys of `StageSection` that each stage sets.
    """
    common = set.intersection(*map(set, stages)) if stages else set()
    if stages and all({"source", "mixture"} & set(names) for names in stages):
        common |= {"source", "mixture"}
    keys = {name: f"{section}.{name}" for name, section in SECTION_OF.items()}
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
      own: the keys that it sets.
    """

    number: int
    count: int
    start: int
    until: int
    sections: Any
    own: frozenset[str] = frozenset()

    @property
    def where(self) -> str:
        """The prefix of a message about it; empty if the run has one stage."""
        return "" if self.count == 1 else f"curriculum[{self.number - 1}]: "

    @property
    def has_data(self) -> bool:
        """Whether it has data of its own, and not the recipe's."""
        return bool(self.own & set(_CORPUS))

    @property
    def has_rate(self) -> bool:
        """Whether it has a schedule of its own, and not the run's."""
        return bool(self.own & set(_RATE))

    @property
    def rate(self) -> Rate:
        """The learning rate of its steps."""
        if self.has_rate:
            return Rate(self.sections.optimizer, self.until - self.start, self.start)
        return Rate(self.sections.optimizer, self.sections.run.steps)

    def describe(self) -> str:
        """Returns a line for the log."""
        mesh = {axis: size for axis, size in self.sections.mesh.sizes.items() if size != 1}
        data, model = self.sections.data, self.sections.model
        scaling = getattr(model, "rope_scaling", None)
        rope = [f"rope_base {model.rope_base:g}"] if hasattr(model, "rope_base") else []
        rope += [f"{scaling} by {model.rope_factor:g}"] if scaling else []
        sizes = f"{data.global_batch} x {data.sequence_length:,} tokens"
        source = [f"of {source_of(data)}"] if self.has_data else []
        rate = self.rate.section
        schedule = [f"{rate.schedule} up to a rate of {rate.learning_rate:g}"] if self.has_rate else []
        what = ", ".join([" ".join([sizes, *source]), f"mesh {mesh or 'of one'}", *rope, *schedule])
        return f"stage {self.number} of {self.count}, steps {self.start + 1} to {self.until}: {what}"


def stages_of(sections: Any) -> list[Stage]:
    """Returns the stages of a recipe (`TrainSections`); a recipe without a curriculum is one stage.

    Raises:
      ValueError: a stage's keys or steps are wrong; names the key and the remedy.
    """
    entries: Sequence[StageSection] = sections.curriculum
    if not entries:
        return [Stage(1, 1, 0, sections.run.steps, sections)]
    stages, start = [], 0
    for i, stage in enumerate(entries):
        where, last = f"curriculum[{i}]", i == len(entries) - 1
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
        stages.append(
            Stage(i + 1, len(entries), start, until, _applied(sections, stage, where), frozenset(named(stage)))
        )
        start = until
    return stages


def source_of(data: Any) -> str:
    """Returns what a data section reads, for a message."""
    if data.mixture is None:
        return str(data.source)
    parts = [part if isinstance(part, dict) else {} for part in data.mixture] if isinstance(data.mixture, list) else []
    return f"a mixture of {', '.join(str(part.get('source')) for part in parts)}"


def _applied(sections: Any, stage: StageSection, where: str) -> Any:
    """Returns the recipe of a stage. Raises ValueError, naming the stage's key."""
    if stage.source is not None and stage.mixture is not None:
        raise ValueError(f"{where} has both source and mixture; name the sources in mixture alone")
    for name in (*_SIZES, "accumulation"):
        value = getattr(stage, name)
        if value is not None and value < (2 if name == "sequence_length" else 1):
            raise ValueError(f"{where}.{name} = {value} is too small")
    model = {name: getattr(stage, name) for name in _MODEL if getattr(stage, name) is not None}
    strange = [name for name in model if not hasattr(sections.model, name)]
    if strange:
        raise ValueError(f"{where}.{strange[0]} is a key of the decoder, which this recipe's model does not have")
    data = {name: getattr(stage, name) for name in _DATA if getattr(stage, name) is not None}
    # One replaces the other.
    data |= {"mixture": None} if stage.source is not None else {}
    data |= {"source": None} if stage.mixture is not None else {}
    rate = {name: getattr(stage, name) for name in _RATE if getattr(stage, name) is not None}
    return replace(
        sections,
        optimizer=replace(sections.optimizer, **rate),
        model=replace(sections.model, **model),
        data=replace(sections.data, **data),
        mesh=stage.mesh or sections.mesh,
        accumulation=stage.accumulation or sections.accumulation,
        curriculum=[],
    )


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """Returns the stage of a step, counted from 1; the last stage for steps past the end."""
    return next((stage for stage in stages if step <= stage.until), stages[-1])


def history(
    stages: Sequence[Stage], made: int, since: int = 0, corpora: Sequence[str] = ()
) -> list[tuple[int, dict[str, Any]]]:
    """Returns the settings of the steps `since` + 1 to `made`: [(last step, the keys that affect losses and may differ between
    stages)].

    Neighbours with equal settings are merged, so two plans can resume from the same checkpoint if their histories are equal,
    whatever they plan next.

    Args:
      corpora: the fingerprint of each stage's data, where they differ.
    """
    entries: list[tuple[int, dict[str, Any]]] = []
    for i, stage in enumerate(stages):
        if stage.start >= made or stage.until <= since:
            continue
        s, rate = stage.sections, stage.rate
        values = {f"data.{name}": getattr(s.data, name) for name in _SIZES} | {"accumulation": s.accumulation}
        values |= {f"model.{name}": getattr(s.model, name) for name in ROPE if hasattr(s.model, name)}
        values |= {f"optimizer.{name}": getattr(s.optimizer, name) for name in _RATE}
        values |= {SPAN: [rate.start, rate.steps]} | ({CORPUS: corpora[i]} if corpora else {})
        if entries and entries[-1][1] == values:
            entries.pop()
        entries.append((min(stage.until, made), values))
    return entries


# What a history has beside keys of the recipe: the steps that its schedule spans [steps before it, steps], and what was read.
SPAN, CORPUS = "schedule spans", "corpus"


def rate_in(values: dict[str, Any], like: Any, otherwise: Sequence[int]) -> Rate:
    """Returns the learning rate that an entry of a history has.

    Args:
      like: the section `optimizer` of a recipe, for what an entry from an older version lacks.
      otherwise: what the schedule then spans.
    """
    overrides = {name: values[f"optimizer.{name}"] for name in _RATE if f"optimizer.{name}" in values}
    start, steps = values.get(SPAN, otherwise)
    return Rate(replace(like, **overrides), steps, start)
