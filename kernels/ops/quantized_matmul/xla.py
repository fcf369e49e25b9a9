"""A product with quantised weights in plain XLA, any device: one tile of D at a time, which bounds what is unpacked."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from kernels.engines.matmul.dot import dot
from kernels.engines.matmul.formats import RUN, dequantized
from kernels.ops.quantized_matmul.contract import op

TILE = 1 << 20  # maximum number of weights unpacked at once, unless a group has more


def tile_of(D: int, F: int, group_size: int) -> int:
    """Returns the entries of D per tile: whole groups and whole words, and a divisor of D."""
    unit = math.lcm(group_size, RUN)
    most = max(1, min(D, TILE // F) // unit)
    return unit * next(n for n in range(most, 0, -1) if D // unit % n == 0)


def _over_tiles(body, start, D, w, scales, biases, dtype, **how):
    """Returns the carry after running body(first entry of D, weights of the tile, carry) on each tile."""
    tile = tile_of(D, w.shape[-1], how["group_size"])
    tiles = D // tile

    def part(x, i):
        return x.reshape(tiles, -1, x.shape[-1])[i]

    def step(i, carry):
        bias = None if biases is None else part(biases, i)
        return body(i * tile, dequantized(part(w, i), part(scales, i), bias, **how).astype(dtype), carry)

    return lax.fori_loop(0, tiles, step, start)


def forward(x, w, scales, biases, mode, bits, group_size):
    def step(first, weights, out):
        part = lax.dynamic_slice_in_dim(x, first, weights.shape[0], x.ndim - 1)
        return out + dot("...d,df->...f", part, weights)

    start = jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32)
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    return _over_tiles(step, start, x.shape[-1], w, scales, biases, x.dtype, **how).astype(x.dtype)


def backward(saved, x, w, scales, biases, mode, bits, group_size):
    d_out = saved.d_out.astype(x.dtype)

    def step(first, weights, dx):
        part = dot("...f,df->...d", d_out, weights).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(dx, part, first, x.ndim - 1)

    how = {"mode": mode, "bits": bits, "group_size": group_size}
    dx = _over_tiles(step, jnp.zeros(x.shape, x.dtype), x.shape[-1], w, scales, biases, x.dtype, **how)
    return {"x": dx}


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"lead"},
)
