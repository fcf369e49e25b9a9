"""When and where a run saves: durable checkpoints, by steps and by time, and local ones on each host's disk between them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ejdist.cluster.agreement import check_shared
from ejdist.cluster.hosts import Hosts
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.local_tier import LocalCheckpoints

Tier = Checkpoints | LocalCheckpoints
_RUN_ID = ".run-id"  # in run.dir: distinguishes its local checkpoints from those of other runs


class Clock:
    """Whether a checkpoint is due by time. Host 0's clock decides for all hosts: they synchronise only at a few steps, each
    agreed on at the one before, so that other steps do not wait for a clock."""

    def __init__(self, minutes: float, hosts: Hosts, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._hosts, self._now = 60 * minutes, hosts, now
        self._meet: int | None = None  # the step at which hosts synchronise next
        self._since, self._at = now(), 0  # time and step of the last checkpoint

    def due(self, step: int) -> bool:
        """Returns whether the last checkpoint is too old. Call it on every host after every step."""
        if not self._seconds:
            return False
        if self._meet is None:
            self.saved(step)
        if step != self._meet:
            return False
        elapsed = self._now() - self._since
        left = self._seconds - elapsed
        # Half way to the due step at the current speed, because steps may become slower.
        ahead = max(1, int(left / max(elapsed / max(1, step - self._at), 1e-6) / 2))
        due, ahead = self._hosts.broadcast("whether a checkpoint is due by time", [left <= 0, ahead])
        self._meet = step + ahead
        return due

    def saved(self, step: int) -> None:
        """Restarts the clock after a save. Every host calls it at the same steps."""
        self._since, self._at, self._meet = self._now(), step, step + 1


class Saves:
    """The checkpoints of a run, of both tiers."""

    def __init__(self, run_dir: Path, section: CheckpointSection, hosts: Hosts) -> None:
        """Raises ValueError if the section is wrong."""
        self.section, self.durable = section, Checkpoints(run_dir, section, hosts.limit)
        self._run_dir, self._hosts, self._clock = run_dir, hosts, Clock(section.minutes, hosts)
        self.local: LocalCheckpoints | None = None
        self._starts: list[int] = []  # on host 0: the step from which each start of the run went on
        if section.local is not None:
            run_id, self._starts = _id_in(run_dir) if hosts.index == 0 else (None, [])
            run_id = hosts.broadcast("the id of the run", run_id)
            if run_id is not None:
                self.local = LocalCheckpoints(section.local, run_id, hosts, self._starts)

    def find(self, like: Any, log: Callable[[str], Any] = lambda line: None) -> list[tuple[int, Tier]]:
        """Returns (step, tier) of all complete checkpoints, newest first; at equal steps the local one first.

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings; local checkpoints must be cut as these are.
          log: takes a line for the user.
        """
        checkpoints: list[tuple[int, Tier]] = [(step, self.durable) for step in self.durable.steps()]
        if self.local is not None:
            steps, why = self.local.common(like)
            checkpoints += [(step, self.local) for step in steps]
            if why:
                use = f"step {steps[0]} is the newest to resume from there" if steps else "it is not used to resume"
                log(f"checkpoint.local = {self.section.local!r}: {why}; {use}")
        return sorted(checkpoints, key=lambda one: (one[0], one[1] is self.local), reverse=True)

    def check_shared(self) -> None:
        """Checks that all hosts share the place of the checkpoints and can write there: `checkpoint.dir`, and `run.dir` only if
        that has them. Leaves nothing there, so call it before anything is compiled.

        Raises:
          HostsDiffer: it is not shared, or a host cannot write there.
        """
        if self.section.dir is None:
            check_shared(self._hosts, self._run_dir)
        else:
            check_shared(self._hosts, self.durable.directory, "checkpoint.dir", alone=True)

    def begin(self, start: int, log: Callable[[str], Any]) -> None:
        """Prepares to save in a run that resumes from a step. Removes leftovers of interrupted saves.

        Raises:
          ValueError: checkpoint.local cannot be written.
        """
        hosts = self._hosts
        names = self.durable.interrupted()
        for name in names:
            log(f"removing {name}: an interrupted save")
        hosts.broadcast("that interrupted saves are removed", names and self._remove_interrupted())
        if self.section.local is None:
            return
        known = None
        if hosts.index == 0:
            run_id = uuid.uuid4().hex if self.local is None else self.local.run_id
            _write_id(self._run_dir, run_id, [*self._starts, start])
            known = [run_id, len(self._starts)]
        run_id, number = hosts.broadcast("the number of this start", known)
        self.local = self.local or LocalCheckpoints(self.section.local, run_id, hosts)
        self.local.start = number
        self.local.check_writable()
        self.local.forget_after(start)

    def _remove_interrupted(self) -> None:
        if self._hosts.index == 0:
            self.durable.remove_interrupted()

    def due(self, step: int, last: bool) -> Tier | None:
        """Returns the tier to save the state after this step to, or None. Call it on every host after every step.

        Args:
          last: the run ends or stops here.
        """
        by_time = self._clock.due(step)
        if last or by_time or self.durable.due(step):
            self._clock.saved(step)
            return self.durable
        every = self.section.local_every
        return self.local if every and step % every == 0 else None

    def wait(self) -> None:
        """Waits until everything is on disk. Raises CheckpointError if a write failed."""
        self.durable.wait()
        if self.local is not None:
            self.local.wait()

    def set_aside(self, step: int, where: Tier) -> str:
        """Moves an unreadable checkpoint out of the way; every host calls it. Returns where it went, for a message."""
        if isinstance(where, LocalCheckpoints):
            where.set_aside(step)
            return "it was removed on every host"
        moved = str(where.set_aside(step)) if self._hosts.index == 0 else ""
        moved = self._hosts.broadcast("the place of a damaged checkpoint", moved)
        where.reload()
        return f"it was moved to {moved}"

    def close(self) -> None:
        self.durable.close()
        if self.local is not None:
            self.local.close()


def _id_in(run_dir: Path) -> tuple[str | None, list[int]]:
    """Returns the id of the run in a folder, with symlinks resolved, and the steps from which its starts went on; None for a
    copied or moved run, which gets a new id."""
    try:
        stored = json.loads((run_dir / _RUN_ID).read_text())
        if Path(stored["of"]).resolve() == run_dir.resolve():
            return stored["id"], [int(step) for step in stored.get("starts", ())]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None, []


def _write_id(run_dir: Path, run_id: str, starts: list[int]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    unfinished = run_dir / f"{_RUN_ID}-{uuid.uuid4().hex}"
    unfinished.write_text(json.dumps({"id": run_id, "of": str(run_dir.absolute()), "starts": starts}))
    unfinished.replace(run_dir / _RUN_ID)
