"""Allows one run at a time in a run.dir or checkpoint.dir: two would overwrite each other's metrics and remove each other's
unfinished checkpoints.

The owner is a file in the folder, which is made by a hard link: one of several processes succeeds, on network file systems too,
where file locks have no effect. The owner renews it while it runs. What it leaves when it is killed is taken over: at once on
its own machine, where the process is known to be gone, and elsewhere once it has not been renewed for a while. Ages compare two
files of the folder, so that clocks of machines do not matter.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ejdist.cluster.ending import at_leaving
from ejdist.cluster.health import machine
from ejdist.cluster.hosts import HostLost

OWNER = ".owner"
_RENEW = 20.0  # seconds between two renewals
_STALE = 120.0  # seconds without one after which the owner is taken to be gone
# Seconds to wait for a previous process that is stopping and may still be writing its checkpoint.
_PATIENCE = 60.0
_EVERY = 0.5
# (device, inode) of a folder, or the URL of one -> its lock in this process, which has one run at a time.
_HELD: weakref.WeakValueDictionary[Any, Lock] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def release_locks_at_exit() -> Iterator[None]:
    """Releases all locks of this process when the run ends, since its objects may stay in memory for longer."""
    try:
        yield
    finally:
        _release_all()


def _release_all() -> None:
    for lock in list(_HELD.values()):
        lock.release()


at_leaving(_release_all)


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder.

    Attributes:
      machine: identifies the machine, and the container on it: `pid` is valid within it.
      born: when the process began, as its kernel counts: its pid may have been given to another one since.
    """

    id: str
    hostname: str
    pid: int
    machine: str
    born: str

    def lives(self) -> bool | None:
        """Returns whether the process is still there; None on another machine, where nothing is known of it."""
        if not self.born or self.machine != _machine():
            return None
        return _born(self.pid) == self.born

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}" if self.pid else "an unknown process"


def _machine() -> str:
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def _born(pid: int) -> str:
    """Returns when a process of this machine began; empty if there is no such process, or it is a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _me() -> Owner:
    return Owner(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _machine(), _born(os.getpid()))


class Lock:
    """The ownership of a folder of a run.

    Args:
      key: the recipe key that names the folder.
      holds: whether this process takes the lock for the run: host 0.
      limit: seconds that the other hosts wait for it.
    """

    def __init__(self, key: str, directory: Any, holds: bool, limit: float) -> None:
        self.key, self.directory, self._holds, self._limit = key, directory, holds, limit
        self._mine: Owner | None = None
        self._ended = threading.Event()

    def take(self, log: Any, *, make: bool = False) -> bool:
        """Takes the lock if the folder exists and this lock is not held yet. Returns whether it was taken now.

        Args:
          make: create the folder.

        Raises:
          ValueError: another process trains in the folder. HostLost: its owner, on another machine, gives no sign of life, but
            not for long enough. OSError: the folder or the file in it cannot be written.
        """
        if not self._holds or self._mine is not None:
            return False
        if make:
            self.directory.mkdir(parents=True, exist_ok=True)
        if (identity := self._identity()) is None:
            return False
        if before := _HELD.get(identity):
            before.release()
        try:
            self._mine = self._acquire(log)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # no run can write there
                return False
            raise
        _HELD[identity] = self
        self._ended.clear()
        threading.Thread(target=_renewing, args=(weakref.ref(self), self._ended), name="owner", daemon=True).start()
        return True

    def _identity(self) -> Any:
        """Returns what is the same for every name of the folder; None if it is missing, or no folder, which is reported when it
        is used."""
        if not self.directory.is_dir():
            return None
        facts = self.directory.stat()
        return facts.st_dev, facts.st_ino

    def check(self) -> None:
        """Raises ValueError if this process held the lock and another one has taken it over: then it may write no more."""
        if self._mine is None:
            return
        owner, _ = self._look()
        if owner is None and self._restore():
            return
        if owner is None or owner.id != self._mine.id:
            whom = "it is gone" if owner is None else f"{owner} has taken it over"
            self._mine = None
            raise ValueError(
                f"{self.key} = {str(self.directory)!r} belongs to this run no more: {whom}, as this process had given no sign "
                f"of life for {_STALE:g} s. It ends, and saves nothing more"
            )

    def release(self) -> None:
        """Releases the lock if it is held."""
        self._ended.set()
        mine, self._mine = self._mine, None
        if mine is not None:
            with contextlib.suppress(OSError):
                if (owner := self._look()[0]) is not None and owner.id == mine.id:
                    self._file.unlink(missing_ok=True)

    def __del__(self) -> None:
        self.release()

    @property
    def _file(self) -> Any:
        return self.directory / OWNER

    def _look(self) -> tuple[Owner | None, float]:
        """Returns the owner and when it was renewed, by the clock of the file system; (None, 0) if there is none."""
        try:
            with self._file.open() as file:  # opened anew: a network file system then asks its server
                text, renewed = file.read(), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None, 0.0
        try:
            return Owner(**json.loads(text)), renewed
        except (ValueError, TypeError):  # its writer was killed
            return Owner("", "", 0, "", ""), renewed

    def _acquire(self, log: Any) -> Owner:
        me = _me()
        candidate = self.directory / f"{OWNER}-{me.id}"
        self._offer(candidate, me)
        began, logged, first = time.monotonic(), False, None
        try:
            while not self._claim(candidate):
                owner, renewed = self._look()
                if owner is None:
                    continue
                first = renewed if first is None else first
                age = self._now(candidate) - renewed
                if (lives := owner.lives()) is False or (lives is None and age > _STALE):
                    if self._take_over(candidate, owner, log):
                        break
                elif (waited := time.monotonic() - began) > min(_PATIENCE, self._limit / 2):
                    lives = lives or renewed != first
                    if lives or waited > min(_STALE + _RENEW, 0.9 * self._limit):
                        raise self._taken(owner, age, lives)
                if not logged:
                    log(f"waiting for another process that trains in {self.directory}: {owner}")
                logged = True
                time.sleep(_EVERY)
        finally:
            self._withdraw(candidate)
        return me

    def _offer(self, candidate: Any, me: Owner) -> None:
        """Writes what is to be the owner."""
        candidate.write_text(json.dumps(asdict(me)))

    def _claim(self, candidate: Any) -> bool:
        """Makes the candidate the owner, unless there is one; returns whether it is."""
        return _linked(candidate, self._file)

    def _now(self, candidate: Any) -> float:
        """Returns the time by the clock by which `_look` says when the owner was renewed."""
        os.utime(candidate)
        return candidate.stat().st_mtime

    def _withdraw(self, candidate: Any) -> None:
        candidate.unlink(missing_ok=True)

    def _taken(self, owner: Owner, age: float, lives: bool) -> Exception:
        seen = f"{owner}, last seen {max(0.0, age):.0f} s ago"
        what = f"{self.key} = {str(self.directory)!r}: another process trains in it ({seen})"
        if lives:
            return ValueError(f"{what}; stop it or let it finish, or choose another {self.key}")
        return HostLost(
            f"{what}; if it was killed, this command takes the folder over {_STALE:g} s after it was last seen"
        )

    def _take_over(self, candidate: Path, owner: Owner, log: Any) -> bool:
        """Puts the candidate in the place of an owner that is gone. One of several processes succeeds."""
        turn = self.directory / f"{OWNER}-after-{owner.id}"
        if not _linked(candidate, turn):
            with contextlib.suppress(FileNotFoundError):
                if candidate.stat().st_mtime - turn.stat().st_mtime > _STALE:  # killed while it took over
                    turn.unlink()
            return False
        try:
            if (current := self._look()[0]) is None or current.id != owner.id:
                return False
            log(f"{self.directory} belonged to {owner}, which is gone")
            os.replace(candidate, self._file)
            return True
        finally:
            turn.unlink(missing_ok=True)

    def _restore(self) -> bool:
        """Creates the file again after somebody removed it. Returns whether this process owns it."""
        mine = self._mine
        if mine is None:
            return False
        candidate = self.directory / f"{OWNER}-{mine.id}"
        with contextlib.suppress(OSError):
            candidate.write_text(json.dumps(asdict(mine)))
            try:
                return _linked(candidate, self._file)
            finally:
                candidate.unlink(missing_ok=True)
        return False

    def renew(self) -> None:
        """Shows that this process lives."""
        with contextlib.suppress(OSError):  # of a full disk, or a server that is away; the next time may succeed
            owner, _ = self._look()
            if owner is None:
                self._restore()
            elif self._mine is not None and owner.id == self._mine.id:
                os.utime(self._file)


def _renewing(lock: weakref.ref[Lock], ended: threading.Event) -> None:
    while not ended.wait(_RENEW):
        if (one := lock()) is None:
            return
        one.renew()
        del one


def _linked(source: Path, name: Path) -> bool:
    """Links a file to another name, or copies it where there are no hard links; returns whether the name was free."""
    try:
        os.link(source, name)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
    try:  # a file system without hard links
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(file, "w") as copy:
        copy.write(source.read_text())
    return True
