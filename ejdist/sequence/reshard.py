"""From parts of the tokens to parts of the heads, and back: every array of a call by the dims that its contract declares.

Heads are exchanged all at once, or in groups: each rank's part of the heads is then cut into as many groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.order import Order
from ejdist.sequence import exchange
from kernels.engines.attention.masks import MASK_DIMS, MaskInfo, map_data
from kernels.framework.contract import Op
from kernels.framework.platforms import Unsupported


@dataclass(frozen=True)
class Cut:
    """How the entries of a dim are dealt to ranks and to groups of heads.

    Attributes:
      copies: how often each entry is repeated first, so that every rank has the entries that its own part reads: heads of keys
        that are fewer than the ranks.
      sizes: those of the dims that the dim becomes, the ranks first. by: which of them number the groups.
      shared: how many consecutive groups of the call have one group of this dim.
    """

    copies: int
    sizes: tuple[int, ...]
    by: tuple[int, ...]
    shared: int = 1

    def group(self, x: jax.Array, axis: int, number: int) -> jax.Array:
        """Returns the entries of a group along an axis: of the part of every rank, in the order of the ranks."""
        places = np.unravel_index(number, [self.sizes[i] for i in self.by])
        x = x.reshape(*x.shape[:axis], *self.sizes, *x.shape[axis + 1 :])
        index: list[Any] = [slice(None)] * x.ndim
        for i, place in zip(self.by, places, strict=True):
            index[axis + i] = int(place)
        return self._flat(x[tuple(index)], axis, len(self.sizes) - len(self.by))

    def joined(self, groups: Sequence[jax.Array], axis: int) -> jax.Array:
        """Returns the entries of all groups, in the order that they had before they were cut."""
        rest = [n for i, n in enumerate(self.sizes) if i not in self.by]
        before, after = groups[0].shape[:axis], groups[0].shape[axis + 1 :]
        x = jnp.stack([g.reshape(*before, *rest, *after) for g in groups], axis)
        x = x.reshape(*before, *(self.sizes[i] for i in self.by), *rest, *after)
        x = jnp.moveaxis(x, range(axis, axis + len(self.by)), [axis + i for i in self.by])
        return self._flat(x, axis, len(self.sizes))

    @staticmethod
    def _flat(x: jax.Array, axis: int, count: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + count :])


@dataclass(frozen=True)
class Reshard:
    """Moves the arrays of a call along one mesh axis: dims in `gather` become whole, dims in `split` are split in their place.

    An array that has both kinds of dims takes an all-to-all, one that has only a gathered dim is gathered, and one that has
    only a split dim is cut. Gathered tokens are put in the order that they have in the sequence.

    Attributes:
      axis: the mesh axis. order: the order in which its ranks hold the tokens.
      cuts: of the dims in `split`, see `cuts_of`.
      groups: how many groups of heads the call is cut into.
    """

    op: Op
    axis: str
    order: Order
    split: tuple[str, ...]
    gather: tuple[str, ...]
    cuts: Mapping[str, Cut]
    groups: int = 1

    def number(self, name: str, x: jax.Array, group: int) -> int:
        """Returns which group of its own heads an array has in a group of the call: several may have the same."""
        head = self._places(dims := self._dims(name, x))[1]
        return 0 if head is None else group // self.cuts[dims[head]].shared

    def there(self, name: str, x: jax.Array, number: int = 0) -> jax.Array:
        """Returns an argument, or what is saved for the backward, on this rank's part of the split dims: of a group of them."""
        dims = self._dims(name, x)
        token, head = self._places(dims)
        return self._there(x, token, head, None if head is None else self.cuts[dims[head]], number)

    def mask(self, mask: MaskInfo) -> MaskInfo:
        """Returns the mask of the gathered tokens."""
        moved = map_data(mask, lambda field, x: self._there(x, self._places(MASK_DIMS[field])[0], None, None, 0))
        assert moved is not None
        return moved

    def back(self, name: str, x: jax.Array, dtype: Any) -> jax.Array:
        """Returns a group's output, or its gradient of an argument, on this rank's tokens, sent in a dtype.

        A gradient of what has no tokens is this rank's term of a sum over the ranks. That of what has tokens and no heads, such
        as latents, which every rank has whole, is summed here, in float32.
        """
        dims = self._dims(name, x)
        token, head = self._places(dims)
        if token is not None:
            x = self.order.permute(x, token)
        if token is not None and head is None:
            return exchange.scatter_sum(x.astype(jnp.float32), self.axis)
        x = x.astype(dtype)
        if token is not None and head is not None:
            return exchange.all_to_all(x, self.axis, split=token, join=head)
        if head is not None:
            whole = jnp.zeros((*x.shape[:head], x.shape[head] * self.order.shards, *x.shape[head + 1 :]), x.dtype)
            start = exchange.rank(self.axis) * x.shape[head]
            return jax.lax.dynamic_update_slice_in_dim(whole, x, start, head)
        return x

    def joined(self, name: str, groups: Sequence[jax.Array]) -> jax.Array:
        """Returns what came back of all groups of an array as one array: the sum of gradients of what every group has whole,
        and of repeated entries, in float32."""
        head = self._places(dims := self._dims(name, groups[0]))[1]
        if head is None:
            return functools.reduce(jnp.add, groups)
        cut = self.cuts[dims[head]]
        x = groups[0] if len(groups) == 1 else cut.joined(groups, head)
        if cut.copies == 1:
            return x
        x = x.reshape(*x.shape[:head], x.shape[head] // cut.copies, cut.copies, *x.shape[head + 1 :])
        return jnp.sum(x, head + 1, dtype=jnp.float32)

    def _there(self, x: jax.Array, token: int | None, head: int | None, cut: Cut | None, number: int) -> jax.Array:
        if head is not None and cut is not None:
            x = jnp.repeat(x, cut.copies, axis=head) if cut.copies > 1 else x
            x = cut.group(x, head, number) if cut.by else x
        if token is not None and head is not None:
            x = exchange.all_to_all(x, self.axis, split=head, join=token)
        elif token is not None:
            x = exchange.gather(x, self.axis, token)
        elif head is not None:
            size = x.shape[head] // self.order.shards
            x = jax.lax.dynamic_slice_in_dim(x, exchange.rank(self.axis) * size, size, head)
        return x if token is None else self.order.inverse(x, token)

    def _dims(self, name: str, x: jax.Array) -> tuple[str, ...]:
        """Returns the name of each dim of an argument, or of what the backward is given; "" for one that is broadcast.

        Raises:
          Unsupported: its contract does not name a dim.
        """
        parameter = self.op.parameters.get(name)
        dims = self.op.saved_dims[name] if parameter is None else parameter.dims
        if not all(d.name for d in dims):
            raise Unsupported(
                f"ring_attention: argument {name!r} of {self.op.name} has the dims {' '.join(map(str, dims))}: a dim that the "
                "contract does not name cannot be moved between ranks; use a scheme that leaves it where it is, such as 'ring'"
            )
        return tuple("" if d.broadcast and n == 1 else d.name for d, n in zip(dims, x.shape, strict=True))

    def _places(self, dims: tuple[str, ...]) -> tuple[int | None, int | None]:
        """Returns where an array has a gathered dim, and where a split one."""
        token = next((i for i, d in enumerate(dims) if d in self.gather), None)
        return token, next((i for i, d in enumerate(dims) if d in self.split), None)


def cuts_of(
    op: Op, arguments: Mapping[str, Any], split: tuple[str, ...], axis: str, ranks: int, groups: int = 1, outer: int = 1
) -> dict[str, Cut]:
    """Returns dim -> how its entries are dealt to the ranks, and each rank's part to the groups; `outer` as for `undivided`.

    Raises:
      ValueError: a dim does not divide by the ranks, and does not serve groups of another, so no repetition helps; or a rank's
        part does not divide by the groups.
    """
    serves = dict(op.tied_dims)
    sizes = {
        d.name: size
        for name, x in arguments.items()
        for d, size in zip(op.parameters[name].dims, x.shape, strict=True)
        if d.name in split and not d.broadcast
    }
    cuts: dict[str, Cut] = {}
    for dim, size in sizes.items():
        if dim in serves.values():
            continue
        if reason := undivided(size, axis, ranks, groups, outer):
            raise ValueError(f"ring_attention: {reason}")
        second = serves.get(dim, dim)
        copies, part, kv_part, each = dealt(size, sizes.get(second, size), ranks, groups)
        # Each rank's heads of keys in `own` parts, and the queries of each of those in as many as it takes.
        grid = (ranks, each, kv_part // each, groups // each, part // kv_part * each // groups)
        cuts[dim] = Cut(1, grid, tuple(i for i in (1, 3) if grid[i] > 1))
        if second != dim and second in sizes:
            cuts[second] = Cut(copies, grid[:3], (1,) if each > 1 else (), groups // each)
    return cuts


def dealt(heads: int, kv_heads: int, ranks: int, groups: int) -> tuple[int, int, int, int]:
    """Returns (how often a head of keys is repeated, heads of queries on a rank, those of keys, groups of those of keys). Where
    a rank has fewer heads of keys than there are groups, several groups of queries have the same ones."""
    copies = math.lcm(kv_heads, ranks) // kv_heads
    part, kv_part = heads // ranks, copies * kv_heads // ranks
    return copies, part, kv_part, math.gcd(groups, kv_part)


def undivided(heads: int, axis: str, ranks: int, groups: int, outer: int = 1) -> str | None:
    """Returns why so many heads of a device are not for the ranks of an axis, or not in so many groups, and the nearest that
    are; or None.

    Args:
      outer: ranks along the axes before it.
    """
    if heads % ranks:
        most = math.gcd(heads, ranks)
        nearest = f"mesh.{axis}={most} mesh.cp={outer * ranks // most} divides, or " if most > 1 else ""
        return (
            f"{heads} head{'s' * (heads > 1)} on a device cannot be divided over {axis}={ranks}: the ranks of that axis must "
            f"be a divisor of {heads}, with the rest of the sequence over one before it; {nearest}use scheme 'ring'"
        )
    if (own := heads // ranks) % groups:
        nearest = max(n for n in range(1, min(own, groups) + 1) if math.gcd(own, n) == n)
        return (
            f"{heads} heads over {axis}={ranks} are {own} on a rank, which cannot be cut into {groups} groups; use "
            f"head_groups={nearest}"
        )
    return None
