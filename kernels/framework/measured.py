"""What was measured on a kind of device: for classes of calls, how long each backend took, and the configurations that won.

An operation says to which class a call belongs (`Op(classes=...)`). The files, one for each kind of device, are part of the
package, so all processes of a job read the same. `python -m benchmarks --write` makes them from the results of benchmarks, in
which nothing is timed before its numbers are right. What no file tells, the contract's order and the heuristics decide.
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


@dataclass(frozen=True)
class Measured:
    """What was measured of one class of calls.

    Attributes:
      device: the kind of device.
      forward, backward: backend -> microseconds. A backend that has no backward is in the first alone.
      configs: backend -> {"version": of the backend, "config": as plain data}, where it was tuned.
      cases: what ran, each as {"case", "date", "commit"}.
    """

    device: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    configs: Mapping[str, Mapping[str, Any]]
    cases: Sequence[Mapping[str, str]]

    def times(self, differentiated: bool, together: bool) -> dict[str, float]:
        """Returns backend -> microseconds of what it is chosen for: the forward, or the backward; or `together` the two of
        them."""
        if not differentiated:
            return dict(self.forward)
        return {name: time + (self.forward[name] if together else 0) for name, time in self.backward.items()}

    def said(self, times: Mapping[str, float]) -> str:
        """Returns a ranking in words, with where it comes from."""
        ranking = ", ".join(f"{name} {time:.4g} µs" for name, time in sorted(times.items(), key=lambda x: x[1]))
        origin = "; ".join(f"{c['case']}, {c['date']}, {c['commit'][:9]}" for c in self.cases)
        return f"measured on {self.device}: {ranking} ({origin})"


def path_of(device_kind: str) -> Path:
    """Returns the file of a kind of device: "NVIDIA H200" is in nvidia_h200.json."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', device_kind.lower()).strip('_')}.json"


@functools.cache
def of_device(device_kind: str) -> Mapping[tuple[str, str], Measured]:
    """Returns (operation, class) -> what was measured on a kind of device; nothing where it has no file.

    Raises:
      RuntimeError: the file cannot be read. It is part of the package, and ranks backends alike in every process of a job, so
        that it is not passed over.
    """
    path = path_of(device_kind)
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["device"] != device_kind:
            raise ValueError(
                f"it is of format {data['format']} and of {data['device']}, not {FORMAT} and {device_kind}"
            )
        return {
            (name, of): Measured(device_kind, **measured)
            for name, classes in data["operations"].items()
            for of, measured in classes.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{path} is damaged or of another version ({type(error).__name__}: {error}): install the package anew, or write "
            "the file anew with `python -m benchmarks --write`"
        ) from error


def of_call(op: Operation, call: Call, platform: str) -> Measured | None:
    """Returns what was measured of the class of a call, on the kind of device that is compiled for; None where nothing was."""
    if op.classes is None or call.symbolic_dims():
        return None
    kind = target.device_kind(platform)
    found = None if kind is None else of_device(kind)
    return found.get((op.name, op.classes(call) or "")) if found else None


def ranked(
    op: Operation, call: Call, platform: str, backends: list[Backend], differentiated: bool
) -> tuple[list[Backend], str]:
    """Returns the backends, given in the contract's order, the fastest first, and the measurement in words; as they are, and
    nothing, where no two of them were measured. A differentiated call is ranked by its backward, which follows the forward of
    any backend, unless the contract has `kept`: then one backend runs both.

    A backend that was not measured keeps its place, so a new one is where its author puts it until it is measured.
    """
    found = of_call(op, call, platform) if len(backends) > 1 else None
    times = {} if found is None else found.times(differentiated, op.kept is not None)
    known = {b.name: times[b.name] for b in backends if b.name in times}
    if found is None or len(known) < 2:
        return backends, ""
    fastest = iter(sorted((b for b in backends if b.name in known), key=lambda b: known[b.name]))
    return [next(fastest) if b.name in known else b for b in backends], found.said(known)


def configuration(op: Operation, call: Call, platform: str, backend: Backend) -> Any:
    """Returns the configuration that won for the class of a call, None where there is none: none was tuned, it was for older
    code of the backend, or it is no candidate for this call."""
    found = of_call(op, call, platform)
    shipped = None if found is None else found.configs.get(backend.name)
    if shipped is None or shipped["version"] != backend.version:
        return None
    if backend.candidates is None or backend.heuristic is None:
        return None
    heuristic = backend.heuristic(call, platform)
    cfg = decode(type(heuristic), shipped["config"])
    return completed(cfg, heuristic) if cfg in (heuristic, *backend.candidates(call)) else None


def bucket(size: int, *limits: int) -> str:
    """Returns a name for the sizes between two limits, ascending: "<4096" of 1024 among (1024, 4096)."""
    return next((f"<{limit}" for limit in limits if size < limit), f">={limits[-1]}")


def power_of_two(size: int) -> int:
    """Returns the least power of two that is not less: what a tile of a kernel is wide."""
    return 1 << max(size - 1, 0).bit_length()
