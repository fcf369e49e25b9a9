"""What a recipe leaves to its data and devices: `sequence.scheme=auto` and `sequence.order=auto`, the scheme and the order by
which a step's attention is expected to take the least time, weighed together.

Where no rates of the devices are known it is the first scheme, in the first order that is nearly as even as the most even one.
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
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.order import AUTO, STRIPES, Order
from ejdist.sequence.schemes import SCHEMES, Halo
from ejdist.training.attending import Pair, alone_seconds, exchanged, held, ranked_pairs, waited
from ejdist.training.curriculum import Stage
from ejdist.training.data import Data
from ejdist.training.flops import attention_share, peak_flops
from ejdist.training.orders import Choice, choose
from ejdist.training.program import Program, TrainSections
from ejdist.training.stage_data import sizes_of

ROWS = 8  # of the first batches, by which both are chosen


@dataclass(frozen=True)
class PairChoice:
    """A scheme, in an order, and the expected seconds of a step's attention with each pair; the one that is taken is first.

    kind: of the devices. source: of the rates of their links. Without rates there are no seconds.
    """

    scheme: str
    order: Choice
    seconds: Mapping[Pair, float]
    kind: str
    source: str
    pinned: bool = False  # whether the recipe names the scheme

    def of_schemes(self) -> dict[str, float]:
        """Returns the least seconds of each scheme, in whatever order."""
        names = dict.fromkeys(scheme for scheme, _ in self.seconds)
        return {n: min(value for (scheme, _), value in self.seconds.items() if scheme == n) for n in names}

    def describe(self) -> str:
        """Returns a line for the log."""
        what = f"sequence.scheme = {self.scheme if self.pinned else f'{AUTO} is {self.scheme}'}"
        if not self.seconds:
            return f"{what}: no rates of {self.kind} are known"
        ((_, order), value), *others = self.seconds.items()
        second = "".join(f"; second is {x} in {y} order, {1e3 * z:,.3g}" for (x, y), z in others[:1])
        each = ", ".join(f"{name} {1e3 * least:,.3g}" for name, least in self.of_schemes().items())
        return (
            f"{what} in {order} order, {1e3 * value:,.3g} milliseconds of a step's attention on the busiest device, expected "
            f"of {self.kind} ({self.source}){second}; each scheme at its best: {each}; sequence.scheme={self.scheme} "
            f"sequence.order={order} keeps it"
        )


def choose_pair(s: TrainSections, mesh: Any, model: Any, segment_ids: np.ndarray) -> PairChoice:
    """Returns the scheme and the order that are expected to take the least time together, of those that a recipe leaves open.

    Args:
      mesh: on which rows are split. segment_ids: int [rows, T], some of a recipe's rows.
    """
    kind = next(iter(mesh.devices.flat)).device_kind
    over = tuple((axis, n) for axis in SEQUENCE_AXES if (n := mesh.shape.get(axis, 1)) > 1)
    heads, links, peak = s.model.num_heads // mesh.shape.get(TP, 1), links_of(kind), peak_flops(kind)
    documents = Documents.of(segment_ids)
    choices: dict[Pair, Choice] = {}
    seconds: dict[Pair, float] = {}
    holds: dict[Pair, int] = {}
    pinned = s.sequence.scheme != AUTO
    for name in [s.sequence.scheme] if pinned else SCHEMES:
        one = replace(s, sequence=replace(s.sequence, scheme=name))
        refused = one.sequence.made().rejects(heads, over) is not None
        if not pinned and (issubclass(SCHEMES[name], Halo) or not SCHEMES[name].timed or refused):
            continue  # where a halo is less than a ring, every scheme takes it
        choice = choose(one, mesh, model.flops, segment_ids)
        if peak is None:
            return PairChoice(name, choice, {}, kind, links.source)
        for order in choice.orders:
            pair, share = (name, order.name), replace(_share(one, mesh, order), documents=documents)
            choices[pair], holds[pair] = replace(choice, order=order), held(s.model, share)
            seconds[pair] = _seconds(one, mesh, choices[pair], share, kind, peak)
    pairs = ranked_pairs(seconds, holds)
    in_turn = {pair: seconds[pair] for pair in pairs}
    return PairChoice(pairs[0][0], choices[pairs[0]], in_turn, kind, links.source, pinned)


def _share(s: TrainSections, mesh: Any, order: Order) -> Share:
    rows = s.data.global_batch // s.accumulation // math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
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
        torus=next(iter(mesh.devices.flat)).platform == "tpu",
    )


def _seconds(s: TrainSections, mesh: Any, order: Choice, share: Share, kind: str, peak: float) -> float:
    """Returns the time of a step's attention on the busiest device, forward and backward."""
    groups = math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
    # Five products of a backward to the forward's two; that runs again where its output is not kept.
    flops = (
        order.flops * (3.5 + (not share.remat.asked)) * s.data.global_batch / groups / share.sequence / share.features
    )
    work = flops * order.uneven[order.order.name] / (attention_share(s.model.head_dim) * peak)
    moving = s.accumulation * alone_seconds(exchanged(s.model, share), mesh.shape, links_of(kind))
    return work + waited(s.model, share, work, moving, s.accumulation)


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
            choice = choose_pair(s, program.mesh, program.model, _first_rows(stage, one))
            if s.sequence.scheme == AUTO or choice.seconds:
                log(f"{stage.where}{choice.describe()}")
            s = replace(s, sequence=replace(s.sequence, scheme=choice.scheme))
            if s.sequence.order == AUTO:
                log(f"{stage.where}{choice.order.describe()}")
                name = choice.order.order.name
                stripe = s.sequence.stripe if name in STRIPES else None
                s = replace(s, sequence=replace(s.sequence, order=name, stripe=stripe))
            same = program.order == choice.order.order and s.sequence.made() == stage.sections.sequence.made()
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
