"""What a run's folder records of how it trains, for commands that go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejdist.paths import is_step, is_url
from ejdist.training.curriculum import SECTION_OF
from ejdist.training.kept import KEPT
from ejdist.training.metrics import CHANGES

FILE = "recipe.json"
# What an evaluation takes from its run: where and how the model runs, and its tokens.
_SECTIONS = ("data", "mesh", "sequence", "experts")


def recorded(folder: str | Path) -> dict[str, Any]:
    """Returns key -> value of the recipe of a run's latest start; empty if the folder has none, or is a URL."""
    if is_url(str(folder)):
        return {}
    try:
        recipe = json.loads((Path(folder).expanduser() / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return _with_kept(recipe, Path(folder).expanduser() / KEPT) if isinstance(recipe, dict) else {}


def is_made(tokenizer: str) -> bool:
    """Returns whether data.tokenizer names something other than a file or folder of the user."""
    return tokenizer in ("bytes", "dataset") or tokenizer.startswith("bpe:")


def _with_kept(recipe: dict[str, Any], kept: Path) -> dict[str, Any]:
    """Returns a recipe that names the run's copy of its tokenizer if the original is gone."""
    name = recipe.get("data.tokenizer")
    gone = isinstance(name, str) and not is_made(name) and not is_url(name) and not Path(name).expanduser().exists()
    return recipe | {"data.tokenizer": str(kept)} if gone and (kept / "tokenizer.json").is_file() else recipe


def last_step(folder: str | Path) -> int | None:
    """Returns the step of the newest checkpoint in `run.dir/checkpoints`; None if there is none."""
    checkpoints = Path(folder).expanduser() / "checkpoints"
    steps = [int(path.name) for path in checkpoints.iterdir() if is_step(path.name)] if checkpoints.is_dir() else []
    return max(steps, default=None)


def recorded_changes(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the changes of a run's recipe, as `ejdist.training.resume.Past` has them; empty if there were none."""
    try:
        changes = [] if is_url(str(folder)) else json.loads((Path(folder).expanduser() / CHANGES).read_text())
        return [one for one in changes if isinstance(one["after"], int) and isinstance(one["keys"], dict)]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def told_changes(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each change of a run: from which step on which key has another value."""
    return [
        f"from step {change['after'] + 1:,} on {key} is {is_now}; it was {was}"
        for change in changes
        for key, (was, is_now) in change["keys"].items()
    ]


def settings_at(
    recipe: Mapping[str, Any], step: int | None, changes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns key -> value of the sections data, mesh, sequence and experts, as they were at a step of the run: those of the
    stage of its curriculum that ran it, and from before what changed later."""
    settings = {key: value for key, value in recipe.items() if key.partition(".")[0] in _SECTIONS}
    stage = _stage_at(recipe, step)
    for name in (name for name, section in SECTION_OF.items() if section in _SECTIONS):
        if (value := recipe.get(f"{stage}.{name}")) is not None:
            settings[f"{SECTION_OF[name]}.{name}"] = value
            if name in ("source", "mixture"):  # one replaces the other
                settings["data.mixture" if name == "source" else "data.source"] = None
    mesh = {key.removeprefix(f"{stage}."): value for key, value in recipe.items() if key.startswith(f"{stage}.mesh.")}
    settings |= mesh
    for change in reversed(changes):
        if step is not None and step <= change["after"]:
            # Files that changed in place have one name before and after.
            settings |= {
                key: was for key, (was, now) in change["keys"].items() if key in settings and settings[key] == now
            }
    return settings


def _stage_at(recipe: Mapping[str, Any], step: int | None) -> str:
    """Returns the prefix of the keys of the stage that ran a step; None is the last step."""
    number = 0
    while f"curriculum[{number}].until" in recipe:
        until = recipe[f"curriculum[{number}].until"]
        if until is None or (step is not None and step <= until):
            break
        number += 1
    return f"curriculum[{number}]"
