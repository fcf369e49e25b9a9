"""Attention over the keys of all other ranks at once, by kernels that add in place (`in_place.py`).

A ring reads and writes what it has so far at every hop, which for short documents takes as long as attention itself. Here a
rank attends to its own keys while those of the others come, and then to all of these in one call, whatever their order. They
come in groups of heads: each beside attention of the group before, and the gradients of a group go back beside that of the next
one. A group of heads is a part of what a kernel goes over, so that no array of queries is cut.

Sources: keys gathered by groups of heads as in ring-flash-attention's `llama3_flash_attn_varlen` (Zhu, 2024).
"""

from __future__ import annotations

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
from kernels.ops.flash_attention import joins

Arrays = dict[str, jax.Array]
_NOWHERE = 2**29  # after every position


@dataclass(frozen=True)
class Gathered:
    """A call whose keys are gathered.

    kernels: those of the hops of a ring. groups: of heads, which are gathered one after another.
    """

    local: Local
    kernels: Any
    groups: int

    @classmethod
    def of(cls, local: Local, groups: int) -> Gathered | None:
        """Returns that of a call, in as many groups of heads at most; None where no kernel adds in place, and where the batch
        says which ranks' keys are needed."""
        kernels = in_place.kernels_of(local) if local.needed is None else None
        sizes = local.sizes
        if kernels is None or sizes["T"] % kernels.tile or not joins(sizes["H"], sizes["Hv"]):
            return None
        heads = local.keys["key"].shape[2]
        return cls(local, kernels, max(n for n in range(1, groups + 1) if heads % n == 0))

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse); out in the dtype of the queries."""
        call = self._of(in_place.without_padding(self.local, queries=False))
        local, table = call.local, call.table()
        masks = [_in_order(mask, table, self.kernels.tile) for mask in call.masks()]
        coming = call.gathered(0, call.ids)
        state = self.kernels.attend(
            local.query, *_both(local.keys), *in_place.masks_of(local, 0), None, local.query.dtype
        )
        # Behind barriers, or the compiler sends a later group, which needs no attention, beside this one.
        keys, state = jax.lax.optimization_barrier((coming, vary_alike(state, local.query)))
        for group in range(self.groups):
            coming = call.gathered(group + 1, keys)
            with jax.named_scope("hop"):
                state = self.kernels.attend(
                    local.query, keys, None, *masks, state, local.query.dtype, self.heads(group), table
                )
            keys, state = jax.lax.optimization_barrier((coming, vary_alike(state, local.query)))
        return state

    def backward(self, saved: Arrays) -> Arrays:
        """Returns the gradients of the queries and of the rank's own keys, float32."""
        local = in_place.without_padding(self.local, queries=True)
        saved = {n: x if n == "lse" else zeroed(x, local.mask.q_segment_ids) for n, x in saved.items()}
        call, back = self._of(local), []
        masks, coming = call.masks(), call.gathered(0, call.ids)
        sums, *mine = self.kernels.pull(
            saved, local.query, *_both(local.keys), *in_place.masks_of(local, 0), local.full(local.query.shape)
        )
        keys, (sums, mine) = jax.lax.optimization_barrier((coming, vary_alike((sums, mine), local.query)))
        leaving: list[jax.Array] = []
        for group in range(self.groups):
            coming = call.gathered(group + 1, keys)
            back += map(call.sent_back, leaving)
            with jax.named_scope("hop"):
                sums, *leaving = self.kernels.pull(saved, local.query, keys, None, *masks, sums, self.heads(group))
            keys, back, (sums, leaving) = jax.lax.optimization_barrier(
                (coming, back, vary_alike((sums, leaving), local.query))
            )
        back += map(call.sent_back, leaving)
        # Of one rank after another, in float32.
        others = jnp.concatenate([x.astype(jnp.float32).sum(1) for x in back], 2)
        parts = jnp.split(others, [local.sizes["H"]], -1)
        of_keys = {n: x + part for n, x, part in zip(("key", "value"), mine, parts, strict=True)}
        return {"query": self.kernels.of_query(sums), **of_keys}

    def _of(self, local: Local) -> Gathered:
        return replace(self, local=local)

    @property
    def ids(self) -> list[jax.Array]:
        """What is gathered of a mask. It comes before the keys, or a compiler joins both, and attention waits for all."""
        return [getattr(self.local.mask, name) for name in self.local.mask.data_fields]

    def heads(self, group: int) -> tuple[int, int]:
        """Returns the first head of the queries of a group, and how many it has."""
        count = self.local.query.shape[2] // self.groups
        return group * count, count

    def keys(self, group: int) -> jax.Array:
        """Returns the rank's own keys with their values beside them, of a group of heads."""
        count = self.local.keys["key"].shape[2] // self.groups
        parts = [jax.lax.slice_in_dim(x, group * count, (group + 1) * count, axis=2) for x in _both(self.local.keys)]
        return jnp.concatenate(parts, -1)

    def gathered(self, group: int, before: Any) -> jax.Array | None:
        """Returns the keys of all ranks with their values beside them, of a group of heads, sent when what is before has come;
        None after the last group."""
        if group == self.groups:
            return None
        keys = self.keys(group)
        if before is not None:
            keys, _ = jax.lax.optimization_barrier((keys, before))
        return vary_alike(exchange.gather(keys, self.local.axis), self.local.query)

    def sent_back(self, grads: jax.Array) -> jax.Array:
        """Returns [B, ranks, T, heads of a group, numbers of a token]: what each rank has of the gradients of this rank's keys
        and values, side by side, from those of all keys. They are summed here, so that what is sent has their dtype."""
        came = exchange.all_to_all(grads, self.local.axis, split=1, join=1)
        return came.reshape(came.shape[0], self.local.ranks, -1, *came.shape[2:])

    def masks(self) -> tuple[MaskInfo, MaskInfo]:
        """Returns the masks of this rank's queries over the keys of all ranks, in their order, of which its own are left out:
        what is compared pair by pair, and which tiles meet."""
        local = self.local
        mask = local.mask_of(jnp.arange(local.ranks), local.every, local.every, positions=local.mask.causal)
        length = local.query.shape[1]
        of_rank = jnp.arange(local.ranks * length) // length == exchange.rank(local.axis)
        ids = mask.kv_segment_ids
        kept = jnp.where(of_rank, -1, jnp.zeros((1, of_rank.shape[0]), jnp.int32) if ids is None else ids)
        asked = jnp.zeros((1, length), jnp.int32) if ids is None else mask.q_segment_ids
        of_tiles = mask.replace(q_segment_ids=asked, kv_segment_ids=kept)
        pairs = (mask if ids is None else of_tiles).replace(causal=False, q_positions=None, kv_positions=None)
        return vary_alike((pairs, of_tiles), local.query)

    def table(self) -> jax.Array:
        """Returns int32 [B|1, tiles]: where each tile of the keys of all ranks lies, in the order of the text, in which a query
        sees a run of them; this rank's own are last."""
        local, tile = self.local, self.kernels.tile
        count = local.query.shape[1] // tile
        if local.mask.kv_positions is not None:  # another order for each row
            first = local.mask.kv_positions[:, ::tile]
            of_rank = jnp.arange(first.shape[1]) // count == exchange.rank(local.axis)
            return jnp.argsort(jnp.where(of_rank, _NOWHERE, first), axis=1).astype(jnp.int32)
        order = local.static.order
        first = order.positions(np.arange(local.ranks), local.query.shape[1] * local.ranks)[:, ::tile].reshape(-1)
        in_text = np.argsort(first)
        of_ranks = [np.argsort(in_text // count == rank, kind="stable") for rank in range(local.ranks)]
        return jnp.asarray(in_text[np.stack(of_ranks)], jnp.int32)[exchange.rank(local.axis)][None]


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


def _both(keys: Arrays) -> tuple[jax.Array, jax.Array]:
    return keys["key"], keys["value"]


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
