"""Allows one run at a time in a run.dir or checkpoint.dir: two would overwrite each other's metrics and remove each other's
unfinished checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Seconds to wait for a previous process that is stopping and may still be writing its checkpoint.
_PATIENCE = 60.0
_EVERY = 0.5
# (device, inode) of a folder -> its lock in this process, which has one run at a time.
_HELD: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def release_locks_at_exit() -> Iterator[None]:
    """Releases all locks of this process when the run ends, since its objects may stay in memory for longer."""
    try:
        yield
    finally:
        for lock in list(_HELD.values()):
            lock.release()


class Lock:
    """A lock on a folder of a run. The kernel releases it when the process ends, however it ends.

    It is an flock on the folder itself, so nothing is written. On file systems without directory locks, such as NFS, it has no
    effect.

    Args:
      key: the recipe key that names the folder.
      holds: whether this process takes the lock for the run: host 0.
      limit: seconds that the other hosts wait for it.
    """

    def __init__(self, key: str, directory: Path, holds: bool, limit: float) -> None:
        self.key, self.directory, self._holds, self._limit = key, directory, holds, limit
        self._folder: int | None = None  # a file descriptor

    def take(self, log: Any, *, make: bool = False) -> bool:
        """Takes the lock if the folder exists and this lock is not held yet. Returns whether it was taken now.

        Args:
          make: create the folder.

        Raises:
          ValueError: another process trains in the folder. OSError: it cannot be created.
        """
        if not self._holds or self._folder is not None:
            return False
        if make:
            self.directory.mkdir(parents=True, exist_ok=True)
        try:
            folder = os.open(self.directory, os.O_RDONLY)
        except OSError:  # missing, or not a folder, which is reported when it is used
            return False
        facts = os.fstat(folder)
        if before := _HELD.get((facts.st_dev, facts.st_ino)):
            before.release()
        try:
            self._wait(folder, log)
        except BlockingIOError as error:
            os.close(folder)
            raise ValueError(
                f"{self.key} = {str(self.directory)!r}: another process trains in it; stop it or let it finish, or choose "
                f"another {self.key}"
            ) from error
        except OSError:
            os.close(folder)
            return False
        self._folder = folder
        _HELD[facts.st_dev, facts.st_ino] = self
        return True

    def _wait(self, folder: int, log: Any) -> None:
        end, said = time.monotonic() + min(_PATIENCE, self._limit / 2), False
        while True:
            try:
                return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                if not said:
                    log(f"waiting for another process that trains in {self.directory}")
                said = True
                time.sleep(_EVERY)

    def release(self) -> None:
        """Releases the lock if it is held."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def __del__(self) -> None:
        self.release()
