"""Group-cast: every rank gets those chunks of the keys and values of others that its queries see, and no more; their gradients go
back and are added. What is sent follows the documents of a batch, in whatever order these lie.

Which chunks a rank needs follows from the least and the greatest id and position of each, as which tiles a kernel visits does.
Shapes are static, so a buffer has room for as many chunks of each other rank; what does not fit comes in a further pass, and
the number of passes is one number of the batch on every device of the mesh: who parts ways before a transfer waits for ever.

Sources: group-cast and group-reduce as in MagiAttention (Sand.ai, 2025, arXiv:2505.13211), there of ragged sizes; the bounded
buffer with further passes is that of `ejdist/experts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import ALL_TO_ALL, Traffic
from ejdist.order import AUTO
from ejdist.sequence import exchange, in_place
from ejdist.sequence.cost import AttentionShape, SchemeBytes
from ejdist.sequence.hops import Work, widened
from ejdist.sequence.local import KEY_FIELDS, Local
from ejdist.sequence.schedule import chunk_of, chunks_by_rules
from ejdist.sequence.scheme import Scheme
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.tiles import meetings
from kernels.framework.dispatch import vary_alike
from kernels.framework.platforms import Unsupported

Arrays = dict[str, jax.Array]
_NOWHERE = 2**29  # after every position; sums with distances fit in int32


def capacity(buffer: float, ranks: int, chunks: int) -> int:
    """Returns how many chunks of each other rank a buffer has room for.

    Args:
      buffer: the tokens of others that it holds, over a rank's own. chunks: of a rank.
    """
    return min(max(1, math.ceil(buffer * chunks / (ranks - 1))), chunks)


@dataclass(frozen=True)
class Cast:
    """Which chunks of keys go where, of one call.

    A slot is room for a chunk. The slots of a pass are of as many other ranks, in turn, and of each for as many of its chunks.

    Attributes:
      chunk, room: tokens of a chunk; chunks of each other rank that come in a pass.
      passes: how many there are, at least one, the same on every device: an int, or traced where it is a number of the batch.
      needs, asked: bool [B|1, ranks, chunks], which chunks of each rank this one needs, and which of its own each of them does.
    """

    local: Local
    chunk: int
    room: int
    passes: Any
    needs: jax.Array
    asked: jax.Array

    @classmethod
    def of(cls, local: Local, buffer: float) -> Cast:
        """Returns that of a call.

        Raises:
          Unsupported: the call has a mask of blocks.
        """
        if "block_mask" in local.own:
            raise Unsupported(
                f"{local.static.op.name}: a group-cast sends the keys that rules, positions and segments ask for, and this call "
                "has a mask of blocks; use scheme 'all_gather'"
            )
        n, own, rank = local.ranks, local.query.shape[1], exchange.rank(local.axis)
        chunk = chunk_of(local.static.order, own)
        room = capacity(buffer, n, own // chunk)
        mask = local.mask
        table = None
        if mask.rules_are_static and mask.q_segment_ids is None:
            table = chunks_by_rules(local.static.order, own * n, mask)
        if table is not None:
            needs, asked = (jnp.asarray(x)[None, rank] for x in (table, table.swapaxes(0, 1)))
            return cls(local, chunk, room, max(1, -(-int(table.sum(-1).max()) // room)), needs, asked)
        met = meetings(_with_positions(local).key_range(own, own * n), chunk, chunk)[0]
        needs = vary_alike(met.any(1).reshape(met.shape[0], n, -1), local.query)
        needs &= (jnp.arange(n) != rank)[:, None]
        asked = exchange.all_to_all(needs.astype(jnp.int32), local.axis, split=1, join=1) > 0
        passes = exchange.greatest(jnp.maximum(1, -(-needs.sum(-1, dtype=jnp.int32).max() // room)))
        return cls(local, chunk, room, passes, needs, asked)

    @property
    def chunks(self) -> int:
        """How many chunks a rank has."""
        return self.needs.shape[2]

    @cached_property
    def by_pairs(self) -> bool:
        """Whether chunks go to one rank after another, each by a transfer of its own. A TPU has several of these on their way
        beside a kernel, and waits for one that goes to all; of a GPU it is the other way round."""
        return exchange.on_torus()

    def _others(self, way: int) -> jax.Array:
        """Returns the ranks whose chunks are in a pass, in turn: those from which they come (-1), or to which they go (1)."""
        n, rank = self.local.ranks, exchange.rank(self.local.axis)
        return (rank + way * jnp.arange(1, n)) % n if self.by_pairs else jnp.arange(n)

    def _slots(self, table: jax.Array, way: int, turn: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (int32 ranks, int32 chunks, bool), each [B|1, slots]: the other rank of each slot of a pass, which chunk it
        is for, and whether there is one. The chunks that are not needed come after those that are: no chunk is there twice."""
        others, room = self._others(way), self.room
        table = jnp.take(table, others, axis=1)
        listed = jnp.argsort(~table, axis=-1, stable=True)
        short = -self.chunks % room
        listed = jnp.pad(listed, ((0, 0), (0, 0), (0, short)), constant_values=self.chunks)
        listed = jax.lax.dynamic_slice_in_dim(listed, turn * room, room, 2)
        there = turn * room + jnp.arange(room) < table.sum(-1, keepdims=True)
        ranks = jnp.broadcast_to(others[:, None], listed.shape)
        flat = (*listed.shape[:1], -1)
        return ranks.reshape(flat), listed.reshape(flat), there.reshape(flat)

    def _moved(self, x: jax.Array, way: int) -> jax.Array:
        """Returns what came, of [B, slots, ...] that goes to `_others(way)`: in turn from `_others(-way)`."""
        axis = self.local.axis
        x = x.reshape(x.shape[0], -1, self.room, *x.shape[2:])
        if self.by_pairs:
            parts = [exchange.shift(x[:, h], axis, way * (h + 1)) for h in range(x.shape[1])]
            x = jnp.stack(parts, 1)
        else:
            x = exchange.all_to_all(x, axis, split=1, join=1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def sent(self, keys: Arrays, turn: Any) -> jax.Array:
        """Returns [B, slots, chunk, numbers of a token]: what others have sent in a pass, of their keys and values side by
        side; zeros where a slot has none."""
        _, listed, there = self._slots(self.asked, 1, turn)
        parts = [_rows(x, self.chunk, listed, there) for x in keys.values()]
        return self._moved(jnp.concatenate(parts, -1), 1)

    def placed(self, came: jax.Array, turn: Any) -> tuple[Arrays, MaskInfo, jax.Array]:
        """Returns what came in a pass: keys and values [B, tokens, ...] in the order of the text, in which a query sees a run
        of them, the mask of this rank's queries over these, and whether any query sees any."""
        local, number, inside = self.local, self._in_text(turn), came.shape[2:]
        ranks, listed, there = (jnp.take_along_axis(x, number, 1) for x in self._slots(self.needs, -1, turn))
        came = _taken(came, number).reshape(came.shape[0], -1, inside[-1])
        keys, start = {}, 0
        for n, x in local.keys.items():
            wide = math.prod(x.shape[2:])
            keys[n] = came[..., start : start + wide].astype(x.dtype).reshape(*came.shape[:2], *x.shape[2:])
            start += wide
        mask, at = _with_positions(local), ranks * self.chunks + listed
        fields = {n: getattr(mask, n) for n in KEY_FIELDS if getattr(mask, n) is not None}
        fields = {n: _taken(x.reshape(x.shape[0], -1, self.chunk), at) for n, x in fields.items()}
        ids = fields.get("kv_segment_ids", jnp.zeros((1, 1, self.chunk), jnp.int32))
        fields["kv_segment_ids"] = jnp.where(there[..., None], ids, -1)
        if mask.q_segment_ids is None:
            fields["q_segment_ids"] = jnp.zeros((1, local.query.shape[1]), jnp.int32)
        return keys, mask.replace(**{n: x.reshape(x.shape[0], -1) for n, x in fields.items()}), there.any()

    def _in_text(self, turn: Any) -> jax.Array:
        """Returns int32 [B|1, some of the slots]: those of a pass in the order of the text, and none of the rank's own."""
        ranks, listed, there = self._slots(self.needs, -1, turn)
        first = _with_positions(self.local).kv_positions
        assert first is not None
        first = jnp.min(first.reshape(first.shape[0], -1, self.chunk), -1)
        first = jnp.take_along_axis(first, ranks * self.chunks + listed, 1, mode="clip")
        return jnp.argsort(jnp.where(there, first, _NOWHERE), axis=1, stable=True)[:, : (self.local.ranks - 1) * self.room]

    def returned(self, grads: Arrays, turn: Any) -> jax.Array:
        """Returns [B, slots, chunk, numbers of a token]: what others have made of this rank's chunks in a pass, from the
        gradients [B, tokens, ...] of what came in it."""
        number = self._in_text(turn)
        parts = [x.reshape(x.shape[0], -1, self.chunk, math.prod(x.shape[2:])) for x in grads.values()]
        x = jnp.concatenate(parts, -1)
        slots = (self.local.ranks - (1 if self.by_pairs else 0)) * self.room
        back = jnp.full((number.shape[0], slots), number.shape[1], jnp.int32)
        back = jax.vmap(lambda b, at: b.at[at].set(jnp.arange(len(at), dtype=jnp.int32)))(vary_alike(back, number), number)
        return self._moved(_taken(x, back, back < number.shape[1]), -1)

    def added(self, sums: Arrays | None, came: jax.Array | None, turn: Any) -> Arrays | None:
        """Returns the sums, float32, with what `returned` gave, if it gave any: of one rank after another, so that the result
        does not depend on which is there first."""
        if sums is None or came is None:
            return sums
        _, listed, there = self._slots(self.asked, 1, turn)
        batch, room = came.shape[0], self.room
        rows = jnp.broadcast_to(listed, (batch, listed.shape[1])) + jnp.arange(batch)[:, None] * self.chunks
        rows = jnp.where(there, rows, batch * self.chunks)  # nowhere
        rows, came = (jnp.moveaxis(x.reshape(batch, -1, room, *x.shape[2:]), 1, 0) for x in (rows, came))
        total, start = {}, 0
        for n, x in sums.items():
            wide = math.prod(x.shape[2:])
            part = came[..., start : start + wide]
            start += wide

            def add(table: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                at, new = one[0].reshape(-1), one[1].reshape(-1, self.chunk, table.shape[-1])
                return table.at[at].add(new.astype(table.dtype), mode="drop"), None

            table = x.reshape(batch * self.chunks, self.chunk, wide)
            total[n] = jax.lax.scan(add, table, (rows, part))[0].reshape(x.shape)
        return total


def _with_positions(local: Local) -> MaskInfo:
    """Returns the mask of this rank's queries over the keys of all ranks, in their order, with all positions."""
    mask, order, length = local.mask, local.static.order, local.query.shape[1] * local.ranks
    if mask.q_positions is None:
        of_all = order.positions(jnp.arange(local.ranks), length)  # no constant of the length of the sequence
        own = order.positions(exchange.rank(local.axis), length)
        mask = mask.replace(q_positions=own[None], kv_positions=of_all.reshape(1, -1))
    return vary_alike(mask, local.query)


def _taken(x: jax.Array, at: jax.Array, there: jax.Array | None = None) -> jax.Array:
    """Returns x [B|1, n, ...] at these numbers [B|1, m] of its second dim; zeros where there is none."""
    batch = max(x.shape[0], at.shape[0])
    x, at = jnp.broadcast_to(x, (batch, *x.shape[1:])), jnp.broadcast_to(at, (batch, at.shape[1]))
    new = jax.vmap(lambda row, number: jnp.take(row, number, axis=0, mode="clip"))(x, at)
    return new if there is None else jnp.where(there.reshape(*there.shape, *(1,) * (new.ndim - 2)), new, 0)


def _rows(x: jax.Array, chunk: int, at: jax.Array, there: jax.Array) -> jax.Array:
    """Returns chunks [B, slots, chunk, numbers of a token] of an array [B, tokens, ...]."""
    return _taken(x.reshape(x.shape[0], -1, chunk, math.prod(x.shape[2:])), at, there)


def attended(local: Local, buffer: float) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) over the keys of all ranks: of a rank's own while the first chunks come, and of those of each pass while
    those of the next one do."""
    results = _made(in_place.attending(local, {}, chunk_of(local.static.order, local.query.shape[1])), buffer)
    return results["out"], results["lse"]


def pulled(local: Local, saved: Arrays, buffer: float) -> Arrays:
    """Returns the gradients by argument name. Those of the chunks of a pass go back beside the work of the next one."""
    return _made(in_place.pulling(local, saved, chunk_of(local.static.order, local.query.shape[1])), buffer)


def _made(work: Work, buffer: float) -> Arrays:
    """Returns the results of a work over a rank's own keys and those of all passes."""
    local = work.local
    if len(local.hops) == 1:  # no rank needs the keys of another
        return work.results(*work.body(0, local.keys, None, None, True))
    cast = Cast.of(local, buffer)

    def work_of(turn: Any, came: jax.Array, stay: Any, last: bool) -> tuple[Any, Any]:
        return work.brought(*cast.placed(came, turn), stay, last)

    def step(turn: Any, came: jax.Array, stay: Any, sums: Any, made: Any) -> tuple[Any, Any, Any, Any]:
        """Returns what came for the next pass, what stays, the sums so far, and what this pass has made of others' chunks."""
        moved = cast.sent(local.keys, turn + 1), None if made is None else cast.returned(made, turn - 1)
        # Behind barriers, or what comes in a later pass, which needs no attention, is sent beside this one.
        (coming, arrived), (stay, new) = jax.lax.optimization_barrier((moved, work_of(turn, came, stay, False)))
        return vary_alike((coming, stay, cast.added(sums, arrived, turn - 1), new), local.query)

    def ended(turn: Any, came: jax.Array, stay: Any, sums: Any, made: Any) -> tuple[Any, Any]:
        moved = None if made is None else cast.returned(made, turn - 1)
        arrived, (stay, new) = jax.lax.optimization_barrier((moved, work_of(turn, came, stay, True)))
        sums = cast.added(sums, arrived, turn - 1)
        return vary_alike((stay, sums if new is None else cast.added(sums, cast.returned(new, turn), turn)), local.query)

    def several() -> tuple[Any, Any]:
        state = step(0, *first, None)
        state = jax.lax.fori_loop(1, cast.passes - 1, lambda turn, state: step(turn, *state), state)
        return ended(cast.passes - 1, *state)

    coming = cast.sent(local.keys, 0)
    came, (stay, sums) = jax.lax.optimization_barrier((coming, work.body(0, local.keys, None, None, False)))
    first = came, stay, None if sums is None else widened(sums)
    if isinstance(cast.passes, int):
        return work.results(*(several() if cast.passes > 1 else ended(0, *first, None)))
    return work.results(*jax.lax.cond(cast.passes > 1, several, lambda: ended(0, *first, None)))


@dataclass(frozen=True)
class GroupCast(Scheme):
    """Each rank gets the chunks of keys and values that its documents and its mask need, and their gradients go back, see
    `group_cast.py`: O(T / ranks) memory, whatever a batch needs.

    buffer: tokens of other ranks that a rank has room for at a time, over its own. What needs more takes further passes.
    """

    buffer: float = 1.0

    hides = True
    reads_batch = True
    latents = AUTO

    def __post_init__(self) -> None:
        number = isinstance(self.buffer, (int, float)) and not isinstance(self.buffer, bool)
        if not number or not 0 < self.buffer < math.inf:
            raise ValueError(
                f"sequence.buffer = {self.buffer!r} must be a number above 0: the tokens of others that a device has room for, "
                "over its own"
            )

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        return attended(local, self.buffer)

    def backward(self, local: Local, saved: Arrays) -> Arrays:
        return pulled(local, saved, self.buffer)

    def passes(self, ranks: int, chunks: tuple[int, int]) -> int:
        most, own = chunks
        return max(1, -(-most // capacity(self.buffer, ranks, own)))

    def expansions(self, shape: AttentionShape) -> float:
        return 1 + self._sent(shape)[0]

    def cost(self, shape: AttentionShape) -> Traffic:
        sent, (parts, passes) = Traffic(), self._sent(shape)
        if shape.hops:
            # Keys and values, in the backward again, and then their gradients the other way, in the dtype of the keys.
            times, calls = shape.forwards + 2, shape.ranks - 1 if shape.torus else 1
            sent.add(shape.axis, ALL_TO_ALL, times * parts * shape.travelling, times * passes * calls)
        return sent

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        keys, wide = shape.travelling, shape.float32
        # Of a pass what is sent, what came, the same in the order of the text, and gradients likewise; and the sums.
        return SchemeBytes(int((5 * self.buffer + wide) * keys) + wide * shape.query, 2 * wide * shape.out, in_place=True)

    def _sent(self, shape: AttentionShape) -> tuple[float, int]:
        """Returns (what a rank sends of keys in a forward, over its own; in how many passes)."""
        if not shape.hops:
            return 0, 0
        if shape.chunks is None:
            return shape.hops, math.ceil(shape.hops / self.buffer)
        room, passes = capacity(self.buffer, shape.ranks, shape.chunks[1]), self.passes(shape.ranks, shape.chunks)
        return passes * room * (shape.ranks - 1) / shape.chunks[1], passes
