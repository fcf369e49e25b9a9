"""Ring attention: exact attention whose sequence is split over a mesh axis, forward and backward.

A scheme brings together queries and keys of different ranks; here is what every scheme needs around it. The backward calls
the local backward with the *global* lse and delta, so it computes no attention again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.execution import run
from ejdist.mesh import SP, axis_is_bound, check_axis, check_mesh, current_mesh
from ejdist.order import Order
from ejdist.placement import mesh_of, resolve_axes
from ejdist.sequence import exchange
from ejdist.sequence.checks import check_call, check_cuts, check_without_mesh
from ejdist.sequence.halo import reach_of
from ejdist.sequence.local import Local, Static, apart, needed_of, of_all_ranks, work_of
from ejdist.sequence.schedule import hops as hops_of
from ejdist.sequence.schemes import Scheme, scheme_of
from ejdist.sharded import run_on_rank, with_mesh
from ejdist.tokens import axes_of_layout, check_carried, resolve_order
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.softmax import merge
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.config import KernelConfig
from kernels.framework.contract import Op
from kernels.framework.dispatch import reverse_only, vary_alike
from kernels.framework.options import check_names
from kernels.framework.padding import zeroed
from kernels.framework.platforms import Unsupported
from kernels.framework.public import Prepared, module_class
from kernels.ops.flash_attention import flash_attention
from kernels.ops.flash_attention import op as flash

Arrays = dict[str, jax.Array]


def _name(op: Op) -> str:
    """Returns the public name of the ring of an operation."""
    return "ring_attention" if op is flash else op.name


def differentiated_once(function: Callable) -> Callable:
    """Returns the function, whose own differentiation is refused by name: as part of a gradient it was one already."""
    once = jax.custom_jvp(function, nondiff_argnums=(0,))

    @once.defjvp
    def refuse(static: Static, primals: Any, tangents: Any) -> Any:
        raise Unsupported(
            f"{_name(static.op)}: second derivatives are not supported; differentiate {static.op.name} on one device, or "
            "stop the outer derivative by jax.lax.stop_gradient"
        )

    return once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What a rank's queries see, once for a call, forward and backward: see `Local`."""

    mask: MaskInfo
    own_mask: MaskInfo
    work: jax.Array | None
    needed: jax.Array | None = None


def local_of(static: Static, arrays: Arrays, seen: Seen) -> Local:
    """Returns a scheme's view of a call that `shard_call` has prepared."""
    mine, keys = apart(static.op, arrays)
    return Local(static, mine, keys, seen.mask, seen.own_mask, seen.work, seen.needed)


def _forward(static: Static, arrays: Arrays, seen: Seen) -> tuple[jax.Array, jax.Array]:
    local, sinks = local_of(static, arrays, seen), arrays.get("softmax_aux")
    within = sinks is not None and static.scheme.takes_sinks(local)
    out, lse = static.scheme.forward(replace(local, own=local.own | {"softmax_aux": sinks}) if within else local)
    if sinks is not None and not within:
        # A sink is a key that every row sees and that has no value; it joins once, after all keys.
        joint = jnp.broadcast_to(jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)[None, None], lse.shape)
        out, lse = merge(out, lse, jnp.zeros_like(out), joint)
    return out.astype(arrays["query"].dtype), lse


@differentiated_once
def _backward(static: Static, saved: Arrays, arrays: Arrays, seen: Seen) -> Arrays:
    local, sinks = local_of(static, arrays, seen), arrays.get("softmax_aux")
    total = static.scheme.backward(local, {n: x for n, x in saved.items() if n != "out" or local.reads_out})
    if sinks is not None:
        # A sink has weight exp(sink - lse) and no value: ds = -weight * delta. With no key and sinks of -inf it has none.
        some, lse = (saved["lse"] != -jnp.inf)[..., None], saved["lse"][..., None]
        weight = jnp.exp(sinks.astype(jnp.float32)[None, None] - jnp.where(some, lse, 0))
        total["softmax_aux"] = -jnp.sum(jnp.where(some, weight * saved["delta"][..., None], 0), axis=(0, 1))
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: Static, arrays: Arrays, seen: Seen) -> tuple[jax.Array, jax.Array]:
    return _forward(static, arrays, seen)


_forward_of_a_gradient = differentiated_once(_forward)


def _ring_fwd(static, arrays, seen):
    out, lse = _forward_of_a_gradient(static, arrays, seen)
    # Behind a barrier, or a compiler keeps what `out` is put together of beside the whole backward, and puts it together last.
    out, lse = jax.lax.optimization_barrier((out, lse))
    # The names that the local operation uses, so one remat policy keeps attention whether or not it is sharded. What is kept
    # has the numbers of all heads in one dim: an exchange of heads wants heads to be the major dim of the cotangent, and XLA
    # would have that of the output too, and lay out what all layers have kept anew, which takes as much memory again.
    kept, lse = (
        checkpoint_name(out.reshape(*lse.shape[:2], -1), "flash_attention.out"),
        checkpoint_name(lse, "flash_attention.lse"),
    )
    return (kept.reshape(out.shape), lse), (arrays, seen, kept, lse)


def _ring_bwd(static, residuals, cotangents):
    arrays, seen, kept, lse = residuals
    out = kept.reshape(*lse.shape, -1)
    assert static.op.backward_inputs is not None
    sent = dict(zip(("d_out", "d_lse") if static.lse else ("d_out",), cotangents, strict=False))
    sent = {n: zeroed(d, seen.mask.q_segment_ids) for n, d in sent.items()}  # here too, for the gradient of sinks
    saved = static.op.backward_inputs({"out": out, "lse": lse}, sent)
    grads = _backward(static, saved, arrays, seen)
    return {n: grads[n].astype(x.dtype) if is_float_array(x) else None for n, x in arrays.items()}, None


_ring.defvjp(_ring_fwd, _ring_bwd)


def shard_call(
    arguments: dict[str, Any],
    mask: MaskInfo | None,
    *,
    axis: exchange.Axis,
    scheme: Scheme,
    order: Order,
    platform: str | None,
    cfg: Any,
    op: Op = flash,
    only: Collection[int] | None = None,
    reach: int | None = None,
    lse: bool = True,
) -> tuple[Static, Arrays, Seen]:
    """Returns a call on a rank, ready to run: what is static, its arrays, and what it sees; inside a shard_map over the axis.

    Args:
      op: the attention of a rank's queries over some keys.
      only: the hops at which it can have work, of those that the mask asks for.
      reach: see `Static`.
      lse: False where nothing depends on the lse that is returned.
    """
    op.check_asked(platform, cfg)
    arrays = {n: x for n, x in arguments.items() if is_array(x)}
    options = {n: x for n, x in arguments.items() if n not in arrays}
    check_carried(_name(op), order, mask)
    mask, own_mask = of_all_ranks(mask or MaskInfo(), order, axis, scheme.all_ids)
    # Positions of the caller's own, and what rules read of arrays, are known at run time only: every hop is needed.
    hops = hops_of(order, arrays["query"].shape[1] * order.shards, mask, known=mask.rules_are_static)
    hops = tuple(h for h in hops if only is None or h in only) or (0,)
    static = Static(axis, scheme, order, hops, tuple(sorted(options.items())), platform, cfg, op, reach, lse)
    # An input that is alike on some ranks has cotangents that are not; the type of the rank shows whether JAX checks that here.
    arrays, mask, own_mask = vary_alike((arrays, mask, own_mask), exchange.rank(axis))
    work = work_of(static, arrays["query"].shape[1], mask, arrays.get("block_mask")) if scheme.all_ids else None
    seen = Seen(mask, own_mask, vary_alike(work, arrays["query"]))
    local = local_of(static, arrays, seen)
    return static, arrays, replace(seen, needed=needed_of(local) if scheme.counts_hops(local) else None)


def on_shard(arguments: dict[str, Any], mask: MaskInfo | None, **how: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of this rank's queries; runs inside a shard_map over the axis, and takes what `shard_call` takes."""
    static, arrays, seen = shard_call(arguments, mask, **how)
    return _ring(static, reverse_only(_name(static.op), arrays), seen)


def _bound_axis(axis_name: exchange.Axis, mesh: Any) -> tuple[exchange.Axis, bool]:
    """Returns the axis, a plain name where it is one, and whether this runs inside a `shard_map` over it.

    Raises:
      ValueError: it names no axis, or not one that a sequence can be split over here.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or len(set(names)) < len(names) or {*map(type, names)} != {str}:
        raise ValueError(
            f"ring_attention: argument 'axis_name' = {axis_name!r} must be the name of a mesh axis, or a tuple of different "
            "names, the major axis first"
        )
    bound = tuple(n for n in names if axis_is_bound(n))
    for name in names:
        if name not in bound:
            check_axis(name, mesh)
    around = jax.sharding.get_abstract_mesh()
    if bound and any(around.shape.get(n, 1) > 1 for n in names if n not in bound):
        raise ValueError(
            f"ring_attention: argument 'axis_name' = {axis_name!r} names axes of which this is mapped over {bound} alone; map "
            "over all of them, or over none"
        )
    # Where only some are bound, the others have one device.
    names = bound or names
    return names[0] if len(names) == 1 else names, bool(bound)


@dataclass(frozen=True)
class OnShard:
    """What runs on a rank, hashable."""

    axis: exchange.Axis
    scheme: Scheme
    lse: bool  # whether it is returned to the caller
    reach: int | None = None  # of the mask before `resolved`, see `reach_of`

    def __call__(
        self,
        axes: Any = None,
        *,
        order: Order,
        mask: MaskInfo | None = None,
        platform: str | None,
        cfg: Any,
        **arguments: Any,
    ) -> tuple[jax.Array, jax.Array]:
        how = {"axis": self.axis, "scheme": self.scheme, "order": order, "platform": platform, "cfg": cfg}
        with jax.named_scope("attention"):
            return on_shard(arguments, mask, **how, lse=self.lse, reach=self.reach)


@contextlib.contextmanager
def _in_its_name() -> Iterator[None]:
    """Errors of the operation inside a ring name the function that was called."""
    try:
        yield
    except (ValueError, Unsupported) as error:
        if not str(error).startswith(flash.name):
            raise
        kind = Unsupported if isinstance(error, Unsupported) else ValueError
        raise kind(f"ring_attention: {str(error).removeprefix(f'{flash.name}: ')}") from error


@_in_its_name()
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: exchange.Axis | None = None,
    scheme: str | Scheme = "ring",
    order: str | Order | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    platform: str | None = None,
    cfg: KernelConfig | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns attention [B, T, N, Hv] over a sequence that is split over a mesh axis: the numbers of `flash_attention`.

    Called outside a `shard_map` it makes its own over `mesh` (default: the mesh in force), on global arrays; called inside
    one that has `axis_name`, on this rank's arrays.

    Args:
      query, key, value: [B, T, N, H], [B, T, K, H], [B, T, K, Hv], of one length T, in `order`.
      axis_name: the mesh axis that the sequence is split over, or a tuple of axes, the major one first. Default: those that the
        layout in force has T on, and more than one device along; else `sp`.
      scheme: "ring" (keys and values travel, O(T / ranks) memory), "all_gather" (each rank gathers all keys and values),
        "ulysses" (over the last of the axes tokens are exchanged for heads, and a ring goes over those before it), "halo" (for
        windows), "group_cast" (each rank gets the chunks that its documents and mask need), or a `Scheme`.
      order: "contiguous", "zigzag", "striped", or an `Order`; default: that of the layout in force (`set_layout(order=...)`),
        contiguous without one. For any but contiguous the caller has permuted query, key, value and segment ids, once, by
        `Order.permute`, and the result is in that order too. In a "balanced" one positions are `Order.text_indices`.
      options: everything else that `flash_attention` takes, as there. Sinks count once. `q_positions` and `kv_positions` are
        only for tokens whose positions are not those of `order`; `attention_mask` only [B, S], which tokens are not
        padding; `cum_seqlens_q` only outside of a `shard_map` and in contiguous order, elsewhere give segment ids. Inside a
        `shard_map` that also splits batch or heads, give `dropout_seed` as `expand_dropout_seed` makes it, split alike.
        `deterministic` applies to what each rank computes, and a ring adds it in the order of its hops; what "all_gather" sums
        over ranks is as deterministic as the collective that sums it.
      mesh, in_specs, out_specs: where the arrays lie; default: the layout in force, with the sequence over `axis_name`.

    Raises:
      ValueError: a dim does not divide, the axis does not exist, the specs do not fit.
      Unsupported: bias and dense masks, which are T x T; second derivatives.

    Sources: Liu et al., Ring Attention with Blockwise Transformers, 2023; Brandon et al., Striped Attention, 2023; zigzag
    order and the backward with a global lse as in ring-flash-attention (Zhu, 2024); Jacobs et al., DeepSpeed Ulysses, 2023;
    Fang and Zhao, USP: A Unified Sequence Parallelism Approach for Long Context Generative AI, 2024; MagiAttention, 2025.
    """
    check_mesh(mesh)
    axis, bound = _bound_axis(axis_name or axes_of_layout(mesh), mesh)
    if bound and jax.lax.axis_size(axis) > 1:
        check_cuts(options, f"are those of one rank of {axis!r}")
    check_names("ring_attention", options, flash_attention.__signature__.parameters)
    prepared = flash_attention.prepare(query, key, value, **options)
    check_call(prepared.call)
    specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    how: dict[str, Any] = {"platform": platform, "cfg": cfg}
    lse, length = prepared.returns != "out", prepared.call.dims["T"] * (jax.lax.axis_size(axis) if bound else 1)
    reach = reach_of(prepared.call.mask, length)
    if bound:
        if any(x is not None for x in specs.values()):
            raise ValueError(
                "ring_attention: arguments 'mesh', 'in_specs' and 'out_specs' are for global arrays; this call is mapped "
                f"over {axis!r} already and has a rank's own: leave them out"
            )
        rank_order = resolve_order("ring_attention", jax.lax.axis_size(axis), f"axis_name = {axis!r}", order)
        how |= {"order": rank_order, "name": "ring_attention", "local": OnShard(axis, scheme_of(scheme), lse, reach)}
        names = (axis,) if isinstance(axis, str) else axis
        return run_on_rank(prepared, flash, names, **how, handles=("T", "S"), follows=True)
    whole = mesh_of(**specs)
    if mesh is None and current_mesh() is None and jax.sharding.get_abstract_mesh().empty:
        check_without_mesh(SP if axis_name is None else axis, order)
    names = (axis,) if isinstance(axis, str) else axis
    shards = 1 if whole is None else math.prod(whole.shape[n] for n in names)
    lie = resolve_order("ring_attention", shards, f"axis_name = {axis!r}", order)
    call, local = prepared.call, OnShard(axis, scheme_of(scheme), lse, reach)
    lie.check(length)
    if lie.name != "contiguous" and shards > 1:
        check_cuts(options, f"lie in order {lie.name!r}")
    if call.mask is not None and call.mask.counts_in_segments and not lie.carried:
        # What is counted from the start of a segment is counted before the segments are split.
        arguments = {**call.arguments, "mask": call.mask.resolved(lie.indices(length))}
        call = flash.bind(**arguments)
    prepared = Prepared(call, returns=prepared.returns)
    how |= {"order": lie, "name": "ring_attention"}
    if shards == 1:
        return run(prepared, flash, **specs, **how)
    table = {"T": names, "S": names}
    _check_axis_of(call, whole, in_specs, axis, names)
    return run(prepared, flash, **specs, **how, table=table, handles=("T", "S"), local=local, follows=True)


def _check_axis_of(call: Any, mesh: Any, in_specs: Any, axis: exchange.Axis, names: tuple[str, ...]) -> None:
    """Raises ValueError where specs split the sequence over other axes than the one that was named."""
    if in_specs is None:
        return
    axes = resolve_axes(flash, call, mesh, in_specs)
    named = tuple(n for n in names if mesh.shape[n] > 1)
    for dim in ("T", "S"):
        split = tuple(n for n in axes.get(dim, ()) if mesh.shape[n] > 1)
        if dim in axes and split != named:
            raise ValueError(
                f"ring_attention: in_specs split the sequence over {split or 'nothing'}, but axis_name = {axis!r}; the two "
                "must agree"
            )


def _signature() -> inspect.Signature:
    """Returns the arguments of this function with those of `flash_attention` in place of `**options`."""
    ours = inspect.signature(ring_attention).parameters
    names = [n for n in ours if n not in ("options", "mesh", "in_specs", "out_specs")]
    theirs = [
        p.replace(kind=p.KEYWORD_ONLY)
        for n, p in inspect.signature(flash_attention).parameters.items()
        if n not in ours
    ]
    arrays, rest = [ours[n] for n in names[:3]], [ours[n] for n in names[3:]]
    return with_mesh(inspect.Signature([*arrays, *rest, *theirs]))


ring_attention.__dict__["__signature__"] = _signature()
RingAttention = module_class("RingAttention", ring_attention)
