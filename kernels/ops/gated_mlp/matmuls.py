"""The matmuls of a gated MLP, which are XLA's on every device. What is of width F is stored in the dtype of x."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def hidden(x: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x gate, x up), [*lead, F]."""
    return _dot("...d,df->...f", x, gate).astype(x.dtype), _dot("...d,df->...f", x, up).astype(x.dtype)


def output(h: jax.Array, down: jax.Array) -> jax.Array:
    """Returns h down, [*lead, D]."""
    return _dot("...f,fd->...d", h, down).astype(h.dtype)


def gradients_through(
    pull: Callable, d_out: jax.Array, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> dict[str, jax.Array]:
    """Returns the gradients of all inputs; `pull` is (x gate, x up, gradient of their product) -> (product, gradient of x gate,
    gradient of x up)."""
    d = d_out.astype(x.dtype)
    g, u = hidden(x, gate, up)
    h, dg, du = pull(g, u, _dot("...d,fd->...f", d, down).astype(x.dtype))
    dg, du = dg.astype(x.dtype), du.astype(x.dtype)
    return {
        "x": _dot("...f,df->...d", dg, gate) + _dot("...f,df->...d", du, up),
        "gate": _dot("...d,...f->df", x, dg),
        "up": _dot("...d,...f->df", x, du),
        "down": _dot("...f,...d->fd", h, d),
    }
