"""Pallas kernels of recurrences in which each channel of a key decays by its own factor, with or without a delta rule, on TPUs.

    S' = diag(exp a_t) S_{t-1},  S_t = S' + k_t w_tᵀ,  out_t = scale · S_tᵀ q_t

with w_t = v_t, or for a delta rule β_t (v_t - S'ᵀ k_t). A program walks the visits of a row (`pallas_visits`) with the states
of its heads in VMEM. What one chunk of a head computes is a function of arrays, `step`; the reverse walk is its derivative.

The weight of a pair is Σ q_t k_s exp(a_{s+1} + ... + a_t) over channels. Chunks are halved again and again (*levels*): of
blocks of 2 h tokens, t is in the second half and s in the first, and both are referred to the middle. The sums from there to t
and from s to there have only their own terms, so they are exact for any decays, and neither exponential is above 1.

In bfloat16 the four levels of 16 tokens are one product where no channel's sum over 16 tokens is wider than REACH: both tokens
are referred to the middle of that sum, so that neither exponential is above exp(REACH / 2). Each chunk of a head decides by its
data.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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

NN = ((1,), (0,))
REACH = 140.0  # the widest sum of log decays whose middle is taken: exp(70) is far from the largest number
NARROW = 16  # tokens of such a sum
RESET = 2.0  # of a valid token that begins a document; 1.0 of others

# -- a chunk of a head ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(x: jax.Array, y: jax.Array, over: Any, dtype: Any) -> jax.Array:
    """Returns the product of float32 matrices over a dim of each, of operands in `dtype`; so are those of its gradients."""
    return product(x.astype(dtype), y.astype(dtype), over)


def _dot_fwd(x: jax.Array, y: jax.Array, over: Any, dtype: Any) -> Any:
    x, y = x.astype(dtype), y.astype(dtype)
    return product(x, y, over), (x, y)


def _dot_bwd(over: Any, dtype: Any, saved: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, y), ((i,), (j,)), d = saved, over, d.astype(dtype)
    dx = product(d, y, ((1,), (1 - j,))) if i else product(y, d, ((1 - j,), (1,)))
    return dx, product(d, x, ((0,), (1 - i,))) if j else product(x, d, ((1 - i,), (0,)))


dot.defvjp(_dot_fwd, _dot_bwd)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def swapped(x: jax.Array, size: int) -> jax.Array:
    """Returns x with every two neighbouring blocks of `size` rows in each other's place, which is its own derivative."""
    if size >= 8:
        return jnp.concatenate([x[(i ^ 1) * size : ((i ^ 1) + 1) * size] for i in range(x.shape[0] // size)])
    late = lax.broadcasted_iota(jnp.int32, x.shape, 0) & size > 0
    return jnp.where(late, pltpu.roll(x, size, 0), pltpu.roll(x, x.shape[0] - size, 0))


swapped.defvjp(lambda x, size: (swapped(x, size), None), lambda size, _, d: (swapped(d, size),))


class Step(NamedTuple):
    """Pairs that are taken at once.

    Attributes:
      reads, writes: decays [C, H] from a point between two tokens to the later one, and from the earlier one there.
      before: as `reads`, of what is read before the later token's own decay.
      middle: whether the pairs are those of blocks of NARROW tokens; else those of a level of `half` tokens.
    """

    reads: jax.Array
    before: jax.Array
    writes: jax.Array
    half: int
    middle: bool


class Decays(NamedTuple):
    """What decays leave.

    Attributes:
      steps: all pairs of two tokens.
      enters: [C, H], from the start of the chunk until a token is read; before: without the token's own decay.
      leaves: from a token to the end.
      whole: [C, H], over the chunk, in every row.
    """

    steps: list[Step]
    enters: jax.Array
    before: jax.Array
    leaves: jax.Array
    whole: jax.Array


def decays(a: jax.Array, narrow: bool) -> Decays:
    """Returns what log decays leave.

    Args:
      narrow: whether no sum of NARROW tokens exceeds REACH.
    """
    row = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    # The first token of a document, which alone has less than FORGETS, reads nothing from before it either way.
    before, until, after, total = jnp.where(a < FORGETS, FORGETS, 0.0), a, jnp.zeros_like(a), a
    steps, half = [], 1
    while half < a.shape[0]:
        late = row & half > 0
        if narrow and half == NARROW:
            middle = 0.5 * total
            reads = jnp.exp(until - middle), jnp.exp(before - middle)
            steps.append(Step(*reads, jnp.exp(middle - until), half, True))
        if not narrow or half >= NARROW:
            writes = jnp.exp(jnp.where(late, until, after))
            steps.append(Step(writes, jnp.exp(before), writes, half, False))
        other = swapped(total, half)
        earlier = jnp.where(late, other, 0.0)
        until, after, total = until + earlier, after + (other - earlier), total + other
        before = before + earlier
        half *= 2
    return Decays(steps, jnp.exp(until), jnp.exp(before), jnp.exp(after), jnp.exp(total))


def pairs(readers: jax.Array, k: jax.Array, d: Decays, before: bool, dtype: Any) -> jax.Array:
    """Returns the weights [n C, C] of pairs of n readers [n C, H] of each token and an earlier key.

    Args:
      before: whether a token is read before its own decay.
    """
    count, total = readers.shape[0] // CHUNK, jnp.zeros((readers.shape[0], CHUNK), jnp.float32)
    t, s = (lax.broadcasted_iota(jnp.int32, total.shape, axis) for axis in (0, 1))
    t = lax.rem(t, CHUNK)
    for z in d.steps:
        apart = lax.div(t ^ s, z.half)  # 0 in one block of `half` tokens, 1 in neighbours that make a block
        here = (t > s) & (apart == (0 if z.middle else 1))
        reads = z.before if before else z.reads
        x = readers * (jnp.concatenate([reads] * count) if count > 1 else reads)
        total = total + jnp.where(here, dot(x, k * z.writes, NT, dtype), 0.0)  # others may overflow
    return total


def _diagonal(x: jax.Array) -> jax.Array:
    """Returns the matrix [C, C] with the sums of x [C, H] over channels on its diagonal."""
    t, s = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return jnp.where(t == s, jnp.sum(x, axis=1, keepdims=True), 0.0)


def weights_of(
    q: jax.Array | None, k: jax.Array, d: Decays, bonus: jax.Array | None, delta: bool, dtype: Any
) -> tuple[Any, Any]:
    """Returns the weights of what outputs read of writes, and of what a delta rule's keys do, [C, C]; None without them."""
    readers = [x for x in (q, k if delta else None) if x is not None]
    both = pairs(jnp.concatenate(readers) if len(readers) > 1 else readers[0], k, d, bonus is not None, dtype)
    of_keys = both[-CHUNK:] if delta else None
    if q is None:
        return None, of_keys
    own = q * k if bonus is None else q * k * bonus
    return both[:CHUNK] + _diagonal(own), of_keys


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
    x: dict[str, Any], scratch: dict[str, Any], visit: Visit, p: Plan, names: tuple[str, ...], decay: str = "a"
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
        load_heads(x[name], scratch[name], scratch["value_words" if name in ("v", "d_out") else "key_words"], valid)
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
