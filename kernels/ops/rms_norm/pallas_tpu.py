"""rms_norm on TPUs, alone and with the residual: blocks of rows with all of D in VMEM, each array read or written once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.rows import norms_pallas as norms
from kernels.ops.rms_norm.contract import add_op, op, work, work_of_add


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


STATISTICS = ("rstd",)


def forward(x, weight, eps, zero_centered, cfg):
    cost = work(op.bind(x, weight))[0]
    return norms.normalised(
        rms_norm_fwd_kernel, x, None, {"weight": weight}, STATISTICS, cfg, cost, eps=eps, zero_centered=zero_centered
    )


def backward(saved, x, weight, eps, zero_centered, cfg):
    cost = work(op.bind(x, weight))[1]
    return norms.pulled(
        rms_norm_bwd_kernel, saved, x, x, {"weight": weight}, STATISTICS, cfg, cost, zero_centered=zero_centered
    )[1]


def forward_add(x, residual, weight, eps, zero_centered, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight))[0]
    return norms.normalised(
        rms_norm_fwd_kernel,
        x,
        residual,
        {"weight": weight},
        STATISTICS,
        cfg,
        cost,
        eps=eps,
        zero_centered=zero_centered,
    )


def backward_add(saved, x, residual, weight, eps, zero_centered, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight))[1]
    d, gradients = norms.pulled(
        rms_norm_bwd_kernel,
        saved,
        saved.stream,
        x,
        {"weight": weight},
        STATISTICS,
        cfg,
        cost,
        zero_centered=zero_centered,
    )
    return {**gradients, "residual": d}


op.register(forward, backward, **norms.FACTS)
add_op.register(forward_add, backward_add, **norms.FACTS)
