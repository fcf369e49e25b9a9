"""Rows of a convolution over documents: its tokens without the padding between them, behind the states that they continue.

In these rows a window is W adjacent ones, of which as many count as its segment has. A kernel walks over them, and reads and
writes tokens where they lie: nothing is sorted, and no token is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan.recurrence import resets

NOTHING = -(2**31)  # source of an entry of a final state that no row has: 0


class Rows(NamedTuple):
    """The rows of each batch entry, R = T + states · (W - 1) of them, padding last; int32.

    Attributes:
      source: [B, R], position of a token, or -1 - i for entry i of the initial states [G · (W - 1)], of which there are none
        if the call has no initial state.
      seen: [B, R], the number of rows of its segment before it, or -1 for padding.
      leaves: [B, R], the entry of the final states [G · (W - 1)] that a row becomes, or -1.
      final: [B, G · (W - 1)], the source of each entry of the final states, or NOTHING.
    """

    source: jax.Array
    seen: jax.Array
    leaves: jax.Array
    final: jax.Array


def rows(segment_ids: jax.Array | None, shape: tuple[int, int], num_states: int, taps: int, has_state: bool) -> Rows:
    """Returns the rows of [B, T] = `shape` tokens in windows of `taps` + 1.

    With several states, the tokens of each segment must be contiguous but for padding.
    """
    (B, T), G = shape, num_states
    lead = taps if has_state else 0
    ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    valid = (ids >= 0) & (ids < G) if G > 1 else ids >= 0
    until = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    rank, count = until - 1, until[:, -1:]
    index = jnp.arange(B)[:, None]
    if G == 1:
        new = resets(ids)
        row = rank + lead
        begin = jax.lax.cummax(jnp.where(new, row, 0), axis=1)
        last = jnp.cumsum(new, axis=1) == jnp.sum(new, axis=1, keepdims=True)
        behind = jnp.where(last, count - 1 - rank, T)  # rows of the last segment behind a token
        state, states_begin = jnp.zeros_like(ids), jnp.zeros((B, 1), jnp.int32)
        size = jnp.where(jnp.any(new, axis=1, keepdims=True), T + taps, count)
        which = states_begin
    else:
        heads = valid & (ids != jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1))
        starts = jnp.full((B, G), T, jnp.int32).at[index, jnp.where(heads, ids, G)].min(rank, mode="drop")
        starts = jnp.minimum(starts, count)
        which = jnp.argsort(starts, axis=1, stable=True).astype(jnp.int32)  # an empty one may precede any
        place = jnp.argsort(which, axis=1).astype(jnp.int32)
        starts = jnp.take_along_axis(starts, which, axis=1)
        size = jnp.diff(starts, axis=1, append=count)
        states_begin = starts + lead * jnp.arange(G, dtype=jnp.int32)
        state = jnp.clip(ids, 0, G - 1)
        order = jnp.take_along_axis(place, state, axis=1)
        row = rank + lead * (order + 1)
        begin = jnp.take_along_axis(states_begin, order, axis=1)
        behind = jnp.take_along_axis(starts + size, order, axis=1) - 1 - rank
    position = jnp.arange(T, dtype=jnp.int32)
    row = jnp.where(valid, row, count + G * lead + position - until)
    seen = jnp.where(valid, row - begin, -1)
    leaves = jnp.where(valid & (behind < taps), state * taps + taps - 1 - behind, -1)
    source = jnp.broadcast_to(position, shape)
    if lead:
        entry = jnp.arange(lead, dtype=jnp.int32)
        behind = size[..., None] + lead - 1 - entry
        kept = which[..., None] * taps + taps - 1 - behind
        of_states: Any = (
            states_begin[..., None] + entry,
            -1 - (which[..., None] * taps + entry),
            entry,
            jnp.where(behind < taps, kept, -1),
        )
        flat = (jnp.broadcast_to(x, (B, G, lead)).reshape(B, -1) for x in of_states)
        row, source, seen, leaves = (jnp.concatenate(x, axis=1) for x in zip(flat, (row, source, seen, leaves)))
    table = jnp.stack([source, seen, leaves], axis=-1).astype(jnp.int32)
    table = jnp.zeros_like(table).at[index, row].set(table, unique_indices=True, mode="promise_in_bounds")
    left = jnp.where(leaves < 0, G * taps, leaves)
    final = jnp.full((B, G * taps), NOTHING, jnp.int32).at[index, left].set(source, mode="drop")
    return Rows(table[..., 0], table[..., 1], table[..., 2], final)


def final_state(x: jax.Array, state: jax.Array | None, found: Rows | None, num_states: int, taps: int) -> jax.Array:
    """Returns the last `taps` inputs of each sequence, float32 [B, G · taps, F].

    Args:
      x: [B, T, F].
      state: float32 [B, G · taps, F], or None.
    """
    (B, T, F), entries = x.shape, num_states * taps
    if found is None:
        last = x[:, max(T - taps, 0) :].astype(jnp.float32)
        before = jnp.zeros((B, entries, F), jnp.float32) if state is None else state
        return jnp.concatenate([before, last], axis=1)[:, -taps:]
    source = found.final[..., None]
    kept = jnp.take_along_axis(x, source.clip(0), axis=1).astype(jnp.float32)
    if state is not None:
        kept = jnp.where(source < 0, jnp.take_along_axis(state, (-1 - source).clip(0, entries - 1), axis=1), kept)
    return jnp.where(source == NOTHING, 0, kept)
