"""Who takes part in a start of a run: each process with its machine, what process 0 knows of all, and who is gone.

`ejdist.cluster.door` admits the processes before they join JAX's coordinator, and keeps a connection to each. What it notices
is stated here, for whoever waits for another host; nothing here waits.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

HOSTS_FILE = "hosts.json"  # in run.dir
# Set by launchers: the same in all processes of a start, and a new one for the next.
START = "EJDIST_START"
_NODES, _PODS = ("SLURMD_NODENAME", "NODE_NAME"), ("POD_NAME",)


@dataclass(frozen=True)
class Who:
    """A process of a start: what it says of itself before it may join.

    Attributes:
      command, run: what was started, such as launch.train, and its run.dir.
      start: the id that the launcher has set for this start; empty without one.
      hostname, pid: of its machine. node, pod: what Slurm and Kubernetes call them; empty elsewhere.
    """

    index: int
    count: int
    command: str
    run: str
    start: str
    hostname: str
    pid: int
    node: str = ""
    pod: str = ""

    def __str__(self) -> str:
        more = [f"{kind} {name}" for kind, name in (("node", self.node), ("pod", self.pod)) if name]
        names = ", ".join([self.hostname, *(m for m in more if not m.endswith(f" {self.hostname}"))])
        return f"host {self.index} ({names}, pid {self.pid})"


def whoami(index: int, count: int, command: str, run: str) -> Who:
    """Returns this process, as it introduces itself."""

    def first(names: Sequence[str]) -> str:
        return next((os.environ[name] for name in names if os.environ.get(name)), "")

    start = os.environ.get(START, "")
    return Who(index, count, command, run, start, socket.gethostname(), os.getpid(), first(_NODES), first(_PODS))


class Gone(NamedTuple):
    """A host that has ended: a sentence, and the exit code that it gave with its reason; None if it ended without a word."""

    text: str
    code: int | None


class Presence:
    """What this process knows of the others; written by the thread that keeps the connections."""

    def __init__(self) -> None:
        self.hosts: list[Who] = []  # on process 0: all of them, by index; elsewhere none
        self.me: Who | None = None
        self.side: Any = None  # the `Door` or the `Line` of this process
        self.tls: str | None = None  # `cluster.tls`, for other connections between hosts
        self._gone: Gone | None = None
        self._changed = threading.Condition()

    def lose(self, gone: Gone) -> None:
        """Notes the first host that is gone."""
        with self._changed:
            self._gone = self._gone or gone
            self._changed.notify_all()

    def gone(self, seconds: float = 0.0) -> Gone | None:
        """Returns the first host that is known to be gone, or None if none is after `seconds`."""
        with self._changed:
            if self.side is not None:
                self._changed.wait_for(lambda: self._gone is not None, seconds)
            return self._gone


_presence = Presence()


def presence() -> Presence:
    """Returns what this process knows of the others."""
    return _presence


def write_hosts(directory: Path) -> None:
    """Writes hosts.json: which index is which machine. Call it on process 0, once the folder exists.

    Raises:
      OSError: the file cannot be written.
    """
    alone = [whoami(0, 1, "", str(directory))]
    hosts = _presence.hosts or alone
    keys = ("index", "hostname", "pid", "node", "pod")
    rows: list[dict[str, Any]] = [{k: v for k, v in asdict(who).items() if k in keys} for who in hosts]
    stated = {"started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hosts": rows}
    temporary = directory / f".{HOSTS_FILE}-{os.getpid()}"
    temporary.write_text(json.dumps(stated, indent=1) + "\n")
    temporary.replace(directory / HOSTS_FILE)
