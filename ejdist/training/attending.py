"""Seconds of a step's attention over a split sequence: `sequence.scheme=auto` and `sequence.order=auto` choose by them, and
plans count with them.

They are the time of the busiest rank's pairs, at the share of the peak that attention reaches, and the part that is waited for
of what travels: what a scheme declares that it sends, at the rates of the device's links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ejdist.costs import Traffic
from ejdist.experts.choice import Links
from ejdist.experts.schemes import LOCAL
from ejdist.experts.schemes import scheme_of as dispatch_named
from ejdist.mesh import AXES, SEQUENCE_AXES
from ejdist.models.part import Costs, Part
from ejdist.models.share import Share, hides
from ejdist.models.stack import counted_parts

Pair = tuple[str, str]  # a scheme and an order
# Of the time of what travels alone, the part that a step waits for: with a scheme that hides it, and with one that does not.
# On four H200s, 8k and 32k tokens each, rings waited for .20 to .31 and Ulysses for .74 to .89 (benchmarks/results/sequences).
WAITED = {True: 0.3, False: 0.85}
# Seconds of a layer, both ways, in which a GPU waits until its host has read how often something is sent: four H100s, 2,048
# tokens each, `sequence.hops=batch` against `mask` (ejdist/sequence/README.md).
HOST_READS = 1.5e-3
# By how much another pair must be faster than one that comes before it in `SCHEMES` and `NAMES`.
FASTER = 0.03
# A scheme that holds many more keys of other ranks than a ring is not taken.
MORE_MEMORY = 1.5
HOST = 8  # GPUs that are joined by their own links; others are reached by the network


def attention_of(model: Any) -> dict[Part, int]:
    """Returns part -> how many layers have it, of those with attention."""
    return {part: n for part, n in counted_parts(model).items() if part.flops(model).pair}


def held(model: Any, share: Share) -> int:
    """Returns the bytes of the widest attention at its height, what a scheme holds of other ranks included."""
    return max((Costs(part).memory(model, share).work for part in attention_of(model)), default=0)


def exchanged(model: Any, share: Share) -> Traffic:
    """Returns what all layers send along the axes of the sequence in one microbatch, for attention and recurrences."""
    alone, sent = replace(share, dispatch=dispatch_named(LOCAL), experts=()), Traffic()
    for part, layers in counted_parts(model).items():
        traffic = Costs(part).traffic(model, alone)
        for (axis, collective), count in traffic.bytes.items():
            if axis in SEQUENCE_AXES:
                sent.add(axis, collective, layers * count, layers * traffic.calls[axis, collective])
    return sent


def crosses_hosts(axis: str, sizes: Mapping[str, int], per_host: int = HOST) -> bool:
    """Returns whether neighbours along an axis are GPUs of several hosts."""
    span = math.prod(sizes.get(a, 1) for a in AXES[AXES.index(axis) :])
    # That many neighbours are a group, or several: those that do not divide the devices of a host lie over two somewhere.
    return bool(min(per_host, math.prod(sizes.values())) % span)


def alone_seconds(sent: Traffic, sizes: Mapping[str, int], links: Links, per_host: int = HOST) -> float:
    """Returns the time of what is sent with nothing beside it. Over hosts a ring waits for the one link between two of them."""
    total = 0.0
    for (axis, collective), count in sent.bytes.items():
        rate = links.rate(collective, sizes[axis])
        if links.network is not None and crosses_hosts(axis, sizes, per_host):
            rate = min(rate, links.network)
        total += count / rate + sent.calls[axis, collective] * links.latency
    return total


def waited(model: Any, share: Share, work: float, moving: float, accumulation: int) -> float:
    """Returns the seconds of a step that attention waits, beside its work, for what takes `moving` seconds alone."""
    reads = share.scheme.reads_batch and not share.torus
    read = HOST_READS * sum(attention_of(model).values()) * accumulation if reads else 0.0
    return read + max(WAITED[hides(share.scheme)] * moving, moving - work)


def ranked_pairs(seconds: Mapping[Pair, float], holds: Mapping[Pair, int]) -> list[Pair]:
    """Returns the pairs of a scheme and an order, the one to take first, then by time: of those that take the least time within
    3% the first, and none that holds much more than the first of all."""
    most = MORE_MEMORY * next(iter(holds.values()))
    fits = {pair: value for pair, value in seconds.items() if holds[pair] <= most}
    least = min(fits.values()) * (1 + FASTER)
    best = next(pair for pair, value in fits.items() if value <= least)
    return [best, *sorted((pair for pair in fits if pair != best), key=lambda pair: fits[pair])]
