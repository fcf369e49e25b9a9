"""What makes two decoders the same function: the keys of a model section that decide it, without those of its training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ejdist.models.config import SECTIONS, DecoderShape
from ejdist.registered import LAYER, sections_of
from ejdist.sections import flat

# How a model is started and trained, and how precisely it computes; not what it computes.
_TRAINING = {
    "init_std",
    "init_from",
    "compute_dtype",
    "precision",
    "precision_keep",
    "precision_head",
    "remat",
    "scan_layers",
    "rope_exact_from",
    "mtp.modules",
    "mtp.weight",
} | {f"experts.{name}" for name in ("balance", "balance_loss", "z_loss", "jitter", "forced_balance")}
_CLOSE = 1e-6  # of floats, relative: scales are computed, and written with few digits


def without_ntk(c: DecoderShape) -> DecoderShape:
    """Returns the same function with another base in place of ntk scaling, which is equivalent where all layers turn as many
    dims."""
    parts = c.part_names()
    plain = c.attention_rope and c.plain()
    widths = {c.rotary_dim or c.head_dim} if plain else set()
    widths |= {c.latent.rope_dim} if "latent_attention" in parts else set()
    if c.rope_scaling != "ntk" or len(widths) != 1 or widths == {2}:
        return c
    (width,) = widths
    return replace(
        c, rope_scaling=None, rope_factor=1.0, rope_base=c.rope_base * c.rope_factor ** (width / (width - 2))
    )


def deciding(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys that the model's function depends on, equal where the function is; `layers` has each layer's parts."""
    c = without_ntk(c)
    parts = c.part_names()
    plain = bool(c.plain())
    values = {k: v for k, v in flat(c).items() if k not in _TRAINING}
    values["layers"] = tuple(c.layers())
    values["experts.bias_rate"] = c.experts.bias_rate > 0  # whether there is a bias
    values["rotary_dim"] = None if c.rotary_dim == c.head_dim else c.rotary_dim
    unused = {"first_layers", "layer_pattern", "last_layers"}
    if not parts & {"mlp", "ungated_mlp"}:
        unused |= {"ffn_dim", "activation"}
    if not plain:
        unused |= {"head_dim", "num_kv_heads", "rotary_dim"}
    values["latent.norm_eps"] = c.norm_eps if c.latent.norm_eps is None else c.latent.norm_eps
    if not plain and "latent_attention" not in parts:
        unused |= {"num_heads", "attention_scale", "attention_soft_cap"}
    if not c.turns():
        unused |= {k for k in values if k.startswith("rope_")}
    if "experts" in parts:
        values["experts.activation"] = c.experts.activation or c.activation
    sections = {part: section for part, (section, *_) in SECTIONS.items()} | {name: name for name in sections_of(LAYER)}
    for part, section in sections.items():
        if part not in parts:
            unused |= {k for k in values if k.startswith(f"{section}.")}
    if c.rope_scaling is None:
        unused |= {k for k in values if k.startswith("rope_") and k not in ("rope_base", "rope_scaling")}
    elif c.rope_scaling == "yarn" and c.rope_attention_factor is None:
        values["rope_attention_factor"] = 0.1 * math.log(c.rope_factor) + 1
    scaling = c.scaling()
    if scaling is not None and c.rope_scaling in ("yarn", "llama3"):
        values["rope_low"], values["rope_high"] = scaling.band
    if c.rope_scaling in ("linear", "ntk"):
        unused.add("rope_original_length")
    widths = ([c.head_dim] if plain else []) + (
        [c.latent.nope_dim + c.latent.rope_dim] if "latent_attention" in parts else []
    )
    if c.attention_scale is None and len(widths) == 1:
        values["attention_scale"] = 1 / math.sqrt(widths[0])
    return {k: v for k, v in values.items() if k not in unused}


def same(a: Any, b: Any) -> bool:
    """Returns whether two values of a key are the same number or word."""
    if isinstance(a, float) or isinstance(b, float):
        return None not in (a, b) and math.isclose(a, b, rel_tol=_CLOSE)
    return a == b


def differences(ours: DecoderShape, theirs: DecoderShape) -> list[str]:
    """Returns the keys in which two models differ, those first that others may follow from: of the layers, and of RoPE."""
    one, other = deciding(ours), deciding(theirs)
    keys = [k for k in {**one, **other} if k not in one or k not in other or not same(one[k], other[k])]
    if "num_layers" in keys:  # and so the list of them
        keys.remove("layers")
    return sorted(keys, key=lambda k: k not in ("num_layers", "layers", "attention_rope"))


def written(value: Any) -> str:
    """Returns a value as an override has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(written, value))}]" if isinstance(value, tuple | list) else str(value)


def overrides(wanted: DecoderShape, base: DecoderShape) -> list[str]:
    """Returns the overrides that make the model of `base` that of `wanted`."""
    one, other = flat(wanted), flat(base)
    ignored = (
        _TRAINING | {"experts.bias_rate"}
        if bool(wanted.experts.bias_rate) == bool(base.experts.bias_rate)
        else _TRAINING
    )
    return [f"model.{k}={written(v)}" for k, v in one.items() if k not in ignored and v != other[k]]


def told_difference(ours: DecoderShape, theirs: DecoderShape, where: str, key: str) -> str:
    """Returns one sentence about a key in which the recipe is not the model of a file or a run, with what to write."""
    mine, other = flat(ours), flat(theirs)
    keys = (
        [k for k in ("first_layers", "layer_pattern", "last_layers") if mine[k] != other[k]]
        if key == "layers"
        else [key]
    )
    return (
        f"{' and '.join(f'model.{k} = {written(mine[k])}' for k in keys)} in this recipe, and {where} has "
        f"{' and '.join(written(other[k]) for k in keys)}: give {' '.join(f'model.{k}={written(other[k])}' for k in keys)}"
    )
