"""Which configuration (block sizes, warps, stages) a backend runs with: seven tiers, tried in order.

override → overlay → memory cache → persistent cache → autotune → heuristic → error. A tier is a small function that
takes the chain and a request and returns a configuration or None. Configurations are tunables only: no value of one
changes what an operation means. Importing this creates no directory; the persistent cache makes its own when it first
writes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import os
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE

from kernels._core.dispatch import DEVICE_OF_PLATFORM

if TYPE_CHECKING:
    from kernels._core.call import Call
    from kernels._core.contract import Backend, Op


@dataclass(frozen=True)
class FwdParams:
    """Tunables of a forward kernel; None leaves the choice to the configuration chain.

    Attributes:
      q_blocksize, kv_blocksize: rows of query and of key that one step handles.
      num_warps, num_stages: warps of a Triton program and depth of its software pipeline.
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{type(self).__name__}: {f.name} must be a positive integer or None, got {value!r}")


@dataclass(frozen=True)
class BwdParams(FwdParams):
    """Tunables of a backward kernel, as `FwdParams`."""


@dataclass(frozen=True)
class KernelConfig:
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


@dataclass(frozen=True)
class Request:
    """What a configuration is wanted for."""

    op: Op
    backend: Backend
    call: Call
    platform: str  # the platform that is lowered for: cpu, cuda, rocm, tpu
    override: Any = None

    @property
    def concrete(self) -> bool:
        """Whether the call has real arrays of one device: nothing is traced and nothing is a shape only."""
        leaves = jax.tree.leaves(self.call.traced())
        # Constants closed over by a jitted function are real arrays under a trace, so the arrays alone do not tell.
        return (
            not unsafe_am_i_under_a_jit_DO_NOT_USE()
            and bool(leaves)
            and all(
                not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))
                and (not isinstance(x, jax.Array) or len(x.devices()) == 1)
                for x in leaves
            )
        )

    @property
    def device_kind(self) -> str | None:
        """The kind of the local device of that platform; None where it is not the platform this process runs on."""
        here = jax.default_backend()
        if here not in (self.platform, DEVICE_OF_PLATFORM[self.platform]):
            return None
        return jax.local_devices()[0].device_kind

    def key(self) -> str:
        """Returns what a tuned configuration holds for, and for nothing else."""
        parts = {
            "device": self.device_kind,
            "op": self.op.name,
            "backend": self.backend.name,
            "version": self.backend.version,
            "package": package_version(),
            "call": self.call.signature(),
        }
        return json.dumps(parts, sort_keys=True)


def package_version() -> str:
    try:
        return metadata.version("ejdist")
    except metadata.PackageNotFoundError:
        return "source"


class ConfigCache:
    """Configurations found in this process, by request key."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return self._entries.get(key)

    def put(self, key: str, cfg: Any) -> None:
        self._entries[key] = cfg

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


# -- the seven tiers ------------------------------------------------------------------------------------------------

_NO_OVERLAY: Mapping[str, Any] = MappingProxyType({})
_overlay: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("config_overlay", default=_NO_OVERLAY)


@contextlib.contextmanager
def config_overlay(configs: Mapping[str, Any]) -> Iterator[None]:
    """Every call inside uses these configurations, by operation name or `operation/backend`."""
    token = _overlay.set({**_overlay.get(), **configs})
    try:
        yield
    finally:
        _overlay.reset(token)


def _heuristic_of(request: Request) -> Any:
    return request.backend.heuristic(request.call, request.platform) if request.backend.heuristic else None


def override_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """The configuration given with the call. It serves that call and is stored nowhere."""
    return None if request.override is None else completed(request.override, _heuristic_of(request))


def overlay_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    names = (f"{request.op.name}/{request.backend.name}", request.op.name)
    found = next((_overlay.get()[n] for n in names if n in _overlay.get()), None)
    return None if found is None else completed(found, _heuristic_of(request))


def memory_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    return chain.cache.get(request.key()) if request.device_kind else None


def persistent_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """What this machine, or another process on it, tuned before."""
    if chain.persistent is None or request.device_kind is None or request.backend.candidates is None:
        return None
    cfg = chain.persistent.get(request.key(), _heuristic_of(request))
    if cfg is not None:
        chain.cache.put(request.key(), cfg)
    return cfg


def autotune_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """Times the candidates on the call's own arrays; never under a trace, and never for a platform that is not here."""
    if not chain.autotune or request.backend.candidates is None or request.device_kind is None or not request.concrete:
        return None
    from kernels._core.tuning import tune

    cfg = tune(request)
    chain.cache.put(request.key(), cfg)
    if chain.persistent is not None:
        chain.persistent.put(request.key(), cfg)
    return cfg


def heuristic_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    return _heuristic_of(request)


def error_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    raise ValueError(
        f"{request.op.name} on {request.backend.name}: no configuration; pass cfg=, or allow the heuristic tier"
    )


TIERS: tuple[Callable[[ConfigSelectorChain, Request], Any], ...] = (
    override_tier,
    overlay_tier,
    memory_tier,
    persistent_tier,
    autotune_tier,
    heuristic_tier,
    error_tier,
)


class ConfigSelectorChain:
    """The tiers, with the caches they read.

    Args:
      cache: memory cache; a new one by default.
      persistent: `PersistentCache`, or None for none.
      autotune: whether an eager call on a device with tuning candidates may time them.
      tiers: the functions to ask, in order.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        autotune: bool = True,
        tiers: tuple[Callable, ...] = TIERS,
    ) -> None:
        self.cache = cache if cache is not None else ConfigCache()
        self.persistent, self.autotune, self.tiers = persistent, autotune, tiers

    def select(self, request: Request) -> Any:
        """Returns the configuration of the first tier that has one."""
        if request.backend.heuristic is None and request.override is None:
            return None  # a backend without tunables
        for tier in self.tiers:
            cfg = tier(self, request)
            if cfg is not None:
                return cfg
        return None


_default_chain: ConfigSelectorChain | None = None
_chain: contextvars.ContextVar[ConfigSelectorChain | None] = contextvars.ContextVar("config_chain", default=None)


def current_chain() -> ConfigSelectorChain:
    """Returns the chain in use: that of the running `Executor`, else the process's own.

    The process's own reads what was tuned before, and tunes on an accelerator only if EJDIST_AUTOTUNE=1, because a
    training job should not stop to time kernels unasked.
    """
    global _default_chain
    chain = _chain.get()
    if chain is not None:
        return chain
    if _default_chain is None:
        _default_chain = ConfigSelectorChain(
            persistent=PersistentCache(), autotune=os.environ.get("EJDIST_AUTOTUNE") == "1"
        )
    return _default_chain


@contextlib.contextmanager
def use_chain(chain: ConfigSelectorChain) -> Iterator[None]:
    """Calls inside choose their configurations by this chain."""
    token = _chain.set(chain)
    try:
        yield
    finally:
        _chain.reset(token)


def select(request: Request) -> Any:
    return current_chain().select(request)
