"""Pallas kernels of recurrences in which each channel of a key decays by its own factor, with or without a delta rule, on TPUs.

    S' = diag(exp a_t) S_{t-1},  S_t = S' + k_t w_tᵀ,  out_t = scale · S_tᵀ q_t

with w_t = v_t, or for a delta rule β_t (v_t - S'ᵀ k_t). A program walks the visits of a row (`pallas_visits`) with the states
of its heads in VMEM. What one chunk of a head computes is a function of arrays, `step`; the reverse walk is its derivative.

Pairs are those of `pallas_steps.py`. In bfloat16 each chunk of a head decides by its data whether a sum is too wide.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.scan.pallas_delta import Plan, Visit
from kernels.engines.scan.pallas_delta_parts import (
    CHUNK,
    FORGETS,
    NT,
    SIDE_BY_SIDE,
    TN,
    columns,
    inverses,
    load_heads,
    product,
    rows_of,
    store_heads,
)
from kernels.engines.scan.pallas_steps import NARROW, REACH, Decays, Reader, decays, dot, pairs

NN = ((1,), (0,))
RESET = 2.0  # of a valid token that begins a document; 1.0 of others

# -- a chunk of a head ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def solved(A: jax.Array, right: jax.Array, inverse: jax.Array, dtype: Any) -> jax.Array:
    """Returns the solution of (I + A) x = right, given the inverse of I + A, which is not differentiated."""
    return product(inverse, right.astype(dtype))


def _solved_fwd(A: jax.Array, right: jax.Array, inverse: jax.Array, dtype: Any) -> Any:
    x = product(inverse, right.astype(dtype))
    return x, (inverse, x.astype(dtype))


def _solved_bwd(dtype: Any, saved: Any, d: jax.Array) -> Any:
    inverse, x = saved
    d_right = product(inverse, d.astype(dtype), TN)
    return -product(d_right.astype(dtype), x, NT), d_right, jnp.zeros_like(inverse)


solved.defvjp(_solved_fwd, _solved_bwd)


def _diagonal(x: jax.Array) -> jax.Array:
    """Returns the matrix [C, C] with the sums of x [C, H] over channels on its diagonal."""
    t, s = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return jnp.where(t == s, jnp.sum(x, axis=1, keepdims=True), 0.0)


def weights_of(
    q: jax.Array | None, k: jax.Array, d: Decays, bonus: jax.Array | None, delta: bool, dtype: Any
) -> tuple[Any, Any]:
    """Returns the weights of what outputs read of writes, and of what a delta rule's keys do, [C, C]; None without them."""
    readers = [Reader(x, bonus is not None) for x in (q, k if delta else None) if x is not None]
    each = [row[0] for row in pairs(readers, [k], d, dtype)]
    of_keys = each[-1] if delta else None
    if q is None:
        return None, of_keys
    own = q * k if bonus is None else q * k * bonus
    return each[0] + _diagonal(own), of_keys


class Tokens(NamedTuple):
    """Float32 arrays of a chunk of a head: q, k, a [C, H], v [C, Hv], beta [C, 1] or None, bonus [1, H] or None."""

    q: Any
    k: jax.Array
    v: jax.Array
    a: jax.Array
    beta: Any
    bonus: Any


def finish(
    x: Tokens, state: jax.Array, d: Decays, weights: Any, of_keys: Any, inverse: Any, scale: float, dtype: Any
) -> tuple[Any, jax.Array]:
    """Returns (out [C, Hv], or None without weights; the state after the chunk)."""
    written = x.v
    if x.beta is not None:
        right = x.beta * (x.v - dot(x.k * d.enters, state, NN, dtype))
        written = solved(jnp.zeros((CHUNK, CHUNK)) if of_keys is None else of_keys * x.beta, right, inverse, dtype)
    whole = jnp.transpose(d.whole)  # [H, C]: the same in every column
    whole = jnp.concatenate([whole] * (state.shape[1] // CHUNK), axis=1) if state.shape[1] > CHUNK else whole
    after = whole * state + dot(x.k * d.leaves, written, TN, dtype)
    if weights is None:
        return None, after
    reads = x.q * (d.enters if x.bonus is None else d.before)
    return scale * (dot(reads, state, NN, dtype) + dot(weights, written, NN, dtype)), after


def step(
    x: Tokens, state: jax.Array, inverse: Any, scale: float, dtype: Any, narrow: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, state after the chunk) of a chunk of a head."""
    d = decays(x.a, narrow)
    weights, of_keys = weights_of(x.q, x.k, d, x.bonus, x.beta is not None, dtype)
    return finish(x, state, d, weights, of_keys, inverse, scale, dtype)


# -- kernels ----------------------------------------------------------------------------------------------------------


def loaded(
    x: dict[str, Any],
    scratch: dict[str, Any],
    visit: Visit,
    p: Plan,
    names: tuple[str, ...],
    decay: str = "a",
    load: Any = load_heads,
) -> Any:
    """Copies blocks of tokens to scratch: 0 where none counts, and log decays, those named `decay`, as they are summed.

    Returns which tokens count, bool [C, 1]; None: all do.
    """
    valid = begins = None
    if p.masked:
        marks = columns(jnp.broadcast_to(x["valid"][0, 0], (8, CHUNK)))[:, :1]
        valid = (marks > 0) & visit.here(0)
        begins = valid & (marks > 1)
    for name in names:
        words = scratch.get("value_words" if name in ("v", "d_out") else "key_words")
        load(x[name], scratch[name], words, valid)
    for h in range(p.keys):
        a = jnp.maximum(scratch[decay][h], FORGETS)
        scratch[decay][h] = a if begins is None else jnp.where(begins, 2 * FORGETS, a)
    return valid


def _tokens(x: dict[str, Any], scratch: dict[str, Any], visit: Visit, h: Any, reads: bool) -> Tokens:
    k, v, a = (scratch[name][h].astype(jnp.float32) for name in ("k", "v", "a"))
    q = scratch["q"][h].astype(jnp.float32) if reads else None
    beta = None
    if "beta" in x:
        beta = x["beta"][0, 0, 0, h]
        beta = columns(jnp.where(visit.here(1), beta, 0.0) if visit.p.packed else beta)[:, :1]
    return Tokens(q, k, v, a, beta, x["bonus"][pl.ds(h, 1)] if "bonus" in x else None)


def each_head(count: int, scratch: dict[str, Any], body: Any, decay: str = "a") -> None:
    """Runs a body for every head, given whether its sums of decays are narrow: a loop, as a head has many products."""

    def one(h: Any, _: None) -> None:
        if scratch["k"].dtype == jnp.float32:
            body(h, False)
            return
        sums = jnp.sum(scratch[decay][h].reshape(CHUNK // NARROW, NARROW, -1), axis=1)
        narrow = jnp.min(sums) >= -REACH
        pl.when(narrow)(lambda: body(h, True))
        pl.when(jnp.logical_not(narrow))(lambda: body(h, False))

    lax.fori_loop(0, count, one, None)


def channel_walk_kernel(table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan) -> None:
    """Walks a row forward, and writes what is in `y`: "out", "exits"; "states" before each visit, "solve", the inverses."""
    visit, state, reads, dtype = Visit(table, p, False), scratch["state"], "out" in y, scratch["k"].dtype
    delta = "beta" in x

    @pl.when(visit.begins)
    def _() -> None:
        state[...] = x["entries"][0, 0] if "entries" in x else jnp.zeros(state.shape, jnp.float32)

    def prepare(h: Any, narrow: bool) -> None:
        z = _tokens(x, scratch, visit, h, reads)
        weights, of_keys = weights_of(z.q, z.k, decays(z.a, narrow), None, True, dtype)
        scratch["pairs"][h] = of_keys * z.beta
        if reads:
            scratch["weights"][h] = weights.astype(dtype)

    def head(h: Any, narrow: bool) -> None:
        z, before = _tokens(x, scratch, visit, h, reads), state[h]
        d, inverse = decays(z.a, narrow), None
        if delta:
            inverse = scratch["solve"][h]
            weights = scratch["weights"][h].astype(jnp.float32) if reads else None
        else:
            weights = weights_of(z.q, z.k, d, z.bonus, False, dtype)[0] if reads else None
        if "states" in y:
            y["states"][0, 0, h] = before.astype(dtype)
            if delta:
                y["solve"][0, 0, h] = inverse
        out, state[h] = finish(z, before, d, weights, None, inverse, p.scale, dtype)
        if reads:
            scratch["out"][h] = out.astype(scratch["out"].dtype)

    def body() -> None:
        loaded(x, scratch, visit, p, ("q", "k", "v", "a") if reads else ("k", "v", "a"))
        if delta:
            each_head(p.keys, scratch, prepare)
            for first in range(0, p.keys, SIDE_BY_SIDE):
                some = range(first, min(first + SIDE_BY_SIDE, p.keys))
                for h, z in zip(some, inverses([scratch["pairs"][h] for h in some], dtype == jnp.float32)):
                    scratch["solve"][h] = z.astype(dtype)
        if delta or not reads:  # no pairs are taken
            lax.fori_loop(0, p.keys, lambda h, _: head(h, False), None)
        else:
            each_head(p.keys, scratch, head)
        if reads:
            store_heads(y["out"], scratch["out"], scratch["value_words"], visit.more)

    visit.run(body, [y["out"]] if reads else [])
    if "exits" in y:

        @pl.when(visit.ends)
        def _() -> None:
            y["exits"][0, 0] = state[...]


def channel_reverse_kernel(
    table: Any, x: dict[str, Any], y: dict[str, Any], scratch: dict[str, Any], *, p: Plan
) -> None:
    """Walks a row from its end with the gradient of the states, and writes all gradients."""
    visit, d_state, dtype = Visit(table, p, True), scratch["state"], scratch["k"].dtype

    @pl.when(visit.ends)
    def _() -> None:
        d_state[...] = x["d_exits"][0, 0]

    if "d_bonus" in y:

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            y["d_bonus"][0] = jnp.zeros(y["d_bonus"].shape[1:], jnp.float32)

    def body() -> None:
        valid = loaded(x, scratch, visit, p, ("q", "k", "v", "a", "d_out"))

        def head(h: Any, narrow: bool) -> None:
            z, before = _tokens(x, scratch, visit, h, True), x["states"][0, 0, h].astype(jnp.float32)
            inverse = x["solve"][0, 0, h] if "solve" in x else None
            _, pull = jax.vjp(lambda z, before: step(z, before, inverse, p.scale, dtype, narrow), z, before)
            d, d_state[h] = pull((scratch["d_out"][h].astype(jnp.float32), d_state[h]))
            da = d.a if valid is None else jnp.where(valid, d.a, 0.0)  # padding is 0 to all else
            for name, each in (("dq", d.q), ("dk", d.k), ("dv", d.v), ("da", da)):
                scratch[name][h] = each.astype(scratch[name].dtype)
            if d.bonus is not None:
                y["d_bonus"][0, pl.ds(h, 1)] += d.bonus
            if d.beta is not None:
                d_beta, ref = rows_of([d.beta])[:1], y["beta"]
                if visit.more is not None:
                    d_beta = jnp.where(visit.here(1), d_beta, 0.0)
                    d_beta = jnp.where(visit.more, ref[0, 0, 0, h] + d_beta, d_beta)
                ref[0, 0, 0, h] = d_beta

        each_head(p.keys, scratch, head)
        for name in ("dq", "dk", "da", "dv"):
            store_heads(y[name], scratch[name], scratch["value_words" if name == "dv" else "key_words"], visit.more)

    visit.run(body, [y[name] for name in y if name not in ("d_entries", "d_bonus")])

    @pl.when(visit.begins)
    def _() -> None:
        y["d_entries"][0, 0] = d_state[...]
