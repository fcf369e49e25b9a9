"""Visits of blocks of tokens, for kernels of TPUs: a block, or the part of one that belongs to one sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.scan.layout import Layout

SMEM_BYTES = 512 * 2**10  # that the table of visits may take
# The fields of a visit in the table, and its flags: its sequence begins or ends there, its block is another than that of the
# visit before or after it.
FIELDS = 5
BLOCK, FIRST, LAST, STATE, FLAGS = range(FIELDS)
BEGINS, ENDS, FRESH, FRESH_BACK = 1, 2, 4, 8


def most_visits(T: int, num_states: int, size: int) -> int:
    """Returns the number of visits of a row, in blocks of `size` tokens."""
    return -(-T // size) + (num_states if num_states > 1 else 0)


def visits(B: int, T: int, segment_ids: jax.Array | None, num_states: int, size: int) -> tuple[jax.Array, Layout]:
    """Returns (the table int32 [B * visits * FIELDS], which tokens count and which states have none).

    A row is cut every `size` tokens and where one of several sequences begins: a sequence is what lies from its first token to
    the first of the next. Resets between documents of one state are not cuts, they are decays.
    """
    blocks = -(-T // size)
    cuts = jnp.broadcast_to(jnp.arange(0, blocks * size, size, dtype=jnp.int32), (B, blocks))
    if num_states == 1:
        valid, empty = None if segment_ids is None else segment_ids >= 0, None
        of, begins, ends = jnp.zeros_like(cuts), cuts == 0, cuts == (blocks - 1) * size
        stops = jnp.broadcast_to(jnp.minimum(cuts + size, T), cuts.shape)
    else:
        G = num_states
        ids = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids
        valid = (ids >= 0) & (ids < G)
        rows, position = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
        before = jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        heads = jnp.where(valid & (ids != before), ids, G)  # few of all tokens: only these are scattered
        first = jnp.full((B, G), T, jnp.int32).at[rows, heads].min(position[None], mode="drop")
        empty = first == T
        # What precedes the first sequence is padding, and belongs to it; so does all of a row without any.
        first = first.at[rows[:, 0], jnp.argmin(first, axis=1)].set(0)
        cuts = jnp.sort(jnp.concatenate([cuts, first], axis=1), axis=1)
        stops = jnp.minimum(jnp.pad(cuts[:, 1:], ((0, 0), (0, 1)), constant_values=T), T)
        # The sequence of a cut is the one that begins last until there: none begin together, but at the end.
        starts = first[:, None]
        of = jnp.argmax(jnp.where((starts <= cuts[..., None]) & (starts < T), starts, -1), axis=2).astype(jnp.int32)
        begins = cuts == jnp.take_along_axis(first, of, axis=1)
        ends = stops == jnp.min(jnp.where(starts > cuts[..., None], starts, T), axis=2)
    block = jnp.minimum(cuts // size, blocks - 1)
    low, high, used = cuts - block * size, stops - block * size, stops > cuts
    other = block[:, 1:] != block[:, :-1]
    fresh = jnp.pad(other, ((0, 0), (1, 0)), constant_values=True)
    fresh_back = jnp.pad(other, ((0, 0), (0, 1)), constant_values=True)
    flags = sum(
        jnp.where(flag, bit, 0)
        for flag, bit in (
            (begins & used, BEGINS),
            (ends & used, ENDS),
            (fresh, FRESH),
            (fresh_back, FRESH_BACK),
        )
    )
    table = jnp.stack([block, low, high, of, flags], axis=-1).astype(jnp.int32)
    return table.reshape(-1), Layout(blocks, valid, None, None, empty)
