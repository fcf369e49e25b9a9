"""The config.json of models whose layers are recurrences and attention in turn, in both directions: Qwen3-Next."""

from __future__ import annotations

import math
from typing import Any

from ejdist.models.config import SECTIONS, DecoderShape
from ejdist.models.feedforward import MLP, Experts
from ejdist.models.recurrent import GatedDelta
from ejdist.weights.config import Keys, mixed_layers, of_kinds, read_heads, read_rotary, read_types, write_heads

# Type of a layer -> the mixer that it names here.
MIXERS = {"linear_attention": GatedDelta.name, "full_attention": "full"}
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
