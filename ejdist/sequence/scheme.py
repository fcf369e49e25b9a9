"""What a scheme of sequence parallelism is: the class that each of them implements."""

from __future__ import annotations

from typing import ClassVar

import jax

from ejdist.costs import Traffic, declared
from ejdist.order import Order
from ejdist.sequence.cost import NEVER, AttentionShape, Axes, SchemeBytes
from ejdist.sequence.local import Local

# The fraction of the time that communication takes alone that is waited for: of a scheme that overlaps it with work, and of
# others. On four H200s, 8k and 32k tokens each: 0.20 to 0.31 for rings, 0.74 to 0.89 for Ulysses
# (benchmarks/results/sequences).
WAITED = {True: 0.3, False: 0.85}


class Scheme:
    """The attention of a rank's queries over the keys of all ranks, forward and backward. Stateless, frozen, hashable.

    A scheme is never differentiated, and sees no sinks unless it `takes_sinks`: the code around it does both. `local` answers
    for masks and positions. Results are this rank's own.

    all_ids: whether it needs the segment ids of all ranks' keys, and the caller's own positions, see `Local.mask`.
    latents: when it sends the latents of latent attention instead of keys and values, see `latents.py`. A scheme can if it
      reads no argument of the operation by name; it then declares `expansions`.
    reads_batch: whether the batch says how often it sends; on GPUs the host then reads that number.
    blocks: the buffer with which native sparse attention sends the blocks that are selected, see `sparse_blocks.py`; None: it
      gathers all keys.
    hides: whether its transfers run beside attention. The planner refuses a scheme that does not declare `hides`, `cost` and
      `memory`.
    """

    hides: ClassVar[bool]
    all_ids: ClassVar[bool] = True
    reads_batch: ClassVar[bool] = False
    latents: ClassVar[str] = NEVER
    blocks: ClassVar[float | None] = None

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse), float32, over all keys."""
        raise NotImplementedError

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradients of `local.keys` and of the floats of `local.own`, by name.

        `saved` has d_out, and the lse and delta of the whole softmax, so a part of the keys gives its part of the gradient.
        """
        raise NotImplementedError

    def takes_sinks(self, local: Local) -> bool:
        """Returns whether its forward is one call of the operation over all keys that a query sees. Sinks are then an argument
        of that call, among `local.own`; else they join in a pass over the output. A backward sees them in the lse alone."""
        return False

    def counts_hops(self, local: Local) -> bool:
        """Returns whether it makes only the hops that the documents of a batch need, and so asks for `Local.needed`."""
        return False

    def rejects(self, heads: int, over: Axes) -> str | None:
        """Returns why it cannot split the sequence over these axes with `heads` query heads on a device, or None."""
        return None

    def uneven(self, order: Order, over: Axes) -> Order:
        """Returns the order that says how even the work of ranks is that wait for each other: `order` itself, unless the scheme
        makes the work of some of them even whatever the mask and the documents."""
        return order

    def brought(self, ranks: int, chunks: tuple[int, int]) -> tuple[int, float] | None:
        """Returns (in how many passes a rank gets keys of others, how many keys it is sent in all, over its own); None for a
        scheme that makes hops.

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

    def waited(self, shape: AttentionShape) -> float:
        """Returns the fraction of the time that its transfers take alone that is waited for."""
        return WAITED[declared(self, "hides", ("forward", "backward"), "whether transfers run beside work")]

    def passes(self, shape: AttentionShape) -> float:
        """Returns the bytes of its own memory that a rank reads and writes for a layer, forward and backward, besides what
        attention over the same tokens of one device does."""
        return 0.0

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        """Returns the bytes that a rank holds for keys of other ranks and for sums over ranks. `shape.ranks` is at least 2."""
        raise NotImplementedError
