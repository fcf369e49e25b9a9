"""Attention over pages that are spread over devices, so that n of them hold requests n times as long.

Each device has a run of every request: of the columns of the tables, cut evenly, those of device r refer to pages of device r
alone. A device attends to the keys that it has. Counted from the first of them, every position is where it was, so that the
kernels see an ordinary request; its queries may be past the last key. Reductions in float32 merge the results, each of which
is rounded to the dtype of the queries before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from ejdist.execution import run
from ejdist.layout import current_layout, on_mesh
from ejdist.mesh import current_mesh
from ejdist.sharded import ShardedFunction, sharded
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.public import Prepared
from kernels.framework.requests import known
from kernels.ops.paged_attention import append_op, lse_op

Axes = dict[str, tuple[str, ...]]


def merged(out: jax.Array, lse: jax.Array, axes: tuple[str, ...], sinks: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns (out, lse) over the keys of all devices along the axes, and the sinks.

    Args:
      out, lse: [..., N, Hv] and [..., N], of this device's keys without sinks. sinks: [N, n].
    """
    largest = jax.lax.pmax(lse, axes)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
        largest = jnp.maximum(largest, jnp.max(sinks, axis=-1))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weight = jnp.exp(lse - largest)
    sums = jax.lax.psum(out.astype(jnp.float32) * weight[..., None], axes)
    total = jax.lax.psum(weight, axes)
    if sinks is not None:  # every device has them all: they are counted after the sum
        total = total + jnp.sum(jnp.exp(sinks - largest[..., None]), axis=-1)
    some = total != 0  # true for NaN too
    total = jnp.where(some, total, 1)
    return (sums / total[..., None]).astype(out.dtype), jnp.where(some, largest + jnp.log(total), -jnp.inf)


@dataclass(frozen=True)
class _OnRank:
    """What runs on a device, hashable. op: `page_attention`, or the same with its lse."""

    op: Op

    def __call__(self, axes: Axes, **arguments: Any) -> Any:
        over = axes["pages"]
        if not over:
            return self.op(**arguments)
        rank, ranks = jax.lax.axis_index(over), jax.lax.axis_size(over)
        pages, slots = arguments["key_cache"].shape[:2]
        tables, sinks = arguments["block_tables"], arguments.pop("softmax_aux", None)
        if tables.shape[1] % ranks:
            raise ValueError(
                f"page_attention: argument 'block_tables' has {tables.shape[1]} columns, which cannot be divided over the "
                f"{ranks} devices that pages are split over: make that a multiple of {ranks}"
            )
        columns = tables.shape[1] // ranks
        arguments["block_tables"] = jax.lax.dynamic_slice_in_dim(tables, rank * columns, columns, 1) - rank * pages
        lens = arguments["kv_lens"] - rank * columns * slots
        arguments["kv_lens"] = jnp.maximum(lens, 0)
        out, lse = lse_op(**arguments)
        out, lse = merged(out, lse, over, sinks)
        return (out, lse) if self.op is lse_op else out


class _OverPages(ShardedFunction):
    """`page_attention` where pages may be split."""

    def _on_mesh(self, prepared: Prepared, op: Op, **how: Any) -> Any:
        mesh = current_mesh() if how.get("mesh") is None else how["mesh"]
        if mesh is not None and how.get("in_specs") is None:
            over = on_mesh(current_layout().activations, mesh).get("pages", ())
            _check_owners(prepared.call, math.prod(mesh.shape[a] for a in over))
        return run(prepared, op, local=_OnRank(op), handles=self.handles, **how)


def _check_owners(call: Call, ranks: int) -> None:
    """Raises ValueError, of values that are known, if a device has a page of another's in its columns of the tables."""
    table, lens = known(call.block_tables), known(call.kv_lens)
    (pages, slots), width = call.key_cache.shape[:2], call.block_tables.shape[1]
    if table is None or lens is None or ranks == 1 or pages % ranks or width % ranks:
        return
    owner = np.arange(width) // (width // ranks)
    bad = (np.arange(width) * slots < lens[:, None]) & (table // (pages // ranks) != owner)
    if bad.any():
        request, column = np.argwhere(bad)[0]
        raise ValueError(
            f"page_attention: argument 'block_tables' has page {table[request, column]} in column {column} of request "
            f"{request}, but device {owner[column]} of the {ranks} that pages are split over reads that column, and has pages "
            f"{owner[column] * pages // ranks} to {(owner[column] + 1) * pages // ranks - 1}"
        )


def _append(axes: Axes, *, slots: jax.Array, **arguments: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the caches with the rows whose slots this device has; it does not write slots that are negative or past its
    last."""
    if axes["pages"]:
        pages, entries = arguments["key_cache"].shape[:2]
        slots = slots - jax.lax.axis_index(axes["pages"]) * pages * entries
    return append_op(slots=slots, **arguments)


page_attention = _OverPages(kernels.page_attention, handles=("pages",))
append_to_cache = sharded(kernels.append_to_cache, local=_append, handles=("pages",))
