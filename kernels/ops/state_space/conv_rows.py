"""Rows of a convolution over documents: its tokens without the padding between them, behind the states that they continue.

In these rows a window is W adjacent ones, of which as many count as its segment has. A kernel walks over them, and reads and
writes tokens where they lie: nothing is sorted, and no token is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call

NOTHING = -(2**31)  # source of an entry of a final state that no row has: 0
WIDEST_WINDOW = 16  # rows of a window, of which a kernel of a GPU holds its channels in registers


def refused(call: Call) -> str | None:
    """Returns why kernels, of any toolchain, cannot run a call."""
    if call.x.size == 0:
        return "x has no elements"
    taps = call.dims["W"]
    if taps == 1:
        return "W = 1: without a window it is a product, which XLA fuses with what is around it"
    if taps > WIDEST_WINDOW:
        return f"W = {taps} exceeds {WIDEST_WINDOW}: a window must fit the registers of a program"
    return None


class Rows(NamedTuple):
    """The rows of each batch entry, R = T + states · (W - 1) of them, padding last; int32.

    Attributes:
      source: [B, R], position of a token, or -1 - i for entry i of the initial states [G · (W - 1)], of which there are none
        if the call has no initial state.
      seen: [B, R], the number of rows of its segment before it, or -1 for padding.
      leaves: [B, R], the entry of the final states [G · (W - 1)] that a row becomes, or -1.
      final: [B, G · (W - 1)], the source of each entry of the final states, or NOTHING.
      of_token: [B, T], the row of each token, or -1 for padding.
    """

    source: jax.Array
    seen: jax.Array
    leaves: jax.Array
    final: jax.Array
    of_token: jax.Array


def rows_of(x: jax.Array, segment_ids: jax.Array | None, initial_state: Any, num_states: int, taps: int) -> Rows | None:
    """Returns the rows of a call; None if they are its tokens."""
    if segment_ids is None and num_states == 1:
        return None
    B, T, _ = x.shape
    return rows(segment_ids, (B, T), num_states, taps, initial_state is not None)


def rows(segment_ids: jax.Array | None, shape: tuple[int, int], num_states: int, taps: int, has_state: bool) -> Rows:
    """Returns the rows of [B, T] = `shape` tokens in windows of `taps` + 1.

    With several states, the tokens of each segment must be contiguous but for padding.
    """
    ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    lead = taps if has_state else 0
    return _documents(ids, taps, lead) if num_states == 1 else _packed(ids, num_states, taps, lead)


def _documents(ids: jax.Array, taps: int, lead: int) -> Rows:
    """Returns the rows of documents, of which the first begins with `lead` entries of a state."""
    (B, T), valid = ids.shape, ids >= 0
    position = jnp.arange(T, dtype=jnp.int32)
    until = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    count = until[:, -1:]
    place = jnp.where(valid, until - 1, count + position - until)
    of_token = jnp.where(valid, place + lead, -1)
    source = jnp.zeros_like(ids).at[jnp.arange(B)[:, None], place].set(position, unique_indices=True)
    # From here on tokens are in the order of rows, where those of a document are adjacent.
    ids, valid, behind = jnp.take_along_axis(ids, source, axis=1), position < count, count - 1 - position
    new = valid & (ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1))
    begin = jax.lax.cummax(jnp.where(new, position + lead, 0), axis=1)
    of_last = begin[:, -1:]  # where the last document begins
    seen = jnp.where(valid, position + lead - begin, -1)
    leaves = jnp.where(valid & (behind < taps) & (begin == of_last), taps - 1 - behind, -1)
    if lead:
        entry = jnp.arange(lead, dtype=jnp.int32)
        behind = count + lead - 1 - entry
        of_state = (-1 - entry, entry, jnp.where((behind < taps) & (of_last == 0), taps - 1 - behind, -1))
        both = zip((jnp.broadcast_to(x, (B, lead)) for x in of_state), (source, seen, leaves), strict=True)
        source, seen, leaves = (jnp.concatenate(x, axis=1) for x in both)
    index = count + lead - taps + jnp.arange(taps, dtype=jnp.int32)
    last = jnp.take_along_axis(source, index.clip(0), axis=1)
    return Rows(source, seen, leaves, jnp.where(index >= of_last, last, NOTHING), of_token)


def _packed(ids: jax.Array, G: int, taps: int, lead: int) -> Rows:
    """Returns the rows of sequences with a state each, in the order in which they begin."""
    (B, T), valid = ids.shape, (ids >= 0) & (ids < G)
    index, position = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
    until = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    rank, count = until - 1, until[:, -1:]
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
    row = jnp.where(valid, rank + lead * (order + 1), count + G * lead + position - until)
    of_token = jnp.where(valid, row, -1)
    seen = jnp.where(valid, row - jnp.take_along_axis(states_begin, order, axis=1), -1)
    behind = jnp.take_along_axis(starts + size, order, axis=1) - 1 - rank
    leaves = jnp.where(valid & (behind < taps), state * taps + taps - 1 - behind, -1)
    source = jnp.broadcast_to(position, ids.shape)
    if lead:
        entry = jnp.arange(lead, dtype=jnp.int32)
        behind = size[..., None] + lead - 1 - entry
        kept = which[..., None] * taps + taps - 1 - behind
        of_states = (
            states_begin[..., None] + entry,
            -1 - (which[..., None] * taps + entry),
            entry,
            jnp.where(behind < taps, kept, -1),
        )
        flat = (jnp.broadcast_to(x, (B, G, lead)).reshape(B, -1) for x in of_states)
        both = zip(flat, (row, source, seen, leaves), strict=True)
        row, source, seen, leaves = (jnp.concatenate(x, axis=1) for x in both)
    table = jnp.stack([source, seen, leaves], axis=-1).astype(jnp.int32)
    table = jnp.zeros_like(table).at[index, row].set(table, unique_indices=True, mode="promise_in_bounds")
    left = jnp.where(leaves < 0, G * taps, leaves)
    final = jnp.full((B, G * taps), NOTHING, jnp.int32).at[index, left].set(source, mode="drop")
    return Rows(table[..., 0], table[..., 1], table[..., 2], final, of_token)


def by_rows(state: jax.Array | None) -> jax.Array | None:
    """Returns states [B, G, F, W - 1] as float32 [B, G * (W - 1), F]."""
    if state is None:
        return None
    state = jnp.swapaxes(state.astype(jnp.float32), 2, 3)
    return state.reshape(state.shape[0], -1, state.shape[3])


def by_channels(state: jax.Array, G: int) -> jax.Array:
    """Returns rows [B, G * (W - 1), F] as states [B, G, F, W - 1]."""
    return jnp.swapaxes(state.reshape(state.shape[0], G, -1, state.shape[2]), 2, 3)


def picked(x: jax.Array, state: jax.Array | None, source: jax.Array) -> jax.Array:
    """Returns rows float32 [B, n, F] by their source [B, n], as `Rows` has it: 0 for NOTHING, and for a state that is None."""

    def of(y: jax.Array, index: jax.Array) -> jax.Array:
        index = index.clip(0, y.shape[1] - 1)
        return jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds"))(y, index).astype(jnp.float32)

    entry = (source < 0)[..., None]
    found = jnp.where(entry, 0.0 if state is None else of(state, -1 - source), of(x, source))
    return jnp.where((source == NOTHING)[..., None], 0.0, found)


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
    return picked(x, state, found.final)
