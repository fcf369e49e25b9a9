"""Pallas kernels of the causal convolution for TPUs: a program has a block of tokens and channels in VMEM.

A *visit* is a block of tokens, or the part of one that belongs to one sequence. Its tokens are copied to scratch in float32,
behind the W - 1 inputs before them and, in the backward, before the W - 1 after them; a tap is then a load of other rows. Every
array is read or written once, and visits share nothing but the sums of gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.scan.pallas_linear_parts import LANES, product
from kernels.engines.scan.pallas_visits import FRESH

# The fields of a visit in the table: its block, the rows of scratch that its tokens have, from START until STOP, its state, and
# flags; then the row of each token that leaves in its final state, or -1.
FIELDS = 5
BLOCK, START, STOP, STATE, FLAGS = range(FIELDS)
BEGINS, MOVED = 16, 32  # begins behind an initial state; has padding between tokens of one document
SLAB = 64  # tokens whose sums are in registers at once


@dataclass(frozen=True)
class Plan:
    """Sizes of a launch.

    Attributes:
      C: tokens of a block. taps: W - 1, rows of a window before a token. lead: the same in whole sublanes.
      columns: lanes of channels of a block, in units of LANES.
      visits: of a row.
      silu: whether the activation is silu.
      marked: whether documents, padding, or several states say what a token sees.
      tail: whether the last block has rows that are no tokens.
    """

    C: int
    taps: int
    lead: int
    columns: int
    visits: int
    silu: bool
    marked: bool
    tail: bool

    @property
    def rows(self) -> int:
        """Rows of scratch: of a block's tokens, and before and after them."""
        return self.C + 2 * self.lead

    @property
    def slab(self) -> int:
        return min(SLAB, self.C)


class Visit:
    """One visit: what the table says of it, and how its tokens come to scratch and back."""

    def __init__(self, table: Any, refs: dict[str, Any], p: Plan) -> None:
        self.p, self.refs = p, refs
        self.at = (pl.program_id(1) * p.visits + pl.program_id(2)) * (FIELDS + p.taps)
        self.start, self.stop, flags = (table[self.at + i] for i in (START, STOP, FLAGS))
        self.fresh, self.begins, self.moved = (flags & bit > 0 for bit in (FRESH, BEGINS, MOVED))
        self.table = table

    def leaves(self, i: int) -> Any:
        """Returns the row of scratch whose token becomes entry i of the final state, or a negative number."""
        return self.table[self.at + FIELDS + i]

    def mark(self) -> None:
        """Writes to every lane of a row of `seen` how many rows of its document are before it; -1 if it counts for nothing."""
        seen = jnp.transpose(jnp.broadcast_to(self.refs["marks"][0, 0, :1], (LANES, self.refs["marks"].shape[3])))
        self.refs["seen"][self.p.lead :] = seen[: self.p.rows - self.p.lead]
        self.refs["seen"][: self.p.lead] = jnp.full((self.p.lead, LANES), -1.0)

    def slabs(self, body: Callable[[Any], None], reverse: bool = False) -> None:
        """Runs a body on every slab of the block's rows, given its first row in scratch."""
        p, count = self.p, self.p.C // self.p.slab
        if count == 1:
            body(p.lead)
            return

        def one(i: Any, _: None) -> None:
            body(p.lead + pl.multiple_of((count - 1 - i if reverse else i) * p.slab, p.slab))

        lax.fori_loop(0, count, one, None)

    def own(self, first: Any) -> jax.Array | None:
        """Returns which rows of a slab are the visit's tokens [R, LANES]; None: all are."""
        p = self.p
        if not (p.marked or p.tail):
            return None
        row = lax.broadcasted_iota(jnp.int32, (p.slab, LANES), 0) + (first - p.lead)
        inside = (row >= self.start) & (row < self.stop)
        return inside & (self.refs["seen"][pl.ds(first, p.slab)] >= 0) if p.marked else inside

    def shifted(self, ref: Any, column: int, first: Any, by: int, size: int) -> jax.Array:
        """Returns rows of scratch moved by a number of tokens: those before if negative; 0 where documents differ."""
        x = ref[column, pl.ds(first + by, size)]
        if not self.p.marked or by == 0:
            return x
        seen = self.refs["seen"][pl.ds(first + max(by, 0), size)]  # that of the later of the two
        return jnp.where(seen >= abs(by), x, 0.0)

    def _ranks(self) -> tuple[jax.Array, jax.Array]:
        """Returns (the matrix [C, C] that moves tokens together, which of the block's tokens are the visit's [C, 1])."""
        C = self.p.C
        rank = self.refs["marks"][0, 0, 1:, :C]
        together = rank == lax.broadcasted_iota(jnp.int32, (C, C), 0).astype(jnp.float32)
        wide = self.refs["marks"].shape[3]
        column = jnp.transpose(jnp.broadcast_to(self.refs["marks"][0, 0, 1:], (LANES, wide)))[:C, :1]
        return jnp.where(together, 1.0, 0.0), column >= 0

    def load(self, ref: Any, scratch: Any, before: Any, after: Any) -> None:
        """Copies a block's tokens to scratch, and what is before and after them."""
        p = self.p

        def plain() -> None:
            def slab(first: Any) -> None:
                own, rows = self.own(first), pl.ds(first - p.lead, p.slab)
                for column in range(p.columns):
                    x = ref[0, rows, pl.ds(column * LANES, LANES)].astype(jnp.float32)
                    scratch[column, pl.ds(first, p.slab)] = x if own is None else jnp.where(own, x, 0.0)

            self.slabs(slab)

        def together() -> None:
            move, own = self._ranks()

            def one(column: Any, lanes: Any) -> None:
                x = jnp.where(own, ref[0, :, lanes].astype(jnp.float32), 0.0)
                scratch[column, pl.ds(p.lead, p.C)] = product(move.astype(ref.dtype), 1, x.astype(ref.dtype), 0)

            self._columns(one)

        self._either(plain, together)
        for i in range(p.taps):
            for column in range(p.columns):
                lanes = pl.ds(column * LANES, LANES)
                if before is not None:
                    scratch[column, pl.ds(p.lead + self.start - p.taps + i, 1)] = before[i, lanes][None]
                if after is not None:
                    scratch[column, pl.ds(p.lead + self.stop + i, 1)] = after[i, lanes][None]

    def store(self, ref: Any, scratch: Any) -> None:
        """Copies a block's tokens back; other visits' of the same block stay, and what is no token is 0."""
        p = self.p

        def put(rows: Any, lanes: Any, x: jax.Array, own: Any) -> None:
            if p.marked:
                others = ref[0, rows, lanes].astype(jnp.float32)
                x = jnp.where(own, x, jnp.where(self.fresh, 0.0, others))
            ref[0, rows, lanes] = x.astype(ref.dtype)

        def plain() -> None:
            def slab(first: Any) -> None:
                own = self.own(first) if p.marked else None
                for column in range(p.columns):
                    rows, lanes = pl.ds(first - p.lead, p.slab), pl.ds(column * LANES, LANES)
                    put(rows, lanes, scratch[column, pl.ds(first, p.slab)], own)

            self.slabs(slab)

        def apart() -> None:
            move, own = self._ranks()
            counts = self.refs["seen"][pl.ds(p.lead, p.C)] >= 0

            def one(column: Any, lanes: Any) -> None:
                x = jnp.where(counts, scratch[column, pl.ds(p.lead, p.C)], 0.0).astype(ref.dtype)
                put(slice(None), lanes, product(move.astype(ref.dtype), 0, x, 0), own)

            self._columns(one)

        self._either(plain, apart)

    def _columns(self, body: Callable[[Any, Any], None]) -> None:
        """Runs a body on every column, given its lanes in a block: a loop, as compiling so large a body often takes minutes."""

        def one(column: Any, _: None) -> None:
            body(column, pl.ds(pl.multiple_of(column * LANES, LANES), LANES))

        lax.fori_loop(0, self.p.columns, one, None)

    def _either(self, plain: Callable[[], None], moved: Callable[[], None]) -> None:
        if not self.p.marked:
            plain()
            return
        pl.when(jnp.logical_not(self.moved))(plain)
        pl.when(self.moved)(moved)

    def run(self, body: Callable[[], None], out: Any) -> None:
        """Runs the body if the visit has tokens; else clears a block that nothing else would."""
        if not self.p.marked:
            body()
            return
        pl.when(self.stop > self.start)(body)

        @pl.when((self.stop <= self.start) & self.fresh)
        def _() -> None:
            out[...] = jnp.zeros(out.shape, out.dtype)

    def taps(self, column: int) -> list[jax.Array]:
        """Returns the factors [1, LANES] of a column: that of a token itself first."""
        weight, lanes = self.refs["weight"], pl.ds(column * LANES, LANES)
        return [weight[pl.ds(self.p.taps - j, 1), lanes] for j in range(self.p.taps + 1)]

    def sums(self, column: int, first: Any, size: int) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (the convolution of rows before its activation, the inputs of each tap)."""
        inputs = [self.shifted(self.refs["x_rows"], column, first, -j, size) for j in range(self.p.taps + 1)]
        total = sum(w * x for w, x in zip(self.taps(column)[1:], inputs[1:], strict=True))
        total = total + self.taps(column)[0] * inputs[0]
        bias = self.refs.get("bias")
        return total if bias is None else total + bias[:, pl.ds(column * LANES, LANES)], inputs


def conv_fwd_kernel(table: Any, refs: dict[str, Any], p: Plan) -> None:
    """Writes the outputs of a visit."""
    visit, rows = Visit(table, refs, p), refs["x_rows"]

    def slab(first: Any) -> None:
        for column in range(p.columns):
            out, _ = visit.sums(column, first, p.slab)
            rows[column, pl.ds(first, p.slab)] = out / (1.0 + jnp.exp(-out)) if p.silu else out

    def body() -> None:
        if p.marked:
            visit.mark()
        visit.load(refs["x"], rows, refs["halo"][0, 0], None)
        visit.slabs(slab, reverse=True)  # in place: what earlier tokens were is needed no more
        visit.store(refs["out"], rows)

    visit.run(body, refs["out"])


def conv_bwd_kernel(table: Any, refs: dict[str, Any], p: Plan) -> None:
    """Writes the gradients of a visit's tokens, and of a state that they begin behind, and adds those of weights."""
    visit, rows, g_rows = Visit(table, refs, p), refs["x_rows"], refs["g_rows"]

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        for name in ("d_weight", "d_bias"):
            if name in refs:
                refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    def through(column: int, first: Any, size: int) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (the gradient of rows before their activation, the inputs of each tap), and writes the former."""
        g = g_rows[column, pl.ds(first, size)]
        z, inputs = visit.sums(column, first, size)
        if p.silu:
            s = 1.0 / (1.0 + jnp.exp(-z))
            g = g * (s * (1.0 + z * (1.0 - s)))
        g_rows[column, pl.ds(first, size)] = g
        return g, inputs

    def of_sums(first: Any) -> None:
        own = visit.own(first)
        for column in range(p.columns):
            lanes = pl.ds(column * LANES, LANES)
            g, inputs = through(column, first, p.slab)
            g = g if own is None else jnp.where(own, g, 0.0)
            for j, x in enumerate(inputs):
                tap = pl.ds(p.taps - j, 1)
                refs["d_weight"][tap, lanes] += jnp.sum(g * x, axis=0, keepdims=True)
            if "d_bias" in refs:
                refs["d_bias"][:, lanes] += jnp.sum(g, axis=0, keepdims=True)

    def owed(column: int, first: Any, size: int) -> jax.Array:
        """Returns the gradient of inputs: what the rows that see them have."""
        taps = visit.taps(column)
        later = [taps[j] * visit.shifted(g_rows, column, first, j, size) for j in range(1, p.taps + 1)]
        g = g_rows[column, pl.ds(first, size)]
        return sum(later, taps[0] * g)

    def of_inputs(first: Any) -> None:
        for column in range(p.columns):
            g_rows[column, pl.ds(first, p.slab)] = owed(column, first, p.slab)

    def body() -> None:
        if p.marked:
            visit.mark()
        halo = refs["halo"][0, 0]
        visit.load(refs["x"], rows, halo[: p.taps], halo[p.taps :])
        visit.load(refs["d_out"], g_rows, None, refs["d_halo"][0, 0])
        visit.slabs(of_sums)
        for column in range(p.columns):  # of what is behind the block, which other visits have too
            through(column, p.lead + p.C, p.lead)
        if "d_entries" in refs:

            @pl.when(visit.begins)
            def _() -> None:
                for column in range(p.columns):
                    for i in range(p.taps):
                        d = state_gradient(column, p.lead + visit.start - p.taps + i, p.taps - i)
                        refs["d_entries"][0, 0, pl.ds(i, 1), pl.ds(column * LANES, LANES)] = d

        visit.slabs(of_inputs)  # in place: what later tokens owe is needed no more
        for i in range(p.taps):
            leaves = visit.leaves(i)

            @pl.when(leaves >= 0)
            def _(i: int = i, leaves: Any = leaves) -> None:
                for column in range(p.columns):
                    d = refs["d_exits"][0, 0, pl.ds(i, 1), pl.ds(column * LANES, LANES)]
                    g_rows[column, pl.ds(p.lead + leaves, 1)] += d

        visit.store(refs["dx"], g_rows)

    def state_gradient(column: int, row: Any, least: int) -> jax.Array:
        """Returns the gradient of an entry of the initial state, whose first token is `least` rows later."""
        taps = visit.taps(column)
        return sum(
            (taps[j] * visit.shifted(g_rows, column, row, j, 1) for j in range(least, p.taps + 1)),
            jnp.zeros((1, LANES)),
        )

    visit.run(body, refs["dx"])
