"""The config.json of models whose layers are recurrences and attention in turn, in both directions: Qwen3-Next, Kimi Linear."""

from __future__ import annotations

import math
from typing import Any

from ejdist.models.attention import LatentAttention
from ejdist.models.config import MIXERS as SHORT
from ejdist.models.config import SECTIONS, DecoderShape
from ejdist.models.feedforward import MLP, Experts
from ejdist.models.recurrent import GatedDelta, KimiDelta
from ejdist.weights.config import Keys, mixed_layers, of_kinds, read_heads, read_rotary, read_types, write_heads
from ejdist.weights.files import WeightsError

# Type of a layer -> the mixer that it names here.
MIXERS = {"linear_attention": GatedDelta.name, "full_attention": "full"}
LATENT = next(short for short, name in SHORT.items() if name == LatentAttention.name)
INTERVAL, ROTARY = 4, 0.25  # full_attention_interval and partial_rotary_factor of a file that does not have them
# Of a layer that is a recurrence: key of the section -> its name in a config.json.
RECURRENCE = {
    "num_key_heads": "linear_num_key_heads", "num_value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "conv_width": "linear_conv_kernel_dim",
}  # fmt: skip
MIXTURE = {
    "num": "num_experts", "top_k": "num_experts_per_tok", "ffn_dim": "moe_intermediate_size",
    "shared_dim": "shared_expert_intermediate_size",
}  # fmt: skip
# Of Kimi Linear: key of the section -> its name in a config.json.
KIMI_LATENT = {
    "kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim",
}  # fmt: skip
KIMI_MIXTURE = {"num": "num_experts", "top_k": "num_experts_per_token", "ffn_dim": "moe_intermediate_size"}
LATENT_EPS = 1e-6  # of the norm of latents, whatever rms_norm_eps is: the published code gives it none


def _types(layers: int, interval: int) -> list[str]:
    linear, full = MIXERS
    return [linear if (i + 1) % interval else full for i in range(layers)]


def read_qwen3_next(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model section that a config.json of Qwen3-Next says beside those that all families have."""
    layers = sizes["num_layers"]
    keys.only("attention_bias", False)  # the model has no bias of the gate, which theirs has with the queries
    keys.only("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers"):  # which this family does not read
        keys.get(name)
    keys.get("num_nextn_predict_layers")  # their tensors are reported when they are read
    interval = keys.get("full_attention_interval", INTERVAL)
    types = read_types(keys, layers, MIXERS) or _types(layers, interval)
    mixed = mixed_layers(keys, layers)
    heads = read_heads(keys, sizes) | {"head_dim": keys.get("head_dim", 256)}
    kinds = [f"{MIXERS[t]}+{(Experts if m else MLP).name}" for t, m in zip(types, mixed, strict=True)]
    values = heads | of_kinds(kinds) | {"zero_centered_norms": True}
    # Keys of what no layer has may be there all the same, with the values of another model of the family.
    (linear, full), rotary = MIXERS, read_rotary(keys, heads["head_dim"], ROTARY)
    if full in types:
        values |= {"qk_norm": True, "attention_gate": True, "rotary_dim": rotary}
    for name in (*RECURRENCE.values(), *MIXTURE.values(), "intermediate_size"):
        keys.get(name)
    normalize = keys.get("norm_topk_prob", True)
    if linear in types:
        keys.only("hidden_act", "silu", "swish")  # theirs is that of the convolution too, which here is always silu
        section, shape, _ = SECTIONS[GatedDelta.name]
        values[section] = shape(**{ours: keys.need(theirs) for ours, theirs in RECURRENCE.items()})
    if any(mixed):
        section, shape, _ = SECTIONS[Experts.name]
        mixture = {ours: keys.need(theirs) for ours, theirs in MIXTURE.items()}
        values[section] = shape(**mixture, shared_gate=True, normalize=normalize)
    return values | ({} if all(mixed) else {"ffn_dim": keys.need("intermediate_size")})


def write_qwen3_next(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys of a config.json of Qwen3-Next for a model section; what it cannot say shows when it is read again."""
    linear, full = MIXERS
    layers = c.layers()
    types = [linear if GatedDelta.name in layer else full for layer in layers]
    dense = [i for i, layer in enumerate(layers) if Experts.name not in layer]
    content = write_heads(c) | {
        "intermediate_size": c.ffn_dim, "attention_bias": False, "use_sliding_window": False, "layer_types": types,
        "partial_rotary_factor": _share(c.rotary_dim or c.head_dim, c.head_dim),
        "decoder_sparse_step": 1, "mlp_only_layers": dense, "norm_topk_prob": c.experts.normalize,
    }  # fmt: skip
    # Those who do not read `layer_types` read this.
    interval = next((n for n in range(1, len(types) + 1) if types == _types(len(types), n)), None)
    content |= {} if interval is None else {"full_attention_interval": interval}
    if linear in types:
        content |= {theirs: getattr(c.gated_delta, ours) for ours, theirs in RECURRENCE.items()}
    if len(dense) < len(layers):
        content |= {theirs: getattr(c.experts, ours) for ours, theirs in MIXTURE.items()}
    return content


def _share(part: int, whole: int) -> float:
    """Returns the quotient, a float whose product with `whole` is not below `part`: readers cut off its fraction."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)


def _kimi_recurrences(keys: Keys, layers: int) -> tuple[list[bool], dict[str, Any]]:
    """Returns (which layers are recurrences, the keys of their section). Layers count from 1.

    Raises:
      WeightsError: a layer is in no list, or in both.
    """
    inner = Keys(keys.path, dict(keys.need("linear_attn_config")))
    linear, full = inner.get("kda_layers", []), inner.get("full_attn_layers", [])
    if sorted([*linear, *full]) != [*range(1, layers + 1)]:
        raise WeightsError(
            f"{keys.path}: linear_attn_config must name each layer from 1 to {layers} once, in kda_layers or in "
            f"full_attn_layers, and has {linear} and {full}"
        )
    values = {}
    if linear:
        width = inner.need("head_dim")
        values = {"num_heads": inner.need("num_heads"), "key_dim": width, "value_dim": width, "rank": width}
        values["conv_width"] = inner.need("short_conv_kernel_size")
    for name in ("head_dim", "num_heads", "short_conv_kernel_size"):
        inner.get(name)
    inner.finish()
    return [i + 1 in linear for i in range(layers)], values


def read_kimi_linear(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model section that a config.json of Kimi Linear says beside those that all families have."""
    layers = sizes["num_layers"]
    for name, value in (
        ("moe_layer_freq", 1), ("num_expert_group", 1), ("topk_group", 1), ("num_nextn_predict_layers", 0),
        ("moe_router_activation_func", "sigmoid"), ("num_key_value_heads", sizes["num_heads"]), ("q_lora_rank", 0),
    ):  # fmt: skip
        keys.only(name, value)
    for name in ("head_dim", "use_grouped_topk", "model_max_length"):  # which follow, or do nothing with one group
        keys.get(name)
    linear, recurrence = _kimi_recurrences(keys, layers)
    first, shared = keys.get("first_k_dense_replace", 0), keys.get("num_shared_experts", 0)
    normalize, scale = keys.get("moe_renormalize", True), float(keys.get("routed_scaling_factor", 1.0))
    mixed = [keys.get(KIMI_MIXTURE["num"]) is not None and i >= first for i in range(layers)]
    kinds = [
        f"{KimiDelta.name if of_kda else LATENT}+{(Experts if m else MLP).name}"
        for of_kda, m in zip(linear, mixed, strict=True)
    ]
    values: dict[str, Any] = dict(of_kinds(kinds, ends=True))
    for name in (*KIMI_LATENT.values(), *KIMI_MIXTURE.values(), "intermediate_size", "mla_use_nope"):
        keys.get(name)
    if any(linear):
        keys.only("hidden_act", "silu", "swish")  # theirs is not that of the convolution, which is always silu
        section, shape, _ = SECTIONS[KimiDelta.name]
        values[section] = shape(**recurrence)
    if not all(linear):
        if not keys.need("mla_use_nope"):
            keys.only("mla_use_nope", True)
        section, shape, _ = SECTIONS[LatentAttention.name]
        latent = {ours: keys.need(theirs) for ours, theirs in KIMI_LATENT.items()}
        values[section] = shape(**latent, rope=False, norm_eps=LATENT_EPS)
    if any(mixed):
        section, shape, _ = SECTIONS[Experts.name]
        mixture = {ours: keys.need(theirs) for ours, theirs in KIMI_MIXTURE.items()}
        values[section] = shape(
            **mixture, shared_dim=shared * mixture["ffn_dim"], score="sigmoid", normalize=normalize, scaling_factor=scale,
            bias_rate=0.001,  # DeepSeek-V3's; a file shows only that there is a bias
        )  # fmt: skip
    # Nothing turns, so that no base of angles is the model's.
    values["rope_base"] = DecoderShape.rope_base
    return values | ({} if all(mixed) else {"ffn_dim": keys.need("intermediate_size")})


def write_kimi_linear(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys of a config.json of Kimi Linear for a model section; what it cannot say shows when it is read again."""
    layers, m, e = c.layers(), c.kda, c.experts
    linear = [i + 1 for i, layer in enumerate(layers) if KimiDelta.name in layer]
    full = [i + 1 for i, layer in enumerate(layers) if KimiDelta.name not in layer]
    sizes = {"num_heads": m.num_heads, "head_dim": m.key_dim, "short_conv_kernel_size": m.conv_width} if linear else {}
    content = {
        "num_key_value_heads": c.num_heads, "intermediate_size": c.ffn_dim, "q_lora_rank": None, "mla_use_nope": True,
        "linear_attn_config": {"kda_layers": linear, "full_attn_layers": full} | sizes, "num_nextn_predict_layers": 0,
        "first_k_dense_replace": sum(Experts.name not in layer for layer in layers), "moe_layer_freq": 1,
    }  # fmt: skip
    if full:
        content |= {theirs: getattr(c.latent, ours) for ours, theirs in KIMI_LATENT.items()}
    if e.num:
        content |= {theirs: getattr(e, ours) for ours, theirs in KIMI_MIXTURE.items()} | {
            "num_shared_experts": e.shared_dim // e.ffn_dim, "moe_renormalize": e.normalize, "num_expert_group": 1,
            "moe_router_activation_func": "sigmoid", "routed_scaling_factor": e.scaling_factor, "topk_group": 1,
            "use_grouped_topk": True,
        }  # fmt: skip
    return content
