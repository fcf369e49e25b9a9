"""A decoder of the Llama, Qwen3, Mixtral, DeepSeek-V3 and GPT-OSS families: layers of several kinds, see README.md here.

Dtypes. Parameters are float32, the master weights. Matrices are cast to the compute dtype once per step, outside the scan
over layers, so that a mesh gathers the low-precision copy. Norm scales and the embedding table stay float32: they cost
little, and a frequent token's gradient is a long sum, which bfloat16 stops adding to after some 256 equal terms. A matrix's
gradient is summed over devices in the compute dtype, and over microbatches in float32. Float32 compute is true float32 on every
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.models import ahead
from ejdist.models.apart import layers_apart, packed_layers, run_apart
from ejdist.models.config import REMAT, DecoderShape
from ejdist.models.kept import Arrays, Cached, Serving
from ejdist.models.mixture import has_experts
from ejdist.models.model import BatchContext, Flops, Metric, Metrics, Model, StepContext
from ejdist.models.ops import Ops
from ejdist.models.packing import Packing, packing_of
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, added, norm_weight
from ejdist.models.stack import (
    ahead_of,
    check_kinds,
    declare_buffers,
    declare_kept,
    declare_layers,
    layers_of,
    narrow_matrices,
    parts_of,
    report,
    run_layers,
    update_buffers,
)
from ejdist.pictures import draw_load
from ejdist.precision import Narrow
from ejdist.registered import LAYER, grown, sections_of
from ejdist.sections import operational, validate

__all__ = ["REMAT", "DecoderConfig", "declare", "hidden_states", "logits_at", "loss", "token_losses"]


def decoder_type() -> Any:
    """Returns the type of the `model` section: `DecoderConfig`, with a section for each layer kind of a plugin that has one."""
    return grown(DecoderConfig, sections_of(LAYER))


@dataclass(unsafe_hash=True)
class DecoderConfig(DecoderShape):
    """The `model` section of a recipe: a decoder's shape and options, and the model that they make."""

    # A folder with config.json and safetensors, here or in gs://, or the run.dir of another run: parameters at the start; null
    # draws them.
    init_from: str | None = operational(None, recorded=True)  # decides nothing once there is a checkpoint

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        check_kinds(self)
        super().validate()
        if self.mtp.modules and not any(part.flops(self).pair for part in layers_of(self)[-1]):
            raise ValueError(
                f"model.mtp.modules = {self.mtp.modules} adds a layer of the kind of the last, {self.kinds()[-1]!r}, which "
                "must attend: end the layers with one that does, or give model.mtp.modules=0"
            )
        for part in parts_of(self).values():
            part.check(self)
        narrow_matrices(self)
        for name, kind in sections_of(LAYER).items():
            if name not in self.part_names() and hasattr(self, name) and getattr(self, name) != kind():
                raise ValueError(
                    f"model.{name} is given, but no layer has {name}: put one into model.layer_pattern, or leave it out"
                )

    def build(self) -> Model:
        """Returns the model. Raises ValueError, naming the key, for a wrong configuration."""
        validate(self)
        return model_of(self)


def model_of(c: DecoderShape) -> Model:
    """Returns the model of a configuration that is checked."""
    split = {"num_heads": ("N", c.num_heads), "num_kv_heads": ("K", c.num_kv_heads)}
    for part in parts_of(c).values():
        split |= part.split(c)
    return Model(
        declared=declare(c),
        embed=partial(embed, c=c),
        layers=partial(layers, c=c),
        head=partial(head, c=c),
        num_layers=c.num_layers,
        token_losses=partial(token_losses, c=c),
        logits_at=partial(logits_at, c=c),
        hidden=partial(hidden_and_metrics, c=c),
        projection=lambda params, *, context=None: (output_projection(params, c), c.logits_soft_cap),
        flops=flops(c),
        buffers=declare_buffers(c) | ahead.buffers(c),
        update=partial(update_buffers, c),
        report=partial(report, c),
        split=split,
        pictures={"experts.png": draw_load} if "experts" in c.part_names() else {},
        cached=cached(c),
        mixed=has_experts(c),
        fixed=tuple(name for name, part in parts_of(c).items() if part.fixed_order),
    )


def declare(c: DecoderShape) -> dict[str, Any]:
    """Returns the parameters, each a `Param`; those of the layers are stacked."""
    D, V, std = c.model_dim, c.vocab_size, c.init_std
    declared = {
        "embedding": Param((V, D), "V D", std=std),
        "layers": declare_layers(c),
        "final_norm": norm_weight(c, D),
    }
    if not c.tie_embeddings:
        declared["lm_head"] = Param((D, V), "D V", std=std)
    return declared | ahead.declare(c)


def flops(c: DecoderShape) -> tuple[Flops, ...]:
    """Returns the forward FLOPs of each part of each layer, and of the output projection: the embedding is looked up, not
    multiplied, unless it is that too; norms and biases multiply nothing."""
    of_layers = [part.flops(c) for parts in layers_of(c) for part in parts]
    return (*of_layers, Flops(2 * c.vocab_size * c.model_dim), *ahead.flops(c))


def embed(params: dict, ctx: BatchContext, c: DecoderShape) -> jax.Array:
    """Returns the input of the first layer, [B, T, D] in the compute dtype."""
    x = ctx.ops.embedding(params["embedding"], ctx.batch["tokens"]).astype(c.compute_dtype)
    return ctx.ops.constrain(x, "B T D")


def layers(params: dict, x: jax.Array, ctx: BatchContext, which: range, c: DecoderShape) -> tuple[jax.Array, Metrics]:
    """Returns (x after a range of layers, their metrics); see `run_layers`."""
    halves = ctx.halves() if has_experts(c) else [ctx]
    xs = ctx.ops.halved(x) if len(halves) > 1 else [x]
    xs, metrics = run_layers(xs, params, ctx.buffers, c, [layer_context(half, c) for half in halves], which)
    return ctx.ops.joined(xs), metrics


def layer_context(ctx: BatchContext, c: DecoderShape) -> partial[LayerContext]:
    """Returns the context of layers without the fields that differ between them."""
    return partial(
        LayerContext,
        config=c,
        ops=ctx.ops,
        batch=ctx.batch,
        tokens=ctx.tokens,
        step=ctx.step,
        microbatch=ctx.microbatch,
        half=ctx.half,
    )


def final_hidden(params: dict, x: jax.Array, ctx: BatchContext, c: DecoderShape) -> jax.Array:
    """Returns the hidden states that every head reads: the last layer's, normalised."""
    weight = added(params["final_norm"], norm_weight(c, c.model_dim))
    return ctx.ops.rms_norm(x, weight, eps=c.norm_eps)


def head(
    params: dict, x: jax.Array, ctx: BatchContext, c: DecoderShape, *, z_loss: float = 0.0
) -> tuple[jax.Array, Metrics]:
    """Returns (the sum over counted tokens of cross entropy and z-loss; "loss", the cross entropy, "z_loss" and "tokens"); with
    multi-token prediction, also what that adds."""
    hidden, projection = final_hidden(params, x, ctx, c), projection_of_losses(params, c)
    sums = ctx.ops.fused_loss_sums(
        hidden, projection, ctx.batch["targets"], z_loss=z_loss, logits_soft_cap=c.logits_soft_cap
    )
    metrics = {
        "loss": Metric(sums.loss, "loss"),
        "z_loss": Metric(sums.z_loss, "loss"),
        "tokens": Metric(sums.counted, "sum"),
    }
    if (one := ahead_of(c)) is None:
        return sums.total, metrics
    more, of_ahead = ahead.loss(params, hidden, projection, ctx, c, layer_context(ctx, one))
    return sums.total + more, metrics | of_ahead


def hidden_states(
    params: dict, batch: dict[str, jax.Array], c: DecoderShape, ops: Ops, *, context: StepContext | None = None
) -> jax.Array:
    """Returns the final hidden states, [B, T, D] in the compute dtype.

    batch has int32 [B, T]: tokens, positions (from 0 in each document), segment_ids (-1: padding).
    """
    return hidden_and_metrics(params, batch, c, ops, context=context)[0]


def hidden_and_metrics(
    params: dict, batch: dict[str, jax.Array], c: DecoderShape, ops: Ops, *, context: StepContext | None = None
) -> tuple[jax.Array, Metrics]:
    """Returns (`hidden_states`, the metrics of the layers)."""
    ctx = BatchContext.of(batch, ops, context, declare_buffers(c))
    x, metrics = layers(params["layers"], embed(params, ctx, c), ctx, range(c.num_layers), c)
    return final_hidden(params, x, ctx, c), metrics


def output_projection(params: dict, c: DecoderShape) -> jax.Array:
    """Returns the matrix from hidden states to logits, [D, V] in the compute dtype."""
    head = params["embedding"].T if c.tie_embeddings else params["lm_head"]
    return head.astype(c.compute_dtype)


def projection_of_losses(params: dict, c: DecoderShape) -> jax.Array | Narrow:
    """Returns `output_projection` as losses multiply with it: in 8 bits, if `precision_head` says so."""
    head = output_projection(params, c)
    return Narrow(head, c.precision) if c.precision_head else head


def loss(
    params: dict,
    batch: dict[str, jax.Array],
    c: DecoderShape,
    ops: Ops,
    *,
    z_loss: float = 0.0,
    context: StepContext | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns `Model.loss` of a decoder: the sum over counted tokens, and the metrics."""
    return model_of(c).loss(params, batch, ops, z_loss=z_loss, context=context)


def token_losses(
    params: dict, batch: dict[str, jax.Array], c: DecoderShape, ops: Ops, *, context: StepContext | None = None
) -> jax.Array:
    """Returns the cross entropy of each token, float32 [B, T]; 0 where its target is -1."""
    hidden = hidden_states(params, batch, c, ops, context=context)
    head = projection_of_losses(params, c)
    return ops.fused_token_losses(hidden, head, batch["targets"], logits_soft_cap=c.logits_soft_cap).loss


def logits_at(
    params: dict,
    batch: dict[str, jax.Array],
    marks: jax.Array,
    c: DecoderShape,
    ops: Ops,
    *,
    count: int,
    context: StepContext | None = None,
) -> jax.Array:
    """Returns the logits of a few tokens, float32 [B, count, V]. Those of the others are not computed, and hidden states do
    not move: each device adds up what it has of the marked ones, so that a sequence may be split.

    Args:
      marks: int32 [B, T], in the order of the batch: i at the token that row i of the result is of, -1 at all others. A number
        that no token has gives the logits of a hidden state of 0.
    """
    hidden = hidden_states(params, batch, c, ops, context=context)
    chosen = (marks[:, None, :] == jnp.arange(count, dtype=marks.dtype)[None, :, None]).astype(hidden.dtype)
    # One term of each sum is not 0, so that nothing is rounded.
    rows = jnp.einsum("bnt,btd->bnd", chosen, hidden, precision="highest").astype(hidden.dtype)
    return _logits(params, rows, c)


def _logits(params: dict, hidden: jax.Array, c: DecoderShape) -> jax.Array:
    """Returns the logits of hidden states [B, n, D], float32 [B, n, V]."""
    head = output_projection(params, c)
    logits = jnp.einsum("bnd,dv->bnv", hidden, head, precision="highest", preferred_element_type=jnp.float32)
    return logits if c.logits_soft_cap is None else c.logits_soft_cap * jnp.tanh(logits / c.logits_soft_cap)


def cached(c: DecoderShape) -> Cached:
    """Returns how the model generates, or why it cannot."""
    try:
        declared, refused = declare_kept(c), ""
    except ValueError as error:
        declared, refused = {}, str(error)
    if c.experts.forced_balance:
        refused = (
            "model.experts.forced_balance = true assigns experts in turn, for benchmarks: leave it out to generate"
        )
    if c.experts.jitter:  # noise of training
        c = replace(c, experts=replace(c.experts, jitter=0.0))

    def packing(params: dict, buffers: Mapping[str, Any] | None, form: str) -> Packing:
        return packing_of(params, c, form)

    def packed(params: dict, packing: Packing, *, donate: bool = False) -> dict[str, Any]:
        return {**params, "layers": packed_layers(params["layers"], c, packing, donate=donate)}

    step = partial(cached_step, c=c)
    return Cached(declared, partial(apart, c=c), packing, packed, step, c.compute_dtype, c.vocab_size, refused)


def apart(
    params: dict,
    buffers: Mapping[str, Any] | None,
    c: DecoderShape,
    *,
    donate: bool = False,
    packing: Packing | None = None,
) -> dict[str, Any]:
    """Returns the parameters and buffers as `cached_step` takes them; see `Cached`."""
    others = {name: x for name, x in params.items() if name != "layers"}
    head = "embedding" if c.tie_embeddings else "lm_head"
    cast = others[head].astype(c.compute_dtype)
    if donate and cast is not others[head]:
        others[head].delete()
    layers = layers_apart(params["layers"], buffers or {}, c, donate=donate, packing=packing)
    return {**others, head: cast, "layers": layers}


def cached_step(
    weights: dict[str, Any], batch: dict[str, jax.Array], kept: Arrays, ops: Ops, serving: Serving, c: DecoderShape
) -> tuple[jax.Array, Arrays]:
    """Returns (the logits of the last token of each row, float32 [B, V], what layers keep after the step); see `Cached`."""
    ctx = BatchContext.of(batch, ops, None, {})
    x, kept = run_apart(embed(weights, ctx, c), weights["layers"], kept, c, layer_context(ctx, c), serving)
    return _logits(weights, final_hidden(weights, x[:, -1:], ctx, c), c)[:, 0], kept
