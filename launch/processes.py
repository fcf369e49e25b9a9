"""The processes of a run on this machine: how they are started, watched and ended. `launch.local`, `launch.rehearse` and tests
use it; on a cluster its scheduler does this."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import FILE

_LAST_WORD = 5.0  # seconds


def free_port() -> int:
    """Returns a port of this machine that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@dataclass
class Job:
    """Several processes of one run, each of which plays a host.

    Attributes:
      logs: where each writes what it says: `host-I.log`.
      devices: virtual CPU devices of each; None leaves it to the command and to the accelerators there are.
      command: what is run, before the recipe.
      lines, variables: what each was started with, and the environment of all.
    """

    count: int
    logs: Path
    devices: int | None = None
    command: Sequence[str] = (sys.executable, "-m", "launch.train")
    processes: list[subprocess.Popen] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def start(
        self,
        arguments: Sequence[str],
        *,
        of_host: Mapping[int, Sequence[str]] | None = None,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        commands: Mapping[int, Sequence[str]] | None = None,
    ) -> Job:
        """Starts the processes with these arguments, and returns this.

        Args:
          of_host: arguments of single hosts, after the others.
          environment: variables of single hosts.
          commands: what single hosts run instead of `command`.
        """
        cluster = []
        if self.count > 1:
            address = f"cluster.coordinator=localhost:{free_port()}"
            cluster = ["cluster=manual", address, f"cluster.num_processes={self.count}"]
        self.logs.mkdir(parents=True, exist_ok=True)
        self.verdict.unlink(missing_ok=True)
        of_all = self._variables() | {START: uuid.uuid4().hex, FILE: str(self.verdict)}
        self.processes, self.lines, self.variables = [], [], of_all
        for i in range(self.count):
            line = [*(commands or {}).get(i, self.command), *arguments, *cluster]
            line += [f"cluster.process_id={i}"] if cluster else []
            variables = of_all | dict((environment or {}).get(i, {}))
            with self.log(i).open("ab") as log:
                # In a group of its own a Ctrl-C comes to it only from here: of two it would take the second for impatience.
                self.lines.append([*line, *(of_host or {}).get(i, ())])
                process = subprocess.Popen(self.lines[i], stdout=log, stderr=log, env=variables, process_group=0)
            self.processes.append(process)
        return self

    def _variables(self) -> dict[str, str]:
        variables = dict(os.environ)
        if self.devices is not None:
            flags = [f for f in variables.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
            variables["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={self.devices}"])
            variables["JAX_PLATFORMS"] = "cpu"
        return variables

    def log(self, host: int) -> Path:
        return self.logs / f"host-{host}.log"

    @property
    def verdict(self) -> Path:
        """Where the processes leave why the run ended, see `ejdist.cluster.verdict`."""
        return self.logs / "verdict"

    def wait(self, seconds: float, after_first: float | None = None) -> list[int | None]:
        """Returns the exit codes; None for a process that had not ended after `seconds`, which is then killed.

        Args:
          after_first: seconds that the others have once one has failed.
        """
        end = time.monotonic() + seconds
        failed = False
        while any(p.poll() is None for p in self.processes) and time.monotonic() < end:
            if after_first is not None and not failed and any(p.poll() not in (None, 0) for p in self.processes):
                failed, end = True, min(end, time.monotonic() + after_first)
            time.sleep(0.05)
        codes = [p.poll() for p in self.processes]
        self.kill()
        self._hear_witness()
        return codes

    def _hear_witness(self) -> None:
        """Waits for the last word of what outlives process 0, see `ejdist.cluster.witness`: it is in the same group."""
        end = time.monotonic() + _LAST_WORD
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            while self.processes and (self.processes[0].returncode or 0) < 0 and time.monotonic() < end:
                os.killpg(self.processes[0].pid, 0)
                time.sleep(0.02)

    def signal(self, number: int, host: int | None = None) -> None:
        """Sends a signal to one of them, or to all."""
        for i, process in enumerate(self.processes):
            if host in (None, i) and process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
