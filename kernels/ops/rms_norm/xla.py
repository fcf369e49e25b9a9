"""rms_norm as plain XLA: the compiler fuses each direction into one or two loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.ops.rms_norm.contract import op


def _factor(weight, zero_centered):
    return weight.astype(jnp.float32) + (1.0 if zero_centered else 0.0)


def forward(x, weight, eps, zero_centered):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + eps)
    out = wide * rstd[..., None]
    if weight is not None:
        out = out * _factor(weight, zero_centered)
    return out.astype(x.dtype), rstd


def backward(saved, x, weight, eps, zero_centered):
    wide, d_out, rstd = x.astype(jnp.float32), saved.d_out.astype(jnp.float32), saved.rstd[..., None]
    normal = wide * rstd
    g = d_out if weight is None else d_out * _factor(weight, zero_centered)
    # d rstd / dx = -rstd³ x / D; g reaches rstd through the product, and rstd is an output of its own.
    c = (jnp.sum(g * wide, axis=-1, keepdims=True) + saved.d_rstd[..., None]) * rstd * rstd / x.shape[-1]
    gradients = {"x": (g * rstd - normal * c).astype(x.dtype)}
    if weight is not None:
        rows = tuple(range(x.ndim - 1))
        gradients["weight"] = jnp.sum(d_out * normal, axis=rows).astype(weight.dtype)
    return gradients


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"lead"},
)
