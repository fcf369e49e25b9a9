"""A gated MLP in plain XLA, any device. Nothing of width F is saved for the backward: it is computed again from x."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.ops.gated_mlp.contract import activation_of, op


def _dot(subscripts, a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _hidden(x, gate, up):
    return _dot("...d,df->...f", x, gate), _dot("...d,df->...f", x, up)


def forward(x, gate, up, down, activation):
    g, u = _hidden(x, gate, up)
    h = (activation_of(activation)(g) * u).astype(x.dtype)
    return _dot("...f,fd->...d", h, down).astype(x.dtype)


def backward(saved, x, gate, up, down, activation):
    g, u = _hidden(x, gate, up)
    act, pull = jax.vjp(activation_of(activation), g)
    d = saved.d_out.astype(x.dtype)
    dh = _dot("...d,fd->...f", d, down)
    ddown = _dot("...f,...d->fd", (act * u).astype(x.dtype), d)
    dg = pull(dh * u)[0].astype(x.dtype)
    du = (dh * act).astype(x.dtype)
    dx = _dot("...f,df->...d", dg, gate) + _dot("...f,df->...d", du, up)
    return {"x": dx, "gate": _dot("...d,...f->df", x, dg), "up": _dot("...d,...f->df", x, du), "down": ddown}


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"lead"},
)
