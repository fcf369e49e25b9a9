"""Files in a bucket of Google Cloud Storage, read by ranges through gcsfs.

A `BucketPath` has what this project uses of `pathlib.Path`, so that one function reads both. Every failure is an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ejdist.paths import check_home, check_installed, check_object, is_url, without_listings

_CHUNK = 8 << 20  # bytes of a request of a file that is read in order
_REQUESTS = 16  # at once


class Unreachable(OSError):
    """The store does not answer, or says that it is busy, for longer than gcsfs asks again: a later start may find it."""


class BucketPath:
    """An object of a bucket, or what would be a folder: the objects whose names begin so.

    Attributes:
      url: gs://BUCKET/NAME. generation: of the object; reading fails once that has been replaced. None: the newest.
    """

    def __init__(self, url: str, generation: int | None = None) -> None:
        self.url, self.generation = f"gs://{url[5:].rstrip('/')}", generation

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"BucketPath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and (self.url, self.generation) == (other.url, other.generation)

    def __hash__(self) -> int:
        return hash((self.url, self.generation))

    def __lt__(self, other: BucketPath) -> bool:
        return self.url.split("/") < other.url.split("/")

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return posixpath.basename(self.url)

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> BucketPath:
        return BucketPath(posixpath.dirname(self.url))

    def absolute(self) -> BucketPath:
        return self

    resolve = expanduser = absolute

    def at(self, generation: int) -> BucketPath:
        """Returns this object as it is now, whatever replaces it."""
        return BucketPath(self.url, generation)

    def relative_to(self, folder: BucketPath) -> str:
        return self.url.removeprefix(f"{folder.url}/")

    def _info(self) -> dict[str, Any]:
        with _reaching(self.url):
            return _files().info(self.url)

    def stat(self) -> Any:
        """Returns st_size, and st_mtime_ns and st_ctime_ns, which are the object's generation: another content has another.

        Raises:
          OSError: there is no such object.
        """
        info = self._info()
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.url)
        generation = int(info["generation"])
        return SimpleNamespace(st_size=int(info["size"]), st_mtime_ns=generation, st_ctime_ns=generation)

    def _type(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._info()["type"]
        return ""

    def exists(self) -> bool:
        return self._type() != ""

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def iterdir(self) -> Iterator[BucketPath]:
        with _reaching(self.url):
            names = _files().ls(self.url, detail=False)
        yield from (BucketPath(f"gs://{name}") for name in names if name.rstrip("/") != self.url[5:])

    def glob(self, pattern: str) -> list[BucketPath]:
        """Returns the objects whose names fit the pattern, below this one. As in a shell, `*` passes over names with a dot in
        front."""
        with _reaching(self.url):
            found: dict[str, dict[str, Any]] = _files().glob(f"{self.url}/{pattern}", detail=True)
        names = [name for name, info in found.items() if info["type"] == "file" and not name.endswith("/")]
        below = {name: name.removeprefix(f"{self.url[5:]}/").split("/") for name in names}
        return sorted(BucketPath(f"gs://{name}") for name in names if not any(p.startswith(".") for p in below[name]))

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Returns the object as a file, of which a few MiB are in memory."""
        assert mode == "rb"
        facts = self.stat()
        return io.BufferedReader(_Raw(self.at(self.generation or facts.st_mtime_ns), facts.st_size), _CHUNK)

    def read_ranges(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes [begin, end) of each span, which are requested at once; fewer where the object ends before."""
        begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
        how = {} if self.generation is None else {"generation": str(self.generation)}
        with _reaching(self.url):
            return _files().cat_ranges(
                [self.url] * len(spans), begins, ends, batch_size=_REQUESTS, on_error="raise", **how
            )


class _Raw(io.RawIOBase):
    """An object as a file without a buffer: each read is a request."""

    def __init__(self, path: BucketPath, size: int) -> None:
        self._path, self._size, self._place = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        content = self._read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._read(self._size)

    def _read(self, most: int) -> bytes:
        begin, end = self._place, min(self._place + most, self._size)
        spans = [(at, min(at + _CHUNK, end)) for at in range(begin, end, _CHUNK)]
        content = b"".join(self._path.read_ranges(spans)) if spans else b""
        if len(content) != max(0, end - begin):
            raise OSError(errno.EIO, f"{end - begin} bytes were asked for, and {len(content)} came", str(self._path))
        self._place += len(content)
        return content


def source_path(key: str, value: str) -> Any:
    """Returns the file or folder that a key names, to be read: a `Path`, or the `BucketPath` of gs://BUCKET/NAME.

    Raises:
      ValueError: it is another URL, or what reads a bucket is not installed; or an unknown user's home.
    """
    if not is_url(value):
        check_home(key, value)
        return Path(value).expanduser()
    check_object(key, value)
    check_installed(key, value, ("gcsfs",))
    return BucketPath(value)


def path_of(text: str) -> Any:
    """Returns the `Path` or `BucketPath` of a text that has been checked before."""
    return BucketPath(text) if is_url(text) else Path(text)


def at_once[T](function: Callable[..., T], paths: Sequence[Any], *more: Sequence[Any]) -> list[T]:
    """Returns the result of a function for each path and what belongs to it; objects of a bucket, which take a request each,
    are asked for at once."""
    if not any(isinstance(path, BucketPath) for path in paths):
        return list(map(function, paths, *more))
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(function, paths, *more))


def read_part(path: Any, begin: int, end: int) -> bytes:
    """Returns the bytes [begin, end) of a file or an object; fewer where it ends before."""
    if isinstance(path, BucketPath):
        return path.read_ranges([(begin, end)])[0]
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _files() -> Any:
    import fsspec

    without_listings()
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the traceback of what is raised anyway
    return fsspec.filesystem("gcs")


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turns whatever the libraries raise into an OSError, `Unreachable` if it may pass."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from error
    except Exception as error:
        from gcsfs.retry import is_retriable

        number, reason = reason_of(error)
        passing = is_retriable(error) or isinstance(error, (ConnectionError, TimeoutError))
        raise (Unreachable if passing else OSError)(number, reason, url) from error


def is_unreachable(error: BaseException | None) -> bool:
    """Returns whether an error comes from a store that could not be reached."""
    while error is not None and not isinstance(error, Unreachable):
        error = error.__cause__
    return error is not None


def reason_of(error: Exception) -> tuple[int, str]:
    """Returns (number, reason in one line) of what went wrong at a bucket."""
    lines = [line for line in str(error).splitlines() if line]
    if lines and lines[0].startswith("Forbidden: "):  # gcsfs has a URL there, and who lacks what after it
        return errno.EACCES, (lines[1:] or lines)[0]
    return getattr(error, "errno", None) or errno.EIO, (lines or [type(error).__name__])[0]
