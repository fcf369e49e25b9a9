"""What a rank computes by itself: the local attention of its queries over keys that it holds, and the merge of two parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from ejdist.sequence.order import Order
from kernels._core.contract import Op
from kernels._core.dispatch import vary_alike
from kernels._core.masks import MaskInfo
from kernels.ops.flash_attention import op as flash

# What of a mask belongs to the keys, and goes where they go.
_TRAVELLING = ("kv_segment_ids", "kv_positions")


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
    scheme: Any  # a `Scheme` of schemes.py, which is made of what stands here
    order: Order
    hops: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    platform: str | None
    cfg: Any
    op: Op = flash  # the local attention: it has lse as an output, and a backward that takes lse and delta


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
        """The rank's own keys and values, with what of the mask belongs to them."""
        extra = {n: getattr(self.mask, n) for n in _TRAVELLING if getattr(self.mask, n) is not None}
        return {"key": self.key, "value": self.value, **extra}

    def full(self, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
        """Returns a float32 array of one value, for this rank's results to join."""
        return vary_alike(jnp.full(shape, value, jnp.float32), self.query)

    def _mask_of(self, keys: dict[str, jax.Array], holders: Any) -> MaskInfo:
        changes: dict[str, Any] = {n: keys[n] for n in _TRAVELLING if n in keys}
        if "kv_positions" not in changes:
            # The order alone tells where a rank's tokens are, so their positions do not travel.
            length, order = self.query.shape[1] * self.ranks, self.static.order
            changes["q_positions"] = order.positions(exchange.rank(self.axis), length)[None]
            changes["kv_positions"] = order.positions(holders, length).reshape(1, -1)
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

    def attend(self, keys: dict[str, jax.Array], holders: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (out, lse) of this rank's queries over the keys of the ranks `holders`: a rank, or several in order."""
        return self._over(self.static.op, keys, holders)

    def pull(self, saved: dict[str, jax.Array], keys: dict[str, jax.Array], holders: Any) -> dict[str, jax.Array]:
        """Returns the gradients by argument name, of key, value and `own`, of this rank's queries over those keys.

        `saved` has d_out, and the lse and delta of all keys, wherever they are.
        """
        return self._over(functools.partial(self.static.op.backward, saved), keys, holders)
