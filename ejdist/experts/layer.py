"""The mixture-of-experts layer: route, sort the tokens by expert, multiply, weight and sum."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.experts.cost import limit_of_ranks
from ejdist.experts.how import DispatchConfig
from ejdist.experts.metrics import Stats, rank_tokens
from ejdist.experts.mlp import CLAMPED, GatedExperts
from ejdist.experts.placed import apply_experts, expert_sharding
from ejdist.experts.products import expert_mlp, stays
from ejdist.experts.router import route
from ejdist.experts.rows import Scheme
from ejdist.layout import Specs, current_layout
from ejdist.packed import Packed
from ejdist.precision import BF16, PRECISIONS, check_device
from ejdist.sharded import sharded
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.dispatch import reverse_only
from kernels.framework.options import check_names, checked
from kernels.framework.public import module_class
from kernels.ops.gated_mlp import ACTIVATIONS as PLAIN

ACTIVATIONS = (*PLAIN, CLAMPED)
_gated_mlp = sharded(kernels.gated_mlp)
_ROUTING = frozenset(inspect.signature(route).parameters)


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"moe: argument {argument!r} {what}")


def _check_shape(name: str, array: Any, shape: tuple[int, ...], dims: str, dtype: Any) -> None:
    if not is_float_array(array) or array.shape != shape or array.dtype != dtype:
        got = f"{array.dtype} of shape {array.shape}" if is_array(array) else type(array).__name__
        raise _refuse(name, f"must be {dims} = {shape} of {dtype}, the dtype of 'x', got {got}")


def _check_experts(x: Any, router: Any, params: dict[str, Any], ranks: int) -> None:
    """Raises ValueError if the expert weights do not fit x, the router, or each other; they are the shard of one of `ranks`."""
    gate = params["gate"]
    fused = params["up"] is None
    expected = "[E, D, 2, F], with 'up' left out, or [E, D, F]"
    packed = [name for name, w in params.items() if isinstance(w, Packed)]
    if packed and not fused:
        raise _refuse(
            packed[0], "is packed, and packed experts have gate and up in one, 'gate' [E, D, 2, F]; leave out 'up'"
        )
    if (
        not (is_float_array(gate) or isinstance(gate, Packed))
        or gate.ndim != (4 if fused else 3)
        or (fused and gate.shape[2] != 2)
    ):
        got = f"{gate.dtype} of shape {gate.shape}" if is_array(gate) else type(gate).__name__
        raise _refuse("gate", f"must be a float array {expected}, got {got}" + ("; give 'up'" if fused else ""))
    E, D, F = gate.shape[0], x.shape[2], gate.shape[-1]
    if ranks * E != router.shape[1]:
        shard_hint = "; if it is one rank's shard, name the mesh axes of the experts in 'axis'"
        more = shard_hint if ranks == 1 else f"; each of the {ranks} ranks of 'axis' has an equal part"
        raise _refuse("gate", f"has E = {E} experts, and 'router' has {router.shape[1]}" + more)
    middle, named = ((2, F), "2, F") if fused else ((F,), "F")
    shapes = {
        "gate": ((E, D, *middle), f"[E, D, {named}]"),
        "up": ((E, D, F), "[E, D, F]"),
        "down": ((E, F, D), "[E, F, D]"),
        "gate_bias": ((E, *middle), f"[E, {named}]"),
        "up_bias": ((E, F), "[E, F]"),
        "down_bias": ((E, D), "[E, D]"),
    }
    if fused and params["up_bias"] is not None:
        raise _refuse("up_bias", "is for 'up', which is in 'gate'; give both biases as 'gate_bias' [E, 2, F]")
    for name, (shape, dims) in shapes.items():
        if name in packed:
            if params[name].shape != shape or not params[name].experts:
                raise _refuse(
                    name, f"must be {dims} = {shape}, packed as matrices of experts, got {params[name].shape}"
                )
        elif params[name] is not None or name == "down":
            _check_shape(name, params[name], shape, dims, x.dtype)


def _check_shared(x: Any, shared: dict[str, Any], shared_expert_gate: Any, activation: str) -> bool:
    """Returns whether there are shared experts.

    Raises:
      ValueError: some of their weights are missing, or do not fit.
    """
    present = [name for name, w in shared.items() if w is not None]
    if not present:
        if shared_expert_gate is not None:
            raise _refuse("shared_expert_gate", "is for shared experts; give 'shared_gate', 'shared_up', 'shared_down'")
        return False
    if missing := [name for name in shared if name not in present]:
        raise _refuse(missing[0], f"is missing: {', '.join(present)} are given, but shared experts need all three")
    if activation == CLAMPED:
        raise _refuse("activation", f"= {activation!r} does not support shared experts; use one of {', '.join(PLAIN)}")
    if packed := [name for name, w in shared.items() if isinstance(w, Packed)]:
        raise _refuse(packed[0], "is packed; 'gate' and 'down' may be, and shared experts are arrays here")
    gate = shared["shared_gate"]
    D, F = x.shape[2], gate.shape[-1] if is_array(gate) and gate.ndim else 0
    for name, w in shared.items():
        down = name == "shared_down"
        _check_shape(name, w, (F, D) if down else (D, F), "[F, D]" if down else "[D, F]", x.dtype)
    if shared_expert_gate is not None:
        _check_shape("shared_expert_gate", shared_expert_gate, (D, 1), "[D, 1]", x.dtype)
    return True


def _check_parts(params: dict[str, Any], place: Any) -> None:
    """Raises ValueError for packed matrices whose columns are in the order of other devices than those that have them here."""
    if place.mesh is None and place.axis:
        return  # a device's own, in the caller's `shard_map`
    here = 1 if place.mesh is None else math.prod(place.mesh.shape[a] for a in place.axes["F"])
    gate = params["gate"]
    if isinstance(gate, Packed) and gate.parts != here:
        raise _refuse(
            "gate",
            f"was packed with its features over {gate.parts} device{'s' * (gate.parts > 1)}, in whose order its columns are; "
            f"here {here} {'have' if here > 1 else 'has'} them: pack it where it is used",
        )


def _check_precision(precision: Any, activation: str, gate: Any, down: Any, *biases: Any) -> None:
    """Raises ValueError for a precision that there is not, or not of these experts."""
    if not isinstance(precision, str) or precision not in (BF16, *PRECISIONS):
        raise _refuse("precision", f"= {precision!r} is unknown; use {BF16} or fp8_block")
    for name, w in (("gate", gate), ("down", down)):
        if precision != BF16 and isinstance(w, Packed):
            raise _refuse(
                "precision", f"= {precision!r} is of matrices that are not packed, and {name!r} is; use {BF16}"
            )
    if precision == BF16 or not is_array(gate) or gate.ndim < 3:
        return
    why = stays(precision, gate.shape[1], gate.shape[-1], activation, any(b is not None for b in biases))
    if why is not None:
        raise _refuse("precision", f"= {precision!r}: {why}; use {BF16}")


def _limited(max_ranks: Any, ranks: int, num_experts: int, top_k: int) -> dict[str, Any]:
    """Returns the options of the router for experts of so many ranks at most."""
    if max_ranks is None:
        return {}
    if isinstance(max_ranks, bool) or not isinstance(max_ranks, int) or max_ranks < 1:
        raise _refuse("max_ranks", f"must be None, or an integer of at least 1, got {max_ranks!r}")
    own = num_experts // ranks
    if top_k > max_ranks * own:
        raise _refuse(
            "max_ranks",
            f"= {max_ranks} leaves a token {max_ranks * own} experts, {own} on each rank, and top_k is {top_k}; use at least "
            f"{-(-top_k // own)}",
        )
    return {"ranks": ranks, "max_ranks": max_ranks} if max_ranks < ranks else {}


def _expert(activation: str, alpha: float, limit: float, precision: str, platform: str | None) -> Callable:
    """Returns the function (params, rows, rows per expert) -> rows that applies each expert's gated MLP."""
    if precision != BF16:
        return _in_8_bits(activation, platform)
    return GatedExperts(activation, alpha, limit, platform)


@functools.cache  # compiled dispatches are cached by this function's identity
def _in_8_bits(activation: str, platform: str | None) -> Callable:
    return functools.partial(expert_mlp, activation=activation, platform=platform)


@checked
def moe(
    x: jax.Array,
    router: jax.Array,
    gate: Any,
    up: Any = None,
    down: Any = None,
    *,
    top_k: int,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    shared_gate: Any = None,
    shared_up: Any = None,
    shared_down: Any = None,
    shared_expert_gate: Any = None,
    segment_ids: Any = None,
    axis: str | tuple[str, ...] | None = None,
    dispatch: str | Scheme = "auto",
    buffer: float = 1.25,
    chunks: int | None = 1,
    capacity: float | None = None,
    exchange: str = BF16,
    precision: str = BF16,
    max_ranks: int | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    in_specs: Specs | None = None,
    stored_weights: bool = False,
    on_choice: Callable | None = None,
    platform: str | None = None,
    **routing: Any,
) -> tuple[jax.Array, Stats]:
    """Returns (out [B, T, D] in x's dtype, stats): the weighted sum of each token's experts, plus the shared expert.

    An expert is (activation(x gate) * (x up)) down. Every token goes through all of its experts, however they are sharded: none
    is dropped. Rows are sorted by expert, so the work is top_k rows per token. The weighted sum is in float32.

    Args:
      x: [B, T, D]. router: [D, E], of any float dtype.
      gate, up: [E, D, F]; or `gate` [E, D, 2, F] with both, and no `up`: one product reads the rows once. down: [E, F, D].
        A checkpoint whose columns of the two alternate (GPT-OSS) is the latter by `.reshape(E, D, F, 2).swapaxes(2, 3)`.
        Of a generation both may be `ejdist.packed.Packed`, `gate` with `up` in it.
      top_k: experts of a token.
      activation: "silu", "gelu", "gelu_tanh" or "relu"; or "clamped_swiglu", of GPT-OSS: with g at most `limit` and u within
        `limit` of 0, g sigmoid(alpha g) (u + 1).
      alpha, limit: for "clamped_swiglu" only.
      gate_bias, up_bias: [E, F], or `gate_bias` [E, 2, F] where `gate` holds both. down_bias: [E, D].
      shared_gate, shared_up: [D, Fs]. shared_down: [Fs, D]. The expert of all tokens; several are one with the sum of their
        widths.
      shared_expert_gate: [D, 1]: the shared expert's result times sigmoid(x shared_expert_gate), as in Qwen2-MoE.
      segment_ids: int [B, T]; a token with id < 0 is padding: its result is 0, and it does not count.
      axis: mesh axes that the experts are sharded over, the major one first: ep, or axes that shard the tokens (sp, fsdp).
        Default: on a mesh, the layout's axes of E; otherwise none. Required inside a `shard_map` over them, where the arrays
        are local and `gate` and the others hold an equal part of E. If all ranks have the same tokens, as with a batch of one,
        only partial sums are communicated.
      dispatch, buffer, chunks, capacity: how tokens are dispatched, see `ejdist.experts.exchange`. "auto" takes the scheme that
        is expected to be fastest, and chunks=None the number of them. Without `capacity` nothing is dropped.
      exchange: the numbers in which rows travel, its `precision`: "bf16" (the dtype of x), "fp8", "fp8_tokens" or "fp8_both".
      precision: of the experts' products: "bf16" (the dtype of x), or "fp8_block": forward and gradients of rows in 8 bits with
        scales of blocks of 128, gradients of matrices in the dtype of x. 128 divides D, and F of a device.
      max_ranks: the router chooses experts of so many ranks at most, for each token those whose best experts are best; so on
        another mesh it chooses others, and on one of no more ranks it chooses freely. None: of any.
      mesh: default: the mesh in force; without one, a single device.
      in_specs: PartitionSpecs of x and gate; the others follow. Default: the layout in force, or the arrays' types on a mesh
        with explicit axes. Axes of F shard the features inside experts; results are summed over them.
      stored_weights: D of the expert weights is sharded as the layout stores parameters. They are gathered when used, and their
        gradients reduce-scattered.
      on_choice: called with a line that says what "auto" chose, and why, when the call is traced. Formerly `told`.
      platform: backend of the matmuls. None: the fastest for the device; a named one never falls back.
      routing: every option of `ejdist.route` but `ranks`: score, normalize, bias, router_bias, groups, jitter and so on.

    All float arrays except `bias` have gradients. `stats` holds the losses, which you add yourself. On a mesh it covers the
    tokens of all devices; inside a `shard_map` only the rank's own, except `extra_passes` and `high_water`, which are global.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    Sources: Shazeer et al., Outrageously Large Neural Networks, 2017; Gale et al., MegaBlocks, 2022 (no token dropped);
    DeepSeekMoE, 2024 (shared experts); GPT-OSS model card, 2025 (clamped SwiGLU).

    >>> import jax.numpy as jnp
    >>> x, router = jnp.ones((1, 3, 4)), jnp.zeros((4, 2)).at[:, 1].set(1.0)
    >>> gate, down = jnp.ones((2, 4, 5)), jnp.ones((2, 5, 4))
    >>> out, stats = moe(x, router, gate, gate, down, top_k=1, segment_ids=jnp.array([[0, 0, -1]]))
    >>> print(out.shape, stats.counts, out[0, 2])
    (1, 3, 4) [0 2] [0. 0. 0. 0.]
    """
    if activation not in ACTIVATIONS:
        raise _refuse("activation", f"= {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    for name, value, default in (("alpha", alpha, 1.702), ("limit", limit, 7.0)):
        if activation != CLAMPED and value != default:
            raise _refuse(name, f"is for activation={CLAMPED!r}, but activation is {activation!r}; leave it out")
        if not 0 < value < float("inf"):
            raise _refuse(name, f"must be positive and finite, got {value!r}")
    _check_precision(precision, activation, gate, down, gate_bias, up_bias, down_bias)
    params = {"gate": gate, "up": up, "down": down}
    params |= {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    stored = current_layout().parameters if stored_weights else None
    if not is_array(router) or router.ndim != 2:
        got = f"{router.dtype} of shape {router.shape}" if is_array(router) else type(router).__name__
        raise _refuse("router", f"must be a float array [D, E], got {got}")
    if platform is not None and not isinstance(platform, str):
        raise _refuse("platform", f"must be None or a name, got {platform!r}")
    E = router.shape[1]
    place = expert_sharding(x, gate, E, axis=axis, mesh=mesh, in_specs=in_specs, stored=stored)
    if "told" in routing:
        warnings.warn("moe: argument 'told' is now 'on_choice'", DeprecationWarning, stacklevel=3)
        on_choice = routing.pop("told")
    check_names("moe", routing, _ROUTING)
    if "ranks" in routing:  # unread without `max_ranks`, and overwritten with it
        raise _refuse("ranks", f"is that of the experts' mesh axes, here {place.ranks}; leave it out")
    routing |= _limited(max_ranks, place.ranks, E, top_k)
    x, router = reverse_only("moe", (x, router))
    experts, weights, stats = place.automatic(route)(x, router, top_k=top_k, segment_ids=segment_ids, **routing)
    _check_experts(x, router, params, place.ranks if place.mesh is None else 1)
    _check_parts(params, place)
    shared = {"shared_gate": shared_gate, "shared_up": shared_up, "shared_down": shared_down}
    shares = _check_shared(x, shared, shared_expert_gate, activation)
    # Padding must not reach any sum or gradient, not even through shared experts.
    x = x if segment_ids is None else jnp.where((segment_ids >= 0)[..., None], x, 0)
    arrays = reverse_only("moe", {name: p for name, p in params.items() if p is not None})
    most = limit_of_ranks(place.ranks, max_ranks, routing.get("num_groups", 1), routing.get("topk_groups"))
    how = DispatchConfig(dispatch, buffer, chunks, capacity, exchange, most)
    if precision != BF16 and isinstance(place.mesh, jax.sharding.Mesh):
        check_device(precision, place.mesh.devices.flat[0])
    apply = _expert(activation, alpha, limit, precision, platform)
    out, traffic = apply_experts(
        x, experts, weights, arrays, apply, num_experts=E, place=place, how=how, on_choice=on_choice
    )
    rows = stats.counts.reshape(place.ranks, E // place.ranks).sum(-1)
    hosts = rows.reshape(place.hosts, -1).sum(-1)
    tokens = rank_tokens(experts, place.ranks, E)
    stats = stats._replace(rank_counts=rows, host_counts=hosts, rank_tokens=tokens, **traffic._asdict())
    if shares:
        mlp = kernels.gated_mlp if place.mesh is None else place.bound(_gated_mlp, stored_weights)
        always = mlp(x, *shared.values(), activation=activation, platform=platform)
        if shared_expert_gate is not None:
            always = gated(always, x, shared_expert_gate)
        out = out + always.astype(out.dtype)
    return out.astype(x.dtype), stats


def gated(always: jax.Array, x: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns the result of shared experts [B, T, D] times sigmoid(x gate), with `gate` [D, 1], in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logit = jnp.einsum("btd,dn->btn", x.astype(wide), gate.astype(wide), precision="highest")
    return jax.nn.sigmoid(logit) * always


MoE = module_class("MoE", moe)
