"""What training knows of a model, whichever it is: parameters, three pieces and the loss they compose, what it reports, and
what it changes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejdist.models.ops import Ops
from ejdist.models.parameters import check_declared
from kernels.engines.attention.masks import MaskInfo

CAUSAL = MaskInfo(causal=True)
REDUCTIONS = ("loss", "mean", "sum", "max", "update")


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["how", "each"])
@dataclass(frozen=True)
class Metric:
    """A number that a layer or a loss gives beside its result, and how those of layers and microbatches become one.

    "sum" and "max" are what they say. "mean": the value is a sum over counted tokens, and the sum of all of them is reported
    over the step's counted tokens. "loss": the same, and it is added to the loss, so that its gradient is that of the mean.
    "update": not reported; kept layer by layer, summed over microbatches, and given to the layer's `update` once a step.

    A value is of the whole batch, wherever it lies: of a mesh's devices nothing is left to add up. `each`: layers are not
    joined, and there is a value for each of those that give one, in their order.
    """

    value: Any
    how: str = "sum"
    each: bool = False

    def __post_init__(self) -> None:
        if self.how not in REDUCTIONS:
            raise ValueError(f"Metric: argument 'how' = {self.how!r} is unknown; use one of {', '.join(REDUCTIONS)}")
        if self.each and self.how == "loss":
            raise ValueError("Metric: argument 'each' is for what is reported; a loss is one number for all layers")

    def start(self) -> Metric:
        """Returns what `plus` leaves as it is; only the shape and dtype of the value are read."""
        least = 0
        if self.how == "max":
            least = -jnp.inf if jnp.issubdtype(self.value.dtype, jnp.floating) else jnp.iinfo(self.value.dtype).min
        return replace(self, value=jnp.full(self.value.shape, least, self.value.dtype))

    def plus(self, other: Metric) -> Metric:
        """Returns that of two microbatches."""
        join = jnp.maximum if self.how == "max" else jnp.add
        return replace(self, value=join(self.value, other.value))

    def over_layers(self) -> Metric:
        """Returns that of all layers, from values stacked along the first dim."""
        if self.each or self.how == "update":
            return self
        return replace(self, value=(jnp.max if self.how == "max" else jnp.sum)(self.value, axis=0))

    def reported(self, tokens: jax.Array) -> jax.Array:
        """Returns the number for a step that counted so many tokens."""
        return self.value / tokens if self.how in ("loss", "mean") else self.value


Metrics = dict[str, Metric]


class StepContext(NamedTuple):
    """What a loss may read beside parameters and batch; nothing in it has a gradient."""

    step: Any = 0  # int32, steps made before this one
    microbatch: Any = 0  # int32, of this step
    buffers: Any = None  # the model's, as they are throughout the step


class BatchContext(NamedTuple):
    """What the pieces of a model read beside parameters and activations; nothing in it has a gradient."""

    ops: Ops
    # int32 [B, T]: tokens, positions, segment_ids (-1: padding), and targets in training.
    batch: Mapping[str, jax.Array]
    tokens: Any  # counted tokens of this microbatch, over all devices; 0 where there are no targets
    step: Any  # int32, steps made before this one
    microbatch: Any  # int32, of this step
    buffers: Mapping[str, Any]  # of the layers that are run

    @classmethod
    def of(cls, batch: Mapping[str, jax.Array], ops: Ops, context: StepContext | None, buffers: Any) -> BatchContext:
        """Returns that of a microbatch.

        Args:
          buffers: what the model declares; the context must have those of every part.
        """
        context = context or StepContext()
        held = context.buffers or {}
        missing = [name for name in buffers if name not in held]
        if missing:
            raise ValueError(
                f"loss: argument 'context' has no buffers of {', '.join(missing)}; give StepContext(buffers=...), initialised "
                "from `build().buffers`"
            )
        targets = batch.get("targets")
        tokens = 0 if targets is None else jnp.sum(targets >= 0)
        return cls(ops, batch, tokens, context.step, context.microbatch, held)


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs, a multiply-add counted as 2, of a layer's part or of the output projection.

    token: in matmuls with parameters, of every position. pair: of every (query, key) pair of causal attention.
    grouped: the matmuls are of rows grouped by expert. mask: the rules by which pairs attend inside a document, without arrays.
    """

    token: int
    pair: int = 0
    grouped: bool = False
    mask: MaskInfo = CAUSAL


@dataclass(frozen=True)
class Model:
    """A model, as `build()` of a recipe's model section returns it.

    declared: tree of `Param`; those of "layers" are stacks, whose first dim is L. buffers: tree of `Param`, what a step changes
    without a gradient.

    Three pieces, so that the stages of a pipeline are a split of the layers: the first stage embeds, the last has the head.
    embed: (params, ctx) -> x [B, T, D]. layers: (params["layers"], x, ctx, range) -> (x, metrics), past a range of the layers;
    the stacks, and ctx.buffers, hold the rows of these layers and no others. head: (params, x, ctx, *, z_loss) -> (sum over
    counted tokens, metrics), with "tokens" among them.

    token_losses: (params, batch, ops, *, context) -> the cross entropy of each token, float32 [B, T], 0 if not counted.
    logits_at: (params, batch, marks, ops, *, count, context) -> float32 [B, count, V], the logits of the tokens that marks
    [B, T] numbers 0 to count - 1. update: (buffers, the "update" metrics of a step) -> buffers. report: (the numbers of a step)
    -> more that follow from them. flops: of each part of each layer, and of the head. split: key of the section -> (dim, size)
    that must divide over a mesh. pictures: file of the run's folder -> (rows of metrics.jsonl, path), which draws it.
    """

    declared: Any
    embed: Callable[[Any, BatchContext], jax.Array]
    layers: Callable[[Any, jax.Array, BatchContext, range], tuple[jax.Array, Metrics]]
    head: Callable[..., tuple[jax.Array, Metrics]]
    num_layers: int
    flops: tuple[Flops, ...]
    token_losses: Callable[..., jax.Array] | None = None
    logits_at: Callable[..., jax.Array] | None = None
    buffers: Any = field(default_factory=dict)
    update: Callable[[Any, dict[str, jax.Array]], Any] = lambda buffers, seen: buffers
    report: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda numbers: {}
    split: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[list[dict[str, Any]], Path], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_declared("parameter", self.declared)
        check_declared("buffer", self.buffers)

    def loss(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        ops: Ops,
        *,
        z_loss: float = 0.0,
        context: StepContext | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns (the sum over counted tokens of the head's loss and the losses of the layers; the metrics of both), of all
        layers on a microbatch.

        Sums, not means, so that microbatches and devices with different numbers of tokens add up to the exact mean.

        Raises:
          ValueError: the context lacks buffers, or a layer gives a metric of the head.
        """
        ctx = BatchContext.of(batch, ops, context, self.buffers)
        x = self.embed(params, ctx)
        x, of_layers = self.layers(params["layers"], x, ctx, range(self.num_layers))
        total, metrics = self.head(params, x, ctx, z_loss=z_loss)
        taken = sorted(of_layers.keys() & metrics.keys())
        if taken:
            raise ValueError(f"a layer gives the metric {taken[0]!r}, which is the model's own; rename it")
        return reduce(add, (m.value for m in of_layers.values() if m.how == "loss"), total), metrics | of_layers
