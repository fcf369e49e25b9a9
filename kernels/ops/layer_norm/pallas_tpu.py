"""layer_norm on TPUs, alone and with the residual: blocks of rows with all of D in VMEM, each array read or written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels._core import rows as cut
from kernels._core.pallas import launch_on_rows
from kernels.ops.layer_norm.contract import LayerNormConfig, add_op, op, work, work_of_add


def layer_norm_fwd_kernel(refs, out_refs, *, eps):
    x = refs["x"][...].astype(jnp.float32)
    if "residual" in refs:
        stream = (x + refs["residual"][...].astype(jnp.float32)).astype(out_refs["stream"].dtype)
        out_refs["stream"][...] = stream
        x = stream.astype(jnp.float32)  # rounded: what is normalised is what goes on
    mean = jnp.mean(x, axis=-1, keepdims=True)
    apart = x - mean
    rstd = jax.lax.rsqrt(jnp.mean(apart * apart, axis=-1, keepdims=True) + eps)
    out = apart * rstd
    if "weight" in refs:
        out = out * refs["weight"][...].astype(jnp.float32)
    if "bias" in refs:
        out = out + refs["bias"][...].astype(jnp.float32)
    out_refs["mean"][...], out_refs["rstd"][...] = mean, rstd
    out_refs["out"][...] = out.astype(out_refs["out"].dtype)


def layer_norm_bwd_kernel(refs, out_refs, *, num_rows):
    rstd, D = refs["rstd"][...], refs["x"].shape[1]
    normal = (refs["x"][...].astype(jnp.float32) - refs["mean"][...]) * rstd
    g = refs["d_out"][...].astype(jnp.float32)
    # The last block may reach past the array, where there is anything at all, NaN too.
    row = pl.program_id(0) * g.shape[0] + jax.lax.broadcasted_iota(jnp.int32, g.shape, 0)
    for name, each in (("weight", g * normal), ("bias", g)):
        if name in out_refs:
            out_refs[name][...] = jnp.sum(jnp.where(row < num_rows, each, 0.0), axis=0, keepdims=True)[None]
    if "weight" in refs:
        g = g * refs["weight"][...].astype(jnp.float32)
    through_mean = (jnp.sum(g, axis=-1, keepdims=True) * rstd - refs["d_mean"][...]) / D
    through_rstd = (jnp.sum(g * normal, axis=-1, keepdims=True) + refs["d_rstd"][...] * rstd) * rstd / D
    dx = g * rstd - through_mean - normal * through_rstd
    if "d_stream" in refs:
        dx = dx + refs["d_stream"][...].astype(jnp.float32)
    for name in ("dx", "narrow"):
        if name in out_refs:
            out_refs[name][...] = dx.astype(out_refs[name].dtype)


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
    return LayerNormConfig(block_rows=forward, backward_block_rows=backward)


def candidates(call):
    pairs = zip(*map(cut.parts, _heights(call)))
    return list(dict.fromkeys(LayerNormConfig(block_rows=a, backward_block_rows=b) for a, b in pairs))


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    D = call.dims["D"]
    if min(_heights(call)) < cut.ROW_TILE:
        room = f"the {cut.VMEM_BUDGET >> 20} MiB of VMEM of a block"
        return f"D = {D} is too wide: {cut.ROW_TILE} rows of it do not fit {room}"
    return None


def _normalised(x, residual, weight, bias, eps, cfg, cost):
    """Returns (out, stream if there is a residual, mean, rstd)."""
    D = x.shape[-1]
    M = x.size // D
    made = {"out": jax.ShapeDtypeStruct((M, D), x.dtype)}
    if residual is not None:
        made["stream"] = jax.ShapeDtypeStruct((M, D), residual.dtype)
        residual = residual.reshape(M, D)
    made |= dict.fromkeys(("mean", "rstd"), jax.ShapeDtypeStruct((M, 1), jnp.float32))
    rows, features = {"x": x.reshape(M, D), "residual": residual}, {"weight": weight, "bias": bias}
    found = launch_on_rows(layer_norm_fwd_kernel, cfg.block_rows, rows, features, made, work=cost, eps=eps)
    return tuple(y.reshape(x.shape[:-1] if n in ("mean", "rstd") else x.shape) for n, y in found.items())


def _pulled(saved, normalised, x, weight, bias, cfg, cost):
    """Returns (dx in the dtype of what was normalised, {"x": dx in its own, and the gradients of weight and bias})."""
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
        **{name: saved[name].reshape(M, 1) for name in ("mean", "rstd", "d_mean", "d_rstd")},
    }
    summed = [name for name, given in (("weight", weight), ("bias", bias)) if given is not None]
    found = launch_on_rows(
        layer_norm_bwd_kernel, cfg.backward_block_rows, rows, {"weight": weight}, made, summed, work=cost, num_rows=M
    )
    dx = found["dx"].reshape(x.shape)
    narrow = found["narrow"].reshape(x.shape) if "narrow" in found else dx
    return dx, {"x": narrow, **{name: found[name] for name in summed}}


def forward(x, weight, bias, eps, cfg):
    return _normalised(x, None, weight, bias, eps, cfg, work(op.bind(x, weight, bias))[0])


def backward(saved, x, weight, bias, eps, cfg):
    return _pulled(saved, x, x, weight, bias, cfg, work(op.bind(x, weight, bias))[1])[1]


def forward_add(x, residual, weight, bias, eps, cfg):
    return _normalised(x, residual, weight, bias, eps, cfg, work_of_add(add_op.bind(x, residual, weight, bias))[0])


def backward_add(saved, x, residual, weight, bias, eps, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight, bias))[1]
    d_residual, gradients = _pulled(saved, saved.stream, x, weight, bias, cfg, cost)
    return {**gradients, "residual": d_residual}


FACTS: Any = {
    "platforms": {"tpu"},
    "dtypes": {"float32", "bfloat16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
op.register(forward, backward, **FACTS)
add_op.register(forward_add, backward_add, **FACTS)
