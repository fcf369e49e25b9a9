"""When a run saves and where: checkpoints that last, by steps and by time, and those on a disk of each host between them."""

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
_RUN_ID = ".run-id"  # in run.dir: tells its local checkpoints from those of another run


class Clock:
    """Whether a checkpoint is due by time. Host 0's clock decides, and all hosts make the same of it: they meet at a few
    steps only, each of which is agreed on at the one before, so that no step waits for a clock."""

    def __init__(self, minutes: float, hosts: Hosts, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._hosts, self._now = 60 * minutes, hosts, now
        self._meet: int | None = None  # the step at which hosts meet next
        self._since, self._at = now(), 0  # of the last checkpoint: when, and its step

    def due(self, step: int) -> bool:
        """Returns whether the last checkpoint is too old. Every host asks after every step."""
        if not self._seconds:
            return False
        if self._meet is None:
            self.saved(step)
        if step != self._meet:
            return False
        gone = self._now() - self._since
        left = self._seconds - gone
        # Half way to where it would be due if steps go on to last as long as they did: they may come to last longer.
        ahead = max(1, int(left / max(gone / max(1, step - self._at), 1e-6) / 2))
        due, ahead = self._hosts.broadcast("whether a checkpoint is due by time", [left <= 0, ahead])
        self._meet = step + ahead
        return due

    def saved(self, step: int) -> None:
        """Counts from here. Every host says so of the same steps."""
        self._since, self._at, self._meet = self._now(), step, step + 1


class Saves:
    """The checkpoints of a run, of both tiers."""

    def __init__(self, run_dir: Path, section: CheckpointSection, hosts: Hosts) -> None:
        """Raises ValueError if the section is wrong."""
        self.section, self.durable = section, Checkpoints(run_dir, section, hosts.limit)
        self._run_dir, self._hosts, self._clock = run_dir, hosts, Clock(section.minutes, hosts)
        self.local: LocalCheckpoints | None = None
        self._run_id: str | None = None
        if section.local is not None:
            self._run_id = hosts.broadcast("the id of the run", _id_in(run_dir) if hosts.index == 0 else None)
            if self._run_id is not None:
                self.local = LocalCheckpoints(section.local, self._run_id, hosts)

    def find(self, like: Any, log: Callable[[str], Any] = lambda line: None) -> list[tuple[int, Tier]]:
        """Returns (step, where) of all complete checkpoints, the last one first; at the same step the local one.

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings, which local checkpoints must have been saved with.
          say: takes a line for the user.
        """
        found: list[tuple[int, Tier]] = [(step, self.durable) for step in self.durable.steps()]
        if self.local is not None:
            steps, without = self.local.common(like)
            found += [(step, self.local) for step in steps]
            if not steps:
                named = ", ".join(map(str, without[:8])) + (" and more" if len(without) > 8 else "")
                why = (
                    f"host {named} has none that fits this mesh" if without else "there is no step that all hosts have"
                )
                log(f"no checkpoint is read from checkpoint.local = {self.section.local!r}: {why}")
        return sorted(found, key=lambda one: (one[0], one[1] is self.local), reverse=True)

    def begin(self, start: int, log: Callable[[str], Any]) -> None:
        """Makes ready to save, in a run that goes on from a step. What was cut off is removed.

        Raises:
          HostsDiffer: checkpoint.dir is not one folder for all hosts. ValueError: a folder cannot be written.
        """
        hosts = self._hosts
        if self.section.dir is not None:
            check_shared(hosts, self.durable.directory, "checkpoint.dir", alone=True)
        names = self.durable.interrupted()
        for name in names:
            log(f"removing {name}: a save that was cut off")
        hosts.broadcast("that nothing is left of saves that were cut off", names and self._remove_interrupted())
        if self.section.local is None:
            return
        if self.local is None:
            made = _new_id(self._run_dir) if hosts.index == 0 else None
            self.local = LocalCheckpoints(self.section.local, hosts.broadcast("the new id of the run", made), hosts)
        self.local.check_writable()
        self.local.forget_after(start)

    def _remove_interrupted(self) -> None:
        if self._hosts.index == 0:
            self.durable.remove_interrupted()

    def due(self, step: int, last: bool) -> Tier | None:
        """Returns where the state after this step is to be saved, if anywhere. Every host asks after every step.

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
        """Returns when everything is on disk. Raises CheckpointError if it could not be written."""
        self.durable.wait()
        if self.local is not None:
            self.local.wait()

    def set_aside(self, step: int, where: Tier) -> str:
        """Puts a checkpoint that cannot be read out of the way; every host calls it. Returns where it is, in words."""
        if isinstance(where, LocalCheckpoints):
            where.set_aside(step)
            return "it is removed on every host"
        moved = str(where.set_aside(step)) if self._hosts.index == 0 else ""
        moved = self._hosts.broadcast("the place of a damaged checkpoint", moved)
        where.reload()
        return f"what is left of it is in {moved}"

    def close(self) -> None:
        self.durable.close()
        if self.local is not None:
            self.local.close()


def _id_in(run_dir: Path) -> str | None:
    """Returns the id of the run in a folder, whatever links lead there. A copy of a run is another one, and so is one that was
    moved."""
    try:
        found = json.loads((run_dir / _RUN_ID).read_text())
        return found["id"] if Path(found["of"]).resolve() == run_dir.resolve() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _new_id(run_dir: Path) -> str:
    run_dir.mkdir(parents=True, exist_ok=True)
    made = uuid.uuid4().hex
    (run_dir / _RUN_ID).write_text(json.dumps({"id": made, "of": str(run_dir.absolute())}))
    return made
