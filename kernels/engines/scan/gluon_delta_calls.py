"""Calls of the kernel in `gluon_delta.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan.gluon_delta import delta_gradients_kernel
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

CHUNK, WIDTH = 64, 128
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


def fits(x: Any, chunk: int, num_states: int) -> bool:
    """Returns whether the kernel has these tokens, `delta_tokens.Tokens`, on the GPU being compiled for."""
    per_head = x.a is None or x.a.ndim == 3
    whole = num_states == 1 and chunk == CHUNK and x.q.shape[1] % CHUNK == 0
    wide = x.q.shape[-1] == x.v.shape[-1] == WIDTH and x.q.dtype.itemsize == 2
    return per_head and whole and wide and compute_capability() == 90


def gradients(run: Any, d_out: jax.Array, walked: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
    """Returns what `triton_delta_calls.Launches.gradients` does."""
    x, (B, N, chunks), (T, K) = run.x, run.chunks, run.x.q.shape[1:3]

    def tiles(y: jax.Array) -> Any:
        shape = (y.size // WIDTH, WIDTH) if y.ndim == 5 else (B * T, y.size // (B * T))
        return tensor_descriptor(y, shape, (CHUNK, CHUNK), SWIZZLED.value)

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
        *map(tiles, arrays),
        run.a,
        run.beta,
        *run.fades,
        run.layout.runs,
        out_shape=tuple(shapes.values()),
        grid=(min(MULTIPROCESSORS, B * chunks * K),),
        num_warps=4,
        B=B,
        T=T,
        CHUNKS=chunks,
        GROUPS=K,
        HEADS=N // K,
        SCALE=run.scale,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        **unused,
    )
    d: dict[str, Any] = dict(zip(shapes, results, strict=True))
    return d | {name: run.layout.of_tokens(jnp.sum(d[name], 0)) if name in d else None for name in ("beta", "a")}
