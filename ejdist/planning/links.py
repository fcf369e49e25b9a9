"""Seconds of collectives along the axes of a mesh: by data sheets, or as `python -m launch.doctor` has measured them.

By a data sheet a collective has a share of the rate of the links. Where it was measured it takes the time of a message of as
many bytes: between two sizes that were measured linear in the bytes, below the smallest as long as that one (its latency), and
above the largest at its rate. An axis that was not measured itself takes the speed of one that crosses the same links, and the
plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, NETWORK, PERMUTE, PERMUTE_BOTH, RAGGED_ALL_TO_ALL, Traffic
from ejdist.experts.choice import UNKNOWN, links_of
from ejdist.mesh import AXES, DP, FSDP
from ejdist.planning.chips import Chip
from ejdist.planning.measured import COLLECTIVES, Measured, MeasuredAxis
from ejdist.training.attending import alone_seconds, crosses_hosts

# Of a link's rate by the data sheet, what collectives of training steps reached on H200s.
LINK = 0.45
_BETWEEN_ALL = (ALL_TO_ALL, RAGGED_ALL_TO_ALL)  # each device sends other rows to each other one


@dataclass(frozen=True)
class Source:
    """Where the speed of an axis is from: measured there, or assumed, from which words follow."""

    measured: bool
    words: str
    axis: MeasuredAxis | None = None


@dataclass(frozen=True)
class Links:
    """How fast the devices of a target communicate.

    Attributes:
      per_host: devices of a host.
      slices: TPU slices; mesh.dp goes over them, and mesh.fsdp where `fsdp_across_slices` lets it.
      measured: what was measured; None for the data sheet alone.
      side: chips along the longest side of a TPU slice, a ring; None where it is not known.
    """

    chip: Chip
    per_host: int
    slices: int = 1
    measured: Measured | None = None
    side: int | None = None

    def pieces(self, axis: str, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
        """Returns the parts of an axis with more than one device each: inside of a slice, and over slices (`NETWORK`)."""
        outer = over_slices(sizes, self.slices).get(axis, 1)
        parts = [(axis, sizes[axis] // outer), (NETWORK, outer)]
        return [(name, n) for name, n in parts if n > 1]

    def crosses(self, axis: str, sizes: Mapping[str, int]) -> str:
        """Returns what an axis goes over: "devices" of a host or slice, "hosts", or "slices"."""
        if axis == NETWORK:
            return "slices"
        return "devices" if self.chip.network is None else _level(axis, sizes, self.per_host)

    def rate(self, axis: str, sizes: Mapping[str, int]) -> float:
        """Returns bytes/s of a device along an axis, by the data sheet. Devices of a host are neighbours along the last axes;
        between hosts every device of a group has its own way out."""
        over = self.crosses(axis, sizes)
        if over == "slices":
            assert self.chip.between_slices is not None
            return self.chip.between_slices
        if over == "devices":
            return self.chip.link
        assert self.chip.network is not None
        inner = _inner(axis, sizes)
        # A group that is smaller than a host but spans two may have one device in one of them.
        ways = self.per_host // inner if inner * sizes[axis] > self.per_host else 1
        return min(self.chip.link, self.chip.network * max(1, ways))

    def seconds(self, traffic: Traffic, sizes: Mapping[str, int]) -> float:
        """Returns the time of all collectives, one after the other."""
        total = 0.0
        for (axis, collective), sent in traffic.bytes.items():
            measured = self.source(axis, sizes).axis
            slower = self._slower(axis, collective, sizes, measured)
            if measured is None:
                total += slower * sent / LINK / self.rate(axis, sizes)
            else:
                calls = max(traffic.calls[axis, collective], 1)
                total += calls * measured.seconds(collective, slower * sent / calls)
        return total

    def alone(self, traffic: Traffic, sizes: Mapping[str, int]) -> float:
        """Returns the time of what a split sequence sends with nothing beside it: as a run itself expects it, where rates of
        such devices are known and nothing was measured on these."""
        known = links_of(self.chip.kind)
        if self.measured is not None or known is UNKNOWN:
            return self.seconds(traffic, sizes)
        return alone_seconds(traffic, sizes, known, self.per_host)

    def _slower(self, axis: str, collective: str, sizes: Mapping[str, int], measured: MeasuredAxis | None) -> float:
        """Returns how many times as long an exchange takes as one of the same bytes at the known rate."""
        slower = 1.0
        if collective == PERMUTE and measured is None and self.chip.platform == "tpu":
            slower = 2.0  # the rate is of both directions of a ring of links
        if collective == PERMUTE_BOTH and measured is not None and self.chip.platform == "tpu":
            slower = 0.5  # what was measured is one of them
        if collective in _BETWEEN_ALL and self.chip.network is None and axis != NETWORK:
            # On a ring most rows pass several links. A longer axis spans several sides of the slice, each a ring.
            ring, known_ring = (min(n, self.side or n) for n in (sizes[axis], measured.size if measured else 4))
            slower = max(ring, 4) / max(known_ring, 4)
        if collective in _BETWEEN_ALL and measured is None and self.crosses(axis, sizes) == "hosts":
            # What goes to other hosts leaves by a device's own way out; a gather's rows pass each once for all of a host.
            assert self.chip.network is not None
            near = max(1, self.per_host // _inner(axis, sizes))
            far = (sizes[axis] - near) / max(sizes[axis] - 1, 1)
            slower = max(slower, far * self.rate(axis, sizes) / self.chip.network)
        if collective in (*COLLECTIVES, PERMUTE_BOTH):
            return slower
        links = links_of(self.chip.kind)  # the one that the doctor does not measure
        return slower * links.all_to_all / getattr(links, collective)

    def source(self, axis: str, sizes: Mapping[str, int]) -> Source:
        """Returns where the speed of an axis is from."""
        over = self.crosses(axis, sizes)
        rate, words = f"{8e-9 * self.rate(axis, sizes):,.0f} Gbit/s per device", self.chip.source.partition(";")[0]
        sheet = f"data sheet ({rate})"
        if over == "devices":
            sheet = f"data sheet ({words})" if self.chip.network is None else f"{rate}, {words}"
        if self.measured is None:
            return Source(False, sheet)
        over_dp = over_slices(sizes, self.slices)
        size = over_dp[DP] if axis == NETWORK else sizes[axis] // over_dp.get(axis, 1)
        alike = [a for a in self.measured.axes.values() if self._crossed(a) == over]
        if not alike:
            inside = "slice" if self.chip.network is None else "host"
            where = f"inside of a {inside}" if over == "devices" else f"between {over}"
            return Source(False, f"{sheet}, as nothing was measured {where}")
        # The axis itself; else the one of the size nearest to it, and of two such the slower.
        best = min(alike, key=lambda a: (a.name != axis, abs(math.log(a.size / size)), -a.seconds(ALL_GATHER, 2**24)))
        between = (
            f"; its processes are taken for ones of a host of {self.per_host}"
            if self.chip.network is not None and best.crosses != over == "devices"
            else ""
        )
        if axis in (best.name, NETWORK) and best.size == size:
            return Source(True, f"measured over {best.told()}{between}", best)
        return Source(False, f"as measured along {best.name}, over {best.told()}{between}", best)

    def _crossed(self, axis: MeasuredAxis) -> str:
        if self.chip.network is None:
            return "slices" if axis.crosses == "slices" else "devices"
        if axis.crosses == "devices":
            return "devices"
        return _level(axis.name, self.measured.mesh if self.measured else {}, self.per_host)


def over_slices(sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """Returns over how many slices the axes go that go over any, as `ejdist.mesh.make_mesh` lays them."""
    dp = math.gcd(sizes[DP], slices)
    return {DP: dp, FSDP: slices // dp}


def _inner(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])


def _level(axis: str, sizes: Mapping[str, int], per_host: int) -> str:
    return "hosts" if crosses_hosts(axis, sizes, per_host) else "devices"
