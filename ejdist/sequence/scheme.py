"""What a scheme of sequence parallelism is: the class that each of them implements."""

from __future__ import annotations

from typing import ClassVar

import jax

from ejdist.costs import Traffic
from ejdist.order import Order
from ejdist.sequence.cost import NEVER, AttentionShape, Axes, SchemeBytes
from ejdist.sequence.local import Local


class Scheme:
    """The attention of a rank's queries over the keys of all ranks, forward and backward. Stateless, frozen, hashable.

    What every scheme needs is done around it: a scheme sees no sinks and is never differentiated, and `local` answers for
    masks and positions. Results are this rank's own.

    all_ids: whether it needs the segment ids of the keys of all ranks, and positions of the caller's own, see `Local.mask`.
    latents: when it moves the latents of latent attention in the place of keys and values, see `latents.py`. A scheme that
      reads no argument of the operation by name can; it then declares `expansions`.
    reads_batch: whether how often it sends is always a number of the batch, which a GPU's host reads.
    timed: whether it has been timed on devices. Plans and `sequence.scheme=auto` take another one by name alone.
    hides: whether its transfers run beside attention over keys that are there already. A scheme declares `hides`, `cost` and
    `memory` for the planner, which refuses one that does not.
    """

    hides: ClassVar[bool]
    all_ids: ClassVar[bool] = True
    reads_batch: ClassVar[bool] = False
    timed: ClassVar[bool] = True
    latents: ClassVar[str] = NEVER

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse), float32, over all keys."""
        raise NotImplementedError

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradients of `local.keys` and of the floats of `local.own`, by name.

        `saved` has d_out, and the lse and delta of the whole softmax, so a part of the keys gives its part of the gradient.
        """
        raise NotImplementedError

    def counts_hops(self, local: Local) -> bool:
        """Returns whether it makes only the hops that the documents of a batch need, and so asks for `Local.needed`."""
        return False

    def rejects(self, heads: int, over: Axes) -> str | None:
        """Returns why it cannot have that many heads of queries on a device over a sequence that is split over those axes, or
        None."""
        return None

    def uneven(self, order: Order, over: Axes) -> Order:
        """Returns the order by which work is divided among what waits for each other: that of the ranks, unless some of them
        have even work whatever the mask and the documents."""
        return order

    def brought(self, ranks: int, chunks: tuple[int, int]) -> tuple[int, float] | None:
        """Returns (in how many passes the keys of others come to a rank, how many keys it is sent for them, over its own); None
        for a scheme that makes hops.

        Args:
          chunks: how many of another rank a rank needs at most, and how many each has, see `chunks_of_documents`.
        """
        return None

    def expansions(self, shape: AttentionShape) -> float:
        """Returns how often at most the ranks together make the keys and values of a token of latents, in a forward."""
        raise NotImplementedError

    def cost(self, shape: AttentionShape) -> Traffic:
        """Returns what a rank sends for one layer in one microbatch, forward and backward, by axis and collective."""
        raise NotImplementedError

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        """Returns the bytes that a rank holds for keys of other ranks and for sums over ranks. `shape.ranks` is at least 2."""
        raise NotImplementedError
