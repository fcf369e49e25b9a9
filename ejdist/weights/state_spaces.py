"""The config.json of models whose layers are Mamba-2, in both directions: Nemotron-H, and Mamba-2 as it was published."""

from __future__ import annotations

import math
from typing import Any

from ejdist.models.config import NONE, RELU2, SECTIONS, DecoderShape, parts_of_kind
from ejdist.models.feedforward import UngatedMLP
from ejdist.models.recurrent import Mamba2
from ejdist.weights.config import ACTIVATIONS, Keys, of_kinds_with_last, read_activation, write_activation
from ejdist.weights.files import WeightsError

SIZES_OF_NEMOTRON_H = {
    "vocab_size": "vocab_size", "model_dim": "hidden_size", "num_heads": "num_attention_heads",
    "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
SIZES_OF_MAMBA2 = {
    "vocab_size": "vocab_size", "model_dim": "hidden_size", "num_layers": "num_hidden_layers", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
# Letter of `hybrid_override_pattern` -> kind of a layer, each of one part.
MAMBA, ATTENDS, MLP = "M", "*", "-"
LETTERS = {MAMBA: f"{Mamba2.name}+{NONE}", ATTENDS: f"full+{NONE}", MLP: f"{NONE}+{UngatedMLP.name}"}
# The same by name, in `layers_block_type`, which newer files have; those of transformers 5 first.
TYPES = {"linear_attention": MAMBA, "full_attention": ATTENDS, "mlp": MLP, "mamba": MAMBA, "attention": ATTENDS}
UNGATED = ACTIVATIONS | {RELU2: RELU2}  # theirs -> ours
# Key of the section -> its name in a config.json.
OF_NEMOTRON_H = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_dim": "ssm_state_size", "num_groups": "n_groups",
    "conv_width": "conv_kernel",
}  # fmt: skip
OF_MAMBA2 = OF_NEMOTRON_H | {"num_heads": "num_heads", "head_dim": "head_dim", "state_dim": "state_size"}
# What decides how weights start, how a state is computed, and what is kept of it; not what is computed, but for roundings.
_ELSEWHERE = (
    "chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual",
    "residual_in_fp32", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep",
)  # fmt: skip
# transformers, to 5.24 at least, raises every step of Nemotron-H to `time_step_min`, which in the published code is of the
# start alone (huggingface/transformers#48989). None is below this one, whose logarithm is taken.
LEAST_STEP = 1e-20
# Keys that Nemotron-H does not read: of experts and of layers that predict tokens ahead, where there are none; of RoPE; and
# what other keys say.
_UNREAD = (
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
    "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor",
    "rms_norm_eps", "expand",
)  # fmt: skip


def read_nemotron_h(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model section that a config.json of Nemotron-H says beside its sizes."""
    letters = _letters(keys)
    _check_layer(keys, "mamba_hidden_act")
    for name, value in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("mamba_proj_bias", False),
        ("hidden_dropout", 0.0),
    ):
        keys.only(name, value)
    keys.only("sliding_window", None)
    keys.only("tie_word_embeddings", False)  # transformers ties nothing, whatever the key says
    width = keys.get("head_dim", 128, "attention_head_dim")
    heads = {"num_kv_heads": keys.get("num_key_value_heads", sizes["num_heads"]), "head_dim": width}
    act = read_activation(keys, "mlp_hidden_act", RELU2, UNGATED)
    for name in (*_UNREAD, *OF_NEMOTRON_H.values(), "intermediate_size", "attention_head_dim"):
        keys.get(name)  # of what no layer has it may be there all the same
    values = {"num_layers": len(letters)} | of_kinds_with_last([LETTERS[x] for x in letters])
    if ATTENDS in letters:
        values |= heads | {"attention_rope": False}
    if MLP in letters:
        values |= {"ffn_dim": keys.need("intermediate_size"), "activation": act}
    return values | (_section(keys, OF_NEMOTRON_H) if MAMBA in letters else {})


def write_nemotron_h(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys of a config.json of Nemotron-H for a model section; what it cannot say shows when it is read again."""
    by_parts = {parts_of_kind(kind): letter for letter, kind in LETTERS.items()}
    letters = "".join(by_parts.get(layer, "?") for layer in c.layers())
    content: dict[str, Any] = {
        "hybrid_override_pattern": letters, "num_hidden_layers": len(letters), "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "attention_head_dim": c.head_dim, "attention_bias": False, "attention_dropout": 0.0,
        "intermediate_size": c.ffn_dim, "mlp_hidden_act": write_activation(c, UNGATED) if MLP in letters else RELU2,
        "mlp_bias": False, "mamba_proj_bias": False, "rms_norm_eps": c.norm_eps, "time_step_min": LEAST_STEP,
    }  # fmt: skip
    return content | (_write_section(c, OF_NEMOTRON_H, "mamba_hidden_act") if MAMBA in letters else {})


def _letters(keys: Keys) -> str:
    """Returns the letter of each layer, of the names where a file has both."""
    name, types = "layers_block_type", keys.get("layers_block_type", None, "layer_types")
    pattern = keys.get("hybrid_override_pattern")
    if types is None:
        name, types = "hybrid_override_pattern", keys.need("hybrid_override_pattern")
        letters = [*pattern]
    else:
        letters = [TYPES.get(t, t) for t in types]
    strange = [t for t, letter in zip(types, letters, strict=True) if letter not in LETTERS]
    if strange:
        raise WeightsError(
            f"{keys.path}: {name} has {strange[0]!r}, which this model does not have: layers are {', '.join(LETTERS)}, or "
            f"{', '.join(TYPES)}, and experts without a gate are not among them"
        )
    layers = keys.get("num_hidden_layers", len(letters))
    if not letters or layers != len(letters):
        raise WeightsError(f"{keys.path}: {name} is of {len(letters)} layers, not {layers}; copy the file again")
    return "".join(letters)


def read_mamba2(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model section that a config.json of Mamba-2 says beside its sizes."""
    _check_layer(keys, "hidden_act")
    keys.only("rms_norm", True)
    keys.get(
        "norm_before_gate"
    )  # which transformers does not read, and Mamba-Codestral has as true: its gate comes first too
    section = _section(keys, OF_MAMBA2)
    (shape,) = section.values()
    wide, inner = keys.get("expand", 2) * sizes["model_dim"], shape.num_heads * shape.head_dim
    if wide != inner:
        raise WeightsError(
            f"{keys.path} has {shape.num_heads} heads of {shape.head_dim}, {inner} numbers, and by expand and hidden_size they "
            f"are {wide}; copy the file again"
        )
    return section | {"layer_pattern": (LETTERS[MAMBA],)}


def write_mamba2(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys of a config.json of Mamba-2 for a model section; what it cannot say shows when it is read again."""
    return _write_section(c, OF_MAMBA2, "hidden_act")


def _section(keys: Keys, names: dict[str, str]) -> dict[str, Any]:
    section, shape, _ = SECTIONS[Mamba2.name]
    return {section: shape(**{ours: keys.need(theirs) for ours, theirs in names.items()})}


def _write_section(c: DecoderShape, names: dict[str, str], act: str) -> dict[str, Any]:
    m = c.mamba2
    sizes = {theirs: getattr(m, ours) for ours, theirs in names.items()}
    expand, rest = divmod(m.num_heads * m.head_dim, c.model_dim)
    sizes |= {} if rest else {"expand": expand}  # which Nemotron-H does not need
    return sizes | {act: "silu", "use_bias": False, "use_conv_bias": True}


def _check_layer(keys: Keys, act: str) -> None:
    """Raises WeightsError for a layer of Mamba-2 that is not the one here. act: the key of its activation."""
    keys.only(act, "silu", "swish")
    keys.only("use_bias", False)
    keys.only("use_conv_bias", True)
    for name in _ELSEWHERE:
        keys.get(name)
    limits = keys.get("time_step_limit", [0.0, math.inf])
    plain = [x.get("__float__") if isinstance(x, dict) else x for x in limits] if isinstance(limits, list) else None
    if plain is None or len(plain) != 2 or plain[0] != 0 or str(plain[1]).lower() not in ("inf", "infinity"):
        raise WeightsError(
            f"{keys.path} has time_step_limit = {limits!r}, which this model does not have: its steps are of any size above 0"
        )
