"""Orders of the sequence: which rank has which tokens. One permutation, applied once to the whole batch.

Everything that depends on where a token is (rotary embedding, masks, dropout) reads positions that were permuted with the
tokens, so an order never changes what is computed, only where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejdist.costs import Undeclared

NAMES = ("contiguous", "zigzag", "striped")


# Whether causal attention joins whole parts of the tokens of two ranks (`Order.joined`), so that no position is compared.
JOINS_PARTS = {"contiguous": True, "zigzag": True, "striped": False}


@dataclass(frozen=True)
class Order:
    """An order of a sequence over `shards` ranks.

    contiguous: rank r has the r-th part. zigzag: of 2 * shards parts, rank r has part r and part 2 * shards - 1 - r, so
    that causal work is even. striped: rank r has tokens r, r + shards, r + 2 * shards, ...
    """

    name: str
    shards: int

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"sequence.order = {self.name!r} is unknown; use one of {', '.join(NAMES)}")
        # Part of what a program is compiled for, so no traced number.
        if isinstance(self.shards, bool) or not isinstance(self.shards, (int, np.integer)):
            raise ValueError(f"an order's 'shards' must be the number of ranks, an integer, got {self.shards!r}")
        if self.shards < 1:
            raise ValueError(f"an order needs at least one shard, got {self.shards}")

    @property
    def multiple(self) -> int:
        """What the sequence length must be a multiple of."""
        return 2 * self.shards if self.name == "zigzag" and self.shards > 1 else self.shards

    def check(self, length: int) -> None:
        """Raises ValueError, naming the remedy, where a sequence of that length cannot be divided."""
        if length % self.multiple:
            nearest = max(self.multiple, round(length / self.multiple) * self.multiple)
            raise ValueError(
                f"sequence length {length} does not divide for order {self.name!r} over {self.shards} ranks: it must be a "
                f"multiple of {self.multiple}; use {nearest}, or another order or number of ranks"
            )

    def positions(self, ranks: Any, length: int) -> Any:
        """Returns int32 [..., length / shards]: which tokens the ranks [...] hold, of a sequence of that length.

        Arithmetic, no table: NumPy for NumPy ranks, traced for traced ones (`axis_index`), O(length / shards) either way.
        """
        self.check(length)
        xp: Any = np if isinstance(ranks, (int, np.integer, np.ndarray)) else jnp
        n, per_rank = self.shards, length // self.shards
        first = xp.asarray(ranks, xp.int32)[..., None]
        if self.name == "striped":
            return first + n * xp.arange(per_rank, dtype=xp.int32)
        if self.name == "contiguous" or n == 1:
            return first * per_rank + xp.arange(per_rank, dtype=xp.int32)
        part = xp.arange(per_rank // 2, dtype=xp.int32)
        return xp.concatenate([first * (per_rank // 2) + part, (2 * n - 1 - first) * (per_rank // 2) + part], axis=-1)

    def joined(self, earlier: bool, own: int) -> tuple[slice, slice] | None:
        """Returns (queries, keys) of the `own` tokens of two ranks: the parts of which causal attention joins every query of
        one rank with every key of another that is `earlier` in the order, or later; None where it joins none.

        Of a rank's own tokens causal attention joins what is in order, for every order is ascending on a rank. Striped
        tokens of two ranks are joined one by one, and have no such parts.
        """
        assert self.name != "striped", self
        if self.name == "contiguous":
            return (slice(0, own), slice(0, own)) if earlier else None
        half = own // 2
        return (slice(0, own), slice(0, half)) if earlier else (slice(half, own), slice(0, own))

    @property
    def in_parts(self) -> bool:
        """Whether no position is compared, see `JOINS_PARTS`. Raises `Undeclared` for an order that has no line there."""
        if self.name not in JOINS_PARTS:
            raise Undeclared(
                f"the order {self.name!r} does not declare what it costs: say in JOINS_PARTS of ejdist/order.py whether causal "
                "attention joins whole parts of the tokens of two ranks"
            )
        return JOINS_PARTS[self.name]

    def of_groups(self, size: int) -> Order | None:
        """Returns the order of groups of `size` neighbouring ranks, each of which has its tokens in `Order(name, size)`; None
        where that has no name: groups of striped ranks have runs of tokens."""
        groups = self.shards // size
        return None if self.name == "striped" and groups > 1 else Order(self.name, groups)

    def indices(self, length: int) -> np.ndarray:
        """Returns int32 [length]: place p of the permuted sequence holds token indices[p].

        Raises:
          ValueError: the length does not divide; names the remedy.
        """
        return self.positions(np.arange(self.shards), length).reshape(-1)

    def permute(self, x: Any, axis: int = 1) -> Any:
        """Returns x with its sequence dim in this order. x may be a NumPy or JAX array."""
        axis = _axis_of(x, axis)
        if self.name == "striped":
            return x.take(self.indices(x.shape[axis]), axis=axis)
        return self._by_parts(x, axis, back=False)

    def inverse(self, x: Any, axis: int = 1) -> Any:
        """Returns x with its sequence dim back in the original order."""
        axis = _axis_of(x, axis)
        if self.name == "striped":
            return x.take(np.argsort(self.indices(x.shape[axis])), axis=axis)
        return self._by_parts(x, axis, back=True)

    def _by_parts(self, x: Any, axis: int, back: bool) -> Any:
        """Returns x with its parts, which are whole in either order, in this one, or back in theirs: the first parts of all
        ranks ascend, and the second ones descend. Slices and joins, which compilers copy once; an index takes TPUs many."""
        self.check(x.shape[axis])
        if self.name == "contiguous" or self.shards == 1:
            return x
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        before, after, n = x.shape[:axis], x.shape[axis + 1 :], self.shards
        table = (n, 2) if back else (2, n)
        up, down = xp.split(x.reshape(*before, *table, x.shape[axis] // (2 * n), *after), 2, axis + back)
        down = xp.flip(down, axis + (not back))
        up, down = up.swapaxes(axis, axis + 1), down.swapaxes(axis, axis + 1)
        return xp.concatenate([up, down], axis + (not back)).reshape(x.shape)


def _axis_of(x: Any, axis: int) -> int:
    """Returns which axis of x that is, counted from the first."""
    if not hasattr(x, "shape"):
        raise ValueError(f"an order permutes NumPy and JAX arrays, got {type(x).__name__}; give numpy.asarray of it")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"argument 'axis' = {axis} is not one of the {x.ndim} axes of an array of shape {tuple(x.shape)}; it is that of "
            "the sequence, 0 for one sequence [T]"
        )
    return axis % x.ndim


def order_of(order: str | Order, shards: int, where: str, what: str = "ring_attention: argument 'order'") -> Order:
    """Returns the order by name, for that many ranks; `where` names what they are the ranks of, and `what` who gave it.

    Raises:
      ValueError: no order of that name, or an `Order` for another number of ranks.
    """
    if isinstance(order, Order):
        if order.shards != shards:
            raise ValueError(
                f"{what} = {order} is for {order.shards} ranks, and this call has {shards} "
                f"({where}); split the sequence over {order.shards} ranks, or permute by an Order for {shards}"
            )
        return order
    if order not in NAMES:
        raise ValueError(f"{what} = {order!r} is unknown; use one of {', '.join(NAMES)}, or an Order")
    return Order(order, shards)
