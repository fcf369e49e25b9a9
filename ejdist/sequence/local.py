"""What a rank computes by itself: the local attention of its queries over keys that it holds, and the merge of two parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.schedule import needed, run_length
from kernels.engines.attention.masks import MASK_DIMS, MaskInfo, map_data
from kernels.engines.attention.tiles import active_tiles
from kernels.framework import padding
from kernels.framework.contract import Op
from kernels.framework.dispatch import vary_alike
from kernels.ops.flash_attention import op as flash
from kernels.ops.multi_latent_attention import op as flash_mla

# Arguments of flash attention that no kernel has to compare positions for.
_BARE = {"query", "query_rope", "w_kc", "w_vc"}
# The fields of a mask that belong to the keys. They do not travel with them: every rank has those of all.
KEY_FIELDS = tuple(name for name, dims in MASK_DIMS.items() if "S" in dims and "T" not in dims)


@dataclass(frozen=True)
class Static:
    """The static part of a call: hashable."""

    axis: exchange.Axis
    scheme: Any  # a `Scheme` of schemes.py, which builds on this file
    order: Order
    hops: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    platform: str | None
    cfg: Any
    op: Op = flash  # the local attention: it has lse as an output, and a backward that takes lse and delta
    reach: int | None = None  # how many tokens before its own a query sees at most, by the rules; None: any
    lse: bool = True  # False: lse has no cotangent. Code that is mapped but not compiled gets no symbolic zero for it.


def apart(op: Op, arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (the arguments that stay on a rank, those that travel), without sinks, see `Scheme.takes_sinks`. What travels has
    an entry for each key by the contract of the operation."""
    keys = {n: arrays[n] for n, p in op.parameters.items() if n in arrays and any(d.name == "S" for d in p.dims)}
    return {n: x for n, x in arrays.items() if n not in keys and n != "softmax_aux"}, keys


def of_all_ranks(mask: MaskInfo, order: Order, axis: exchange.Axis, every: bool = True) -> tuple[MaskInfo, MaskInfo]:
    """Returns two masks of this rank's queries, over the keys of all ranks, in the order of the ranks, and over its own, from
    one over its own; without `every` the first is the second. What is counted from the start of a segment is counted over
    the whole sequence."""
    names = [n for n in KEY_FIELDS if getattr(mask, n) is not None]
    counts = mask.q_segment_ids is not None and mask.counts_in_segments
    if not names or not (counts or every):
        return mask, mask
    length = getattr(mask, names[0]).shape[1]
    names += ["q_segment_ids"] if counts else []
    whole = mask.replace(**exchange.gather({n: getattr(mask, n) for n in names}, axis))
    if not counts:
        return whole, mask
    whole = whole.resolved(order.indices(length * order.shards))
    start = exchange.rank(axis) * length
    # What was gathered of the queries, and what was counted over the whole.
    names = {*names, *whole.data_fields} - ({*mask.data_fields} - {*names})
    own = whole.replace(**{n: jax.lax.dynamic_slice_in_dim(getattr(whole, n), start, length, 1) for n in names})
    return own.replace(**{n: getattr(whole, n) for n in KEY_FIELDS}), own


def work_of(static: Static, length: int, mask: MaskInfo, blocks: jax.Array | None = None) -> jax.Array | None:
    """Returns bool [ranks]: whether any of this rank's queries may see a key of each rank; None where every rank sees some at
    every hop that is made.

    By the rules alone where no array says more; else by the least and the greatest of every run of tokens.

    Args:
      length: of a rank's queries. blocks: their `block_mask`.
    """
    order = static.order
    n, rank = order.shards, exchange.rank(static.axis)
    whole, ranks = length * n, np.arange(n)
    if n == 1:
        return None
    if mask.rules_are_static and mask.q_segment_ids is None:
        table = needed(order, whole, mask)
        if blocks is None and all(table[ranks, (ranks - hop) % n].all() for hop in static.hops):
            return None
        seen = jnp.asarray(table)[rank]
    else:
        if mask.q_positions is None:
            of_all = order.positions(jnp.arange(n), whole)  # no constant of the length of the sequence
            at = {"q_positions": order.positions(rank, whole)[None], "kv_positions": of_all.reshape(1, -1)}
            mask = mask.replace(**at)
        run = run_length(order, whole)
        tiles = active_tiles(vary_alike(mask, rank).key_range(length, whole), run, run)
        seen = tiles.reshape(length // run, n, length // run).any((0, 2))
    if blocks is not None:
        seen &= blocks.reshape(*blocks.shape[:3], n, -1).any((0, 1, 2, 4))
    return seen


@dataclass(frozen=True)
class Local:
    """A rank's part of a call. A scheme brings it keys from other ranks, and asks for the attention over those.

    Attributes:
      own: argument -> array of what does not travel: the queries, and whatever else the operation was given.
      keys: argument -> array of what does: the rank's own keys and values, or the latents that the operation makes them of.
      mask: of this rank's queries over the keys of all ranks, in the order of the ranks. own_mask: over the rank's own.
      work: bool [ranks], whether any of this rank's queries may see a key of each rank; None: of each.
      needed: bool [ranks], at which hops any rank may, the same on all; None: at each of `hops`.
    """

    static: Static
    own: dict[str, jax.Array]
    keys: dict[str, jax.Array]
    mask: MaskInfo
    own_mask: MaskInfo
    work: jax.Array | None = None
    needed: jax.Array | None = None
    in_place: ClassVar[bool] = True  # whether kernels may add to what there is, see `in_place.py`

    @property
    def query(self) -> jax.Array:
        return self.own["query"]

    @property
    def travelling(self) -> dict[str, jax.Array]:
        """What a ring passes on: the keys, to which a subclass may add."""
        return self.keys

    @property
    def axis(self) -> exchange.Axis:
        return self.static.axis

    @property
    def ranks(self) -> int:
        """How many ranks the sequence is split over."""
        return self.static.order.shards

    @property
    def hops(self) -> tuple[int, ...]:
        """How many ranks back there are keys that some rank needs, ascending; 0 is the rank's own."""
        return self.static.hops

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim that the operation names, on this rank."""
        arrays, parameters = {**self.own, **self.keys}, self.static.op.parameters
        dims = {n: parameters[n].dims for n in arrays}
        named = [(d, size) for n, x in arrays.items() if len(dims[n]) == x.ndim for d, size in zip(dims[n], x.shape)]
        return {d.name: size for d, size in named if d.name and not d.broadcast}

    def has_rows(self, name: str) -> bool:
        """Whether an argument has an entry for each of the rank's queries, [B, T, ...]."""
        dims = self.static.op.parameters[name].dims
        return len(dims) > 1 and dims[1].name == "T"

    def full(self, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
        """Returns a float32 array of one value, for this rank's results to join."""
        return vary_alike(jnp.full(shape, value, jnp.float32), self.query)

    @property
    def every(self) -> slice:
        """All tokens of a rank."""
        return slice(0, self.query.shape[1])

    def mask_of(self, holders: Any, queries: slice, part: slice, positions: bool = True) -> MaskInfo:
        """Returns the mask of some of this rank's queries over a part of the keys of a rank, or over all of several ranks',
        with or without their positions."""
        order, tokens = self.static.order, self.query.shape[1]
        length = tokens * self.ranks

        def of_keys(x: jax.Array) -> jax.Array:
            if holders is None:
                return order.inverse(x, index=self.mask.kv_positions)
            if jnp.ndim(holders):
                return x
            return jax.lax.dynamic_slice_in_dim(x, holders * tokens + part.start, part.stop - part.start, 1)

        def of_field(name: str, x: jax.Array) -> jax.Array:
            return of_keys(x) if name in KEY_FIELDS else x[:, queries] if "T" in MASK_DIMS[name] else x

        mask = map_data(self.mask, of_field)
        assert mask is not None
        if positions and mask.kv_positions is None and self.ranks > 1:  # a whole sequence is in its natural order
            # The order alone says where a rank's tokens are.
            every = jnp.arange(length, dtype=jnp.int32)
            of_keys_at = every if holders is None else order.positions(holders, length)[..., part]
            q_positions = order.positions(exchange.rank(self.axis), length)[None, queries]
            mask = mask.replace(q_positions=q_positions, kv_positions=of_keys_at.reshape(1, -1))
        return vary_alike(mask, self.query)

    def _over(
        self, function: Any, keys: dict[str, jax.Array], mask: MaskInfo, holders: Any, queries: slice, part: slice
    ) -> Any:
        own = {n: x[:, queries] if self.has_rows(n) else x for n, x in self.own.items()}
        arguments: dict[str, Any] = {**own, **{n: keys[n][:, part] for n in self.keys}, "mask": mask}
        if "block_mask" in arguments:  # its rows are this rank's; its columns are of the keys of all ranks
            blocks = arguments["block_mask"]
            blocks = blocks.reshape(*blocks.shape[:3], self.ranks, -1)[..., holders, :]
            arguments["block_mask"] = blocks.reshape(*blocks.shape[:3], -1)
        with jax.named_scope("hop"):
            return function(
                **arguments, **dict(self.static.options), platform=self.static.platform, cfg=self.static.cfg
            )

    @property
    def plain(self) -> bool:
        """Whether what a rank sees of another's keys follows from the two ranks alone: all of some part of them, or none. Then
        no positions are compared, and the operation is asked for whole blocks of pairs, which every backend has."""
        mask, order = self.mask, self.static.order
        bare = not set(mask.used) - {"causal"}
        return (order.in_parts or not mask.causal) and bare and self.is_flash and self.own.keys() <= _BARE

    def needs_positions(self, is_own: bool) -> bool:
        """Whether positions are compared at a hop, over a rank's own keys or another's. Not where only causality and segments
        count: a rank's tokens ascend, as their places do, and of another's keys `at_hop` asks for parts that lie before all of
        the queries. The gradient's kernel for Hopper has no registers for positions and segments of a block beside its sums: it
        spills inside its loop."""
        mask, joined = self.mask, is_own or self.static.order.in_parts
        bare = not set(mask.used) - {"causal", "q_segment_ids", "kv_segment_ids"}
        return not ((joined or not mask.causal) and bare and self.is_flash and self.own.keys() <= _BARE)

    @property
    def reads_out(self) -> bool:
        """Whether a backward may read the output: cuDNN's alone does, of calls without positions or segments. A loop over hops
        would hold it for nothing."""
        return self.static.op is not flash or self.ranks == 1 or (self.plain and not exchange.on_torus())

    @property
    def is_flash(self) -> bool:
        """Whether this rank computes flash attention, of keys or of latents, not another operation."""
        return self.static.op in (flash, flash_mla)

    def at_hop(self, hop: Any, work: Callable[[slice, slice], Any], keep: Callable[[], Any]) -> Any:
        """Returns `work(queries, keys)` of the parts of this rank's tokens, and of those that are here at a hop, that see each
        other; `keep()` where none do. Nothing may communicate in either: ranks choose at run time."""
        if isinstance(hop, int) and hop == 0:
            return work(self.every, self.every)
        mask, order, index = self.mask, self.static.order, 0
        ways: list[Callable[[], Any]] = [functools.partial(work, self.every, self.every)]
        if mask.causal and order.in_parts and mask.rules_are_static and self.is_flash:
            parts = [order.joined(earlier, self.query.shape[1]) for earlier in (True, False)]
            ways = [functools.partial(work, *two) for two in parts if two is not None]
            if len(ways) > 1:
                index = jnp.where(exchange.rank(self.axis) >= hop, 0, 1)
        if self.work is not None:
            index = jnp.where(self.work[self.holder(hop)], index, len(ways))
            ways.append(keep)
        # What ranks do not share is not computed on all of them, and need not be of one shape.
        return ways[0]() if len(ways) == 1 else jax.lax.switch(index, ways)

    def _of_hop(self, function: Any, hop: Any, keys: dict[str, jax.Array], queries: slice, part: slice) -> Any:
        holder = self.holder(hop)
        is_own = isinstance(hop, int) and hop == 0
        if self.plain:
            mask = MaskInfo(causal=self.mask.causal and is_own)
        elif self.needs_positions(is_own):
            mask = self.mask_of(holder, queries, part)
        else:
            mask = self.mask_of(holder, queries, part, positions=False).replace(causal=self.mask.causal and is_own)
        return self._over(function, keys, mask, holder, queries, part)

    def attend_at(
        self, hop: Any, keys: dict[str, jax.Array], queries: slice, part: slice
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of some of this rank's queries over a part of the keys that are here at a hop of the ring: those
        that `at_hop` names."""
        return self._of_hop(self.static.op, hop, keys, queries, part)

    def pull_at(
        self, hop: Any, saved: dict[str, jax.Array], keys: dict[str, jax.Array], queries: slice, part: slice
    ) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, as `pull`, of some of this rank's queries over a part of the keys that are
        here at a hop of the ring."""
        mine = {n: x[:, queries] for n, x in saved.items()}
        return self._of_hop(functools.partial(self.static.op.backward, mine), hop, keys, queries, part)

    def in_order(self, keys: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        """Returns the keys of all ranks as `attend` and `pull` take them, of those keys in the order of the ranks: in the order
        of the sequence, in which a query sees a run of them, and kernels skip what is before and after it."""
        if "block_mask" in self.own:  # whose columns are in the order of the ranks
            return keys, jnp.arange(self.ranks)
        return {n: self.static.order.inverse(x, index=self.mask.kv_positions) for n, x in keys.items()}, None

    def of_ranks(self, x: jax.Array) -> jax.Array:
        """Returns a gradient of the keys that `in_order` gave, in the order of the ranks."""
        if "block_mask" in self.own:
            return x
        return self.static.order.permute(x, index=self.mask.kv_positions)

    def holder(self, hop: Any) -> Any:
        """Returns the rank whose keys are here at a hop of the ring."""
        return (exchange.rank(self.axis) - hop) % self.ranks

    def attend(self, keys: dict[str, jax.Array], holders: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of this rank's queries over the keys of the ranks `holders`, several in order, or None for those
        of all in the order of the sequence."""
        return self._over_all(self.static.op, keys, holders)

    def pull(self, saved: dict[str, jax.Array], keys: dict[str, jax.Array], holders: Any) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, of key, value and `own`, of this rank's queries over those keys.

        `saved` has d_out, and the lse and delta, or out, of all keys, wherever they are.
        """
        return self._over_all(functools.partial(self.static.op.backward, saved), keys, holders)

    def attend_to(self, keys: dict[str, jax.Array], mask: MaskInfo) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of this rank's queries over keys that a scheme has put together, with the mask of these."""
        return self._over(self.static.op, keys, vary_alike(mask, self.query), None, self.every, _all(keys))

    def pull_from(
        self, saved: dict[str, jax.Array], keys: dict[str, jax.Array], mask: MaskInfo
    ) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, of those keys and of `own`."""
        function = functools.partial(self.static.op.backward, saved)
        return self._over(function, keys, vary_alike(mask, self.query), None, self.every, _all(keys))

    def _over_all(self, function: Any, keys: dict[str, jax.Array], holders: Any) -> Any:
        mask = self.mask_of(holders, self.every, self.every)
        return self._over(function, keys, mask, holders, self.every, _all(keys))


def without_padding(local: Local, saved: dict[str, jax.Array] | None = None) -> tuple[Local, dict[str, jax.Array]]:
    """Returns a call, and what is `saved` for its backward, with zeros in padding, once for all hops; None: of a forward."""
    op, mask = local.static.op, local.mask.replace(padded_by_zeros=True)
    arguments = {**local.own, **local.keys, "mask": local.own_mask}
    saved, arguments = (
        ({}, padding.of_forward(op, arguments)) if saved is None else padding.of_backward(op, saved, arguments)
    )
    own, keys = ({n: arguments[n] for n in names} for names in (local.own, local.keys))
    return replace(local, own=own, keys=keys, mask=mask), saved


def _all(keys: dict[str, jax.Array]) -> slice:
    return slice(0, next(iter(keys.values())).shape[1])


def needed_of(local: Local) -> jax.Array | None:
    """Returns bool [ranks]: which hops some rank of the whole mesh needs for this batch, the same on every device; None where
    the rules of the mask say it all."""
    mask = local.mask
    by_rules = mask.rules_are_static and mask.q_segment_ids is None and "block_mask" not in local.own
    if local.work is None or by_rules or len(local.hops) == 1:
        return None
    holders = local.holder(jnp.arange(local.ranks))
    return exchange.greatest(local.work[holders].astype(jnp.int32)) > 0
