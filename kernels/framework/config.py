"""Configurations: the tunables of kernels (block sizes, warps, stages), and the caches that store them.

A configuration never changes what an operation computes. Importing this module creates no directory; the persistent
cache creates its own on the first write. `select.py` decides which configuration a call runs with.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


class Tunables:
    """Base of configurations and their parts: a dataclass that checks that values have the declared types and that
    integers are positive.

    Raises:
      ValueError: a value has another type, or is not positive.
    """

    def __post_init__(self) -> None:
        for name, types in _declared(type(self)):
            value = getattr(self, name)
            # The exact class, not a subclass (a bool is not an int), except for strings: `Platform` is a str.
            fits = type(value) in types or (str in types and isinstance(value, str))
            if not fits or (type(value) is int and value < 1):
                what = " or ".join(_WORDS.get(t, f"a {t.__name__}") for t in types)
                raise ValueError(f"{type(self).__name__}: {name} must be {what}, got {value!r}")


_WORDS = {int: "a positive integer", bool: "True or False", str: "a string", type(None): "None"}


@functools.cache
def _declared(cls: type) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Returns the fields of a dataclass, each with the types that its value may have."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, typing.get_args(hints[f.name]) or (hints[f.name],)) for f in dataclasses.fields(cls))


@dataclass(frozen=True)
class FwdParams(Tunables):
    """Tunables of a forward kernel; None leaves the choice to the configuration chain.

    Attributes:
      q_blocksize, kv_blocksize: rows of queries and of keys per step.
      num_warps, num_stages: warps of a Triton program and depth of its software pipeline. Other backends ignore them,
        so one configuration can serve several backends.
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclass(frozen=True)
class BwdParams(FwdParams):
    """Tunables of a backward kernel; see `FwdParams`.

    Attributes:
      shares: into how many programs the query heads of a key head are dealt, of those that divide them; None: as many as are
        expected to be fastest. Only the Hopper backward of attention reads it.
    """

    shares: int | None = None


@dataclass(frozen=True)
class KernelConfig(Tunables):
    """Configuration of an operation whose kernels are tuned by `FwdParams` and `BwdParams`.

    Attributes:
      fwd_params, bwd_params: tunables of the two directions.
      platform: "auto", or a toolchain or backend name, like the argument `platform` of a call.
      backend: "any", or the kind of device to consider ("gpu", "tpu", "cpu").
    """

    fwd_params: FwdParams = field(default_factory=FwdParams)
    bwd_params: BwdParams = field(default_factory=BwdParams)
    platform: str = "auto"
    backend: str = "any"


def package_version() -> str:
    try:
        return metadata.version("ejdist")
    except metadata.PackageNotFoundError:
        return "source"


class ConfigCache:
    """Configurations selected in this process, by request key. `version` increases with every `put`."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self.version = 0

    def get(self, key: str) -> Any:
        return self._entries.get(key)

    def put(self, key: str, cfg: Any) -> None:
        self._entries[key] = cfg
        self.version += 1

    def __len__(self) -> int:
        return len(self._entries)


class PersistentCache:
    """Configurations stored as one small JSON file each, written atomically; the first write creates the directory.

    Args:
      directory: default `$EJDIST_CACHE_DIR/tuning`, else `~/.cache/ejdist/tuning`.
    """

    def __init__(self, directory: str | os.PathLike | None = None) -> None:
        self._directory = Path(directory) if directory is not None else None

    @property
    def directory(self) -> Path:
        if self._directory is not None:
            return self._directory
        root = os.environ.get("EJDIST_CACHE_DIR")
        return (Path(root) if root else Path.home() / ".cache" / "ejdist") / "tuning"

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def get(self, key: str, like: Any) -> Any:
        """Returns the stored configuration, of the type of `like`; None if it is missing or unreadable."""
        path = self._path(key)
        try:
            stored = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"ignoring unreadable tuning file {path}: {error}", stacklevel=2)
            return None
        try:
            return decode(type(like), stored["config"]) if stored["key"] == key else None
        except (KeyError, TypeError, ValueError) as error:
            warnings.warn(
                f"ignoring tuning file {path}, which does not hold a {type(like).__name__}: {error}", stacklevel=2
            )
            return None

    def put(self, key: str, cfg: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": key, "config": dataclasses.asdict(cfg)}, indent=1)
        handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as f:
                f.write(text)
            os.replace(temporary, self._path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def decode(cls: type, data: Mapping[str, Any]) -> Any:
    """Returns the configuration dataclass from the dict that `dataclasses.asdict` made of it."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    if set(data) != names:
        raise ValueError(f"expected fields {sorted(names)}, got {sorted(data)}")
    return cls(**{n: decode(hints[n], v) if dataclasses.is_dataclass(hints[n]) else v for n, v in data.items()})


def completed(partial: Any, full: Any) -> Any:
    """Returns `partial` with its None fields filled in from `full`, recursively."""
    if partial is None:
        return full
    if not dataclasses.is_dataclass(partial) or not dataclasses.is_dataclass(full):
        return partial
    return dataclasses.replace(
        partial,
        **{
            f.name: completed(getattr(partial, f.name), getattr(full, f.name))
            for f in dataclasses.fields(partial)
            if hasattr(full, f.name)
        },
    )
