"""mean_pooling in plain XLA: a masked sum, or for several segments a tree of sums. Bitwise reproducible, in O(T D).

A scatter-add would be shorter, but adds in arbitrary order on GPUs; a matmul with a one-hot matrix costs O(T D) for
each segment, and spreads NaN from one to all.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels.ops.mean_pooling.contract import op

# Rows summed per step of the tree. A segment's last block is partial, which costs up to that many rows.
BLOCK = 16


def _tree(x, ids, num_segments):
    """Returns the sums [num_segments, D] of one row x [T, D].

    Each step replaces the contiguous rows of a segment by the sums of blocks of them, until there is at most one.
    """
    longest = x.shape[0]
    inside = (ids >= 0) & (ids < num_segments)
    key = jnp.where(inside, ids, num_segments)
    order = jnp.argsort(key, stable=True)  # makes the tokens of a segment contiguous
    edges = jnp.searchsorted(key[order], jnp.arange(num_segments + 1))
    first, count = edges[:-1], jnp.diff(edges)
    while True:
        blocks = -(-count // BLOCK)
        ends = jnp.cumsum(blocks)
        block = jnp.arange(x.shape[0] // BLOCK + num_segments)  # an upper bound on the number of blocks
        segment = jnp.minimum(jnp.searchsorted(ends, block, side="right"), num_segments - 1)
        skip = (block - (ends - blocks)[segment])[:, None] * BLOCK + jnp.arange(BLOCK)
        rows = (first[segment][:, None] + skip).clip(0, x.shape[0] - 1)
        rows = rows if order is None else order[rows]
        x = jnp.sum(jnp.where((skip < count[segment][:, None])[..., None], x[rows].astype(jnp.float32), 0), axis=1)
        first, count, order = ends - blocks, blocks, None
        longest = -(-longest // BLOCK)
        if longest == 1:
            break
    return jnp.where((count > 0)[:, None], x[first.clip(0, x.shape[0] - 1)], 0)


def forward(x, segment_ids, num_segments):
    if num_segments == 1:
        in_segment = (segment_ids == 0)[..., None]
        return jnp.sum(jnp.where(in_segment, x.astype(jnp.float32), 0), axis=1, keepdims=True)
    return jax.vmap(functools.partial(_tree, num_segments=num_segments))(x, segment_ids)


def backward(saved, x, segment_ids, num_segments):
    inside = (segment_ids >= 0) & (segment_ids < num_segments)
    d_x = saved.d_total
    if num_segments > 1:
        d_x = jnp.take_along_axis(d_x, segment_ids.clip(0, num_segments - 1)[..., None], axis=1)
    return {"x": jnp.where(inside[..., None], d_x, 0).astype(x.dtype)}


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"B"},
)
