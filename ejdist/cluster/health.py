"""What may be wrong with the hosts of a run, one sentence each: which host, what, and what to do.

Hosts say facts; the functions that judge them take what all hosts said, host -> [its name, facts], and run on host 0.
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

Said = dict[int, Any]
CLOCKS = 1.0  # seconds that two clocks may differ
_SEEN_WITHIN = 30.0  # seconds after which a network file system shows a new file to every host


def why_unreachable(coordinator: str, seconds: float) -> str | None:
    """Returns None once the address of the coordinator takes a connection, and after so many seconds why it does not."""
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
                    + f"has a name that this host does not know ({error.strerror}): give an address, or mend its DNS"
                )
            if is_loopback(coordinator):
                return (
                    what
                    + "is this machine itself, where nobody listens: give the address by which others know process 0"
                )
            if isinstance(error, ConnectionRefusedError):
                return (
                    what
                    + "is a machine on which nobody listens: start process 0 there, or name the machine where it is"
                )
            return what + "does not answer: let this host reach that port (a firewall, or another network)"


def is_loopback(coordinator: str) -> bool:
    """Returns whether an address is, on this host, this host itself and no other can mean it."""
    name = coordinator.rpartition(":")[0].strip("[]")
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(found) and all(address.startswith("127.") or address == "::1" for address in found)


def machine() -> str:
    """Returns what two processes have in common if they are on one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class SharedFolder:
    """Whether a folder is the same one for all hosts, and all may write to it. Leaves no trace.

    Each host writes a file of its own, and looks for that of host 0, which has written first.
    """

    def __init__(self, folder: Any, index: int, token: str) -> None:
        """Writes this host's file to a folder: a `Path`, or an `etils.epath.Path` of an object store."""
        self._folder, self._index, self._token = folder, index, token
        self.failure: str | None = None
        self._made: list[Path] = []
        try:
            if isinstance(folder, Path):
                self._made = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._file(index).write_bytes(b"seen")
        except Exception as error:  # a library of an object store raises what it likes
            self.failure = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]

    def _file(self, index: int) -> Any:
        return self._folder / f".doctor-{self._token}-{index}"

    def sees_first(self, seconds: float = _SEEN_WITHIN) -> bool:
        """Returns whether the file of host 0 is here, or comes within so many seconds."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(Exception):
                if isinstance(self._folder, Path):
                    os.listdir(self._folder)  # a network file system may remember for a while that a file was not there
                if self._file(0).exists():
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.2)

    def free_bytes(self) -> float:
        """Returns the bytes that may still be written there, or to where it would be; an object store has no end."""
        if not isinstance(self._folder, Path):
            return math.inf
        there = next(p for p in (self._folder, *self._folder.absolute().parents) if p.exists())
        return shutil.disk_usage(there).free

    def close(self) -> None:
        """Removes this host's file, and the folders that were made for it, unless something has come into them."""
        with contextlib.suppress(Exception):
            self._file(self._index).unlink(missing_ok=True)
            for path in self._made:
                path.rmdir()


def folder_failures(key: str, folder: Any) -> Callable[[Said], list[str]]:
    """Returns the judge of `{"writes": None or why not, "sees": whether it sees the file of host 0}`."""

    def judge(said: Said) -> list[str]:
        cannot = [
            f"host {i} ({name}) cannot write to {key} = {folder}: {facts['writes']}; mend its permissions, or mount it there"
            for i, (name, facts) in sorted(said.items())
            if facts["writes"] is not None
        ]
        blind = [
            f"host {i} ({name}) does not see in {key} = {folder} what host 0 ({said[0][0]}) writes: it must be one folder "
            "for all, on storage that all of them mount"
            for i, (name, facts) in sorted(said.items())
            if facts["writes"] is None and said[0][1]["writes"] is None and not facts["sees"]
        ]
        return cannot + blind

    return judge


def clock_failures(said: Said) -> list[str]:
    """Judges `{"ahead": seconds that its clock is ahead of host 0's}`."""
    found = []
    for i, (name, facts) in sorted(said.items()):
        if abs(facts["ahead"]) > CLOCKS:
            way = "ahead of" if facts["ahead"] > 0 else "behind"
            found.append(
                f"the clock of host {i} ({name}) is {abs(facts['ahead']):.1f} s {way} that of host 0 ({said[0][0]}): let both "
                "follow one time server (timedatectl set-ntp true)"
            )
    return found


def device_failures(said: Said) -> list[str]:
    """Judges `{"platform", "kind", "count": of its own devices, "accelerators": device files of accelerators that it has}`."""
    found = []
    for i, (name, facts) in sorted(said.items()):
        if facts["platform"] == "cpu" and facts["accelerators"]:
            found.append(
                f"host {i} ({name}) has {facts['accelerators'][0]}, but JAX finds only its CPU: install there what the "
                "accelerator needs (pip install 'ejdist[cuda]' or 'ejdist[tpu]'), and unset JAX_PLATFORMS"
            )
    first, theirs = said[0]
    for i, (name, facts) in sorted(said.items()):
        if (facts["kind"], facts["count"]) != (theirs["kind"], theirs["count"]):
            found.append(
                f"host {i} ({name}) has {facts['count']} x {facts['kind']}, and host 0 ({first}) has {theirs['count']} x "
                f"{theirs['kind']}: give every host the same, or leave out the one that has lost some"
            )
    return found


def disk_failures(free: float, checkpoint: int, keep: int, there: int) -> list[str]:
    """Returns whether what will be written does not fit.

    Args:
      free: bytes of the folder of the checkpoints. checkpoint: bytes of one.
      keep: how many stay; one more is written before the oldest goes. there: how many there are.
    """
    more = max(1, keep + 1 - there)
    if free >= more * checkpoint:
        return []
    return [
        f"the folder of the checkpoints has {_size(free)} free, and {more} more of {_size(checkpoint)} are to be there at a "
        "time: make room, choose another folder, or lower checkpoint.keep"
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
