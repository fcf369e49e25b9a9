"""rms_norm as plain XLA: the compiler fuses each direction into one or two loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.ops.rms_norm.contract import add_op, linear_op, op


def _factor(weight, zero_centered):
    return weight.astype(jnp.float32) + (1.0 if zero_centered else 0.0)


def forward(x, weight, eps, zero_centered):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + eps)
    out = wide * rstd[..., None]
    if weight is not None:
        out = out * _factor(weight, zero_centered)
    return out.astype(x.dtype), rstd


def _pull(d_out, d_rstd, x, rstd, weight, zero_centered):
    """Returns (dx, dweight or None) in float32."""
    wide, d_out, rstd = x.astype(jnp.float32), d_out.astype(jnp.float32), rstd[..., None]
    normal = wide * rstd
    g = d_out if weight is None else d_out * _factor(weight, zero_centered)
    # d rstd / dx = -rstd³ x / D; g reaches rstd through the product, and rstd is an output of its own.
    c = (jnp.sum(g * wide, axis=-1, keepdims=True) + d_rstd[..., None]) * rstd * rstd / x.shape[-1]
    dweight = None if weight is None else jnp.sum(d_out * normal, axis=tuple(range(x.ndim - 1)))
    return g * rstd - normal * c, dweight


def _gradients(weight, dweight, **others):
    return others if weight is None else {**others, "weight": dweight}


def backward(saved, x, weight, eps, zero_centered):
    dx, dweight = _pull(saved.d_out, saved.d_rstd, x, saved.rstd, weight, zero_centered)
    return _gradients(weight, dweight, x=dx)


def forward_add(x, residual, weight, eps, zero_centered):
    stream = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    out, rstd = forward(stream.astype(jnp.float32), weight, eps, zero_centered)
    return out.astype(x.dtype), stream, rstd


def backward_add(saved, x, residual, weight, eps, zero_centered):
    # From the stream alone: x and residual are not read again, and need not be kept.
    dx, dweight = _pull(saved.d_out, saved.d_rstd, saved.stream, saved.rstd, weight, zero_centered)
    d = dx + saved.d_stream.astype(jnp.float32)
    return _gradients(weight, dweight, x=d, residual=d)


def forward_linear(x, weight, projection, eps, zero_centered):
    normal, _ = forward(x, weight, eps, zero_centered)
    return dot("...d,df->...f", normal, projection).astype(x.dtype)


def backward_linear(saved, x, weight, projection, eps, zero_centered):
    # The norm is computed again: a pass over x, where keeping it would be an array of the size of x.
    normal, rstd = forward(x, weight, eps, zero_centered)
    d = dot("...f,df->...d", saved.d_out, projection)
    dx, dweight = _pull(d, jnp.zeros_like(rstd), x, rstd, weight, zero_centered)
    return _gradients(weight, dweight, x=dx, projection=dot("...d,...f->df", normal, saved.d_out))


EVERYWHERE = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
op.register(forward, backward, **EVERYWHERE)
add_op.register(forward_add, backward_add, **EVERYWHERE)
linear_op.register(forward_linear, backward_linear, **EVERYWHERE)
