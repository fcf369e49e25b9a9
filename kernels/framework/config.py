"""Configurations: the tunables of kernels (block sizes, warps, stages), and where they are kept.

No value of one changes what an operation means. Importing this creates no directory; the persistent cache makes its own
when it first writes. Which configuration a call runs with is decided in `select.py`.
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
    """What a configuration is, and each part of one: a dataclass whose values are of its declared types, integers positive.

    Raises:
      ValueError: a value is not.
    """

    def __post_init__(self) -> None:
        for name, types in _declared(type(self)):
            value = getattr(self, name)
            # Of a class that is declared, not one made of it, but for strings: `Platform` is one.
            fits = type(value) in types or (str in types and isinstance(value, str))
            if not fits or (type(value) is int and value < 1):
                what = " or ".join(_WORDS.get(t, f"a {t.__name__}") for t in types)
                raise ValueError(f"{type(self).__name__}: {name} must be {what}, got {value!r}")


_WORDS = {int: "a positive integer", bool: "True or False", str: "a string", type(None): "None"}


@functools.cache
def _declared(cls: type) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Returns the names of a dataclass, with the types that a value may be of."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, typing.get_args(hints[f.name]) or (hints[f.name],)) for f in dataclasses.fields(cls))


@dataclass(frozen=True)
class FwdParams(Tunables):
    """Tunables of a forward kernel; None leaves the choice to the configuration chain.

    Attributes:
      q_blocksize, kv_blocksize: rows of query and of key that one step handles.
      num_warps, num_stages: warps of a Triton program and depth of its software pipeline; other backends have none, and a
        configuration that is to serve on several may say them all the same.
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclass(frozen=True)
class BwdParams(FwdParams):
    """Tunables of a backward kernel, as `FwdParams`."""


@dataclass(frozen=True)
class KernelConfig(Tunables):
    """Configuration of an operation whose kernels are tuned by `FwdParams` and `BwdParams`.

    Attributes:
      fwd_params, bwd_params: tunables of the two directions.
      platform: "auto", or a toolchain or backend name, as the argument `platform` of the call.
      backend: "any", or the device that it is for ("gpu", "tpu", "cpu").
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
    """Configurations found in this process, by request key. `version` changes whenever one is put in."""

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
    """Configurations kept as one small JSON file each, written atomically; made when the first one is written.

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
        """Returns the stored configuration, of the type of `like`; None if there is none or it cannot be read."""
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
    """Returns the configuration dataclass that `dataclasses.asdict` was taken of."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    if set(data) != names:
        raise ValueError(f"fields {sorted(data)} instead of {sorted(names)}")
    return cls(**{n: decode(hints[n], v) if dataclasses.is_dataclass(hints[n]) else v for n, v in data.items()})


def completed(partial: Any, full: Any) -> Any:
    """Returns `partial` with the fields that are None taken from `full`, nested dataclasses likewise."""
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
