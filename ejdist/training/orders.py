"""The orders that a recipe may take, and how even each is for the documents of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.documents import busiest
from ejdist.mesh import SEQUENCE_AXES
from ejdist.models.model import Flops
from ejdist.models.stack import takes_order
from ejdist.order import AUTO, NAMES, STRIPES, Order, order_for, platform_of
from ejdist.training.attended import keys_seen
from ejdist.training.program import TrainSections

ROWS = 8  # of the first batches, by which an order is chosen
# By how much an order may be less even than the best: those that come first in `NAMES` compare fewer positions and tiles.
ALIKE = 0.05


@dataclass(frozen=True)
class Choice:
    """An order, and how even each of those that divide the rows would be: the pairs of the busiest rank over the mean; of none
    where no layer's attention follows the order.

    flops: of attention in a row, forward, the mean. orders: those that divide the rows.
    """

    order: Order
    uneven: Mapping[str, float]
    documents: float  # in a row, the mean
    rows: int
    flops: float
    orders: Sequence[Order] = ()

    def describe(self) -> str:
        """Returns a line for the log."""
        o = self.order
        stripes = f", {o.stripe} tokens at a time (sequence.stripe)" if o.name in STRIPES else ""
        each = ", ".join(f"{name} {value:.2f}" for name, value in self.uneven.items())
        if not each:
            return f"sequence.order = {AUTO} is {o.name}{stripes}: no layer's attention follows the order of tokens"
        return (
            f"sequence.order = {AUTO} is {o.name}{stripes}: pairs of the busiest of {o.shards} ranks over the mean, in "
            f"{self.rows} row{'s' if self.rows > 1 else ''} with {self.documents:.1f} documents each: {each}; "
            f"sequence.order={o.name} keeps it"
        )


def choose(s: TrainSections, mesh: Any, parts: Sequence[Flops], segment_ids: np.ndarray) -> Choice:
    """Returns the first order of `NAMES` that is as even as the most even one, within 5%, for a recipe's rows; the recipe's own
    where it has one.

    Args:
      mesh: on which they are split. parts: FLOPs of the model's. segment_ids: int [rows, T], some of them.
    """
    over = tuple((axis, n) for axis in SEQUENCE_AXES if (n := mesh.shape.get(axis, 1)) > 1)
    ranks, length = int(np.prod([n for _, n in over])), segment_ids.shape[1]
    seen, scheme = keys_seen(parts, segment_ids), s.sequence.made()
    pinned = s.sequence.order != AUTO
    names = [s.sequence.order] if pinned else NAMES
    orders = [order_for(name, ranks, length, s.sequence.stripe, platform_of(mesh)) for name in names]
    orders = [o for o in orders if pinned or (length % o.multiple == 0 and takes_order(s.model, o))]
    if not orders:
        orders[:] = [order_for(AUTO, ranks, length)]
        orders[0].check(length)
    following = keys_seen([part for part in parts if not part.of_text], segment_ids)
    if following.any():
        uneven = {o.name: busiest(scheme.uneven(o, over).of_ranks(following)) for o in orders}
        best = min(uneven.values())
        chosen = next(o for o in orders if uneven[o.name] <= best * (1 + ALIKE))
    else:
        uneven, chosen = {}, orders[0]
    documents = float(np.mean([len(np.unique(row[row >= 0])) for row in segment_ids]))
    return Choice(chosen, uneven, documents, len(segment_ids), float(seen.sum(1).mean()), orders)
