"""Rows of groups in blocks, on TPUs: a block is visited once for each group that has rows in it, in the order of the rows.

The group and the block of rows of each visit are prefetched as scalars, as in megablox, so that blocks of rows and matrices are
loaded ahead. There are at most as many visits as blocks plus groups; unused ones fetch and do nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


class Visits(NamedTuple):
    """For each visit: the matrix (-1: zero rows), the block of rows, the first row of its group and one past its last;
    and the number of visits."""

    expert: jax.Array
    block: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def visits_of(begin: jax.Array, end: jax.Array, rows: int, block_m: int, every_matrix: bool) -> Visits:
    """Returns the visits of every row or, with `every_matrix`, of the rows of groups, with one for each empty group, given the
    first row of each group and one past its last, int32 [E] each."""
    expert = jnp.arange(begin.shape[0], dtype=jnp.int32)
    if not every_matrix:
        edge = jnp.int32([0]), begin[:1], end[-1:], jnp.int32([rows])
        begin, end = jnp.concatenate([edge[0], begin, edge[2]]), jnp.concatenate([edge[1], end, edge[3]])
        expert = jnp.pad(expert, 1, constant_values=-1)
    first = jnp.minimum(begin, rows - 1) // block_m
    blocks = jnp.where(begin < end, (end - 1) // block_m - first + 1, int(every_matrix))
    after = jnp.cumsum(blocks)
    most = pl.cdiv(rows, block_m) + expert.shape[0]
    visit = jnp.minimum(jnp.arange(most, dtype=jnp.int32), after[-1] - 1)
    of = jnp.searchsorted(after, visit, side="right").astype(jnp.int32)
    block = first[of] + visit - (after - blocks)[of]
    return Visits(expert[of], block.astype(jnp.int32), begin[of], end[of], after[-1:].astype(jnp.int32))


def put_rows(visits: Visits, v: Any, out_refs: Any, results: Any) -> None:
    """Writes a visit's rows of the results, float32, and keeps what earlier visits wrote to its block. In a kernel, of which
    `visits` are the prefetched references."""
    expert, block, begin, end, _ = visits
    rows = lax.broadcasted_iota(jnp.int32, results[0].shape, 0) + block[v] * results[0].shape[0]
    end_of_mine = jnp.where(expert[v] < 0, 0, end[v])
    mine = (rows >= begin[v]) & (rows < end_of_mine)
    fresh = (v == 0) | (block[v] != block[jnp.maximum(v, 1) - 1])  # the first visit has nothing to keep
    keep = rows >= jnp.where(fresh, jnp.iinfo(jnp.int32).max, 0)
    for out_ref, y in zip(out_refs, results, strict=True):
        before = jnp.where(keep, out_ref[...].astype(jnp.float32), 0.0)
        out_ref[...] = jnp.where(mine, y, before).astype(out_ref.dtype)
