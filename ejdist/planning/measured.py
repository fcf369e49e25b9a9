"""What `python -m launch.doctor` has measured of a mesh (`ejdist.cluster.bandwidth`), read from its file."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ejdist.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, PERMUTE_BOTH, REDUCE_SCATTER
from ejdist.mesh import AXES, CP
from ejdist.paths import check_folder
from ejdist.planning.chips import Chip, chip_of_kind

COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, PERMUTE)  # that the doctor measures
CROSSES = ("devices", "hosts", "slices")


@dataclass(frozen=True)
class MeasuredAxis:
    """An axis as it was measured. points: collective -> (bytes that a device sends, seconds), ascending in the bytes."""

    name: str
    size: int
    crosses: str
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def seconds(self, collective: str, sent: float) -> float:
        """Returns the time of one collective in which a device sends that many bytes; one that is not in `COLLECTIVES` has that
        of an all-to-all."""
        collective = PERMUTE if collective == PERMUTE_BOTH else collective
        points = self.points.get(collective) or self.points[ALL_TO_ALL]
        index = bisect.bisect_left(points, (sent, 0.0))
        if index == 0:
            return points[0][1]
        if index == len(points):
            return points[-1][1] * sent / points[-1][0]
        (less, before), (more, after) = points[index - 1], points[index]
        return before + (after - before) * (sent - less) / (more - less)

    def told(self) -> str:
        """Returns its size, and what an all-gather reached."""
        (least, latency), (most, seconds) = self.points[ALL_GATHER][0], self.points[ALL_GATHER][-1]
        return (
            f"{self.size} devices: all-gathers {most / seconds / 1e9:.0f} GB/s of {most / 2**20:.3g} MiB, "
            f"{latency * 1e6:.0f} us of {least / 2**20:.3g} MiB"
        )


@dataclass(frozen=True)
class Measured:
    """What was measured, when, and on which mesh (axis -> devices)."""

    file: str
    at: str
    mesh: Mapping[str, int]
    axes: Mapping[str, MeasuredAxis]


def read(file: str | Path, chip: Chip, per_host: int) -> Measured:
    """Returns the measurements in a file of the doctor, for plans on devices of a kind.

    Raises:
      ValueError: it cannot be read, is damaged, of devices of another kind, or of hosts of another size.
    """
    check_folder("bandwidth", str(file))
    path = Path(file).expanduser()
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"bandwidth = {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no text, or no JSON
        raise ValueError(_damaged(path, f"it is not JSON ({error})")) from None
    try:
        kind, measured = _checked(path, content)
    except _Damaged as error:
        raise ValueError(_damaged(path, str(error))) from None
    measured_chip = chip_of_kind(kind)
    if measured_chip is None or measured_chip.name != chip.name:
        raise ValueError(
            f"bandwidth = {str(path)!r} was measured on {kind}, but the plan is for {chip.kind}: measure there, by python -m "
            "launch.doctor, or leave bandwidth= out"
        )
    if not measured.axes:
        raise ValueError(
            f"bandwidth = {str(path)!r} was measured on one device, which sends nothing: run launch.doctor on all devices"
        )
    for axis in measured.axes.values() if chip.network is not None else ():
        span = axis.size
        for later in AXES[AXES.index(axis.name) + 1 :]:
            span *= measured.mesh[later]
        if axis.crosses == "devices" and span > per_host:
            raise ValueError(
                f"bandwidth = {str(path)!r}: {axis.name} was measured inside of a host of {span} devices or more, and "
                f"devices_per_host = {per_host}; give the hosts' real size"
            )
    return measured


class _Damaged(Exception):
    """Says what is wrong with a file."""


def _damaged(path: Path, why: str) -> str:
    return f"bandwidth = {str(path)!r} is damaged: {why}; run python -m launch.doctor again"


def _checked(path: Path, content: Any) -> tuple[str, Measured]:
    """Returns (the kind of the devices, what was measured). Raises `_Damaged`."""
    kind, mesh, axes = (
        _of(content, "", name, of) for name, of in (("device_kind", str), ("mesh", dict), ("axes", dict))
    )
    mesh = {CP: 1, **mesh}  # a file from before there was this axis
    if set(mesh) != set(AXES) or not all(_whole(n) for n in mesh.values()):
        raise _Damaged(f"mesh is {mesh!r}, and must have the devices along {', '.join(AXES)}")
    measured_axes = {}
    for name, axis in axes.items():
        where = f"axes.{name}"
        size, crosses, rows = (
            _of(axis, where, key, of) for key, of in (("size", int), ("crosses", str), ("measured", list))
        )
        if name not in AXES or size != mesh[name] or size < 2 or crosses not in CROSSES:
            raise _Damaged(f"{where} has size {size} and crosses {crosses!r}, and the mesh is {mesh}")
        measured_axes[name] = MeasuredAxis(name, size, crosses, _points(rows, where))
    lost = [name for name, size in mesh.items() if size > 1 and name not in measured_axes]
    if lost:
        raise _Damaged(f"axes.{lost[0]} is missing, and the mesh has {mesh[lost[0]]} devices along it")
    measured_at = content.get("at", "")
    return kind, Measured(str(path), measured_at if isinstance(measured_at, str) else "", mesh, measured_axes)


def _points(rows: list[Any], where: str) -> dict[str, tuple[tuple[float, float], ...]]:
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in COLLECTIVES}
    for i, row in enumerate(rows):
        row_where = f"{where}.measured[{i}]"
        collective = _of(row, row_where, "collective", str)
        sent, seconds = (_of(row, row_where, key, (int, float)) for key in ("bytes", "seconds"))
        if not (0 < sent < 2**60 and 0 < seconds < 1e6):  # neither is NaN, which json reads
            raise _Damaged(f"{row_where} has {sent} bytes in {seconds} s")
        if collective in points:
            points[collective].append((float(sent), float(seconds)))
    for collective, of in points.items():
        of.sort()
        if not of or len({sent for sent, _ in of}) < len(of):
            raise _Damaged(f"{where} has {'a size twice of' if of else 'no'} {collective}")
    return {name: tuple(of) for name, of in points.items()}


def _of(content: Any, where: str, name: str, kind: Any) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Damaged(
            f"{where}{'.' if where else ''}{name} is missing" if value is None else f"{where}.{name} is {value!r}"
        )
    return value


def _whole(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
