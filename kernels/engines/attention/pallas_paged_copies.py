"""Compile-time options and copies of attention over pages on TPUs: pages and queries from main memory into rings in VMEM, ahead
of the computation, and outputs back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["FIELDS", "LANES", "LOG2E", "Copies", "Paged", "Tile"]

LOG2E = 1.4426950408889634
LANES = 128
# The integers of a tile in the list.
FIELDS = 8


@dataclass(frozen=True)
class Paged:
    """Compile-time options.

    Attributes:
      N, K, H, HV: heads of queries and of keys, and their widths.
      C: slots of a page, or of each of the `pieces` that it is copied in. pages, longest: pieces of the cache, and of the
        longest request. tables: whether there is a table of pages; otherwise request r has page r.
      form: "apart" for two caches; "joined" for one, whose slots have the key first; "paired", for one that has the key and
        the value of a head as two heads; "within", for one whose values are the first HV numbers of its keys, as of latents.
      rows_of_slots: whether the slots of a piece are the rows of a matrix: there is one head, and they fill whole tiles.
      tokens: queries per tile. block: pieces copied at once. buffers: blocks in flight or in use. parts: lists of tiles that
        cores may run at the same time.
      flat: whether one product takes all heads, of one query.
      low, high: offsets of the first and last key that a query sees from its own position, or None.
      k_scales, v_scales: whether slots have scales of their own. slopes, sinks: whether there are any.
    """

    N: int
    K: int
    H: int
    HV: int
    C: int
    pages: int
    pieces: int
    longest: int
    tables: bool
    form: str
    tokens: int
    block: int
    buffers: int
    parts: int
    flat: bool
    scale: float
    cap: float | None
    low: int | None
    high: int | None
    k_scales: bool
    v_scales: bool
    slopes: bool
    sinks: bool
    rows_of_slots: bool = False
    lse: bool = False  # whether the log-sum-exp of each row is returned as well

    @property
    def heads(self) -> int:
        """Heads per slot of a cache, keys and values together."""
        return 2 * self.K if self.form == "paired" else self.K

    @property
    def units(self) -> int:
        """Products of a block."""
        return 1 if self.flat else self.K

    @property
    def rows(self) -> int:
        """Rows of a product: queries times heads."""
        return self.tokens * self.N // self.units

    @property
    def stride(self) -> int:
        """Columns of a product for each slot."""
        return self.heads if self.flat else 1

    @property
    def keys(self) -> int:
        """Slots of a block."""
        return self.block * self.C


class Tile(NamedTuple):
    """The integers of a tile: its request, first row, and number of queries; the position of the first; its blocks of keys, and
    the keys that any of its queries sees."""

    request: Any
    row: Any
    tokens: Any
    position: Any
    begin: Any
    end: Any
    first: Any
    last: Any  # one past it


class Copies:
    """The copies of one step of the grid. `refs` are its references by the names that the caller gives them.

    `ahead` holds five integers that steps pass on: tile and block of the next copies, blocks copied and computed, and rows of
    outputs in flight.
    """

    def __init__(self, o: Paged, refs: dict[str, Any]):
        self.o, self.refs = o, refs

    def tile(self, index: Any) -> Tile:
        return Tile(*(self.refs["tiles"][index * FIELDS + field] for field in range(FIELDS)))

    def sources(self) -> list[tuple[Any, Any]]:
        """Returns (array in main memory, ring of blocks) for each array that has pages."""
        names = ["key", "value"][: 2 if self.o.form == "apart" else 1]
        names += ["k_scale"] * self.o.k_scales + ["v_scale"] * self.o.v_scales
        return [(self.refs[name], self.refs[f"{name}_ring"]) for name in names]

    def of_block(self, t: Tile, block: Any) -> tuple[Any, Any]:
        """Returns (begin, end): the pieces of a block with keys that the tile sees."""
        o, start = self.o, block * self.o.block
        begin = jnp.clip(lax.div(t.first, o.C) - start, 0, o.block)
        return begin, jnp.clip(lax.div(t.last + o.C - 1, o.C) - start, begin, o.block)

    def piece(self, t: Tile, n: Any) -> Any:
        """Returns the piece of the cache that is number n of a request, clipped to those that exist."""
        o = self.o
        if o.tables:
            page = lax.div(n, o.pieces) if o.pieces > 1 else n
            number = self.refs["tables"][t.request * (o.longest // o.pieces) + page]
            number = jnp.clip(number, 0, o.pages // o.pieces - 1)
            return number * o.pieces + lax.rem(n, o.pieces) if o.pieces > 1 else number
        return t.request * o.pieces + n

    def start_block(self, t: Tile, block: Any, slot: Any) -> None:
        begin, end = self.of_block(t, block)

        def copy(p: Any, _: Any = 0) -> Any:
            piece = self.piece(t, block * self.o.block + p)
            for array, ring in self.sources():
                pltpu.make_async_copy(array.at[piece], ring.at[slot, p], self.refs["arrived"].at[slot]).start()
            return 0

        whole = end - begin == self.o.block

        @pl.when(whole)
        def _() -> None:
            for p in range(self.o.block):
                copy(p)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            lax.fori_loop(begin, end, copy, 0)

    def wait_for_block(self, t: Tile, block: Any, slot: Any) -> None:
        begin, end = self.of_block(t, block)
        arrived, whole = self.refs["arrived"].at[slot], end - begin == self.o.block

        @pl.when(whole)
        def _() -> None:  # a semaphore counts bytes
            for _, ring in self.sources():
                pltpu.make_async_copy(ring.at[slot], ring.at[slot], arrived).wait()

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            def wait(p: Any, _: Any) -> Any:
                for _, ring in self.sources():
                    pltpu.make_async_copy(ring.at[slot, p], ring.at[slot, p], arrived).wait()
                return 0

            lax.fori_loop(begin, end, wait, 0)

    def each_query(self, tokens: Any, act: Callable[[Any], None]) -> None:
        if self.o.tokens == 1:
            act(0)
        else:
            lax.fori_loop(0, tokens, lambda n, _: (act(n), 0)[1], 0)

    def queries(self, t: Tile, slot: Any, act: Callable[[Any], None]) -> None:
        """Starts copying the queries of a tile, or waits for the copy."""
        ring, sem = self.refs["query_ring"], self.refs["asked"].at[slot]
        self.each_query(
            t.tokens,
            lambda n: act(pltpu.make_async_copy(self.refs["query"].at[t.row + n], ring.at[slot, n], sem)),
        )

    def outputs(self, row: Any, tokens: Any, act: Callable[[Any], None]) -> None:
        """Starts copying the results of a tile, or waits for the copies."""
        written = self.refs["written"]
        for result, out in (("result", "out"), ("logs", "lse"))[: 1 + self.o.lse]:
            self.each_query(
                tokens,
                lambda n, result=self.refs[result], out=self.refs[out]: act(
                    pltpu.make_async_copy(result.at[n], out.at[row + n], written)
                ),
            )

    def advance(self, total: Any) -> None:
        """Starts copying the next block that is not copied yet, if there is one."""
        o, ahead = self.o, self.refs["ahead"]
        index, block, count = ahead[0], ahead[1], ahead[2]

        @pl.when(index < total)
        def _() -> None:
            t = self.tile(index)

            @pl.when(block == t.begin)
            def _() -> None:
                self.queries(t, lax.rem(lax.div(index, o.parts), o.buffers), lambda copy: copy.start())

            self.start_block(t, block, lax.rem(count, o.buffers))
            ahead[2] = count + 1
            done = block + 1 >= t.end
            following = jnp.where(done, index + o.parts, index)
            ahead[0] = following
            ahead[1] = jnp.where(done, self.refs["tiles"][jnp.minimum(following, total - 1) * FIELDS + 4], block + 1)
