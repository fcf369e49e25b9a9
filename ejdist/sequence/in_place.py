"""A ring by kernels that add what a hop brings to what there is, in its place: no pass over memory merges it, and a hop at
which a rank has no work is an empty launch. Where a backend has no such kernels, or a call asks for more, `hops.py` has what a
hop does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import hops
from ejdist.sequence.hops import Work, is_own
from ejdist.sequence.local import Local
from kernels.engines.attention.masks import MaskInfo
from kernels.framework.dispatch import vary_alike
from kernels.framework.padding import zeroed
from kernels.ops.flash_attention import TILE, hops_of
from kernels.ops.flash_attention import op as flash

# Fields of a mask that such kernels need not compare pair by pair, or can.
_PLAIN = {"causal", "q_segment_ids", "kv_segment_ids"}
_PLACES = {"q_positions", "kv_positions"}
_KINDS = "NVIDIA H100", "NVIDIA H200"


def tile_of(device_kind: str) -> int | None:
    """Returns the tokens of a tile of such kernels on devices of a `jax.Device.device_kind`; None where there are none."""
    return TILE if device_kind.startswith(_KINDS) else None


def kernels_of(local: Local, chunk: int = 0) -> Any:
    """Returns the kernels for the hops of a call, see `hops_of`; None where there are none, or where of two tiles of different
    ranks some pairs would be in causal order and others not.

    Args:
      chunk: of so many tokens a scheme puts keys together; 0: of all of a rank's.
    """
    mask, order = local.mask, local.static.order
    extra = set(mask.used) - _PLAIN - (_PLACES if order.carried else set())
    if local.ranks == 1 or local.static.op is not flash or local.own.keys() != {"query"} or extra or not local.in_place:
        return None
    length = local.query.shape[1] * local.ranks
    run = length // order.multiple if order.in_parts else order.stripe
    arguments = {**local.own, **local.keys, **dict(local.static.options)}
    kernels = hops_of(flash.bind(**arguments, mask=masks_of(local, 1)[0]), local.static.platform, local.static.cfg)
    return None if kernels is None or math.gcd(run if mask.causal else 0, chunk) % kernels.tile else kernels


def masks_of(local: Local, hop: Any) -> tuple[MaskInfo, MaskInfo]:
    """Returns the masks of this rank's queries over the keys that are here at a hop: what is compared pair by pair, and which
    tiles meet. Of a rank's own tokens places tell causal order, and of another's whole tiles do."""
    every = local.every
    if is_own(hop):
        pairs = local.mask_of(local.holder(hop), every, every, positions=False)
        pairs = pairs.replace(q_positions=None, kv_positions=None)
        return pairs, pairs
    of_tiles = local.mask_of(local.holder(hop), every, every, positions=local.mask.causal)
    return of_tiles.replace(causal=False, q_positions=None, kv_positions=None), of_tiles


def _brought(mask: MaskInfo) -> tuple[MaskInfo, MaskInfo]:
    """Returns the masks as of `masks_of` of keys that a scheme has put together of chunks of other ranks."""
    return mask.replace(causal=False, q_positions=None, kv_positions=None), mask


def attended(
    local: Local,
    kernels: Any,
    hop: Any,
    keys: dict[str, jax.Array],
    sofar: Any,
    last: bool = False,
    masks: tuple[MaskInfo, MaskInfo] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of the keys so far, or of none where that is None, and of those that are here at a hop; out in float32
    until the last hop. Of two hops the first is rounded, as it would be by itself. masks: None for those of the hop; of keys
    that a scheme has put together, which may come in several passes."""
    if sofar is None and not is_own(hop):
        shape = (*local.query.shape[:3], local.sizes["Hv"])
        sofar = local.full(shape), local.full(shape[:3], -jnp.inf)
    rounded = last or (masks is None and len(local.hops) == 2)
    dtype = local.query.dtype if rounded else jnp.float32
    with jax.named_scope("hop"):
        results = kernels.attend(
            local.query, keys["key"], keys["value"], *(masks or masks_of(local, hop)), sofar, dtype
        )
    return vary_alike(results, local.query)


def pulled(
    local: Local,
    kernels: Any,
    saved: dict[str, jax.Array],
    hop: Any,
    keys: dict[str, jax.Array],
    own: Any,
    sums: Any,
    masks: tuple[MaskInfo, MaskInfo] | None = None,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """As `hops.pulled`; what it returns for the queries are sums, see `Hops.of_query`. masks: None for those of the hop."""
    own = local.full(local.query.shape) if own is None else own["query"]
    with jax.named_scope("hop"):
        made = kernels.pull(saved, local.query, keys["key"], keys["value"], *(masks or masks_of(local, hop)), own)
    own, d_key, d_value = vary_alike(made, local.query)
    grads = {"key": d_key, "value": d_value}
    added = grads if sums is None else {n: x + grads[n] for n, x in sums.items()}
    # Together, or the compiler sends keys on their way home beside values that have not arrived yet.
    return {"query": own}, jax.lax.optimization_barrier(added)


def attends(local: Local, kernels: Any) -> Work:
    """Returns the work of a forward, whose out has the dtype of the queries."""
    local = without_padding(local, queries=False)

    def attend(hop: Any, keys: dict[str, jax.Array], sofar: Any, travel: Any, last: bool) -> tuple[Any, Any]:
        return attended(local, kernels, hop, keys, sofar, last), travel

    def brought(placed: Any, _: Any, sofar: Any, last: bool) -> tuple[Any, None]:
        keys, mask = placed()
        return attended(local, kernels, None, keys, sofar, last, _brought(mask)), None

    return Work(local, attend, lambda stay, _: dict(zip(("out", "lse"), stay, strict=True)), brought)


def pulls(local: Local, saved: dict[str, jax.Array], kernels: Any) -> Work:
    """Returns the work of a backward, whose gradients are float32 or in the dtype of the keys."""
    local, ids = without_padding(local, queries=True), local.mask.q_segment_ids
    saved = {n: x if n == "lse" else zeroed(x, ids) for n, x in saved.items()}

    def pull(*hop: Any) -> tuple[Any, Any]:
        return pulled(local, kernels, saved, *hop[:-1])

    def brought(placed: Any, _: Any, own: Any, last: bool) -> tuple[Any, Any]:
        keys, mask = placed()
        return pulled(local, kernels, saved, None, keys, own, None, _brought(mask))

    return Work(local, pull, lambda own, sums: {"query": kernels.of_query(own["query"]), **sums}, brought)


def attending(local: Local, _: Any, chunk: int = 0) -> Work:
    """Returns the work of a forward: in place, or else by `hops.py`; `chunk` as of `kernels_of`."""
    kernels = kernels_of(local, chunk)
    return hops.attends(local) if kernels is None else attends(local, kernels)


def pulling(local: Local, saved: dict[str, jax.Array], chunk: int = 0) -> Work:
    """Returns the work of a backward: in place, or else by `hops.py`; `chunk` as of `kernels_of`."""
    kernels = kernels_of(local, chunk)
    return hops.pulls(local, saved) if kernels is None else pulls(local, saved, kernels)


def without_padding(local: Local, queries: bool) -> Local:
    """Returns it with zeros in the padding of its keys, and of its queries; once, for all hops."""
    ids = local.own_mask.kv_segment_ids
    keys = {n: zeroed(x, ids) for n, x in local.keys.items()}
    cleared = {"query": zeroed(local.query, local.mask.q_segment_ids)} if queries else local.own
    return replace(local, own=cleared, keys=keys)
