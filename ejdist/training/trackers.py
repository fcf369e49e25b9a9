"""Trackers: where the numbers of a run go beside metrics.jsonl and TensorBoard, by `run.trackers`.

Only the first process opens one. A tracker that fails during the run is left out from then on: metrics.jsonl has every row.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Tables = Mapping[str, list[list[float]]]


class Tracker(Protocol):
    """Takes the numbers of steps."""

    def add(self, step: int, values: Mapping[str, float], tables: Tables | None = None) -> None:
        """Adds the scalars of a step, and tables: name -> rows of numbers, such as tokens per layer and expert."""
        ...

    def close(self) -> None: ...


class WandbTracker:
    """Weights & Biases. A run that resumes continues the same W&B run, whose id is in `run.dir/wandb.json`.

    The project, the entity and the mode come from W&B's own environment variables: WANDB_PROJECT, WANDB_ENTITY, and
    WANDB_MODE=offline for a machine without a network, from which `wandb sync` uploads later.
    """

    def __init__(self, directory: Path, recipe: Mapping[str, Any]) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self._histogram = wandb.Histogram
        path = directory / "wandb.json"
        try:
            run_id = str(json.loads(path.read_text())["id"])
        except (OSError, ValueError, LookupError, TypeError):
            run_id = secrets.token_hex(4)
        config = {key: value for key, value in recipe.items() if value is not None}
        try:
            self._run = wandb.init(id=run_id, resume="allow", dir=str(directory), name=directory.name, config=config)
        except wandb.errors.Error as error:
            raise ValueError(
                f"run.trackers: wandb does not start: {error}; log in with wandb login, or set WANDB_MODE=offline"
            ) from error
        path.write_text(json.dumps({"id": run_id}) + "\n")
        # Its own counter only rises, but after a rewind or a resume steps come again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float], tables: Tables | None = None) -> None:
        logged: dict[str, Any] = {"step": step, **values}
        for name, rows in (tables or {}).items():
            for i, row in enumerate(rows):
                finite = np.asarray(row, float)[np.isfinite(row)]
                if finite.size:
                    logged[f"{name}/{i}"] = self._histogram(finite)
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"wandb": WandbTracker}


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that is unknown or named twice."""
    for name in names:
        if name == "tensorboard":
            raise ValueError("run.trackers: tensorboard is always written, to run.dir/tensorboard; leave it out")
        if name not in TRACKERS:
            raise ValueError(f"run.trackers: {name!r} is unknown; use {', '.join(TRACKERS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"run.trackers = {list(names)} names one twice; name each once")


def check_installed(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker whose package is not installed."""
    for name in names:
        if name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                "run.trackers: the package wandb is not installed; pip install 'ejdist[wandb]', or leave it out"
            )


def open_trackers(names: Sequence[str], directory: Path, recipe: Mapping[str, Any]) -> dict[str, Tracker]:
    """Returns name -> tracker. Raises ValueError if one does not start."""
    return {name: TRACKERS[name](directory, recipe) for name in names}
