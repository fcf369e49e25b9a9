"""Selects the configuration that a backend runs with, from seven tiers tried in order.

override → overlay → memory cache → persistent cache → autotune → heuristic → error. A tier is a small function that
takes the chain and a request, and returns a configuration or None.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE

from kernels.framework import measured, target
from kernels.framework.backend import Backend, Operation
from kernels.framework.binding import Call
from kernels.framework.config import ConfigCache, PersistentCache, completed, package_version

# Stands in for a symbolic size when block sizes are chosen, which only affects speed.
NOMINAL_SIZE = 8


@dataclass(frozen=True)
class Request:
    """A request for a configuration.

    Attributes:
      platform: the platform being lowered for: cpu, cuda, rocm, tpu.
      tuner: Request -> the fastest configuration, for the autotune tier.
    """

    op: Operation
    backend: Backend
    call: Call
    platform: str
    override: Any
    tuner: Callable[[Request], Any]

    @property
    def concrete(self) -> bool:
        """Whether the call has concrete arrays on one device: none is a tracer or a mere shape."""
        return is_concrete(self.call)

    @property
    def device_kind(self) -> str | None:
        """The kind of device being compiled for; None if unknown, see `target.device_kind`."""
        return target.device_kind(self.platform)

    def heuristic(self) -> Any:
        """Returns the choice of the backend's heuristic, or None if it has none."""
        if self.backend.heuristic is None:
            return None
        symbols = self.call.symbolic_dims()
        call = self.call
        if symbols:
            sizes = {d: (NOMINAL_SIZE,) if isinstance(call.dims[d], tuple) else NOMINAL_SIZE for d in symbols}
            call = Call(call.op_name, call.arguments, {**call.dims, **sizes}, call.dtype)
        return self.backend.heuristic(call, self.platform)

    def key(self) -> str:
        """Returns the key of a tuned configuration: everything that it depends on."""
        parts = {
            "device": self.device_kind,
            "op": self.op.name,
            "backend": self.backend.name,
            "version": self.backend.version,
            "package": package_version(),
            "call": self.call.signature(),
        }
        return json.dumps(parts, sort_keys=True)


def is_concrete(call: Call) -> bool:
    """Returns whether a call has concrete arrays on one device and is not being traced."""
    leaves = jax.tree.leaves(call.traced())
    # Constants that a jitted function closes over are concrete arrays too, so checking the arrays alone is not enough.
    return (
        not unsafe_am_i_under_a_jit_DO_NOT_USE()
        and bool(leaves)
        and all(
            not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))
            and (not isinstance(x, jax.Array) or len(x.devices()) == 1)
            for x in leaves
        )
    )


# A tuple of items instead of a mapping, so that it is hashable and can be part of a cache key.
_overlay: contextvars.ContextVar[tuple[tuple[str, Any], ...]] = contextvars.ContextVar("config_overlay", default=())


@contextlib.contextmanager
def config_overlay(configs: Mapping[str, Any]) -> Iterator[None]:
    """Sets the configurations of every call inside, by operation name or `operation/backend`."""
    token = _overlay.set(tuple({**dict(_overlay.get()), **configs}.items()))
    try:
        yield
    finally:
        _overlay.reset(token)


def override_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """The configuration passed with the call. It applies to that call only and is stored nowhere."""
    return None if request.override is None else completed(request.override, request.heuristic())


def overlay_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """The configuration from `config_overlay`, for this backend of the operation or for all of them."""
    names = (f"{request.op.name}/{request.backend.name}", request.op.name)
    overlay = dict(_overlay.get())
    config = next((overlay[n] for n in names if n in overlay), None)
    return None if config is None else completed(config, request.heuristic())


def memory_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    return chain.cache.get(request.key()) if request.device_kind else None


def persistent_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """A configuration tuned before, by this process or another one on this machine."""
    if chain.persistent is None or request.device_kind is None or request.backend.candidates is None:
        return None
    cfg = chain.persistent.get(request.key(), request.heuristic())
    if cfg is not None:
        chain.cache.put(request.key(), cfg)
    return cfg


def autotune_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """Times the candidates on the call's own arrays; never while tracing, and never for a platform that is not
    present."""
    if not chain.autotune or request.backend.candidates is None or request.device_kind is None or not request.concrete:
        return None
    cfg = request.tuner(request)
    chain.cache.put(request.key(), cfg)
    if chain.persistent is not None:
        chain.persistent.put(request.key(), cfg)
    return cfg


def heuristic_tier(chain: ConfigSelectorChain, request: Request) -> Any:
    """The shipped configuration for calls like this one on this kind of device, else the backend's heuristic."""
    shipped = measured.configuration(request.op, request.call, request.platform, request.backend)
    return request.heuristic() if shipped is None else shipped


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
      persistent: `PersistentCache`, or None for no persistent cache.
      autotune: whether an eager call on a device with tuning candidates may time them.
      tiers: the tiers, in the order in which they are tried.
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
    """Returns the chain in use: that of the running `Executor`, else the process-wide default.

    The default reads configurations tuned before, and tunes on an accelerator only if EJDIST_AUTOTUNE=1, because a
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
    """Calls inside select their configurations with this chain."""
    token = _chain.set(chain)
    try:
        yield
    finally:
        _chain.reset(token)


def state(call: Call | None) -> tuple:
    """Returns everything besides the call that the choice of configurations depends on. A choice is valid until it
    changes.

    Args:
      call: None for calls inside a program, which never tune.
    """
    chain = current_chain()
    tunes = chain.autotune and call is not None and is_concrete(call)
    compiled_for = target.asked_compute_capability()
    return chain, chain.cache.version, chain.persistent, chain.tiers, tunes, _overlay.get(), compiled_for


def select(request: Request) -> Any:
    """Returns the configuration for a request, selected by the chain in use."""
    return current_chain().select(request)
