"""RMS normalisation in plain XLA, any device."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.rms_norm.contract import op, rms_norm


@op.backend(
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    features={"weight", "eps", "zero_centered"},
)
def forward(x, weight, eps, zero_centered, cfg):
    return rms_norm(x, weight, eps=eps, zero_centered=zero_centered)


def backward(saved, x, weight, eps, zero_centered, cfg):
    wide, d = x.astype(jnp.float32), saved.d_out.astype(jnp.float32)
    normal = wide * saved.rstd[..., None]
    scaled = d
    if weight is not None:
        scale = weight.astype(jnp.float32)
        scaled = d * (1 + scale if zero_centered else scale)
    mean = jnp.mean(scaled * normal, axis=-1)
    # d rstd / dx = -rstd^3 x / D
    extra = saved.d_rstd * saved.rstd**2 / x.shape[-1]
    dx = saved.rstd[..., None] * (scaled - normal * mean[..., None]) - normal * extra[..., None]
    if weight is None:
        return {"x": dx}
    return {"x": dx, "weight": jnp.sum(d * normal, axis=tuple(range(x.ndim - 1)))}
