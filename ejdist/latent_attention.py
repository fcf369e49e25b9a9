"""Latent attention with the sequence split over devices: training by a scheme of the sequence, decoding by a merge.

In training latents travel, and each device makes the keys and values of its own heads where they arrive; or it makes those of
its own tokens, and they travel as those of `ring_attention` do: `sequence/latents.py` says when. The tokens are in the layout's
order. In decoding the cache is what is split: each device attends to its own entries, and two reductions join them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.attention import on_shard, ring_attention
from ejdist.sequence.cost import attention_shape
from ejdist.sequence.halo import reach_of
from ejdist.sequence.latents import sends_latents
from ejdist.sequence.scheme import Scheme
from ejdist.sequence.schemes import Ring
from ejdist.sharded import ShardedFunction, sharded
from ejdist.tokens import resolve_order
from kernels.framework.platforms import Unsupported
from kernels.ops.multi_latent_attention import decode_op, joined_heads, op, scale_of


@dataclass(frozen=True)
class _OnRanks:
    """What runs on a device, hashable: (out, lse) of its queries over the latents of all devices. scheme: what travels, and
    when."""

    scheme: Scheme

    def __call__(
        self, axes: dict[str, tuple[str, ...]], order: Order | None = None, **arguments: Any
    ) -> tuple[jax.Array, ...]:
        if not axes["T"] and not axes["S"]:
            return op(**arguments)
        if axes["T"] != axes["S"]:
            raise ValueError(
                f"flash_mla: dim T of 'query' is split over {axes['T'] or 'nothing'} and dim S of 'key_value' over "
                f"{axes['S'] or 'nothing'}; split them alike"
            )
        names, mask = axes["T"], arguments.pop("mask", None)
        if mask is not None and mask.attention_mask is not None:
            raise Unsupported(
                "flash_mla: 'attention_mask' is as large as T x T and is not split; describe it by a MaskInfo, or by segments"
            )
        call = op.bind(**{n: x for n, x in arguments.items() if n not in ("platform", "cfg")})
        shape = attention_shape(
            tuple((a, exchange.size(a)) for a in names),
            call.dims,
            arguments["query"].dtype.itemsize,
            exchange.size(names) - 1,
        )
        if not sends_latents(self.scheme, shape):
            return _of_heads(self.scheme, names, order, mask, **arguments)
        axis, ranks = names[0] if len(names) == 1 else names, shape.ranks
        platform, cfg = arguments.pop("platform"), arguments.pop("cfg")
        how: dict[str, Any] = {"axis": axis, "scheme": self.scheme, "platform": platform, "cfg": cfg, "op": op}
        how["order"] = resolve_order(op.name, ranks, f"the sequence over {axis!r}", order)
        how["reach"] = reach_of(mask, call.dims["T"] * ranks)
        with jax.named_scope("attention"):
            return on_shard(arguments, mask, **how)


def _of_heads(scheme: Scheme, axis: tuple[str, ...], order: Order | None, mask: Any, **arguments: Any) -> Any:
    """Returns (out, lse) where keys and values travel."""
    parts: Any = {n: arguments.get(n) for n in ("query", "key_value", "w_kc", "w_vc", "query_rope", "key_rope")}
    passed = ("logits_soft_cap", "deterministic", "platform", "cfg", "softmax_aux")
    options = {n: arguments[n] for n in passed if arguments.get(n) is not None}
    options |= {} if mask is None else {"mask_info": mask}
    scale = scale_of(arguments.get("softmax_scale"), arguments["query"], arguments.get("query_rope"))
    where = {"axis_name": axis, "scheme": scheme, "order": order}
    return ring_attention(*joined_heads(**parts), **where, softmax_scale=scale, return_lse=True, **options)


def _joined(axes: dict[str, tuple[str, ...]], *, kv_lens: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns (out, lse) over the entries of all devices."""
    over = axes["S"]
    if not over:
        return decode_op(kv_lens=kv_lens, **arguments)
    # Counted from the first entry that this device has, everything is where it was.
    length = arguments["kv_cache"].shape[1]
    out, lse = decode_op(kv_lens=kv_lens - jax.lax.axis_index(over) * length, **arguments)
    largest = jax.lax.pmax(jax.lax.stop_gradient(lse), over)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weight = jnp.exp(lse - largest)
    total = jax.lax.psum(weight, over)
    some = total > 0
    sums = jax.lax.psum(out.astype(jnp.float32) * weight[..., None], over)
    lse = jnp.where(some, largest + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return (sums / jnp.where(some, total, 1)[..., None]).astype(out.dtype), lse


def over_ranks(scheme: Scheme) -> ShardedFunction:
    """Returns `flash_mla` on sharded arrays, by a scheme of the sequence."""
    return sharded(kernels.flash_mla, local=_OnRanks(scheme), handles=("T", "S"), follows=True)


flash_mla = over_ranks(Ring())
mla_decode = sharded(kernels.mla_decode, local=_joined, handles=("S",))
