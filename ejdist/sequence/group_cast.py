"""Group-cast: every rank gets those chunks of the keys and values of others that its queries see, and no more; their gradients
go back and are added. What is sent follows from the documents of a batch, in any order of tokens.

Which chunks a rank needs follows from the least and the greatest id and position of each, as which tiles a kernel visits does.
Shapes are static, so a buffer has room for the same number of chunks from each other rank; what does not fit comes in a further
pass. Every device of the mesh makes the same number of passes, or a transfer would wait forever.

Sources: group-cast and group-reduce as in MagiAttention (Sand.ai, 2025, arXiv:2505.13211), there of ragged sizes; the bounded
buffer with further passes is that of `ejdist/experts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
BUFFER = 0.5  # of a rank's own tokens, by default
_SETS = 18  # arrays of the size of a pass that are there at the height of a backward
# How often the bytes of a pass are read or written to pack chunks, lay them in the order of the text and add their gradients,
# in a forward and in a backward. On an H200, at four fifths of the rate of its memory: 5 and 14 of 8,192 tokens a rank in one
# pass, 5 and 21 of 32,768 tokens in three, 19 in ten.
_PASSES = (5, 18)
_NOWHERE = 2**29  # after every position; sums with distances fit in int32


def capacity(buffer: float, ranks: int, chunks: int) -> int:
    """Returns how many chunks of each other rank a buffer has room for.

    Args:
      buffer: the tokens of others that it holds, over a rank's own. chunks: of a rank.
    """
    return min(max(1, math.ceil(buffer * chunks / (ranks - 1))), chunks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Listed:
    """Chunks of several ranks, or for them, listed.

    ranks: int32 [others], in turn. chunks: int32 [B|1, others, some]: those of each that are needed, ascending, and then the
    others, so that none is there twice; after these, numbers that no chunk has. count: int32 [B|1, others, 1], of those needed.
    """

    ranks: jax.Array
    chunks: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, needed: jax.Array, ranks: jax.Array, room: int) -> Listed:
        """Returns those of a table, bool [B|1, ranks, chunks], as many as fill whole passes."""
        needed = jnp.take(needed, ranks, axis=1)
        count, number = needed.sum(-1, keepdims=True, dtype=jnp.int32), needed.shape[2]
        place = jnp.where(needed, jnp.cumsum(needed, -1) - 1, count + jnp.cumsum(~needed, -1) - 1)
        places = jnp.arange(-(-number // room) * room)
        listed = jnp.argmax(place[..., None, :] == places[:, None], -1)  # sorts would take compilers longer
        return cls(ranks, jnp.where(places < number, listed, number), count)

    def slots(self, room: int, turn: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (int32 ranks, int32 chunks, bool), each [B|1, slots]: the other rank of each slot of a pass, which chunk it
        is for, and whether there is one."""
        listed = jax.lax.dynamic_slice_in_dim(self.chunks, turn * room, room, 2)
        there, flat = turn * room + jnp.arange(room) < self.count, (listed.shape[0], -1)
        return (
            jnp.broadcast_to(self.ranks[:, None], listed.shape).reshape(flat),
            listed.reshape(flat),
            there.reshape(flat),
        )


@dataclass(frozen=True)
class Cast:
    """Which chunks of keys go where, of one call.

    A slot is room for a chunk. The slots of a pass are of as many other ranks, in turn, and of each for as many of its chunks.

    Attributes:
      chunk, room: tokens of a chunk; chunks of each other rank that come in a pass.
      passes: how many there are, at least one, the same on every device: an int, or traced where it is a number of the batch.
      coming, leaving: the chunks of others that this rank needs, and its own that they do.
      by_pairs: whether chunks go to one rank after another, each by a transfer of its own, or at once to all, itself included.
    """

    local: Local
    chunk: int
    room: int
    passes: Any
    coming: Listed
    leaving: Listed
    by_pairs: bool

    @classmethod
    def of(cls, local: Local, buffer: float) -> Cast:
        """Returns that of a call.

        Raises:
          Unsupported: the call has a mask of blocks.
        """
        if "block_mask" in local.own:
            raise Unsupported(
                f"{local.static.op.name}: a group-cast sends the keys that rules, positions and segments ask for, and this "
                "call has a mask of blocks; use scheme 'all_gather'"
            )
        n, length, rank = local.ranks, local.query.shape[1], exchange.rank(local.axis)
        chunk = chunk_of(local.static.order, length)
        room = capacity(buffer, n, length // chunk)
        mask, table = local.mask, None
        if mask.rules_are_static and mask.q_segment_ids is None:
            table = chunks_by_rules(local.static.order, length * n, mask)
        if table is not None:
            needs, asked = (jnp.asarray(x)[None, rank] for x in (table, table.swapaxes(0, 1)))
            passes: Any = max(1, -(-int(table.sum(-1).max()) // room))
        else:
            met = meetings(_with_positions(local).key_range(length, length * n), chunk, chunk)[0]
            needs = met.any(1).reshape(met.shape[0], n, -1) & (jnp.arange(n) != rank)[:, None]
            asked = exchange.all_to_all(needs.astype(jnp.int32), local.axis, split=1, join=1) > 0
            passes = exchange.greatest(jnp.maximum(1, -(-needs.sum(-1, dtype=jnp.int32).max() // room)))
        # A TPU has several transfers between pairs on their way beside a kernel, and waits for one between all; of a GPU it is
        # the other way round.
        by_pairs = exchange.on_torus()
        ranks = [(rank + way * jnp.arange(1, n)) % n if by_pairs else jnp.arange(n) for way in (-1, 1)]
        lists = [Listed.of(*one, room) for one in zip((needs, asked), ranks, strict=True)]
        coming, leaving = vary_alike(lists, local.query)
        return cls(local, chunk, room, passes, coming, leaving, by_pairs)

    def moved(self, there: jax.Array | None, back: jax.Array | None) -> list[jax.Array | None]:
        """Returns what came, [B, slots, ...], of as many that go to the ranks of `leaving`, and of those that go back to the
        ranks of `coming`."""
        if self.by_pairs:
            return [x if x is None else self._by_pairs(x, way) for x, way in ((there, 1), (back, -1))]
        # A GPU has one transfer on its way at a time.
        parts = [x.reshape(x.shape[0], -1, self.room, *x.shape[2:]) for x in (there, back) if x is not None]
        came = exchange.all_to_all(jnp.concatenate(parts, -1), self.local.axis, split=1, join=1)
        came = came.reshape(came.shape[0], -1, *came.shape[3:])
        parts = iter(jnp.split(came, len(parts), -1))
        return [x if x is None else next(parts) for x in (there, back)]

    def _by_pairs(self, x: jax.Array, way: int) -> jax.Array:
        x = x.reshape(x.shape[0], -1, self.room, *x.shape[2:])
        parts = [exchange.shift(x[:, h], self.local.axis, way * (h + 1)) for h in range(x.shape[1])]
        return jnp.concatenate(parts, 1)

    def there(self, keys: Arrays, turn: Any) -> jax.Array:
        """Returns [B, slots, chunk, numbers of a token]: what goes to others in a pass, of a rank's keys and values side by
        side; zeros where a slot has none."""
        _, listed, there = self.leaving.slots(self.room, turn)
        parts = [_rows(x, self.chunk, listed, there) for x in keys.values()]
        return jnp.concatenate(parts, -1)

    def seen(self, turn: Any) -> jax.Array:
        """Returns whether anything comes to this rank in a pass."""
        return self.coming.slots(self.room, turn)[2].any()

    def placed(self, came: jax.Array, turn: Any) -> tuple[Arrays, MaskInfo]:
        """Returns what came in a pass: keys and values [B, tokens, ...] in the order of the text, in which a query sees a run
        of them, and the mask of this rank's queries over these."""
        local, chunks, there = self.local, *self._slots(turn)
        place = self._in_text(chunks, there)
        number = jnp.argmax(place[:, None] == jnp.arange((local.ranks - 1) * self.room)[:, None], -1)
        chunks, there = (jnp.take_along_axis(x, number, 1) for x in (chunks, there))
        came = _taken(came, number).reshape(came.shape[0], -1, came.shape[3])
        keys, start = {}, 0
        for n, x in local.keys.items():
            wide = math.prod(x.shape[2:])
            keys[n] = came[..., start : start + wide].astype(x.dtype).reshape(*came.shape[:2], *x.shape[2:])
            start += wide
        mask = _with_positions(local)
        fields = {n: getattr(mask, n) for n in KEY_FIELDS if getattr(mask, n) is not None}
        fields = {n: _taken(x.reshape(x.shape[0], -1, self.chunk), chunks) for n, x in fields.items()}
        ids = fields.get("kv_segment_ids", jnp.zeros((1, 1, self.chunk), jnp.int32))
        fields["kv_segment_ids"] = jnp.where(there[..., None], ids, -1)
        if mask.q_segment_ids is None:
            fields["q_segment_ids"] = jnp.zeros((1, local.query.shape[1]), jnp.int32)
        return keys, mask.replace(**{n: x.reshape(x.shape[0], -1) for n, x in fields.items()})

    def _slots(self, turn: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (int32, bool), [B|1, slots]: which chunk of all ranks, in their order, comes in each slot of a pass, and
        whether one does."""
        ranks, listed, there = self.coming.slots(self.room, turn)
        return ranks * (self.local.query.shape[1] // self.chunk) + listed, there

    def _in_text(self, chunks: jax.Array, there: jax.Array) -> jax.Array:
        """Returns int32 [B|1, slots]: the place of each slot among those of a pass in the order of the text. Those that are
        empty are last: as many as are the rank's own, at least."""
        first = _with_positions(self.local).kv_positions
        assert first is not None
        first = jnp.min(first.reshape(first.shape[0], -1, self.chunk), -1)
        first = jnp.where(there, _taken(first, chunks), _NOWHERE)
        number, one, other = jnp.arange(chunks.shape[1]), first[..., None], first[:, None]
        return ((other < one) | ((other == one) & (number < number[:, None]))).sum(-1, dtype=jnp.int32)

    def back(self, grads: Arrays, turn: Any) -> jax.Array:
        """Returns [B, slots, chunk, numbers of a token]: what goes back of a pass, of the gradients [B, tokens, ...] of what
        came in it."""
        parts = [x.reshape(x.shape[0], -1, self.chunk, math.prod(x.shape[2:])) for x in grads.values()]
        place = self._in_text(*self._slots(turn))
        return _taken(jnp.concatenate(parts, -1), place, place < parts[0].shape[1])

    def added(self, sums: Arrays | None, came: jax.Array | None, turn: Any) -> Arrays | None:
        """Returns the sums, float32, with what came back of a pass, if anything did: of one rank after another, so that the
        result does not depend on which is there first."""
        if sums is None or came is None:
            return sums
        _, listed, there = self.leaving.slots(self.room, turn)
        batch, room = came.shape[0], self.room
        chunks = next(iter(sums.values())).shape[1] // self.chunk
        rows = jnp.broadcast_to(listed, (batch, listed.shape[1])) + jnp.arange(batch)[:, None] * chunks
        rows = jnp.where(there, rows, batch * chunks)  # nowhere
        rows, came = (jnp.moveaxis(x.reshape(batch, -1, room, *x.shape[2:]), 1, 0) for x in (rows, came))
        total, start = {}, 0
        for n, x in sums.items():
            wide = math.prod(x.shape[2:])
            part = came[..., start : start + wide]
            start += wide

            def add(table: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                place, new = one[0].reshape(-1), one[1].reshape(-1, self.chunk, table.shape[-1])
                return table.at[place].add(new.astype(table.dtype), mode="drop"), None

            table = x.reshape(batch * chunks, self.chunk, wide)
            total[n] = jax.lax.scan(add, table, (rows, part))[0].reshape(x.shape)
        return total


def _with_positions(local: Local) -> MaskInfo:
    """Returns the mask of this rank's queries over the keys of all ranks, in their order, with all positions."""
    mask, order, length = local.mask, local.static.order, local.query.shape[1] * local.ranks
    if mask.q_positions is None:
        of_all = order.positions(jnp.arange(local.ranks), length)  # no constant of the length of the sequence
        positions = order.positions(exchange.rank(local.axis), length)
        mask = mask.replace(q_positions=positions[None], kv_positions=of_all.reshape(1, -1))
    return vary_alike(mask, local.query)


def _taken(x: jax.Array, index: jax.Array, there: jax.Array | None = None) -> jax.Array:
    """Returns x [B|1, n, ...] at these numbers [B|1, m] of its second dim; zeros where there is none."""
    batch = max(x.shape[0], index.shape[0])
    x, index = jnp.broadcast_to(x, (batch, *x.shape[1:])), jnp.broadcast_to(index, (batch, index.shape[1]))
    new = jax.vmap(lambda row, number: jnp.take(row, number, axis=0, mode="clip"))(x, index)
    return new if there is None else jnp.where(there.reshape(*there.shape, *(1,) * (new.ndim - 2)), new, 0)


def _rows(x: jax.Array, chunk: int, index: jax.Array, there: jax.Array) -> jax.Array:
    """Returns chunks [B, slots, chunk, numbers of a token] of an array [B, tokens, ...]."""
    return _taken(x.reshape(x.shape[0], -1, chunk, math.prod(x.shape[2:])), index, there)


def attended(local: Local, buffer: float) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) over the keys of all ranks: of a rank's own while the first chunks come, and of those of each pass
    while those of the next one do."""
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

    def visit(turn: Any, came: jax.Array, stay: Any, results: Any, last: bool = False) -> tuple[Any, Any, Any, Any]:
        """Returns (what came for the next pass, what came back of the one before, what stays, what is made of this one)."""
        assert work.brought is not None
        # Under a caller's vmap a conditional is a selection, whose operands must vary over ranks before it.
        turn = turn if isinstance(turn, int) else vary_alike(turn, local.query)
        there = None if last else cast.there(local.keys, turn + 1)
        back = None if results is None else cast.back(results, turn - 1)
        moved = [None, None] if there is back is None else cast.moved(there, back)
        # Behind barriers, or what comes in a later pass, which needs no attention, is sent beside this one.
        moved, done = jax.lax.optimization_barrier(
            (moved, work.brought(lambda: cast.placed(came, turn), cast.seen(turn), stay, last))
        )
        return vary_alike((*moved, *done), local.query)

    def step(turn: Any, came: jax.Array, stay: Any, sums: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        coming, arrived, stay, new = visit(turn, came, stay, results)
        return vary_alike((coming, stay, cast.added(sums, arrived, turn - 1), new), local.query)

    def ended(turn: Any, came: jax.Array, stay: Any, sums: Any, results: Any) -> tuple[Any, Any]:
        _, arrived, stay, new = visit(turn, came, stay, results, last=True)
        sums = cast.added(sums, arrived, turn - 1)
        arrived = None if new is None else cast.moved(None, cast.back(new, turn))[1]
        return vary_alike((stay, cast.added(sums, arrived, turn)), local.query)

    def several() -> tuple[Any, Any]:
        state = step(0, *first, None)
        state = jax.lax.fori_loop(1, cast.passes - 1, lambda turn, state: step(turn, *state), state)
        return ended(cast.passes - 1, *state)

    coming = cast.moved(cast.there(local.keys, 0), None)[0]
    came, (stay, sums) = jax.lax.optimization_barrier((coming, work.body(0, local.keys, None, None, False)))
    first = came, stay, None if sums is None else widened(sums)
    if isinstance(cast.passes, int) and cast.passes == 1:
        return work.results(*ended(0, *first, None))
    if sums is None:  # nothing goes back, so that all passes but the last are alike
        state = vary_alike((came, widened(stay)), local.query)
        state = jax.lax.fori_loop(0, cast.passes - 1, lambda turn, s: step(turn, s[0], s[1], None, None)[:2], state)
        return work.results(*ended(cast.passes - 1, state[0], state[1], None, None))
    if isinstance(cast.passes, int):
        return work.results(*several())
    return work.results(*jax.lax.cond(cast.passes > 1, several, lambda: ended(0, *first, None)))


@dataclass(frozen=True)
class GroupCast(Scheme):
    """Each rank gets the chunks of keys and values that its documents and its mask need, and their gradients go back, see
    `group_cast.py`: O(T / ranks) memory, whatever a batch needs.

    buffer: tokens of other ranks that a rank has room for at a time, over its own. What needs more takes further passes.
    """

    buffer: float = BUFFER

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

    @property
    def blocks(self) -> float | None:  # pyrefly: ignore[bad-override]
        return self.buffer

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        return attended(local, self.buffer)

    def backward(self, local: Local, saved: Arrays) -> Arrays:
        return pulled(local, saved, self.buffer)

    def brought(self, ranks: int, chunks: tuple[int, int]) -> tuple[int, float]:
        most, every = chunks
        room = capacity(self.buffer, ranks, every)
        passes = max(1, -(-most // room))
        return passes, passes * room * (ranks - 1) / every

    def expansions(self, shape: AttentionShape) -> float:
        return 1 + self._sent(shape)[1]

    def cost(self, shape: AttentionShape) -> Traffic:
        sent, (passes, parts) = Traffic(), self._sent(shape)
        if passes:
            # Keys and values, in the backward again, and then their gradients the other way, in the dtype of the keys.
            # On a torus each by itself; elsewhere in one transfer what goes back of a pass and the keys of the next but one.
            times = shape.forwards + 2
            calls = times * passes * (shape.ranks - 1) if shape.torus else (times - 1) * passes + min(passes, 2)
            sent.add(shape.axis, ALL_TO_ALL, times * parts * shape.travelling, calls)
        return sent

    def passes(self, shape: AttentionShape) -> float:
        (passes, parts), (forward, backward) = self._sent(shape), _PASSES
        packed = (forward * shape.forwards + backward) * parts * shape.travelling
        # Where kernels do not add in place, what there is so far is read and written in each pass.
        merged = 0 if shape.tiles else 2 * passes * shape.float32 * (shape.forwards * shape.out + shape.query)
        return packed + merged

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        keys, wide = shape.travelling, shape.float32
        # As compiled for v5p (131,072 tokens over eight chips: 2,262 MiB with a buffer of 1, a ring 1,394): of a pass what is
        # sent, what came, both again in the order of the text and the layout of kernels, gradients likewise, and the same of
        # the pass that comes meanwhile; and the sums.
        return SchemeBytes(
            int((_SETS * self.buffer + wide) * keys) + wide * shape.query, 2 * wide * shape.out, in_place=True
        )

    def _sent(self, shape: AttentionShape) -> tuple[int, float]:
        """Returns `brought` of a call that is planned, forward."""
        if not shape.hops:
            return 0, 0
        if shape.chunks is None:
            return math.ceil(shape.hops / self.buffer), shape.hops
        return self.brought(shape.ranks, shape.chunks)
