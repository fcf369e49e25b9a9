"""Measurements per kind of device: how long each backend takes for calls of a kind, and the configurations that won.

An operation maps a call to a key (`Op(autotune_key=...)`). The files, one for each kind of device, ship with the package, so
all processes of a job read the same. `python -m benchmarks --write` generates them from benchmark results, in which
nothing is timed before its numbers are verified. Where there is no measurement, the contract's order and the heuristics
decide.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.framework import target
from kernels.framework.backend import Backend, Operation
from kernels.framework.binding import Call
from kernels.framework.config import completed, decode

FOLDER = Path(__file__).resolve().parent / "measured"
FORMAT = 1
# Kinds of device without a file of their own that have the chip of one with a file: other memory or clocks, the same kernels.
SAME_CHIP = {"NVIDIA H200": re.compile(r"NVIDIA (H100|H800|GH200)\b.*")}


@dataclass(frozen=True)
class Measured:
    """Measurements for one key.

    Attributes:
      device: the kind of device.
      forward, backward: backend -> microseconds. A backend without a backward appears only in `forward`.
      configs: backend -> {"version": of the backend, "config": as plain data}, if it was tuned.
      cases: the cases that ran, each as {"case", "date", "commit"}.
    """

    device: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    configs: Mapping[str, Mapping[str, Any]]
    cases: Sequence[Mapping[str, str]]

    def times(self, differentiated: bool, together: bool) -> dict[str, float]:
        """Returns backend -> microseconds: of the forward, of the backward if `differentiated`, or of both if
        `together`."""
        if not differentiated:
            return dict(self.forward)
        return {name: time + (self.forward[name] if together else 0) for name, time in self.backward.items()}

    def summary(self, times: Mapping[str, float]) -> str:
        """Returns a ranking as text, with its origin."""
        ranking = ", ".join(f"{name} {time:.4g} µs" for name, time in sorted(times.items(), key=lambda x: x[1]))
        origin = "; ".join(f"{c['case']}, {c['date']}, {c['commit'][:9]}" for c in self.cases)
        return f"measured on {self.device}: {ranking} ({origin})"


def path_of(device_kind: str) -> Path:
    """Returns the file for a kind of device: "NVIDIA H200" is in nvidia_h200.json."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', device_kind.lower()).strip('_')}.json"


@functools.cache
def of_device(device_kind: str) -> Mapping[tuple[str, str], Measured]:
    """Returns (operation, key) -> measurements on a kind of device, or else on one with the same chip; empty if neither
    has a file.

    Raises:
      RuntimeError: the file cannot be read. It ships with the package and must rank backends alike in every process of
        a job, so it is not skipped.
    """
    path = path_of(device_kind)
    same = next((kind for kind, pattern in SAME_CHIP.items() if pattern.fullmatch(device_kind)), None)
    others = {} if same is None else of_device(same)
    if not path.exists():
        return others
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["device"] != device_kind:
            raise ValueError(
                f"it has format {data['format']} for {data['device']}, expected {FORMAT} for {device_kind}"
            )
        return dict(others) | {
            (name, of): Measured(device_kind, **measured)
            for name, autotune_key in data["operations"].items()
            for of, measured in autotune_key.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{path} is damaged or of another version ({type(error).__name__}: {error}): reinstall the package, or "
            "regenerate the file with `python -m benchmarks --write`"
        ) from error


def of_call(op: Operation, call: Call, platform: str) -> Measured | None:
    """Returns the measurements for a call on the kind of device being compiled for, or None if there are none."""
    if op.autotune_key is None or call.symbolic_dims():
        return None
    kind = target.device_kind(platform)
    measurements = None if kind is None else of_device(kind)
    return measurements.get((op.name, op.autotune_key(call) or "")) if measurements else None


def ranked(
    op: Operation, call: Call, platform: str, backends: list[Backend], differentiated: bool
) -> tuple[list[Backend], str]:
    """Returns the backends, fastest first, and the measurement as text; or, if fewer than two of them were measured,
    the backends as given and an empty string. A differentiated call is ranked by its backward, which can follow any
    forward; if the contract has `extra_residuals`, one backend runs both, so it is ranked by their sum.

    A backend without measurements keeps its position, so a new one stays where its author put it until it is measured.
    """
    measurement = of_call(op, call, platform) if len(backends) > 1 else None
    times = {} if measurement is None else measurement.times(differentiated, op.extra_residuals is not None)
    measured = {b.name: times[b.name] for b in backends if b.name in times}
    if measurement is None or len(measured) < 2:
        return backends, ""
    fastest = iter(sorted((b for b in backends if b.name in measured), key=lambda b: measured[b.name]))
    return [next(fastest) if b.name in measured else b for b in backends], measurement.summary(measured)


def configuration(op: Operation, call: Call, platform: str, backend: Backend) -> Any:
    """Returns the measured configuration for a call; None if none was tuned, if it is for older code of the backend, or
    if it is not a candidate for this call."""
    measurement = of_call(op, call, platform)
    shipped = None if measurement is None else measurement.configs.get(backend.name)
    if shipped is None or shipped["version"] != backend.version:
        return None
    if backend.candidates is None or backend.heuristic is None:
        return None
    heuristic = backend.heuristic(call, platform)
    try:
        cfg = decode(type(heuristic), shipped["config"])
    except ValueError:  # its fields are those of older code
        return None
    return completed(cfg, heuristic) if cfg in (heuristic, *backend.candidates(call)) else None


def bucket(size: int, *limits: int) -> str:
    """Returns a name for a range of sizes; limits ascend: 1024 with limits (1024, 4096) is in "<4096"."""
    return next((f"<{limit}" for limit in limits if size < limit), f">={limits[-1]}")


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`: the width of a kernel's tile."""
    return 1 << max(size - 1, 0).bit_length()
