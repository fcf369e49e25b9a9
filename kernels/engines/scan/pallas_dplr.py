"""Pallas kernels of a recurrence whose transition is diagonal plus low rank ("DPLR"), as that of RWKV-7, on TPUs:

    u_t = S_{t-1}ᵀ a_t,  S_t = diag(exp w_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

A program walks the visits of a row (`pallas_visits`) with its states in VMEM. As in `pallas_channel.py`, whose decays and
products these are, what a chunk computes is a function of arrays, `step`, and the reverse walk is its derivative.

Heads of up to 64 channels are *packed*: two lie beside each other in the 128 lanes, so that decays and exponentials of both are
one, and the state of a pack is a matrix with a block for each on its diagonal. Products that would mix the heads of a pack have
the channels of all but one set to 0 in one operand. XLA stores such arrays as [B, N, D, T], where a pack is 128 rows: it is
read as it lies, and transposed in VMEM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.scan.pallas_channel import NN, each_head, loaded, solved
from kernels.engines.scan.pallas_delta import Plan, Visit
from kernels.engines.scan.pallas_delta_parts import CHUNK, SIDE_BY_SIDE, TN, inverses, load_heads, store_heads
from kernels.engines.scan.pallas_steps import Reader, decays, dot, pairs

ARRAYS = ("q", "w", "k", "v", "a", "b")


class Tokens(NamedTuple):
    """Float32 arrays of a chunk of a pack: v [C, Hv], the others [C, H]; q is None where there are no outputs."""

    q: Any
    w: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array
    b: jax.Array


class Chunk(NamedTuple):
    """What a chunk of a pack does to any state. Arrays of the heads of a pack lie side by side, [C, pack C].

    Attributes:
      ab, ak: what a reads of b and of k. qb, qk: what q reads of them, None without q.
      readers: [C, H], a and below it q, as they read the state before the chunk.
      writers: [2 C, H], b and below it k, as they write the state after it.
      whole: [H, C], the decay over the chunk, in every column.
    """

    ab: Any
    ak: jax.Array
    qb: Any
    qk: Any
    readers: jax.Array
    writers: jax.Array
    whole: jax.Array


def _alone(x: jax.Array, pack: int, axis: int = 1) -> list[jax.Array]:
    """Returns, for each head of a pack, x with 0 in the channels of the others."""
    if pack == 1:
        return [x]
    of = lax.div(lax.broadcasted_iota(jnp.int32, x.shape, axis), x.shape[axis] // pack)
    return [jnp.where(of == j, x, 0.0) for j in range(pack)]


def _blocks(x: jax.Array, pack: int) -> jax.Array:
    """Returns a matrix [H, Hv] with 0 where its rows and its columns are of different heads."""
    if pack == 1:
        return x
    row, column = (lax.div(lax.broadcasted_iota(jnp.int32, x.shape, i), x.shape[i] // pack) for i in (0, 1))
    return jnp.where(row == column, x, 0.0)


def chunk_of(x: Tokens, pack: int, dtype: Any, narrow: bool) -> Chunk:
    """Returns what a chunk does: of each step of its pairs both readers with both writers of all heads in one product."""
    d = decays(x.w, narrow)
    readers = [Reader(x.a, True)] + ([] if x.q is None else [Reader(x.q, False, True)])
    writers = [y for z in (x.b, x.k) for y in _alone(z, pack)]
    rows = [[jnp.concatenate(r[i : i + pack], axis=1) for i in (0, pack)] for r in pairs(readers, writers, d, dtype)]
    reads = [x.a * d.before] + ([] if x.q is None else [x.q * d.enters])
    writes = jnp.concatenate([x.b * d.leaves, x.k * d.leaves])
    (ab, ak), (qb, qk) = rows[0], rows[1] if len(rows) > 1 else (None, None)
    return Chunk(ab, ak, qb, qk, jnp.concatenate(reads), writes, jnp.transpose(d.whole))


def finish(
    x: Chunk, v: jax.Array, state: jax.Array, inverse: jax.Array, scale: float, dtype: Any
) -> tuple[Any, jax.Array]:
    """Returns (out [C, Hv], or None without q; the state after the chunk).

    Args:
      inverse: of I - P(a, b) of each head, [pack C, C].
    """
    pack, reads = inverse.shape[0] // CHUNK, x.qk is not None
    of_values = jnp.concatenate([x.ak, x.qk]) if reads else x.ak
    both = dot(x.readers, state, NN, dtype) + dot(of_values, jnp.concatenate(_alone(v, pack)), NN, dtype)
    each = [slice(j * CHUNK, (j + 1) * CHUNK) for j in range(pack)]
    matrices = [jnp.zeros((CHUNK, CHUNK)) if x.ab is None else -x.ab[:, i] for i in each]
    solutions = [solved(m, both[:CHUNK], inverse[i], dtype) for m, i in zip(matrices, each, strict=True)]
    alone = [_alone(u, pack)[j] for j, u in enumerate(solutions)]
    written = alone[0]
    for u in alone[1:]:
        written = written + u
    added = _blocks(dot(x.writers, jnp.concatenate([written, v]), TN, dtype), pack)
    whole = x.whole
    whole = jnp.concatenate([whole] * (state.shape[1] // CHUNK), axis=1) if state.shape[1] > CHUNK else whole
    after = whole * state + added
    if not reads:
        return None, after
    return scale * (both[CHUNK:] + dot(x.qb, jnp.concatenate(alone), NN, dtype)), after


def step(
    x: Tokens, state: jax.Array, inverse: jax.Array, scale: float, dtype: Any, narrow: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, state after the chunk) of a chunk of a pack."""
    return finish(chunk_of(x, inverse.shape[0] // CHUNK, dtype, narrow), x.v, state, inverse, scale, dtype)


# -- kernels ----------------------------------------------------------------------------------------------------------


def load_packs(ref: Any, packs: Any, _: Any, valid: jax.Array | None) -> None:
    """Copies a block [1, packs, D, C] to `packs` [packs, C, D], with 0 for tokens that are not valid."""
    for h in range(packs.shape[0]):
        x = jnp.transpose(ref[0, h].astype(jnp.float32))
        packs[h] = (x if valid is None else jnp.where(valid, x, 0)).astype(packs.dtype)


def store_packs(ref: Any, packs: Any, _: Any, more: Any = None) -> None:
    """Copies `packs` [packs, C, D] to a block [1, packs, D, C].

    Args:
      more: a bool: whether to add to what the block has.
    """
    for h in range(packs.shape[0]):
        x = jnp.transpose(packs[h].astype(jnp.float32)).astype(ref.dtype)
        ref[0, h] = x if more is None else jnp.where(more, ref[0, h] + x, x)


def _tokens(scratch: dict[str, Any], h: Any, reads: bool) -> Tokens:
    q, w, k, v, a, b = (scratch[n][h].astype(jnp.float32) if reads or n != "q" else jnp.zeros(()) for n in ARRAYS)
    return Tokens(q if reads else None, w, k, v, a, b)


def dplr_walk_kernel(table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan) -> None:
    """Walks a row forward, and writes what is in `y`: "out", "exits"; "states" before each visit, "solve", the inverses."""
    visit, state, reads, dtype = Visit(table, p, False), scratch["state"], "out" in y, scratch["k"].dtype
    pack = scratch["solve"].shape[1] // CHUNK

    @pl.when(visit.begins)
    def _() -> None:
        state[...] = x["entries"][0, 0] if "entries" in x else jnp.zeros(state.shape, jnp.float32)

    names = tuple(n for n in Chunk._fields[1:] if reads or n[0] != "q")

    def prepare(h: Any, narrow: bool) -> None:
        each = chunk_of(_tokens(scratch, h, reads), pack, dtype, narrow)
        for j in range(pack):
            i = slice(j * CHUNK, (j + 1) * CHUNK)
            scratch["pairs"][h, i] = -each.ab[:, i]
        for name in names:
            scratch[name][h] = getattr(each, name).astype(scratch[name].dtype)

    def head(h: Any, _: None) -> None:
        z: dict[str, Any] = dict.fromkeys(Chunk._fields) | {name: scratch[name][h] for name in names}
        before, inverse = state[h], scratch["solve"][h]
        if "states" in y:
            y["states"][0, 0, h], y["solve"][0, 0, h] = before.astype(dtype), inverse
        v = scratch["v"][h].astype(jnp.float32)
        out, state[h] = finish(Chunk(**z), v, before, inverse, p.scale, dtype)
        if reads:
            scratch["out"][h] = out.astype(scratch["out"].dtype)

    def body() -> None:
        loaded(x, scratch, visit, p, ARRAYS if reads else ARRAYS[1:], "w", load_heads if pack == 1 else load_packs)
        each_head(p.keys, scratch, prepare, "w")
        parts = [(h, slice(j * CHUNK, (j + 1) * CHUNK)) for h in range(p.keys) for j in range(pack)]
        for first in range(0, len(parts), SIDE_BY_SIDE):
            some = parts[first : first + SIDE_BY_SIDE]
            for at, z in zip(some, inverses([scratch["pairs"][at] for at in some], dtype == jnp.float32)):
                scratch["solve"][at] = z.astype(dtype)
        lax.fori_loop(0, p.keys, head, None)
        if reads:
            store = store_heads if pack == 1 else store_packs
            store(y["out"], scratch["out"], scratch.get("value_words"), visit.more)

    visit.run(body, [y["out"]] if reads else [])
    if "exits" in y:

        @pl.when(visit.ends)
        def _() -> None:
            y["exits"][0, 0] = state[...]


def dplr_reverse_kernel(table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan) -> None:
    """Walks a row from its end with the gradient of the states, and writes all gradients."""
    visit, d_state, dtype = Visit(table, p, True), scratch["state"], scratch["k"].dtype
    pack = x["solve"].shape[3] // CHUNK

    @pl.when(visit.ends)
    def _() -> None:
        d_state[...] = x["d_exits"][0, 0]

    def body() -> None:
        valid = loaded(x, scratch, visit, p, (*ARRAYS, "d_out"), "w", load_heads if pack == 1 else load_packs)

        def head(h: Any, narrow: bool) -> None:
            z, before, inverse = (
                _tokens(scratch, h, True),
                x["states"][0, 0, h].astype(jnp.float32),
                x["solve"][0, 0, h],
            )
            _, pull = jax.vjp(lambda z, before: step(z, before, inverse, p.scale, dtype, narrow), z, before)
            d, d_state[h] = pull((scratch["d_out"][h].astype(jnp.float32), d_state[h]))
            dw = d.w if valid is None else jnp.where(valid, d.w, 0.0)  # padding is 0 to all else
            for name, each in zip(ARRAYS, d._replace(w=dw)):
                scratch[f"d{name}"][h] = each.astype(scratch[f"d{name}"].dtype)

        each_head(p.keys, scratch, head, "w")
        for name in ARRAYS:
            words = scratch.get("value_words" if name == "v" else "key_words")
            (store_heads if pack == 1 else store_packs)(y[f"d{name}"], scratch[f"d{name}"], words, visit.more)

    visit.run(body, [y[f"d{name}"] for name in ARRAYS])

    @pl.when(visit.begins)
    def _() -> None:
        y["d_entries"][0, 0] = d_state[...]
