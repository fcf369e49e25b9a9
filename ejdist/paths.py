"""Where a run may keep things: folders, and for checkpoints a bucket of Google Cloud Storage too."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etils import epath

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# What is left to do where a folder holds another run.
ELSEWHERE = "choose another run.dir, and checkpoint.dir if the recipe names one"
_MOUNT = "mount the bucket and give the folder where it is mounted"


def is_url(text: str) -> bool:
    """Returns whether a key's value is written as a URL."""
    return _URL.match(text) is not None


def is_step(name: str) -> bool:
    """Returns whether this is a checkpoint's name, its step: 6, but not 06, which another program wrote, nor ²."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def check_home(key: str, value: str) -> None:
    """Raises ValueError if a path begins with ~NAME of a user that this machine does not know."""
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{key} = {value!r}: there is no such user here; give the whole path") from error


def check_folder(key: str, value: str | None, remedy: str = _MOUNT) -> None:
    """Raises ValueError if the value of a key that takes a file or a folder is a URL, which would pass for a folder of that
    name, or is in the home of an unknown user. Call it before the value is used."""
    if value is not None and is_url(value):
        raise ValueError(f"{key} = {value!r} is a URL, and this key takes a path of this machine: {remedy}")
    if value is not None:
        check_home(key, value)


def check_place(key: str, value: str) -> None:
    """Raises ValueError for a place to which no checkpoint can be written, whatever is installed."""
    if not value.strip():
        raise ValueError(f"{key} is empty: name a folder, or leave it out")
    match = _URL.match(value)
    if match is None:
        check_home(key, value)
        return
    scheme = match.group(1).lower()
    if scheme != "gs":
        why = (
            " (TensorStore has a driver for S3, which Orbax never opens: it takes the URL for a folder)"
            if scheme == "s3"
            else ""
        )
        raise ValueError(
            f"{key} = {value!r}: Orbax writes checkpoints to folders and to gs://BUCKET/FOLDER, and not to {scheme}://{why}; "
            "give one of these, or a folder of a shared file system"
        )
    if not re.match(r"gs://[^/]+/.*[^/]", value):
        raise ValueError(f"{key} = {value!r} names no folder of a bucket: write gs://BUCKET/FOLDER")


def place(key: str, value: str) -> epath.Path:
    """Returns the place of checkpoints that a key names: a folder, or gs://BUCKET/FOLDER.

    Raises:
      ValueError: it is another URL, or the library that reads and writes it is not installed.
    """
    from etils import epath

    check_place(key, value)
    if not is_url(value):
        return epath.Path(value).expanduser().absolute()
    check_installed(key, value, ("gcsfs", "google.cloud.storage"))
    without_listings()
    return epath.Path(f"gs://{value[5:].rstrip('/')}")


def check_object(key: str, value: str) -> None:
    """Raises ValueError for a URL of another kind than gs://BUCKET/NAME."""
    if not value.startswith("gs://"):
        raise ValueError(
            f"{key} = {value!r} is a URL, and this key takes a path of this machine, or gs://BUCKET/NAME: {_MOUNT}"
        )
    if not re.match(r"gs://[^/]+/.*[^/]", value):
        raise ValueError(f"{key} = {value!r} names nothing in a bucket: write gs://BUCKET/NAME")


def check_installed(key: str, value: str, packages: Sequence[str]) -> None:
    """Raises ValueError if a package that reads and writes a bucket is missing."""
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise ValueError(
            f"{key} = {value!r} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'ejdist[gcs]'"
        )


def without_listings() -> None:
    """Lets gcsfs keep no listing: a kept one would lack what TensorStore and other hosts write."""
    import fsspec

    settings: dict[str, Any] = fsspec.config.conf
    for name in ("gs", "gcs"):
        settings.setdefault(name, {}).setdefault("use_listings_cache", False)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
