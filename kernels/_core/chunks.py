"""Recurrences in chunks: a row as chunks of equal length, and the scan over them in both directions.

A backend writes one function, `step(shared, state, x, tokens) -> (state, y)`, of one chunk: matmuls inside it, and the state
that enters it. What is here goes over the chunks with it, forward and backward. The backward keeps one state a chunk and
computes everything else of a chunk again, so memory is linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels._core.recurrence import resets


class Tokens(NamedTuple):
    """Of the tokens of one chunk. Both None: all are valid, and of one sequence.

    Attributes:
      valid: bool [B, C]. The state must pass the others untouched. All arrays are 0 there, and what comes out is dropped.
      resets: bool [B, C]: whether the state begins anew before a token; None where it does only between chunks.
    """

    valid: jax.Array | None = None
    resets: jax.Array | None = None


class Owners(NamedTuple):
    """Of each chunk [n, B], where there are several states.

    Attributes:
      of: whose state it has; `num_states`: nobody's.
      begins, ends: whether it is the first and the last chunk of that sequence.
    """

    of: jax.Array
    begins: jax.Array
    ends: jax.Array


class Chunks:
    """Where the tokens of rows [B, T] lie in chunks [n, B, C].

    With one state a row is cut every C tokens, and padded at its end. With several each sequence begins a chunk: at most
    (T + G (C - 1)) // C chunks hold them, however long each is, so that a state is only taken up and put down between chunks.

    Attributes:
      size, number: C and n.
      tokens: `Tokens` of all chunks, [n, B, C].
      owners: with several states, `Owners`.
    """

    def __init__(self, B: Any, T: int, size: int, segment_ids: jax.Array | None = None, num_states: int = 1) -> None:
        self.batch, self.length, self.size, self.num_states = B, T, size, num_states
        self._source: jax.Array | None = None  # int [B, n * C]: which token lies in each slot
        self._slot: jax.Array | None = None  # int [B, T]: which slot each token lies in, -1 for padding
        self.owners: Owners | None = None
        if num_states > 1:
            assert segment_ids is not None, "several states are told apart by segment_ids"
            self._pack(segment_ids)
            return
        self.number = -(-T // size)
        valid = new = None
        if segment_ids is not None:
            valid, new = segment_ids >= 0, resets(segment_ids)
        elif T % size:
            valid = jnp.ones((B, T), bool)
        self.tokens = Tokens(*(None if x is None else self._cut(x) for x in (valid, new)))

    def _pack(self, ids: jax.Array) -> None:
        T, C, G = self.length, self.size, self.num_states
        self.number = max(1, (T + G * (C - 1)) // C)
        key = jnp.where((ids >= 0) & (ids < G), ids, G)
        order = jnp.argsort(key, axis=1, stable=True)
        edges = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(G + 1)))(jnp.take_along_axis(key, order, axis=1))
        count = jnp.diff(edges)  # [B, G]
        chunks = -(-count // C)
        end = jnp.cumsum(chunks, axis=1)
        begin = end - chunks
        at = jnp.arange(self.number)
        states = jax.vmap(lambda row: jnp.searchsorted(row, at, side="right"))(end)  # [B, n], G past the last
        of = functools.partial(jnp.take_along_axis, indices=jnp.minimum(states, G - 1), axis=1)
        skip = (at - of(begin))[..., None] * C + jnp.arange(C)  # [B, n, C]
        valid = (skip < of(count)[..., None]) & (states < G)[..., None]
        source = jnp.take_along_axis(
            order, jnp.clip(of(edges[:, :-1])[..., None] + skip, 0, T - 1).reshape(ids.shape[0], -1), axis=1
        )
        place = jnp.argsort(order, axis=1)  # of each token among the ordered ones
        g = jnp.minimum(key, G - 1)
        slot = jnp.take_along_axis(begin, g, axis=1) * C + place - jnp.take_along_axis(edges, g, axis=1)
        self._source, self._slot = source, jnp.where(key < G, slot, -1)
        self.tokens = Tokens(jnp.moveaxis(valid, 1, 0), None)
        used = states < G
        self.owners = Owners(*(x.T for x in (states, used & (at == of(begin)), used & (at == of(end) - 1))))

    def _cut(self, x: jax.Array) -> jax.Array:
        """Returns [n, B, C, ...] of x [B, T, ...]; what lies where there is no token is anything."""
        if self._source is not None:
            x = jax.vmap(lambda row, source: row[source])(x, self._source)
        elif self.length % self.size:
            x = jnp.pad(x, [(0, 0), (0, self.number * self.size - self.length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], self.number, self.size, *x.shape[2:]), 1, 0)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns [n, B, C, ...] of x [B, T, ...], 0 where there is no valid token, whatever x holds there."""
        rows, valid = self._cut(x), self.tokens.valid
        return rows if valid is None else jnp.where(valid.reshape(*valid.shape, *(1,) * (rows.ndim - 3)), rows, 0)

    def collect(self, y: jax.Array) -> jax.Array:
        """Returns [B, T, ...] of y [n, B, C, ...]; 0 for tokens that are padding."""
        rows = jnp.moveaxis(y, 0, 1)
        rows = rows.reshape(rows.shape[0], -1, *y.shape[3:])
        if self._slot is not None:
            rows = jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(rows, self._slot)
            return jnp.where((self._slot >= 0).reshape(*rows.shape[:2], *(1,) * (rows.ndim - 2)), rows, 0)
        rows = rows[:, : self.length]
        if self.tokens.valid is None:
            return rows
        valid = jnp.moveaxis(self.tokens.valid, 0, 1).reshape(rows.shape[0], -1)[:, : self.length]
        return jnp.where(valid.reshape(*rows.shape[:2], *(1,) * (rows.ndim - 2)), rows, 0)


def _where(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)


def _scan(body: Callable, carry: Any, xs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """Returns `lax.scan`, without its loop where there is one step: a token that is decoded is not worth one."""
    if length > 1:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    # jaxlib 0.10.2 to 0.11 fuse a matmul with a constant, as a state of zeros is here, and a sum beside it into one call of
    # YNNPACK on CPUs, and the result is garbage (see jax issues 39103 and 39257 for others of its kind).
    carry, y = body(jax.lax.optimization_barrier(carry), jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def _forward(step: Callable, chunks: Chunks, initial: jax.Array, xs: Any, shared: Any, what: Callable) -> Any:
    """Returns (final, what(state before, y) of each chunk)."""
    rows = jnp.arange(initial.shape[0])

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        x, tokens, own = now
        if own is None:
            after, y = step(shared, carry, x, tokens)
            return after, what(carry, y)
        state, finals = carry
        state = _where(own.begins, initial[rows, jnp.minimum(own.of, chunks.num_states - 1)], state)
        after, y = step(shared, state, x, tokens)
        # The last chunk of a sequence is the last to write its state.
        return (after, finals.at[rows, own.of].set(after, mode="drop")), what(state, y)

    several = chunks.owners is not None
    first = (jnp.zeros_like(initial[:, 0]), initial) if several else initial[:, 0]
    last, ys = _scan(body, first, (xs, chunks.tokens, chunks.owners), chunks.number)
    return (last[1] if several else last[:, None]), ys


def forward(step: Callable, chunks: Chunks, initial: jax.Array, xs: Any, shared: Any = None) -> tuple[jax.Array, Any]:
    """Returns (final_state [B, G, ...], outputs [B, T, ...]).

    Args:
      step: (shared, state [B, ...], x of [B, C, ...], `Tokens`) -> (state, y of [B, C, ...]).
      initial: [B, G, ...], in the dtype that the state is kept in.
      xs: pytree of [B, T, ...].
      shared: pytree of what is the same for every token, as a decay of a head.
    """
    final, ys = _forward(step, chunks, initial, jax.tree.map(chunks.spread, xs), shared, lambda _, y: y)
    return final, jax.tree.map(chunks.collect, ys)


def backward(
    step: Callable, chunks: Chunks, initial: jax.Array, xs: Any, d_final: jax.Array, d_ys: Any, shared: Any = None
) -> tuple[jax.Array, Any, Any]:
    """Returns (d_initial, d_xs, d_shared), the gradients of what `forward` takes; d_shared is summed in float32.

    All arrays in `xs` and `shared` must be floats. The states that enter the chunks are computed again, without the outputs.
    """
    xs, d_ys = jax.tree.map(chunks.spread, (xs, d_ys))
    _, states = _forward(step, chunks, initial, xs, shared, lambda state, _: state)
    rows, G = jnp.arange(initial.shape[0]), chunks.num_states
    several = chunks.owners is not None

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        d_state, d_shared, d_initial = carry
        x, tokens, state, d_y, own = now
        if own is not None:
            d_state = _where(own.ends, d_final[rows, jnp.minimum(own.of, G - 1)], d_state)
        (_, y), pull = jax.vjp(lambda shared, state, x: step(shared, state, x, tokens), shared, state, x)
        d_y = jax.tree.map(lambda d, y: d.astype(y.dtype), d_y, y)
        d_own, d_state, d_x = pull((d_state, d_y))
        d_shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_shared, d_own)
        if own is not None:
            d_initial = d_initial.at[rows, jnp.where(own.begins, own.of, G)].set(d_state, mode="drop")
        return (d_state, d_shared, d_initial), d_x

    d_first = jnp.zeros_like(initial[:, 0]) if several else d_final[:, 0].astype(initial.dtype)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shared)
    # A sequence without tokens ends as it began, and so does its gradient.
    d_initial = d_final.astype(initial.dtype) if several else None
    now = (xs, chunks.tokens, states, d_ys, chunks.owners)
    (d_state, d_shared, d_initial), d_xs = _scan(body, (d_first, sums, d_initial), now, chunks.number, reverse=True)
    return (d_initial if several else d_state[:, None]), jax.tree.map(chunks.collect, d_xs), d_shared
