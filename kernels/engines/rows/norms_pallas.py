"""Norms of whole rows on TPUs, of x or of x + residual: blocks of rows with all of D in VMEM, each array read or written once.

The arithmetic is an operation's own: two kernels of a block, as `launch_on_rows` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.rows import rows as cut
from kernels.engines.rows.norms import NormConfig
from kernels.framework.binding import Call
from kernels.framework.work import Work
from kernels.toolchains.pallas import launch_on_rows


def normalised(
    kernel: Callable,
    x: jax.Array,
    residual: jax.Array | None,
    features: dict[str, jax.Array | None],
    statistics: tuple[str, ...],
    cfg: Any,
    work: Work,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Returns (out, stream if there is a residual, the statistics of each row)."""
    D = x.shape[-1]
    M = x.size // D
    made = {"out": jax.ShapeDtypeStruct((M, D), x.dtype)}
    if residual is not None:
        made["stream"] = jax.ShapeDtypeStruct((M, D), residual.dtype)
        residual = residual.reshape(M, D)
    made |= dict.fromkeys(statistics, jax.ShapeDtypeStruct((M, 1), jnp.float32))
    rows = {"x": x.reshape(M, D), "residual": residual}
    found = launch_on_rows(kernel, cfg.block_rows, rows, features, made, work=work, **options)
    return tuple(y.reshape(x.shape[:-1] if n in statistics else x.shape) for n, y in found.items())


def pulled(
    kernel: Callable,
    saved: Any,
    normalised: jax.Array,
    x: jax.Array,
    features: dict[str, jax.Array | None],
    statistics: tuple[str, ...],
    cfg: Any,
    work: Work,
    **options: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (dx in the dtype of what was normalised, {"x": dx in its own, and the gradients of the features})."""
    D = x.shape[-1]
    M = x.size // D
    made = {"dx": jax.ShapeDtypeStruct((M, D), normalised.dtype)}
    if normalised.dtype != x.dtype:
        made["narrow"] = jax.ShapeDtypeStruct((M, D), x.dtype)
    d_stream = saved.get("d_stream")
    rows = {
        "x": normalised.reshape(M, D),
        "d_out": saved.d_out.reshape(M, D),
        "d_stream": None if d_stream is None else d_stream.reshape(M, D),
        **{name: saved[name].reshape(M, 1) for s in statistics for name in (s, f"d_{s}")},
    }
    summed = [name for name, given in features.items() if given is not None]
    # A bias has a gradient and no part in those of the others.
    read = {"weight": features["weight"]}
    found = launch_on_rows(kernel, cfg.backward_block_rows, rows, read, made, summed, work=work, num_rows=M, **options)
    dx = found["dx"].reshape(x.shape)
    narrow = found["narrow"].reshape(x.shape) if "narrow" in found else dx
    return dx, {"x": narrow, **{name: found[name] for name in summed}}


def _itemsizes(call: Call, backward: bool = False) -> tuple[int, ...]:
    """Returns the item sizes of the arrays [M, D] that a direction has in VMEM."""
    x, residual = call.x.dtype.itemsize, call.arguments.get("residual")
    if residual is None:
        return (x,) * (3 if backward else 2)
    stream = residual.dtype.itemsize
    return (x, x, stream, stream) if not backward else (x, stream, stream, stream, *((x,) if x != stream else ()))


def _heights(call: Call) -> tuple[int, int]:
    """Returns the rows of a block of the forward, and of the backward."""
    D = call.dims["D"]
    return cut.block_rows(D, _itemsizes(call)), cut.block_rows(D, _itemsizes(call, True))


def heuristic(call: Call, platform: str) -> NormConfig:
    """Returns the blocks of a call."""
    forward, backward = _heights(call)
    return NormConfig(block_rows=forward, backward_block_rows=backward)


def candidates(call: Call) -> list[NormConfig]:
    """Returns the blocks to choose from when tuning."""
    pairs = zip(*map(cut.parts, _heights(call)))
    return list(dict.fromkeys(NormConfig(block_rows=a, backward_block_rows=b) for a, b in pairs))


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if call.x.size == 0:
        return "x has no elements"
    D = call.dims["D"]
    if min(_heights(call)) < cut.ROW_TILE:
        room = f"the {cut.VMEM_BUDGET >> 20} MiB of VMEM of a block"
        return f"D = {D} is too wide: {cut.ROW_TILE} rows of it do not fit {room}"
    return None


FACTS: Any = {
    "platforms": {"tpu"},
    "dtypes": {"float32", "bfloat16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
