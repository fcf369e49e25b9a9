"""Reads the folder of a run, and lists what is missing or damaged. Nothing here needs JAX devices or the run's program."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejdist.paths import is_step
from ejdist.training import goodput
from ejdist.training.metrics import read_evaluations, tables_in
from ejdist.training.recorded import recorded_changes

DOCUMENTS = ("plan.json", "doctor.json", "bandwidth.json", "rehearsal.json", "evaluation.json")
PICTURES = ("loss.png", "experts.png", "evaluation.png")
_NEEDED = ("step", "loss", "step_time", "tokens_per_second")


@dataclass
class RunFolder:
    """A run as its folder has it.

    Attributes:
      rows: of metrics.jsonl, by step; what is no number there is nan.
      recipe: key -> value; `recipe_from` says where from. Empty where no file has it.
      checkpoints: step -> seconds since 1970 at which it was complete.
      goodput: rows of the ledger.
      documents: file -> content of those of DOCUMENTS that are there.
      pictures: file -> its bytes.
      changes: of the recipe while it ran, as `ejdist.training.resume.Past` has them.
      missing: sentences about what is not there, or cannot be read.
      written: seconds since 1970 at which metrics.jsonl was last written; None if it is not there.
    """

    path: Path
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_from: str = ""
    checkpoints: dict[int, float] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)
    goodput: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    written: float | None = None

    @property
    def kept_in(self) -> str:
        """Where checkpoints are, if not in the folder of the run."""
        return str(self.recipe.get("checkpoint.dir") or "")

    def status(self) -> str:
        """Returns the progress of the run as text."""
        if not self.rows:
            return "no step has been made"
        last, of = self.rows[-1]["step"], self.recipe.get("run.steps")
        steps = f"{last:,} of {of:,} steps" if isinstance(of, int) else f"{last:,} steps"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.written))
        if self.summary.get("steps") == last:
            return f"finished: {steps}" if last == of else f"stopped after {steps}"
        return f"going on, or cut off: {steps}, the last one written at {when}"


def number(value: Any) -> float:
    """Returns a number, nan for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def open_folder(path: Path, name: str) -> RunFolder:
    """Reads the folder of a run. Raises ValueError if it is not a folder, or holds no run."""
    if not path.is_dir():
        raise ValueError(f"run.dir = {name!r}: there is no such folder; name that of a run")
    run = RunFolder(path, name)
    _read_rows(run)
    summary = _document(run, "summary.json", dict)
    run.summary = summary or {}
    if summary is None and run.rows and not (path / "summary.json").exists():
        run.missing.append(
            "summary.json is not there: the run has not come to an end, or was cut off before it was written"
        )
    elif run.rows and summary and summary.get("steps") != run.rows[-1]["step"]:
        run.missing.append(
            f"summary.json is of step {summary.get('steps')}, and metrics.jsonl goes to step {run.rows[-1]['step']}: its "
            "numbers are of an earlier stop"
        )
    _read_checkpoints(run)
    _read_recipe(run)
    run.changes = recorded_changes(path)
    if run.rows and not run.kept_in and not (path / "checkpoints").is_dir():
        run.missing.append("checkpoints is not there: nothing was saved in this folder")
    _read_goodput(run)
    for document in DOCUMENTS:
        content = _document(run, document, (dict, list))
        if content is not None:
            run.documents[document] = content
    for row in read_evaluations(path)[-1:]:
        if isinstance(row.get("samples"), list):
            run.documents[f"evaluation.samples at step {row['step']:,}"] = row["samples"]
    for picture in PICTURES:
        _read_picture(run, picture)
    if not (
        run.rows or run.summary or run.documents or run.checkpoints or run.goodput or (path / "metrics.jsonl").exists()
    ):
        raise ValueError(
            f"run.dir = {name!r} has nothing of a run in it: no metrics.jsonl, summary.json or checkpoints"
        )
    return run


def _read_rows(run: RunFolder) -> None:
    path = run.path / "metrics.jsonl"
    try:
        text = path.read_text(errors="replace")
        run.written = path.stat().st_mtime
    except FileNotFoundError:
        drills = (run.path / "rehearsal.json").exists()
        why = "this is a rehearsal, whose runs are in calm/run and next to it" if drills else "no step has been made"
        run.missing.append(f"metrics.jsonl is not there: {why}")
        return
    except OSError as error:
        run.missing.append(f"metrics.jsonl cannot be read: {error.strerror}")
        return
    rows: dict[int, dict[str, Any]] = {}
    bad, twice = [], 0
    for line_number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if (
            not isinstance(row, dict)
            or not isinstance(row.get("step"), int)
            or isinstance(row["step"], bool)
            or abs(row["step"]) > 2**53
        ):
            bad.append(line_number)
            continue
        twice += row["step"] in rows
        rows[row["step"]] = row
    table = None
    with contextlib.suppress(OSError):
        table = next(tables_in(run.path).backwards(), None)
    if table is not None and table["step"] in rows:
        rows[table["step"]] |= table
    run.rows = [rows[step] for step in sorted(rows)]
    if bad:
        more = f", nor can {len(bad) - 1:,} after it" if len(bad) > 1 else ""
        run.missing.append(f"metrics.jsonl: line {bad[0]:,} cannot be read and is left out{more}")
    if twice:
        run.missing.append(f"metrics.jsonl has {twice:,} rows of steps that another row is of; the last one is shown")
    if rows:
        gaps = max(rows) - min(rows) + 1 - len(rows)
        if gaps:
            run.missing.append(f"metrics.jsonl: of the steps {min(rows):,} to {max(rows):,}, {gaps:,} without a row")
        if min(rows) > 1:
            run.missing.append(f"metrics.jsonl: the rows before step {min(rows):,} are not there")
        _name(run, "is no number", lambda row: [k for k in _NEEDED if k in row and not math.isfinite(number(row[k]))])
        _name(run, "is missing", lambda row: [k for k in _NEEDED if k not in row])


def _name(run: RunFolder, what: str, keys_of: Callable[[dict[str, Any]], list[str]]) -> None:
    """Notes each key for which `keys_of` finds that in some row, once."""
    steps_of: dict[str, list[int]] = {}
    for row in run.rows:
        for key in keys_of(row):
            steps_of.setdefault(key, []).append(row["step"])
    for key, steps in steps_of.items():
        more = f" and {len(steps) - 1:,} more" if len(steps) > 1 else ""
        run.missing.append(f"metrics.jsonl: {key} {what} at step {steps[0]:,}{more}")


def _document(run: RunFolder, name: str, kind: Any) -> Any:
    """Returns the content of a JSON file; None where it is not there, or cannot be read, which is named."""
    path = run.path / name
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if isinstance(content, kind):
            return content
        reason = "it is no table of keys"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    run.missing.append(f"{name} cannot be read: {reason}")
    return None


def _read_checkpoints(run: RunFolder) -> None:
    folder = run.path / "checkpoints"
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if is_step(path.name):
            with contextlib.suppress(FileNotFoundError):  # a run that is going on has removed it since
                run.checkpoints[int(path.name)] = path.stat().st_mtime
        elif not path.name.startswith("."):
            run.set_aside.append(path.name)
    run.checkpoints = dict(sorted(run.checkpoints.items()))


def _read_recipe(run: RunFolder) -> None:
    recipe = _document(run, "recipe.json", dict)
    if recipe:
        run.recipe, run.recipe_from = recipe, "recipe.json, as the run was last started"
        return
    for step in reversed(run.checkpoints):
        path = run.path / "checkpoints" / str(step) / "run" / "metadata"
        try:
            stored = json.loads(path.read_text())["recipe"]
            run.recipe = {str(key): value for key, value in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            run.missing.append(f"checkpoints/{step}/run/metadata, with the recipe, cannot be read")
            continue
        run.recipe_from = f"checkpoint {step}: only the keys that decide the losses"
        break
    run.missing.append(
        "recipe.json is not there"
        + (": of the recipe only what a checkpoint keeps is shown" if run.recipe else ", and no recipe")
    )


def _read_goodput(run: RunFolder) -> None:
    path = run.path / goodput.NAME
    if not path.exists():
        run.missing.append(f"{goodput.NAME} is not there: where the time went is not known")
        return
    try:
        run.goodput = goodput.read(path)
        lines = sum(1 for line in path.read_text(errors="replace").splitlines() if line.strip())
    except (OSError, ValueError, RecursionError) as error:
        run.missing.append(f"{goodput.NAME} cannot be read: {error}")
        return
    if lines > len(run.goodput):
        run.missing.append(f"{goodput.NAME}: lines that cannot be read and are left out: {lines - len(run.goodput):,}")


def _read_picture(run: RunFolder, name: str) -> None:
    path = run.path / name
    if not path.is_file():
        return
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or b"IEND" not in content[-16:]:
        run.missing.append(f"{name} is no whole picture and is left out")
    elif len(content) > _MOST_BYTES:
        run.missing.append(f"{name} has {len(content):,} bytes, too many for the page, and is left out")
    else:
        run.pictures[name] = content


_MOST_BYTES = 600_000
