"""The matmuls of a gated MLP, which run on XLA on every device. Intermediates of width F have the dtype of x."""

from __future__ import annotations

from collections.abc import Callable

import jax

from kernels.engines.matmul.dot import dot


def hidden(x: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x gate, x up), [*lead, F]."""
    return dot("...d,df->...f", x, gate).astype(x.dtype), dot("...d,df->...f", x, up).astype(x.dtype)


def output(h: jax.Array, down: jax.Array) -> jax.Array:
    """Returns h down, [*lead, D]."""
    return dot("...f,fd->...d", h, down).astype(h.dtype)


def gradients_through(
    pull: Callable, d_out: jax.Array, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> dict[str, jax.Array]:
    """Returns the gradients of all inputs; `pull` is (x gate, x up, gradient of their product) -> (product, gradient of
    x gate, gradient of x up)."""
    d = d_out.astype(x.dtype)
    g, u = hidden(x, gate, up)
    h, dg, du = pull(g, u, dot("...d,fd->...f", d, down).astype(x.dtype))
    dg, du = dg.astype(x.dtype), du.astype(x.dtype)
    return {
        "x": dot("...f,df->...d", dg, gate) + dot("...f,df->...d", du, up),
        "gate": dot("...d,...f->df", x, dg),
        "up": dot("...d,...f->df", x, du),
        "down": dot("...f,...d->fd", h, d),
    }
