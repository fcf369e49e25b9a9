"""Keys of a command line that nothing reads beside the other keys of its recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejdist.mesh import SEQUENCE_AXES
from ejdist.models.parts import PARTS
from ejdist.models.stack import counted_parts
from ejdist.registered import LOSS, OPTIMIZER, entry_of, sections_of
from ejdist.sections import validate
from ejdist.sequence.schemes import SCHEMES
from ejdist.training.attending import by_scheme
from ejdist.training.optimizer import MUON
from recipes.arguments import key_of, read


def unread(arguments: Sequence[str], recipe: Any) -> list[str]:
    """Returns a sentence for each key of a command line that nothing reads beside the other keys of its recipe. It is reported,
    not refused: the next run of a sweep may read it, and models set more keys than all of their layers need."""
    model = recipe.model
    try:
        validate(model)
    except ValueError:  # the run refuses it in a sentence of its own, and what its layers read cannot be told
        return []
    parts = model.part_names()
    why = {}
    if "experts" not in parts:
        why["experts."] = "no layer of the model has experts"
    if not parts & {"mlp", "ungated_mlp"}:
        why["model.ffn_dim"] = "no layer has an MLP; the width of experts is model.experts.ffn_dim"
    if not model.plain():
        why |= dict.fromkeys(
            ("model.head_dim", "model.num_kv_heads"),
            "no layer has plain attention: every other mixer has a section, as latent attention has model.latent",
        )
    if entry_of(OPTIMIZER, recipe.optimizer.name) is not None:
        adam = f"optimizer.name = {recipe.optimizer.name} is not AdamW"
        why |= dict.fromkeys(("optimizer.b1", "optimizer.b2", "optimizer.eps"), adam)
    if recipe.optimizer.name != MUON:
        why[f"optimizer.{MUON}."] = f"optimizer.name = {recipe.optimizer.name}"
    if entry_of(LOSS, recipe.loss) is not None:
        why["z_loss"] = f"loss = {recipe.loss} is not the cross entropy"
    for kind, chosen, where in ((OPTIMIZER, recipe.optimizer.name, "optimizer."), (LOSS, recipe.loss, "")):
        others = [name for name in sections_of(kind) if name != chosen]
        why |= {f"{where}{name}.": f"{where}name = {chosen}" if where else f"loss = {chosen}" for name in others}
    several = (
        ("experts", recipe.experts.axes, ("exchange", "dispatch", "chunks", "buffer", "max_ranks", "overlap")),
        ("sequence", SEQUENCE_AXES, [f.name for f in dataclasses.fields(recipe.sequence) if f.name != "verify"]),
    )
    for section, axes, names in several:
        if not recipe.curriculum and all(recipe.mesh.sizes[axis] == 1 for axis in axes):
            reason = f"one device has all of it, {', '.join(f'mesh.{axis} = 1' for axis in axes)}"
            why |= dict.fromkeys((f"{section}.{name}" for name in names), reason)
    if parts <= PARTS.keys() and not by_scheme(model):
        reason = "no layer attends by a scheme: sparse attention gathers its keys, and recurrences pass a state on"
        # Sparse attention sends blocks where the scheme has a buffer for them.
        blocks = SCHEMES[recipe.sequence.named]().blocks is not None and any(
            part.selects for part in counted_parts(model)
        )
        effective = {"order", "stripe", "verify", *(("scheme", "buffer") if blocks else ())}
        ways = [f"sequence.{f.name}" for f in dataclasses.fields(recipe.sequence) if f.name not in effective]
        why = dict.fromkeys(ways, reason) | why
    idle = {"window_scheme": model.sliding_window is None, "latents": not model.latent.kv_rank}
    if parts <= PARTS.keys():  # of a plugin's part it is not known
        why = {f"sequence.{name}": "no layer has what it is about" for name in idle if idle[name]} | why
    if model.rope_scaling and model.rope_factor == 1 and model.rope_attention_factor is None and not recipe.curriculum:
        why["model.rope_scaling"] = "model.rope_factor = 1 stretches nothing; give how many times longer rows become"
    if recipe.data.packing != "whole" and not recipe.curriculum:
        why["data.too_long"] = f"data.packing = {recipe.data.packing} cuts what is longer than a row"
    if recipe.accumulation == 1 and not recipe.curriculum:
        why["optimizer.accumulate"] = "accumulation = 1 adds no gradients up"
    off = "evaluation.every = 0 measures nothing while the run trains"
    why |= (
        {}
        if recipe.evaluation.every
        else {"evaluation.data": f"{off}; launch.evaluate reads it", "evaluation.batches": off}
    )
    why |= {} if recipe.evaluation.samples else {"evaluation.sample_tokens": "evaluation.samples = [] has no prompt"}
    if not recipe.lora.rank:
        why["lora."] = "lora.rank = 0 trains all parameters"
    if recipe.optimizer.schedule != "wsd":
        why["optimizer.decay_fraction"] = (
            f"optimizer.schedule = {recipe.optimizer.schedule} has no decay phase; wsd has"
        )
    if recipe.optimizer.schedule == "constant":
        why["optimizer.final_ratio"] = "optimizer.schedule = constant keeps its rate"
    first = [
        (word, next((key for key in why if key_of(word).startswith(key)), None)) for word in read(arguments).overrides
    ]
    return [f"{word} changes nothing: {why[key]}" for word, key in first if key is not None]
