"""Sequence parallelism in parts that know little of each other: order, schedule, exchange, local attention, and schemes."""

from ejdist.order import Order
from ejdist.sequence.attention import ring_attention
from ejdist.sequence.exchange import compiler_options
from ejdist.sequence.group_cast import GroupCast
from ejdist.sequence.native_sparse import Exchange
from ejdist.sequence.scheme import Scheme
from ejdist.sequence.schemes import SCHEMES, AllGather, Halo, Ring, Ulysses
from ejdist.sequence.windows import by_window
from kernels.engines.attention.softmax import merge

__all__ = [
    "AllGather", "Exchange", "GroupCast", "Halo", "Order", "Ring", "SCHEMES", "Scheme", "Ulysses", "by_window",
    "compiler_options", "merge", "ring_attention",
]  # fmt: skip
