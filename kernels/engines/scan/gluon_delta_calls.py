"""Calls of the kernels in `gluon_delta.py` and `gluon_channel.py`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import gluon_channel_parts
from kernels.engines.scan.gluon_channel import channel_products_kernel
from kernels.engines.scan.gluon_channel_gradients import channel_gradients_hopper_kernel
from kernels.engines.scan.gluon_channel_pairs import channel_pairs_hopper_kernel
from kernels.engines.scan.gluon_delta import delta_gradients_kernel
from kernels.engines.scan.triton_channels import channel_solve_kernel
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

CHUNK, WIDTH = 64, 128
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
SOLVE_WARPS = 2  # 64.5 us for 73.5 of four, and 70 of one: 4,096 chunks on an H200
# Of kernels of channels, so that two programs share a multiprocessor.
WARPS = gluon_channel_parts.WARPS.value
REGISTERS = min(255, 1024 // WARPS)


def fits(x: Any, chunk: int, num_states: int) -> bool:
    """Returns whether the kernel has these tokens, `delta_tokens.Tokens`, on the GPU being compiled for."""
    per_head = x.a is None or x.a.ndim == 3
    whole = chunk == CHUNK and (per_head or (num_states == 1 and x.q.shape[1] % CHUNK == 0))
    wide = x.q.shape[-1] == x.v.shape[-1] == WIDTH and x.q.dtype.itemsize == 2
    return whole and wide and compute_capability() == 90


def tiled(x: jax.Array, layout: Any = SWIZZLED) -> Any:
    """Returns the descriptor of an array [B, T, heads, 128], or of matrices [B, N, CHUNKS, rows, columns], in tiles."""
    rows = x.size // x.shape[-1] if x.ndim == 5 else x.shape[0] * x.shape[1]
    return tensor_descriptor(x, (rows, x.size // rows), (CHUNK, CHUNK), layout.value)


def gradients(run: Any, d_out: jax.Array, walked: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
    """Returns what `triton_delta_calls.Launches.gradients` does."""
    x, (B, N, chunks), (T, K) = run.x, run.chunks, run.x.q.shape[1:3]

    def parts(number: int) -> Any:
        return jax.ShapeDtypeStruct((number, B, N, T), jnp.float32)

    shapes = {name: jax.ShapeDtypeStruct(getattr(x, name).shape, x.q.dtype) for name in ("q", "k", "v")}
    shapes |= {"beta": parts(3)} | ({} if x.a is None else {"a": parts(2)})
    arrays = (
        x.q,
        x.k,
        d_out.astype(x.q.dtype),
        walked["written"],
        of_end["du"],
        x.v,
        walked["states"],
        of_end["d_states"],
    )
    unused: dict[str, Any] = {"da_ptr": None} if x.a is None else {}
    results = triton_launch(
        delta_gradients_kernel,
        *map(tiled, arrays),
        run.a,
        run.beta,
        *run.fades,
        run.layout.runs,
        run.layout.table,
        out_shape=tuple(shapes.values()),
        grid=(min(MULTIPROCESSORS, B * chunks * K),),
        num_warps=4,
        B=B,
        T=T,
        CHUNKS=chunks,
        GROUPS=K,
        HEADS=N // K,
        SCALE=run.scale,
        RAGGED=run.layout.table is not None or T % CHUNK > 0,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        **unused,
    )
    d: dict[str, Any] = dict(zip(shapes, results, strict=True))
    return d | {name: run.layout.of_tokens(jnp.sum(d[name], 0)) if name in d else None for name in ("beta", "a")}


def products(run: Any, d_out: jax.Array, walked: dict[str, Any], of_end: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what `Chunks.states` and `Chunks.written` do, of `triton_channel_calls.py`."""
    x, (B, N, chunks), of = run.x, run.chunks, run.decays_of
    arrays = (d_out.astype(x.v.dtype), walked["written"], of_end["du"], x.v, walked["states"], of_end["d_states"])
    of_states = (of.squares(), of.tokens(), of.tokens(), of.per_channel())
    of_written = (of.squares(), of.tokens(), of.per_token(), jax.ShapeDtypeStruct(x.v.shape, x.v.dtype))
    results = triton_launch(
        channel_products_kernel,
        *map(tiled, arrays),
        run.beta,
        run.layout.runs,
        out_shape=(*of_states, *of_written),
        grid=(min(MULTIPROCESSORS, B * chunks * N),),
        num_warps=4,
        B=B,
        T=x.q.shape[1],
        CHUNKS=chunks,
        N=N,
        STAGES=3,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )
    return results[:4], results[4:]


def channel_gradients(of: Any, sums: Any, whole: Any, first: Any, of_states: Any, of_written: Any, shapes: Any) -> Any:
    """Returns what `channel_gradients_kernel` of `triton_channel_steps.py` does, of `Chunks` in `triton_channel_calls.py`.

    Args:
      sums, whole, first, of_states, of_written: see `Chunks.gradients`.
      shapes: of the results.
    """
    x, (B, N, chunks) = of.x, of.shape
    d_pairs, d_reads, d_leaves, d_whole = of_states
    d_solved, d_keeps = of_written
    arrays = (x.q, x.k, d_pairs, d_solved, d_reads, d_leaves, d_keeps)
    return triton_launch(
        channel_gradients_hopper_kernel,
        *map(tiled, arrays),
        tiled(sums, gluon_channel_parts.SUMS),
        d_pairs,
        sums,
        of.beta,
        whole,
        d_whole,
        first,
        of.layout.runs,
        out_shape=shapes,
        grid=(min(2 * MULTIPROCESSORS, 2 * B * chunks * N),),
        num_warps=WARPS,
        max_registers=REGISTERS,
        B=B,
        T=x.q.shape[1],
        N=N,
        KQ=x.q.shape[2],
        KK=x.k.shape[2],
        CHUNKS=chunks,
        SCALE=of.decays["SCALE"],
        UNSCALED=-math.log2(of.decays["SCALE"]),
    )


def channel_pairs(of: Any, sums: Any, first: Any) -> tuple[Any, Any]:
    """Returns what `Chunks.pairs` does, of a delta rule in `triton_channel_calls.py`."""
    x, (B, N, chunks), square = of.x, of.shape, of.squares()
    weights, a = triton_launch(
        channel_pairs_hopper_kernel,
        tiled(x.q),
        tiled(x.k),
        tiled(sums, gluon_channel_parts.SUMS),
        sums,
        of.beta,
        first,
        of.layout.runs,
        out_shape=(square, jax.ShapeDtypeStruct(square.shape, jnp.float32)),
        grid=(min(2 * MULTIPROCESSORS, B * chunks * N),),
        num_warps=WARPS,
        max_registers=REGISTERS,
        B=B,
        N=N,
        KQ=x.q.shape[2],
        KK=x.k.shape[2],
        CHUNKS=chunks,
        SCALE=of.decays["SCALE"],
    )
    scratch = jax.ShapeDtypeStruct((*square.shape[:-1], 16), jnp.float32)
    grid = (B * chunks * N,)
    solve, _ = triton_launch(
        channel_solve_kernel, a, out_shape=(square, scratch), grid=grid, num_warps=SOLVE_WARPS, BLOCK_C=CHUNK
    )
    return weights, solve
