"""combine_rows in plain XLA, any device: a gather for each choice, added in order, and gathers in the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.ops.combine_rows.contract import op


def _row(rows: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the rows in some slots, in float32; 0 in slot -1."""
    return jnp.where((slot >= 0)[:, None], rows[jnp.maximum(slot, 0)].astype(jnp.float32), 0)


def forward(rows, slots, pairs, weights, total):
    def added(rows: jax.Array, slots: jax.Array, weights: Any, total: Any, after: Callable = lambda x: x) -> jax.Array:
        out = jnp.zeros((slots.shape[0], rows.shape[1]), jnp.float32) if total is None else total.astype(jnp.float32)
        for j in range(slots.shape[1]):
            row = _row(rows, slots[:, j])
            if weights is not None:  # that of a slot of none may be anything
                row *= jnp.where(slots[:, j] >= 0, weights[:, j], 0)[:, None].astype(jnp.float32)
            out, slots = after((out + row, slots))
        return out.astype(rows.dtype)

    # XLA for TPUs does not fuse a gather into a sum, so all gathers would be in memory at once; the barrier makes them wait.
    one_by_one = functools.partial(added, after=lax.optimization_barrier)
    return lax.platform_dependent(rows, slots, weights, total, tpu=one_by_one, default=added)


def backward(saved, rows, slots, pairs, weights, total):
    d, C = saved.d_out, slots.shape[1]
    pair = jnp.maximum(pairs, 0)
    d_rows = d[pair // C].astype(jnp.float32)
    if weights is not None:
        d_rows = d_rows * weights.reshape(-1)[pair][:, None].astype(jnp.float32)
    gradients = {"rows": jnp.where((pairs >= 0)[:, None], d_rows, 0).astype(rows.dtype)}
    if total is not None:
        gradients["total"] = d
    if weights is not None:
        d = d.astype(jnp.float32)
        parts = [jnp.sum(d * _row(rows, slots[:, j]), axis=1) for j in range(C)]
        gradients["weights"] = jnp.stack(parts, axis=1)
    return gradients


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"M", "tokens"},
)
