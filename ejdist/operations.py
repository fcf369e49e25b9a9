"""Every public operation on sharded arrays, by name: those that follow from their declaration, and those that communicate."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

import kernels
from ejdist import collective_matmul, grouped_matmul, latent_attention, paged_attention, vocabulary_parallel
from ejdist.embedding import embedding
from ejdist.experts import FUNCTIONS as EXPERTS
from ejdist.experts import MODULES as EXPERT_MODULES
from ejdist.experts import moe
from ejdist.experts.halves import NONE, halved, joined
from ejdist.layout import check_dims, constrain, current_layout, gather
from ejdist.models.ops import Ops
from ejdist.order import Order, platform_of
from ejdist.projection import project, project_all, project_mlp
from ejdist.sequence import delta_rule, flash, linear_attention, recurrent, state_space
from ejdist.sequence.attention import RingAttention, ring_attention
from ejdist.sequence.blocksparse import blocksparse_attention
from ejdist.sequence.latents import travels
from ejdist.sequence.native_sparse import BLOCKS, Exchange, native_sparse_attention
from ejdist.sequence.schemes import scheme_of
from ejdist.sharded import ShardedFunction, sharded
from kernels import Unsupported

# What communicates has a file of its own, named for what it does.
_COMMUNICATING = (
    vocabulary_parallel.fused_cross_entropy,
    vocabulary_parallel.fused_loss_sums,
    vocabulary_parallel.fused_token_losses,
    vocabulary_parallel.fused_kl_divergence,
    latent_attention.flash_mla,
    latent_attention.mla_decode,
    grouped_matmul.grouped_matmul,
    paged_attention.append_to_cache,
    paged_attention.page_attention,
    flash.flash_attention,
    flash.scaled_dot_product_attention,
    *delta_rule.FUNCTIONS,
    linear_attention.gla_attention,
    linear_attention.lightning_attention,
    linear_attention.recurrent_attention,
    linear_attention.retention,
    linear_attention.rwkv6,
    blocksparse_attention,
    native_sparse_attention,
    recurrent.recurrent,
    recurrent.rwkv4,
    state_space.causal_conv1d,
    state_space.state_space_v1,
    state_space.state_space_v2,
)

SHARDED: dict[str, ShardedFunction] = {name: sharded(f) for name, f in kernels.public_functions().items()} | {
    f.__name__: f for f in _COMMUNICATING
}
FUNCTIONS: dict[str, Callable] = {**SHARDED, **collective_matmul.FUNCTIONS, **EXPERTS, "ring_attention": ring_attention}
MODULES: dict[str, type] = {f.Module.__name__: f.Module for f in SHARDED.values()} | {
    **collective_matmul.MODULES,
    **EXPERT_MODULES,
    "RingAttention": RingAttention,
}


def _in_fixed_order(function: Callable[..., Any], mesh: Any, platform: str | None, *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose gradients XLA adds up in any order on GPUs: by its kernels there, unless another backend is asked
    for; XLA is refused."""
    on_gpus = (jax.default_backend() if mesh is None else platform_of(mesh)) in ("gpu", "cuda")
    if on_gpus and platform == "xla":
        raise Unsupported(
            f"{native_sparse_attention.__name__}: deterministic_attention = true, but on GPUs platform=xla adds up its "
            "gradients of keys in any order; leave platform or deterministic_attention out"
        )
    return function(*args, platform="triton" if on_gpus and platform is None else platform, **kwargs)


def bind_ops(
    mesh: jax.sharding.Mesh | None,
    *,
    order: Order | str | None = None,
    scheme: Any = "ring",
    platform: str | None = None,
    deterministic_attention: bool = False,
    experts: Mapping[str, Any] | None = None,
    largest_logits: bool = False,
    on_choice: Callable[[str], None] | None = None,
    told: Callable[[str], None] | None = None,
) -> Ops:
    """Returns the operations that a model calls, on a mesh.

    Args:
      mesh: the mesh of the arrays; None for one device.
      order: the order that batches are permuted to, for every operation; default: the layout's, see `set_layout`.
      scheme: how keys and values move over the sequence axis, see `ring_attention`.
      platform: backend of every operation; None: the fastest.
      deterministic_attention: bitwise reproducible attention, see `flash_attention`.
      experts: how experts are sharded and tokens dispatched: axes, dispatch, buffer, chunks, capacity, exchange and max_ranks,
        as for `moe`; and overlap, "none" or "halves", see `ejdist.experts.halves`.
      largest_logits: layers that attend report what no logit of a head exceeds.
      on_choice: called with a line for each choice, with its reason, when the program is traced.
      told: deprecated name of `on_choice`.
    """
    if told is not None:
        warnings.warn("bind_ops: argument 'told' is now 'on_choice'", DeprecationWarning, stacklevel=2)
        on_choice = told
    where = {"mesh": mesh, "platform": platform}
    functions = {name: functools.partial(f.with_stored_weights, order=order, **where) for name, f in SHARDED.items()}
    attend = {"order": order, "scheme": scheme, "deterministic": deterministic_attention}
    functions["attention"] = functools.partial(ring_attention, **attend, **where)
    by_scheme = scheme_of(scheme)
    latent = {"order": order, "deterministic": deterministic_attention}
    functions["flash_mla"] = functools.partial(
        latent_attention.over_ranks(by_scheme).with_stored_weights, **latent, **where
    )
    name = native_sparse_attention.__name__
    if by_scheme.blocks is not None:
        functions[name] = functools.partial(functions[name], exchange=Exchange(BLOCKS, by_scheme.blocks))
    if deterministic_attention:
        functions[name] = functools.partial(_in_fixed_order, functions[name], mesh, platform)
    functions["sends_latents"] = functools.partial(travels, mesh, by_scheme, platform)
    functions["tells_logits"] = lambda: largest_logits
    functions["embedding"] = functools.partial(embedding, mesh=mesh)
    functions |= {f.__name__: functools.partial(f, **where) for f in (project, project_all)}
    functions |= vocabulary_parallel.of_projection(functions, **where)
    functions["project_mlp"] = functools.partial(project_mlp, mesh=mesh)
    options = dict(experts or {})
    on = {
        "axis": options.get("axes"),
        **{
            n: options[n] for n in ("dispatch", "buffer", "chunks", "capacity", "exchange", "max_ranks") if n in options
        },
    }
    # Where nothing is exchanged nothing runs beside an exchange.
    axes = options.get("axes") or current_layout().activations.get("E", ())
    exchanged = mesh is not None and any(mesh.shape.get(a, 1) > 1 for a in axes)
    overlap = options.get("overlap", NONE) if exchanged else NONE
    functions["halved"] = functools.partial(halved, mesh=mesh, overlap=overlap)
    functions["joined"] = functools.partial(joined, mesh=mesh)
    functions["moe"] = functools.partial(moe, stored_weights=True, on_choice=on_choice, **on, **where)

    def place(move: Callable[..., jax.Array], x: jax.Array, dims: str) -> jax.Array:
        check_dims(f"{move.__name__}: an array of shape {x.shape}", dims)
        return move(x, dims, mesh)

    return Ops(functions, functools.partial(place, constrain), functools.partial(place, gather), order)
