"""Means of the complete blocks of documents, their gradient at the tokens, and the sizes of a call for kernels.

A complete block is stored in slot (index of its last token) // block_size. The last tokens of two complete blocks are at least
block_size apart, so a slot is unique to a block, whatever the documents are: as many slots suffice as for one document.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class CallSizes:
    """Compile-time sizes of kernels; names are those of the contract.

    Attributes:
      NAMED: blocks that a query names at most. SIZE: tokens of a block. BLOCK_Q, BLOCK_K: queries and keys of a tile.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    HV: int
    NAMED: int
    SIZE: int
    SCALE: float
    BLOCK_Q: int
    BLOCK_K: int

    @property
    def tiles(self) -> int:
        """Tiles of queries of a row of the batch and a key head."""
        return -(-self.T // self.BLOCK_Q)

    @property
    def key_tiles(self) -> int:
        return -(-self.S // self.BLOCK_K)


def block_rows(starts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (rows [B, slots, size], ends [B, slots], document starts [B, slots]) of complete blocks.

    In a slot without a block the end is past the last token, and the start -1.
    """
    B, S = starts.shape
    slots = -(-S // size)
    index = jnp.arange(slots * size, dtype=jnp.int32)
    padded = jnp.pad(starts, ((0, 0), (0, slots * size - S)), constant_values=-1)
    last = ((padded >= 0) & ((index - padded) % size == size - 1)).reshape(B, slots, size)
    end = jnp.argmax(last, axis=2).astype(jnp.int32) + size * jnp.arange(slots, dtype=jnp.int32)
    some = last.any(2)
    rows = jnp.clip(end[..., None] + jnp.arange(1 - size, 1, dtype=jnp.int32), 0, S - 1)
    of_slot = jnp.take_along_axis(padded, end, axis=1)
    return rows, jnp.where(some, end, S), jnp.where(some, of_slot, -1)


def means(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the float32 means [B, K, slots, H] of the given rows of x [B, S, K, H]."""
    gathered = jax.vmap(lambda x, rows: x[rows])(x, rows)
    return jnp.mean(gathered.astype(jnp.float32), axis=2).swapaxes(1, 2)


def spread(of_means: jax.Array, starts: jax.Array, ends: jax.Array, of_slot: jax.Array, size: int) -> jax.Array:
    """Returns [B, S, K, H], the gradient of each token of the gradients [B, K, slots, H] of means: each token is in at most one
    complete block, whose end and document are those of its slot."""
    index = jnp.arange(starts.shape[1], dtype=jnp.int32)
    end = starts + (index - starts) // size * size + size - 1
    slot = jnp.minimum(end // size, ends.shape[1] - 1)
    complete = (starts >= 0) & (jnp.take_along_axis(ends, slot, 1) == end)
    complete &= jnp.take_along_axis(of_slot, slot, 1) == starts
    parts = jax.vmap(lambda parts, slot: parts[slot])(of_means.swapaxes(1, 2), jnp.where(starts >= 0, slot, 0))
    return jnp.where(complete[..., None, None], parts, 0) / size


def power(n: int, least: int = 1) -> int:
    """Returns the first power of 2 that is neither below n nor below the least."""
    return max(least, 1 << (n - 1).bit_length())


def overlapped(length: int, other: int, aligned: bool) -> int:
    """Returns the maximum number of runs of `other` tokens that a run of `length` tokens lies in. Aligned, both kinds begin at
    multiples of their lengths; otherwise anywhere.

    >>> overlapped(64, 128, True), overlapped(64, 128, False), overlapped(128, 64, True)
    (1, 2, 2)
    """
    if aligned and other % length == 0:
        return 1
    if aligned and length % other == 0:
        return length // other
    return -(-(length - 1) // other) + 1
