"""Who takes part: the backends that can run a call on this device, and the peers that can express it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks import peers
from benchmarks.cases import as_tuple, split
from benchmarks.programs import programs_of
from kernels.framework import tuning
from kernels.framework.contract import Op
from kernels.framework.select import Request


@dataclass
class Contestant:
    """One implementation of one call.

    Attributes:
      ours: whether it is one of the operation's backends.
      programs: what is checked and timed, see programs.py; None where it cannot take part.
      of: what of the contract's outputs it gives; None for all of them.
      backward: whether it has a backward.
      tuned: the configuration that it was tuned to, and its version; None where it runs as it does for everyone.
      reason: why it cannot take part.
    """

    name: str
    ours: bool
    programs: Any = None
    of: Callable[..., Any] | None = None
    backward: bool = True
    reason: str = ""
    tuned: dict[str, Any] | None = None


def platform_here() -> str:
    """Returns the platform that a program is lowered for here: cpu, cuda, rocm or tpu."""
    device = jax.devices()[0]
    if device.platform == "gpu":
        return "cuda" if "nvidia" in device.device_kind.lower() else "rocm"
    return device.platform


def tune(op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns backend -> the fastest configuration for a call, of those of our backends that run here and have candidates."""
    call, platform = op.bind(**arguments), platform_here()
    return {
        b.name: tuning.tune(Request(op, b, call, platform, None, tuning.tune))
        for b in op.backends.values()
        if platform in b.platforms and b.candidates is not None and not b.refuses(op, call, False)
    }


def ours(
    op: Op, arguments: dict[str, Any], tuned: Mapping[str, Any] | None = None, of: Callable[..., Any] | None = None
) -> list[Contestant]:
    """Returns the operation's backends for this platform, those that refuse the call with their reason.

    Args:
      tuned: backend -> the configuration that it runs with.
      of: `peers.first`, to ask them for their first output alone, or None.
    """
    call, found = op.bind(**arguments), []
    _, _, static = split(arguments)
    for backend in op.backends.values():
        if platform_here() not in backend.platforms:
            continue
        reason = backend.refuses(op, call, False)
        if reason:
            found.append(Contestant(backend.name, True, reason=reason))
            continue

        cfg = (tuned or {}).get(backend.name)

        def function(*, _name: str = backend.name, _cfg: Any = cfg, **arrays: Any) -> Any:
            outputs = op(**static, **arrays, platform=_name, cfg=_cfg)
            return outputs if of is None else of(*as_tuple(outputs))

        backward = backend.refuses(op, call, True) is None
        kept = None if cfg is None else {"version": backend.version, "config": dataclasses.asdict(cfg)}
        found.append(Contestant(backend.name, True, programs_of("jax", function), of, backward, tuned=kept))
    return found


def dispatched(
    op: Op, arguments: dict[str, Any], candidates: int, of: Callable[..., Any] | None = None
) -> list[Contestant]:
    """Returns "ejdist", the call as dispatch runs it where no backend is asked for.

    Args:
      candidates: adds so many configurations that the tuner would try of the first backend that has any, by number.
      of: as in `ours`.
    """
    call, (_, _, static) = op.bind(**arguments), split(arguments)

    def contestant(name: str, **how: Any) -> Contestant:
        def function(**arrays: Any) -> Any:
            outputs = op(**static, **arrays, **how)
            return outputs if of is None else of(*as_tuple(outputs))

        kept = None if not how else {"config": dataclasses.asdict(how["cfg"])}
        return Contestant(name, True, programs_of("jax", function), of, tuned=kept)

    found, here = [contestant("ejdist")], platform_here()
    able = (b for b in op.backends.values() if here in b.platforms and b.candidates and not b.refuses(op, call, True))
    backend = next(able, None) if candidates else None
    if backend is not None:
        for i, cfg in enumerate(backend.candidates(call)[:candidates]):
            found.append(contestant(f"{backend.name}[{i}]", platform=backend.name, cfg=cfg))
    return found


def theirs(op: Op, arguments: dict[str, Any], chosen: dict[str, Any]) -> list[Contestant]:
    """Returns the peers that have this operation, those that cannot run here or cannot express the call with their reason."""
    whole, found = op.bind(**arguments).arguments, []
    # A mask was read by `express`; what a peer is called with are plain arrays.
    arrays = {name for name, value in arguments.items() if hasattr(value, "dtype")}
    for name, peer in chosen.items():
        if op.name not in peer.OPERATIONS:
            continue
        reason = peer.available()
        if reason:
            found.append(Contestant(name, False, reason=reason))
            continue
        try:
            said = peer.express(op.name, whole)
        except Exception as error:  # what may go wrong in others' code is not ours to list
            said = f"express failed: {first_line(error)}"
        if isinstance(said, str):
            found.append(Contestant(name, False, reason=said))
            continue
        expression = said if isinstance(said, peers.Expression) else peers.Expression(said)

        def function(*, _function: Callable[..., Any] = expression.function, **given: Any) -> Any:
            return _function(**{name: value for name, value in given.items() if name in arrays})

        programs = programs_of(peer.FRAMEWORK, function)
        found.append(Contestant(name, False, programs, expression.of, expression.backward))
    return found


def first_line(error: BaseException) -> str:
    """Returns an error as one short line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}".rstrip(": ")


def out_of_memory(error: BaseException) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
