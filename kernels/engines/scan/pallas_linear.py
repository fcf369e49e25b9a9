"""Pallas kernels of a recurrence with one decay per head, for TPUs: a walk over the chunks of a row with the states in VMEM.

A program of the grid has one chunk of some heads. What heads share is loaded once, and its gradients are summed before they are
written. Every array is read or written once, where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.scan.pallas_linear_parts import (
    between,
    both,
    divided,
    fades,
    load_head,
    of_head,
    product,
    store_heads,
    triangle,
)


@dataclass(frozen=True)
class Plan:
    """Sizes of a call.

    Attributes:
      T: tokens of a row. C: tokens of a chunk. chunks: of a row.
      heads: heads of a program of the grid. rows: the same, rounded up to whole sublanes.
      units: programs of a chunk, one after the other, whose heads share the `heads_k` heads of one block of keys.
      of_keys: the arrays with the heads of keys.
      last: whether queries, keys, and values have their tokens last.
      scale: factor of the outputs.
      dtype: that of products; sums are of float32.
    """

    T: int
    C: int
    chunks: int
    heads: int
    rows: int
    units: int
    heads_k: int
    of_keys: tuple[str, ...]
    last: tuple[bool, bool, bool]
    scale: float
    dtype: Any

    @property
    def shared(self) -> int:
        """The heads that read one head of keys."""
        return self.heads * self.units // self.heads_k


class Heads:
    """The heads of a program: what several of them share is loaded, and computed, once."""

    def __init__(self, refs: dict[str, Any], plan: Plan, valid: Any):
        self.refs, self.plan, self.valid = refs, plan, valid
        self.known: dict[Any, jax.Array] = {}

    def index(self, name: str, i: int) -> tuple[int, Any]:
        """Returns (what distinguishes head i's part of an array from that of the program's others, its index in the block)."""
        plan = self.plan
        if name not in plan.of_keys:
            return i, i
        if plan.units == 1:
            return i // plan.shared, i // plan.shared
        return 0, divided(pl.program_id(3), plan.shared // plan.heads)[0] if plan.heads_k > 1 else 0

    def __call__(self, name: str, i: int) -> jax.Array:
        """Returns an array of head i in the dtype of products: [C, D], or [D, C] with its tokens last."""
        _, h = self.index(name, i)
        last = self.plan.last["qkv".index(name) if name in "qkv" else 2]
        return self.once("", (name,), i, lambda: load_head(self.refs[name], h, last, self.valid))

    def once(self, what: str, names: tuple[str, ...], i: int, make: Callable[[], jax.Array]) -> jax.Array:
        """Returns `make()`, which depends on the arrays `names` of head i alone."""
        key = (what, *names, *(self.index(name, i)[0] for name in names))
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def pairs(self, i: int) -> jax.Array:
        """Returns the products of queries and keys [C, C]."""
        q, k, _ = self.plan.last
        return self.once("pairs", ("q", "k"), i, lambda: product(self("q", i), 1 - q, self("k", i), 1 - k))


def _where(refs: dict[str, Any], plan: Plan, c: Any) -> tuple[Any, Any, Any]:
    """Returns (whether a sequence begins with chunk c, whether one ends with it, the valid tokens as a column and a row)."""
    begins, ends, valid = c == 0, c == plan.chunks - 1, None
    if "flags" in refs:
        flags = refs["flags"][pl.program_id(0) * plan.chunks + c]
        begins, ends = flags & 1 == 1, flags & 2 == 2
    if "valid" in refs:
        row = refs["valid"][0]
        valid = jnp.broadcast_to(row, (8, plan.C)).T[:, :1] > 0, row > 0
    elif plan.T % plan.C:
        shapes = enumerate(((plan.C, 1), (1, plan.C)))
        valid = tuple(c * plan.C + lax.broadcasted_iota(jnp.int32, shape, dim) < plan.T for dim, shape in shapes)
    return begins, ends, valid


def _decays(refs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns (`Fades`, weights of writes, what a state after the chunk has of a write); weights that are 1 are None."""
    f = fades(refs["a"][0])
    if "w" not in refs:
        return f, None, f.leaves
    w = both(refs["w"][0])
    return f, w, (f.leaves[0] * w[0], f.leaves[1] * w[1])


def _first(plan: Plan) -> Any:
    """Returns the program's first head among those of the states that its block has."""
    return 0 if plan.units == 1 else pl.program_id(3) * plan.heads


def _skip(refs: dict[str, Any], plan: Plan, i: int) -> jax.Array:
    return refs["skip"][(pl.program_id(1) * plan.units + pl.program_id(3)) * plan.heads + i]


def linear_fwd_kernel(refs: dict[str, Any], plan: Plan) -> None:
    """Writes a chunk's outputs, the states before it, or the states in which sequences end: those that are in `refs`.

    A state is [H, Hv], or [Hv, H] if the tokens of values are last.
    """
    state, first, dtype, (q_last, k_last, last) = refs["state"], _first(plan), plan.dtype, plan.last
    begins, ends, valid = _where(refs, plan, pl.program_id(2))
    own = pl.ds(first, plan.heads)

    @pl.when(begins)
    def _():
        zero = jnp.zeros((plan.heads, *state.shape[1:]), jnp.float32)
        state[own] = refs["entries"][0, 0, own] if "entries" in refs else zero

    f, w, leaves = _decays(refs)
    heads, outs = Heads(refs, plan, valid), []
    for i in range(plan.heads):
        v, before = heads("v", i), state[first + i]
        if "states" in refs:
            refs["states"][0, i, 0] = before.astype(refs["states"].dtype)
        if "out" in refs:
            weights = heads.pairs(i) * between(f, i)
            weights = weights if w is None else weights * of_head(w, i, 1)
            seen = product(heads("q", i), 1 - q_last, before.astype(dtype), last, last)
            out = product(weights.astype(dtype), 1, v, last, last) + of_head(f.enters, i, last) * seen
            out = out * plan.scale
            out = out + _skip(refs, plan, i) * v.astype(jnp.float32) if "skip" in refs else out
            outs.append(out if valid is None else jnp.where(valid[last], out, 0.0))
        written = (of_head(leaves, i, last) * v.astype(jnp.float32)).astype(dtype)
        state[first + i] = f.whole[:, i : i + 1] * before + product(heads("k", i), k_last, written, last, last)
    if outs:
        store_heads(refs["out"], outs, last)
    if "exits" in refs:

        @pl.when(ends)
        def _():
            refs["exits"][0, 0, own] = state[own]


class _Sums:
    """Sums of each head over channels or pairs, one number for a token: columns or rows as they come, then rows."""

    def __init__(self, names: tuple[str, ...], plan: Plan):
        self.names, self.L = names, plan.rows
        self.lane = lax.broadcasted_iota(jnp.int32, (plan.C, len(names) * self.L), 1)
        self.sublane = lax.broadcasted_iota(jnp.int32, (self.L, plan.C), 0)
        self.columns = jnp.zeros(self.lane.shape)
        self.rows = {name: jnp.zeros(self.sublane.shape) for name in names}

    def put(self, name: str, i: int, x: jax.Array, dim: int) -> None:
        """Sets a sum of head i to that of an array over one of its dims, as a column (1) or a row (0), which add up."""
        x = jnp.sum(x, axis=dim, keepdims=True)
        if dim == 1:
            self.columns = jnp.where(self.lane == self.names.index(name) * self.L + i, x, self.columns)
        else:
            self.rows[name] = jnp.where(self.sublane == i, x, self.rows[name])

    def totals(self) -> list[jax.Array]:
        """Returns the sums [heads, C] in the order of their names."""
        columns = self.columns.T
        return [self.rows[name] + columns[self.L * n : self.L * (n + 1)] for n, name in enumerate(self.names)]


def linear_bwd_kernel(refs: dict[str, Any], plan: Plan) -> None:
    """Writes a chunk's gradients, from the last chunk to the first; `state` is that of the state after the chunk."""
    state, first, dtype, (q_last, k_last, last) = refs["state"], _first(plan), plan.dtype, plan.last
    begins, ends, valid = _where(refs, plan, plan.chunks - 1 - pl.program_id(2))
    summed, own = [name for name in refs if name.startswith("sum_")], pl.ds(first, plan.heads)

    @pl.when(ends)
    def _():
        state[own] = refs["d_exits"][0, 0, own]

    @pl.when(pl.program_id(3) == 0)
    def _():
        for name in summed:
            refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    f, w, leaves = _decays(refs)
    heads, sums = Heads(refs, plan, valid), _Sums(("pairs", "reads", "writes", "written", "skip"), plan)
    grads: dict[str, list[jax.Array]] = {"q": [], "k": [], "v": []}
    passed = jnp.zeros((plan.rows, plan.C))
    for i in range(plan.heads):
        q, k, v = heads("q", i), heads("k", i), heads("v", i)
        before, after, whole = refs["states"][0, i, 0], state[first + i], f.whole[:, i : i + 1]
        d_out = heads("d_out", i).astype(jnp.float32)
        scaled = d_out * plan.scale
        d, of_end = scaled.astype(dtype), after.astype(dtype)
        decays, d_pairs = between(f, i), product(d, 1 - last, v, 1 - last)
        weights = heads.pairs(i) * decays
        both_pairs = weights * d_pairs
        sums.put("written", i, both_pairs, 0)
        d_pairs = d_pairs * decays
        if w is not None:
            factor = of_head(w, i, 1)
            weights, d_pairs, both_pairs = weights * factor, d_pairs * factor, both_pairs * factor
        weights, d_pairs = weights.astype(dtype), d_pairs.astype(dtype)
        entered = product(d, 1 - last, before, 1 - last, q_last) * of_head(f.enters, i, q_last)
        left = product(v, 1 - last, of_end, 1 - last, k_last) * of_head(f.leaves, i, k_last)
        sums.put("pairs", i, both_pairs, 1)
        sums.put("reads", i, q.astype(jnp.float32) * entered, 1 - q_last)
        sums.put("writes", i, k.astype(jnp.float32) * left, 1 - k_last)
        through = jnp.sum(before.astype(jnp.float32) * after, axis=(0, 1), keepdims=True)
        passed = jnp.where(sums.sublane == i, whole * through, passed)
        dv = product(weights, 0, d, last, last)
        dv = dv + product(k, 1 - k_last, of_end, last, last) * of_head(leaves, i, last)
        if "skip" in refs:
            dv = dv + _skip(refs, plan, i) * d_out
            sums.put("skip", i, d_out * v.astype(jnp.float32), 1 - last)
        grads["q"].append(product(d_pairs, 1, k, k_last, q_last) + entered)
        left = left if w is None else left * of_head(w, i, k_last)
        grads["k"].append(product(d_pairs, 0, q, q_last, k_last) + left)
        grads["v"].append(dv)
        faded = (scaled * of_head(f.enters, i, last)).astype(dtype)
        state[first + i] = whole * after + product(q, q_last, faded, last, last)
    _write(refs, plan, heads, grads)
    pairs, reads, writes, written, skipped = sums.totals()
    if w is not None:
        refs["d_w"][0] = written + writes
        written, writes = written * w[1], writes * w[1]
    if "skip" in refs:
        refs["d_skip"][0] = skipped
    # A decay is in all pairs of a reader that is its own token or later, and an earlier writer. Pairs of two that are later
    # are in both sums, and cancel exactly.
    later = product(pairs + reads - written, 1, triangle(plan.C), 1)
    refs["d_a"][0] = later + product(writes, 1, triangle(plan.C, strict=True), 0) + passed

    @pl.when(pl.program_id(3) == plan.units - 1)
    def _():
        for name in summed:
            sum_of = [refs[name][h] for h in range(plan.heads_k)]
            store_heads(refs["d_" + name[-1]], sum_of, plan.last["qkv".index(name[-1])])

    if "d_entries" in refs:

        @pl.when(begins)
        def _():
            refs["d_entries"][0, 0, own] = state[own]


def _write(refs: dict[str, Any], plan: Plan, heads: Heads, grads: dict[str, list[jax.Array]]) -> None:
    """Writes the gradients of a program's heads, or adds them to the sums of those that share an array."""
    for name, parts in grads.items():
        if name not in plan.of_keys:
            store_heads(refs["d_" + name], parts, plan.last["qkv".index(name)])
            continue
        shared: dict[int, tuple[Any, jax.Array]] = {}
        for i, x in enumerate(parts):
            key, h = heads.index(name, i)
            shared[key] = h, (shared[key][1] + x if key in shared else x)
        for h, x in shared.values():
            refs["sum_" + name][h] += x
