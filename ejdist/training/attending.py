"""Predicts the time of a step's attention over a split sequence, for `sequence.scheme=auto`, `sequence.order=auto` and plans.

It is the compute time of the busiest rank, at the fraction of the peak that attention reaches, plus the exposed part of the
communication: the bytes that a scheme declares, at the rates of the device's links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ejdist.costs import Traffic
from ejdist.experts.choice import Links
from ejdist.experts.schemes import LOCAL
from ejdist.experts.schemes import scheme_of as dispatch_named
from ejdist.mesh import AXES, BATCH_AXES, CP, SEQUENCE_AXES, TP
from ejdist.models.part import Costs, Part
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts
from ejdist.order import Order
from ejdist.sequence.in_place import tile_of
from ejdist.sequence.schemes import SCHEMES
from ejdist.training.program import TrainSections

Pair = tuple[str, str]  # a scheme and an order
# Of the rate of a device's memory, what passes over arrays reach.
PASSES = 0.8
# Seconds per layer, forward and backward, that a GPU waits for its host to read the number of hops: four H100s, 2,048 tokens
# each, `sequence.hops=batch` against `mask` (ejdist/sequence/README.md).
HOST_READS = 1.5e-3
# How much faster a pair must be than one that comes before it in `SCHEMES` and `NAMES`.
FASTER = 0.03
# A scheme that needs more than this multiple of the first pair's memory is not chosen.
MORE_MEMORY = 1.5
HOST = 8  # GPUs with direct links to each other; others are reached over the network


def share_of(s: TrainSections, mesh: Any, order: Order) -> Share:
    """Returns what a device has of a microbatch of a recipe, as far as the exchanges along the sequence depend on it."""
    rows = s.data.global_batch // s.accumulation // math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
    device = next(iter(mesh.devices.flat))
    return Share(
        tokens=rows * s.data.sequence_length // order.shards,
        itemsize=2 if s.model.compute_dtype == "bfloat16" else 4,
        length=s.data.sequence_length,
        remat=REMAT[s.model.remat],
        scheme=s.sequence.made(),
        order=order,
        dispatch=dispatch_named(LOCAL),
        outer=mesh.shape.get(CP, 1),
        features=mesh.shape.get(TP, 1),
        tile=tile_of(device.device_kind),
        torus=device.platform == "tpu",
    )


def attention_of(model: Any) -> dict[Part, int]:
    """Returns part -> number of layers, for the parts with attention."""
    return {part: n for part, n in counted_parts(model).items() if part.flops(model).pair}


def by_scheme(model: Any) -> list[Part]:
    """Returns the parts whose keys travel by `sequence.scheme`, in the order of the sequence. Others gather them in the order
    of the text, or pass a state on."""
    return [part for part in attention_of(model) if not part.flops(model).of_text]


def chosen_among(model: Any) -> list[str]:
    """Returns the names of the schemes that `sequence.scheme=auto` and plans choose among. Blocks of native sparse attention
    travel by name alone: what packing them takes is in no cost."""
    selects = any(part.selects for part in counted_parts(model))
    return [name for name, scheme in SCHEMES.items() if not selects or scheme().blocks is None]


def held(model: Any, share: Share) -> int:
    """Returns the peak bytes of the attention that needs most, including what the scheme holds of other ranks."""
    return max((Costs(part).memory(model, share).work for part in attention_of(model)), default=0)


def exchanged(model: Any, share: Share) -> Traffic:
    """Returns what all layers send along the axes of the sequence in one microbatch, for attention and recurrences."""
    alone, sent = replace(share, dispatch=dispatch_named(LOCAL), experts=()), Traffic()
    for part, layers in counted_parts(model).items():
        sent.add_all(Costs(part).traffic(model, alone).over(SEQUENCE_AXES), layers)
    return sent


def crosses_hosts(axis: str, sizes: Mapping[str, int], per_host: int = HOST) -> bool:
    """Returns whether neighbours along an axis may be GPUs of different hosts."""
    span = math.prod(sizes.get(a, 1) for a in AXES[AXES.index(axis) :])
    # `span` consecutive GPUs hold whole groups along the axis; unless it divides a host's GPUs, some group spans two hosts.
    return bool(min(per_host, math.prod(sizes.values())) % span)


def alone_seconds(sent: Traffic, sizes: Mapping[str, int], links: Links, per_host: int = HOST) -> float:
    """Returns the seconds that communication takes with no work beside it. A ring across hosts has the rate of its slowest
    link."""
    total = 0.0
    for (axis, collective), count in sent.bytes.items():
        rate = links.rate(collective, sizes[axis])
        if links.network is not None and crosses_hosts(axis, sizes, per_host):
            rate = min(rate, links.network)
        total += count / rate + sent.calls[axis, collective] * links.latency
    return total


def waited(model: Any, share: Share, work: float, alone: Callable[[Traffic], float], accumulation: int) -> float:
    """Returns the seconds per step that attention waits.

    Args:
      work: seconds of attention. alone: traffic -> its seconds with nothing beside it.
    """
    reads, sent = share.scheme.reads_batch and not share.torus, exchanged(model, share)
    read = HOST_READS * sum(attention_of(model).values()) if reads else 0.0
    return accumulation * read + max(accumulation * alone(sent.waited()), accumulation * alone(sent) - work)


def put_together(model: Any, share: Share, memory: float, accumulation: int) -> float:
    """Returns the seconds per step of passes over memory, of so many bytes/s, that a split sequence takes besides."""
    return accumulation * exchanged(model, share).passes / (PASSES * memory)


def ranked_pairs(seconds: Mapping[Pair, float], holds: Mapping[Pair, int]) -> list[Pair]:
    """Returns the pairs of a scheme and an order: the chosen one, then the others by time. The chosen one is the first within
    3% of the least time, among those that need at most 1.5 times the memory of the first."""
    most = MORE_MEMORY * next(iter(holds.values()))
    fits = {pair: value for pair, value in seconds.items() if holds[pair] <= most}
    least = min(fits.values()) * (1 + FASTER)
    best = next(pair for pair, value in fits.items() if value <= least)
    return [best, *sorted((pair for pair in fits if pair != best), key=lambda pair: fits[pair])]
