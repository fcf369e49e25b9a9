"""Chunked recurrences: splits a row into chunks of equal length, and scans over them forward and backward.

A backend writes a `Step` for one chunk: what its tokens contribute on their own, how the state passes through, and what
its tokens read from the incoming state. The code here runs it over all chunks. Only the state is passed sequentially;
everything else is computed for `together` chunks at once, which keeps a large device busy and bounds memory. The
backward stores one state per `together` chunks and recomputes everything else, so memory is linear in the length.
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

# Target size in bytes of one float32 array of the tokens computed at once, on devices that process many chunks in
# parallel. A CPU processes one chunk at a time, so that its arrays stay in the caches.
BYTES_TOGETHER = 128 << 20


@dataclass(frozen=True)
class ChunkConfig(Tunables):
    """Tunables of a chunked recurrence; None leaves the choice to the configuration chain.

    Attributes:
      chunk: tokens per chunk, a power of two. 1 is the plain recurrence.
      together: chunks computed at once, except for passing the state (XLA).
      block_v: columns of a state in one program (Triton).
      num_warps, num_stages: warps of a program that walks a row, and depth of its software pipeline (Triton).
      splits: parts of a row that are walked at once (Triton).
      heads: heads of a group that one program takes: it computes their products once, and sums their gradients (Triton).
      backward_num_warps: warps of a program of one chunk's gradients; those of queries that no heads share have half (Triton).
      at_once: whether one launch walks both ways in the backward of a delta rule, if its rows are not split and `hopper_walks`
        does not take them (Triton).
      in_one: on Hopper, whether one kernel computes all gradients of a delta rule's chunks with decays of heads. With decays of
        channels: whether Hopper's kernels compute pairs, products of gradients with states, and what decays do to both. Calls
        that these kernels do not have take the others: they have 16 bits, heads of 128 channels and chunks of 64 tokens, and
        with decays of channels whole chunks, one state for a row, and a scale between 1/256 and 256 (Triton).
      hopper_walks: on Hopper, whether walks of a delta rule have the state in the registers of one warpgroup, in Gluon, and
        those of linear attention with one decay per head in the registers of two, with weights of pairs computed beside them.
        Calls as those of `in_one`, with whole chunks and one state for a row; of linear attention with as many heads of values
        as of all (Triton).
      keeps: whether the forward of a differentiated delta rule keeps weights of pairs and inverses for its backward, as much as
        its values in all (Triton).
      keeps_states: whether one that `keeps` also keeps states before chunks and what is written to them, so that its backward
        does not walk the rows again: three times as much as its values with heads of 128 channels (Triton).
    """

    chunk: int | None = None
    together: int | None = None
    block_v: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    splits: int | None = None
    heads: int | None = None
    backward_num_warps: int | None = None
    at_once: bool | None = None
    in_one: bool | None = None
    hopper_walks: bool | None = None
    keeps: bool | None = None
    keeps_states: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chunk", "block_v"):
            size = getattr(self, name)
            if size is not None and size & (size - 1):
                raise ValueError(f"argument 'cfg': ChunkConfig.{name} = {size} is not a power of 2; use one, or None")


@dataclass(frozen=True)
class DiagonalConfig(ChunkConfig):
    """Tunables of a recurrence of channels; None leaves the choice to the configuration chain.

    Those of `ChunkConfig` that its Triton kernels have are `splits` (chunks of a row in the forward), `block_v` (channels of a
    program) and `num_warps`; `chunk` (tokens of a chunk) is that of their backward.

    Attributes:
      tokens: tokens that a program of the forward loads at once, a power of 2 (Triton).
      backward_block_v, backward_tokens: the same of the backward, with its `block_v`.
    """

    tokens: int | None = None
    backward_block_v: int | None = None
    backward_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "backward_block_v", "backward_tokens"):
            size = getattr(self, name)
            if size is not None and size & (size - 1):
                raise ValueError(
                    f"argument 'cfg': DiagonalConfig.{name} = {size} is not a power of 2; use one, or None"
                )


def tunables(
    most: int, elements: Callable[[Mapping[str, Any]], int], config_type: type[ChunkConfig] = ChunkConfig
) -> dict[str, Any]:
    """Returns the `heuristic` and `candidates` of a chunked backend.

    Args:
      most: maximum tokens per chunk.
      elements: dims -> elements of the largest array for one token of all rows.
      config_type: that of the operation.
    """

    def config(call: Call, chunk: int, platform: str) -> ChunkConfig:
        together = 1 if platform == "cpu" else max(1, BYTES_TOGETHER // (4 * chunk * max(1, elements(call.dims))))
        return config_type(chunk, together)

    def longest(call: Call) -> int:
        # Packed sequences with states start new chunks. With chunks of their mean length, at most half of the slots are
        # empty.
        return 1 << max(0, -(-call.dims["T"] // call.num_states) - 1).bit_length()

    def heuristic(call: Call, platform: str) -> ChunkConfig:
        return config(call, min(most, longest(call)), platform)

    def candidates(call: Call) -> list[ChunkConfig]:
        sizes = [c for c in (16, 32, 64, 128, 256) if c <= longest(call)] or [longest(call)]
        return [config(call, c, p) for c in sizes for p in ("cpu", "")]

    return {"heuristic": heuristic, "candidates": candidates}


class Tokens(NamedTuple):
    """Which tokens of one chunk are valid. Both None: all are, and belong to one sequence.

    Attributes:
      valid: bool [B, C]. Other tokens must leave the state unchanged. All arrays are 0 there, and the outputs are
        dropped.
      resets: bool [B, C]: whether the state is reset before a token; None if that happens only between chunks.
    """

    valid: jax.Array | None = None
    resets: jax.Array | None = None


class Step(NamedTuple):
    """One chunk of a recurrence, as three functions.

    Attributes:
      prepare: (shared, x of [B, C, ...], `Tokens`) -> parts, a pytree of [B, ...]: everything independent of the state.
      advance: (parts, state [B, ...]) -> the state after the chunk.
      read: (shared, parts, state before the chunk) -> y of [B, C, ...].

    Rows are independent: `prepare` and `read` receive several chunks of a row as additional rows.
    """

    prepare: Callable[[Any, Any, Tokens], Any]
    advance: Callable[[Any, jax.Array], jax.Array]
    read: Callable[[Any, Any, jax.Array], Any]


class Owners(NamedTuple):
    """Which state each chunk [n, B] belongs to, if there are several.

    Attributes:
      of: index of the state; `num_states` for none.
      begins, ends: whether it is the first and the last chunk of its sequence.
    """

    of: jax.Array
    begins: jax.Array
    ends: jax.Array


class Chunks:
    """The layout of the tokens of rows [B, T] in chunks [n, B, C].

    With one state a row is split every C tokens and padded at its end. With several, each sequence starts a new chunk,
    so states are read and written only between chunks; (T + G (C - 1)) // C chunks suffice for any lengths.

    Attributes:
      size, number: C and n, a multiple of `together`.
      together: number of chunks computed at once.
      tokens: `Tokens` of all chunks, [n, B, C].
      owners: `Owners`, if there are several states.
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
        self._source: jax.Array | None = None  # int [B, n * C]: the token in each slot
        self._slot: jax.Array | None = None  # int [B, T]: the slot of each token, -1 for padding
        self.owners: Owners | None = None
        if num_states > 1:
            assert segment_ids is not None, "several states require segment_ids"
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
        index = jnp.arange(self.number)
        states = jax.vmap(lambda row: jnp.searchsorted(row, index, side="right"))(end)  # [B, n], G past the last
        of = functools.partial(jnp.take_along_axis, indices=jnp.minimum(states, G - 1), axis=1)
        skip = (index - of(begin))[..., None] * C + jnp.arange(C)  # [B, n, C]
        valid = (skip < of(count)[..., None]) & (states < G)[..., None]
        source = jnp.take_along_axis(
            order, jnp.clip(of(edges[:, :-1])[..., None] + skip, 0, T - 1).reshape(ids.shape[0], -1), axis=1
        )
        place = jnp.argsort(order, axis=1)  # rank of each token in the sorted order
        g = jnp.minimum(key, G - 1)
        slot = jnp.take_along_axis(begin, g, axis=1) * C + place - jnp.take_along_axis(edges, g, axis=1)
        self._source, self._slot = source, jnp.where(key < G, slot, -1)
        self.tokens = Tokens(jnp.moveaxis(valid, 1, 0), None)
        used = states < G
        self.owners = Owners(*(x.T for x in (states, used & (index == of(begin)), used & (index == of(end) - 1))))

    def _cut(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, ...] as [n, B, C, ...]; slots without a token hold arbitrary values."""
        if self._source is not None:
            x = jax.vmap(lambda row, source: row[source])(x, self._source)
        elif self.number * self.size != self.length:
            x = jnp.pad(x, [(0, 0), (0, self.number * self.size - self.length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], self.number, self.size, *x.shape[2:]), 1, 0)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, ...] as [n, B, C, ...], with 0 in slots without a valid token, whatever x holds there."""
        rows, valid = self._cut(x), self.tokens.valid
        return rows if valid is None else jnp.where(valid.reshape(*valid.shape, *(1,) * (rows.ndim - 3)), rows, 0)

    def collect(self, y: jax.Array) -> jax.Array:
        """Returns y [n, B, C, ...] as [B, T, ...]; 0 for padding."""
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
    """Returns `lax.scan`, without a loop if there is only one step, as in decoding."""
    if length > 1:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    # On CPUs, jaxlib 0.10.2 to 0.11 fuse a matmul with a constant (here a state of zeros) and an adjacent sum into one
    # YNNPACK call that returns garbage (see jax issues 39103 and 39257 for similar bugs).
    carry, y = body(jax.lax.optimization_barrier(carry), jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def _group(step: Step, chunks: Chunks, shared: Any, state: jax.Array, begun: Any, x: Any, now: Any) -> tuple:
    """Returns (state after k chunks, with several states that after each [k, B, ...], outputs).

    Args:
      begun: with several states [k, B, ...], the initial state where a sequence begins.
      now: (`Tokens`, `Owners` or None) of the chunks.
    """
    tokens, owners = now
    k, B = chunks.together, state.shape[0]

    # Chunks become rows instead of a vmapped dim: jaxlib 0.10.2 to 0.11.2 crash on CPUs in sums over arrays of 6 or
    # more dims (jax issues 39257 and 40412).
    def as_rows(x: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(k * B, *y.shape[2:]), x)

    def by_chunk(x: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(k, B, *y.shape[1:]), x)

    rows = step.prepare(shared, as_rows(x), as_rows(tokens))
    parts = by_chunk(rows)

    def body(state: jax.Array, now: Any) -> tuple[jax.Array, Any]:
        parts, begun, owner = now
        state = state if owner is None else _where(owner.begins, begun, state)
        after = step.advance(parts, state)
        return after, (state, None if owner is None else after)

    state, (before, after) = _scan(body, state, (parts, begun, owners), chunks.together)
    return state, after, by_chunk(step.read(shared, rows, as_rows(before)))


def _grouped(chunks: Chunks, x: Any) -> Any:
    """Reshapes each array [n, ...] to [n / k, k, ...]."""
    return jax.tree.map(lambda y: y.reshape(-1, chunks.together, *y.shape[1:]), x)


def _owned(chunks: Chunks, states: jax.Array, owners: Owners) -> jax.Array:
    """Returns [k, B, ...]: for k chunks, the states they belong to, from states [B, G, ...]."""
    return states[jnp.arange(states.shape[0]), jnp.minimum(owners.of, chunks.num_states - 1)]


def _begun(chunks: Chunks, initial: jax.Array, owners: Owners | None) -> jax.Array | None:
    return None if owners is None else _owned(chunks, initial, owners)


def forward(step: Step, chunks: Chunks, initial: jax.Array, xs: Any, shared: Any = None) -> tuple[jax.Array, Any]:
    """Returns (final_state [B, G, ...], outputs [B, T, ...]).

    Args:
      initial: [B, G, ...], in the dtype of the carried state.
      xs: pytree of [B, T, ...].
      shared: pytree of arrays that are the same for every token, such as a decay per head.
    """
    rows, several = jnp.arange(initial.shape[0]), chunks.owners is not None

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        state, finals = carry
        x, slots = now
        state, after, ys = _group(step, chunks, shared, state, _begun(chunks, initial, slots[1]), x, slots)
        if several:
            finals = finals.at[rows, jnp.where(slots[1].ends, slots[1].of, chunks.num_states)].set(after, mode="drop")
        return (state, finals), ys

    first = (jnp.zeros_like(initial[:, 0]), initial) if several else (initial[:, 0], None)
    now = _grouped(chunks, (jax.tree.map(chunks.spread, xs), (chunks.tokens, chunks.owners)))
    (state, finals), ys = _scan(body, first, now, chunks.number // chunks.together)
    ys = jax.tree.map(lambda y: chunks.collect(y.reshape(-1, *y.shape[2:])), ys)
    return (finals if several else state[:, None]), ys


def backward(
    step: Step, chunks: Chunks, initial: jax.Array, xs: Any, d_final: jax.Array, d_ys: Any, shared: Any = None
) -> tuple[jax.Array, Any, Any]:
    """Returns (d_initial, d_xs, d_shared), the gradients of the inputs of `forward`; d_shared is summed in float32.

    All arrays in `xs` and `shared` must be floats. The incoming states of the chunks are recomputed, without the
    outputs.
    """
    groups, G = chunks.number // chunks.together, chunks.num_states
    rows, several = jnp.arange(initial.shape[0]), chunks.owners is not None
    slots = (chunks.tokens, chunks.owners)
    xs, d_ys, slots = _grouped(chunks, (*jax.tree.map(chunks.spread, (xs, d_ys)), slots))
    d_final = d_final.astype(initial.dtype)

    def enter(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        x, slots = now
        return _group(step, chunks, shared, state, _begun(chunks, initial, slots[1]), x, slots)[0], state

    first = jnp.zeros_like(initial[:, 0]) if several else initial[:, 0]
    _, states = _scan(enter, first, (xs, slots), groups)

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        d_state, d_shared, d_initial = carry
        x, slots, state, d_y = now
        operands = (shared, state, _begun(chunks, initial, slots[1]), x)
        (_, after, y), pull = jax.vjp(lambda a, b, c, d: _group(step, chunks, a, b, c, d, slots), *operands)
        d_after = None
        if several:
            d_after = _where(slots[1].ends, _owned(chunks, d_final, slots[1]), jnp.zeros_like(after))
        d_y = jax.tree.map(lambda d, y: d.astype(y.dtype), d_y, y)
        d_own, d_state, d_begun, d_x = pull((d_state, d_after, d_y))
        d_shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_shared, d_own)
        if several:
            d_initial = d_initial.at[rows, jnp.where(slots[1].begins, slots[1].of, G)].set(d_begun, mode="drop")
        return (d_state, d_shared, d_initial), d_x

    d_last = jnp.zeros_like(initial[:, 0]) if several else d_final[:, 0]
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shared)
    # A sequence without tokens ends in its initial state, and so does its gradient.
    start = (d_last, sums, d_final if several else None)
    (d_state, d_shared, d_initial), d_xs = _scan(body, start, (xs, slots, states, d_ys), groups, reverse=True)
    d_xs = jax.tree.map(lambda x: chunks.collect(x.reshape(-1, *x.shape[2:])), d_xs)
    return (d_initial if several else d_state[:, None]), d_xs, d_shared
