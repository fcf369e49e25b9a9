"""What a scheme of expert parallelism declares of its costs, which `dispatch="auto"` and the planner compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ejdist.costs import Traffic, declared
from ejdist.experts.narrow import BF16


def reached(ranks: int, top_k: int, num_experts: int | None = None, max_ranks: int | None = None) -> float:
    """Returns on how many ranks the experts of a token are, on average over routers that prefer none.

    A token has `top_k` different ones of `num_experts` experts, which are spread equally over the ranks; with `max_ranks` all
    are of so many ranks. None: of so many experts that the choices are independent.
    """
    near = ranks if max_ranks is None else min(max_ranks, ranks)
    missed = 1.0  # the probability that no choice is of a rank
    if num_experts is None:
        missed = (1 - 1 / near) ** top_k
    else:
        own = num_experts // ranks
        for i in range(top_k):
            missed *= max(near * own - own - i, 0) / max(near * own - i, 1)
    return near * (1 - missed)


def limit_of_ranks(
    ranks: int, max_ranks: int | None, num_groups: int = 1, topk_groups: int | None = None
) -> int | None:
    """Returns on how many of the ranks the experts of a token are at most, by `max_ranks` and by groups of the router, both of
    which are equal parts of the experts, one after the other; None: on any."""
    limits = [] if max_ranks is None else [max_ranks]
    if num_groups > 1 and topk_groups is not None:
        if num_groups % ranks == 0:  # groups lie whole on a rank
            limits.append(topk_groups)
        elif ranks % num_groups == 0:
            limits.append(topk_groups * ranks // num_groups)
    limit = min(limits, default=ranks)
    return None if limit >= ranks else limit


@dataclass(frozen=True)
class ExchangeShape:
    """Tokens of one layer that go to their experts and back, on one rank and in one microbatch.

    Attributes:
      over: (axis, devices along it) that the experts are split over, the outermost first; none for one device.
      tokens: of this rank. top_k: experts of a token.
      width: numbers of a token's features. hidden: of a row between the products of an expert, on this device.
      itemsize: bytes of a number.
      buffer: rows that a pass has room for, as a multiple of those of balanced experts.
      again: how often the backward takes tokens to their experts once more, to compute the forward again.
      num_experts: of the layer; None: so many that the choices of a token are independent.
      max_ranks: most ranks that a token's experts are on; None: any.
      precision: of the rows that travel, a name of `ejdist.experts.narrow.PRECISIONS`.
    """

    over: tuple[tuple[str, int], ...]
    tokens: int
    top_k: int
    width: int
    hidden: int
    itemsize: int
    buffer: float
    again: int = 0
    num_experts: int | None = None
    max_ranks: int | None = None
    precision: str = BF16

    @property
    def ranks(self) -> int:
        """Devices that the experts are split over."""
        return math.prod(size for _, size in self.over)

    @property
    def row(self) -> int:
        """Bytes of a token's features."""
        return self.width * self.itemsize

    @property
    def pairs(self) -> int:
        """Rows of this rank's tokens, one for each choice."""
        return self.tokens * self.top_k

    @property
    def reached(self) -> float:
        """Ranks that a token meets, where all experts are as likely."""
        return reached(self.ranks, self.top_k, self.num_experts, self.max_ranks)

    def own(self, ranks: int) -> int | None:
        """Experts of one of so many ranks; None where the number of experts is not known."""
        return None if self.num_experts is None else self.num_experts // ranks

    @property
    def rows(self) -> float:
        """Rows of the experts of a device that a pass has room for."""
        return self.pairs * (self.buffer if self.ranks > 1 else 1)

    @property
    def wide(self) -> int:
        """Bytes of these rows where they are as wide as a token."""
        return int(self.rows * self.row)

    @property
    def narrow(self) -> int:
        """Bytes of these rows between the products of an expert."""
        return math.floor(self.rows * self.hidden) * self.itemsize


class Costed:
    """The costs that a scheme declares. One that declares none is refused by name, see `cost_of`.

    stepwise: whether it sends along one axis after the other, in place of over all of them at once.
    """

    stepwise: ClassVar[bool] = False

    def rooms(self, shape: ExchangeShape, chunks: int) -> tuple[int, ...]:
        """Returns the rows that a chunk of a pass has room for: those that travel, level by level, and those of the experts."""
        raise NotImplementedError

    def refusal(self, sizes: tuple[int, ...]) -> str | None:
        """Returns what the scheme needs in place of experts over axes of these sizes ("two axes"); None where it fits."""
        return None

    def precision_refusal(self, precision: str) -> str | None:
        """Returns what the scheme does that rows of a precision of `narrow.PRECISIONS` do not allow; None where it fits."""
        return None

    def cost(self, shape: ExchangeShape) -> Traffic:
        """Returns what a rank sends for one layer in one microbatch, forward and backward, by axis and collective."""
        raise NotImplementedError

    def memory(self, shape: ExchangeShape) -> int:
        """Returns the bytes of rows and tokens on a rank at the height of the backward, with what experts make of them."""
        raise NotImplementedError

    def tpu_memory(self, shape: ExchangeShape) -> int:
        """Returns the bytes that are also there in programs that XLA compiles for TPUs."""
        return 0

    def arriving(self, shape: ExchangeShape) -> float:
        """Returns how many rows or tokens a pass brings to a rank."""
        raise NotImplementedError


_WORK = ("plan", "turn", "forward", "backward")


def cost_of(scheme: Costed, shape: ExchangeShape) -> Traffic:
    """Returns `scheme.cost(shape)`. Raises `Undeclared`, naming the scheme, where it declares none."""
    return declared(scheme, "cost", (*_WORK, "dispatch", "combine"), "the ejdist.costs.Traffic of an ExchangeShape")(
        shape
    )


def memory_of(scheme: Costed, shape: ExchangeShape) -> int:
    """Returns `scheme.memory(shape)`. Raises `Undeclared`, naming the scheme, where it declares none."""
    return declared(scheme, "memory", _WORK, "the bytes of rows on a device, of an ExchangeShape")(shape)


def arriving_of(scheme: Costed, shape: ExchangeShape) -> float:
    """Returns `scheme.arriving(shape)`. Raises `Undeclared`, naming the scheme, where it declares none."""
    return declared(scheme, "arriving", _WORK, "the rows that a pass brings to a rank, of an ExchangeShape")(shape)
