"""Custom losses: their arguments, their result, and the models beside the trained one whose parameters do not change.

Such a reference, a frozen copy or a teacher, is kept among the buffers of the state: it is sharded as parameters are, has no
gradient, and is in every checkpoint, so that a resumed run compares with the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejdist import registered
from ejdist.models.lora import BASE, build
from ejdist.models.model import Metric, Metrics, Model, StepContext
from ejdist.models.ops import Ops
from ejdist.models.parameters import map_declared
from ejdist.paths import is_url
from ejdist.training.pytree_io import name_of
from ejdist.training.runs import Run, nested
from ejdist.training.start import Source, open_source
from ejdist.weights.families import read_config

CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True)
class Reference:
    """A model beside the trained one, whose parameters never change.

    weights: a folder of published weights, or the run.dir of a run. None: a copy of the trained model as it starts.
    """

    weights: str | None = None


@dataclass(frozen=True)
class BoundModel:
    """A model with its parameters, on the mesh and the kernels of the run. The trained one's have a gradient."""

    model: Model
    params: Any
    ops: Ops
    context: StepContext

    def hidden(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
        """Returns (what the output projection takes, [B, T, D] in the compute dtype; what the layers report)."""
        assert self.model.hidden is not None
        return self.model.hidden(self.params, batch, ops=self.ops, context=self.context)

    def projection(self) -> tuple[jax.Array, float | None]:
        """Returns (the output projection, [D, V] in the compute dtype; the soft cap of its logits, None for none)."""
        assert self.model.projection is not None
        return self.model.projection(self.params, context=self.context)

    def token_losses(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
        """Returns (the cross entropy of each token in nats, float32 [B, T], 0 where its target is -1; what the layers
        report)."""
        hidden, layers = self.hidden(batch)
        head, cap = self.projection()
        return self.ops.fused_token_losses(hidden, head, batch["targets"], logits_soft_cap=cap).loss, layers


class LossTerms(NamedTuple):
    """What a loss returns for a microbatch: a sum and a number of terms, so that the step trains the mean over the whole batch
    however it is divided.

    total: float32, the sum. count: how many terms it has: tokens, pairs, sequences. layers: what the trained model's layers
    report, as `BoundModel` returns it: the losses of experts are among them. metrics: name -> `Metric`; a "mean" is over terms.
    """

    total: jax.Array
    count: jax.Array
    layers: Metrics
    metrics: Mapping[str, Metric] = MappingProxyType({})


@dataclass(frozen=True)
class Loss:
    """A loss as it is registered.

    function: (trained model, batch, sizes, **references) -> `LossTerms`, each model a `BoundModel`.
    references: the values of the section -> name of an argument -> `Reference`.
    """

    function: Callable[..., LossTerms]
    references: Callable[[Any], Mapping[str, Reference]] = field(default=lambda sizes: {})


@dataclass(frozen=True)
class Placed:
    """A reference with its model."""

    name: str
    reference: Reference
    model: Model
    config: Any

    @property
    def declared(self) -> Any:
        """Its parameters and buffers as buffers of the state. Nothing is drawn for them: they are copied or read."""
        of = {"params": self.model.declared} | (
            {"buffers": buffers} if (buffers := _unshared(self.model.buffers)) else {}
        )
        return map_declared(lambda _, p: replace(p, init="zeros"), of)

    def source(self) -> Source | None:
        """Returns where its parameters are read from; None for a copy. Raises WeightsError."""
        return None if self.reference.weights is None else open_source(self.reference.weights, self.config)


class Trained:
    """The model of a recipe with what its loss keeps beside it."""

    def __init__(self, sections: Any, model: Model) -> None:
        """Args:
          sections: a recipe's. model: that it builds.

        Raises:
          ValueError: the loss is not known, or the weights of a reference cannot be read.
        """
        self.sections, self.model = sections, model
        self.entry = registered.entry_of(registered.LOSS, sections.loss)
        check_loss(sections.loss)
        self.references: list[Placed] = []
        if self.entry is None:
            return
        if model.hidden is None or model.projection is None:
            raise ValueError(f"loss = {sections.loss!r}: this model gives no hidden states; use loss={CROSS_ENTROPY}")
        if getattr(sections.model, "precision_head", False):
            raise ValueError(
                f"model.precision_head = true and loss = {sections.loss!r}: a loss of your own multiplies by the output "
                f"projection itself; use loss={CROSS_ENTROPY}, or leave model.precision_head out"
            )
        self.sizes = registered.sizes_of(sections, self.entry)
        for name, reference in self.entry.value.references(self.sizes).items():
            if name in model.buffers:
                raise ValueError(
                    f"loss = {sections.loss!r}: its reference {name!r} has the name of a layer's buffers; rename it"
                )
            config = sections.model if reference.weights is None else _config_of(reference.weights, sections.model)
            self.references.append(
                Placed(name, reference, model if reference.weights is None else config.build(), config)
            )

    def with_references(self) -> Model:
        """Returns the model, with the references among its buffers, which no step changes."""
        if not self.references:
            return self.model
        more = {one.name: one.declared for one in self.references}
        model_buffers = self.model.buffers

        def update(buffers: Any, seen: dict[str, jax.Array]) -> Any:
            kept = {name: buffers[name] for name in more}
            new = self.model.update({name: buffers[name] for name in model_buffers}, seen)
            return new | kept

        forwards = tuple(replace(part, backward=False) for one in self.references for part in one.model.flops)
        flops = (*self.model.flops, *forwards)
        return replace(self.model, buffers=model_buffers | more, update=update, flops=flops)

    def start(self, params: Any, buffers: Any) -> Any:
        """Returns the buffers of the state before the first step: references that are copies are of these parameters."""
        model_buffers = _unshared({name: buffers[name] for name in self.model.buffers})
        copies = {
            one.name: {"params": params} | ({"buffers": model_buffers} if model_buffers else {})
            for one in self.references
            if one.reference.weights is None
        }
        return buffers | copies

    def loss(
        self, params: Any, batch: Mapping[str, jax.Array], ops: Ops, context: StepContext
    ) -> tuple[jax.Array, Metrics]:
        """Returns what `Model.loss` does: (the sum that is trained, metrics), with "terms" among them if it has a loss of its
        own."""
        if self.entry is None:
            return self.model.loss(params, batch, ops, z_loss=self.sections.z_loss, context=context)
        buffers = context.buffers or {}

        def bound(one: Placed) -> BoundModel:
            state = jax.lax.stop_gradient(buffers[one.name])
            shared = {BASE: buffers[BASE]} if BASE in one.model.buffers else {}
            reference_context = context._replace(buffers=state.get("buffers", {}) | shared)
            return BoundModel(one.model, state["params"], ops, reference_context)

        model_context = context._replace(buffers={name: buffers[name] for name in self.model.buffers})
        arguments = [
            BoundModel(self.model, params, ops, model_context),
            batch,
            *([] if self.sizes is None else [self.sizes]),
        ]
        terms = self.entry.value.function(*arguments, **{one.name: bound(one) for one in self.references})
        return _summed(self.entry, terms, batch)


def _unshared(buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the buffers that a copy of a model has of its own: a frozen base is the same in both."""
    return {name: x for name, x in buffers.items() if name != BASE}


def trained_model(sections: Any) -> Model:
    """Returns the model of a recipe, with what its loss keeps beside it among the buffers. Raises as `Trained`."""
    return Trained(sections, build(sections.model, sections.lora)).with_references()


def check_loss(name: str) -> None:
    """Raises ValueError for an unknown loss."""
    if name != CROSS_ENTROPY and registered.entry_of(registered.LOSS, name) is None:
        known = ", ".join([CROSS_ENTROPY, *registered.names_of(registered.LOSS)])
        raise ValueError(
            f"loss = {name!r} is unknown; use one of {known}, or give plugins=[MODULE] with the module that registers it"
        )


@contextlib.contextmanager
def named_loss(loss: Callable[..., LossTerms] | Loss) -> Iterator[str]:
    """Yields the name by which a recipe knows a loss here, within the body: that of its function.

    Raises:
      ValueError: it is not a function.
    """
    value = loss if isinstance(loss, Loss) else Loss(loss)
    function = value.function
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise ValueError(f"train: argument 'loss' is {loss!r}; give a function, whose name the run records")
    name = f"{function.__module__}.{function.__qualname__}"
    entry = registered.Entry(registered.LOSS, name, value, None, function.__module__)
    registered.add(entry)
    try:
        yield name
    finally:
        registered.forget([entry])


def _summed(entry: registered.Entry, terms: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
    """Returns (the sum that is trained, metrics) of what a loss returned. Raises ValueError: it is not a `LossTerms`."""
    what = f"the loss {entry.name!r} of {entry.module}"
    if not isinstance(terms, LossTerms) or any(jnp.shape(x) != () for x in (terms.total, terms.count)):
        raise ValueError(f"{what} must return LossTerms with a scalar total and count, got {type(terms).__name__}")
    count = jnp.asarray(terms.count, jnp.float32)
    tokens = jnp.sum(batch["targets"] >= 0)
    # Scale sums over tokens to this microbatch's number of terms, because the step divides by that.
    scale = count / jnp.maximum(tokens, 1)
    layers = {
        name: replace(m, value=m.value * scale) if m.how in ("loss", "mean") else m for name, m in terms.layers.items()
    }
    standard = {"loss": Metric(terms.total, "loss"), "tokens": Metric(tokens), "terms": Metric(count)}
    for name in terms.metrics:
        if name in standard or name in layers:
            raise ValueError(f"{what} returns the metric {name!r}, which the step or a layer has; rename it")
    metrics = standard | layers | dict(terms.metrics)
    return sum(m.value for m in metrics.values() if m.how == "loss"), metrics  # pyrefly: ignore[bad-return]


def _config_of(weights: str, ours: Any) -> Any:
    """Returns the model section of a folder's weights, computed as the trained model is."""
    published = not is_url(weights) and (Path(weights).expanduser() / "config.json").exists()
    theirs = read_config(Path(weights).expanduser())[1] if published else Run(weights).model
    return replace(theirs, compute_dtype=ours.compute_dtype, remat=ours.remat, init_from=None)


def read_references(trained: Trained, state: Any, like: Any, log: Callable[[str], None]) -> Any:
    """Returns the state of a run before its first step, with the references that are read from weights.

    Args:
      like: of the state, `jax.ShapeDtypeStruct` with shardings.

    Raises:
      WeightsError, CheckpointError: they cannot be read.
    """
    buffers = dict(state.buffers)
    for one in trained.references:
        if (source := one.source()) is None:
            continue
        del buffers[one.name]  # the zeros in their place
        wanted = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(like.buffers[one.name])}
        buffers[one.name] = nested(source.load(wanted))
        log(
            f"{sum(x.size for x in wanted.values()):,} parameters of {one.name} read from {source.what}; they stay as they are"
        )
    return state._replace(buffers=buffers)


def digests(trained: Trained) -> dict[str, str]:
    """Returns a fact about the weights of each reference, which hosts compare."""
    return {f"loss: {p.name} (digest)": s.digest() for p in trained.references if (s := p.source()) is not None}
