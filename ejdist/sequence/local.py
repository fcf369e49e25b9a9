"""What a rank computes by itself: the local attention of its queries over keys that it holds, and the merge of two parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.order import Order
from ejdist.sequence import exchange
from kernels.engines.attention.masks import MASK_DIMS, MaskInfo
from kernels.framework.contract import Op
from kernels.framework.dispatch import vary_alike
from kernels.ops.flash_attention import op as flash

# The fields of a mask that belong to the keys and travel with them.
_TRAVELLING = tuple(name for name, dims in MASK_DIMS.items() if "S" in dims and "T" not in dims)


def merge(out: jax.Array, lse: jax.Array, new_out: jax.Array, new_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns attention over two disjoint sets of keys from that over each: (out [..., H], lse [...]), float32.

    lse = -inf is a set in which a row sees no key; two of them give 0 and -inf.
    """
    both = jnp.logaddexp(lse, new_lse)
    anchor = jnp.where(both == -jnp.inf, 0, both)
    a, b = jnp.exp(lse - anchor), jnp.exp(new_lse - anchor)
    return out * a[..., None] + new_out.astype(jnp.float32) * b[..., None], both


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
    lse: bool = True  # False: lse has no cotangent. Code that is mapped but not compiled gets no symbolic zero for it.


@dataclass(frozen=True)
class Local:
    """A rank's part of a call. A scheme brings it keys from other ranks, and asks for the attention over those.

    Attributes:
      own: argument -> array of what does not travel: the queries, and whatever else the operation was given.
    """

    static: Static
    own: dict[str, jax.Array]
    key: jax.Array
    value: jax.Array
    mask: MaskInfo

    @property
    def query(self) -> jax.Array:
        return self.own["query"]

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
    def keys(self) -> dict[str, jax.Array]:
        """The rank's own keys and values, with the mask's fields for them."""
        extra = {n: getattr(self.mask, n) for n in _TRAVELLING if getattr(self.mask, n) is not None}
        return {"key": self.key, "value": self.value, **extra}

    def full(self, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
        """Returns a float32 array of one value, for this rank's results to join."""
        return vary_alike(jnp.full(shape, value, jnp.float32), self.query)

    def _mask_of(self, keys: dict[str, jax.Array], holders: Any) -> MaskInfo:
        changes: dict[str, Any] = {n: keys[n] for n in _TRAVELLING if n in keys}
        if "kv_positions" not in changes and self.ranks > 1:  # a whole sequence is in its natural order
            # The order alone tells where a rank's tokens are, so their positions do not travel.
            length, order = self.query.shape[1] * self.ranks, self.static.order
            changes["q_positions"] = order.positions(exchange.rank(self.axis), length)[None]
            every = jnp.arange(length, dtype=jnp.int32)
            positions = every if holders is None else order.positions(holders, length)
            changes["kv_positions"] = positions.reshape(1, -1)
        return vary_alike(self.mask.replace(**changes), self.query)

    def _over(self, function: Any, keys: dict[str, jax.Array], holders: Any) -> Any:
        mask = self._mask_of(keys, holders)
        arguments: dict[str, Any] = {**self.own, "key": keys["key"], "value": keys["value"], "mask": mask}
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
        by_rank = order.in_parts or not mask.causal
        bare = not set(mask.used) - {"causal"}
        return by_rank and bare and self.static.op is flash and self.own.keys() == {"query"}

    def _at_hop(self, hop: Any, attention: Any, nothing: Any) -> Any:
        """Returns `attention(queries, keys, causal)` of the parts of this rank's tokens, and of those that are here at a hop,
        that see each other; `nothing()` where none do."""
        length = self.query.shape[1]
        every = slice(0, length), slice(0, length)
        if isinstance(hop, int) and hop == 0:
            return attention(*every, self.mask.causal)
        if not self.mask.causal:
            return attention(*every, False)

        def of(earlier: bool) -> Any:
            parts = self.static.order.joined(earlier, length)
            return nothing() if parts is None else attention(*parts, False)

        # What the other half of the ranks does is not computed here, and need not be of one shape with it.
        return jax.lax.cond(exchange.rank(self.axis) >= hop, lambda: of(True), lambda: of(False))

    def _plainly(self, function: Any, keys: dict[str, jax.Array], queries: slice, part: slice, causal: bool) -> Any:
        arguments = {"query": self.query[:, queries], "key": keys["key"][:, part], "value": keys["value"][:, part]}
        options = dict(self.static.options)
        with jax.named_scope("hop"):
            return function(
                **arguments,
                **options,
                mask=MaskInfo(causal=causal),
                platform=self.static.platform,
                cfg=self.static.cfg,
            )

    def _whole(self, x: jax.Array, part: slice, fill: float = 0.0) -> jax.Array:
        """Returns the array over all tokens of a rank of one over a part of them."""
        before, after = part.start, self.query.shape[1] - part.stop
        pad = [(0, 0), (before, after), *((0, 0),) * (x.ndim - 2)]
        return jnp.pad(x, pad, constant_values=fill) if before or after else x

    def attend_at(self, hop: Any, keys: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of this rank's queries over the keys that are here at a hop of the ring."""
        if not self.plain:
            return self.attend(keys, self.holder(hop))

        def attention(queries: slice, part: slice, causal: bool) -> tuple[jax.Array, jax.Array]:
            out, lse = self._plainly(self.static.op, keys, queries, part, causal)
            return self._whole(out, queries), self._whole(lse, queries, -jnp.inf)

        def nothing() -> tuple[jax.Array, jax.Array]:
            shape = (*self.query.shape[:3], self.value.shape[3])
            return self.full(shape).astype(self.query.dtype), self.full(shape[:3], -jnp.inf)

        return self._at_hop(hop, attention, nothing)

    def pull_at(self, hop: Any, saved: dict[str, jax.Array], keys: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, as `pull`, over the keys that are here at a hop of the ring."""
        if not self.plain:
            return self.pull(saved, keys, self.holder(hop))

        def attention(queries: slice, part: slice, causal: bool) -> dict[str, jax.Array]:
            mine = {n: x[:, queries] for n, x in saved.items()}
            grads = self._plainly(functools.partial(self.static.op.backward, mine), keys, queries, part, causal)
            places = {"query": queries, "key": part, "value": part}
            return {n: self._whole(grads[n], place) for n, place in places.items()}

        def nothing() -> dict[str, jax.Array]:
            like = {"query": self.query, "key": self.key, "value": self.value}
            return {n: self.full(x.shape).astype(x.dtype) for n, x in like.items()}

        return self._at_hop(hop, attention, nothing)

    def in_order(self, keys: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        """Returns the keys of all ranks as `attend` and `pull` take them, of those keys in the order of the ranks: in the order
        of the sequence, in which a query sees a run of them, and kernels skip what is before and after it."""
        if "block_mask" in self.own:  # whose columns are in the order of the ranks
            return keys, jnp.arange(self.ranks)
        return {n: self.static.order.inverse(x, index=keys.get("kv_positions")) for n, x in keys.items()}, None

    def of_ranks(self, x: jax.Array) -> jax.Array:
        """Returns a gradient of the keys that `in_order` gave, in the order of the ranks."""
        if "block_mask" in self.own:
            return x
        carried = self.static.order.carried
        index = exchange.gather(self.mask.kv_positions, self.axis) if carried else None
        return self.static.order.permute(x, index=index)

    def holder(self, hop: Any) -> Any:
        """Returns the rank whose keys are here at a hop of the ring."""
        return (exchange.rank(self.axis) - hop) % self.ranks

    def attend(self, keys: dict[str, jax.Array], holders: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of this rank's queries over the keys of the ranks `holders`: a rank, or several in order, or None
        for those of all in the order of the sequence."""
        return self._over(self.static.op, keys, holders)

    def pull(self, saved: dict[str, jax.Array], keys: dict[str, jax.Array], holders: Any) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, of key, value and `own`, of this rank's queries over those keys.

        `saved` has d_out, and the lse and delta, or out, of all keys, wherever they are.
        """
        return self._over(functools.partial(self.static.op.backward, saved), keys, holders)
