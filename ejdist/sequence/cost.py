"""The call of which a scheme of sequence parallelism declares the cost, and the memory that it declares; and what a recurrence
sends."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ejdist.costs import ALL_REDUCE, ALL_TO_ALL, PERMUTE, Traffic
from ejdist.documents import Documents
from ejdist.mesh import SP
from ejdist.order import Order
from ejdist.sequence.schedule import chunk_of, chunks_by_rules, chunks_of_rows, hops, needed_of_rows
from ejdist.sequence.way import Way, by_batch
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import keys_at

Axes = tuple[tuple[str, int], ...]
# When latents travel in the place of the keys and values that are made of them; AUTO: where that is cheaper.
ALWAYS, NEVER = "always", "never"


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer on one rank, in one microbatch. Bytes are of the heads of this device, in the compute dtype.

    Attributes:
      over: (axis, devices along it) of the mesh axes that the sequence is split over, the outermost first.
      hops: how many of the other ranks hold keys that some rank needs, by the order and the mask; 0 for none.
      query, key, value, out: bytes of the arrays of this rank. lse: of a float32 number for each query and head.
      heads, kv_heads: heads of queries, and of keys and values, on this device.
      itemsize: bytes of a number in the compute dtype.
      halo: the tokens that a rank sends at most of those that ranks need just before theirs, over its own, and in how many
        transfers, see `ejdist.sequence.halo.sent`; None where the mask or the order sets no such limit.
      forwards: how often the forward runs in a step: 2 where the backward computes attention again.
      by_batch: how often the keys of a rank are sent on, at most, where the documents of a batch say which hops are made; None
        where the mask's rules say it all. few_hops: whether they do by default.
      latents: bytes of the latents of this rank's tokens where these travel, and keys and values are made of them where they
        arrive; 0: keys and values travel.
      chunks: how many chunks of another rank a rank needs at most, and how many a rank has, see `chunks_of_documents`; None:
        all of those that `hops` name.
      torus: whether devices have links to their neighbours, each of which carries one direction of a ring.
      tiles: of this rank's queries, of all rows, where kernels add in place and keys may come in groups of heads; 0: they do
        not.
      expansion: FLOPs of making the keys and values of this rank's tokens and heads of latents, once.
    """

    over: Axes
    hops: int
    query: int
    key: int
    value: int
    out: int
    lse: int
    heads: int
    kv_heads: int
    itemsize: int
    forwards: int = 1
    halo: tuple[float, int] | None = None
    latents: int = 0
    expansion: int = 0
    by_batch: int | None = None
    few_hops: bool = False
    torus: bool = False
    chunks: tuple[int, int] | None = None
    tiles: int = 0

    @property
    def travelling(self) -> int:
        """Bytes of what travels of this rank's tokens."""
        return self.latents or self.key + self.value

    @property
    def axis(self) -> str:
        """The axis along which traffic around all ranks is counted: the outermost, whose links are the slowest."""
        return next((axis for axis, n in self.over if n > 1), self.over[-1][0])

    def sent_on(self, hops: str) -> int:
        """Returns how often a rank's keys are sent on, where a scheme chooses its hops by that word."""
        return self.hops if self.by_batch is None or not by_batch(hops, self.few_hops) else self.by_batch

    @property
    def ranks(self) -> int:
        """Devices that the sequence is split over."""
        return math.prod(n for _, n in self.over)

    @property
    def float32(self) -> int:
        """How many times as large an array is in float32, the dtype of sums over ranks."""
        return 4 // self.itemsize


@dataclass(frozen=True)
class SchemeBytes:
    """Bytes on a device beside those of attention on one device.

    work: at the height of the backward. gpu_zeros: of the zeros that a loop over ranks starts from, in forward and backward.
    in_place: whether there are none where kernels add a hop's results in place, see `ejdist.sequence.in_place`.
    """

    work: int
    gpu_zeros: int = 0
    in_place: bool = False


def attention_shape(
    over: Axes, dims: Mapping[str, int], itemsize: int, hops: int, halo: tuple[float, int] | None = None
) -> AttentionShape:
    """Returns the attention of a call on a rank, by the sizes of the dims of its operation. With a dim R it is of latents that
    travel."""
    tokens, N, K, wide = dims["B"] * dims["T"], dims["N"], dims["K"], dims["H"] + dims.get("Hr", 0)
    query, key, value, out = (itemsize * tokens * n for n in (N * wide, K * wide, K * dims["Hv"], N * dims["Hv"]))
    shape = AttentionShape(over, hops, query, key, value, out, 4 * tokens * N, N, K, itemsize, halo=halo)
    if "R" not in dims:
        return shape
    latents = itemsize * tokens * (dims["R"] + dims.get("Hr", 0))
    return replace(shape, latents=latents, expansion=2 * tokens * dims["R"] * K * (dims["H"] + dims["Hv"]))


@functools.lru_cache(maxsize=1024)
def needed_hops(order: Order, length: int, mask: MaskInfo) -> int:
    """Returns how many of the other ranks hold keys that some rank needs, over a sequence of that length.

    Args:
      mask: without arrays, of one document a row.
    """
    return len(hops(order, length, mask)) - 1


@functools.lru_cache(maxsize=1024)
def hops_of_documents(order: Order, length: int, mask: MaskInfo, documents: Documents) -> int | None:
    """Returns how often the keys of a rank are sent on so that every rank has those that it needs, of the sample's rows the
    most; None for one document a row, of which the rules say it all.

    Args:
      mask: causal, without arrays: the rules inside a document.
    """
    if not documents.lengths or order.shards == 1 or not mask.causal:
        return None
    rows = np.stack(documents.rows(length))
    seen = np.stack([keys_at(mask, row) for row in rows])
    needed = needed_of_rows(order, np.arange(length) + 1 - seen, order.text_indices(seen) if order.carried else None)
    return max(int(Way.of(row, order.shards > 2 and not order.goes_on).sent) for row in needed)


@functools.lru_cache(maxsize=1024)
def chunks_of_documents(order: Order, length: int, mask: MaskInfo, documents: Documents) -> tuple[int, int]:
    """Returns (how many chunks of another rank a rank needs at most, of the sample's rows the most; how many a rank has).

    Args:
      mask: without arrays: the rules inside a document.
    """
    tokens = length // order.shards
    every = tokens // chunk_of(order, tokens)
    if order.shards == 1:
        return 0, every
    if documents.lengths and mask.causal and mask.sink_tokens is None:
        rows = np.stack(documents.rows(length))
        seen = np.stack([keys_at(mask, row) for row in rows])
        index = order.text_indices(seen) if order.carried else None
        return int(chunks_of_rows(order, np.arange(length) + 1 - seen, index).max()), every
    table = chunks_by_rules(order, length, mask)
    return every if table is None else int(table.sum(-1).max()), every


def states_sent(
    order: Order, own: int, state: int, tokens: int, axis: str = SP, exchanged: bool | None = None
) -> Traffic:
    """Returns what a rank sends so that a recurrence goes on over the ranks, in one pass, forward or backward: for one
    document a row, and at most for several.

    Args:
      order: one that is the same for all rows. own: a rank's tokens of a row.
      state: bytes of a map of one run of tokens. tokens: bytes of all arguments and outputs of a rank's tokens.
      exchanged: whether tokens are exchanged to contiguous order, or each run has a map; None: what sends less.
    """
    ranks, runs = order.runs(own).shape
    if exchanged is None:
        both = (states_sent(order, own, state, tokens, axis, one) for one in (False, True))
        return min(both, key=lambda sent: sum(sent.bytes.values()))
    sent = Traffic()
    if ranks == 1:
        return sent
    # A prefix scan by doubling, without the last hop, whose result nobody needs, and then one hop to the next rank.
    hops, maps, part = (ranks - 2).bit_length() + 1, 1 if exchanged else runs, (ranks - 1) / ranks
    sent.add(axis, PERMUTE, hops * maps * state, hops)
    if maps > 1:
        sent.add(axis, ALL_REDUCE, 2 * part * (maps - 1) * state)
    if exchanged and runs > 1:
        sent.add(axis, ALL_TO_ALL, part * tokens)
    return sent
