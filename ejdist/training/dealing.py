"""Rows of a batch dealt to groups of devices and to microbatches so that these have equal attention. NumPy, on the host.

In each microbatch all groups wait for the one with the most attention, which grows with the squares of the lengths of
documents. Which group and which microbatch has a row is free: a step's gradient is a sum over its rows. So the heaviest rows
share a microbatch, the next ones the next, and within a microbatch each row, heaviest first, goes to the group that has least
so far (Graham, Bounds on multiprocessing timing anomalies, 1969). Then the heaviest group exchanges a row with another one, as
long as that makes the heavier of the two lighter. Rows stay whole, so documents are cut where the packing cuts them. ByteScale
(2025) and verl sort by length within a global batch too, with microbatches of any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ejdist.training.data.batches import AUTO, NONE, ROWS
from ejdist.training.data.shard_packing import READ_WHOLE
from ejdist.training.program import Program, TrainSections

_EXCHANGES = 8  # of two rows, for each group, at most


def waited_for(weights: np.ndarray, groups: int, microbatches: int) -> float:
    """Returns the weight of the heaviest group of each microbatch, summed.

    Args:
      weights: float [rows], at the places of a batch: a group has neighbours, and every `microbatches`-th of these is of one
        microbatch.
    """
    return float(weights.reshape(groups, -1, microbatches).sum(1).max(0).sum())


def least_waited_for(weights: np.ndarray, groups: int, microbatches: int) -> float:
    """Returns what `waited_for` is at least, however rows are dealt: the mean of the groups, or more where one row is more than
    that. The heaviest rows of the microbatches are no lighter in sum than every k-th of all rows, heaviest first, for k rows of
    a microbatch; with one row for each group `dealt` is that. In a single microbatch some group has k + 1 of the heaviest
    k * groups + 1 rows, for any k, beside the lightest of all.
    """
    rows = np.sort(weights)[::-1]
    least = max(rows.sum() / groups, rows[:: len(rows) // microbatches].sum())
    if microbatches == 1:
        each = len(rows) // groups
        for k in range(each):
            least = max(least, rows[k * groups - k : k * groups + 1].sum() + rows[len(rows) - each + k + 1 :].sum())
    return float(least)


def dealt(weights: np.ndarray, groups: int, microbatches: int) -> np.ndarray:
    """Returns int64 [rows]: which row of the batch lies at each place, as drawn where no other is less uneven. A pure function
    of its arguments, so that every host deals alike.

    Args:
      weights: float [rows], of the rows as drawn. groups, microbatches: their product divides the rows.
    """
    rows = len(weights)
    each = rows // (groups * microbatches)
    place = np.empty((groups, each, microbatches), np.int64)
    sorted_rows = np.argsort(-weights, kind="stable").reshape(microbatches, groups * each)
    for microbatch, members in enumerate(sorted_rows):
        load, count = np.zeros(groups), np.zeros(groups, np.int64)
        for row in members:
            group = int(np.where(count < each, load, np.inf).argmin())
            place[group, count[group], microbatch] = row
            load[group] += weights[row]
            count[group] += 1
        _exchange(place[:, :, microbatch], weights, load)
    found = place.reshape(rows)
    as_drawn = np.arange(rows)
    sizes = groups, microbatches
    return found if waited_for(weights[found], *sizes) < waited_for(weights, *sizes) else as_drawn


def _exchange(place: np.ndarray, weights: np.ndarray, load: np.ndarray) -> None:
    """Exchanges rows of the heaviest group of a microbatch, while that makes the heavier of two groups lighter.

    Args:
      place: int64 [groups, rows of each], which row lies where; changed in place, as is `load` [groups], the weight of each.
    """
    groups, each = place.shape
    for _ in range(_EXCHANGES * groups * (each > 1)):
        most, own = load.argmax(), weights[place]
        less = own[most][:, None, None] - own  # [row of the heaviest, other group, row of it]
        heavier = np.maximum(load[most] - less, load[:, None] + less)
        heavier[:, most] = np.inf
        row, other, theirs = np.unravel_index(heavier.argmin(), heavier.shape)
        if not heavier[row, other, theirs] < load[most]:
            return
        place[most, row], place[other, theirs] = place[other, theirs], place[most, row]
        load[most] -= less[row, other, theirs]
        load[other] += less[row, other, theirs]


def nothing_to_deal(data: Any, program: Program) -> str | None:
    """Returns why all ways of dealing are alike; None where they are not."""
    if not any(part.pair for part in program.model.flops):
        return "the model has no attention"
    if program.groups == 1:
        return "all devices work on every row"
    if data.global_batch == program.groups:
        return "each group of devices has one row"
    return None


def dealer(data: Any, program: Program, s: TrainSections) -> Callable[[int], np.ndarray] | None:
    """Returns a function of a batch's number: which row of it lies at each place, int64 [rows]. None where rows stay as they
    are drawn.

    Raises:
      ValueError: data.balance asks for what these rows cannot have.
    """
    if s.data.balance == ROWS and not data.has_squares:
        raise ValueError(
            f"data.balance = {ROWS} needs the lengths of the documents in all rows of a step, which the data "
            f"({data.packing.order}) does not give; set data.balance={AUTO}, or see squares of "
            "ejdist.training.data.packing.Rows for rows of your own"
        )
    if s.data.balance == NONE or not data.has_squares or nothing_to_deal(data, program):
        return None
    if s.data.balance == AUTO and data.bytes_of_lengths > READ_WHOLE:
        return None
    return lambda number: dealt(data.squares(number), program.groups, s.accumulation)


def described(data: Any, program: Program, s: TrainSections) -> str | None:
    """Returns a line for the log: how uneven the rows of the first batch are as drawn and as dealt, or why none are dealt.
    None where that needs no word."""
    key, nothing = f"data.balance = {s.data.balance}", nothing_to_deal(data, program)
    deal = dealer(data, program, s)
    if deal is None and s.data.balance == ROWS:
        return f"{key} deals no rows: {nothing}"
    if deal is None and s.data.balance == AUTO and data.has_squares and not nothing:
        return (
            f"{key} deals no rows: each host would read {data.bytes_of_lengths / 2**20:,.0f} MiB of lengths of documents; "
            f"data.balance={ROWS} reads them, and data.packing=even and whole keep a number for each row"
        )
    if deal is None:
        return None
    first = data.begin.batch
    weights, sizes = data.squares(first), (program.groups, s.accumulation)
    mean = weights.sum() / program.groups
    drawn, even = (waited_for(w, *sizes) / mean for w in (weights, weights[deal(first)]))
    if s.data.balance == AUTO and drawn - even < 0.01:
        return None
    microbatches = f" and {s.accumulation} microbatches" if s.accumulation > 1 else ""
    return (
        f"{key} deals the {data.global_batch} rows of a step to {program.groups} groups of devices{microbatches}: attention of "
        f"the busiest over the mean, in the first batch, {even:.2f}, and {drawn:.2f} as drawn"
    )
