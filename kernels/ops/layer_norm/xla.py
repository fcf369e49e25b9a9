"""layer_norm as plain XLA: the compiler fuses each direction into one or two loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.ops.layer_norm.contract import add_op, linear_op, op


def forward(x, weight, bias, eps):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1)
    apart = wide - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(apart), axis=-1) + eps)
    out = apart * rstd[..., None]
    out = out if weight is None else out * weight.astype(jnp.float32)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(x.dtype), mean, rstd


def _pull(d_out, d_mean, d_rstd, x, mean, rstd, weight, bias):
    """Returns (dx, {"weight": ..., "bias": ...} of those that are given) in float32."""
    d_out, rstd = d_out.astype(jnp.float32), rstd[..., None]
    normal = (x.astype(jnp.float32) - mean[..., None]) * rstd
    g = d_out if weight is None else d_out * weight.astype(jnp.float32)
    D, rows = x.shape[-1], tuple(range(x.ndim - 1))
    # What x does through the mean, and through rstd: d rstd / dx = -rstd² normal / D.
    through_mean = (jnp.sum(g, axis=-1, keepdims=True) * rstd - d_mean[..., None]) / D
    through_rstd = (jnp.sum(g * normal, axis=-1, keepdims=True) + d_rstd[..., None] * rstd) * rstd / D
    features = {}
    if weight is not None:
        features["weight"] = jnp.sum(d_out * normal, axis=rows)
    if bias is not None:
        features["bias"] = jnp.sum(d_out, axis=rows)
    return g * rstd - through_mean - normal * through_rstd, features


def backward(saved, x, weight, bias, eps):
    dx, features = _pull(saved.d_out, saved.d_mean, saved.d_rstd, x, saved.mean, saved.rstd, weight, bias)
    return {"x": dx, **features}


def forward_add(x, residual, weight, bias, eps):
    stream = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    out, mean, rstd = forward(stream.astype(jnp.float32), weight, bias, eps)
    return out.astype(x.dtype), stream, mean, rstd


def backward_add(saved, x, residual, weight, bias, eps):
    # From the stream alone: x and residual are not read again, and need not be kept.
    dx, features = _pull(saved.d_out, saved.d_mean, saved.d_rstd, saved.stream, saved.mean, saved.rstd, weight, bias)
    d = dx + saved.d_stream.astype(jnp.float32)
    return {"x": d, "residual": d, **features}


def forward_linear(x, weight, bias, projection, eps):
    normal, _, _ = forward(x, weight, bias, eps)
    return dot("...d,df->...f", normal, projection).astype(x.dtype)


def backward_linear(saved, x, weight, bias, projection, eps):
    # The norm is computed again: a pass over x, where keeping it would be an array of the size of x.
    normal, mean, rstd = forward(x, weight, bias, eps)
    d, none = dot("...f,df->...d", saved.d_out, projection), jnp.zeros_like(mean)
    dx, features = _pull(d, none, none, x, mean, rstd, weight, bias)
    return {"x": dx, "projection": dot("...d,...f->df", normal, saved.d_out), **features}


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
op.register(forward, backward, **EVERYWHERE)
add_op.register(forward_add, backward_add, **EVERYWHERE)
linear_op.register(forward_linear, backward_linear, **EVERYWHERE)
