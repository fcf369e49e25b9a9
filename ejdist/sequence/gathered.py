"""Attention over the keys of all ranks at once, by kernels that add in place (`in_place.py`).

A ring reads and writes what it has so far at every hop, which for short documents takes as long as attention itself, and so
does a rank that attends to its own keys before those of the others come. Here all keys come, its own among them, and each query
sees its keys in one call, whatever their order. They come in groups of heads, each beside attention of the group before, and of
the first group alone the transfer is waited for. A group of heads is a part of what a kernel goes over, so that no array of
queries is cut.

In the backward two transfers are made: of the first group, and of all others beside the first group's gradients. Those of the
keys of a group go back beside the next group's, of which no more than one transfer runs at a time on a GPU.

Sources: keys gathered by groups of heads as in ring-flash-attention's `llama3_flash_attn_varlen` (Zhu, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.sequence import exchange, hops, in_place, trips
from ejdist.sequence.local import Local
from kernels.engines.attention.masks import MaskInfo
from kernels.framework.dispatch import vary_alike
from kernels.framework.padding import zeroed
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.flash_attention import joins

Arrays = dict[str, jax.Array]
# Tiles of queries that a group of heads has at least for each multiprocessor, and in the backward of keys: with fewer, many
# wait for the last ones. A rank of four with 8,192 packed tokens takes 2.84 ms both ways on an H200 in two groups, and 3.48 in
# four, of four tiles of queries each. The backward of a rank of two with 32,768 takes 13.4 ms in four groups, of eight tiles of
# keys each, and 19.3 in eight.
_TILES = 6
# Heads of queries that a group has at least in the forward: of 32 heads on 8 of keys and 32,768 packed tokens, groups of 4
# take 4.93 ms on an H200 and groups of 8 4.60. In the backward they take 14.3 and 14.6.
_FORWARD_HEADS = 8


def groups_of(tiles: int, ranks: int, heads: int, kv_heads: int, forward: bool) -> int:
    """Returns in how many groups of heads keys come in a direction, at most the heads of keys: as many as leave each enough
    tiles. The backward has two wherever tiles of queries are enough for two: of one, nothing would come beside attention.

    Args:
      tiles: of a rank's queries, of all rows, and of its keys.
    """
    enough = _TILES * MULTIPROCESSORS
    most, of_keys = tiles * heads // enough, tiles * ranks * kv_heads // enough
    most = max(1, min(most, heads // _FORWARD_HEADS if forward else max(2, of_keys)))
    return max(n for n in range(1, min(most, kv_heads) + 1) if kv_heads % n == 0)


def check_groups(groups: int | None, kv_heads: int) -> None:
    """Raises ValueError where the heads of keys of a device cannot be cut into that many groups; names the nearest number."""
    if groups is not None and kv_heads % groups:
        raise ValueError(
            f"ring_attention: {kv_heads} heads of keys on a device cannot be gathered in {groups} groups; use "
            f"head_groups={math.gcd(kv_heads, groups)}"
        )


@dataclass(frozen=True)
class Gathered:
    """A call whose keys are gathered.

    kernels: those of the hops of a ring. groups: of heads, which are attended to one after another, of the direction.
    """

    local: Local
    kernels: Any
    groups: int

    @classmethod
    def of(cls, local: Local, groups: int | None, forward: bool) -> Gathered | None:
        """Returns that of a direction of a call; None where no kernel adds in place, and where the batch says which ranks' keys
        are needed. groups: of heads; None for as many as `groups_of`."""
        kernels = in_place.kernels_of(local) if local.needed is None else None
        sizes = local.sizes
        if kernels is None or sizes["T"] % kernels.tile or not joins(sizes["H"], sizes["Hv"]):
            return None
        batch, length, heads, _ = local.query.shape
        tiles = batch * length // kernels.tile
        return cls(local, kernels, groups or groups_of(tiles, local.ranks, heads, sizes["K"], forward))

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse); out in the dtype of the queries."""
        call = replace(self, local=in_place.without_padding(self.local, queries=False))
        query, table, mask = call.local.query, call.table(), call.mask()
        mask = _in_order(mask, table, self.kernels.tile)
        keys, done = call.gathered(0, 1, call.ids), None
        for group in range(self.groups):
            coming = call.gathered(group + 1, 1, keys)
            with jax.named_scope("hop"):
                done = self.kernels.attend(
                    query, keys, None, mask, mask, None, query.dtype, self.heads(group), table, into=done
                )
            # Behind a barrier, or the compiler sends a later group, which needs no attention, beside this one.
            keys, done = jax.lax.optimization_barrier((coming, vary_alike(done, query)))
        assert done is not None
        return done

    def backward(self, saved: Arrays) -> Arrays:
        """Returns the gradients of the queries and of the rank's own keys, float32."""
        local = in_place.without_padding(self.local, queries=True)
        saved = {n: x if n == "lse" else zeroed(x, local.mask.q_segment_ids) for n, x in saved.items()}
        call, query, each = replace(self, local=local), local.query, local.sizes["K"] // self.groups
        mask, sums = call.mask(), local.full(query.shape)
        keys = call.gathered(0, 1, call.ids)
        # Not before the forward's kernels are through: they are no reason to wait for it.
        coming = call.gathered(1, self.groups - 1, (keys, saved["lse"]))
        leaving: list[jax.Array] = []
        back: list[jax.Array] = []
        for group in range(self.groups):
            back += map(call.sent_back, leaving)
            here = max(group - 1, 0) * each, each
            with jax.named_scope("hop"):
                sums, *leaving = self.kernels.pull(saved, query, keys, None, mask, mask, sums, self.heads(group), here)
            keys, back, (sums, leaving) = jax.lax.optimization_barrier(
                (keys if group else coming, back, vary_alike((sums, leaving), query))
            )
        back += map(call.sent_back, leaving)
        # Of one rank after another, in float32. Behind a barrier: a sum that a compiler puts into the loop that cuts keys and
        # values apart takes 2.6 times as long on an H200.
        sums_of_ranks = jax.lax.optimization_barrier([x.astype(jnp.float32).sum(1) for x in back])
        total = jnp.concatenate(sums_of_ranks, 2)
        of_keys = jnp.split(total, [local.sizes["H"]], -1)
        return {"query": self.kernels.of_query(sums), **dict(zip(("key", "value"), of_keys, strict=True))}

    @property
    def ids(self) -> list[jax.Array]:
        """What is gathered of a mask. It comes before the keys, or a compiler joins both, and attention waits for all."""
        return [getattr(self.local.mask, name) for name in self.local.mask.data_fields]

    def heads(self, group: int) -> tuple[int, int]:
        """Returns the first head of the queries of a group, and how many it has."""
        count = self.local.query.shape[2] // self.groups
        return group * count, count

    def gathered(self, group: int, count: int, before: Any) -> jax.Array | None:
        """Returns the keys of all ranks with their values beside them, of `count` groups of heads from `group` on; None after
        the last group. They are sent when `before` has come."""
        if group == self.groups:
            return None
        keys, each = self.local.keys, self.local.sizes["K"] // self.groups
        some = [x[:, :, group * each : (group + count) * each] for x in (keys["key"], keys["value"])]
        joined, _ = jax.lax.optimization_barrier((jnp.concatenate(some, -1), before))
        return vary_alike(exchange.gather(joined, self.local.axis), self.local.query)

    def sent_back(self, grads: jax.Array) -> jax.Array:
        """Returns [B, ranks, T, heads of a group, numbers of a token]: what each rank has of the gradients of this rank's keys
        and values, side by side, from those of all keys. They are summed here, so that what is sent has their dtype."""
        came = exchange.all_to_all(grads, self.local.axis, split=1, join=1)
        return came.reshape(came.shape[0], self.local.ranks, -1, *came.shape[2:])

    def mask(self) -> MaskInfo:
        """Returns the mask of this rank's queries over the keys of all ranks, in their order."""
        local = self.local
        return local.mask_of(jnp.arange(local.ranks), local.every, local.every, positions=local.mask.causal)

    def table(self) -> jax.Array:
        """Returns int32 [B|1, tiles]: where each tile of the keys of all ranks lies, in the order of the text, in which a query
        sees a run of them."""
        local, tile = self.local, self.kernels.tile
        first = local.mask.kv_positions  # another order for each row
        if first is not None:
            return jnp.argsort(first[:, ::tile], axis=1).astype(jnp.int32)
        positions = local.static.order.positions(np.arange(local.ranks), local.query.shape[1] * local.ranks)
        return jnp.asarray(np.argsort(positions[:, ::tile].reshape(-1)), jnp.int32)[None]


def pulled_by_hops(local: Local, saved: Arrays) -> tuple[Arrays, Arrays]:
    """Returns (the gradient of the rank's own queries, those of the keys and values of all ranks), one hop after another."""
    length = local.query.shape[1]

    def whole(x: jax.Array) -> jax.Array:
        return local.full((x.shape[0], length * local.ranks, *x.shape[2:]))

    def pull(hop: Any, keys: Arrays, state: Any) -> tuple[Any, Any]:
        start = local.holder(hop) * length
        if state is None:
            query, parts = None, {n: whole(x) for n, x in local.keys.items()}
        else:
            query, parts = state
        query, sums = hops.pulled(local, saved, hop, keys, query, None)
        placed = jax.lax.dynamic_update_slice_in_dim
        return query, {n: placed(x, sums[n].astype(x.dtype), start, 1) for n, x in parts.items()}

    return trips.over_gathered(local, pull)


def _in_order(mask: MaskInfo, table: jax.Array, tile: int) -> MaskInfo:
    """Returns a mask of keys whose tiles lie as a table says, in its order."""

    def laid(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        tiles = x.reshape(x.shape[0], -1, tile)
        batch = max(x.shape[0], table.shape[0])
        index = jnp.broadcast_to(table, (batch, table.shape[1]))[..., None]
        return jnp.take_along_axis(jnp.broadcast_to(tiles, (batch, *tiles.shape[1:])), index, 1).reshape(batch, -1)

    return mask.replace(kv_segment_ids=laid(mask.kv_segment_ids), kv_positions=laid(mask.kv_positions))
