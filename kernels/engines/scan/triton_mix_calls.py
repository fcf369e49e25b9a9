"""Launches of the kernels of RWKV-4's time mix, and their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from kernels.engines.scan.chunks import DiagonalConfig
from kernels.engines.scan.triton_diagonal_calls import (
    AHEAD,
    JOINED_CHANNELS,
    Row,
    Tile,
    backward_tile,
    entries_of_chunks,
    forward_tile,
    rows_of,
)
from kernels.engines.scan.triton_mix import mix_fwd_kernel, mix_join_kernel
from kernels.engines.scan.triton_mix_back import mix_bwd_kernel, mix_sums_kernel
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch

# Of each multiprocessor, before rows are split, of the forward and of the backward, whose chunks cost one pass more: with 4.8
# warps rows in 2 parts took 403 and 1,308 us on an H200, and whole ones 436 and 1,080.
WARPS_WANTED = (6, 4)


class Mix(NamedTuple):
    """The arguments of RWKV-4's time mix: w, u [F], k, v [B, T, F], and those of the contract of every recurrence."""

    w: jax.Array
    u: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None
    initial_state: jax.Array | None
    num_states: int

    @property
    def entries(self) -> jax.Array | None:
        return None if self.initial_state is None else self.initial_state.astype(jnp.float32)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.w, self.u, self.k, self.v


def _sizes(s: Mix, row: Row, tile: Tile) -> dict[str, Any]:
    """Returns the constants of a launch over the chunks of rows, and its grid."""
    (B, T, F), chunks = s.k.shape, row.chunks.chunks
    sizes = {"T": T, "F": F, "CHUNKS": chunks, "SIZE": tile.size, "TOKENS": tile.tokens, "BLOCK_F": tile.block_f}
    grid = (B * chunks * triton.cdiv(F, tile.block_f),)
    return sizes | {"grid": grid, "num_warps": tile.num_warps, "num_stages": 1}


def _lengths(s: Mix, row: Row, size: int) -> jax.Array:
    """Returns float32 [B, CHUNKS]: how many tokens fade what passes a chunk, or -1 if a document begins in it."""
    (B, T, _), chunks = s.k.shape, row.chunks.chunks
    if (
        row.chunks.table is not None and row.chunks.valid is not None
    ):  # padding may be before, within and after the tokens of a chunk
        before = jnp.pad(jnp.cumsum(row.chunks.valid, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        first, count = row.chunks.table[..., 0], row.chunks.table[..., 1]
        ends = jnp.take_along_axis(before, first + count, axis=1)
        return (ends - jnp.take_along_axis(before, first, axis=1)).astype(jnp.float32)
    valid = jnp.ones((B, T), bool) if row.codes is None else row.codes >= 0
    valid = jnp.pad(valid, ((0, 0), (0, chunks * size - T))).reshape(B, chunks, size)
    lengths = jnp.sum(valid, axis=2, dtype=jnp.float32)
    return lengths if row.resets is None else jnp.where(row.resets, -1.0, lengths)


def _joined(s: Mix, row: Row, sums: Any, lengths: Any, entries: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (what enters each chunk, float32 [B, CHUNKS, PARTS, F], what leaves the sequences, [B, G, PARTS, F])."""
    (B, chunks, parts, F), G = sums.shape, s.num_states
    return triton_launch(
        mix_join_kernel,
        s.w,
        sums,
        lengths,
        row.chunks.table,
        entries,
        out_shape=(
            jax.ShapeDtypeStruct(sums.shape, jnp.float32),
            jax.ShapeDtypeStruct((B, G, parts, F), jnp.float32),
        ),
        grid=(B * triton.cdiv(F, JOINED_CHANNELS),),
        num_warps=4,
        num_stages=1,
        F=F,
        G=G,
        CHUNKS=chunks,
        PARTS=parts,
        AHEAD=min(AHEAD, power_of_two(chunks)),
        BLOCK_F=JOINED_CHANNELS,
    )


def _sums(s: Mix, row: Row, sizes: dict[str, Any]) -> jax.Array:
    """Returns the sums of each chunk alone, float32 [B, CHUNKS, 3, F]."""
    (B, _, F), chunks = s.k.shape, row.chunks.chunks
    (sums,) = triton_launch(
        mix_fwd_kernel,
        *s.arrays,
        row.codes,
        row.chunks.table,
        None,
        out_shape=(jax.ShapeDtypeStruct((B, chunks, 3, F), jnp.float32),),
        out_ptr=None,
        finals_ptr=None,
        G=s.num_states,
        JOINED=False,
        **sizes,
    )
    return sums


def forward(s: Mix, cfg: DiagonalConfig, work: Work) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, F] in the dtype of k, final states [B, G, 3, F] float32)."""
    (B, T, F), G = s.k.shape, s.num_states
    tile = forward_tile(cfg, T, G)
    row = rows_of(B, T, tile.size, s.segment_ids, G)
    sizes, starts, joined = _sizes(s, row, tile), s.entries, row.chunks.chunks > 1
    if joined:
        starts, _ = _joined(s, row, _sums(s, row, sizes), _lengths(s, row, tile.size), s.entries)
    out, finals = triton_launch(
        mix_fwd_kernel,
        *s.arrays,
        row.codes,
        row.chunks.table,
        starts,
        out_shape=(jax.ShapeDtypeStruct(s.k.shape, s.k.dtype), jax.ShapeDtypeStruct((B, G, 3, F), jnp.float32)),
        sums_ptr=None,
        work=work,
        G=G,
        JOINED=joined,
        **sizes,
    )
    return out, _untouched(s, row, finals)


def _untouched(s: Mix, row: Row, finals: jax.Array) -> jax.Array:
    """Returns the final states, of sequences without tokens as they entered."""
    if row.chunks.empty is None:
        return finals
    entries = s.entries
    if entries is None:
        entries = jnp.zeros_like(finals).at[:, :, 2].set(-1e38)
    return row.chunks.exits(finals, entries)


def backward(s: Mix, d_out: jax.Array, d_finals: jax.Array, cfg: DiagonalConfig, work: Work) -> dict[str, jax.Array]:
    """Returns the gradients by the names of `Mix`."""
    (B, T, F), G = s.k.shape, s.num_states
    tile = backward_tile(cfg, T, G)
    row = rows_of(B, T, tile.size, s.segment_ids, G)
    chunks, sizes, starts, d_ends = row.chunks.chunks, _sizes(s, row, tile), s.entries, d_finals.astype(jnp.float32)
    joined = chunks > 1
    if joined:
        lengths = _lengths(s, row, tile.size)
        starts, finals = _joined(s, row, _sums(s, row, sizes), lengths, s.entries)
        (d_sums,) = triton_launch(
            mix_sums_kernel,
            *s.arrays,
            row.codes,
            row.chunks.table,
            starts,
            d_out,
            out_shape=(jax.ShapeDtypeStruct((B, chunks, 4, F), jnp.float32),),
            **sizes,
        )
        (a, b, p), (d_a, d_b, d_p) = (tuple(x[:, :, i] for i in range(3)) for x in (finals, d_ends))
        d_ends = jnp.stack([d_a, d_b, -p, d_p - a * d_a - b * d_b], axis=2)
        d_ends, _ = _joined(s, row, d_sums, lengths, d_ends)
    token, chunk = jax.ShapeDtypeStruct(s.k.shape, s.k.dtype), jax.ShapeDtypeStruct((B, chunks, F), jnp.float32)
    dk, dv, d_decay, d_bonus, d_starts, _ = triton_launch(
        mix_bwd_kernel,
        *s.arrays,
        row.codes,
        row.chunks.table,
        starts,
        d_out,
        d_ends,
        out_shape=(
            token,
            jax.ShapeDtypeStruct(s.v.shape, s.v.dtype),
            chunk,
            chunk,
            jax.ShapeDtypeStruct((B, chunks, 3, F), jnp.float32),
            jax.ShapeDtypeStruct((B, chunks, tile.size // tile.tokens, 3, F), jnp.float32),
        ),
        work=work,
        G=G,
        JOINED=joined,
        **sizes,
    )
    # Summed in a fixed order, not by atomics: the same call gives the same bits.
    decay = jnp.sum(d_decay, axis=(0, 1))
    gradients = {"k": dk, "v": dv, "u": jnp.sum(d_bonus, axis=(0, 1))}
    gradients["w"] = jnp.where(decay == 0, 0, decay * -jnp.exp(s.w.astype(jnp.float32)))
    if s.initial_state is not None:
        gradients["initial_state"] = entries_of_chunks(d_starts, row, G, d_finals.astype(jnp.float32))
    return gradients


# -- tiles -------------------------------------------------------------------------------------------------------------

FORWARD = ((32, 32), (32, 16), (32, 8), (64, 16))  # channels of a program of one warp, tokens that it loads at once
BACKWARD = ((32, 16), (32, 8), (64, 8), (64, 4))


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    return "an array has no elements" if 0 in call.dims.values() else None


def heuristic(call: Call, platform: str) -> DiagonalConfig:
    """Returns the default tiles of a call."""
    return candidates(call)[0]


def candidates(call: Call) -> list[DiagonalConfig]:
    """Returns the configurations to tune over, what is likely fastest first."""
    B, T, F = (call.dims[d] for d in "BTF")
    widest, made = max(32, power_of_two(F)), []
    for times in (1, 2, 4):
        for (block, tokens), (back, loaded) in zip(FORWARD, BACKWARD, strict=True):
            if max(block, back) > widest:
                continue
            parts = []
            for wanted, channels in zip(WARPS_WANTED, (block, back), strict=True):
                warps = B * triton.cdiv(F, channels)
                split = power_of_two(triton.cdiv(MULTIPROCESSORS * wanted * times, warps))
                parts.append(min(split, triton.cdiv(T, 64)))
            chunk = power_of_two(triton.cdiv(T, parts[1]))
            made.append(
                DiagonalConfig(
                    chunk,
                    None,
                    block,
                    1,
                    None,
                    parts[0],
                    None,
                    1,
                    tokens=tokens,
                    backward_block_v=back,
                    backward_tokens=loaded,
                )
            )
    return list(dict.fromkeys(made))
