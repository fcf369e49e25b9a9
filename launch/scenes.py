"""What a drill of `launch.rehearse` is made of: where it happens, what is injected, and the expected outcome."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import HOST_LOST
from launch.processes import Job


@dataclass(frozen=True)
class Scene:
    """What a drill may use: how the rehearsal runs, and a source of chance."""

    hosts: int
    steps: int
    every: int  # steps between checkpoints
    folder: Path  # of this drill
    calm: Path  # run.dir of the run that nothing happened to
    arguments: Sequence[str]  # of the run
    chance: random.Random

    def host(self) -> int:
        return self.chance.randrange(self.hosts)

    def other(self) -> int:
        """Returns a host other than host 0, if there is one: the one that is started with different inputs."""
        return self.chance.randrange(1, self.hosts) if self.hosts > 1 else 0

    def step(self) -> int:
        """Returns a step after the first checkpoint and before the last step."""
        return self.chance.randrange(self.every + 1, self.steps)

    def save(self) -> int:
        """Returns the step of a checkpoint that is not the last one."""
        return self.every * self.chance.randrange(1, max(2, self.steps // self.every))


@dataclass(frozen=True)
class Disturbance:
    """A fault to inject into a run, and its expected outcome.

    Attributes:
      told: a sentence about it.
      arguments: for all hosts.
      inside: host -> what it does to itself, for `python -m launch.disturbed`.
      of_host, environment: host -> arguments, and variables, that only it is started with.
      stop_after: where the run is to stop by itself, so that `after` may do something to what it has left.
      after: is given run.dir.
      codes: exit codes that its processes may end with; -9 is of SIGKILL, -6 of JAX when the coordinator is gone; None of a
        process that had to be killed.
      says: what one of the logs must say. says_all: what every log must say.
      again: whether a launcher is to start the run again, where it failed.
      beside: is called in a thread with the processes and their arguments once they are started, and returns what is wrong, as
        sentences.
      held: whatever must stay alive as long as this does, such as a socket.
      goes_on: the same command without the fault is to go on, and to end as the run that nothing happened to.
      resumed: how it goes on, if not as without a fault: arguments for all hosts, and what each does to itself.
      says_after: what one of the logs must say then.
      writes: whether run.dir may be there after it.
    """

    told: str
    codes: Sequence[int | None]
    arguments: Sequence[str] = ()
    inside: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    of_host: Mapping[int, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    stop_after: int | None = None
    after: Callable[[Path], None] | None = None
    says: Sequence[str] = ()
    says_all: Sequence[str] = ()
    again: bool = True
    beside: Callable[[Job, Sequence[str]], Sequence[str]] | None = None
    held: Any = None
    goes_on: bool = True
    resumed: Disturbance | None = None
    says_after: Sequence[str] = ()
    writes: bool = True


GONE = (HOST_LOST, -6, -9)
