"""Where chunks begin in rows of documents, for kernels that read tokens where they lie: no sort, no gather of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan.recurrence import resets

# A finite stand-in for a log decay of -inf: its exponential underflows to 0, and sums with it are no NaN.
FORGETS = -1e30


class Layout(NamedTuple):
    """The chunks of rows [B, T].

    Attributes:
      chunks: number of chunks of each row; some may have no tokens.
      valid: bool [B, T]: which tokens count; None: all.
      runs: int32 [B, T]: the number of resets until each token, or -1 minus it for padding; None if all are valid and
        nothing is reset.
      table: int32 [B, chunks, 4]: first token, number of tokens, index of the state, and 1 where its sequence begins
        plus 2 where it ends. None with one state: a chunk is then every `size` tokens.
      empty: bool [B, G]: which states have no token; None with one state.
    """

    chunks: int
    valid: jax.Array | None
    runs: jax.Array | None
    table: jax.Array | None
    empty: jax.Array | None

    def per_token(self, x: jax.Array | None) -> jax.Array | None:
        """Returns an array [B, T, N] as float32 [B, N, T], with 0 for padding; None for None."""
        if x is None:
            return None
        x = x.astype(jnp.float32)
        return jnp.swapaxes(x if self.valid is None else jnp.where(self.valid[..., None], x, 0), 1, 2)

    def log_decay(self, a: jax.Array | None) -> jax.Array | None:
        """Returns log decays [B, T, N] as float32 [B, N, T], finite, with 0 for padding; None for None."""
        return None if a is None else self.per_token(jnp.maximum(a, FORGETS))

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """Returns an array [B, N, T] as [B, T, N], with 0 for padding."""
        x = jnp.swapaxes(x, 1, 2)
        return x if self.valid is None else jnp.where(self.valid[..., None], x, 0)

    def exits(self, exits: jax.Array, entries: jax.Array | None) -> jax.Array:
        """Returns the states [B, G, ...] in which sequences end, given those of the sequences that have tokens."""
        if self.empty is None:
            return exits
        return jnp.where(self.empty[(..., *(None,) * (exits.ndim - 2))], 0 if entries is None else entries, exits)


def chunks_of(T: int, size: int, num_states: int) -> int:
    """Returns the number of chunks of a row: with several states, which begin new chunks, enough for any lengths."""
    return -(-T // size) if num_states == 1 else max(1, (T + num_states * (size - 1)) // size)


def layout(B: Any, T: int, size: int, segment_ids: jax.Array | None, num_states: int) -> Layout:
    """Returns the chunks of at most `size` tokens of rows [B, T].

    With several states a chunk has tokens of one sequence and padding around it: a sequence is what lies from its first
    token to the first of the next. (T + G (size - 1)) // size chunks suffice for any lengths.
    """
    chunks = chunks_of(T, size, num_states)
    if num_states == 1:
        if segment_ids is None:
            return Layout(chunks, None, None, None, None)
        valid = segment_ids >= 0
        runs = jnp.cumsum(resets(segment_ids), axis=1, dtype=jnp.int32)
        return Layout(chunks, valid, jnp.where(valid, runs, -1 - runs), None, None)
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)  # all tokens use the first state
    G = num_states
    valid = (segment_ids >= 0) & (segment_ids < G)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    heads = valid & (segment_ids != before)  # few of all tokens: only these are scattered
    rows, position = jnp.arange(segment_ids.shape[0])[:, None], jnp.arange(T, dtype=jnp.int32)
    begin = jnp.full((segment_ids.shape[0], G), T, jnp.int32)
    begin = begin.at[rows, jnp.where(heads, segment_ids, G)].min(position[None], mode="drop")
    order = jnp.argsort(begin, axis=1, stable=True).astype(jnp.int32)
    # What precedes the first sequence is padding, and belongs to it; so does all of a row without any.
    starts = jnp.take_along_axis(begin, order, axis=1).at[:, 0].set(0)
    stops = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=T)
    pieces = -(-(stops - starts) // size)
    end = jnp.cumsum(pieces, axis=1)
    index = jnp.arange(chunks, dtype=jnp.int32)
    which = jax.vmap(lambda row: jnp.searchsorted(row, index, side="right"))(end).astype(jnp.int32)
    used, which = which < G, jnp.minimum(which, G - 1)

    def of(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, which, axis=1)

    number = index - of(end - pieces)
    first = of(starts) + number * size
    count = jnp.minimum(size, of(stops) - first)
    ends = jnp.where(used & (number == 0), 1, 0) + jnp.where(used & (number == of(pieces) - 1), 2, 0)
    table = jnp.stack([jnp.where(used, first, 0), jnp.where(used, count, 0), of(order), ends], axis=-1)
    in_order = starts < stops
    empty = jnp.zeros((segment_ids.shape[0], G), bool).at[rows, order].set(~in_order)
    return Layout(chunks, valid, jnp.where(valid, 0, -1), table.astype(jnp.int32), empty)
