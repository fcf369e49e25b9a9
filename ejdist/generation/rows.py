"""The rows of a step of a generation: the requests that they are of, and where their tokens are."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rows:
    """The requests of the rows of a step.

    slots: int [B], the slot of the request's states; past the last slot for a row without a request.
    lengths: int [B], tokens of the request up to the end of this step; 0 without a request.
    fresh: bool [B], whether the request starts in this step.
    tables: int [B, pages of the longest], the request's pages.
    entries: int [B, T], the entry of a new token among those of all pages of a layer; -1 for padding.
    """

    slots: jax.Array
    lengths: jax.Array
    fresh: jax.Array
    tables: jax.Array
    entries: jax.Array

    @classmethod
    def of(cls, tables: jax.Array, slots: jax.Array, before: jax.Array, new: jax.Array, length: int, page: int) -> Rows:
        """Args:
        tables, slots: see the attributes. before, new: int [B], tokens of a request before this step, and in it.
        length: tokens per row. page: tokens per page.
        """
        positions = positions_of(before, new, length)
        real = positions >= 0
        where = jnp.take_along_axis(tables, jnp.maximum(positions, 0) // page, axis=1)
        entries = jnp.where(real, where * page + positions % page, -1)
        return cls(slots, jnp.where(new > 0, before + new, 0), before == 0, tables, entries)


def positions_of(before: jax.Array, new: jax.Array, length: int) -> jax.Array:
    """Returns int [B, length]: the position of each token of a row in its request, -1 for the padding before them."""
    place = jnp.arange(length) - (length - new[:, None])
    return jnp.where(place >= 0, before[:, None] + place, -1)
