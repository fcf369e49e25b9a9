"""Latent attention with the sequence split over devices: training by the ring of attention, decoding by a merge.

In training each device makes the heads of its own latents, and their keys and values travel as those of `ring_attention` do,
with the tokens in the layout's order. In decoding the cache is what is split: each device attends to its own entries, and two
reductions join them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.order import Order
from ejdist.sequence.attention import ring_attention
from ejdist.sharded import sharded
from kernels.ops.multi_latent_attention import decode_op, joined_heads, op, scale_of


def _in_a_ring(axes: dict[str, tuple[str, ...]], order: Order | None = None, **arguments: Any) -> tuple[jax.Array, ...]:
    """Returns (out, lse) of this device's queries over the latents of all devices."""
    if not axes["T"] and not axes["S"]:
        return op(**arguments)
    if axes["T"] != axes["S"]:
        raise ValueError(
            f"flash_mla: dim T of 'query' is split over {axes['T'] or 'nothing'} and dim S of 'key_value' over "
            f"{axes['S'] or 'nothing'}; split them alike"
        )
    names = ("query", "key_value", "w_kc", "w_vc", "query_rope", "key_rope")
    parts: Any = {n: arguments.get(n) for n in names}
    passed = ("logits_soft_cap", "deterministic", "platform", "cfg")
    options = {n: arguments[n] for n in passed if arguments.get(n) is not None}
    for theirs, ours in (("mask_info", "mask"), ("softmax_aux", "softmax_aux")):
        if arguments.get(ours) is not None:
            options[theirs] = arguments[ours]
    scale = scale_of(arguments.get("softmax_scale"), arguments["query"], arguments.get("query_rope"))
    heads = joined_heads(**parts)
    outputs: Any = ring_attention(
        *heads, axis_name=axes["T"], order=order, softmax_scale=scale, return_lse=True, **options
    )
    return outputs


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


flash_mla = sharded(kernels.flash_mla, local=_in_a_ring, handles=("T", "S"), follows=True)
mla_decode = sharded(kernels.mla_decode, local=_joined, handles=("S",))
