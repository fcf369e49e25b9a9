"""Norms of whole rows on TPUs: a block of rows is in VMEM with all of D, and each array is read or written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows import norms
from kernels.engines.rows import rows as cut
from kernels.engines.rows.norms import Norm, NormConfig, cost
from kernels.framework.binding import Call
from kernels.toolchains.pallas import launch_on_rows


def norm_fwd_kernel(refs: Any, out_refs: Any, *, norm: Norm) -> None:
    """Writes the outputs of a block of rows."""
    x = refs["x"][...].astype(jnp.float32)
    if "residual" in refs:
        stream = (x + refs["residual"][...].astype(jnp.float32)).astype(out_refs["stream"].dtype)
        out_refs["stream"][...] = stream
        x = stream.astype(jnp.float32)  # already rounded, because the norm is of the stream that is returned
    weight, bias = (refs[name][...] if name in refs else None for name in ("weight", "bias"))
    out, *statistics = norms.normalise(x, weight, bias, norm)
    for name, y in zip(norm.statistics, statistics, strict=True):
        out_refs[name][...] = y
    out_refs["out"][...] = out.astype(out_refs["out"].dtype)


def norm_bwd_kernel(refs: Any, out_refs: Any, *, num_rows: int, norm: Norm) -> None:
    """Writes the gradients of a block of rows, and its partial sums of those of weight and bias."""
    statistics = {name: refs[name][...] for s in norm.statistics for name in (s, f"d_{s}")}
    x, normalised = norms.normal(refs["x"][...].astype(jnp.float32), statistics)
    d_out = refs["d_out"][...].astype(jnp.float32)
    # The last block may extend past the array, where memory may hold anything, including NaN.
    row = pl.program_id(0) * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for name, each in (("weight", d_out * normalised), ("bias", d_out)):
        if name in out_refs:
            out_refs[name][...] = jnp.sum(jnp.where(row < num_rows, each, 0.0), axis=0, keepdims=True)[None]
    weight = refs["weight"][...] if "weight" in refs else None
    dx = norms.pull(x, normalised, d_out, statistics, weight, norm)
    if "d_stream" in refs:
        dx = dx + refs["d_stream"][...].astype(jnp.float32)
    for name in ("dx", "narrow"):
        if name in out_refs:
            out_refs[name][...] = dx.astype(out_refs[name].dtype)


def forward(x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any) -> tuple[jax.Array, ...]:
    """Returns (out, stream if there is a residual, the statistics of each row)."""
    D = x.shape[-1]
    M = x.size // D
    out_rows = {"out": jax.ShapeDtypeStruct((M, D), x.dtype)}
    rows = {"x": x.reshape(M, D)}
    if residual is not None:
        out_rows["stream"] = jax.ShapeDtypeStruct((M, D), residual.dtype)
        rows["residual"] = residual.reshape(M, D)
    out_rows |= dict.fromkeys(norm.statistics, jax.ShapeDtypeStruct((M, 1), jnp.float32))
    work, features = cost(x, residual, weight, bias, norm.centered)[0], {"weight": weight, "bias": bias}
    outputs = launch_on_rows(norm_fwd_kernel, cfg.block_rows, rows, features, out_rows, work=work, norm=norm)
    return tuple(y.reshape(x.shape[:-1] if n in norm.statistics else x.shape) for n, y in outputs.items())


def backward(saved: Any, x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any) -> dict[str, jax.Array]:
    """Returns the gradients by name."""
    D = x.shape[-1]
    M = x.size // D
    normalised = x if residual is None else saved.stream
    out_rows = {"dx": jax.ShapeDtypeStruct((M, D), normalised.dtype)}
    if normalised.dtype != x.dtype:
        out_rows["narrow"] = jax.ShapeDtypeStruct((M, D), x.dtype)
    rows = {"x": normalised.reshape(M, D), "d_out": saved.d_out.reshape(M, D)}
    if residual is not None:
        rows["d_stream"] = saved.d_stream.reshape(M, D)
    rows |= {name: saved[name].reshape(M, 1) for s in norm.statistics for name in (s, f"d_{s}")}
    summed = [name for name, array in (("weight", weight), ("bias", bias)) if array is not None]
    work = cost(x, residual, weight, bias, norm.centered)[1]
    outputs = launch_on_rows(
        norm_bwd_kernel,
        cfg.backward_block_rows,
        rows,
        {"weight": weight},  # not the bias, which no gradient depends on
        out_rows,
        summed,
        work=work,
        num_rows=M,
        norm=norm,
    )
    dx = outputs["dx"].reshape(x.shape)
    gradients = {"x": outputs["narrow"].reshape(x.shape) if "narrow" in outputs else dx}
    gradients |= {name: outputs[name] for name in summed}
    return gradients if residual is None else {**gradients, "residual": dx}


def _itemsizes(call: Call, backward: bool = False) -> tuple[int, ...]:
    """Returns the item sizes of the arrays [M, D] that one direction holds in VMEM."""
    x, residual = call.x.dtype.itemsize, call.arguments.get("residual")
    if residual is None:
        return (x,) * (3 if backward else 2)
    stream = residual.dtype.itemsize
    return (x, x, stream, stream) if not backward else (x, stream, stream, stream, *((x,) if x != stream else ()))


def _heights(call: Call) -> tuple[int, int]:
    """Returns the rows per block of the forward and of the backward."""
    D = call.dims["D"]
    return cut.block_rows(D, _itemsizes(call)), cut.block_rows(D, _itemsizes(call, True))


def heuristic(call: Call, platform: str) -> NormConfig:
    """Returns the default block sizes of a call."""
    forward, backward = _heights(call)
    return NormConfig(block_rows=forward, backward_block_rows=backward)


def candidates(call: Call) -> list[NormConfig]:
    """Returns the block sizes to tune over."""
    pairs = zip(*map(cut.parts, _heights(call)))
    return list(dict.fromkeys(NormConfig(block_rows=a, backward_block_rows=b) for a, b in pairs))


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if call.x.size == 0:
        return "x has no elements"
    D = call.dims["D"]
    if min(_heights(call)) < cut.ROW_TILE:
        room = f"the {cut.VMEM_BUDGET >> 20} MiB of VMEM of a block"
        return f"D = {D} is too wide: {cut.ROW_TILE} rows do not fit {room}"
    return None


FACTS: Any = {
    "platforms": {"tpu"},
    "dtypes": {"float32", "bfloat16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
