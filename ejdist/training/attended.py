"""The attention of a batch: how much each token has, and how even it is over the devices. NumPy, on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ejdist.costs import Undeclared
from ejdist.documents import busiest, places
from ejdist.mesh import SEQUENCE_AXES
from ejdist.models.model import Flops
from ejdist.sequence.schedule import chunk_of, chunks_of_rows, needed_of_rows
from ejdist.sequence.way import Way
from ejdist.training.attending import exchanged, share_of
from ejdist.training.program import Program, TrainSections
from kernels.engines.attention.pairs import keys_at


def keys_seen(parts: Iterable[Flops], segment_ids: np.ndarray) -> np.ndarray:
    """Returns float64 [B, T]: forward FLOPs of attention of each token in all layers, from the segment ids of whole rows; 0 for
    padding."""
    at, weights = places(segment_ids), defaultdict(float)
    for pair, mask in (one for part in parts for one in part.attends):
        weights[mask] += pair
    seen = np.zeros(at.shape)
    for mask, pair in weights.items():
        seen += pair * keys_at(mask, at.reshape(-1)).reshape(at.shape)
    return np.where(segment_ids >= 0, seen, 0.0)


@dataclass(frozen=True)
class Attended:
    """The attention of some rows of a batch, in an order.

    Attributes:
      seen: float64 [rows, T], of each token, in the order of the text.
      in_runs: the same, of the layers alone whose ranks attend for a run of the text, whatever the order (`Flops.of_text`).
      index: int32 [rows, T], which token of the text lies at each place, if each row has an order of its own; else None.
      padding: the share of tokens that are padding.
      needed: bool [rows, ranks], at which hops of a ring some rank needs a key of another, by the documents.
      chunks: int64 [rows], how many chunks of another rank a rank needs at most.
    """

    seen: np.ndarray
    in_runs: np.ndarray
    index: np.ndarray | None
    padding: float
    needed: np.ndarray
    chunks: np.ndarray

    @classmethod
    def of(cls, program: Program, segment_ids: np.ndarray) -> Attended:
        """Returns the attention of rows with these segment ids, int [rows, T], of the batches of a program."""
        seen = keys_seen(program.model.flops, segment_ids)
        in_runs = keys_seen((part for part in program.model.flops if part.of_text), segment_ids)
        index = program.order.text_indices(seen) if program.order.carried else None
        at = np.arange(segment_ids.shape[1])
        first = np.where(segment_ids >= 0, at - places(segment_ids), at)
        needed, chunks = (of(program.order, first, index) for of in (needed_of_rows, chunks_of_rows))
        return cls(seen, in_runs, index, float(np.mean(segment_ids < 0)), needed, chunks)

    def evenness(self, program: Program, s: TrainSections) -> dict[str, float]:
        """Returns the metrics of a step. All rows of some groups of devices that share the batch, one after another.

        imbalance_sp: attention of the busiest of the ranks that a sequence is split over, over the mean. imbalance_dp: of the
        busiest of those groups. Both wait in each microbatch. padding_share: of the tokens. hops_sp: how often a ring that
        makes the hops of a batch sends a rank's keys on, in layers whose queries see all that is before them in their document;
        the mean of microbatches. Where a scheme sends chunks, passes_sp: in how many passes they come; keys_sp: how many keys a
        rank sends for them in a forward, over its own; the mean of microbatches too.
        """
        sizes, n, rows = program.mesh.shape, program.order.shards, len(self.seen)
        per_group = s.data.global_batch // program.groups
        placed = program.order.permute(self.seen - self.in_runs, index=self.index) + self.in_runs
        over = tuple((axis, size) for axis in SEQUENCE_AXES if (size := sizes.get(axis, 1)) > 1)
        waiting = s.sequence.made().uneven(program.order, over).shards if over else 1
        # Of each group, of each microbatch, of each rank that waits; rows of a microbatch are as far apart as there are some.
        pairs = placed.reshape(rows // per_group, -1, s.accumulation, waiting, n // waiting, placed.shape[1] // n)
        pairs = pairs.sum((1, 4, 5))
        hops, chunks = self._met(program, s)
        scheme = s.sequence.made()
        brought = [b for some in chunks if n > 1 and (b := scheme.brought(n, some)) is not None]
        sent = dict(zip(("passes_sp", "keys_sp"), np.mean(brought, 0).tolist(), strict=True)) if brought else {}
        return sent | {
            "imbalance_sp": busiest(pairs),
            "imbalance_dp": busiest(pairs.sum(-1).T),
            "padding_share": self.padding,
            "hops_sp": float(np.mean(hops)),
        }

    def sent(self, program: Program, s: TrainSections) -> dict[str, float]:
        """Returns bytes_sp of a step: what a device sends along the sequence, of keys and values, their gradients, and states
        of recurrences, by the costs that schemes and layers declare and what each microbatch needs. Not where one of them
        declares none."""
        if program.order.shards == 1:
            return {"bytes_sp": 0.0}
        share = share_of(s, program.mesh, program.order)
        each = (replace(share, met=met) for met in zip(*self._met(program, s), strict=True))
        try:
            return {"bytes_sp": float(sum(sum(exchanged(s.model, one).bytes.values()) for one in each))}
        except Undeclared:
            return {}

    def _met(self, program: Program, s: TrainSections) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns of each microbatch how often a ring that makes its hops sends keys on, and how many chunks of another rank a
        rank needs at most, of how many."""
        n, rows, per_group = program.order.shards, len(self.seen), s.data.global_batch // program.groups
        needed = self.needed.reshape(rows // per_group, -1, s.accumulation, n).any((0, 1))
        chunks = self.chunks.reshape(rows // per_group, -1, s.accumulation).max((0, 1))
        own = self.seen.shape[1] // n
        every = own // chunk_of(program.order, own)
        hops = [int(Way.of(row, n > 2 and not program.order.goes_on).sent) for row in needed]
        return hops, [(int(most), every) for most in chunks]


def text_indices(program: Program, segment_ids: np.ndarray) -> np.ndarray | None:
    """Returns int32 [rows, T], which token of the text lies at each place, if each row has an order of its own; else None."""
    return Attended.of(program, segment_ids).index if program.order.carried else None
