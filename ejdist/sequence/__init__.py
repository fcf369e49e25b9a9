"""Sequence parallelism in four parts that know nothing of each other: order, schedule, exchange, local op and merge."""

from ejdist.sequence.attention import merge, ring_attention
from ejdist.sequence.order import Order

__all__ = ["Order", "merge", "ring_attention"]
