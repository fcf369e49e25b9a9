"""One token of a recurrence on TPUs: a state is read, decays, is written by the token and read by its query, and stored.

    S' = diag(d) S,  S_t = S' + k_t u_tᵀ,  out_t = S_tᵀ q_t        u_t = w_t v_t, or of a delta rule w_t (v_t - S'ᵀ k_t)

RWKV-7 adds b_t (Sᵀ a_t)ᵀ to S_t, where a reads before the decay.
The states are all that there is to move. A program has those of one row, or of the slot of a pool that its token names, and
each number is read and written once, in whatever dtype it is stored; arithmetic is in float32. XLA makes what a token itself
has: decays exp(a), normalised keys, heads that share a key, and what an output has of its own token beside the state.

Slots are read and written where they are: the pool is an input and, by an alias, the last output. Padding has no slot. It takes
that of the token before it, whose block is then neither read nor stored again, or of the first token, which it leaves as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.scan.one_token import Token
from kernels.framework.work import Work
from kernels.toolchains.pallas import pallas_launch

LANES, SUBLANES = 128, 8
VMEM_BYTES = 48 * 2**20
OF_KEYS = ("q", "k", "d", "read", "back")  # what is as wide as keys are
# What a program does with its state: a token changes it; padding stores it as it is, or leaves what is there.
COUNTS, HANDS_ON, LEAVES = 0, 1, 2


class Plan(NamedTuple):
    """The compile-time constants of a launch.

    Attributes:
      N, H: heads, and rows of a state.
      delta: whether a token replaces what the state has for its key.
      before: whether a query reads the state before its token, and before its decay.
    """

    N: int
    H: int
    delta: bool
    before: bool


def decode_kernel(slots: Any, actions: Any, begun: Any, x: dict[str, Any], y: dict[str, Any], *, p: Plan) -> None:
    """Computes a token of all heads; "q", "k", "d", "v" and "w" are in `x`, and for RWKV-7 "read" and "back", each [1, heads,
    width] in float32.

    Args:
      slots: where blocks of states are. actions: what a program does. begun: whether it has a state; else it starts from 0.
    """
    m = pl.program_id(0)

    def heads(first: Any, count: int) -> None:
        """Computes heads from `first` on, whose rows fill sublanes: their columns are one transpose."""
        rows = {name: ref[0, pl.ds(first, SUBLANES), :] for name, ref in x.items() if name != "states"}
        columns = {name: jnp.transpose(rows[name])[: p.H] for name in OF_KEYS if name in rows}
        q, k, d = (columns[name] for name in ("q", "k", "d"))
        outs = []
        for j in range(count):
            state = jnp.zeros((p.H, rows["v"].shape[1]), jnp.float32)
            if "states" in x:
                state = x["states"][0, first + j].astype(jnp.float32)
                state = jnp.where(begun[m] > 0, state, 0.0)
            key, faded = k[:, j : j + 1], d[:, j : j + 1] * state
            u = rows["v"][j : j + 1]
            if p.delta:
                u = u - jnp.sum(key * faded, axis=0, keepdims=True)
            after = faded + key * (rows["w"][j : j + 1] * u)
            if "read" in columns:
                found = jnp.sum(columns["read"][:, j : j + 1] * state, axis=0, keepdims=True)
                after += columns["back"][:, j : j + 1] * found
            y["states"][0, first + j] = after.astype(y["states"].dtype)
            outs.append(jnp.sum(q[:, j : j + 1] * (state if p.before else after), axis=0, keepdims=True))
        outs += [jnp.zeros_like(outs[0])] * (SUBLANES - count)
        y["out"][0, pl.ds(first, SUBLANES), :] = jnp.concatenate(outs)

    @pl.when(actions[m] == COUNTS)
    def _() -> None:
        whole = p.N // SUBLANES
        if whole:
            lax.fori_loop(0, whole, lambda g, _: heads(pl.multiple_of(g * SUBLANES, SUBLANES), SUBLANES), None)
        if p.N % SUBLANES:
            heads(whole * SUBLANES, p.N % SUBLANES)

    @pl.when(actions[m] != COUNTS)
    def _() -> None:
        y["out"][...] = jnp.zeros(y["out"].shape, jnp.float32)

    @pl.when(actions[m] == HANDS_ON)
    def _() -> None:
        kept = x["states"][...] if "states" in x else jnp.zeros(y["states"].shape, jnp.float32)
        y["states"][...] = kept.astype(y["states"].dtype)


def _prepared(x: Token, N: int) -> dict[str, jax.Array]:
    """Returns what a kernel reads of a token, by name, float32 [M, N, width]."""
    M, H, Hv = x.q.shape[0], x.q.shape[-1], x.v.shape[-1]

    def wide(y: jax.Array, width: int) -> jax.Array:
        y = y.astype(jnp.float32).reshape(M, -1, width)
        return jnp.repeat(y, N // y.shape[1], axis=1)

    q, k, v = wide(x.q, H), wide(x.k, H), wide(x.v, Hv)
    if x.norm_eps:
        q, k = (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + x.norm_eps) for y in (q, k))
    a = jnp.zeros((M, N, 1)) if x.a is None else x.a.astype(jnp.float32).reshape(M, N, -1)
    w = jnp.ones((M, N, 1)) if x.w is None else x.w.astype(jnp.float32).reshape(M, N, 1)
    found = {"q": q, "k": k, "d": jnp.broadcast_to(jnp.exp(a), q.shape), "v": v, "w": jnp.broadcast_to(w, v.shape)}
    return found | {name: wide(y, H) for name, y in (("read", x.read), ("back", x.back)) if y is not None}


def _launch(
    x: Token,
    N: int,
    scalars: tuple[jax.Array, jax.Array, jax.Array],
    states: jax.Array | None,
    after: jax.ShapeDtypeStruct,
    scale: float,
    in_place: bool,
    work: Work | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out float32 [M, N, Hv], the states after the tokens)."""
    M, H, Hv = x.q.shape[0], x.q.shape[-1], x.v.shape[-1]
    token = _prepared(x, N)
    rows = -N % SUBLANES

    def padded(name: str, y: jax.Array) -> jax.Array:
        return jnp.pad(y, ((0, 0), (0, rows), (0, -H % LANES if name in OF_KEYS else 0)))

    inputs = {name: padded(name, y) for name, y in token.items()}
    inputs |= {} if states is None else {"states": states}
    out = jax.ShapeDtypeStruct((M, N + rows, Hv), jnp.float32)
    outputs = {"out": out, "states": after}

    def spec(name: str, y: Any) -> pl.BlockSpec:
        if name == "states":
            return pl.BlockSpec((1, N, H, Hv), lambda m, slots, *_: (slots[m], 0, 0, 0))
        return pl.BlockSpec((1, *y.shape[1:]), lambda m, *_: (m, 0, 0))

    plan = Plan(N, H, x.delta, x.bonus is not None)

    def run(*refs: Any) -> None:
        of_inputs, of_outputs = refs[3 : 3 + len(inputs)], refs[3 + len(inputs) :]
        named = (dict(zip(n, r, strict=True)) for n, r in ((inputs, of_inputs), (outputs, of_outputs)))
        decode_kernel(*refs[:3], *named, p=plan)

    read, exits = pallas_launch(
        run,
        *scalars,
        *inputs.values(),
        out_shape=tuple(outputs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(M,),
            in_specs=[spec(name, y) for name, y in inputs.items()],
            out_specs=tuple(spec(name, y) for name, y in outputs.items()),
        ),
        dimension_semantics=("arbitrary",) if in_place else ("parallel",),
        vmem_limit_bytes=VMEM_BYTES,
        input_output_aliases={2 + len(inputs): 1} if in_place else None,
        work=work,
        name="decode_kernel",
    )
    read = read[:, :N]
    if x.bonus is not None:
        bonus_term = jnp.sum(token["q"] * token["k"] * x.bonus.astype(jnp.float32), axis=-1, keepdims=True)
        read = read + bonus_term * token["w"] * token["v"]
    read = scale * read
    return (read if x.skip is None else read + x.skip.astype(jnp.float32)[:, None] * token["v"]), exits


def decode(
    x: Token, N: int, ids: jax.Array | None, entries: jax.Array | None, scale: float, work: Work | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [M, 1, N, Hv] in the dtype of v, the states after the token, float32 [M, 1, N, H, Hv]).

    Args:
      ids: int [M, 1]: a row with a negative one is padding, with out 0, whose state stays; or None.
      entries: [M, 1, N, H, Hv] of any float dtype, the states before the token; None: 0.
    """
    M, H, Hv = x.q.shape[0], x.q.shape[-1], x.v.shape[-1]
    counts = jnp.ones(M, bool) if ids is None else ids[:, 0] >= 0
    scalars = (
        jnp.arange(M, dtype=jnp.int32),
        jnp.where(counts, COUNTS, HANDS_ON).astype(jnp.int32),
        jnp.ones(M, jnp.int32),
    )
    after = jax.ShapeDtypeStruct((M, N, H, Hv), jnp.float32)
    out, exits = _launch(x, N, scalars, None if entries is None else entries[:, 0], after, scale, False, work)
    out = jnp.where(counts[:, None, None], out, 0)
    return out[:, None].astype(x.v.dtype), exits[:, None]


def ragged_decode(
    x: Token, pool: jax.Array, slots: jax.Array, begun: jax.Array | None, scale: float, work: Work | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [M, N, Hv] in the dtype of v, the pool after the tokens, in its own memory if nobody else needs that).

    Args:
      pool: [SLOTS, N, H, Hv] of any float dtype.
      slots: int [M], the slot of each token, all of which differ. A token whose slot there is not is padding: its out is 0.
      begun: bool [M]: whether the slot has a state, else the token starts from 0; None: all have.
    """
    M, N = x.q.shape[0], pool.shape[1]
    counts = (slots >= 0) & (slots < pool.shape[0])
    # Of each program the last token until it that counts, or for padding before all of these the first.
    last = lax.cummax(jnp.where(counts, jnp.arange(M, dtype=jnp.int32), -1))
    owner = jnp.where(last < 0, jnp.argmax(counts).astype(jnp.int32), last)
    places = jnp.where(jnp.any(counts), slots[owner], 0).astype(jnp.int32)
    actions = jnp.where(counts, COUNTS, jnp.where(last < 0, HANDS_ON, LEAVES)).astype(jnp.int32)
    begun = jnp.ones(M, jnp.int32) if begun is None else begun.astype(jnp.int32)
    after = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    out, pool = _launch(x, N, (places, actions, begun), pool, after, scale, True, work)
    return jnp.where(counts[:, None, None], out, 0).astype(x.v.dtype), pool


def refused(dims: Mapping[str, int]) -> str | None:
    """Returns why the kernel cannot run a token of these sizes, or None."""
    if 0 in dims.values():
        return "an array has no elements"
    lanes = -(-dims["Hv"] // LANES) * LANES
    needed = 4 * 4 * dims["N"] * -(-dims["H"] // SUBLANES) * SUBLANES * lanes  # in float32, in and out, twice each
    if needed > VMEM_BYTES * 3 // 4:
        return f"{dims['N']} states of {dims['H']} by {dims['Hv']} take {needed >> 20} MiB of VMEM"
    return None
