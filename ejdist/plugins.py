"""Layers, data sources, optimizers and losses of one's own, registered by a module that `plugins=[my.module]` names.

Such a module is imported on every host before the recipe is composed, by every command that reads a recipe. What it registers
with these functions is then as if it were of the project: recipes may name it, and its section is checked, described by
`--help KEY`, recorded, and compared when a run resumes. Examples: `examples/own_layer.py`, `own_source.py`, `own_optimizer.py`,
`dpo_loss.py`, `distillation.py`.

A section is a dataclass, not frozen, whose fields have types, defaults and comments. It may have `validate()`, which raises
ValueError. `ejdist.sections.operational` marks a field that may change when a run resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from ejdist.models.config import ALIASES, MIXERS, NONE
from ejdist.models.decoder import DecoderConfig
from ejdist.models.part import Part
from ejdist.models.parts import PARTS
from ejdist.registered import LAYER, LOSS, OPTIMIZER, SOURCE, Entry, PluginError, add, check_section, sections_of
from ejdist.training.data.own_source import OwnSource
from ejdist.training.data.packing import Rows
from ejdist.training.losses import CROSS_ENTROPY, BoundModel, Loss, LossTerms, Reference
from ejdist.training.optimizer import NAMES, OptimizerSection, OwnOptimizer
from ejdist.training.program import TrainSections

__all__ = [
    "BoundModel",
    "Loss",
    "LossTerms",
    "PluginError",
    "Reference",
    "register_layer",
    "register_loss",
    "register_optimizer",
    "register_source",
    "sizes_of",
]


def register_layer(name: str, part: Part, section: type | None = None) -> None:
    """Registers a mixer or a feed-forward: `model.layer_pattern=[NAME+mlp]`.

    Args:
      part: see `ejdist.models.part.Part`. Its `role` says which of the two it is.
      section: its sizes, `model.NAME.*`; a dataclass with `unsafe_hash=True`. The part reads them with `sizes_of`.

    Raises:
      PluginError: the name or the section cannot be used, or the part has no role.
    """
    module = _caller()
    reserved = {*MIXERS, *ALIASES, NONE, *(p for p in PARTS if p not in sections_of(LAYER))}
    _check_name(module, LAYER, name, reserved)
    if getattr(part, "role", None) not in ("mixer", "feed_forward"):
        raise PluginError(f"plugins: the layer {name!r} of {module} needs role = 'mixer' or role = 'feed_forward'")
    if section is not None:
        check_section(module, LAYER, name, section, DecoderConfig, hashed=True)
    add(Entry(LAYER, name, part, section, module, PARTS))


def register_optimizer(
    name: str,
    make: Callable[..., optax.GradientTransformation],
    section: type | None = None,
    *,
    elementwise: bool = False,
) -> None:
    """Registers an optimizer: `optimizer.name=NAME`.

    Clipping before it, and weight decay and the schedule's rate after it, are those of the recipe. Its state is in checkpoints;
    an array of it with the shape of its parameter is sharded like that, and any other is on every device.

    Args:
      make: (the values of the section, if it has one) -> a transformation of a gradient into a direction, such as
        `optax.scale_by_lion(b1, b2)`.
      section: its numbers, `optimizer.NAME.*`.
      elementwise: each number's update depends on no other number. Only then can `optimizer.offload=host` stream its state.

    Raises:
      PluginError: the name or the section cannot be used.
    """
    module = _caller()
    _check_name(module, OPTIMIZER, name, {*NAMES})
    if section is not None:
        check_section(module, OPTIMIZER, name, section, OptimizerSection, hashed=False)
    add(Entry(OPTIMIZER, name, OwnOptimizer(make, elementwise), section, module))


def register_loss(
    name: str,
    loss: Callable[..., LossTerms],
    section: type | None = None,
    *,
    references: Callable[[Any], Mapping[str, Reference]] | Mapping[str, Reference] | None = None,
) -> None:
    """Registers a loss: `loss=NAME`.

    It runs once for each microbatch, on all devices of the mesh. The arrays of the batch are int32 [B, T]: tokens, targets (-1:
    not counted), positions and segment_ids (-1: padding), in the order of tokens of the run.

    Args:
      loss: (trained model, batch, the values of the section if it has one, **references) -> `LossTerms`. Models are
        `BoundModel`s.
      section: its numbers, `NAME.*`, a section of the recipe.
      references: names -> `Reference`: models beside the trained one, with parameters that stay as they are. A function is
        called with the values of the section.

    Raises:
      PluginError: the name or the section cannot be used.
    """
    module = _caller()
    _check_name(module, LOSS, name, {CROSS_ENTROPY})
    if section is not None:
        check_section(module, LOSS, name, section, TrainSections, hashed=False)
    references_of = references if callable(references) else lambda sizes: references or {}
    add(Entry(LOSS, name, Loss(loss, references_of), section, module))


def register_source(
    name: str,
    read: Callable[[str], Iterable[str | Mapping[str, Any]]] | None = None,
    *,
    rows: Callable[..., Rows] | None = None,
    identity: Callable[[str], str],
) -> None:
    """Registers a source of data: `data.source=NAME:REST`, in a mixture too.

    Args:
      read: (REST) -> its documents, in an order that is always the same: texts, or rows as those of jsonl, with conversations
        too (`data.format`). They are tokenized into the cache once for each identity.
      rows: instead of `read`, (REST, length, tokenizer, seed) -> rows of tokens, where the source packs them itself:
        `row(i)` returns int32 [length] arrays tokens, targets, positions, segment_ids, a pure function of i; see
        `ejdist.training.data.packing.Rows` and `filled_row`.
      identity: (REST) -> a text that changes with the content, such as a digest of its files. It is the same on all hosts, and
        compared when a run resumes.

    Raises:
      PluginError: the name cannot be used, or not exactly one of read and rows is given.
    """
    module = _caller()
    _check_name(module, SOURCE, name, {"hf", "file", "gs", "s3", "http", "https"})
    if (read is None) == (rows is None):
        raise PluginError(f"plugins: the source {name!r} of {module} needs one of read= and rows=")
    add(Entry(SOURCE, name, OwnSource(read, rows, identity), None, module))


def sizes_of[T](config: Any, section: type[T]) -> T:
    """Returns the values of a layer's section in a model's configuration.

    Raises:
      PluginError: no layer was registered with that section, or the configuration is older.
    """
    name = next((name for name, kind in sections_of(LAYER).items() if kind is section), None)
    if name is None or not hasattr(config, name):
        raise PluginError(
            f"{section.__name__} is not a section of this model; register its layer before the recipe is composed"
        )
    return getattr(config, name)


def _check_name(module: str, kind: str, name: str, reserved: Iterable[str]) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise PluginError(
            f"plugins: {module} registers a {kind} by the name {name!r}; use letters, digits and _, in lower case"
        )
    if name in reserved:
        raise PluginError(
            f"plugins: {module} registers the {kind} {name!r}, which the project has already; give it another name"
        )


def _caller() -> str:
    """Returns the module that calls the function that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "__main__")
