"""Launches of the kernels of a diagonal recurrence, and their tiles: chunks of rows, channels of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from kernels.engines.scan.chunks import DiagonalConfig
from kernels.engines.scan.layout import Layout, layout
from kernels.engines.scan.recurrence import resets
from kernels.engines.scan.triton_diagonal import diagonal_fwd_kernel, diagonal_join_kernel
from kernels.engines.scan.triton_diagonal_back import diagonal_bwd_kernel, diagonal_sums_kernel
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch

AHEAD, JOINED_CHANNELS = 8, 128  # of a program that joins chunks: those it loads at once, and its channels
WARPS_WANTED = 24  # of each multiprocessor, before rows are split further


class Tile(NamedTuple):
    """What one program has: channels, tokens of its chunk, tokens that it loads at once, warps."""

    block_f: int
    size: int
    tokens: int
    num_warps: int


def forward_tile(cfg: DiagonalConfig, T: int, num_states: int) -> Tile:
    """Returns the tile of the forward; a row of T tokens has at least `cfg.splits` chunks, if it has several at all."""
    size = power_of_two(-(-T // max(cfg.splits or 1, num_states)))
    return Tile(cfg.block_v or 64, size, min(cfg.tokens or 8, size), cfg.num_warps or 1)


def backward_tile(cfg: DiagonalConfig, T: int, num_states: int) -> Tile:
    """Returns the tile of the backward."""
    size = min(cfg.chunk or 64, power_of_two(-(-T // num_states)))
    return Tile(cfg.backward_block_v or 64, size, min(cfg.backward_tokens or 8, size), cfg.backward_num_warps or 1)


class Row(NamedTuple):
    """Rows cut into chunks of `size` tokens.

    Attributes:
      codes: int32 [B, T], 0, or 1 where a document begins, or -1 for padding; None: all are 0.
      resets: bool [B, CHUNKS]: whether a document begins in a chunk; None: in none.
    """

    chunks: Layout
    codes: jax.Array | None
    resets: jax.Array | None


def rows_of(B: int, T: int, size: int, segment_ids: jax.Array | None, num_states: int) -> Row:
    """Returns the chunks of rows [B, T]."""
    cut = layout(B, T, size, segment_ids, num_states)
    if segment_ids is None:
        return Row(cut, None, None)
    if cut.valid is not None and num_states > 1:
        return Row(cut, jnp.where(cut.valid, 0, -1), None)
    new = resets(segment_ids)
    padded = jnp.pad(new, ((0, 0), (0, cut.chunks * size - T)))
    codes = jnp.where(segment_ids < 0, -1, new.astype(jnp.int32))
    return Row(cut, codes, padded.reshape(B, cut.chunks, size).any(axis=2))


def entries_of_chunks(states: jax.Array, row: Row, num_states: int, untouched: jax.Array | None) -> jax.Array:
    """Returns [B, G, ...] of an array [B, CHUNKS, ...]: that of the chunk with which each sequence begins.

    Args:
      untouched: [B, G, ...], what a sequence without tokens has.
    """
    table = row.chunks.table
    if table is None:
        return states[:, :1]
    B, chunks = table.shape[:2]
    begins = jnp.where(table[..., 3] % 2 == 1, table[..., 2], num_states)
    index = jnp.broadcast_to(jnp.arange(chunks, dtype=jnp.int32), (B, chunks))
    where = jnp.zeros((B, num_states), jnp.int32).at[jnp.arange(B)[:, None], begins].set(index, mode="drop")
    taken = jnp.take_along_axis(states, where.reshape(B, num_states, *(1,) * (states.ndim - 2)), axis=1)
    return row.chunks.exits(taken, untouched)


class Scan(NamedTuple):
    """The arguments of a diagonal recurrence: x, dt [B, T, F], A [F, H], B, C [B, T, H], skip [F] or None, and those of the
    contract of every recurrence; the states are [B, G, F, H], any float dtype."""

    x: jax.Array
    dt: jax.Array
    A: jax.Array
    B: jax.Array
    C: jax.Array
    skip: jax.Array | None
    segment_ids: jax.Array | None
    initial_state: jax.Array | None
    num_states: int

    @property
    def pairs(self) -> jax.Array:
        """B and C as neighbours, float32 [B, T, H, 2]."""
        return jnp.stack([self.B.astype(jnp.float32), self.C.astype(jnp.float32)], axis=-1)

    @property
    def entries(self) -> jax.Array | None:
        return None if self.initial_state is None else self.initial_state.astype(jnp.float32)


def _sizes(s: Scan, row: Row, tile: Tile, walked: int | None = None) -> dict[str, Any]:
    """Returns the constants of a launch over the chunks of rows, and its grid.

    Raises:
      ValueError: a program has fewer tokens than it loads at once.
    """
    (B, T, F), H, chunks = s.x.shape, s.A.shape[1], row.chunks.chunks
    programs = B * (chunks if walked is None else walked) * triton.cdiv(F, tile.block_f)
    sizes = {
        "T": T,
        "F": F,
        "H": H,
        "CHUNKS": chunks,
        "SIZE": tile.size,
        "TOKENS": tile.tokens,
        "BLOCK_F": tile.block_f,
    }
    return sizes | {"grid": (programs,), "num_warps": tile.num_warps, "num_stages": 1}


def _joined(s: Scan, row: Row, sums: Any, steps: Any, entries: Any, reverse: bool) -> jax.Array:
    """Returns what enters each chunk, float32 [B, CHUNKS, H, F]; in reverse, the gradient of what leaves it."""
    (B, _, F), H, chunks = s.x.shape, s.A.shape[1], row.chunks.chunks
    (starts,) = triton_launch(
        diagonal_join_kernel,
        s.A,
        sums,
        steps,
        row.resets,
        row.chunks.table,
        entries,
        out_shape=(jax.ShapeDtypeStruct((B, chunks, H, F), jnp.float32),),
        grid=(B * H * triton.cdiv(F, JOINED_CHANNELS),),
        num_warps=4,
        num_stages=1,
        F=F,
        H=H,
        G=s.num_states,
        CHUNKS=chunks,
        REVERSE=reverse,
        AHEAD=min(AHEAD, power_of_two(chunks)),
        BLOCK_F=JOINED_CHANNELS,
    )
    return starts


def forward(s: Scan, cfg: DiagonalConfig, work: Work) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, F] in the dtype of x, final states [B, G, F, H] float32)."""
    (B, T, F), H, G = s.x.shape, s.A.shape[1], s.num_states
    tile = forward_tile(cfg, T, G)
    row = rows_of(B, T, tile.size, s.segment_ids, G)
    pairs, entries, chunks = s.pairs, s.entries, row.chunks.chunks
    starts, joined = entries, chunks > 1
    arrays = (s.x, s.dt, s.A, pairs)
    if joined:
        sums, steps = triton_launch(
            diagonal_fwd_kernel,
            *arrays,
            None,
            row.codes,
            row.chunks.table,
            None,
            out_shape=(
                jax.ShapeDtypeStruct((B, chunks, H, F), jnp.float32),
                jax.ShapeDtypeStruct((B, chunks, F), jnp.float32),
            ),
            out_ptr=None,
            finals_ptr=None,
            G=G,
            WALKED=chunks - 1,  # nothing needs the sum of the last
            JOINED=False,
            **_sizes(s, row, tile, chunks - 1),
        )
        starts = _joined(s, row, sums, steps, entries, False)
    out, finals = triton_launch(
        diagonal_fwd_kernel,
        *arrays,
        s.skip,
        row.codes,
        row.chunks.table,
        starts,
        out_shape=(jax.ShapeDtypeStruct(s.x.shape, s.x.dtype), jax.ShapeDtypeStruct((B, G, F, H), jnp.float32)),
        sums_ptr=None,
        steps_ptr=None,
        work=work,
        G=G,
        WALKED=chunks,
        JOINED=joined,
        **_sizes(s, row, tile),
    )
    return out, row.chunks.exits(finals, entries)


def backward(s: Scan, d_out: jax.Array, d_finals: jax.Array, cfg: DiagonalConfig, work: Work) -> dict[str, jax.Array]:
    """Returns the gradients, by the names of `Scan`, those of B and C float32 and that of A [F, H] float32."""
    (B, T, F), H, G = s.x.shape, s.A.shape[1], s.num_states
    tile = backward_tile(cfg, T, G)
    row = rows_of(B, T, tile.size, s.segment_ids, G)
    pairs, entries, chunks, d_ends = s.pairs, s.entries, row.chunks.chunks, d_finals.astype(jnp.float32)
    starts, joined, sizes = entries, chunks > 1, _sizes(s, row, tile)
    state, columns = jax.ShapeDtypeStruct((B, chunks, H, F), jnp.float32), triton.cdiv(F, tile.block_f)
    if joined:
        sums, d_sums, steps = triton_launch(
            diagonal_sums_kernel,
            s.x,
            s.dt,
            s.A,
            pairs,
            row.codes,
            row.chunks.table,
            d_out,
            out_shape=(state, state, jax.ShapeDtypeStruct((B, chunks, F), jnp.float32)),
            **sizes | {"TOKENS": min(4, tile.tokens)},
        )
        starts = _joined(s, row, sums, steps, entries, False)
        d_ends = _joined(s, row, d_sums, steps, d_ends, True)
    shapes = {
        "dx_ptr": jax.ShapeDtypeStruct(s.x.shape, s.x.dtype),
        "d_dt_ptr": jax.ShapeDtypeStruct(s.dt.shape, s.dt.dtype),
        "d_bc_ptr": jax.ShapeDtypeStruct((B, columns, H, 2, T), jnp.float32),
        "d_a_ptr": state,
        "d_starts_ptr": state,
        "inner_ptr": jax.ShapeDtypeStruct((B, chunks, tile.size // tile.tokens, H, F), jnp.float32),
    }
    unused: dict[str, Any] = {} if s.skip is not None else {"d_skip_ptr": None}
    if s.skip is not None:
        shapes["d_skip_ptr"] = jax.ShapeDtypeStruct((B, chunks, F), jnp.float32)
    results = triton_launch(
        diagonal_bwd_kernel,
        s.x,
        s.dt,
        s.A,
        pairs,
        s.skip,
        row.codes,
        row.chunks.table,
        starts,
        d_out,
        d_ends,
        out_shape=tuple(shapes.values()),
        work=work,
        G=G,
        JOINED=joined,
        **sizes,
        **unused,
    )
    d = dict(zip(shapes, results, strict=True))
    # Summed in a fixed order, not by atomics: the same call gives the same bits.
    of_pairs = jnp.sum(d["d_bc_ptr"], axis=1)
    gradients = {"x": d["dx_ptr"], "dt": d["d_dt_ptr"], "A": jnp.sum(d["d_a_ptr"], axis=(0, 1)).T}
    gradients |= {name: jnp.swapaxes(of_pairs[:, :, i], 1, 2) for i, name in enumerate("BC")}
    gradients |= {} if s.skip is None else {"skip": jnp.sum(d["d_skip_ptr"], axis=(0, 1))}
    if entries is not None:
        d_starts = jnp.swapaxes(d["d_starts_ptr"], 2, 3)
        gradients["initial_state"] = entries_of_chunks(d_starts, row, G, d_finals.astype(jnp.float32))
    return gradients


# -- tiles -------------------------------------------------------------------------------------------------------------

MOST_NUMBERS = 32  # of a thread: states, their decays and their gradients lie in its registers
# Channels of a program of one warp, and tokens that it loads at once; the first was the best one on an H200.
FORWARD = ((64, 4), (64, 8), (64, 16), (32, 4), (128, 4))
BACKWARD = ((64, 8, 64), (32, 8, 64), (32, 16, 64), (64, 4, 64), (32, 8, 32))  # and tokens of a chunk


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if 0 in call.dims.values():
        return "an array has no elements"
    if call.dims["H"] > MOST_NUMBERS:
        return (
            f"H = {call.dims['H']} exceeds {MOST_NUMBERS}: the numbers of a channel must fit the registers of a thread"
        )
    return None


def heuristic(call: Call, platform: str) -> DiagonalConfig:
    """Returns the default tiles of a call."""
    return candidates(call)[0]


def _fits(block: int, H: int) -> bool:
    """Returns whether a thread can have the channels of a program of one warp."""
    return triton.cdiv(block, 32) * H <= MOST_NUMBERS


def candidates(call: Call) -> list[DiagonalConfig]:
    """Returns the configurations to tune over, what is likely fastest first."""
    B, T, F, H = (call.dims[d] for d in "BTFH")
    widest = max(32, power_of_two(F))
    forwards = [tile for tile in FORWARD if tile[0] <= widest and _fits(tile[0], H)]
    backwards = [tile for tile in BACKWARD if tile[0] <= widest and _fits(tile[0], H)]
    made = []
    for times in (1, 2, 4):
        for i in range(max(len(forwards), len(backwards))):
            (block, tokens), (back, loaded, chunk) = forwards[i % len(forwards)], backwards[i % len(backwards)]
            warps = B * triton.cdiv(F, block)
            splits = min(power_of_two(triton.cdiv(MULTIPROCESSORS * WARPS_WANTED * times, warps)), triton.cdiv(T, 64))
            made.append(
                DiagonalConfig(
                    chunk * times,
                    None,
                    block,
                    1,
                    None,
                    splits,
                    None,
                    1,
                    tokens=tokens,
                    backward_block_v=back,
                    backward_tokens=loaded,
                )
            )
    return list(dict.fromkeys(made))
