"""The functions of `kernels` with `mesh`, `in_specs` and `out_specs`: the same meaning on sharded arrays.

Without a mesh, given or in force, each is the plain function. Specs are optional: the layout tables know where each dim
lies.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.layout import ACTIVATIONS, Axes, axes_of_specs, on_mesh, spec
from ejdist.mesh import current_mesh
from ejdist.sharded import leading, map_shards, resolve_axes, run
from kernels.cross_entropy import TokenLosses, token_losses
from kernels.cross_entropy import fused_cross_entropy as _fused_cross_entropy
from kernels.cross_entropy import op as cross_entropy_op
from kernels.flash_attention import attention as _attention
from kernels.flash_attention import attention_of_canonical, canonical
from kernels.flash_attention import flash_attention as _flash_attention
from kernels.flash_attention import op as flash_op
from kernels.flash_attention import scaled_dot_product_attention as _scaled_dot_product_attention
from kernels.gated_mlp import gated_mlp as _gated_mlp
from kernels.gated_mlp import op as gated_mlp_op
from kernels.rms_norm import op as rms_norm_op
from kernels.rms_norm import rms_norm as _rms_norm
from kernels.rotary_embedding import op as rotary_op
from kernels.rotary_embedding import rotary_embedding as _rotary_embedding

_SHARDED_DOC = """
    On a mesh, also:
      mesh: default: the mesh in force (`jax.set_mesh`, `with mesh:`); with none, the arrays are used as they are.
      in_specs: PartitionSpecs of the first arrays; the others follow from the dims that these show.
      out_specs: of the output; default: from the same dims.
"""


def _as_sharded(face: Callable) -> Callable[[Callable], Callable]:
    """Returns a decorator that gives a function the face's signature and documentation, and the three arguments more."""

    def decorate(function: Callable) -> Callable:
        functools.update_wrapper(function, face, assigned=("__name__", "__doc__"))
        signature = inspect.signature(face)
        extra = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
            for n in ("mesh", "in_specs", "out_specs")
        ]
        function.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *extra])
        function.__doc__ = (face.__doc__ or "").split(">>>")[0].rstrip() + "\n" + _SHARDED_DOC
        return function

    return decorate


@_as_sharded(_flash_attention)
def flash_attention(*args: Any, mesh: Any = None, in_specs: Any = None, out_specs: Any = None, **kwargs: Any) -> Any:
    bound = inspect.signature(_flash_attention).bind(*args, **kwargs).arguments
    return_lse = bound.pop("return_lse", False)
    call = {"platform": bound.pop("platform", None), "cfg": bound.pop("cfg", None)}
    arguments = canonical(**bound)
    dims = (("B", "T", "N", "Hv"), ("B", "T", "N"))
    out, lse = run(flash_op, arguments, out_dims=dims, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **call)
    return (out, lse) if return_lse else out


@_as_sharded(_scaled_dot_product_attention)
def scaled_dot_product_attention(
    *args: Any, mesh: Any = None, in_specs: Any = None, out_specs: Any = None, **kwargs: Any
):
    bound = inspect.signature(_scaled_dot_product_attention).bind(*args, **kwargs).arguments
    return flash_attention(**bound, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@_as_sharded(_attention)
def attention(*args: Any, mesh: Any = None, in_specs: Any = None, out_specs: Any = None, **kwargs: Any) -> Any:
    bound = inspect.signature(_attention).bind(*args, **kwargs).arguments
    call = {"platform": bound.pop("platform", None), "cfg": bound.pop("cfg", None)}
    arguments = canonical(**bound)
    dims = (("B", "T", "N", "Hv"), ("B", "N", "T", "S"))
    return run(
        flash_op,
        arguments,
        out_dims=dims,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        local=attention_of_canonical,
        **call,
    )


def _first(op: Any) -> Callable:
    return lambda **arguments: op(**arguments)[0]


@_as_sharded(_rms_norm)
def rms_norm(
    x, weight=None, *, eps=1e-6, zero_centered=False, platform=None, cfg=None, mesh=None, in_specs=None, out_specs=None
):
    arguments = {"x": x, "weight": weight, "eps": eps, "zero_centered": zero_centered}
    dims = ((*leading(x.ndim - 1), "D"),)
    sizes = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return run(rms_norm_op, arguments, out_dims=dims, local=_first(rms_norm_op), platform=platform, cfg=cfg, **sizes)


@_as_sharded(_rotary_embedding)
def rotary_embedding(
    x,
    positions,
    *,
    base=10000.0,
    scaling=None,
    interleaved=False,
    rotary_dim=None,
    platform=None,
    cfg=None,
    mesh=None,
    in_specs=None,
    out_specs=None,
):
    arguments = {"x": x, "positions": positions, "base": float(base), "scaling": scaling}
    arguments |= {"interleaved": interleaved, "rotary_dim": rotary_dim}
    dims = (("B", "T", "N", "H"),)
    sizes = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return run(rotary_op, arguments, out_dims=dims, platform=platform, cfg=cfg, **sizes)


@_as_sharded(_gated_mlp)
def gated_mlp(
    x, gate, up, down, *, activation="silu", platform=None, cfg=None, mesh=None, in_specs=None, out_specs=None
):
    arguments = {"x": x, "gate": gate, "up": up, "down": down, "activation": activation}
    dims = ((*leading(x.ndim - 1), "D"),)
    sizes = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    mesh = current_mesh() if mesh is None else mesh
    features = ()
    if mesh is not None:
        axes = resolve_axes(gated_mlp_op, {n: v for n, v in arguments.items() if n != "activation"}, mesh, in_specs)
        features = axes.get("F", ()) if gate.shape[-1] > 1 else ()

    def local(**shards: Any) -> jax.Array:
        # With F split, each device has a part of the sum over F (Shoeybi et al., Megatron-LM, 2019).
        part = gated_mlp_op(**shards)
        return jax.lax.psum(part, features) if features else part

    return run(
        gated_mlp_op,
        arguments,
        out_dims=dims,
        local=local,
        handles=("F",) if features else (),
        platform=platform,
        cfg=cfg,
        **sizes,
    )


@_as_sharded(_fused_cross_entropy)
def fused_cross_entropy(
    hidden: Any = None,
    lm_head: Any = None,
    targets: Any = None,
    *,
    logits=None,
    mesh=None,
    in_specs=None,
    out_specs=None,
    weights=None,
    reduction="mean",
    platform=None,
    cfg=None,
    **options,
):
    mesh = current_mesh() if mesh is None else mesh
    call = {"platform": platform, "cfg": cfg}
    if mesh is None or mesh.size == 1 or logits is not None or hidden is None or hidden.ndim != 3:
        if in_specs is not None or out_specs is not None:
            raise ValueError("in_specs and out_specs need a mesh, 'hidden' [B, T, D] and 'lm_head'")
        given: dict[str, Any] = {"logits": logits, "weights": weights, "reduction": reduction, **options, **call}
        return _fused_cross_entropy(hidden, lm_head, targets, **given)
    terms = cross_entropy_terms(hidden, lm_head, targets, mesh=mesh, in_specs=in_specs, **options, **call)
    each, count = terms.loss + terms.z_loss, terms.counted
    if weights is not None:
        each, count = each * weights, count * weights
    if reduction == "none":
        return each
    total = jnp.sum(each)
    return total if reduction == "sum" else total / jnp.where(jnp.sum(count) == 0, 1, jnp.sum(count))


def cross_entropy_terms(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    *,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    table: Axes = ACTIVATIONS,
    platform: str | None = None,
    cfg: Any = None,
) -> TokenLosses:
    """Returns the terms of cross entropy of each token, [B, T], with the vocabulary split over devices where it is.

    hidden is [B, T, D], lm_head [D, V], targets int [B, T]. Each device computes the log-sum-exp and the target's logit
    over its part of the vocabulary; two reductions of [B, T] numbers join them.
    """
    mesh = current_mesh() if mesh is None else mesh
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    cap = None if logits_soft_cap is None else float(logits_soft_cap)

    def local(
        hidden: jax.Array, lm_head: jax.Array, targets: jax.Array, vocabulary: tuple[str, ...] = ()
    ) -> TokenLosses:
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        first = jax.lax.axis_index(vocabulary) * lm_head.shape[1] if vocabulary else 0
        shifted = jnp.where(ids == ignore_index, -1, ids - first)
        lse, at_target, mean = cross_entropy_op(flat, lm_head, shifted, logits_soft_cap=cap, platform=platform, cfg=cfg)
        if vocabulary:
            largest = jax.lax.pmax(jax.lax.stop_gradient(lse), vocabulary)
            lse = largest + jnp.log(jax.lax.psum(jnp.exp(lse - largest), vocabulary))
            at_target = jax.lax.psum(at_target, vocabulary)
            mean = jax.lax.pmean(mean, vocabulary)
        return TokenLosses(*(x.reshape(targets.shape) for x in token_losses(lse, at_target, mean, ids, **options)))

    if mesh is None or mesh.size == 1:
        return local(hidden, lm_head, targets)
    dims = (("B", "T", "D"), ("D", "V"), ("B", "T"))
    arrays = {"hidden": hidden, "lm_head": lm_head, "targets": targets}
    if in_specs is None:
        axes = on_mesh(table, mesh)
    else:
        axes = axes_of_specs(
            dims[: len(in_specs)], tuple(in_specs), [x.shape for x in arrays.values()][: len(in_specs)]
        )
    features = [a for a in axes.get("D", ()) if mesh.shape[a] > 1]
    if features:
        raise ValueError(
            f"cross_entropy: in_specs split dim D over {', '.join(features)}, but each device needs it whole; gather it first"
        )
    specs = tuple(
        spec(d, axes, shape=x.shape, mesh=mesh, what=f"cross_entropy: argument {n!r}")
        for d, (n, x) in zip(dims, arrays.items(), strict=True)
    )
    vocabulary = tuple(a for a in axes.get("V", ()) if mesh.shape[a] > 1)
    out: Any = spec(("B", "T"), axes, shape=targets.shape)
    body = functools.partial(local, vocabulary=vocabulary)
    return map_shards(body, mesh, specs, TokenLosses(out, out, out))(hidden, lm_head, targets)
