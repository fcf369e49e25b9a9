"""A registry of implementations by algorithm, platform and backend, with priorities.

It contains every operation of `kernels`, with each backend under (platform, backend); add others with
`kernel_registry.register`. Without a platform, `get` returns the best implementation for the device that this process
runs on, never one for another device.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.framework.platforms import DEVICE_OF_PLATFORM, Unsupported


class Platform(enum.StrEnum):
    """The toolchain that an implementation is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDNN = "cudnn"
    CUDA = "cuda"
    XLA = "xla"
    COMPOSED = "composed"  # built from other operations, each dispatched on its own


class DeviceKind(enum.StrEnum):
    """The kind of device that an implementation runs on; in the public interface it is called `Backend`."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


@dataclass(frozen=True)
class Entry:
    """One registered implementation."""

    algorithm: str
    platform: Platform
    backend: DeviceKind
    priority: int
    function: Callable

    def runs_on(self, device: str) -> bool:
        return self.backend is DeviceKind.ANY or self.backend == device


# In a registry `list` is a method.
Entries = list[Entry]
Names = list[str]


def _member(kind: type[enum.StrEnum], value: Any, argument: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"argument {argument!r} = {value!r}: use one of {', '.join(kind)}") from None


class KernelRegistry:
    """Implementations by name. `functions` returns the initial ones: name -> public function."""

    def __init__(self, functions: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._functions, self._added = functions, []

    def register(
        self, algorithm: str, platform: Platform | str, backend: DeviceKind | str = DeviceKind.ANY, priority: int = 0
    ) -> Callable[[Callable], Callable]:
        """Returns a decorator that adds an implementation. Higher priorities are preferred.

        Raises:
          ValueError: the same (algorithm, platform, backend, priority) is registered already.
        """
        platform, backend = _member(Platform, platform, "platform"), _member(DeviceKind, backend, "backend")

        def add(function: Callable) -> Callable:
            new = Entry(algorithm, platform, backend, priority, function)
            for old in self._added:
                if (old.algorithm, old.platform, old.backend, old.priority) == (algorithm, platform, backend, priority):
                    raise ValueError(
                        f"{algorithm!r} on {platform}/{backend} with priority {priority} is registered already "
                        f"({old.function.__module__}.{old.function.__qualname__}); use another priority"
                    )
            self._added.append(new)
            return function

        return add

    def _entries(self, algorithm: str) -> Entries:
        entries = [i for i in self._added if i.algorithm == algorithm]
        declared = self._functions().get(algorithm)
        if declared is not None:
            for rank, b in enumerate(reversed(declared.op.backends.values())):
                devices = {DEVICE_OF_PLATFORM[p] for p in b.platforms}
                device = DeviceKind.ANY if len(devices) > 1 else DeviceKind(devices.pop())
                function = functools.partial(declared, platform=b.name)
                entries.append(Entry(algorithm, Platform(b.toolchain), device, 10 * rank, function))
        return sorted(entries, key=lambda i: -i.priority)

    def algorithms(self) -> Names:
        """Returns all registered names, sorted."""
        return sorted({i.algorithm for i in self._added} | set(self._functions()))

    def list(self, algorithm: str) -> Entries:
        """Returns the entries of an algorithm, preferred ones first."""
        return self._entries(algorithm)

    def get(
        self, algorithm: str, platform: Platform | str | None = None, backend: DeviceKind | str | None = None
    ) -> Callable:
        """Returns the preferred implementation that matches.

        Without platform and backend, that is the best one for the device this process runs on. One requested by name is
        returned wherever the process runs, since a program may be compiled for another device, and never replaced.

        Raises:
          ValueError: no such algorithm. Unsupported: no implementation matches; the message lists those that exist.
        """
        everything = self._entries(algorithm)
        if not everything:
            raise ValueError(f"unknown algorithm {algorithm!r}; there are {', '.join(self.algorithms())}")
        matching = everything
        if platform is not None:
            member = _member(Platform, platform, "platform")
            matching = [i for i in matching if i.platform is member]
        if backend is not None:
            kind = _member(DeviceKind, backend, "backend")
            matching = [i for i in matching if i.backend is kind or (kind is not DeviceKind.ANY and i.runs_on(kind))]
        if platform is None and backend is None:
            import jax

            device = DEVICE_OF_PLATFORM.get(jax.default_backend(), jax.default_backend())
            matching = [i for i in matching if i.runs_on(device)]
        if not matching:
            available = ", ".join(f"{i.platform}/{i.backend}" for i in everything)
            requested = "/".join(str(x) for x in (platform, backend) if x is not None) or "this device"
            raise Unsupported(f"{algorithm} has no implementation for {requested}; it has {available}")
        return matching[0].function
