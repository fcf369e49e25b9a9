"""The families of models whose files are read and written: each its tensors, and its config.json in both directions.

A new family is a line in `FAMILIES`. What it cannot express of a model shows when its config.json is written and read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejdist.models.config import DecoderShape, ExpertsShape, LatentShape
from ejdist.models.decoder import DecoderConfig
from ejdist.registered import LAYER, entry_of, names_of
from ejdist.sections import flat, validate
from ejdist.weights import state_spaces
from ejdist.weights.config import (
    ACTIVATIONS,
    Keys,
    kind_of,
    layer_types,
    magnitude,
    mixed_layers,
    of_kinds,
    read_activation,
    read_heads,
    read_layer_types,
    read_rope,
    windows_of,
    write_activation,
    write_heads,
    write_rope,
)
from ejdist.weights.files import WeightsError, read_json
from ejdist.weights.hybrids import read_kimi_linear, read_qwen3_next, write_kimi_linear, write_qwen3_next
from ejdist.weights.match import differences, without_ntk, written
from ejdist.weights.names import (
    EXPERTS,
    FUSED_EXPERTS,
    FUSED_NEXT_EXPERTS,
    GPT_OSS_EXPERTS,
    KIMI,
    MIXTRAL_EXPERTS,
    NEXT_EXPERTS,
    hybrid,
    of_mixers,
    rules,
    with_ahead,
)
from ejdist.weights.tensors import Rules

# -- config.json ----------------------------------------------------------------------------------------------------------

PLAIN = {
    "vocab_size": "vocab_size", "model_dim": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "norm_eps": "rms_norm_eps",
}  # fmt: skip


def _dense(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    return read_heads(keys, sizes) | {"ffn_dim": keys.need("intermediate_size")}


def _write_dense(c: DecoderShape) -> dict[str, Any]:
    return write_heads(c) | {"intermediate_size": c.ffn_dim}


def _llama(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    keys.only("mlp_bias", False)
    bias = keys.get("attention_bias", False)
    return _dense(keys, sizes) | {"attention_bias": bias, "attention_output_bias": bias}


def _write_llama(c: DecoderShape) -> dict[str, Any]:
    return _write_dense(c) | {"attention_bias": c.attention_bias, "mlp_bias": False}


def _one_window(keys: Keys, experts: bool, layers: int, default: int | None = None) -> dict[str, Any]:
    """A window that all layers have."""
    window = keys.get("sliding_window", default)
    return {"sliding_window": window} | of_kinds([kind_of(window is not None, experts)] * layers)


def _mistral(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    # A file without the key has the window of the first Mistral; a null means no window.
    return _dense(keys, sizes) | _one_window(
        keys, False, sizes["num_layers"], None if "sliding_window" in keys else 4096
    )


def _write_mistral(c: DecoderShape) -> dict[str, Any]:
    return _write_dense(c) | {"sliding_window": c.sliding_window}


def _qwen_layers(keys: Keys, layers: int) -> dict[str, Any]:
    keys.only("use_mrope", False)
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    first = keys.get("max_window_layers", 28)
    windows = read_layer_types(keys, layers, [window is not None and i >= first for i in range(layers)])
    values = of_kinds([kind_of(windowed, False) for windowed in windows])
    return values | ({"sliding_window": window} if any(windows) else {})


def _qwen2(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    return _dense(keys, sizes) | _qwen_layers(keys, sizes["num_layers"]) | {"attention_bias": True}


def _qwen3(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    bias = keys.get("attention_bias", False)
    more = {"qk_norm": True, "attention_bias": bias, "attention_output_bias": bias}
    return (
        _dense(keys, sizes) | {"head_dim": keys.get("head_dim", 128)} | _qwen_layers(keys, sizes["num_layers"]) | more
    )


def _write_qwen2(c: DecoderShape) -> dict[str, Any]:
    windowed = c.sliding_window is not None
    window = {"use_sliding_window": windowed, "sliding_window": c.sliding_window, "layer_types": layer_types(c)}
    # Those who do not read `layer_types` read this.
    return _write_dense(c) | window | {"max_window_layers": c.num_layers - sum(windows_of(c))}


def _write_qwen3(c: DecoderShape) -> dict[str, Any]:
    return _write_qwen2(c) | {"attention_bias": c.attention_bias}


def _qwen3_moe(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    bias, mixed = keys.get("attention_bias", False), mixed_layers(keys, sizes["num_layers"])
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    keys.get("max_window_layers")  # which this family does not read
    experts = ExpertsShape(
        num=keys.need("num_experts", "num_local_experts"),
        top_k=keys.need("num_experts_per_tok"),
        ffn_dim=keys.need("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
    )
    values = read_heads(keys, sizes) | of_kinds([kind_of(window is not None, m) for m in mixed]) | {"experts": experts}
    ffn = keys.get("intermediate_size", 6144)  # of the layers without experts
    values |= {} if all(mixed) else {"ffn_dim": ffn}
    return values | {"qk_norm": True, "attention_bias": bias, "attention_output_bias": bias, "sliding_window": window}


def _write_qwen3_moe(c: DecoderShape) -> dict[str, Any]:
    m = c.experts
    dense = [i for i, layer in enumerate(c.layers()) if "experts" not in layer]
    experts = {"num_experts": m.num, "num_experts_per_tok": m.top_k, "moe_intermediate_size": m.ffn_dim}
    experts |= {"norm_topk_prob": m.normalize, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    window = {"use_sliding_window": c.sliding_window is not None, "sliding_window": c.sliding_window}
    return _write_dense(c) | experts | window | {"attention_bias": c.attention_bias}


def _mixtral(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    keys.only("router_jitter_noise", 0.0)
    experts = ExpertsShape(
        num=keys.need("num_local_experts", "num_experts"),
        top_k=keys.need("num_experts_per_tok"),
        ffn_dim=keys.need("intermediate_size"),
    )
    return read_heads(keys, sizes) | _one_window(keys, True, sizes["num_layers"]) | {"experts": experts}


def _write_mixtral(c: DecoderShape) -> dict[str, Any]:
    m = c.experts
    experts = {"num_local_experts": m.num, "num_experts_per_tok": m.top_k, "intermediate_size": m.ffn_dim}
    return _write_dense(c) | experts | {"sliding_window": c.sliding_window, "router_jitter_noise": 0.0}


def _deepseek_v3(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    for name, value in (
        ("attention_bias", False), ("moe_layer_freq", 1), ("rope_interleave", True), ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ):  # fmt: skip
        keys.only(name, value)
    # Which follow from the others; and of multi-token prediction, which is read with model.mtp.modules=1 and else reported.
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads", "num_nextn_predict_layers", "num_mtp_layers"):
        keys.get(name)
    latent = LatentShape(
        kv_rank=keys.need("kv_lora_rank"),
        query_rank=keys.get("q_lora_rank", 0),
        nope_dim=keys.need("qk_nope_head_dim"),
        rope_dim=keys.need("qk_rope_head_dim"),
        value_dim=keys.need("v_head_dim"),
    )
    ffn, shared, groups = keys.need("moe_intermediate_size"), keys.get("n_shared_experts", 0), keys.get("n_group", 1)
    chosen = keys.get("topk_group", 1)
    experts = ExpertsShape(
        num=keys.need("n_routed_experts"),
        top_k=keys.need("num_experts_per_tok"),
        ffn_dim=ffn,
        shared_dim=ffn * shared,
        score="sigmoid",
        normalize=keys.get("norm_topk_prob", True),
        scaling_factor=float(keys.get("routed_scaling_factor", 1.0)),
        num_groups=groups,
        topk_groups=chosen if groups > 1 else None,
        bias_rate=0.001,  # the published one; a file shows only that there is a bias
        balance="sequence",
    )
    first = keys.get("first_k_dense_replace", 0)
    kinds = ["latent" if i < first else "latent_experts" for i in range(sizes["num_layers"])]
    values = {"latent": latent, "experts": experts, "ffn_dim": keys.need("intermediate_size")} | of_kinds(kinds)
    scaling = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if scaling.get("mscale_all_dim") and scaling.get("rope_type", scaling.get("type")) not in (None, "default"):
        up = magnitude(float(scaling["factor"]), scaling["mscale_all_dim"])
        values["attention_scale"] = up**2 / math.sqrt(latent.nope_dim + latent.rope_dim)
    return values


def _write_deepseek_v3(c: DecoderShape) -> dict[str, Any]:
    m, e = c.latent, c.experts
    content: dict[str, Any] = {
        "num_key_value_heads": c.num_heads, "intermediate_size": c.ffn_dim, "kv_lora_rank": m.kv_rank,
        "q_lora_rank": m.query_rank or None, "qk_nope_head_dim": m.nope_dim, "qk_rope_head_dim": m.rope_dim,
        "v_head_dim": m.value_dim, "n_routed_experts": e.num, "num_experts_per_tok": e.top_k,
        "moe_intermediate_size": e.ffn_dim, "n_shared_experts": e.shared_dim // max(e.ffn_dim, 1),
        "norm_topk_prob": e.normalize, "routed_scaling_factor": e.scaling_factor, "n_group": e.num_groups,
        "topk_group": e.topk_groups or 1, "first_k_dense_replace": c.kinds().count("latent"), "moe_layer_freq": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False, "rope_interleave": True,
        "num_nextn_predict_layers": c.mtp.modules,
    }  # fmt: skip
    if c.rope_scaling == "yarn" and c.attention_scale is not None and c.rope_factor > 1:
        # The logits' scale is in `mscale_all_dim`, and what is left of it in cos and sin follows from `mscale`.
        log = 0.1 * math.log(c.rope_factor)
        up = math.sqrt(c.attention_scale * math.sqrt(m.nope_dim + m.rope_dim))
        turned = (magnitude(c.rope_factor) if c.rope_attention_factor is None else c.rope_attention_factor) * up
        scaling = write_rope(c)["rope_scaling"]
        scaling.pop("attention_factor", None)
        scaling |= {"mscale": round((turned - 1) / log, 9), "mscale_all_dim": round((up - 1) / log, 9)}
        content["rope_scaling"] = scaling
    return content


def _gpt_oss(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    keys.only("swiglu_alpha", 1.702)
    keys.only("swiglu_limit", 7.0)
    keys.only("attention_bias", True)
    windows = read_layer_types(keys, sizes["num_layers"], [i % 2 == 0 for i in range(sizes["num_layers"])])
    experts = ExpertsShape(
        num=keys.need("num_local_experts", "num_experts"),
        top_k=keys.need("num_experts_per_tok"),
        ffn_dim=keys.need("intermediate_size"),
        activation="clamped_swiglu",
        bias=True,
        router_bias=True,
    )
    window = keys.get("sliding_window", 128)
    values = read_heads(keys, sizes) | {"head_dim": keys.get("head_dim", 64), "experts": experts}
    values |= of_kinds([kind_of(windowed, True) for windowed in windows])
    biases = {"attention_bias": True, "attention_output_bias": True, "attention_sinks": True}
    return values | biases | ({"sliding_window": window} if any(windows) else {})


def _write_gpt_oss(c: DecoderShape) -> dict[str, Any]:
    m = c.experts
    experts = {"num_local_experts": m.num, "num_experts_per_tok": m.top_k, "intermediate_size": m.ffn_dim}
    experts |= {"swiglu_limit": 7.0, "attention_bias": True}
    return _write_dense(c) | experts | {"sliding_window": c.sliding_window, "layer_types": layer_types(c)}


# -- families -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    read: (keys, the sizes that all have) -> more keys of the model section. write: the section -> more keys of config.json.
    rules: tensors as they are written, then other layouts that are read. rope_base, norm_eps: where config.json has none.
    partial: whether a part of a head may turn, which `read` reads. sizes: key of the section -> its name in config.json, which
    must be there. common: whether its keys of an MLP's activation and of positions are those of most families; otherwise `read`
    and `write` know them. unadapted: last parts of the names of modules that PEFT refuses in its models.
    """

    model_type: str
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    write: Callable[[DecoderShape], dict[str, Any]]
    rules: tuple[Rules, ...]
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    partial: bool = False
    sizes: Mapping[str, str] = field(default_factory=lambda: PLAIN)
    common: bool = True
    unadapted: tuple[str, ...] = ()

    def section(self, keys: Keys) -> DecoderConfig:
        """Returns the model section of a config.json. Raises WeightsError for what the model does not have."""
        sizes = {
            ours: keys.get(theirs, self.norm_eps) if ours == "norm_eps" else keys.need(theirs)
            for ours, theirs in self.sizes.items()
        }
        keys.only("attention_dropout", 0.0)
        values = sizes | {"tie_embeddings": keys.get("tie_word_embeddings", False)}
        if self.common:
            act = read_activation(keys, "hidden_act", "silu", ACTIVATIONS)
            values |= {"activation": act} | read_rope(keys, self.rope_base, self.partial)
        values |= self.read(keys, sizes)
        keys.finish()
        section = DecoderConfig(**values)
        try:
            validate(section)
        except ValueError as error:
            raise WeightsError(f"{keys.path} does not describe a valid model: {error}") from error
        return section

    def config(self, c: DecoderShape) -> dict[str, Any]:
        """Returns a config.json without what a model section does not know: tokens, dtype, length."""
        plain = {theirs: getattr(c, ours) for ours, theirs in self.sizes.items()}
        plain |= {"tie_word_embeddings": c.tie_embeddings}
        if self.common:
            act = {"hidden_act": write_activation(c, ACTIVATIONS), "attention_dropout": 0.0}
            plain |= act | write_rope(without_ntk(c))
        return {"model_type": self.model_type} | plain | self.write(c)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, _write_llama, (rules(),)),
    "MistralForCausalLM": Family("mistral", _mistral, _write_mistral, (rules(),)),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, _write_qwen2, (rules(),)),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, _write_qwen3, (rules(),)),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", _qwen3_moe, _write_qwen3_moe, (rules(experts=EXPERTS), rules(experts=FUSED_EXPERTS))
    ),
    "MixtralForCausalLM": Family(
        "mixtral", _mixtral, _write_mixtral, (rules(experts=MIXTRAL_EXPERTS), rules(experts=FUSED_EXPERTS)), 1e6, 1e-5
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", _deepseek_v3, _write_deepseek_v3, (with_ahead(EXPERTS), with_ahead(FUSED_EXPERTS))
    ),
    "GptOssForCausalLM": Family("gpt_oss", _gpt_oss, _write_gpt_oss, (rules(experts=GPT_OSS_EXPERTS),), 150000.0, 1e-5),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", read_qwen3_next, write_qwen3_next, (hybrid(NEXT_EXPERTS), hybrid(FUSED_NEXT_EXPERTS)), partial=True
    ),
    # Published with code of its own, by which transformers loads it.
    "KimiLinearForCausalLM": Family("kimi_linear", read_kimi_linear, write_kimi_linear, (KIMI,)),
    # Before Nemotron-H, which may have no other layers too.
    "Mamba2ForCausalLM": Family(
        "mamba2", state_spaces.read_mamba2, state_spaces.write_mamba2, (of_mixers("backbone"),), norm_eps=1e-5,
        sizes=state_spaces.SIZES_OF_MAMBA2, common=False, unadapted=("out_proj",),
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", state_spaces.read_nemotron_h, state_spaces.write_nemotron_h, (of_mixers("backbone"), of_mixers("model")),
        norm_eps=1e-5, sizes=state_spaces.SIZES_OF_NEMOTRON_H, common=False, unadapted=("out_proj",),
    ),
}  # fmt: skip


def read_config(folder: Path) -> tuple[Family, DecoderConfig]:
    """Returns (the family, the model section) of a folder with a config.json.

    Raises:
      WeightsError: it cannot be read, or its model is not supported.
    """
    path = folder / "config.json"
    content = read_json(path)
    keys = Keys(path, content)
    names = keys.get("architectures", [])
    by_type = {family.model_type: family for family in FAMILIES.values()}
    match = next(
        (FAMILIES[n] for n in names if n in FAMILIES), None if names else by_type.get(str(content.get("model_type")))
    )
    if match is None:
        named = ", ".join(map(str, names)) or content.get("model_type")
        raise WeightsError(f"{path} is of {named}, which is not supported; supported are {', '.join(FAMILIES)}")
    return match, match.section(keys)


def family_of(c: DecoderShape, first: str | None = None) -> tuple[str, Family]:
    """Returns (name of the architecture, family) for a model: `first`, or else the first whose config.json can describe it.

    Raises:
      WeightsError: no family can; names the layers of plugins, or the first key that the nearest family cannot express.
    """
    own = [entry for name in names_of(LAYER) if (entry := entry_of(LAYER, name)) and name in c.part_names()]
    if own:
        layers = " and ".join(f"{entry.name!r} of {entry.module}" for entry in own)
        raise WeightsError(
            f"the model cannot be exported: it has layers of plugins, {layers}, which no family of transformers has; "
            "launch.evaluate and model.init_from read the run itself"
        )
    tried: list[tuple[int, str, str]] = []
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[0] != first):
        path = Path(f"the config.json of {name}")
        try:
            left = differences(c, family.section(Keys(path, family.config(c))))
            left += ["mtp.modules"] if c.mtp.modules and not family.rules[0].ahead else []
        except WeightsError:
            continue
        if not left:
            return name, family
        tried.append((len(left), name, left[0]))
    if not tried:
        raise WeightsError("the model cannot be exported: no family of transformers matches it")
    _, name, key = min(tried, key=lambda t: t[0])
    value = written(flat(c).get(key)) if key != "layers" else ", ".join(dict.fromkeys(c.kinds()))
    raise WeightsError(
        f"the model cannot be exported: no family of transformers matches it; {name} is the nearest, and its config.json "
        f"cannot say {'layers of the kinds ' if key == 'layers' else f'model.{key} = '}{value}"
    )
