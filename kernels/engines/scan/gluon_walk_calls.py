"""Calls of the kernels in `gluon_walk.py`."""

from __future__ import annotations

from typing import Any

import jax

from kernels.engines.scan import gluon_delta_calls
from kernels.engines.scan.gluon_walk import delta_reverse_hopper_kernel, delta_walk_hopper_kernel
from kernels.engines.scan.gluon_walk_parts import COLUMNS
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import tensor_descriptor, triton_launch

CHUNK, WIDTH = gluon_delta_calls.CHUNK, gluon_delta_calls.WIDTH
STORER_REGISTERS, PRODUCER_REGISTERS = 240, 24


def fits(x: Any, chunk: int, num_states: int) -> bool:
    """Returns whether the kernels have a call of these tokens, `delta_tokens.Tokens`, on the GPU being compiled for."""
    whole = num_states == 1 and x.q.shape[1] % CHUNK == 0
    return whole and gluon_delta_calls.fits(x, chunk, num_states)


def _wide(x: jax.Array | None) -> Any:
    """Returns the descriptor of an array [B, T, heads, 128] in blocks of 64 tokens of a head."""
    if x is None:
        return None
    rows = x.shape[0] * x.shape[1]
    return tensor_descriptor(x, (rows, x.size // rows), (CHUNK, WIDTH), SWIZZLED.value)


def _launch(
    kernel: Any, run: Any, weights: Any, solve: Any, tokens: Any, state: Any, starts: Any, wanted: Any, shapes: Any
) -> Any:
    """Launches a walk that reads `tokens`, values or cotangents; returns what is `wanted` of its results by name."""
    names = [name for name in shapes if name in wanted]
    B, N, chunks = run.chunks
    unused: dict[str, Any] = {f"{name}_ptr": None for name in shapes if name not in wanted}
    outputs = triton_launch(
        kernel,
        None if weights is None else _wide(run.reads),
        _wide(run.keeps),
        _wide(run.writes),
        gluon_delta_calls.tiled(tokens),
        None if weights is None else gluon_delta_calls.tiled(weights),
        gluon_delta_calls.tiled(solve),
        run.beta,
        *run.fades,
        run.layout.runs,
        state,
        starts,
        out_shape=tuple(shapes[name] for name in names),
        grid=(B * N * run.splits * COLUMNS.value,),
        num_warps=4,
        work=None if weights is None else run.work,
        N=N,
        KQ=run.reads.shape[2],
        KK=run.keeps.shape[2],
        CHUNKS=chunks,
        SPLITS=run.splits,
        SCALE=run.scale,
        STORER_REGISTERS=STORER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        **unused,
    )
    return dict(zip(names, outputs, strict=True))


def walk(run: Any, weights: Any, solve: Any, wanted: tuple[str, ...], starts: Any) -> dict[str, jax.Array]:
    """Returns what `triton_delta_calls.Launches.walk` does, but for maps."""
    shapes = {name: run.shapes()[name] for name in ("out", "written", "states", "exits")}
    weights = weights if "out" in wanted else None
    return _launch(delta_walk_hopper_kernel, run, weights, solve, run.x.v, run.x.entries, starts, wanted, shapes)


def reverse(
    run: Any, weights: Any, solve: Any, d_out: Any, d_exits: Any, wanted: tuple[str, ...], starts: Any
) -> dict[str, jax.Array]:
    """Returns what `triton_delta_calls.Launches.reverse` does."""
    shapes = {name: run.shapes()[name] for name in ("du", "d_states", "d_entries", "added")}
    d_out = d_out.astype(run.x.k.dtype)
    return _launch(delta_reverse_hopper_kernel, run, weights, solve, d_out, d_exits, starts, wanted, shapes)
