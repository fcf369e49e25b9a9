"""Folders of a cache that are whole or not there, and whose bytes are verified each time they are opened.

A folder is written beside its place and renamed into it: a build that fails, is killed, or runs in two processes at once leaves
nothing half-done under the folder's name. `meta.json` keeps a CRC-32 of every block of every file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22  # bytes under one checksum
_DEAD_AFTER = 24 * 3600  # seconds without a write, after which a build is taken for killed
_REMEDY = "set data.cache_dir (or $EJDIST_CACHE_DIR) to a writable folder with enough space"


class Damaged(Exception):
    """A folder does not have the bytes that were written; the message says which file."""


class NewFolder:
    """A folder that is being made; `file` writes into it, and `facts` are kept with it.

    Attributes:
      facts: what can be written as JSON; `open_folder` returns it.
      block: bytes under one checksum.
    """

    def __init__(self, path: Path, block: int) -> None:
        self.path, self.block = path, block
        self.facts: dict[str, Any] = {}
        self.files: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[NewFile]:
        """Yields a new file of the folder, to be written in order."""
        with open(self.path / name, "wb") as out:
            new = NewFile(out, self.block)
            yield new
        self.files[name] = {"size": new.size, "checksums": new.checksums}

    def seal(self) -> None:
        content = {"facts": self.facts, "files": self.files}
        meta = {"content": content, "checksum": checksum_of(content)}
        (self.path / "meta.json").write_text(json.dumps(meta))


class NewFile:
    """Bytes written in order, and the checksum of each block of them."""

    def __init__(self, out: Any, block: int) -> None:
        self.size, self.checksums = 0, []
        self._out, self._block = out, block

    def write(self, data: bytes) -> None:
        self._out.write(data)
        view = memoryview(data)
        while len(view):
            filled = self.size % self._block
            if not filled:
                self.checksums.append(0)
            part = view[: self._block - filled]
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self.size += len(part)
            view = view[len(part) :]


@contextlib.contextmanager
def new_folder(
    folder: Path, *, what: str = "the corpus cache", remedy: str = _REMEDY, block: int | None = None
) -> Iterator[NewFolder]:
    """Yields the folder to write. It appears under its name when the body has ended, and not at all if that fails.

    If another process has made it in the meantime, theirs is kept: the same name means the same content.

    Args:
      what, remedy: what an error calls the folder, and what it advises.
      block: bytes under one checksum; default: 4 MiB, for what is verified as a whole.

    Raises:
      OSError: it cannot be written; nothing is left of it.
    """
    temporary = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(folder.parent)
        temporary.mkdir()
        new = NewFolder(temporary, block or _BLOCK)
        yield new
        new.seal()
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"cannot write {what} {folder}: {reason}; nothing was left behind; {remedy}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_folder(folder: Path) -> dict[str, Any] | None:
    """Returns the facts of a folder, all of whose bytes are as they were written; None if there is none.

    A damaged folder is removed with a warning, and None returned, so that it is made again. The cost is one sequential read of
    all files: the speed of the disk, or once in memory some GB/s for each of up to eight threads. A corpus of 10 G tokens
    (20 GB at two bytes each) takes seconds at each start. Damage that comes after the start is not noticed.

    Raises:
      OSError: it is there but cannot be read, or is damaged and cannot be removed.
    """
    try:
        seen = _identity(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(folder, error) from error
    try:
        return _verified(folder)
    except Damaged as damage:
        warnings.warn(f"the corpus cache {folder} is damaged ({damage}): removed, to be rebuilt", stacklevel=2)
    except OSError as error:
        raise _unreadable(folder, error) from error
    _discard(folder, seen)
    return None


def _unreadable(folder: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        error.errno,
        f"cannot read the corpus cache {folder}: {reason}; make it readable, or set data.cache_dir to another folder",
    )


def checksum_of(content: Any) -> int:
    """Returns the CRC-32 of what can be written as JSON."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def sealed(path: Path) -> Any:
    """Returns the content of a file {"content": ..., "checksum": ...}, as `meta.json` is one.

    Raises:
      Damaged: it is missing, or is not what was written. OSError: it cannot be read.
    """
    try:
        meta = json.loads(path.read_bytes())
        content, checksum = meta["content"], meta["checksum"]
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path.name} is not what was written") from None
    if checksum_of(content) != checksum:
        raise Damaged(f"{path.name} does not hold the bytes that were written")
    return content


def _verified(folder: Path) -> dict[str, Any]:
    content = sealed(folder / "meta.json")
    try:
        for name, facts in content["files"].items():
            _verify(folder / name, facts["size"], facts["checksums"])
        return content["facts"]
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from None
    except (KeyError, TypeError, AttributeError):
        raise Damaged("meta.json is not what was written") from None


def _verify(path: Path, size: int, checksums: list[int]) -> None:
    with open(path, "rb") as f:
        file_size = os.fstat(f.fileno()).st_size
        if file_size != size:
            raise Damaged(f"{path.name} has {file_size} bytes, not {size}")

        # Read, not mapped: a disk that fails gives an error then, and not a signal that ends the process.
        def checksum(block: int) -> int:
            return zlib.crc32(os.pread(f.fileno(), _BLOCK, block * _BLOCK))

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for block, crc in enumerate(threads.map(checksum, range(len(checksums)))):
                if crc != checksums[block]:
                    end = min((block + 1) * _BLOCK, size)
                    raise Damaged(
                        f"{path.name} does not hold the bytes that were written, from {block * _BLOCK} to {end}"
                    )


def _identity(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_ino, stat.st_mtime_ns  # the number alone may be given again


def _discard(folder: Path, seen: tuple[int, int]) -> None:
    """Removes the folder if it still is the one that was seen: another process may have made it again."""
    aside = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        if _identity(folder) == seen:
            os.rename(folder, aside)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot remove the damaged corpus cache {folder}: {reason}; {_REMEDY}") from error
    shutil.rmtree(aside, ignore_errors=True)


def _remove_dead(parent: Path) -> None:
    """Removes what killed builds have left. A living one writes all the time, so its age tells, on any host."""
    for kind in ("corpus", "tokenizer", "shard", "rows"):
        for left in parent.glob(f"{kind}-*.tmp"):
            # Another process may finish or remove it while it is looked at.
            with contextlib.suppress(OSError):
                last = max(p.stat().st_mtime for p in (left, *left.iterdir()))
                if time.time() - last > _DEAD_AFTER:
                    shutil.rmtree(left, ignore_errors=True)
