"""What a run's folder records of how it trains, for commands that go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejdist.paths import is_step, is_url
from ejdist.training.kept import KEPT

FILE = "recipe.json"
# What an evaluation takes from its run: where and how the model runs, and its tokens.
_SECTIONS = ("data", "mesh", "sequence", "experts")
_STAGE = {"sequence_length": "data", "global_batch": "data"}


def recorded(folder: str | Path) -> dict[str, Any]:
    """Returns key -> value of the recipe of a run's latest start; empty if the folder has none, or is a URL."""
    if is_url(str(folder)):
        return {}
    try:
        found = json.loads((Path(folder).expanduser() / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return _with_kept(found, Path(folder).expanduser() / KEPT) if isinstance(found, dict) else {}


def is_made(tokenizer: str) -> bool:
    """Returns whether data.tokenizer is no file or folder of the user's."""
    return tokenizer in ("bytes", "dataset") or tokenizer.startswith("bpe:")


def _with_kept(recipe: dict[str, Any], kept: Path) -> dict[str, Any]:
    """Returns a recipe with what the run keeps of its tokenizer, where that has gone."""
    name = recipe.get("data.tokenizer")
    gone = isinstance(name, str) and not is_made(name) and not Path(name).expanduser().exists()
    return recipe | {"data.tokenizer": str(kept)} if gone and (kept / "tokenizer.json").is_file() else recipe


def last_step(folder: str | Path) -> int | None:
    """Returns the step of the newest checkpoint in `run.dir/checkpoints`; None if there is none."""
    there = Path(folder).expanduser() / "checkpoints"
    steps = [int(path.name) for path in there.iterdir() if is_step(path.name)] if there.is_dir() else []
    return max(steps, default=None)


def settings_at(recipe: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Returns key -> value of the sections data, mesh, sequence and experts, as they were at a step of the run: those of the
    stage of its curriculum that ran it."""
    found = {key: value for key, value in recipe.items() if key.partition(".")[0] in _SECTIONS}
    stage = _stage_at(recipe, step)
    for name, section in _STAGE.items():
        if (value := recipe.get(f"{stage}.{name}")) is not None:
            found[f"{section}.{name}"] = value
    mesh = {key.removeprefix(f"{stage}."): value for key, value in recipe.items() if key.startswith(f"{stage}.mesh.")}
    return found | mesh


def _stage_at(recipe: Mapping[str, Any], step: int | None) -> str:
    """Returns the prefix of the keys of the stage that ran a step; None is the last step."""
    number = 0
    while f"curriculum[{number}].until" in recipe:
        until = recipe[f"curriculum[{number}].until"]
        if until is None or (step is not None and step <= until):
            break
        number += 1
    return f"curriculum[{number}]"
