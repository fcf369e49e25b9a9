"""The locks of a run: of its folders (`run_lock`), and of a folder of a bucket.

A bucket's owner is an object, which is made and replaced only in the place of the generation that was seen: one of several
processes succeeds. It is renewed by another generation. The store's clock dates them all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ejdist.buckets import BucketPath, Unreachable, reason_of
from ejdist.cluster.hosts import Hosts
from ejdist.paths import is_url, place
from ejdist.training.run_lock import OWNER, Lock, Owner

_TIMEOUT = 10.0  # seconds for an answer
_PATIENT = 30.0  # seconds in which a request is sent again


class BucketLock(Lock):
    """The ownership of a folder of a bucket. Where the bucket cannot be reached or written, nobody owns it: a check of the
    bucket itself says why."""

    directory: BucketPath
    _candidate: Owner

    def __init__(self, key: str, directory: BucketPath, holds: bool, limit: float) -> None:
        super().__init__(key, directory, holds, limit)
        self._turn = threading.Lock()  # the thread that renews has the same client
        self._generation = 0  # of the owner, as last seen or written
        self._began: tuple[float, float] | None = None  # the store's clock, and ours at that moment

    def take(self, log: Any, *, make: bool = False) -> bool:
        """As `Lock.take`, whether or not there is anything in the folder yet."""
        try:
            return super().take(log)
        except OSError as error:
            if make or error.errno != errno.ENOENT:
                raise
            return False

    def check(self) -> None:
        """As `Lock.check`. Where the store does not answer, the save that follows says so."""
        with contextlib.suppress(OSError):
            super().check()

    def _identity(self) -> Any:
        return str(self.directory)

    def _offer(self, candidate: Any, me: Owner) -> None:
        self._candidate, self._began = me, None

    def _claim(self, candidate: Any) -> bool:
        return self._write(self._candidate, 0)

    def _withdraw(self, candidate: Any) -> None:
        pass

    def _take_over(self, candidate: Any, owner: Owner, log: Any) -> bool:
        if not self._write(self._candidate, self._generation):
            return False
        log(f"{self.directory} belonged to {owner}, which is gone")
        return True

    def _restore(self) -> bool:
        return self._mine is not None and self._write(self._mine, 0)

    def renew(self) -> None:
        """Shows that this process lives."""
        with contextlib.suppress(OSError):  # the store may be away; the next time may succeed
            owner, _ = self._look()
            if owner is None:
                self._restore()
            elif self._mine is not None and owner.id == self._mine.id:
                self._write(self._mine, self._generation)

    def release(self) -> None:
        self._ended.set()
        mine, self._mine = self._mine, None
        if mine is not None:
            with contextlib.suppress(OSError):  # nobody waits for a network that is gone
                self._call(functools.partial(self._delete, mine), seconds=0)

    def _delete(self, mine: Owner, blob: Any, **how: Any) -> None:
        owner, _ = self._read(blob, **how)
        if owner is not None and owner.id == mine.id:
            blob.delete(if_generation_match=self._generation, **how)

    def _now(self, candidate: Any) -> float:
        if self._began is None:
            blob = self._blob(f"{OWNER}-{self._candidate.id}")
            self._call(lambda _, **how: blob.upload_from_string(b"", if_generation_match=0, **how))
            self._began = blob.updated.timestamp(), time.monotonic()
            with contextlib.suppress(OSError):
                self._call(lambda _, **how: blob.delete(**how))
        there, here = self._began
        return there + time.monotonic() - here

    def _look(self) -> tuple[Owner | None, float]:
        return self._call(self._read)

    def _read(self, blob: Any, **how: Any) -> tuple[Owner | None, float]:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        while True:
            blob = blob.bucket.blob(blob.name)  # of no generation yet
            try:
                blob.reload(**how)
            except NotFound:
                return None, 0.0
            try:
                text = blob.download_as_bytes(if_generation_match=blob.generation, **how)
                break
            except (NotFound, PreconditionFailed):  # it was renewed in between
                continue
        self._generation = blob.generation
        try:
            return Owner(**json.loads(text)), blob.updated.timestamp()
        except (ValueError, TypeError):  # another program wrote it
            return Owner("", "", 0, "", ""), blob.updated.timestamp()

    def _write(self, owner: Owner, generation: int) -> bool:
        """Writes the owner in the place of a generation (0: of none); returns False if another one is there."""
        from google.api_core.exceptions import PreconditionFailed

        def write(blob: Any, **how: Any) -> bool:
            try:
                blob.upload_from_string(json.dumps(asdict(owner)), if_generation_match=generation, **how)
            except PreconditionFailed:
                there, _ = self._read(blob, **how)
                # A request whose answer was lost is sent again, and finds what it wrote.
                return generation == 0 and there is not None and there.id == owner.id
            self._generation = blob.generation
            return True

        return self._call(write)

    @functools.cached_property
    def _client(self) -> Any:
        from google.cloud import storage

        return storage.Client()

    def _blob(self, name: str) -> Any:
        bucket, _, folder = str(self.directory)[5:].partition("/")
        return self._client.bucket(bucket).blob(f"{folder}/{name}")

    def _call(self, function: Any, seconds: float | None = None) -> Any:
        """Returns the result of a function of the owner's object, called with how long its requests may take.

        Raises:
          OSError: the store refuses, or cannot be reached for so many seconds.
        """
        from google.api_core.exceptions import RetryError
        from google.auth.exceptions import TransportError
        from google.cloud.storage.retry import DEFAULT_RETRY
        from requests.exceptions import RequestException

        away = (RetryError, TransportError, RequestException, ConnectionError, TimeoutError)
        try:
            with self._turn:
                seconds = _PATIENT if seconds is None else seconds
                retry = DEFAULT_RETRY.with_timeout(seconds) if seconds else None
                return function(self._blob(OWNER), timeout=_TIMEOUT, retry=retry)
        except Exception as error:
            code = getattr(error, "code", None) or 0
            number = {403: errno.EACCES, 404: errno.ENOENT}.get(code, errno.EIO)
            kind = Unreachable if code in (408, 429) or code >= 500 or isinstance(error, away) else OSError
            raise kind(number, reason_of(error)[1], str(self.directory)) from error


def locks_of(run_dir: Path, checkpoint_dir: str | None, hosts: Hosts) -> list[Lock]:
    """Returns the locks, none of which is taken, of the folders of a run.

    Raises:
      ValueError: checkpoint.dir is run.dir, or what reads and writes a bucket is not installed.
    """
    folders = [("run.dir", run_dir)]
    bucket = checkpoint_dir is not None and is_url(checkpoint_dir)
    if checkpoint_dir is not None and not bucket:
        folder = Path(checkpoint_dir).expanduser()
        if folder.resolve() == run_dir.resolve():
            raise ValueError(
                f"checkpoint.dir = {checkpoint_dir!r} is run.dir, but a checkpoint folder must hold nothing else; leave it "
                "out to save to run.dir/checkpoints"
            )
        folders.append(("checkpoint.dir", folder))
        # It may be another run's default folder, whose run.dir is then locked too.
        if folder.name == "checkpoints" and folder.resolve().parent != run_dir.resolve():
            folders.append(("checkpoint.dir", folder.parent))
    locks = [Lock(key, folder, hosts.index == 0, hosts.limit) for key, folder in folders]
    if checkpoint_dir is not None and bucket:
        place("checkpoint.dir", checkpoint_dir)
        locks.append(BucketLock("checkpoint.dir", BucketPath(checkpoint_dir), hosts.index == 0, hosts.limit))
    return locks
