"""Pallas TPU kernels of the gated delta rule: a program walks the visits of a row with the states of its heads in VMEM.

A visit is a block of CHUNK tokens, or the part of one that belongs to one sequence. What is written in it is
`W = (I + A)⁻¹ β (V - e^{G} K S)`, then `S' = e^{G_C} S + (e^{G_C - G} K)ᵀ W` and `out = scale (e^{G} Q S + P W)`; see the
README of the delta rules.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.scan.pallas_delta_parts import (
    CHUNK,
    FORGETS,
    NT,
    SIDE_BY_SIDE,
    TN,
    columns,
    inverses,
    load_heads,
    precise_sums,
    product,
    rows_of,
    running_sums,
    store_heads,
)
from kernels.engines.scan.pallas_visits import BEGINS, ENDS, FIELDS, FIRST, FLAGS, FRESH, FRESH_BACK, LAST


class Plan(NamedTuple):
    """The compile-time constants of a launch.

    Attributes:
      keys, values: heads of a group of queries and keys, and of values.
      unit: heads of keys that one iteration takes.
      iterations: of a visit.
      visits: of a row.
      scale: of the outputs.
      masked: whether some tokens of a block may not count.
      packed: whether a block may have several visits.
    """

    keys: int
    values: int
    unit: int
    iterations: int
    visits: int
    scale: float
    masked: bool
    packed: bool

    @property
    def shared(self) -> int:
        """Heads of values that share one of keys."""
        return self.values // self.keys

    @property
    def width(self) -> int:
        """Heads of values that one iteration takes."""
        return self.unit * self.shared


class Visit:
    """One visit, read from the table in scalar memory."""

    def __init__(self, table: Any, p: Plan, reverse: bool) -> None:
        step = p.visits - 1 - pl.program_id(2) if reverse else pl.program_id(2)
        start = (pl.program_id(0) * p.visits + step) * FIELDS
        self.first, self.last, flags = (table[start + i] for i in (FIRST, LAST, FLAGS))
        self.begins, self.ends = flags & BEGINS > 0, flags & ENDS > 0
        self.fresh = flags & (FRESH_BACK if reverse else FRESH) > 0
        self.more = jnp.logical_not(self.fresh) if p.packed else None  # adds to what its block has
        self.p = p

    def here(self, axis: int) -> jax.Array:
        """Returns which of the tokens of the block, along an axis, are in the visit."""
        shape = (1, CHUNK) if axis else (CHUNK, 1)
        i = lax.broadcasted_iota(jnp.int32, shape, axis)
        return (i >= self.first) & (i < self.last)

    def valid(self, ref: Any) -> jax.Array | None:
        """Returns which tokens count, [C, 1]; None: all."""
        if not self.p.masked:
            return None
        rows = jnp.broadcast_to(ref[0, 0], (8, CHUNK))
        return (columns(rows)[:, :1] > 0) & self.here(0)

    def run(self, body: Any, blocks: list[Any]) -> None:
        """Runs the body if there are tokens; else clears the blocks that nothing else would."""
        if not self.p.packed:
            body()
            return
        pl.when(self.last > self.first)(body)

        @pl.when((self.last <= self.first) & self.fresh)
        def _() -> None:
            for ref in blocks:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)


class Gates:
    """Decays and rates of the heads of an iteration: in rows [heads, C] and, of a head, in columns [C, 1]."""

    def __init__(self, x: dict[str, Any], i: Any, visit: Visit, p: Plan) -> None:
        a, beta = (x[name][0, 0, 0, i] for name in ("a", "beta"))
        if p.packed:
            a, beta = (jnp.where(visit.here(1), y, 0.0) for y in (a, beta))
        self.high, self.low = precise_sums(jnp.maximum(a, FORGETS))
        end_high, end_low = self.high[:, CHUNK - 1 :], self.low[:, CHUNK - 1 :]
        leaves = jnp.exp((end_high - self.high) + (end_low - self.low))
        self._columns = columns(jnp.concatenate([self.high, self.low, beta, jnp.exp(self.high), leaves]))
        self.whole = jnp.exp(end_high)
        self._width = p.width

    def column(self, kind: int, j: int) -> jax.Array:
        at = kind * self._width + j
        return self._columns[:, at : at + 1]

    def beta(self, j: int) -> jax.Array:
        return self.column(2, j)

    def enters(self, j: int) -> jax.Array:
        """Returns the decay from the start of the block until each token."""
        return self.column(3, j)

    def leaves(self, j: int) -> jax.Array:
        """Returns the decay from each token to the end of the block."""
        return self.column(4, j)

    def between(self, j: int, lower: jax.Array) -> jax.Array:
        """Returns the decay [C, C] from the second token to the first, 0 where the first is earlier."""
        gap = self.column(0, j) - self.high[j : j + 1] + (self.column(1, j) - self.low[j : j + 1])
        return jnp.where(lower, jnp.exp(jnp.where(lower, gap, 0.0)), 0.0)


def _triangles() -> tuple[jax.Array, jax.Array]:
    """Returns where the second token is not later, and where it is earlier, than the first."""
    t, i = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return t >= i, t > i


def _across(x: jax.Array) -> jax.Array:
    """Returns the sums over lanes, [C, 1]."""
    return jnp.sum(x, axis=1, keepdims=True)


class Heads:
    """Queries and keys of an iteration, and what their pairs are before decays."""

    def __init__(self, scratch: dict[str, Any], i: Any, p: Plan, reads: bool) -> None:
        at = [i * p.unit + j for j in range(p.unit)]
        self.k = [scratch["k"][h] for h in at]
        self.q = [scratch["q"][h] for h in at] if reads else []
        self.kk = [product(k, k, NT) for k in self.k]
        self.qk = [product(q, k, NT) for q, k in zip(self.q, self.k)]


def delta_walk_kernel(table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan) -> None:
    """Walks a row forward, and writes what is in `y`: "out", "exits"; "states" before each visit, "solve", the inverses."""
    visit, state, reads = Visit(table, p, False), scratch["state"], "out" in y
    dtype = scratch["k"].dtype
    exact = dtype == jnp.float32

    @pl.when(visit.begins)
    def _() -> None:
        state[...] = x["entries"][0, 0] if "entries" in x else jnp.zeros(state.shape, jnp.float32)

    def heads_of(i: Any, _: Any = None) -> None:
        gates, heads, (lower, below) = Gates(x, i, visit, p), Heads(scratch, i, p, reads), _triangles()
        fades = [gates.between(j, lower) for j in range(p.width)]
        pairs = [jnp.where(below, heads.kk[j // p.shared] * fade * gates.beta(j), 0.0) for j, fade in enumerate(fades)]
        solves = []
        for j in range(0, p.width, SIDE_BY_SIDE):
            solves += inverses(pairs[j : j + SIDE_BY_SIDE], exact)
        # Step by step for all heads: the products of one follow one another, those of others fill the time between.
        at = [i * p.width + j for j in range(p.width)]
        before = [state[n] for n in at]
        solves = [x.astype(dtype) for x in solves]
        if "states" in y:
            for n, start, solve in zip(at, before, solves):
                y["states"][0, 0, n], y["solve"][0, 0, n] = start.astype(dtype), solve
        readers = [jnp.concatenate(qk) for qk in zip(heads.k, heads.q)] if reads else heads.k
        both = [product(readers[j // p.shared], start.astype(dtype)) for j, start in enumerate(before)]
        known = [
            scratch["v"][n].astype(jnp.float32) - gates.enters(j) * x[:CHUNK] for j, (n, x) in enumerate(zip(at, both))
        ]
        known = [(gates.beta(j) * x).astype(dtype) for j, x in enumerate(known)]
        written = [product(solve, x) for solve, x in zip(solves, known)]
        left = [(gates.leaves(j) * x).astype(dtype) for j, x in enumerate(written)]
        added = [product(heads.k[j // p.shared], x, TN) for j, x in enumerate(left)]
        for j, n in enumerate(at):
            state[n] = gates.whole[j : j + 1] * before[j] + added[j]
        if reads:
            weights = [(heads.qk[j // p.shared] * fade).astype(dtype) for j, fade in enumerate(fades)]
            inside = [product(x, z.astype(dtype)) for x, z in zip(weights, written)]
            for j, n in enumerate(at):
                out = p.scale * (gates.enters(j) * both[j][CHUNK:] + inside[j])
                scratch["out"][n] = out.astype(scratch["out"].dtype)

    def body() -> None:
        valid = visit.valid(x["valid"]) if p.masked else None
        for name in ("q", "k", "v") if reads else ("k", "v"):
            load_heads(x[name], scratch[name], scratch["key_words" if name != "v" else "value_words"], valid)
        if p.iterations == 1:
            heads_of(0)
        else:
            lax.fori_loop(0, p.iterations, lambda i, _: heads_of(i), None)
        if reads:
            store_heads(y["out"], scratch["out"], scratch["value_words"], visit.more)

    visit.run(body, [y["out"]] if reads else [])
    if "exits" in y:

        @pl.when(visit.ends)
        def _() -> None:
            y["exits"][0, 0] = state[...]


def delta_reverse_kernel(table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan) -> None:
    """Walks a row from its end with the gradient of the states, and writes all gradients."""
    visit, d_state = Visit(table, p, True), scratch["state"]
    dtype = scratch["k"].dtype

    @pl.when(visit.ends)
    def _() -> None:
        d_state[...] = x["d_exits"][0, 0]

    def narrow(z: jax.Array) -> jax.Array:
        return z.astype(dtype)

    def heads_of(i: Any, _: Any = None) -> None:
        gates, heads, (lower, below) = Gates(x, i, visit, p), Heads(scratch, i, p, True), _triangles()
        # Step by step for all heads: the products of one follow one another, those of others fill the time between.
        each = range(p.width)
        at, of = [i * p.width + j for j in each], [j // p.shared for j in each]
        fades = [gates.between(j, lower) for j in each]
        before, solves = [x["states"][0, 0, n] for n in at], [x["solve"][0, 0, n] for n in at]
        d_out, d_after = [scratch["d_out"][n] for n in at], [d_state[n] for n in at]
        both_of = [jnp.concatenate(kq) for kq in zip(heads.k, heads.q)]
        both = [product(both_of[of[j]], before[j]) for j in each]
        known = [scratch["v"][at[j]].astype(jnp.float32) - gates.enters(j) * both[j][:CHUNK] for j in each]
        written = [narrow(product(solves[j], narrow(gates.beta(j) * known[j]))) for j in each]
        weights = [narrow(p.scale * heads.qk[of[j]] * fades[j]) for j in each]
        d_written = [
            product(weights[j], d_out[j], TN) + gates.leaves(j) * product(heads.k[of[j]], narrow(d_after[j]))
            for j in each
        ]
        du = [product(solves[j], narrow(d_written[j]), TN) for j in each]
        d_read = [p.scale * gates.enters(j) * d_out[j].astype(jnp.float32) for j in each]
        d_known = [-gates.beta(j) * gates.enters(j) * du[j] for j in each]
        d_both = [jnp.concatenate([narrow(d_known[j]), narrow(d_read[j])]) for j in each]
        d_entry = [product(both_of[of[j]], d_both[j], TN) for j in each]
        for j in each:
            d_state[at[j]] = gates.whole[j : j + 1] * d_after[j] + d_entry[j]
            scratch["dv"][at[j]] = (gates.beta(j) * du[j]).astype(scratch["dv"].dtype)
        # Those of A, which is subtracted, and of P.
        d_pairs = [product(jnp.concatenate([narrow(du[j]), d_out[j]]), written[j], NT) for j in each]
        through = [jnp.where(below, -d_pairs[j][:CHUNK] * fades[j], 0.0) for j in each]
        d_weights = [p.scale * d_pairs[j][CHUNK:] * fades[j] for j in each]
        pairs = [narrow(jnp.concatenate([gates.beta(j) * through[j], d_weights[j]])) for j in each]
        of_states = [product(d_both[j], before[j], NT) for j in each]
        by_keys = [product(pairs[j], heads.k[of[j]]) for j in each]
        by_pairs = [product(pairs[j], both_of[of[j]], TN) for j in each]
        d_left = [gates.leaves(j) * product(written[j], narrow(d_after[j]), NT) for j in each]
        for m in range(p.unit):
            group = range(m * p.shared, (m + 1) * p.shared)
            dq = functools.reduce(jnp.add, [of_states[j][CHUNK:] + by_keys[j][CHUNK:] for j in group])
            to_keys = [of_states[j][:CHUNK] + by_keys[j][:CHUNK] + by_pairs[j] + d_left[j] for j in group]
            dk = functools.reduce(jnp.add, to_keys)
            for name, z in (("dq", dq), ("dk", dk)):
                scratch[name][i * p.unit + m] = z.astype(scratch[name].dtype)
        # Gradients of decays: of those between two tokens, from the start, to the end, and over the block.
        rates, reads, writes, reading, wholes = [], [], [], [], []
        for j in each:
            straight = through[j] * heads.kk[of[j]]
            gaps = gates.beta(j) * straight + jnp.where(below, d_weights[j] * heads.qk[of[j]], 0.0)
            read = d_known[j] * both[j][:CHUNK] + d_read[j] * both[j][CHUNK:]
            rates.append(_across(du[j] * known[j]) + _across(straight))
            reads.append(_across(read) + _across(gaps))
            writes.append(_across(heads.k[of[j]].astype(jnp.float32) * d_left[j]))
            reading.append(jnp.sum(gaps, axis=0, keepdims=True))
            stays = jnp.sum(before[j].astype(jnp.float32) * d_after[j], axis=0, keepdims=True)
            wholes.append(gates.whole[j : j + 1] * _across(stays))
        rows = rows_of(rates + reads + writes)
        d_beta, reads, writes = (rows[s * p.width : (s + 1) * p.width] for s in range(3))
        earlier = running_sums(writes) - writes
        da = running_sums(reads - jnp.concatenate(reading), reverse=True) + earlier + jnp.concatenate(wholes)
        for name, z in (("beta", d_beta), ("a", da)):
            ref = y[name]
            if visit.more is not None:
                z = jnp.where(visit.here(1), z, 0.0)
                z = jnp.where(visit.more, ref[0, 0, 0, i] + z, z)
            ref[0, 0, 0, i] = z

    def body() -> None:
        valid = visit.valid(x["valid"]) if p.masked else None
        for name in ("q", "k", "v", "d_out"):
            load_heads(x[name], scratch[name], scratch["key_words" if name in "qk" else "value_words"], valid)
        if p.iterations == 1:
            heads_of(0)
        else:
            lax.fori_loop(0, p.iterations, lambda i, _: heads_of(i), None)
        for name, words in (("dq", "key_words"), ("dk", "key_words"), ("dv", "value_words")):
            store_heads(y[name], scratch[name], scratch[words], visit.more)

    visit.run(body, [y[name] for name in ("dq", "dk", "dv", "beta", "a")])

    @pl.when(visit.begins)
    def _() -> None:
        y["d_entries"][0, 0] = d_state[...]
