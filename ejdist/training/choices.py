"""Resolves `sequence.scheme=auto` and `sequence.order=auto`: the pair with the least predicted time of a step's attention,
on the recipe's data and devices.

If the rates of the devices are unknown, the first scheme, in the first order that is nearly as even as the best.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ejdist.device_rates import memory_rate, peak_flops
from ejdist.documents import Documents
from ejdist.experts.choice import links_of
from ejdist.mesh import BATCH_AXES, SEQUENCE_AXES, TP
from ejdist.models.share import Share
from ejdist.order import AUTO, STRIPES
from ejdist.sequence.schemes import SCHEMES, Halo
from ejdist.training.attending import (
    Pair,
    alone_seconds,
    chosen_among,
    held,
    put_together,
    ranked_pairs,
    share_of,
    waited,
)
from ejdist.training.curriculum import Stage
from ejdist.training.data import Data
from ejdist.training.flops import attention_share
from ejdist.training.orders import Choice, choose
from ejdist.training.program import Program, TrainSections
from ejdist.training.stage_data import sizes_of

ROWS = 8  # rows of the first batches, which the choice is based on


@dataclass(frozen=True)
class PairChoice:
    """A scheme and an order, and the predicted seconds of a step's attention with each pair, the chosen pair first.

    kind: of the devices. source: of the rates of their links. `seconds` is empty without rates.
    """

    scheme: str
    order: Choice
    seconds: Mapping[Pair, float]
    kind: str
    source: str
    pinned: bool = False  # whether the recipe names the scheme

    def of_schemes(self) -> dict[str, float]:
        """Returns scheme -> least seconds over all orders."""
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
    """Returns the scheme and order with the least predicted time together, among those that the recipe allows.

    Args:
      mesh: the mesh that rows are split over. segment_ids: int [rows, T], some of the recipe's rows.
    """
    kind = next(iter(mesh.devices.flat)).device_kind
    over = tuple((axis, n) for axis in SEQUENCE_AXES if (n := mesh.shape.get(axis, 1)) > 1)
    heads, links, peak = s.model.num_heads // mesh.shape.get(TP, 1), links_of(kind), peak_flops(kind)
    documents = Documents.of(segment_ids)
    choices: dict[Pair, Choice] = {}
    seconds: dict[Pair, float] = {}
    holds: dict[Pair, int] = {}
    pinned = s.sequence.scheme != AUTO
    for name in [s.sequence.scheme] if pinned else chosen_among(s.model):
        one = replace(s, sequence=replace(s.sequence, scheme=name))
        refused = one.sequence.made().rejects(heads, over) is not None
        if not pinned and (issubclass(SCHEMES[name], Halo) or refused):
            continue  # where a halo is less than a ring, every scheme takes it
        choice = choose(one, mesh, model.flops, segment_ids)
        if peak is None:
            return PairChoice(name, choice, {}, kind, links.source)
        for order in choice.orders:
            pair, share = (name, order.name), replace(share_of(one, mesh, order), documents=documents)
            choices[pair], holds[pair] = replace(choice, order=order), held(s.model, share)
            seconds[pair] = _seconds(one, mesh, choices[pair], share, kind, peak)
    pairs = ranked_pairs(seconds, holds)
    in_turn = {pair: seconds[pair] for pair in pairs}
    return PairChoice(pairs[0][0], choices[pairs[0]], in_turn, kind, links.source, pinned)


def _seconds(s: TrainSections, mesh: Any, order: Choice, share: Share, kind: str, peak: float) -> float:
    """Returns the time of a step's attention on the busiest device, forward and backward."""
    groups = math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
    # The backward has five products, the forward two; the forward runs again if its output is not saved.
    flops = (
        order.flops * (3.5 + (not share.remat.asked)) * s.data.global_batch / groups / share.sequence / share.features
    )
    work = flops * order.uneven.get(order.order.name, 1.0) / (attention_share(s.model.head_dim) * peak)
    alone = functools.partial(alone_seconds, sizes=mesh.shape, links=links_of(kind))
    waits = waited(s.model, share, work, alone, s.accumulation)
    return work + waits + put_together(s.model, share, memory_rate(kind), s.accumulation)


def resolve(
    stages: Sequence[Stage],
    programs: Sequence[Program],
    datas: Sequence[Data],
    make: Callable[[Stage], Program],
    log: Callable[[str], None],
) -> tuple[list[Stage], list[Program]]:
    """Returns the stages and their programs with `auto` resolved, and logs each choice with its reason. It depends only on the
    first rows of the data and the kind of device, so it is the same on every host and at every start.

    Args:
      datas: the data of each stage. make: returns the program of a stage.
    """
    resolved: list[tuple[Stage, Program]] = []
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
        resolved.append((stage, program))
    return [stage for stage, _ in resolved], [program for _, program in resolved]


def _first_rows(stage: Stage, data: Data) -> np.ndarray:
    """Returns int [rows, T]: the segment ids of the first rows that a stage trains on."""
    data = data.resized(**sizes_of(stage.sections.data))
    first = max(stage.start, data.begin.batch)
    batches = range(first, min(first + -(-ROWS // data.global_batch), max(stage.until, first + 1)))
    rows = [data.batch(number, slice(0, ROWS))["segment_ids"] for number in batches]
    return np.concatenate(rows)[:ROWS]
