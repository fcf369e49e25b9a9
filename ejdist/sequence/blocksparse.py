"""Block-sparse attention whose sequence is split over a mesh axis: the ring, with the blocks that a rank's queries have.

Every rank has the whole pattern, an entry for a pair of blocks, and reads its own rows of it; keys and values travel. A hop at
which no rank has a set block is left out, where the pattern is known when the program is traced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import kernels
from ejdist.execution import run
from ejdist.order import Order
from ejdist.placement import mesh_of, resolve_axes
from ejdist.sequence import exchange
from ejdist.sequence.attention import on_shard
from ejdist.sequence.schemes import Ring
from ejdist.sequence.way import BY_MASK
from ejdist.sharded import ShardedFunction
from kernels.engines.attention.masks import MaskInfo
from kernels.framework.platforms import Unsupported
from kernels.framework.public import Prepared
from kernels.ops.blocksparse_attention import op


@dataclass(frozen=True)
class _OnShard:
    """What runs on a rank, hashable. `only`: the hops at which some rank has a set block; None: any may."""

    only: tuple[int, ...] | None

    def __call__(
        self,
        axes: dict[str, tuple[str, ...]],
        *,
        query: jax.Array,
        key: jax.Array,
        block_mask: jax.Array,
        block_size: tuple[int, int],
        mask: MaskInfo | None = None,
        platform: str | None,
        cfg: Any,
        **arguments: Any,
    ) -> tuple[jax.Array, jax.Array]:
        named = {"query": query, "key": key, "block_mask": block_mask, "block_size": block_size}
        inputs: dict[str, Any] = {**arguments, **named}
        axis, of_keys = axes["T"], axes["S"]
        ranks = math.prod(jax.lax.axis_size(a) for a in axis)
        if ranks == 1 and axis == of_keys:
            return op(**inputs, mask=mask, platform=platform, cfg=cfg)
        lengths = query.shape[1], key.shape[1]
        _check(lengths, block_size, ranks, axis, of_keys, mask)
        rows = lengths[0] // block_size[0]
        axis = axis[0] if len(axis) == 1 else axis
        inputs["block_mask"] = jax.lax.dynamic_slice_in_dim(block_mask, exchange.rank(axis) * rows, rows, 2)
        order = Order("contiguous", ranks)
        # A pattern that is known when the program is made says which hops there are, any other at run time.
        ring = Ring() if self.only is None else Ring(hops=BY_MASK)
        how: dict[str, Any] = {"axis": axis, "scheme": ring, "order": order, "platform": platform, "cfg": cfg}
        with jax.named_scope("attention"):
            return on_shard(inputs, mask, **how, op=op, only=self.only)


def _check(
    lengths: tuple[int, int], block_size: tuple[int, int], ranks: int, axis: Any, of_keys: Any, mask: Any
) -> None:
    """Raises ValueError or Unsupported for what a sequence over ranks cannot have."""
    if axis != of_keys or lengths[0] != lengths[1]:
        raise ValueError(
            f"blocksparse_attention: argument 'key' has length {lengths[1]} on each device, split over {of_keys}, and 'query' "
            f"{lengths[0]}, over {axis}: over ranks the two must be alike; split neither, or both over the same axes"
        )
    if any(lengths[0] % size for size in block_size):
        raise ValueError(
            f"blocksparse_attention: argument 'block_size' = {block_size} does not divide the {lengths[0]} tokens that each of "
            f"{ranks} ranks has: a block must lie on one rank; use blocks, or a length, for which it does"
        )
    if mask is not None and mask.attention_mask is not None:
        raise Unsupported(
            "blocksparse_attention: 'attention_mask' is as large as T x T and is not split; describe it by a MaskInfo, or by "
            "segments"
        )


def _hops(block_mask: np.ndarray, ranks: int) -> tuple[int, ...] | None:
    """Returns the hops at which some rank has a set block; None where blocks do not divide over the ranks."""
    rows, columns = block_mask.shape[2:]
    if rows % ranks or columns % ranks:
        return None
    pairs = block_mask.reshape(-1, ranks, rows // ranks, ranks, columns // ranks).any((0, 2, 4))
    rank_ids = np.arange(ranks)
    return tuple(h for h in range(ranks) if pairs[rank_ids, (rank_ids - h) % ranks].any())


class _BlockSparse(ShardedFunction):
    """The sharded function: the hops of a NumPy pattern are known before the program is traced."""

    def _on_mesh(self, prepared: Prepared, op: Any, **where: Any) -> Any:
        call = prepared.call
        mesh = mesh_of(*(where.get(n) for n in ("mesh", "in_specs", "out_specs")))
        only = None
        if mesh is not None and isinstance(call.block_mask, np.ndarray):
            axes = resolve_axes(op, call, mesh, where.get("in_specs")).get("T", ())
            only = _hops(call.block_mask, math.prod(mesh.shape[a] for a in axes))
        return run(prepared, op, local=_OnShard(only), handles=self.handles, **where)


blocksparse_attention = _BlockSparse(kernels.blocksparse_attention, handles=("T", "S"), on_rank=False)
