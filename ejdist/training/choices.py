"""What a recipe leaves to its data and devices: `sequence.order=auto`, and `sequence.scheme=auto`, the scheme by which a step's
attention is expected to take the least time.

Of each scheme that is the time of the busiest rank's pairs, at the share of the peak that attention reaches, and of what
travels that is not hidden under them: what the scheme declares, at the rates of the device's links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ejdist.documents import Documents
from ejdist.experts.choice import links_of
from ejdist.experts.schemes import LOCAL
from ejdist.experts.schemes import scheme_of as dispatch_named
from ejdist.mesh import BATCH_AXES, CP, SEQUENCE_AXES, TP
from ejdist.models.part import Costs, Part
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts
from ejdist.order import AUTO, STRIPES
from ejdist.sequence.schemes import SCHEMES, Halo
from ejdist.training.curriculum import Stage
from ejdist.training.data import Data
from ejdist.training.flops import attention_share, peak_flops
from ejdist.training.orders import Choice, choose
from ejdist.training.program import Program, TrainSections
from ejdist.training.stage_data import sizes_of

# Of the time of what travels alone, the part that a step waits for: with a scheme that hides it, and with one that does not.
# On four H200s, 8k and 32k tokens each, rings waited for .20 to .31 and Ulysses for .74 to .89 (benchmarks/results/sequences).
WAITED = {True: 0.3, False: 0.85}
# Seconds of a layer, both ways, in which a GPU waits until its host has read how often something is sent: four H100s, 2,048
# tokens each, `sequence.hops=batch` against `mask` (ejdist/sequence/README.md).
HOST_READS = 1.5e-3
# By how much another scheme must be faster than one that comes before it in `SCHEMES`.
FASTER = 0.03
# A scheme that holds many more keys of other ranks than a ring is not taken.
MORE_MEMORY = 1.5
ROWS = 8  # of the first batches, by which both are chosen
HOST = 8  # GPUs that are joined by their own links; others are reached by the network


@dataclass(frozen=True)
class SchemeChoice:
    """A scheme, in an order, and the expected seconds of a step's attention with each.

    kind: of the devices. source: of the rates of their links. Without rates there are no seconds, and the scheme is the first.
    """

    scheme: str
    order: Choice
    seconds: Mapping[str, float]
    kind: str
    source: str

    def describe(self) -> str:
        """Returns a line for the log."""
        if not self.seconds:
            return f"sequence.scheme = {AUTO} is {self.scheme}: no rates of {self.kind} are known"
        each = ", ".join(f"{name} {1e3 * value:,.3g}" for name, value in self.seconds.items())
        return (
            f"sequence.scheme = {AUTO} is {self.scheme}: milliseconds of a step's attention on the busiest device, expected of "
            f"{self.kind} ({self.source}): {each}; sequence.scheme={self.scheme} keeps it"
        )


def choose_scheme(s: TrainSections, mesh: Any, model: Any, segment_ids: np.ndarray) -> SchemeChoice:
    """Returns the scheme that is expected to take the least time, each in the order that is the most even for it.

    Args:
      mesh: on which rows are split. segment_ids: int [rows, T], some of a recipe's rows.
    """
    kind = next(iter(mesh.devices.flat)).device_kind
    over = tuple((axis, n) for axis in SEQUENCE_AXES if (n := mesh.shape.get(axis, 1)) > 1)
    heads, links, peak = s.model.num_heads // mesh.shape.get(TP, 1), links_of(kind), peak_flops(kind)
    documents = Documents.of(segment_ids)
    found: dict[str, tuple[float, Choice]] = {}
    most = 0.0
    for name in SCHEMES:
        one = replace(s, sequence=replace(s.sequence, scheme=name))
        made = one.sequence.made()
        if issubclass(SCHEMES[name], Halo) or not SCHEMES[name].timed or made.rejects(heads, over) is not None:
            continue  # where a halo is less than a ring, every scheme takes it
        order = choose(one, mesh, model.flops, segment_ids)
        if peak is None:
            return SchemeChoice(name, order, {}, kind, links.source)
        share = replace(_share(one, mesh, order), documents=documents)
        most = most or MORE_MEMORY * _held(s, share)
        if _held(s, share) > most:
            continue
        found[name] = _seconds(one, mesh, order, share, kind, peak), order
    seconds = {name: value for name, (value, _) in found.items()}
    best = next(name for name, value in seconds.items() if value <= min(seconds.values()) * (1 + FASTER))
    return SchemeChoice(best, found[best][1], seconds, kind, links.source)


def _attention(s: TrainSections) -> dict[Part, int]:
    """Returns part -> how many layers have it, of those with attention."""
    return {part: n for part, n in counted_parts(s.model).items() if part.flops(s.model).pair}


def _share(s: TrainSections, mesh: Any, order: Choice) -> Share:
    rows = s.data.global_batch // s.accumulation // math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
    return Share(
        tokens=rows * s.data.sequence_length // order.order.shards,
        itemsize=2 if s.model.compute_dtype == "bfloat16" else 4,
        length=s.data.sequence_length,
        remat=REMAT[s.model.remat],
        scheme=s.sequence.made(),
        order=order.order,
        dispatch=dispatch_named(LOCAL),
        outer=mesh.shape.get(CP, 1),
        features=mesh.shape.get(TP, 1),
        torus=next(iter(mesh.devices.flat)).platform == "tpu",
    )


def _held(s: TrainSections, share: Share) -> int:
    """Returns the bytes of the widest attention at its height, what a scheme holds of other ranks included."""
    return max((Costs(part).memory(s.model, share).work for part in _attention(s)), default=0)


def _seconds(s: TrainSections, mesh: Any, order: Choice, share: Share, kind: str, peak: float) -> float:
    """Returns the time of a step's attention on the busiest device, forward and backward."""
    ranks, links = order.order.shards, links_of(kind)
    groups = math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
    # Five products of a backward to the forward's two; that runs again where its output is not kept.
    flops = order.flops * (3.5 + (not share.remat.asked)) * s.data.global_batch / groups / ranks / share.features
    work = flops * order.uneven[order.order.name] / (attention_share(s.model.head_dim) * peak)
    near = links.network is None or ranks * share.features <= HOST
    moving = 0.0
    for part, layers in _attention(s).items():
        sent = Costs(part).traffic(s.model, share)
        for (axis, collective), count in sent.bytes.items():
            if axis in SEQUENCE_AXES:
                rate = links.rate(collective, mesh.shape[axis])
                rate = rate if near or links.network is None else min(rate, links.network)
                moving += layers * (count / rate + sent.calls[axis, collective] * links.latency)
    moving *= s.accumulation
    if share.scheme.reads_batch and not share.torus:
        work += HOST_READS * sum(_attention(s).values()) * s.accumulation
    return work + max(WAITED[share.scheme.hides] * moving, moving - work)


def resolve(
    stages: Sequence[Stage],
    programs: Sequence[Program],
    datas: Sequence[Data],
    make: Callable[[Stage], Program],
    log: Callable[[str], None],
) -> tuple[list[Stage], list[Program]]:
    """Returns the stages and their programs, with an order and a scheme for those that leave them open, and logs both with the
    reason. The same on every host, and at every start: the first rows of the data and the kind of device decide.

    Args:
      datas: of each stage, of any size. make: the program of a stage.
    """
    found: list[tuple[Stage, Program]] = []
    for stage, program, one in zip(stages, programs, datas, strict=True):
        s = stage.sections
        if AUTO in (s.sequence.order, s.sequence.scheme) and program.order.shards > 1:
            rows = _first_rows(stage, one)
            if s.sequence.scheme == AUTO:
                scheme = choose_scheme(s, program.mesh, program.model, rows)
                log(f"{stage.where}{scheme.describe()}")
                s, choice = replace(s, sequence=replace(s.sequence, scheme=scheme.scheme)), scheme.order
            else:
                choice = choose(s, program.mesh, program.model.flops, rows)
            if s.sequence.order == AUTO:
                log(f"{stage.where}{choice.describe()}")
                name = choice.order.name
                stripe = s.sequence.stripe if name in STRIPES else None
                s = replace(s, sequence=replace(s.sequence, order=name, stripe=stripe))
            same = program.order == choice.order and s.sequence.made() == stage.sections.sequence.made()
            stage = replace(stage, sections=s)
            program = program if same else make(stage)
        found.append((stage, program))
    return [stage for stage, _ in found], [program for _, program in found]


def _first_rows(stage: Stage, data: Data) -> np.ndarray:
    """Returns int [rows, T]: the segment ids of the first rows that a stage trains on."""
    data = data.resized(**sizes_of(stage.sections.data))
    first = max(stage.start, data.begin.batch)
    batches = range(first, min(first + -(-ROWS // data.global_batch), max(stage.until, first + 1)))
    rows = [data.batch(number, slice(0, ROWS))["segment_ids"] for number in batches]
    return np.concatenate(rows)[:ROWS]
