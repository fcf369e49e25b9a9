"""Ring attention: exact attention whose sequence is split over a mesh axis, forward and backward.

Each hop calls the local flash attention for its (out, lse), and one merge joins them in float32. The backward calls the
local backward with the *global* lse and delta, so it computes no attention again, and dK, dV travel with K, V.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.mesh import SP, axis_is_bound, check_axis
from ejdist.sequence import exchange
from ejdist.sequence.order import Order, order_of
from ejdist.sequence.schedule import hops as hops_of
from ejdist.sharded import mesh_of, resolve_axes, run
from kernels._core.public import Prepared, module_class
from kernels._core.config import KernelConfig
from kernels._core.platforms import Unsupported
from kernels._core.masks import MaskInfo
from kernels.ops.flash_attention import flash_attention as _flash
from kernels.ops.flash_attention import op as flash

SCHEMES = ("ring", "all_gather")
# What each rank has of its own, and what travels with the keys.
_TRAVELLING = ("kv_segment_ids", "kv_positions")


def merge(out: jax.Array, lse: jax.Array, new_out: jax.Array, new_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns attention over two disjoint sets of keys from that over each: (out [..., H], lse [...]), float32.

    lse = -inf is a set in which a row sees no key; two of them give 0 and -inf.
    """
    both = jnp.logaddexp(lse, new_lse)
    anchor = jnp.where(both == -jnp.inf, 0, both)
    a, b = jnp.exp(lse - anchor), jnp.exp(new_lse - anchor)
    return out * a[..., None] + new_out.astype(jnp.float32) * b[..., None], both


class _Plan(NamedTuple):
    """The static part of a ring: hashable."""

    axis_name: str
    scheme: str
    order: Order
    hops: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    platform: str | None
    cfg: KernelConfig | None

    @property
    def gathers(self) -> bool:
        """Whether keys are gathered. Where each rank needs only its own, nothing is sent in either scheme."""
        return self.scheme == "all_gather" and len(self.hops) > 1


def _hop_mask(plan: _Plan, mask: MaskInfo, carried: dict[str, jax.Array], hop: Any, q_length: int) -> MaskInfo:
    """Returns the mask of this rank's queries against the keys that it holds at a hop."""
    changes: dict[str, Any] = {n: carried[n] for n in _TRAVELLING if n in carried}
    if "kv_positions" not in changes:
        # The order alone tells where a rank's tokens are, so their positions do not travel.
        n, rank = plan.order.shards, jax.lax.axis_index(plan.axis_name)
        holds = jnp.arange(n) if plan.gathers else ((rank - hop) % n)
        changes["q_positions"] = plan.order.positions(rank, q_length * n)[None]
        changes["kv_positions"] = plan.order.positions(holds, q_length * n).reshape(1, -1)
    return mask.replace(**changes)


def _carried(key: jax.Array, value: jax.Array, mask: MaskInfo) -> dict[str, jax.Array]:
    extra = {n: getattr(mask, n) for n in _TRAVELLING if getattr(mask, n) is not None}
    return {"key": key, "value": value, **extra}


def _local_arguments(plan: _Plan, query, carried, mask, slopes, seed) -> dict[str, Any]:
    arguments = {"query": query, "key": carried["key"], "value": carried["value"], "mask": mask, **dict(plan.options)}
    if slopes is not None:
        arguments["alibi_slopes"] = slopes
    if seed is not None:
        arguments["dropout_seed"] = seed
    return arguments


def _over_hops(plan: _Plan, body: Any, carried: Any, stay: Any, travel: Any) -> tuple[Any, Any]:
    """Returns (stay, travel) after `stay, travel = body(hop, carried, stay, travel)` at every hop.

    `carried` is passed on, and `travel` follows it by a hop, beside a body that needs neither result until it adds to
    `travel`, so that both ways the transfers may hide under the work. After the last hop `travel` goes home. Evenly spaced
    hops are one loop, so a program does not grow with the ring; two sets of keys are alive at a time.
    """
    axis, hops = plan.axis_name, plan.hops
    gaps = [b - a for a, b in itertools.pairwise(hops)]

    def visit(hop: Any, state: Any, before: int, after: int) -> tuple[Any, Any, Any]:
        carried, stay, travel = state
        coming, moved = exchange.shift(carried, axis, after), exchange.shift(travel, axis, before)
        return coming, *body(hop, carried, stay, moved)

    state = exchange.shift(carried, axis, hops[0]), stay, travel
    state = visit(hops[0], state, 0, gaps[0] if gaps else 0)
    middle = hops[1:-1]
    if len(middle) > 1 and len(set(gaps)) == 1:
        state, _ = jax.lax.scan(lambda s, hop: (visit(hop, s, gaps[0], gaps[0]), None), state, jnp.asarray(middle))
    else:
        for hop, before, after in zip(middle, gaps, gaps[1:], strict=False):
            state = jax.lax.optimization_barrier(visit(hop, state, before, after))
    if gaps:
        state = visit(hops[-1], state, gaps[-1], 0)
    _, stay, travel = state
    return stay, exchange.shift(travel, axis, plan.order.shards - hops[-1])


def _forward(plan: _Plan, query, key, value, sinks, slopes, mask, seed) -> tuple[jax.Array, jax.Array]:
    B, T, N, _ = query.shape
    carried = _carried(key, value, mask)
    call = {"platform": plan.platform, "cfg": plan.cfg}
    if plan.gathers:
        carried = exchange.gather(carried, plan.axis_name)
        hop_mask = _hop_mask(plan, mask, carried, 0, T)
        out, lse = flash(**_local_arguments(plan, query, carried, hop_mask, slopes, seed), **call)
        out = out.astype(jnp.float32)
    else:

        def attend(hop: Any, carried: dict[str, jax.Array], sofar: Any, travel: Any) -> tuple[Any, Any]:
            hop_mask = _hop_mask(plan, mask, carried, hop, T)
            part = flash(**_local_arguments(plan, query, carried, hop_mask, slopes, seed), **call)
            return merge(*sofar, *part), travel

        nothing = jnp.zeros((B, T, N, value.shape[3]), jnp.float32), jnp.full((B, T, N), -jnp.inf, jnp.float32)
        (out, lse), _ = _over_hops(plan, attend, carried, nothing, ())
    if sinks is not None:
        # A sink is a key that every row sees and that has no value; it joins once, after the last hop.
        joint = jnp.broadcast_to(jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)[None, None], lse.shape)
        out, lse = merge(out, lse, jnp.zeros_like(out), joint)
    return out.astype(query.dtype), lse


def _backward(plan: _Plan, saved, query, key, value, sinks, slopes, mask, seed) -> dict[str, jax.Array]:
    T = query.shape[1]
    call = {"platform": plan.platform, "cfg": plan.cfg}
    carried = _carried(key, value, mask)
    if plan.gathers:
        carried = exchange.gather(carried, plan.axis_name)
        hop_mask = _hop_mask(plan, mask, carried, 0, T)
        total = flash.backward(saved, **_local_arguments(plan, query, carried, hop_mask, slopes, seed), **call)
        total |= exchange.scatter_sum({n: total[n].astype(jnp.float32) for n in ("key", "value")}, plan.axis_name)
    else:

        def pull(hop: Any, carried: dict[str, jax.Array], own: Any, sums: Any) -> tuple[Any, Any]:
            hop_mask = _hop_mask(plan, mask, carried, hop, T)
            grads = flash.backward(saved, **_local_arguments(plan, query, carried, hop_mask, slopes, seed), **call)
            return {n: x + grads[n] for n, x in own.items()}, {n: x + grads[n] for n, x in sums.items()}

        own = {"query": jnp.zeros(query.shape, jnp.float32)}
        own |= {} if slopes is None else {"alibi_slopes": jnp.zeros(slopes.shape, jnp.float32)}
        # The sums stay beside the keys that they belong to.
        sums = {"key": jnp.zeros(key.shape, jnp.float32), "value": jnp.zeros(value.shape, jnp.float32)}
        own, sums = _over_hops(plan, pull, carried, own, sums)
        total = own | sums
    if sinks is not None:
        # A sink has weight exp(sink - lse) and no value: ds = -weight * delta. With no key and sinks of -inf it has none.
        some, lse = (saved["lse"] > -jnp.inf)[..., None], saved["lse"][..., None]
        weight = jnp.exp(sinks.astype(jnp.float32)[None, None] - jnp.where(some, lse, 0))
        total["softmax_aux"] = -jnp.sum(jnp.where(some, weight * saved["delta"][..., None], 0), axis=(0, 1))
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan: _Plan, query, key, value, sinks, slopes, mask, seed):
    return _forward(plan, query, key, value, sinks, slopes, mask, seed)


def _ring_fwd(plan, query, key, value, sinks, slopes, mask, seed):
    out, lse = _forward(plan, query, key, value, sinks, slopes, mask, seed)
    # The names that the local operation uses, so one remat policy keeps attention whether or not it is sharded.
    out, lse = checkpoint_name(out, "flash_attention.out"), checkpoint_name(lse, "flash_attention.lse")
    return (out, lse), (query, key, value, sinks, slopes, mask, seed, out, lse)


def _ring_bwd(plan, kept, cotangents):
    query, key, value, sinks, slopes, mask, seed, out, lse = kept
    assert flash.backward_inputs is not None
    saved = flash.backward_inputs(
        {"out": out, "lse": lse}, {"d_out": cotangents[0].astype(query.dtype), "d_lse": cotangents[1]}
    )
    grads = _backward(plan, saved, query, key, value, sinks, slopes, mask, seed)
    given = {"query": query, "key": key, "value": value, "softmax_aux": sinks, "alibi_slopes": slopes}
    return (*(None if x is None else grads[n].astype(x.dtype) for n, x in given.items()), None, None)


_ring.defvjp(_ring_fwd, _ring_bwd)


def _resolved(mask: MaskInfo, order: Order, axis_name: str) -> MaskInfo:
    """Returns `mask.resolved` of the whole sequence, on a rank: what is counted from the start of a segment needs it all."""
    if mask.chunk_size is None or mask.q_segment_ids is None or mask.q_positions is not None:
        return mask
    names, own = ("q_segment_ids", "kv_segment_ids"), mask.q_segment_ids.shape[1]
    whole = mask.replace(**exchange.gather({n: getattr(mask, n) for n in names}, axis_name))
    whole = whole.resolved(order.indices(own * order.shards))
    start = jax.lax.axis_index(axis_name) * own
    return whole.replace(**{n: jax.lax.dynamic_slice_in_dim(getattr(whole, n), start, own, 1) for n in names})


def _on_shard(
    query,
    key,
    value,
    mask=None,
    softmax_aux=None,
    alibi_slopes=None,
    dropout_seed=None,
    *,
    axis_name: str,
    scheme: str,
    order: str | Order,
    platform: str | None,
    cfg: KernelConfig | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of this rank's queries; runs inside a shard_map over `axis_name`."""
    n = jax.lax.axis_size(axis_name)
    order = order_of(order, n)
    mask = _resolved(MaskInfo() if mask is None else mask, order, axis_name)
    # Positions of the caller's own, and prefixes, are known at run time only: every hop is made.
    known = mask.q_positions is None and mask.prefix_lengths is None
    hops = hops_of(order, query.shape[1] * n, mask, known=known)
    plan = _Plan(axis_name, scheme, order, hops, tuple(sorted(options.items())), platform, cfg)
    return _ring(plan, query, key, value, softmax_aux, alibi_slopes, mask, dropout_seed)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str = SP,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    softmax_aux: jax.Array | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    alibi_slopes: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    bias: jax.Array | None = None,
    attention_mask: jax.Array | None = None,
    scheme: str = "ring",
    order: str | Order = "contiguous",
    return_lse: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    platform: str | None = None,
    cfg: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns attention [B, T, N, Hv] over a sequence that is split over a mesh axis: the numbers of `flash_attention`.

    Called outside a `shard_map` it makes its own over `mesh` (default: the mesh in force), on global arrays; called inside
    one that has `axis_name`, on this rank's arrays.

    Args:
      query, key, value: [B, T, N, H], [B, T, K, H], [B, T, K, Hv], of one length T, in `order`.
      axis_name: the mesh axis that the sequence is split over.
      causal, sliding_window, chunk_size, softmax_aux, softmax_scale, logits_soft_cap, dropout_prob, dropout_seed,
      alibi_slopes, mask_info, q_segment_ids, kv_segment_ids: as in `flash_attention`. Sinks count once. Inside a
        `shard_map` that also splits batch or heads, give `dropout_seed` as `expand_dropout_seed` makes it, split alike.
      q_positions, kv_positions: only where they are not those of `order`.
      scheme: "ring" (keys and values travel, O(T / ranks) memory) or "all_gather" (each rank gathers all keys and values).
      order: how the tokens lie on the ranks: "contiguous", "zigzag", "striped", or an `Order`. For any but contiguous the
        caller has permuted query, key, value and segment ids, once, by `Order(name, ranks).permute`, and the result is in
        that order too; nothing is moved here.
      return_lse: also return the log-sum-exp, float32 [B, T, N].
      mesh, in_specs, out_specs: where the arrays lie; default: the layout tables, with the sequence over `axis_name`.

    Raises:
      ValueError: a dim does not divide, the axis does not exist, the specs do not fit.
      Unsupported: bias and dense masks, which are S x S.

    Sources: Liu et al., Ring Attention with Blockwise Transformers, 2023; Brandon et al., Striped Attention, 2023; zigzag
    order and the backward with a global lse as in ring-flash-attention (Zhu, 2024).
    """
    if scheme not in SCHEMES:
        raise ValueError(f"argument 'scheme' = {scheme!r} is unknown; use one of {', '.join(SCHEMES)}")
    for name, value_ in (("bias", bias), ("attention_mask", attention_mask)):
        if value_ is not None:
            raise Unsupported(
                f"ring_attention: {name!r} is as large as T x T and is not split; describe it by a MaskInfo"
            )
    if mask_info is not None and mask_info.attention_mask is not None:
        raise Unsupported(
            "ring_attention: a dense 'attention_mask' is as large as T x T and is not split; use segments"
        )
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"argument 'key' has length {key.shape[1]}, but 'query' has {query.shape[1]}: a ring needs one length"
        )
    arguments = _flash.prepare(
        query,
        key,
        value,
        causal=causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        softmax_aux=softmax_aux,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        alibi_slopes=alibi_slopes,
        mask_info=mask_info,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_positions=q_positions,
        kv_positions=kv_positions,
    ).call.arguments
    # shapes and dtypes are judged on the whole arrays, where the names mean something
    settings = {"axis_name": axis_name, "scheme": scheme, "platform": platform, "cfg": cfg}
    if axis_is_bound(axis_name):
        if mesh is not None or in_specs is not None or out_specs is not None:
            raise ValueError(
                f"arguments 'mesh', 'in_specs' and 'out_specs' are for global arrays; this call is mapped over {axis_name!r} "
                "already and has a rank's own: leave them out"
            )
        out, lse = _on_shard(**arguments, order=order, **settings)
        return (out, lse) if return_lse else out
    check_axis(axis_name, mesh)
    whole = mesh_of(mesh, in_specs, out_specs)
    shards = 1 if whole is None else whole.shape[axis_name]
    order = order_of(order, shards)
    order.check(query.shape[1])
    if arguments.get("mask") is not None:
        # What is counted from the start of a segment is counted before the segments are split.
        arguments["mask"] = arguments["mask"].resolved(order.indices(query.shape[1]))
    table = {"T": (axis_name,), "S": (axis_name,)}
    call = flash.bind(**arguments)
    where: dict[str, Any] = {"table": table, "platform": platform, "cfg": cfg}
    if shards > 1:
        where |= {"local": _Local(axis_name, scheme, order), "handles": ("T", "S")}
        axes = resolve_axes(flash, call, whole, in_specs, table)
        for dim in ("T", "S"):
            if axes.get(dim) != (axis_name,):
                raise ValueError(
                    f"in_specs split the sequence over {axes.get(dim)}, but axis_name = {axis_name!r}; the two must agree"
                )
    prepared = Prepared(call, returns=("out", "lse") if return_lse else "out")
    return run(prepared, flash, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **where)


@dataclass(frozen=True)
class _Local:
    """What runs on a rank."""

    axis_name: str
    scheme: str
    order: Order

    def __call__(self, axes: Any, **arguments: Any) -> Any:
        return _on_shard(**arguments, axis_name=self.axis_name, scheme=self.scheme, order=self.order)


RingAttention = module_class("RingAttention", ring_attention)
