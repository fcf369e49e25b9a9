"""Recurrences in chunks: a row as chunks of equal length, and the scan over them in both directions.

A backend writes a `Step` of one chunk: what its tokens are by themselves, how the state passes it, and what its tokens read of
the state that enters. What is here goes over the chunks with it, forward and backward. Only the passing goes chunk by chunk:
the rest is computed for `together` chunks at one time, which keeps a large device busy and bounds the memory. The backward
keeps one state for that many chunks and computes everything else again, so memory is linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan.recurrence import resets
from kernels.framework.binding import Call
from kernels.framework.config import Tunables

# One float32 array of the tokens that are computed at one time takes about this many bytes on a device that works on many
# chunks at once; a CPU works on one, whose arrays stay in its caches.
BYTES_TOGETHER = 128 << 20


@dataclass(frozen=True)
class ChunkConfig(Tunables):
    """Tunables of a recurrence in chunks; None leaves the choice to the configuration chain.

    Attributes:
      chunk: tokens of a chunk, a power of two. 1 is the recurrence itself.
      together: chunks that are computed at one time, but for the passing of the state.
    """

    chunk: int | None = None
    together: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None and self.chunk & (self.chunk - 1):
            raise ValueError(f"ChunkConfig: chunk must be a power of two or None, got {self.chunk}")


def tunables(most: int, elements: Callable[[Mapping[str, Any]], int]) -> dict[str, Any]:
    """Returns the `heuristic` and the `candidates` of a backend in chunks.

    Args:
      most: tokens of a chunk, of sequences that have as many.
      elements: dims -> the elements of the largest array of one token of all rows.
    """

    def config(call: Call, chunk: int, platform: str) -> ChunkConfig:
        together = 1 if platform == "cpu" else max(1, BYTES_TOGETHER // (4 * chunk * max(1, elements(call.dims))))
        return ChunkConfig(chunk, together)

    def longest(call: Call) -> int:
        # Packed sequences with states begin chunks of their own: of their mean length, at most half of the slots are empty.
        return 1 << max(0, -(-call.dims["T"] // call.num_states) - 1).bit_length()

    def heuristic(call: Call, platform: str) -> ChunkConfig:
        return config(call, min(most, longest(call)), platform)

    def candidates(call: Call) -> list[ChunkConfig]:
        sizes = [c for c in (16, 32, 64, 128, 256) if c <= longest(call)] or [longest(call)]
        return [config(call, c, p) for c in sizes for p in ("cpu", "")]

    return {"heuristic": heuristic, "candidates": candidates}


class Tokens(NamedTuple):
    """Of the tokens of one chunk. Both None: all are valid, and of one sequence.

    Attributes:
      valid: bool [B, C]. The state must pass the others untouched. All arrays are 0 there, and what comes out is dropped.
      resets: bool [B, C]: whether the state begins anew before a token; None where it does only between chunks.
    """

    valid: jax.Array | None = None
    resets: jax.Array | None = None


class Step(NamedTuple):
    """One chunk of a recurrence, as three functions.

    Attributes:
      prepare: (shared, x of [B, C, ...], `Tokens`) -> parts, a pytree of [B, ...]: what does not depend on the state.
      advance: (parts, state [B, ...]) -> the state after the chunk.
      read: (shared, parts, state before the chunk) -> y of [B, C, ...].

    Rows are independent of each other: several chunks of a row come to `prepare` and `read` as more rows.
    """

    prepare: Callable[[Any, Any, Tokens], Any]
    advance: Callable[[Any, jax.Array], jax.Array]
    read: Callable[[Any, Any, jax.Array], Any]


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
      size, number: C and n, a multiple of `together`.
      together: how many chunks are computed at one time.
      tokens: `Tokens` of all chunks, [n, B, C].
      owners: with several states, `Owners`.
    """

    def __init__(
        self, B: Any, T: int, cfg: ChunkConfig, segment_ids: jax.Array | None = None, num_states: int = 1
    ) -> None:
        size, together = cfg.chunk or 1, cfg.together or 1
        self.batch, self.length, self.size, self.num_states = B, T, size, num_states
        least = -(-T // size) if num_states == 1 else max(1, (T + num_states * (size - 1)) // size)
        groups = -(-least // together)
        self.together = -(-least // groups)
        self.number = groups * self.together
        self._source: jax.Array | None = None  # int [B, n * C]: which token lies in each slot
        self._slot: jax.Array | None = None  # int [B, T]: which slot each token lies in, -1 for padding
        self.owners: Owners | None = None
        if num_states > 1:
            assert segment_ids is not None, "several states are told apart by segment_ids"
            self._pack(segment_ids)
            return
        valid = new = None
        if segment_ids is not None:
            valid, new = segment_ids >= 0, resets(segment_ids)
        elif self.number * size != T:
            valid = jnp.ones((B, T), bool)
        self.tokens = Tokens(*(None if x is None else self._cut(x) for x in (valid, new)))

    def _pack(self, ids: jax.Array) -> None:
        T, C, G = self.length, self.size, self.num_states
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
        elif self.number * self.size != self.length:
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
    return jnp.where(condition.reshape(*condition.shape, *(1,) * (a.ndim - condition.ndim)), a, b)


def _scan(body: Callable, carry: Any, xs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """Returns `lax.scan`, without its loop where there is one step: a token that is decoded is not worth one."""
    if length > 1:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    # jaxlib 0.10.2 to 0.11 fuse a matmul with a constant, as a state of zeros is here, and a sum beside it into one call of
    # YNNPACK on CPUs, and the result is garbage (see jax issues 39103 and 39257 for others of its kind).
    carry, y = body(jax.lax.optimization_barrier(carry), jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def _group(step: Step, chunks: Chunks, shared: Any, state: jax.Array, begun: Any, x: Any, now: Any) -> tuple:
    """Returns (state after them, with several states that after each [k, B, ...], outputs) of k chunks.

    Args:
      begun: with several states [k, B, ...], what the state is where a sequence begins.
      now: (`Tokens`, `Owners` or None) of the chunks.
    """
    tokens, owners = now
    k, B = chunks.together, state.shape[0]

    # As rows and not under vmap, whose dims would be more: jaxlib 0.10.2 to 0.11.2 crash on CPUs at sums of 6 and more dims
    # (jax issues 39257 and 40412).
    def as_rows(x: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(k * B, *y.shape[2:]), x)

    def by_chunk(x: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(k, B, *y.shape[1:]), x)

    rows = step.prepare(shared, as_rows(x), as_rows(tokens))
    parts = by_chunk(rows)

    def body(state: jax.Array, now: Any) -> tuple[jax.Array, Any]:
        parts, begun, own = now
        state = state if own is None else _where(own.begins, begun, state)
        after = step.advance(parts, state)
        return after, (state, None if own is None else after)

    state, (before, after) = _scan(body, state, (parts, begun, owners), chunks.together)
    return state, after, by_chunk(step.read(shared, rows, as_rows(before)))


def _grouped(chunks: Chunks, x: Any) -> Any:
    """Returns [n / k, k, ...] of each array [n, ...]."""
    return jax.tree.map(lambda y: y.reshape(-1, chunks.together, *y.shape[1:]), x)


def _owned(chunks: Chunks, states: jax.Array, owners: Owners) -> jax.Array:
    """Returns [k, B, ...]: of the states [B, G, ...] those of the owners of k chunks."""
    return states[jnp.arange(states.shape[0]), jnp.minimum(owners.of, chunks.num_states - 1)]


def _begun(chunks: Chunks, initial: jax.Array, owners: Owners | None) -> jax.Array | None:
    return None if owners is None else _owned(chunks, initial, owners)


def forward(step: Step, chunks: Chunks, initial: jax.Array, xs: Any, shared: Any = None) -> tuple[jax.Array, Any]:
    """Returns (final_state [B, G, ...], outputs [B, T, ...]).

    Args:
      initial: [B, G, ...], in the dtype that the state is kept in.
      xs: pytree of [B, T, ...].
      shared: pytree of what is the same for every token, as a decay of a head.
    """
    rows, several = jnp.arange(initial.shape[0]), chunks.owners is not None

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        state, finals = carry
        x, at = now
        state, after, ys = _group(step, chunks, shared, state, _begun(chunks, initial, at[1]), x, at)
        if several:
            finals = finals.at[rows, jnp.where(at[1].ends, at[1].of, chunks.num_states)].set(after, mode="drop")
        return (state, finals), ys

    first = (jnp.zeros_like(initial[:, 0]), initial) if several else (initial[:, 0], None)
    now = _grouped(chunks, (jax.tree.map(chunks.spread, xs), (chunks.tokens, chunks.owners)))
    (state, finals), ys = _scan(body, first, now, chunks.number // chunks.together)
    ys = jax.tree.map(lambda y: chunks.collect(y.reshape(-1, *y.shape[2:])), ys)
    return (finals if several else state[:, None]), ys


def backward(
    step: Step, chunks: Chunks, initial: jax.Array, xs: Any, d_final: jax.Array, d_ys: Any, shared: Any = None
) -> tuple[jax.Array, Any, Any]:
    """Returns (d_initial, d_xs, d_shared), the gradients of what `forward` takes; d_shared is summed in float32.

    All arrays in `xs` and `shared` must be floats. The states that enter the chunks are computed again, without the outputs.
    """
    groups, G = chunks.number // chunks.together, chunks.num_states
    rows, several = jnp.arange(initial.shape[0]), chunks.owners is not None
    at = (chunks.tokens, chunks.owners)
    xs, d_ys, at = _grouped(chunks, (*jax.tree.map(chunks.spread, (xs, d_ys)), at))
    d_final = d_final.astype(initial.dtype)

    def enter(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        x, at = now
        return _group(step, chunks, shared, state, _begun(chunks, initial, at[1]), x, at)[0], state

    first = jnp.zeros_like(initial[:, 0]) if several else initial[:, 0]
    _, states = _scan(enter, first, (xs, at), groups)

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        d_state, d_shared, d_initial = carry
        x, at, state, d_y = now
        given = (shared, state, _begun(chunks, initial, at[1]), x)
        (_, after, y), pull = jax.vjp(lambda a, b, c, d: _group(step, chunks, a, b, c, d, at), *given)
        d_after = None
        if several:
            d_after = _where(at[1].ends, _owned(chunks, d_final, at[1]), jnp.zeros_like(after))
        d_y = jax.tree.map(lambda d, y: d.astype(y.dtype), d_y, y)
        d_own, d_state, d_begun, d_x = pull((d_state, d_after, d_y))
        d_shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_shared, d_own)
        if several:
            d_initial = d_initial.at[rows, jnp.where(at[1].begins, at[1].of, G)].set(d_begun, mode="drop")
        return (d_state, d_shared, d_initial), d_x

    d_last = jnp.zeros_like(initial[:, 0]) if several else d_final[:, 0]
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shared)
    # A sequence without tokens ends as it began, and so does its gradient.
    start = (d_last, sums, d_final if several else None)
    (d_state, d_shared, d_initial), d_xs = _scan(body, start, (xs, at, states, d_ys), groups, reverse=True)
    d_xs = jax.tree.map(lambda x: chunks.collect(x.reshape(-1, *x.shape[2:])), d_xs)
    return (d_initial if several else d_state[:, None]), d_xs, d_shared
