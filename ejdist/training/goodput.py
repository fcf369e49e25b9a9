"""The goodput ledger: where the time of a run went, over all its starts.

`run.dir/goodput.jsonl` has one JSON object per line, which host 0 appends in a single write, so that a killed process leaves
at most one torn line, at the end; the next start begins a new line. A row gives the phase that begins at its time:

    {"at": 1763812345.678, "phase": "restart", "start": true}        a process began
    {"at": ..., "phase": "compile", "stage": 2, "data": "code"}      of several stages: which, and the data that it reads
    {"at": ..., "phase": "restart", "resumed": 40}                   the step that it resumes from; 0 for a new run
    {"at": ..., "phase": "productive", "step": 40}                   steps run from here on
    {"at": ..., "phase": "productive", "step": 57, "data_wait": 0.3} a heartbeat, with the seconds since the last row that the
                                                                     loop waited for data
    {"at": ..., "phase": "checkpoint", "step": 60, "data_wait": 0.1} the loop waits for a save
    {"at": ..., "phase": "evaluation", "step": 60, "data_wait": 0.0} held-out data is evaluated
    {"at": ..., "phase": "rewind", "step": 75, "to": 60}             a guard discards the steps after `to`
    {"at": ..., "phase": "end", "step": 100}                         the process is done

and every `guards.stragglers_every` steps each host's own time (`step_timer.py`), which `account` ignores:

    {"at": ..., "hosts": {"0": {"host": 0.01, "data_wait": 0.0, "waits": 0.9, "step_time": 0.91}, ...}, "step": 50, "steps": 50,
     "slow": []}                                                     seconds per step, over the `steps` steps up to `step`

of more than eight hosts those of the eight that needed most for themselves, with "of", how many hosts there are, and "median".

`at` is in seconds since 1970; within a process it advances with a monotonic clock. `step` is the last step that the host has
dispatched; the devices are up to 8 steps behind, except after a save.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ejdist.training.metrics import write_error
from ejdist.training.step_rows import is_number, json_of

NAME = "goodput.jsonl"
# Seconds between heartbeats: short at first, to resolve short runs, and up to 30 s later, which is 3000 rows a day.
_OFTEN, _SELDOM, _GROWTH = 0.2, 30.0, 1e-3


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by class; they add up to `wall`.

    Attributes:
      productive: steps that are part of the final run.
      compile: the step's program.
      data_wait: the loop waits for a batch.
      checkpoint: the loop waits for a save, and at the end for the last one.
      evaluation: held-out data is evaluated between steps.
      restart: from the start of each process to its first step, without compiling.
      lost: steps rerun after a start from an earlier checkpoint, with their waits for data.
      rewound: steps that a guard discarded, with their waits for data, and the rewind itself.
      down: between the last heartbeat of a process and the next start.
      starts, rewinds: how many there were.
    """

    productive: float = 0.0
    compile: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    restart: float = 0.0
    lost: float = 0.0
    rewound: float = 0.0
    down: float = 0.0
    starts: int = 0
    rewinds: int = 0

    @property
    def wall(self) -> float:
        """Seconds from the first row to the last."""
        return sum(getattr(self, name) for name in CLASSES)

    @property
    def fraction(self) -> float:
        """The goodput: productive seconds over wall seconds."""
        return self.productive / self.wall if self.wall else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, with `wall` and `fraction`."""
        return {"fraction": self.fraction, "wall": self.wall, **asdict(self)}

    def __str__(self) -> str:
        spent = [f"{name.replace('_', ' ')} {getattr(self, name):.1f}" for name in CLASSES if getattr(self, name) > 0]
        times = f"{self.starts} start{'' if self.starts == 1 else 's'}"
        rewinds = f", {self.rewinds} rewind{'' if self.rewinds == 1 else 's'}" if self.rewinds else ""
        return f"goodput {self.fraction:.1%} of {self.wall:.1f} s in {times}{rewinds}: {', '.join(spent)}"


CLASSES = tuple(f.name for f in fields(Goodput) if f.name not in ("starts", "rewinds"))
_OF_PHASE = {"rewind": "rewound", "end": "down"}
_OF_STEPS = ("productive", "data_wait")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a ledger, without invalid lines: a process may have been killed during a write."""
    rows = (json_of(line) for line in path.read_text(errors="replace").splitlines()) if path.exists() else ()
    return [row for row in rows if isinstance(row, dict) and _is_row(row)]


def _is_row(row: dict[str, Any]) -> bool:
    steps = all(is_number(row[name], int) for name in ("step", "resumed", "to") if name in row)
    phase = row.get("phase", "end")
    valid_phase = isinstance(phase, str) and phase in (*CLASSES, *_OF_PHASE) and (phase != "rewind" or "to" in row)
    return is_number(row.get("at")) and is_number(row.get("data_wait", 0)) and steps and valid_phase


def account(rows: list[dict[str, Any]]) -> Goodput:
    """Returns where the time between the first and the last row went. If the clock went backwards between two processes, the
    time between them counts as zero."""
    spans: list[tuple[str, float, int, int]] = []  # class, seconds, and of steps the last one before it and in it
    starts = rewinds = reached = 0
    before: dict[str, Any] | None = None
    for row in rows:
        if "phase" not in row:
            continue
        if before is not None:
            seconds = max(0.0, row["at"] - before["at"])
            step = row.get("step", reached)
            if row.get("start"):
                spans.append(("down", seconds, reached, reached))
            elif before["phase"] == "productive":
                waited = min(row.get("data_wait", 0.0), seconds)
                spans += [("data_wait", waited, reached, step), ("productive", seconds - waited, reached, step)]
            else:
                spans.append((_OF_PHASE.get(before["phase"], before["phase"]), seconds, step, step))
        if "resumed" in row:
            spans = _given_up(spans, row["resumed"], "lost")
        elif row["phase"] == "rewind":
            spans, rewinds = _given_up(spans, row["to"], "rewound"), rewinds + 1
        starts += bool(row.get("start"))
        reached = row.get("resumed", row.get("to", row.get("step", reached)))
        before = row
    sums = {name: sum(seconds for kind, seconds, *_ in spans if kind == name) for name in CLASSES}
    return Goodput(**sums, starts=starts, rewinds=rewinds)


def _given_up(spans: list[tuple[str, float, int, int]], step: int, kind: str) -> list[tuple[str, float, int, int]]:
    """Returns the spans with the time of steps after `step` moved to another class; spans that straddle it are split in
    proportion."""
    reclassified = []
    for was, seconds, first, last in spans:
        if was not in _OF_STEPS or last <= step:
            reclassified.append((was, seconds, first, last))
        elif first >= step:
            reclassified.append((kind, seconds, first, last))
        else:
            kept = seconds * (step - first) / (last - first)
            reclassified += [(was, kept, first, step), (kind, seconds - kept, step, last)]
    return reclassified


class Ledger:
    """Writes the rows of one process. Rows before `open` are buffered, so a run that is refused leaves no file.

    Args:
      writes: whether this process writes: host 0.
      began: start time of the process, in seconds since 1970; default: now.
    """

    def __init__(self, writes: bool, began: float | None = None) -> None:
        now = time.time()
        self._writes, self._zero = writes, now - time.monotonic()
        self._file: Any = None
        self._early: list[dict[str, Any]] = []
        self._opened = self._last = time.monotonic()
        self._put({"at": now if began is None else min(began, now), "phase": "restart", "start": True})

    def open(self, directory: Path) -> None:
        """Opens the file. Raises OSError, here and later, if it cannot be written."""
        if not self._writes:
            return
        self._directory, path = directory, directory / NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            self._file = path.open("a", buffering=1)
            if torn:
                self._file.write("\n")
        except OSError as error:
            raise write_error(directory, error) from error
        early, self._early = self._early, []
        for row in early:
            self._put(row)

    def phase(self, name: str, **what: Any) -> None:
        """Begins a phase, one of those in the module docstring."""
        self._last = time.monotonic()
        self._put({"at": round(self._zero + self._last, 3), "phase": name, **what})

    def heartbeat(self, step: int, waited: float) -> bool:
        """Records that this step was dispatched, unless the last row is recent; returns whether it wrote a row.

        Args:
          waited: seconds that the loop waited for data since the last row.
        """
        now = time.monotonic()
        if now - self._last < min(_SELDOM, max(_OFTEN, _GROWTH * (now - self._opened))):
            return False
        self.phase("productive", step=step, data_wait=round(waited, 4))
        return True

    def note(self, **what: Any) -> None:
        """Adds a row that begins no phase."""
        self._put({"at": round(self._zero + time.monotonic(), 3), **what})

    def _put(self, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        if self._file is None:
            self._early.append(row)
            return
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise write_error(self._directory, error) from error

    def close(self, **what: Any) -> None:
        """Records the end of the process. Ignores a full disk, which is reported elsewhere."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.phase("end", **what)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
