"""layer_norm on TPUs, alone and with the residual: blocks of rows with all of D in VMEM, each array read or written once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows import norms_pallas as norms
from kernels.ops.layer_norm.contract import add_op, op, work, work_of_add


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


STATISTICS = ("mean", "rstd")


def forward(x, weight, bias, eps, cfg):
    cost = work(op.bind(x, weight, bias))[0]
    return norms.normalised(
        layer_norm_fwd_kernel, x, None, {"weight": weight, "bias": bias}, STATISTICS, cfg, cost, eps=eps
    )


def backward(saved, x, weight, bias, eps, cfg):
    cost = work(op.bind(x, weight, bias))[1]
    return norms.pulled(layer_norm_bwd_kernel, saved, x, x, {"weight": weight, "bias": bias}, STATISTICS, cfg, cost)[1]


def forward_add(x, residual, weight, bias, eps, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight, bias))[0]
    return norms.normalised(
        layer_norm_fwd_kernel, x, residual, {"weight": weight, "bias": bias}, STATISTICS, cfg, cost, eps=eps
    )


def backward_add(saved, x, residual, weight, bias, eps, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight, bias))[1]
    d, gradients = norms.pulled(
        layer_norm_bwd_kernel, saved, saved.stream, x, {"weight": weight, "bias": bias}, STATISTICS, cfg, cost
    )
    return {**gradients, "residual": d}


op.register(forward, backward, **norms.FACTS)
add_op.register(forward_add, backward_add, **norms.FACTS)
