"""rms_norm on TPUs, alone and with the residual: blocks of rows with all of D in VMEM, each array read or written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels._core import rows as cut
from kernels._core.pallas import launch_on_rows
from kernels.ops.rms_norm.contract import RMSNormConfig, add_op, op, work, work_of_add


def rms_norm_fwd_kernel(refs, out_refs, *, eps, zero_centered):
    x = refs["x"][...].astype(jnp.float32)
    if "residual" in refs:
        stream = (x + refs["residual"][...].astype(jnp.float32)).astype(out_refs["stream"].dtype)
        out_refs["stream"][...] = stream
        x = stream.astype(jnp.float32)  # rounded: what is normalised is what goes on
    rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    out = x * rstd
    if "weight" in refs:
        out = out * _factor(refs["weight"], zero_centered)
    out_refs["rstd"][...] = rstd
    out_refs["out"][...] = out.astype(out_refs["out"].dtype)


def rms_norm_bwd_kernel(refs, out_refs, *, num_rows, zero_centered):
    x, rstd = refs["x"][...].astype(jnp.float32), refs["rstd"][...]
    g = refs["d_out"][...].astype(jnp.float32)
    normal = x * rstd
    if "weight" in refs:
        # The last block may reach past the array, where there is anything at all, NaN too.
        row = pl.program_id(0) * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        out_refs["weight"][...] = jnp.sum(jnp.where(row < num_rows, g * normal, 0.0), axis=0, keepdims=True)[None]
        g = g * _factor(refs["weight"], zero_centered)
    c = (jnp.sum(g * x, axis=-1, keepdims=True) + refs["d_rstd"][...]) * rstd * rstd / x.shape[-1]
    dx = g * rstd - normal * c
    if "d_stream" in refs:
        dx = dx + refs["d_stream"][...].astype(jnp.float32)
    for name in ("dx", "narrow"):
        if name in out_refs:
            out_refs[name][...] = dx.astype(out_refs[name].dtype)


def _factor(weight_ref, zero_centered):
    return weight_ref[...].astype(jnp.float32) + (1.0 if zero_centered else 0.0)


def _itemsizes(call, backward=False):
    """Returns the item sizes of the arrays [M, D] that a direction has in VMEM."""
    x, residual = call.x.dtype.itemsize, call.arguments.get("residual")
    if residual is None:
        return (x,) * (3 if backward else 2)
    stream = residual.dtype.itemsize
    return (x, x, stream, stream) if not backward else (x, stream, stream, stream, *((x,) if x != stream else ()))


def _heights(call) -> tuple[int, int]:
    """Returns the rows of a block of the forward, and of the backward."""
    D = call.dims["D"]
    return cut.block_rows(D, _itemsizes(call)), cut.block_rows(D, _itemsizes(call, True))


def heuristic(call, platform):
    forward, backward = _heights(call)
    return RMSNormConfig(block_rows=forward, backward_block_rows=backward)


def candidates(call):
    pairs = zip(*map(cut.parts, _heights(call)))
    return list(dict.fromkeys(RMSNormConfig(block_rows=a, backward_block_rows=b) for a, b in pairs))


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    D = call.dims["D"]
    if min(_heights(call)) < cut.ROW_TILE:
        room = f"the {cut.VMEM_BUDGET >> 20} MiB of VMEM of a block"
        return f"D = {D} is too wide: {cut.ROW_TILE} rows of it do not fit {room}"
    return None


def _normalised(x, residual, weight, eps, zero_centered, cfg, cost):
    """Returns (out, stream if there is a residual, rstd)."""
    D = x.shape[-1]
    M = x.size // D
    made = {"out": jax.ShapeDtypeStruct((M, D), x.dtype)}
    if residual is not None:
        made["stream"] = jax.ShapeDtypeStruct((M, D), residual.dtype)
        residual = residual.reshape(M, D)
    made["rstd"] = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    rows = {"x": x.reshape(M, D), "residual": residual}
    options = {"work": cost, "eps": eps, "zero_centered": zero_centered}
    found = launch_on_rows(rms_norm_fwd_kernel, cfg.block_rows, rows, {"weight": weight}, made, **options)
    return tuple(y.reshape(x.shape[:-1] if n == "rstd" else x.shape) for n, y in found.items())


def _pulled(saved, normalised, x, weight, zero_centered, cfg, cost):
    """Returns (dx in the dtype of what was normalised, dx in that of x, dweight or None)."""
    D = x.shape[-1]
    M = x.size // D
    made = {"dx": jax.ShapeDtypeStruct((M, D), normalised.dtype)}
    if normalised.dtype != x.dtype:
        made["narrow"] = jax.ShapeDtypeStruct((M, D), x.dtype)
    d_stream = saved.get("d_stream")
    rows = {
        "x": normalised.reshape(M, D),
        "rstd": saved.rstd.reshape(M, 1),
        "d_out": saved.d_out.reshape(M, D),
        "d_stream": None if d_stream is None else d_stream.reshape(M, D),
        "d_rstd": saved.d_rstd.reshape(M, 1),
    }
    summed = () if weight is None else ("weight",)
    options = {"work": cost, "num_rows": M, "zero_centered": zero_centered}
    found = launch_on_rows(
        rms_norm_bwd_kernel, cfg.backward_block_rows, rows, {"weight": weight}, made, summed, **options
    )
    dx = found["dx"].reshape(x.shape)
    narrow = found["narrow"].reshape(x.shape) if "narrow" in found else dx
    return dx, narrow, found.get("weight")


def forward(x, weight, eps, zero_centered, cfg):
    return _normalised(x, None, weight, eps, zero_centered, cfg, work(op.bind(x, weight))[0])


def backward(saved, x, weight, eps, zero_centered, cfg):
    dx, _, dweight = _pulled(saved, x, x, weight, zero_centered, cfg, work(op.bind(x, weight))[1])
    return {"x": dx} if weight is None else {"x": dx, "weight": dweight}


def forward_add(x, residual, weight, eps, zero_centered, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight))[0]
    return _normalised(x, residual, weight, eps, zero_centered, cfg, cost)


def backward_add(saved, x, residual, weight, eps, zero_centered, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight))[1]
    d_residual, dx, dweight = _pulled(saved, saved.stream, x, weight, zero_centered, cfg, cost)
    return {"x": dx, "residual": d_residual} | ({} if weight is None else {"weight": dweight})


FACTS: Any = {
    "platforms": {"tpu"},
    "dtypes": {"float32", "bfloat16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
op.register(forward, backward, **FACTS)
add_op.register(forward_add, backward_add, **FACTS)
