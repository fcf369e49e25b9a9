"""The goodput ledger: what the time of a run went into, over all its starts.

`run.dir/goodput.jsonl` has a JSON object a line, appended by host 0 in one write each, so that a process that is killed leaves
at most one torn line, at the end; the next start begins a new one. A row says what the run does from its moment on:

    {"at": 1763812345.678, "phase": "restart", "start": true}        a process began
    {"at": ..., "phase": "compile"}
    {"at": ..., "phase": "restart", "resumed": 40}                   the step that it goes on from; 0 of a new run
    {"at": ..., "phase": "productive", "step": 40}                   from here on steps are made
    {"at": ..., "phase": "productive", "step": 57, "data_wait": 0.3} a sign of life, and of what was before it the seconds that
                                                                     the loop waited for data
    {"at": ..., "phase": "checkpoint", "step": 60, "data_wait": 0.1} the loop waits for a save
    {"at": ..., "phase": "rewind", "step": 75, "to": 60}             steps after `to` are given up, by a guard
    {"at": ..., "phase": "end", "step": 100}                         the process has nothing more to do

and every `guards.stragglers_every` steps what each host needed for itself (`pace.py`), which `account` passes over:

    {"at": ..., "hosts": {"0": {"host": 0.01, "data_wait": 0.0, "waits": 0.9, "step_time": 0.91}, ...}, "step": 50, "steps": 50,
     "slow": []}                                                     seconds a step of the `steps` steps up to `step`

`at` is in seconds since 1970, and within a process that of a clock that is not set. `step` is the last step that the host has
handed to the devices, which are up to 8 steps behind; after a save they are not.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ejdist.training.metrics import is_number, json_of, write_error

NAME = "goodput.jsonl"
# Between two signs of life: at first often, so that a short run is told apart, and at last seldom: 3000 rows a day.
_OFTEN, _SELDOM, _GROWTH = 0.2, 30.0, 1e-3


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by what they went into; together they are `wall`.

    Attributes:
      productive: steps that are part of the run as it is.
      compile: the step's program.
      data_wait: the loop waits for a batch.
      checkpoint: the loop waits for a save, and at the end for the last one.
      restart: from the begin of each process to its first step, without compiling.
      lost: steps that were made again after a start from an earlier checkpoint, with their waits for data.
      rewound: steps that a guard has given up, with their waits for data, and the going back.
      down: between the last sign of life of a process and the next start.
      starts, rewinds: how many there were.
    """

    productive: float = 0.0
    compile: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0
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
        """The goodput: productive seconds over all."""
        return self.productive / self.wall if self.wall else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, with `wall` and `fraction`."""
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
    """Returns the rows of a ledger, without lines that are none: a process may have been killed while it wrote."""
    found = (json_of(line) for line in path.read_text(errors="replace").splitlines()) if path.exists() else ()
    return [row for row in found if isinstance(row, dict) and _is_row(row)]


def _is_row(row: dict[str, Any]) -> bool:
    steps = all(is_number(row[name], int) for name in ("step", "resumed", "to") if name in row)
    phase = row.get("phase", "end")
    known = isinstance(phase, str) and phase in (*CLASSES, *_OF_PHASE) and (phase != "rewind" or "to" in row)
    return is_number(row.get("at")) and is_number(row.get("data_wait", 0)) and steps and known


def account(rows: list[dict[str, Any]]) -> Goodput:
    """Returns what the time between the first row and the last went into. A clock that went backwards between two processes
    counts as no time."""
    spans: list[tuple[str, float, int, int]] = []  # class, seconds, and of steps the last one before it and in it
    starts = rewinds = made = 0
    before: dict[str, Any] | None = None
    for row in rows:
        if "phase" not in row:
            continue
        if before is not None:
            seconds = max(0.0, row["at"] - before["at"])
            step = row.get("step", made)
            if row.get("start"):
                spans.append(("down", seconds, made, made))
            elif before["phase"] == "productive":
                waited = min(row.get("data_wait", 0.0), seconds)
                spans += [("data_wait", waited, made, step), ("productive", seconds - waited, made, step)]
            else:
                spans.append((_OF_PHASE.get(before["phase"], before["phase"]), seconds, step, step))
        if "resumed" in row:
            spans = _given_up(spans, row["resumed"], "lost")
        elif row["phase"] == "rewind":
            spans, rewinds = _given_up(spans, row["to"], "rewound"), rewinds + 1
        starts += bool(row.get("start"))
        made = row.get("resumed", row.get("to", row.get("step", made)))
        before = row
    sums = {name: sum(seconds for kind, seconds, *_ in spans if kind == name) for name in CLASSES}
    return Goodput(**sums, starts=starts, rewinds=rewinds)


def _given_up(spans: list[tuple[str, float, int, int]], step: int, kind: str) -> list[tuple[str, float, int, int]]:
    """Returns the spans with what was made after a step put into another class; of a span with steps of both, its share."""
    found = []
    for was, seconds, first, last in spans:
        if was not in _OF_STEPS or last <= step:
            found.append((was, seconds, first, last))
        elif first >= step:
            found.append((kind, seconds, first, last))
        else:
            kept = seconds * (step - first) / (last - first)
            found += [(was, kept, first, step), (kind, seconds - kept, step, last)]
    return found


class Ledger:
    """Writes the rows of one process. What is told before `open` is written then: a run that is refused leaves nothing.

    Args:
      writes: whether this process does: host 0.
      began: when it did, in seconds since 1970; default: now.
    """

    def __init__(self, writes: bool, began: float | None = None) -> None:
        now = time.time()
        self._writes, self._zero = writes, now - time.monotonic()
        self._file: Any = None
        self._early: list[dict[str, Any]] = []
        self._opened = self._last = time.monotonic()
        self._put({"at": now if began is None else min(began, now), "phase": "restart", "start": True})

    def open(self, directory: Path) -> None:
        """Raises OSError, here and in what follows, if the file cannot be written."""
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
        """Says what is done from now on: a phase of this file's docstring."""
        self._last = time.monotonic()
        self._put({"at": round(self._zero + self._last, 3), "phase": name, **what})

    def heartbeat(self, step: int, waited: float) -> bool:
        """Says that this step was handed over, if the last row is some time ago, and returns whether it did.

        Args:
          waited: seconds that the loop waited for data since the last row.
        """
        now = time.monotonic()
        if now - self._last < min(_SELDOM, max(_OFTEN, _GROWTH * (now - self._opened))):
            return False
        self.phase("productive", step=step, data_wait=round(waited, 4))
        return True

    def note(self, **what: Any) -> None:
        """Adds a row that is of no phase."""
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
        """Says that the process has nothing more to do. A disk that is full by now has been told of, or will be."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.phase("end", **what)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
