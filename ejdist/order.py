"""Orders of the sequence: which rank has which tokens. One permutation, applied once to the whole batch, or one of each row.

Everything that depends on where a token is (rotary embedding, masks, dropout) reads positions that were permuted with the
tokens, so an order never changes what is computed, only where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.balance import text_indices
from ejdist.costs import Undeclared

NAMES = ("contiguous", "zigzag", "striped", "balanced")


# Whether causal attention joins whole parts of the tokens of two ranks (`Order.joined`), so that no position is compared.
JOINS_PARTS = {"contiguous": True, "zigzag": True, "striped": False, "balanced": False}
# Whether each run of a rank's tokens is followed by one of the next rank, around: what lies before a token in the text is on
# the ranks before its own.
GOES_ON = {"contiguous": True, "zigzag": False, "striped": True, "balanced": False}
# Whether the text of a rank is one run, so that packed documents reach few other ranks.
_ONE_RUN = ("contiguous",)
# The orders that deal out runs of `Order.stripe` tokens.
STRIPES = ("striped", "balanced")
# The orders that are another one for each row, which the batch carries as data.
CARRIED = ("balanced",)
# A recipe's word for the order that its data asks for.
AUTO = "auto"
# Tokens of the longest tile of attention's kernels, by platform. A stripe is as long where nobody says how long: a tile of
# shorter stripes has several that are far apart, and is computed over all keys between them.
TILES = {"tpu": 1024}
_TILE = 128
# Stripes of a rank that make packed documents even; with more, stripes are up to two tiles.
_MANY = 64
# And of a rank that has not two tiles.
_FEW = 8


@dataclass(frozen=True)
class Order:
    """An order of a sequence over `shards` ranks.

    contiguous: rank r has the r-th part. zigzag: of 2 * shards parts, rank r has part r and part 2 * shards - 1 - r, so
    that causal work of one document is even. striped: rank r has every token t with (t // stripe) % shards == r, so that
    packed documents are nearly even too. balanced: every rank has as many chunks of `stripe` tokens, chosen by the attention of
    each, so that any documents are even: another choice for each row, see `carried`.
    """

    name: str
    shards: int
    stripe: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"an order's 'name' = {self.name!r} is unknown; use one of {', '.join(NAMES)}")
        # Part of what a program is compiled for, so no traced numbers.
        for what, n in (
            ("'shards' must be the number of ranks", self.shards),
            ("'stripe' must be tokens", self.stripe),
        ):
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise ValueError(f"an order's {what}, an integer, got {n!r}")
        if self.shards < 1:
            raise ValueError(f"an order's 'shards' must be at least 1 rank, got {self.shards}")
        if self.stripe < 1:
            raise ValueError(f"an order's 'stripe' must be at least 1 token, got {self.stripe}")
        if self.stripe > 1 and self.name not in STRIPES:
            raise ValueError(
                f"an order's 'stripe' = {self.stripe} is for {', '.join(STRIPES)}, and {self.name!r} has no stripes: leave it "
                "out (sequence.stripe=null)"
            )

    @property
    def multiple(self) -> int:
        """What the sequence length must be a multiple of."""
        return 2 * self.shards if self.name == "zigzag" and self.shards > 1 else self.shards * self.stripe

    def check(self, length: int) -> None:
        """Raises ValueError, naming the remedy, where a sequence of that length cannot be divided."""
        if length % self.multiple and length % self.shards == 0 and self.stripe > 1:
            own = length // self.shards
            raise ValueError(
                f"sequence length {length} does not divide into stripes of {self.stripe} tokens over {self.shards} ranks, each "
                f"of which has {own}: use stripes of {nearest_stripe(own, self.stripe)} (sequence.stripe), or another length"
            )
        if length % self.multiple:
            nearest = max(self.multiple, round(length / self.multiple) * self.multiple)
            raise ValueError(
                f"sequence length {length} (data.sequence_length) does not divide for order {self.name!r} over {self.shards} "
                f"ranks (mesh.sp, mesh.cp): it must be a multiple of {self.multiple}; use {nearest}, or another order or "
                "number of ranks"
            )

    @property
    def carried(self) -> bool:
        """Whether each row has a permutation of its own: a batch carries it as int32 [B, T], which token of the text lies at
        each place (`text_indices`), and attention takes it as positions."""
        return self.name in CARRIED and self.shards > 1

    def _check_fixed(self) -> None:
        if self.carried:
            raise ValueError(
                f"order {self.name!r} is another one for each row of a batch: give 'index', as `Order.text_indices` returns it"
            )

    def positions(self, ranks: Any, length: int) -> Any:
        """Returns int32 [..., length / shards]: which tokens the ranks [...] hold, of a sequence of that length.

        Arithmetic, no table: NumPy for NumPy ranks, traced for traced ones (`axis_index`), O(length / shards) either way.

        Raises:
          ValueError: the length does not divide, or the order is `carried`; names the remedy.
        """
        self._check_fixed()
        self.check(length)
        xp: Any = np if isinstance(ranks, (int, np.integer, np.ndarray)) else jnp
        n, per_rank = self.shards, length // self.shards
        first = xp.asarray(ranks, xp.int32)[..., None]
        if self.name == "striped":
            place = xp.arange(per_rank, dtype=xp.int32)
            return first * self.stripe + place // self.stripe * (n * self.stripe) + place % self.stripe
        if self.name == "contiguous" or n == 1:
            return first * per_rank + xp.arange(per_rank, dtype=xp.int32)
        part = xp.arange(per_rank // 2, dtype=xp.int32)
        return xp.concatenate([first * (per_rank // 2) + part, (2 * n - 1 - first) * (per_rank // 2) + part], axis=-1)

    def runs(self, own: int) -> np.ndarray:
        """Returns int32 [shards, runs]: which part of the text each run of a rank's `own` tokens is. A run is tokens that
        follow one another, and the text is cut into parts as long.

        Raises:
          ValueError: the length does not divide, or the order is `carried`; names the remedy.
        """
        self._check_fixed()
        self.check(own * self.shards)
        if self.shards == 1:
            return np.zeros((1, 1), np.int32)
        if self.in_parts:
            return self.indices(self.multiple).reshape(self.shards, -1)
        return replace(self, stripe=1).positions(np.arange(self.shards), own // self.stripe * self.shards)

    def joined(self, earlier: bool, own: int) -> tuple[slice, slice] | None:
        """Returns (queries, keys) of the `own` tokens of two ranks: the parts of which causal attention joins every query of
        one rank with every key of another that is `earlier` in the order, or later; None where it joins none.

        Of a rank's own tokens causal attention joins what is in order, for every order is ascending on a rank. Stripes of
        two ranks are joined in turn, and have no such parts.
        """
        assert self.in_parts, self
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

    @property
    def goes_on(self) -> bool:
        """See `GOES_ON`."""
        return GOES_ON.get(self.name, False)

    @property
    def few_hops(self) -> bool:
        """Whether documents reach few other ranks, as a rank has one run of the text."""
        return self.name in _ONE_RUN

    def of_groups(self, size: int) -> Order:
        """Returns the order of groups of `size` neighbouring ranks, each of which has its tokens in `self.of_members(size)`."""
        if self.carried:
            return replace(self, shards=self.shards // size)
        return replace(self, shards=self.shards // size, stripe=self.stripe * (size if self.name in STRIPES else 1))

    def of_members(self, size: int) -> Order:
        """Returns the order of a group's tokens over its `size` ranks, see `of_groups`. An index moves with the tokens, so that
        the ranks of a `carried` order may have them in any order."""
        return Order("contiguous", size) if self.carried else replace(self, shards=size)

    def indices(self, length: int) -> np.ndarray:
        """Returns int32 [length]: place p of the permuted sequence holds token indices[p].

        Raises:
          ValueError: the length does not divide; names the remedy.
        """
        return self.positions(np.arange(self.shards), length).reshape(-1)

    def text_indices(self, seen: np.ndarray) -> np.ndarray:
        """Returns int32 [..., T]: which token of the text lies at each place of a row. A pure function of the row.

        Args:
          seen: [..., T]: the attention of each token of whole rows, such as the number of keys that it sees.
        """
        length = seen.shape[-1]
        if not self.carried:
            return np.broadcast_to(self.indices(length), seen.shape)
        self.check(length)
        return text_indices(seen, self.shards, self.stripe)

    def permute(self, x: Any, axis: int = 1, index: Any = None) -> Any:
        """Returns x with its sequence dim in this order. x may be a NumPy or JAX array.

        Args:
          index: of a `carried` order: int32 [B, T], as `text_indices` returns it; then axis 0 of x is B and 1 is T.
        """
        axis = _axis_of(x, axis)
        if self.carried and index is not None:
            return _taken(x, index)
        self._check_fixed()
        if self.name == "striped":
            return self._dealt(x, axis, lambda cycles: (cycles, self.shards))
        return self._by_parts(x, axis, back=False)

    def inverse(self, x: Any, axis: int = 1, index: Any = None) -> Any:
        """Returns x with its sequence dim back in the original order; `index` as in `permute`."""
        axis = _axis_of(x, axis)
        if self.carried and index is not None:
            return _taken(x, (np if isinstance(index, np.ndarray) else jnp).argsort(index, axis=1))
        self._check_fixed()
        if self.name == "striped":
            return self._dealt(x, axis, lambda cycles: (self.shards, cycles))
        return self._by_parts(x, axis, back=True)

    def _dealt(self, x: Any, axis: int, rows: Callable[[int], tuple[int, int]]) -> Any:
        """Returns x with its stripes, which are a table of so many rows and columns, in the order of the columns."""
        self.check(x.shape[axis])
        table = (*x.shape[:axis], *rows(x.shape[axis] // self.multiple), self.stripe, *x.shape[axis + 1 :])
        return x.reshape(table).swapaxes(axis, axis + 1).reshape(x.shape)

    def _by_parts(self, x: Any, axis: int, back: bool) -> Any:
        """Returns x with its parts, which are whole in either order, in this one, or back in theirs: the first parts of all
        ranks ascend, and the second ones descend. Slices and joins, which compilers copy once; an index takes TPUs many."""
        self.check(x.shape[axis])
        if self.name == "contiguous" or self.shards == 1:
            return x
        if isinstance(x, np.ndarray):
            return _joined(np, x, axis, self.shards, back)
        return _joined_by_jax(jnp, x, axis, self.shards, back)

    def of_ranks(self, seen: np.ndarray) -> np.ndarray:
        """Returns int64 [..., shards]: the pairs of each rank, from the keys [..., length] that each token of a row sees."""
        if self.carried:
            lie = np.take_along_axis(seen, self.text_indices(seen), -1)
        else:
            lie = self.permute(seen, -1)
        return lie.reshape(*seen.shape[:-1], self.shards, -1).sum(-1)


def _joined(xp: Any, x: Any, axis: int, n: int, back: bool) -> Any:
    """Returns x with the two parts of each of n ranks in another order, see `Order._by_parts`; xp is the library of x."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    table = (n, 2) if back else (2, n)
    up, down = xp.split(x.reshape(*before, *table, x.shape[axis] // (2 * n), *after), 2, axis + back)
    down = xp.flip(down, axis + (not back))
    up, down = up.swapaxes(axis, axis + 1), down.swapaxes(axis, axis + 1)
    return xp.concatenate([up, down], axis + (not back)).reshape(x.shape)


# Outside of a program too it is one, and not one for each slice and join.
_joined_by_jax = jax.jit(_joined, static_argnums=(0, 2, 3, 4), inline=True)


def _taken(x: Any, index: Any) -> Any:
    """Returns x [B, T, ...] with row b's tokens in the order index[b]."""
    xp: Any = np if isinstance(x, np.ndarray) and isinstance(index, np.ndarray) else jnp
    return xp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def nearest_stripe(own: int, stripe: int) -> int:
    """Returns the divisor of a rank's `own` tokens that is nearest to a stripe, the smaller of two."""
    return min((d for d in range(1, own + 1) if own % d == 0), key=lambda d: (abs(d - stripe), d))


def stripe_of(length: int, shards: int, platform: str | None = None) -> int:
    """Returns the tokens of a stripe where nobody says how many: the largest divisor of a rank's tokens up to a tile of the
    platform's kernels, or two tiles where that leaves 64 stripes; an eighth of the tokens if these are not two tiles. 1 where
    the ranks do not divide the length."""
    own, tile = length // shards, TILES.get(platform or "", _TILE)
    most = min(max(own // _MANY, tile), 2 * tile) if own >= 2 * tile else max(1, own // _FEW)
    return 1 if length % shards else max(d for d in range(1, most + 1) if own % d == 0)


def order_for(name: str, shards: int, length: int, stripe: int | None = None, platform: str | None = None) -> Order:
    """Returns the order of that name for rows of that length, with stripes of `stripe_of` tokens unless it is said how many.

    `AUTO`, where there is no data to ask, is the most even order for one document a row.

    Args:
      stripe: for an order that has stripes; no other reads it. platform: of the devices, as JAX names it.

    Raises:
      ValueError: the name is unknown.
    """
    if name == AUTO:
        name = "zigzag" if length % (2 * shards) == 0 else "contiguous"
    if name not in STRIPES:
        return Order(name, shards)
    return Order(name, shards, stripe_of(length, shards, platform) if stripe is None else stripe)


def platform_of(mesh: Any) -> str | None:
    """Returns the platform of a mesh's devices, as JAX names it; None for a mesh without devices."""
    return mesh.devices.flat[0].platform if isinstance(mesh, jax.sharding.Mesh) else None


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
