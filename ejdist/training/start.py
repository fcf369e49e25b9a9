"""Where the parameters of a new run come from: files of Hugging Face, or another run (`model.init_from`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from ejdist.models.decoder import DecoderConfig
from ejdist.paths import check_home, is_url
from ejdist.sections import validate
from ejdist.training.runs import Run, has_steps, nested
from ejdist.weights.families import read_config
from ejdist.weights.files import WeightsError, digest_of, read_folder
from ejdist.weights.match import differences, told_difference
from ejdist.weights.reader import check, load, tensors_in
from ejdist.weights.tensors import declared_leaves

__all__ = ["Source", "nested", "open_source"]


@dataclass(frozen=True)
class Source:
    """Weights that fit a model; nothing of them has been read.

    leaves: names of what there is. load: leaf -> `jax.ShapeDtypeStruct` with a sharding, to leaf -> array. notes: what is left
    out, and why. digest: tells these weights from others, for hosts that each have a copy.
    """

    what: str
    leaves: frozenset[str]
    notes: list[str]
    load: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    digest: Callable[[], str]


def open_source(where: str, c: DecoderConfig) -> Source:
    """Returns the weights of a folder, for the model of a recipe. Everything but the numbers is checked.

    Raises:
      WeightsError: there are none, or they are not of this model; names the first key or tensor that differs, and what to do.
      CheckpointError: it is a run whose checkpoint cannot be read.
    """
    validate(c)
    leaves = frozenset(declared_leaves(c))
    if is_url(where):
        return _of_run(Run(where, key="model.init_from"), c, leaves)
    check_home("model.init_from", where)
    folder = Path(where).expanduser()
    if (folder / "config.json").exists():
        family, theirs = read_config(folder)
        _check_model(
            c, theirs, f"{folder / 'config.json'}", f"python -m launch.export from={where} prints all keys of its model"
        )
        stored = read_folder(folder)
        tensors = tensors_in(family, c, stored)
        notes = check(tensors, stored, c, folder)
        return Source(str(folder), leaves, notes, lambda like: load(stored, tensors, like), lambda: digest_of(stored))
    if (folder / "checkpoints").is_dir() or has_steps(folder):
        return _of_run(Run(folder), c, leaves)
    what = "has neither config.json nor checkpoints" if folder.is_dir() else "is no folder"
    raise WeightsError(
        f"model.init_from = {where!r} {what}; give a folder with config.json and safetensors, or the run.dir of another run"
    )


def _of_run(run: Run, c: DecoderConfig, leaves: frozenset[str]) -> Source:
    _check_model(c, run.model, f"the run in {run.folder}", "its parameters are of that model")
    return Source(f"step {run.step} of the run in {run.folder}", leaves, [], run.load_and_close, run.digest)


def _check_model(ours: DecoderConfig, theirs: DecoderConfig, where: str, hint: str) -> None:
    found = differences(ours, theirs)
    if found:
        more = f" ({len(found) - 1} more keys differ)" if len(found) > 1 else ""
        raise WeightsError(f"{told_difference(ours, theirs, where, found[0])}{more}; {hint}")
