"""One run at a time in a run.dir, and in a checkpoint.dir: two would write over each other's metrics, and remove each other's
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

# Seconds that a process of before, which is ending, has to let go: one that was told to stop may still write its checkpoint.
_PATIENCE = 60.0
_EVERY = 0.5
# (device, inode) of a folder -> who has it in this process, which has one run at a time.
_HELD: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def release_locks_at_exit() -> Iterator[None]:
    """Lets go of all folders that this process has when the run ends: what was of it may be in memory for longer."""
    try:
        yield
    finally:
        for lock in list(_HELD.values()):
            lock.release()


class Lock:
    """A folder of a run that is made. The kernel lets go of it when the process ends, however it does.

    It is a lock (flock) of the folder itself, so nothing is written. Where a file system has none for folders, as NFS, nothing
    is known of others, and nothing refused.

    Args:
      key: of the recipe, which names the folder.
      holds: whether this process is the one of the run's that takes it: host 0.
      limit: seconds that the other hosts wait for what it finds.
    """

    def __init__(self, key: str, directory: Path, holds: bool, limit: float) -> None:
        self.key, self.directory, self._holds, self._limit = key, directory, holds, limit
        self._folder: int | None = None  # a file descriptor

    def take(self, log: Any, *, make: bool = False) -> bool:
        """Takes the folder, if it is there and not taken yet. Returns whether it was taken now.

        Args:
          make: make the folder.

        Raises:
          ValueError: another process trains in it. OSError: it cannot be made.
        """
        if not self._holds or self._folder is not None:
            return False
        if make:
            self.directory.mkdir(parents=True, exist_ok=True)
        try:
            folder = os.open(self.directory, os.O_RDONLY)
        except OSError:  # it is not there, or it is no folder, which whoever looks into it says
            return False
        facts = os.fstat(folder)
        if before := _HELD.get((facts.st_dev, facts.st_ino)):
            before.release()
        try:
            self._wait(folder, log)
        except BlockingIOError as error:
            os.close(folder)
            raise ValueError(
                f"{self.key} = {str(self.directory)!r}: another process trains in it; let that end, or stop it, or choose "
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
        """Lets go of the folder, if it was taken."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def __del__(self) -> None:
        self.release()
