"""One token of a recurrence in Triton: a state is read, decays, is written by the token and read by its query, and stored.

    S' = D S,  S_t = S' + k_t u_tᵀ,  out_t = scale · S_tᵀ q_t + skip · v_t
    u_t = w_t v_t, or of a delta rule w_t (v_t - S'ᵀ k_t)

with D the decay of a head or of each channel. RWKV-7 adds b_t (Sᵀ a_t)ᵀ to S_t, where a reads before the decay. With `bonus`
the query reads S, and its own token with that weight. All there is to move is the state, so that is what the kernel is made
for: each number of it is read and written once, a program has the whole key dim of some columns in its registers and needs no
other program, and what it reads of the state, by the key and by the query, are sums of the same pass. All arithmetic is in
float32, whatever states are stored in.

The states are those of the rows, or of the slots of a pool that tokens name: those are written in place, and no other slot is
read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.one_token import Token, gradients, one_token
from kernels.engines.scan.triton_parts import load_state, store_state
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch

__all__ = ["Token", "candidates", "decode", "gradients", "heuristic", "one_token", "others", "ragged_decode", "tiles"]

# Columns of a state and warps of a program: of a float32 state of 128 rows 16 KiB, 32 registers of each thread.
COLUMNS, WARPS = 32, 4
OF_CHANNELS = (
    64  # with decays of channels, which each program loads: 76.0 us of 64 rows of 32 heads on an H200, 76.7 with 32
)
# What else may be fastest: few columns in one warp, which sums without shared memory, to whole rows of a state.
TILES = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))


@triton.jit
def decode_kernel(
    q_ptr,  # [M, KQ, H]
    k_ptr,  # [M, KK, H]
    v_ptr,  # [M, KV, Hv]
    a_ptr,  # [M, N] log decays, or [M, N, H] with CHANNELS, or None
    w_ptr,  # [M, N] weights of what is written, or None for 1
    skip_ptr,  # [N], or None for 0
    bonus_ptr,  # [N, H], or None
    read_ptr,  # [M, N, H]: what reads the state before its decay, or None
    back_ptr,  # [M, N, H]: what writes that back, or None
    ids_ptr,  # int [M]: a token with a negative one is padding; None: no token is
    slots_ptr,  # int [M]: the state of each token, which is padding where there is no such state; None: that of its row
    begun_ptr,  # bool [M]: whether a token's state is to be read, else it starts from 0; None: all are
    states_ptr,  # [SLOTS, N, H, Hv], or None for 0
    out_ptr,  # [M, N, Hv]
    after_ptr,  # [SLOTS, N, H, Hv]; None: states are written where they are
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    NORM_EPS: tl.constexpr,  # queries and keys are divided by sqrt(|x|^2 + NORM_EPS); 0: they are not
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Programs of one state follow each other: together they read whole pages of memory.
    TILED: tl.constexpr = (Hv + BLOCK_V - 1) // BLOCK_V
    tile, head = tl.program_id(0) % TILED, tl.program_id(0) // TILED
    m, n = (head // N).to(tl.int64), head % N
    h, v = tl.arange(0, BLOCK_H), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    counts, slot, begun = True, m, True
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + m).to(tl.int64)
        counts = (slot >= 0) & (slot < SLOTS)
    if ids_ptr is not None:
        counts = tl.load(ids_ptr + m) >= 0
    if begun_ptr is not None:
        begun = tl.load(begun_ptr + m) != 0
    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    if states_ptr is not None:
        # Padding of a pool has no state to read; padding of a row hands its state on.
        there = begun if slots_ptr is None else begun & counts
        state = load_state(states_ptr, slot * N + n, h, v, there, H, Hv).to(tl.float32)
    q = tl.load(q_ptr + (m * KQ + n // (N // KQ)) * H + h, mask=h < H, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + (m * KK + n // (N // KK)) * H + h, mask=h < H, other=0.0).to(tl.float32)
    x = tl.load(v_ptr + (m * KV + n // (N // KV)) * Hv + v, mask=v < Hv, other=0.0).to(tl.float32)
    if NORM_EPS > 0:
        q, k = q * tl.rsqrt(tl.sum(q * q) + NORM_EPS), k * tl.rsqrt(tl.sum(k * k) + NORM_EPS)
    faded = state
    if a_ptr is not None:
        if CHANNELS:
            faded = state * tl.exp(tl.load(a_ptr + (m * N + n) * H + h, mask=h < H, other=0.0).to(tl.float32))[:, None]
        else:
            faded = state * tl.exp(tl.load(a_ptr + m * N + n).to(tl.float32))
    u = x
    if DELTA:
        u -= tl.sum(k[:, None] * faded, 0)
    if w_ptr is not None:
        u *= tl.load(w_ptr + m * N + n).to(tl.float32)
    # The state after the token would be summed after it is known; this is summed beside what the key reads.
    if bonus_ptr is not None:
        own = tl.sum(q * k * tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0).to(tl.float32))
        out = tl.sum(q[:, None] * state, 0) + own * u
    else:
        out = tl.sum(q[:, None] * faded, 0) + tl.sum(q * k) * u
    after = faded + k[:, None] * u[None, :]
    if read_ptr is not None:
        a = tl.load(read_ptr + (m * N + n) * H + h, mask=h < H, other=0.0).to(tl.float32)
        b = tl.load(back_ptr + (m * N + n) * H + h, mask=h < H, other=0.0).to(tl.float32)
        found = tl.sum(a[:, None] * state, 0)
        out += tl.sum(q * b) * found
        after += b[:, None] * tl.expand_dims(found, 0)
    out *= SCALE
    if skip_ptr is not None:
        out += tl.load(skip_ptr + n).to(tl.float32) * x
    out_at = out_ptr + (m * N + n) * Hv + v
    tl.store(out_at, tl.where(counts, out, 0.0).to(out_ptr.dtype.element_ty), mask=v < Hv)
    if after_ptr is not None:
        store_state(after_ptr, slot * N + n, h, v, tl.where(counts, after, state), True, H, Hv)
    else:
        store_state(states_ptr, slot * N + n, h, v, after, counts, H, Hv)


def decode(
    x: Token,
    N: int,
    ids: jax.Array | None,
    entries: jax.Array | None,
    scale: float,
    cfg: ChunkConfig,
    work: Work | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [M, 1, N, Hv] in the dtype of v, the states after the token, float32 [M, 1, N, H, Hv]).

    Args:
      ids: int [M, 1]: a row with a negative one is padding, with out 0, whose state stays; or None.
      entries: [M, 1, N, H, Hv] of any float dtype, the states before the token; None: 0.
    """
    M, H, Hv = x.q.shape[0], x.q.shape[-1], x.v.shape[-1]
    after = jax.ShapeDtypeStruct((M, 1, N, H, Hv), jnp.float32)
    return _launch(x, N, (ids, None, None, entries), (M, 1, N, Hv), after, M, {}, scale, cfg, work)


def ragged_decode(
    x: Token,
    pool: jax.Array,
    slots: jax.Array,
    begun: jax.Array | None,
    scale: float,
    cfg: ChunkConfig,
    work: Work | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [M, N, Hv] in the dtype of v, the pool after the tokens, in its own memory if nobody else needs that).

    Args:
      pool: [SLOTS, N, H, Hv] of any float dtype.
      slots: int [M], the slot of each token. A token whose slot there is not is padding: its out is 0. Of two tokens with one
        slot, either may be lost, or parts of both.
      begun: bool [M]: whether the slot has a state, else the token starts from 0; None: all have.
    """
    M, (SLOTS, N), Hv = x.q.shape[0], pool.shape[:2], x.v.shape[-1]
    operands = (None, slots, begun, pool)
    last = sum(y is not None for y in (*x.arrays, *operands)) - 1
    after = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return _launch(x, N, operands, (M, N, Hv), after, SLOTS, {last: 1}, scale, cfg, work)


def _launch(
    x: Token,
    N: int,
    states: tuple[Any, ...],
    shape: tuple[int, ...],
    after: Any,
    slots: int,
    aliases: dict[int, int],
    scale: float,
    cfg: ChunkConfig,
    work: Work | None,
) -> tuple[jax.Array, jax.Array]:
    (M, H), Hv = (x.q.shape[0], x.q.shape[-1]), x.v.shape[-1]
    block_v = min(cfg.block_v or COLUMNS, power_of_two(Hv))
    in_place: dict[str, Any] = {"after_ptr": None} if aliases else {}
    # The output first: what has a buffer of its own comes before what is aliased (`triton_launch`).
    return triton_launch(
        decode_kernel,
        *x.arrays,
        *states,
        out_shape=(jax.ShapeDtypeStruct(shape, x.v.dtype), after),
        grid=(M * N * triton.cdiv(Hv, block_v),),
        num_warps=cfg.num_warps or WARPS,
        input_output_aliases=aliases,
        work=work,
        N=N,
        KQ=x.q.shape[-2],
        KK=x.k.shape[-2],
        KV=x.v.shape[-2],
        H=H,
        Hv=Hv,
        SLOTS=slots,
        SCALE=scale,
        DELTA=x.delta,
        CHANNELS=x.a is not None and x.a.ndim == x.q.ndim,
        NORM_EPS=x.norm_eps,
        BLOCK_H=power_of_two(H),
        BLOCK_V=block_v,
        **in_place,
    )


# -- tiles -------------------------------------------------------------------------------------------------------------


def tiles(chunked: ChunkConfig, block_v: int = COLUMNS) -> ChunkConfig:
    """Returns the default tiles of a call of one token, given those of chunks, which its backward has."""
    return replace(chunked, block_v=block_v, num_warps=WARPS)


def heuristic(
    chunked: Callable[[Call, str], ChunkConfig], columns: Callable[[Call], int] = lambda call: COLUMNS
) -> Callable[[Call, str], ChunkConfig]:
    """Returns the heuristic of a backend that runs one token by `decode` and the others in chunks, given that of these.

    Args:
      columns: of a program of a call of one token.
    """

    def of_call(call: Call, platform: str) -> ChunkConfig:
        best = chunked(call, platform)
        return tiles(best, columns(call)) if one_token(call.dims["T"], call.num_states) else best

    return of_call


def candidates(
    chunked: Callable[[Call], list[ChunkConfig]], best: Callable[[Call, str], ChunkConfig]
) -> Callable[[Call], list[ChunkConfig]]:
    """Returns the candidates of such a backend, given those of chunks and its heuristic."""

    def of_call(call: Call) -> list[ChunkConfig]:
        return others(best(call, "cuda")) if one_token(call.dims["T"], call.num_states) else chunked(call)

    return of_call


def others(best: ChunkConfig) -> list[ChunkConfig]:
    """Returns the configurations to tune a call of one token over, the default first."""
    tiled = (replace(best, block_v=block_v, num_warps=num_warps) for block_v, num_warps in TILES)
    return list(dict.fromkeys([best, *tiled]))
