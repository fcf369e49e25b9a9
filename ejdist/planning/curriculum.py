"""Plans of a length curriculum: one for each stage."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ejdist.mesh import AXES
from ejdist.planning.candidates import ACCUMULATION, BATCH, DISPATCH, ORDER, REMAT, SCHEME
from ejdist.training.curriculum import Stage, StageSection, named, stages_of, unused

_MESH = tuple(f"mesh.{axis}" for axis in AXES)
# Keys that a stage does not have, and the rows of its batches, which say how many tokens the run sees.
_OF_THE_RUN = (BATCH, SCHEME, ORDER, DISPATCH)


def stages(sections: Any, given: set[str], listed: bool) -> list[tuple[Stage, set[str]]]:
    """Returns each stage of a recipe with the keys of the search that stay as it has them.

    Args:
      given: keys of the command line.
      listed: the stages are of the command line too, so the keys that they name stay; those of a recipe's file are open.

    Raises:
      ValueError: a stage is wrong; names the key.
    """
    stage_keys = []
    for stage, section in zip(stages_of(sections), sections.curriculum, strict=True):
        keys = given | set(_OF_THE_RUN)
        if section.mesh is not None:  # it is the whole of the stage's mesh
            keys = keys | set(_MESH) if listed else keys - set(_MESH)
        for key, value in ((REMAT, section.remat), (ACCUMULATION, section.accumulation)):
            if value is not None:
                keys = keys | {key} if listed else keys - {key}
        stage_keys.append((stage, keys))
    return stage_keys


def overrides_text(sections: Any, plans: Sequence[Mapping[str, Any] | None]) -> tuple[str, list[str]]:
    """Returns (`curriculum=...` as a command line has it: every stage of the recipe, with its plan; the keys and
    sections that all of these have of their own, which the command line has no more).

    Args:
      plans: of each stage its mesh (axis -> devices), and what was `chosen` (key -> value); None where nothing was searched.
    """
    words = [_words(sections, *pair) for pair in zip(sections.curriculum, plans, strict=True)]
    return f"curriculum={shlex.quote(f'[{", ".join(map(_braces, words))}]')}", unused(words)


def _words(sections: Any, section: StageSection, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    words: dict[str, Any] = {name: getattr(section, name) for name in named(section)}
    if plan is not None:
        words |= {
            key.rpartition(".")[2]: value for key, value in plan["chosen"].items() if key in (REMAT, ACCUMULATION)
        }
    mesh = section.mesh or (None if plan is None else sections.mesh)
    if mesh is not None:  # it is the whole of the stage's mesh
        sizes = {a: n for a, n in (mesh.sizes if plan is None else plan["mesh"]).items() if n != 1}
        across = {"fsdp_across_slices": True} if mesh.fsdp_across_slices else {}
        words["mesh"] = sizes | across or {AXES[0]: 1}
    return words


def _braces(words: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_written(value)}" for key, value in words.items()) + "}"


def _written(value: Any) -> str:
    """Returns a value as an override has it: text that is more than a word in quotes."""
    if isinstance(value, Mapping):
        return _braces(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"(?!(?i:true|false|null|nan|inf)$)[A-Za-z_]\w*", value):
        escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
