"""model=hf: the keys that follow from the published folder in model.init_from.

A variant writes `${hf:KEY}` for such a key, or `${hf:KEY,OTHER}` where it has a value of its own without model=hf. They are
filled in once all of a recipe is composed, so that whatever comes later wins, as over any variant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ejdist.buckets import source_path
from ejdist.paths import is_url
from ejdist.sections import validate
from ejdist.training.kept import KEPT
from ejdist.weights.match import told_difference
from ejdist.weights.published import CONFIG, Published, not_of_positions, read_published
from recipes.arguments import NoFolder, RecipeError

_FOLLOWS = re.compile(r"\$\{hf:([\w.]+)(?:,(\w+))?\}")


def follows(value: Any) -> bool:
    """Returns whether a variant leaves a key to the folder."""
    return isinstance(value, str) and _FOLLOWS.fullmatch(value) is not None


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a nested dict, with dots, and their values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fill(composed: Any, values: Mapping[str, Any]) -> Published | None:
    """Fills in what follows from the folder; returns what it says, None without model=hf. `values`: of the composed config.

    Raises:
      RecipeError: model.init_from names no published folder. WeightsError: its config.json is not of a model here.
    """
    from omegaconf import OmegaConf

    settings = dict(leaves(values))
    open_keys = {key: _FOLLOWS.fullmatch(value) for key, value in settings.items() if follows(value)}
    folder = None
    if any(key.startswith("model.") for key in open_keys):
        folder = _folder(composed.model.init_from, composed.run.dir)
    published = None if folder is None else read_published(folder)
    told: dict[str, Any] = {}
    if published is not None:
        scaling_follows = follows(settings["model.rope_scaling"])
        told = published.values(published.model.rope_scaling if scaling_follows else composed.model.rope_scaling)
        told |= {"tokenizer": str(folder), "chat_template": None}  # that of the tokenizer's folder
    for key, match in open_keys.items():
        assert match is not None
        if published is None:
            value = match[2]
        elif match[1] == "compute_dtype":
            value = published.computed_in()
        else:
            value = told[match[1]]
        OmegaConf.update(composed, key, list(value) if isinstance(value, tuple) else value)
    return published


def check(published: Published, model: Any) -> None:
    """Raises RecipeError, naming the key, where the command line or a recipe makes another model of a folder's."""
    validate(model)
    if differing := not_of_positions(model, published.model):
        more = f" ({len(differing) - 1} more keys differ)" if len(differing) > 1 else ""
        raise RecipeError(
            f"{told_difference(model, published.model, str(published.path), differing[0])}{more}, or leave it out, as "
            "model=hf takes the model from there"
        )


def _folder(where: Any, run_dir: str) -> Any:
    """Returns the published folder; the run's copy of it if it is gone."""
    if where is None:
        raise RecipeError("model=hf takes the model from a folder: give model.init_from=DIR, or model=hf:DIR")
    folder = source_path("model.init_from", where)
    try:
        if (folder / CONFIG).is_file():
            return folder
    except OSError as error:
        raise RecipeError(f"model.init_from = {where!r} cannot be read: {error.strerror or error}") from error
    if not is_url(run_dir) and (kept := Path(run_dir).expanduser() / KEPT / CONFIG).is_file():
        return kept.parent
    what = f"has no {CONFIG}" if folder.is_dir() else "is no folder"
    message = (
        f"model.init_from = {where!r} {what}: model=hf takes the model from the {CONFIG} of a folder with published weights; "
        "of another run give the keys of its model"
    )
    raise RecipeError(message) if folder.is_dir() else NoFolder(message, where)
