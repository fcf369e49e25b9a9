"""The model interface that training uses: parameters, three pieces and the loss that they compose, metrics, and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejdist.models.kept import Cached
from ejdist.models.ops import Ops
from ejdist.models.parameters import check_declared
from kernels.engines.attention.masks import MaskInfo

CAUSAL = MaskInfo(causal=True)
REDUCTIONS = ("loss", "mean", "sum", "max", "update")


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["how", "each"])
@dataclass(frozen=True)
class Metric:
    """A number that a layer or a loss returns with its result, and how to reduce it over layers and microbatches.

    "sum", "max": as named. "mean": the value is a sum over counted tokens; the total divided by the step's counted tokens is
    reported. "loss": the same, and it is added to the loss, so its gradient is that of the mean. "update": not reported; kept
    per layer, summed over microbatches, and passed to the layer's `update` once per step.

    A value covers the whole batch, however it is sharded: it needs no further reduction over devices. `each`: do not reduce
    over layers; report a value for each layer that returns one, in order.
    """

    value: Any
    how: str = "sum"
    each: bool = False

    def __post_init__(self) -> None:
        if self.how not in REDUCTIONS:
            raise ValueError(f"Metric: argument 'how' = {self.how!r} is unknown; use one of {', '.join(REDUCTIONS)}")
        if self.each and self.how == "loss":
            raise ValueError("Metric: argument 'each' is for reported metrics; a loss is one number for all layers")

    def start(self) -> Metric:
        """Returns the identity of `plus`; reads only the shape and dtype of the value."""
        least = 0
        if self.how == "max":
            least = -jnp.inf if jnp.issubdtype(self.value.dtype, jnp.floating) else jnp.iinfo(self.value.dtype).min
        return replace(self, value=jnp.full(self.value.shape, least, self.value.dtype))

    def plus(self, other: Metric) -> Metric:
        """Returns the metric of two microbatches."""
        join = jnp.maximum if self.how == "max" else jnp.add
        return replace(self, value=join(self.value, other.value))

    def over_layers(self) -> Metric:
        """Returns the metric of all layers, from values stacked along the first dim."""
        if self.each or self.how == "update":
            return self
        return replace(self, value=(jnp.max if self.how == "max" else jnp.sum)(self.value, axis=0))

    def reported(self, tokens: jax.Array) -> jax.Array:
        """Returns the reported number for a step that counted `tokens` tokens."""
        return self.value / tokens if self.how in ("loss", "mean") else self.value


Metrics = dict[str, Metric]


class StepContext(NamedTuple):
    """What a loss may read besides parameters and batch; nothing in it has a gradient."""

    step: Any = 0  # int32, steps before this one
    microbatch: Any = 0  # int32, index in this step
    buffers: Any = None  # the model's buffers, constant within a step


def _counted(batch: Mapping[str, jax.Array]) -> Any:
    targets = batch.get("targets")
    return 0 if targets is None else jnp.sum(targets >= 0)


class BatchContext(NamedTuple):
    """What the pieces of a model read besides parameters and activations; nothing in it has a gradient."""

    ops: Ops
    # int32 [B, T]: tokens, positions, segment_ids (-1: padding), targets in training, and order where each row has its own.
    batch: Mapping[str, jax.Array]
    tokens: Any  # counted tokens of this microbatch, over all devices; 0 where there are no targets
    step: Any  # int32, steps before this one
    microbatch: Any  # int32, index in this step
    buffers: Mapping[str, Any]  # of the layers that run
    half: int = 0  # which half of a batch this is, where there are two

    def halves(self) -> list[BatchContext]:
        """Returns the contexts of what goes through the layers side by side: of the batch itself, or of its halves."""
        parts = {name: self.ops.halved(x) for name, x in self.batch.items()}
        count = len(next(iter(parts.values())))
        if count == 1:
            return [self]
        batches = [{name: part[i] for name, part in parts.items()} for i in range(count)]
        return [
            self._replace(ops=self.ops.of_batch(batch), batch=batch, tokens=_counted(batch), half=i)
            for i, batch in enumerate(batches)
        ]

    @classmethod
    def of(cls, batch: Mapping[str, jax.Array], ops: Ops, context: StepContext | None, buffers: Any) -> BatchContext:
        """Returns the context of a microbatch.

        Args:
          buffers: the model's declared buffers; the context must have those of every part.
        """
        context = context or StepContext()
        held = context.buffers or {}
        missing = [name for name in buffers if name not in held]
        if missing:
            raise ValueError(
                f"loss: argument 'context' has no buffers of {', '.join(missing)}; give StepContext(buffers=...), initialised "
                "from `build().buffers`"
            )
        return cls(ops.of_batch(batch), batch, _counted(batch), context.step, context.microbatch, held)


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs, counting a multiply-add as 2, of a layer's part or of the output projection.

    token: per position, in matmuls with parameters. pair: per (query, key) pair of causal attention.
    grouped: whether the matmuls are grouped by expert. mask: the mask rules within a document, without arrays. frozen: of
    `token`, those with parameters that are not trained: their backward has one matmul, not two. backward: whether there is one;
    a reference of a loss has none. beside: (pair, mask) of further attentions of the same queries.
    of_text: whether each rank of a sequence attends for a run of the text, in whatever order its tokens lie.
    """

    token: int
    pair: int = 0
    grouped: bool = False
    mask: MaskInfo = CAUSAL
    frozen: int = 0
    backward: bool = True
    beside: tuple[tuple[float, MaskInfo], ...] = ()
    of_text: bool = False

    @property
    def attends(self) -> tuple[tuple[float, MaskInfo], ...]:
        """(FLOPs of a pair, mask) of each attention of the part; empty if it has no attention."""
        return ((self.pair, self.mask), *self.beside) if self.pair else ()


@dataclass(frozen=True)
class Model:
    """A model, as `build()` of a recipe's model section returns it.

    declared: tree of `Param`; under "layers" they are stacks, whose first dim is L. buffers: tree of `Param` for state that a
    step changes without a gradient.

    Three pieces, so that pipeline stages can split the layers: the first stage embeds, the last has the head.
    embed: (params, ctx) -> x [B, T, D]. layers: (params["layers"], x, ctx, range) -> (x, metrics) after a range of the layers;
    the stacks, and ctx.buffers, hold only the rows of these layers. head: (params, x, ctx, *, z_loss) -> (sum over
    counted tokens, metrics), with "tokens" among them.

    token_losses: (params, batch, ops, *, context) -> the cross entropy of each token, float32 [B, T], 0 if not counted.
    logits_at: (params, batch, marks, ops, *, count, context) -> float32 [B, count, V], the logits of the tokens that marks
    [B, T] numbers 0 to count - 1. hidden: (params, batch, ops, *, context) -> (what the output projection takes, [B, T, D]; the
    metrics of the layers). projection: (params, *, context) -> (the output projection [D, V]; the soft cap of its logits, or
    None). update: (buffers, the "update" metrics of a step) -> buffers. report: (the numbers of a step) -> derived metrics.
    flops: of each part of each layer, and of the head. split: key of the section -> (dim, size) that must divide over a mesh.
    base: how the frozen parameters among the buffers are stored (`ejdist.models.lora.Base`); None where all parameters are
    trained. pictures: file in the run's folder -> function (rows of metrics.jsonl, path) that draws it.
    cached: how it generates. mixed: whether it has experts. fixed: names of its parts that have no form for an order that
    each row brings (`Part.fixed_order`).
    """

    declared: Any
    embed: Callable[[Any, BatchContext], jax.Array]
    layers: Callable[[Any, jax.Array, BatchContext, range], tuple[jax.Array, Metrics]]
    head: Callable[..., tuple[jax.Array, Metrics]]
    num_layers: int
    flops: tuple[Flops, ...]
    token_losses: Callable[..., jax.Array] | None = None
    logits_at: Callable[..., jax.Array] | None = None
    hidden: Callable[..., tuple[jax.Array, Metrics]] | None = None
    projection: Callable[..., tuple[jax.Array, float | None]] | None = None
    buffers: Any = field(default_factory=dict)
    update: Callable[[Any, dict[str, jax.Array]], Any] = lambda buffers, seen: buffers
    report: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda numbers: {}
    split: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[list[dict[str, Any]], Path], None]] = field(default_factory=dict)
    base: Any = None
    cached: Cached | None = None
    mixed: bool = False
    fixed: tuple[str, ...] = ()

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
        """Returns (the sum over counted tokens of the head's and the layers' losses; the metrics of both) for a microbatch.

        Sums, not means, so that microbatches and devices with different numbers of tokens add up to the exact mean.

        Raises:
          ValueError: the context lacks buffers, or a layer gives a metric of the head.
        """
        ctx = BatchContext.of(batch, ops, context, self.buffers)
        x = self.embed(params, ctx)
        x, of_layers = self.layers(params["layers"], x, ctx, range(self.num_layers))
        total, metrics = self.head(params, x, ctx, z_loss=z_loss)
        clashes = sorted(of_layers.keys() & metrics.keys())
        if clashes:
            raise ValueError(f"a layer returns the metric {clashes[0]!r}, which the model uses itself; rename it")
        return reduce(add, (m.value for m in of_layers.values() if m.how == "loss"), total), metrics | of_layers
