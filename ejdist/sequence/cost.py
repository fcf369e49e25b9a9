"""What a scheme of sequence parallelism is asked for the cost of, and what it answers for memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ejdist.order import Order
from ejdist.sequence.schedule import hops
from kernels.engines.attention.masks import MaskInfo


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer on one rank, in one microbatch. Bytes are of the heads of this device, in the compute dtype.

    Attributes:
      axis: the mesh axis that the sequence is split over. ranks: devices along it.
      hops: how many of the other ranks hold keys that some rank needs, by the order and the mask; 0 for none.
      query, key, value, out: bytes of the arrays of this rank.
      itemsize: bytes of a number in the compute dtype.
      forwards: how often the forward runs in a step: 2 where the backward computes attention again.
    """

    axis: str
    ranks: int
    hops: int
    query: int
    key: int
    value: int
    out: int
    itemsize: int
    forwards: int = 1

    @property
    def float32(self) -> int:
        """How many times as large an array is in float32, in which sums over ranks are made."""
        return 4 // self.itemsize


@dataclass(frozen=True)
class SchemeBytes:
    """Bytes on a device beside those of attention on one device.

    work: at the height of the backward. gpu_zeros: of the zeros that a loop over ranks starts from, in forward and backward.
    """

    work: int
    gpu_zeros: int = 0


@functools.lru_cache(maxsize=1024)
def needed_hops(order: Order, length: int, mask: MaskInfo) -> int:
    """Returns how many of the other ranks hold keys that some rank needs, over a sequence of that length.

    Args:
      mask: without arrays, of one document a row.
    """
    return len(hops(order, length, mask)) - 1
