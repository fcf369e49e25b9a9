"""Layers with a window or chunks, and the others: each kind by a scheme of its own, in one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ejdist.costs import Traffic, declared
from ejdist.order import AUTO, Order
from ejdist.sequence import exchange, halo
from ejdist.sequence.cost import ALWAYS, NEVER, AttentionShape, Axes, SchemeBytes, attention_shape
from ejdist.sequence.local import Local
from ejdist.sequence.scheme import Scheme
from ejdist.sequence.schemes import Halo, Ring, scheme_of


@dataclass(frozen=True)
class ByWindow(Scheme):
    """`full` for layers whose queries see all keys before them, `window` for layers with a window or chunks. Without `window`
    those take `Halo` if it sends less than `full`. `latents` as of a `Scheme`, for both."""

    full: Scheme = field(default_factory=Ring)
    window: Scheme | None = None
    latents: str = AUTO  # pyrefly: ignore[bad-override]

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        return self._of(_shape_of(local)).forward(local)

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return self._of(_shape_of(local)).backward(local, saved)

    def takes_sinks(self, local: Local) -> bool:
        return self._of(_shape_of(local)).takes_sinks(local)

    def counts_hops(self, local: Local) -> bool:
        return self._of(_shape_of(local)).counts_hops(local)

    @property
    def hides(self) -> bool:  # pyrefly: ignore[bad-override]
        return _declared(self.full, "hides")

    @property
    def reads_batch(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.full.reads_batch

    @property
    def blocks(self) -> float | None:  # pyrefly: ignore[bad-override]
        return self.full.blocks

    def brought(self, ranks: int, chunks: tuple[int, int]) -> tuple[int, float] | None:
        return self.full.brought(ranks, chunks)

    def rejects(self, heads: int, over: Axes) -> str | None:
        return self.full.rejects(heads, over) or (self.window.rejects(heads, over) if self.window else None)

    def uneven(self, order: Order, over: Axes) -> Order:
        return self.full.uneven(order, over)

    def expansions(self, shape: AttentionShape) -> float:
        return self._of(shape).expansions(shape)

    def cost(self, shape: AttentionShape) -> Traffic:
        return _declared(self._of(shape), "cost")(shape)

    def waited(self, shape: AttentionShape) -> float:
        return self._of(shape).waited(shape)

    def passes(self, shape: AttentionShape) -> float:
        return self._of(shape).passes(shape)

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return _declared(self._of(shape), "memory")(shape)

    def _of(self, shape: AttentionShape) -> Scheme:
        if shape.halo is None:
            return self.full
        if self.window is not None:
            return self.window
        every = replace(shape, chunks=None)  # a call does not know what its batches need
        few, full = (sum(cost.bytes.values()) for cost in (Halo().cost(every), _declared(self.full, "cost")(every)))
        return Halo(self.full) if few < full else self.full


def by_window(scheme: str | Scheme, window: str | Scheme | None, latents: str = AUTO) -> ByWindow:
    """Returns the schemes of a recipe, `sequence.scheme` and `sequence.window_scheme`, as one, with its `sequence.latents`.

    Raises:
      ValueError: latents always travel, and one of the schemes moves keys and values alone.
    """
    full, of_window = scheme_of(scheme), None if window is None else scheme_of(window)
    alone = next((x for x in (full, of_window) if x is not None and x.latents == NEVER), None)
    if alone is not None and latents == ALWAYS:
        raise ValueError(
            f"sequence.latents = {latents!r}: the scheme {type(alone).__name__} moves keys and values alone; use {NEVER}, or "
            "another scheme"
        )
    return ByWindow(full, of_window, NEVER if full.latents == NEVER else latents)


def _declared(scheme: Scheme, what: str) -> Any:
    """Returns `cost`, `memory` or `hides` of a scheme. Raises `Undeclared`."""
    means = "whether transfers run beside work" if what == "hides" else f"the {what} of an AttentionShape"
    return declared(scheme, what, ("forward", "backward"), means)


def _shape_of(local: Local) -> AttentionShape:
    """Returns a call as schemes are asked for its cost."""
    axes = (local.axis,) if isinstance(local.axis, str) else local.axis
    over = tuple((a, exchange.size(a)) for a in axes)
    reaches = halo.sent(local.static.order, local.query.shape[1] * local.ranks, local.static.reach)
    return attention_shape(over, local.sizes, local.query.dtype.itemsize, len(local.hops) - 1, reaches)
