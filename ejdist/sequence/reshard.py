"""From parts of the tokens to parts of the heads, and back: every array of a call by the dims that its contract declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.order import Order
from ejdist.sequence import exchange
from kernels.engines.attention.masks import MASK_DIMS, MaskInfo, map_data
from kernels.framework.contract import Op
from kernels.framework.platforms import Unsupported


@dataclass(frozen=True)
class Reshard:
    """Moves the arrays of a call along one mesh axis: dims in `gather` become whole, dims in `split` are split in their place.

    An array that has both kinds of dims takes an all-to-all, one that has only a gathered dim is gathered, and one that has
    only a split dim is cut. Gathered tokens are put in the order that they have in the sequence.

    Attributes:
      axis: the mesh axis. order: the order in which its ranks hold the tokens.
      copies: how often each entry of a split dim is repeated first, so that every rank has the entries that its own part reads:
        heads of keys that are fewer than the ranks.
    """

    op: Op
    axis: str
    order: Order
    split: tuple[str, ...]
    gather: tuple[str, ...]
    copies: Mapping[str, int]

    def there(self, name: str, x: jax.Array) -> jax.Array:
        """Returns an argument, or what is saved for the backward, on this rank's part of the split dims."""
        return self._there(self._dims(name, x), x)

    def mask(self, mask: MaskInfo) -> MaskInfo:
        """Returns the mask of the gathered tokens."""
        moved = map_data(mask, lambda field, x: self._there(MASK_DIMS[field], x))
        assert moved is not None
        return moved

    def back(self, name: str, x: jax.Array) -> jax.Array:
        """Returns an output, or the gradient of an argument, on this rank's tokens.

        A gradient of what has no tokens is this rank's term of a sum over the ranks; of repeated entries it is summed, in
        float32.
        """
        dims = self._dims(name, x)
        token, head = self._places(dims)
        if token is not None:
            x = self.order.permute(x, token)
        if token is not None and head is not None:
            x = exchange.all_to_all(x, self.axis, split=token, join=head)
        elif head is not None:
            whole = jnp.zeros((*x.shape[:head], x.shape[head] * self.order.shards, *x.shape[head + 1 :]), x.dtype)
            start = exchange.rank(self.axis) * x.shape[head]
            x = jax.lax.dynamic_update_slice_in_dim(whole, x, start, head)
        elif token is not None:
            raise Unsupported(
                f"{self.op.name}: {name!r} has the dims {' '.join(dims)}, none of {', '.join(self.split)}, so every rank of "
                f"{self.axis!r} has all of it, and no rank is the one whose part counts"
            )
        copies = 1 if head is None else self.copies.get(dims[head], 1)
        if head is None or copies == 1:
            return x
        x = x.reshape(*x.shape[:head], x.shape[head] // copies, copies, *x.shape[head + 1 :])
        return jnp.sum(x, head + 1, dtype=jnp.float32)

    def _there(self, dims: tuple[str, ...], x: jax.Array) -> jax.Array:
        token, head = self._places(dims)
        if head is not None:
            x = jnp.repeat(x, self.copies.get(dims[head], 1), axis=head)
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


def copies_of(op: Op, arguments: Mapping[str, Any], split: tuple[str, ...], axis: str, ranks: int) -> dict[str, int]:
    """Returns dim -> how often its entries are repeated to be split over the ranks, for the dims that need it.

    Raises:
      ValueError: a dim does not divide by the ranks, and does not serve groups of another, so no repetition helps.
    """
    serves = {second for _, second in op.tied_dims}
    sizes = {
        d.name: size
        for name, x in arguments.items()
        for d, size in zip(op.parameters[name].dims, x.shape, strict=True)
        if d.name in split and not d.broadcast
    }
    for dim, size in sizes.items():
        if size % ranks and dim not in serves:
            raise ValueError(
                f"ring_attention: dim {dim} = {size} cannot be divided over the {ranks} ranks of {axis!r}, each of which would "
                f"have a part: make that axis a divisor of {size}, with the rest of the sequence over one before it (mesh.cp), "
                "or use scheme 'ring'"
            )
    return {dim: math.lcm(size, ranks) // size for dim, size in sizes.items() if size % ranks}
