"""Checks on the hosts of a run. Each failure is one sentence: which host, what is wrong, and the remedy.

Hosts report facts; the functions that check them run on host 0 and take the reports of all, host -> [its name, facts].
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ejdist.buckets import reason_of
from ejdist.paths import is_url

Reports = dict[int, Any]
CLOCKS = 1.0  # seconds that two clocks may differ
_SEEN_WITHIN = 30.0  # seconds after which a network file system shows a new file to every host


def why_unreachable(coordinator: str, seconds: float) -> str | None:
    """Returns None once the coordinator's address accepts a connection, or the reason if it does not within
    `seconds`."""
    name, _, port = coordinator.rpartition(":")
    end, here = time.monotonic() + seconds, socket.gethostname()
    while True:
        try:
            with socket.create_connection((name.strip("[]"), int(port)), timeout=5):
                return None
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(min(1.0, max(0.0, end - time.monotonic())))
                continue
            what = f"{here}: cluster.coordinator = {coordinator} "
            if isinstance(error, socket.gaierror):
                return (
                    what
                    + f"has a name that this host cannot resolve ({error.strerror}): give an address, or fix its DNS"
                )
            if is_loopback(coordinator):
                return (
                    what
                    + "is this machine itself, where nothing listens: give the address at which others reach process 0"
                )
            if isinstance(error, ConnectionRefusedError):
                return (
                    what + "refuses connections: start process 0 there, or give the address of the machine that runs it"
                )
            return what + "does not answer: open that port to this host (check the firewall and the network)"


def is_loopback(coordinator: str) -> bool:
    """Returns whether an address resolves, on this host, only to loopback addresses."""
    name = coordinator.rpartition(":")[0].strip("[]")
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(addresses) and all(address.startswith("127.") or address == "::1" for address in addresses)


def machine() -> str:
    """Returns an id that is the same for all processes on one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class SharedFolder:
    """Checks that a folder is shared by all hosts and writable by each. Leaves no trace.

    Each host writes its own file, and looks for the file of host 0, which is written first.
    """

    def __init__(self, folder: Any, index: int, token: str, *, writes: bool = True) -> None:
        """Writes this host's file to a folder: a `Path`, or an `etils.epath.Path` of an object store. With `writes=False` it
        only looks."""
        self._folder, self._index, self.token = folder, index, token
        self.failure: str | None = None
        self._created: list[Path] = []
        if not writes:
            return
        try:
            if isinstance(folder, Path):
                self._created = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._file(index).write_bytes(b"seen")
        except Exception as error:  # object store libraries raise arbitrary types
            self.failure = getattr(error, "strerror", None) or reason_of(error)[1]

    def _file(self, index: int) -> Any:
        return self._folder / f".seen-by-all-{self.token}-{index}"

    def sees_first(self, seconds: float | None = None) -> bool:
        """Returns whether the file of host 0 appears within `seconds`."""
        end = time.monotonic() + (_SEEN_WITHIN if seconds is None else seconds)
        while True:
            with contextlib.suppress(Exception):
                if isinstance(self._folder, Path):
                    os.listdir(self._folder)  # a network file system may cache that a file was missing
                if self._file(0).exists():
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.2)

    def free_bytes(self) -> float:
        """Returns the free bytes of the folder's disk; infinity for an object store."""
        if not isinstance(self._folder, Path):
            return math.inf
        existing = next(p for p in (self._folder, *self._folder.absolute().parents) if p.exists())
        return shutil.disk_usage(existing).free

    def close(self) -> None:
        """Removes this host's file, and the folders created for it that are empty."""
        with contextlib.suppress(Exception):
            self._file(self._index).unlink(missing_ok=True)
            for path in self._created:
                path.rmdir()


def folder_failures(key: str, folder: Any) -> Callable[[Reports], list[str]]:
    """Returns the function that checks `{"writes": None or why not, "sees": whether it sees the file of host 0}`."""

    bucket = is_url(str(folder))
    right = "let its account create, read and delete objects there, or name another bucket"
    remedy = right if bucket else "fix its permissions, or mount it there"
    other = right if bucket else "it must be the same folder on every host, on storage that all of them mount"
    if key == "run.dir":
        other += "; or give checkpoint.dir a folder or bucket that they share, and run.dir may be a folder of each host"

    def judge(reports: Reports) -> list[str]:
        cannot = [
            f"host {i} ({name}) cannot write to {key} = {folder}: {facts['writes']}; {remedy}"
            for i, (name, facts) in sorted(reports.items())
            if facts["writes"] is not None
        ]
        blind = [
            f"host {i} ({name}) does not see what host 0 ({reports[0][0]}) writes to {key} = {folder}: {other}"
            for i, (name, facts) in sorted(reports.items())
            if facts["writes"] is None and reports[0][1]["writes"] is None and not facts["sees"]
        ]
        return cannot + blind

    return judge


def clock_failures(reports: Reports) -> list[str]:
    """Checks `{"ahead": seconds that its clock is ahead of host 0's}`."""
    failures = []
    for i, (name, facts) in sorted(reports.items()):
        if abs(facts["ahead"]) > CLOCKS:
            way = "ahead of" if facts["ahead"] > 0 else "behind"
            failures.append(
                f"the clock of host {i} ({name}) is {abs(facts['ahead']):.1f} s {way} that of host 0 "
                f"({reports[0][0]}): sync both with a time server (timedatectl set-ntp true)"
            )
    return failures


def device_failures(reports: Reports) -> list[str]:
    """Checks `{"platform", "kind", "count": of local devices, "accelerators": device files of accelerators}`."""
    failures = []
    for i, (name, facts) in sorted(reports.items()):
        if facts["platform"] == "cpu" and facts["accelerators"]:
            failures.append(
                f"host {i} ({name}) has {facts['accelerators'][0]}, but JAX finds only its CPU: install the "
                "accelerator's packages there (pip install 'ejdist[cuda]' or 'ejdist[tpu]'), and unset JAX_PLATFORMS"
            )
    first, theirs = reports[0]
    for i, (name, facts) in sorted(reports.items()):
        if (facts["kind"], facts["count"]) != (theirs["kind"], theirs["count"]):
            failures.append(
                f"host {i} ({name}) has {facts['count']} x {facts['kind']}, and host 0 ({first}) has {theirs['count']} "
                f"x {theirs['kind']}: give every host the same devices, or leave out the one that lost some"
            )
    return failures


def disk_failures(free: float, checkpoint: int, keep: int, there: int) -> list[str]:
    """Returns a failure if the checkpoints to be written do not fit on the disk, otherwise nothing.

    Args:
      free: free bytes in the checkpoint folder. checkpoint: bytes of one checkpoint.
      keep: how many are kept; one more is written before the oldest is removed. there: how many exist.
    """
    more = max(1, keep + 1 - there)
    if free >= more * checkpoint:
        return []
    return [
        f"the checkpoint folder has {_size(free)} free, but {more} more checkpoints of {_size(checkpoint)} must fit: "
        "free space, choose another folder, or lower checkpoint.keep"
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
