"""The way of a ring: which hops it makes, of those that the documents of a batch need."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.order import AUTO, Order
from ejdist.sequence import exchange

# Which hops a ring makes: those that the rules of a mask leave, or of these the ones that some rank needs for a batch.
BY_MASK, BY_BATCH = "mask", "batch"


def check_hops(what: str, hops: str) -> None:
    """Raises ValueError, naming what it is of, where hops are chosen by a word that is unknown."""
    if hops not in (known := (AUTO, BY_MASK, BY_BATCH)):
        raise ValueError(f"{what} = {hops!r} is unknown; use one of {', '.join(known)}")


# Tokens of a rank from which a loop of as many hops as a batch needs is worth its cost. On four H100s, both directions, 32
# heads of 128, packed documents of 4,096 in contiguous order: 8% less time at 16,384 tokens a rank; 67% more at 2,048, where
# the host reads the number for 1.5 ms.
LONG = 8192


def few_hops(order: Order, tokens: int) -> bool:
    """Returns whether "auto" chooses hops by the documents of a batch, with `tokens` tokens a rank."""
    return order.few_hops and tokens >= LONG


def by_batch(hops: str, few: bool) -> bool:
    """Returns whether the documents of a batch say which hops are made; `few` as of `few_hops`."""
    return hops == BY_BATCH or (hops == AUTO and few)


@dataclass(frozen=True)
class Way:
    """Where a ring goes: hops 0 to `up`, one after another, and then hops `start` to the last, if any; `start` is the number of
    ranks if there are none. Numbers of a batch, which may be traced."""

    up: Any
    start: Any
    ranks: int
    jumps: bool

    @classmethod
    def of(cls, needed: Any, jumps: bool) -> Way:
        """Returns the way with the fewest transfers.

        Args:
          needed: bool [ranks], whether some rank needs that hop.
          jumps: whether hops may be left out between others, which takes one transfer more: what came to the next hop goes on
            from there. Else the way ends with the last hop that is needed.
        """
        xp: Any = np if isinstance(needed, np.ndarray) else jnp
        n, number = needed.shape[0], xp.arange(needed.shape[0], dtype=np.int32)
        # The last hop up to each that is needed.
        seen = xp.maximum.accumulate(xp.where(needed, number, 0))
        last, none = seen[-1], xp.full((), n, np.int32)
        if not jumps:
            return cls(last, none, n, False)
        gap = xp.where(needed[1:], number[1:] - seen[:-1], 0)
        start = (xp.argmax(gap) + 1).astype(np.int32)
        up = seen[start - 1]
        fewer = (gap[start - 1] > 0) & (up + 1 + n - start < last)
        return cls(xp.where(fewer, up, last), xp.where(fewer, start, none), n, True)

    @property
    def last(self) -> Any:
        """The last hop that is made."""
        return self._if_on(self.ranks - 1, self.up)

    @property
    def sent(self) -> Any:
        """How often the keys of a rank are sent."""
        return self.up + self._if_on(1 + self.ranks - self.start, 0)

    def next(self, hop: Any, tree: Any, axis: exchange.Axis) -> tuple[Any, Any]:
        """Returns the hop that is made after this one, and what has come one hop on as it is there."""
        if not self.jumps:
            return hop + 1, tree
        by = jnp.where((hop == self.up) & (self.start < self.ranks), self.start - self.up - 1, 0)
        return hop + 1 + by, self._shifted(tree, axis, by, 1)

    def before(self, hop: Any, tree: Any, axis: exchange.Axis) -> tuple[Any, Any]:
        """Returns the hop that is made before this one, and what has come one hop back as it is there."""
        if not self.jumps:
            return hop - 1, tree
        by = jnp.where(hop == self.start, self.start - self.up - 1, 0)
        return hop - 1 - by, self._shifted(tree, axis, by, -1)

    def _shifted(self, tree: Any, axis: exchange.Axis, by: Any, way: int) -> Any:
        ways = [functools.partial(exchange.shift, axis=axis, by=way * hops) for hops in range(self.ranks - 1)]
        return jax.lax.switch(by, ways, tree)

    def _if_on(self, then: Any, otherwise: Any) -> Any:
        on = self.start < self.ranks
        return (jnp if isinstance(on, jax.Array) else np).where(on, then, otherwise)
