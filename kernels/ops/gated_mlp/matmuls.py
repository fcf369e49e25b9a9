"""The matmuls of a gated MLP, which run on XLA on every device. Intermediates of width F have the dtype of x.

A long sequence is done a block of tokens at a time, so that intermediates of width F are those of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot

# Numbers of width F from which tokens are done in blocks, and those of a block. Each block of a backward reads and writes the
# float32 gradients of three matrices: 2% of its matmuls on an H100, where a block has 2^28 numbers.
BLOCKED, BLOCK = 2**29, 2**28


def block_tokens(tokens: int, width: int) -> int | None:
    """Returns how many tokens are done at once, if possible a divisor of them; None for all."""
    if not isinstance(tokens, int) or tokens * width <= BLOCKED:
        return None
    least = -(-tokens * width // BLOCK)
    even = (n for n in range(least, 2 * least) if tokens % n == 0)
    return -(-tokens // next(even, least))


def _blocks(x: jax.Array, rows: int) -> jax.Array:
    """Returns x [*lead, D] as blocks [n, rows, D], padded with zeros."""
    x = x.reshape(-1, x.shape[-1])
    n = -(-x.shape[0] // rows)
    return jnp.pad(x, [(0, n * rows - x.shape[0]), (0, 0)]).reshape(n, rows, x.shape[-1])


def _joined(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Returns blocks [n, rows, D] without the padding, in the shape of `like`."""
    return blocks.reshape(-1, blocks.shape[-1])[: math.prod(like.shape[:-1])].reshape(like.shape)


def by_block(function: Callable, x: jax.Array, rows: int | None) -> jax.Array:
    """Returns function(x) of x [*lead, D], `rows` tokens at a time. None, or as many as there are: all at once."""
    if rows is None or rows >= math.prod(x.shape[:-1]):
        return function(x)
    return _joined(jax.lax.map(function, _blocks(x, rows)), x)


def hidden(x: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x gate, x up), [*lead, F]."""
    return dot("...d,df->...f", x, gate).astype(x.dtype), dot("...d,df->...f", x, up).astype(x.dtype)


def output(h: jax.Array, down: jax.Array) -> jax.Array:
    """Returns h down, [*lead, D]."""
    return dot("...f,fd->...d", h, down).astype(h.dtype)


def gradients_through(
    pull: Callable,
    d_out: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    rows: int | None,
) -> dict[str, jax.Array]:
    """Returns the gradients of all inputs; `pull` is (x gate, x up, gradient of their product) -> (product, gradient of
    x gate, gradient of x up). `rows`: as in `by_block`."""
    matrices = {"gate": gate, "up": up, "down": down}
    if rows is None or rows >= math.prod(x.shape[:-1]):
        return _gradients(pull, d_out, x, **matrices)

    def block(
        sums: dict[str, jax.Array], blocks: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        x, d = blocks
        found = _gradients(pull, d, x, **matrices)
        return {name: sums[name] + found[name] for name in matrices}, found["x"].astype(x.dtype)

    zeros = {name: jnp.zeros_like(w, jnp.float32) for name, w in matrices.items()}
    sums, d_x = jax.lax.scan(block, zeros, (_blocks(x, rows), _blocks(d_out, rows)))
    return {"x": _joined(d_x, x), **sums}


def _gradients(
    pull: Callable, d_out: jax.Array, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> dict[str, jax.Array]:
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
