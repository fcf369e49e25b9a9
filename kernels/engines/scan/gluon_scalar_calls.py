"""Calls of the kernel in `gluon_scalar.py`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan.gluon_scalar import scalar_walk_hopper_kernel
from kernels.engines.scan.gluon_tiles import WIDTH as _WIDTH
from kernels.engines.scan.gluon_tiles import C
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

CHUNK, WIDTH = C.value, _WIDTH.value
SERVER_REGISTERS, PRODUCER_REGISTERS = 104, 24


def fits(x: Any, N: int, chunk: int, num_states: int) -> bool:
    """Returns whether the kernel has a call of these tokens, `triton_scalar_calls.Tokens`, on the GPU being compiled for."""
    whole = num_states == 1 and chunk == CHUNK and x.q.shape[1] % CHUNK == 0 and x.v.shape[2] == N
    wide = x.q.shape[-1] == x.v.shape[-1] == WIDTH and x.q.dtype.itemsize == 2
    per_head = x.a is None or x.a.ndim == 3
    return whole and wide and per_head and x.w is x.skip is x.bonus is None and compute_capability() == 90


def _tokens(x: jax.Array) -> Any:
    """Returns the descriptor of an array [B, T, heads, 128] in blocks of 64 tokens of a head."""
    rows = x.shape[0] * x.shape[1]
    return tensor_descriptor(x, (rows, x.size // rows), (CHUNK, WIDTH), SWIZZLED.value)


def walk(
    run: Any, x: jax.Array, entries: jax.Array | None, wanted: tuple[str, ...], reverse: bool, starts: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns what `triton_scalar_calls.Launches.walk` does; "added", as `starts`, are transposed, [..., Hv, H]."""
    read, write = (run.writes, run.reads) if reverse else (run.reads, run.writes)
    shapes = run.shapes(x, reverse)
    names = [name for name in shapes if name in wanted]
    unused: dict[str, Any] = {f"{name}_ptr": None for name in shapes if name not in wanted}
    outputs = triton_launch(
        scalar_walk_hopper_kernel,
        _tokens(read) if "out" in wanted else None,
        _tokens(write),
        _tokens(x.astype(write.dtype)),
        run.sums,
        *run.fades,
        run.layout.runs,
        None if entries is None else jnp.swapaxes(entries, -1, -2),
        starts,
        out_shape=tuple(shapes[name] for name in names),
        grid=(math.prod(run.heads) * run.splits,),
        num_warps=8,
        work=run.work if "out" in wanted else None,
        N=run.heads[1],
        KR=read.shape[2],
        KK=write.shape[2],
        KX=x.shape[2],
        CHUNKS=run.layout.chunks,
        SPLITS=run.splits,
        SCALE=run.common["SCALE"],
        REVERSE=reverse,
        SERVER_REGISTERS=SERVER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        **unused,
    )
    found = dict(zip(names, outputs, strict=True))
    return found | ({"exits": jnp.swapaxes(found["exits"], -1, -2)} if "exits" in found else {})
