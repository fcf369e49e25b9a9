"""Chooses the scheme of expert parallelism: `auto` compares the bytes that each would send over the device's bandwidths.

An exchange sends rows both ways, forward (tokens, sums) and backward (cotangents, gradients). With n ranks, k choices per
token, M tokens of D features per rank, and ranks r that a token meets on average (`cost.reached`):

    all_to_all          4 buffer M r D (n - 1) / n     the whole buffer, full or not
    ragged_all_to_all   4 M r D (n - 1) / n            only rows that exist
    all_gather          4 M D (n - 1)                  each token to each rank, whatever its choices: 2 gathers, 2 scatters
    two_level           as all_to_all, but over hosts r is of hosts: once to a host, and from there to its ranks

and numbers beside rows that travel by rank: choices, weights, and the gradients of these.

Under `jax.checkpoint` tokens are dispatched twice, in every scheme. Local memory traffic is not counted.

`all_gather` holds the tokens of all ranks, so it is excluded where that is much more than the buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, PERMUTE_BOTH, RAGGED_ALL_TO_ALL, Traffic
from ejdist.device_rates import memory_rate, peak_flops
from ejdist.experts.cost import ExchangeShape, arriving_of, cost_of
from ejdist.experts.narrow import BF16
from ejdist.experts.schemes import LOCAL, SCHEMES


@dataclass(frozen=True)
class Links:
    """Bandwidth of one device in each collective, bytes/s, and the source of the numbers.

    Attributes:
      permute: between neighbours in one direction; None: as fast as an all-gather. With bytes in both directions at once it
        is that on a torus, and the same otherwise.
      torus: devices along an axis form a ring; `all_gather` is its bandwidth in both directions, and an all-to-all over n
        devices gets 4 / n of it (J. Austin et al., *How to Scale Your Model*, 2025).
      network: between hosts, per device; None if the links reach all devices.
      latency: seconds per message, an estimate.
    """

    all_to_all: float
    ragged_all_to_all: float
    all_gather: float
    reduce_scatter: float
    source: str
    permute: float | None = None
    network: float | None = None
    torus: bool = False
    latency: float = 1e-5

    def rate(self, collective: str, ranks: int) -> float:
        """Returns bytes/s of a device in a collective over `ranks` devices; unknown collectives use all-gather's."""
        if collective == PERMUTE_BOTH:
            collective = ALL_GATHER if self.torus else PERMUTE
        rate = getattr(self, collective, None) or self.all_gather
        return rate * 4 / max(ranks, 4) if self.torus and collective in _BETWEEN_ALL else rate


# Collectives in which a device sends different rows to each other device; the rest forward or combine messages.
_BETWEEN_ALL = (ALL_TO_ALL, RAGGED_ALL_TO_ALL)


def _torus(rate: float, what: str) -> Links:
    return Links(rate, rate, rate, rate, f"published: {what}", permute=rate / 2, torus=True)


# Within a host as measured with 64 and 256 MiB; between hosts 400 Gbit/s per device, as published.
_H200 = Links(220e9, 8e9, 283e9, 340e9, "measured on four H200, jax 0.11.2", permute=130e9, network=50e9)
# By the longest matching prefix of the device kind.
LINKS = {
    "NVIDIA H200": _H200,
    "NVIDIA H100": replace(_H200, source="assumed equal to an H200"),
    "TPU v5 lite": _torus(100e9, "1600 Gbit/s a chip over 4 links"),
    "TPU v5": _torus(200e9, "4800 Gbit/s a chip over 6 links"),
    "TPU v6 lite": _torus(224e9, "3584 Gbit/s a chip over 4 links"),
}
# Most rows that a scheme may bring to a device, relative to the buffer.
GATHERED = 2.0
# For unknown devices: all collectives count as equally fast, except the ragged one, which few devices support.
UNKNOWN = Links(100e9, 1e9, 100e9, 100e9, "no rates known: bytes alone")


@dataclass(frozen=True)
class Choice:
    """A scheme, the reason in one line, and the expected seconds of each scheme, forward plus backward."""

    scheme: str
    reason: str
    seconds: dict[str, float]


def links_of(device_kind: str) -> Links:
    """Returns the links of a `jax.Device.device_kind`."""
    matches = [name for name in LINKS if device_kind.startswith(name)]
    return LINKS[max(matches, key=len)] if matches else UNKNOWN


def choose(
    *,
    axis_sizes: tuple[int, ...],
    tokens: int,
    top_k: int,
    width: int,
    itemsize: int,
    buffer: float = 1.25,
    num_experts: int | None = None,
    max_ranks: int | None = None,
    precision: str = BF16,
    hosts: int | None = None,
    device_kind: str | None = None,
    pinned: str | None = None,
) -> Choice:
    """Returns the scheme with the least expected time, and why.

    Args:
      axis_sizes: of the axes that experts are sharded over, the major one first.
      tokens: of one rank. width: features of a token. itemsize: bytes of one.
      num_experts, max_ranks, precision: see `exchange`. num_experts None: so many that choices are independent.
      hosts: number of hosts that the axes span. Default: the size of the first of several axes if there are several processes,
        otherwise 1.
      device_kind: default: that of this process's first device.
      pinned: a scheme to take in any case; the reason says so.
    """
    ranks = math.prod(axis_sizes)
    if ranks == 1:
        return Choice(LOCAL, f"{LOCAL}: one rank has all experts, so nothing is sent", {LOCAL: 0.0})
    if hosts is None:
        hosts = axis_sizes[0] if len(axis_sizes) > 1 and jax.process_count() > 1 else 1
    kind = jax.local_devices()[0].device_kind if device_kind is None else device_kind
    levels = (hosts, ranks // hosts) if len(axis_sizes) > 1 and hosts > 1 else (ranks,)
    call = {"tokens": tokens, "top_k": top_k, "width": width, "hidden": 0, "itemsize": itemsize, "buffer": buffer}
    call |= {"num_experts": num_experts, "max_ranks": max_ranks, "precision": precision}
    seconds = _seconds(links_of(kind), hosts, levels, pinned, call)
    if pinned is not None and pinned not in seconds:
        raise ValueError(
            f"argument 'pinned' = {pinned!r} does not fit this axis; use one of {', '.join(sorted(seconds))}"
        )
    ordered = sorted(seconds, key=lambda name: seconds[name])
    best = ordered[0] if pinned is None else pinned
    other = next(name for name in ordered if name != best)
    times = f"{seconds[best] * 1e3:.3g} ms per layer and step, {other} {seconds[other] * 1e3:.3g} ms"
    over = f"{ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
    why = "pinned" if pinned else "chosen"
    return Choice(best, f"{best} ({why}): {times}, over {over} of {kind} ({links_of(kind).source})", seconds)


# Of its peak, what a device does in the products of experts; the most chunks that are chosen: more hide little more, and each
# is compiled by itself.
PRODUCTS, MOST_CHOSEN = 0.6, 8


def choose_chunks(
    scheme: Any, seconds: float | None, *, ranks: int, rows: float, weights: float, itemsize: int, device_kind: str
) -> tuple[int, str]:
    """Returns in how many chunks a pass is sent and multiplied, and why: the number of which the least time is expected.

    With c chunks one is sent while another is multiplied: of the shorter of the two all but 1 / c is hidden. Each chunk
    more reads the experts' matrices again and adds to their gradients, and sends messages of its own.

    Args:
      seconds: of what the scheme sends, as in `Choice`; None where it is not known.
      rows: of a layer and microbatch, for each expert of a device. weights: numbers of the experts' matrices on it.
      itemsize: bytes of a number.
    """
    peak = peak_flops(device_kind)
    if ranks == 1:
        return 1, "1 chunk: nothing is sent"
    if peak is None or seconds is None:
        return 1, f"1 chunk: it is not known how long {device_kind} multiplies, or {scheme} sends"
    work = 6 * rows * weights / (PRODUCTS * peak)  # a forward, and a backward of twice as many products
    # A forward and a backward read the matrices; the gradient is written, read and added in float32.
    more = weights * (2 * itemsize + 4 * 4) / memory_rate(device_kind)
    more += _MESSAGES * (ranks - 1) * links_of(device_kind).latency
    times = [max(seconds, work) + min(seconds, work) / c + (c - 1) * more for c in range(1, MOST_CHOSEN + 1)]
    count = times.index(min(times)) + 1
    chunks = f"{count} chunk{'s' if count > 1 else ''}"
    one = "" if count == 1 else f", {times[0] * 1e3:.3g} ms as one"
    both = f"sending {seconds * 1e3:.3g} ms and products {work * 1e3:.3g} ms"
    return count, f"{chunks} (chosen): {both} take {times[count - 1] * 1e3:.3g} ms per layer and step{one}"


_MESSAGES = 8  # collectives of a chunk, forward and backward: rows, and the numbers beside them

# Axis names in the cost model: between hosts, between the devices of a host, and all at once.
_HOSTS, _DEVICES, _ALL = "hosts", "devices", "all"


def _seconds(
    links: Links, hosts: int, levels: tuple[int, ...], pinned: str | None, call: dict[str, Any]
) -> dict[str, float]:
    """Returns the time of each scheme that fits: its traffic over the bandwidth of the links."""
    ranks, seconds = math.prod(levels), {}
    for name, of in SCHEMES.items():
        scheme = of()
        if scheme.refusal(levels) is not None or scheme.precision_refusal(call["precision"]) is not None:
            continue
        over = zip((_HOSTS, _DEVICES), levels, strict=True) if scheme.stepwise else ((_ALL, ranks),)
        shape = ExchangeShape(over=tuple(over), **call)
        if arriving_of(scheme, shape) > GATHERED * shape.rows and name != pinned:
            continue
        seconds[name] = _time(links, cost_of(scheme, shape), {**dict(shape.over), _HOSTS: hosts}, ranks)
    return seconds


def _time(links: Links, sent: Traffic, sizes: dict[str, int], ranks: int) -> float:
    """Returns the seconds of all collectives in sequence. Over all ranks the two kinds of links work in parallel."""
    hosts, total = sizes[_HOSTS], 0.0
    for (axis, collective), many in sent.bytes.items():
        size, inner = sizes[axis], ranks // hosts
        if links.network is None or (axis == _ALL and hosts == 1) or axis == _DEVICES:
            seconds = many / links.rate(collective, size)
        elif axis == _HOSTS:
            seconds = many / links.network
        elif collective in _BETWEEN_ALL:
            near, far = (inner - 1) / (ranks - 1), (ranks - inner) / (ranks - 1)
            seconds = max(many * near / links.rate(collective, size), many * far / links.network)
        else:
            seconds = many / min(links.rate(collective, size), links.network * inner)
        messages = size - 1 if collective in _BETWEEN_ALL else math.log2(size)
        total += seconds + sent.calls[axis, collective] * messages * links.latency
    return total
