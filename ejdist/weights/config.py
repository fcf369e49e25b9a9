"""What several families write into config.json in one way: rotary embedding, windows, the kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejdist.models.config import DecoderShape
from ejdist.weights.files import WeightsError

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}

# Keys that change no number of the forward here: names, tokens of the text, what generation and training elsewhere read.
_SILENT = frozenset(
    "architectures model_type auto_map torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id "
    "initializer_range max_position_embeddings pretraining_tp output_router_logits router_aux_loss_coef "
    "aux_loss_alpha seq_aux ep_size experts_per_token initial_context_length".split()
)


# What the value of a key is, beside the keys that may have one of a few values only.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    name: (kind, test)
    for kind, test, names in (
        (
            "a positive integer",
            lambda x: type(x) is int and x > 0,
            "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
            "sliding_window num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size "
            "decoder_sparse_step kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group "
            "shared_expert_intermediate_size full_attention_interval linear_num_key_heads linear_num_value_heads "
            "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim num_heads short_conv_kernel_size "
            "num_experts_per_token state_size ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel expand",
        ),
        (
            "an integer of at least 0",
            lambda x: type(x) is int and x >= 0,
            "q_lora_rank n_shared_experts first_k_dense_replace max_window_layers num_nextn_predict_layers num_mtp_layers "
            "num_shared_experts",
        ),
        (
            "a positive number",
            lambda x: type(x) in (int, float) and 0 < x < math.inf,
            "rms_norm_eps rope_theta factor attention_factor low_freq_factor high_freq_factor beta_slow beta_fast "
            "routed_scaling_factor original_max_position_embeddings partial_rotary_factor layer_norm_epsilon",
        ),
        ("a number", lambda x: type(x) in (int, float) and abs(x) < math.inf, "mscale mscale_all_dim"),
        (
            "true or false",
            lambda x: type(x) is bool,
            "attention_bias use_sliding_window norm_topk_prob tie_word_embeddings truncate moe_renormalize mla_use_nope",
        ),
        (
            "a string",
            lambda x: type(x) is str,
            "hidden_act rope_type mlp_hidden_act mamba_hidden_act hybrid_override_pattern",
        ),
        ("an object", lambda x: type(x) is dict, "rope_scaling rope_parameters linear_attn_config"),
        (
            "a list of strings",
            lambda x: type(x) is list and all(type(y) is str for y in x),
            "layer_types layers_block_type architectures",
        ),
        (
            "a list of integers",
            lambda x: type(x) is list and all(type(y) is int for y in x),
            "mlp_only_layers kda_layers full_attn_layers",
        ),
    )
    for name in names.split()
}


class Keys:
    """The keys of a config.json. A key that is read is known; any other may change the model."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self._content = path, content
        self._known: set[str] = set(_SILENT)

    def get(self, name: str, default: Any = None, *others: str) -> Any:
        """Returns the value of a key, or of the first of its other names that is present; a null counts as absent.

        Raises:
          WeightsError: the value is not of the kind that such a key has.
        """
        self._known |= {name, *others}
        key = next((n for n in (name, *others) if self._content.get(n) is not None), None)
        if key is None:
            return default
        value, (kind, test) = self._content[key], _KINDS.get(name, ("", lambda x: True))
        if not test(value):
            raise WeightsError(f"{self.path} has {key} = {value!r}, which is not {kind}; copy the file again")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def need(self, name: str, *others: str) -> Any:
        """Returns the value of a key. Raises WeightsError if there is none."""
        value = self.get(name, None, *others)
        if value is None:
            raise WeightsError(f"{self.path} has no {name}, which is required; copy the file again")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Raises WeightsError if a key is present with another value than these: the model would be another."""
        value = self.get(name)
        if value is not None and value not in values:
            raise WeightsError(
                f"{self.path} has {name} = {value!r}, which this model does not have: it computes what "
                f"{name} = {' or '.join(repr(v) for v in values)} does"
            )

    def finish(self) -> None:
        """Raises WeightsError for a key that was not read."""
        if self.get("quantization_config") is not None:
            raise WeightsError(
                f"{self.path} has a quantization_config, which is not supported; load the model with transformers, "
                "dequantize it, and save it as bfloat16"
            )
        unknown = [
            k for k, v in self._content.items() if k not in self._known and v is not None and not k.startswith("_")
        ]
        if unknown:
            raise WeightsError(
                f"{self.path} has {unknown[0]} = {self._content[unknown[0]]!r}, which is not known here and may change the "
                "model; if it does not, take the key out of the file"
            )


# Kind of scaling -> key of a model section -> (its name in a config.json, the value of a file that does not have it).
BANDS: dict[str, dict[str, tuple[str, float]]] = {
    "llama3": {"rope_low": ("low_freq_factor", 1.0), "rope_high": ("high_freq_factor", 4.0)},
    "yarn": {"rope_low": ("beta_slow", 1.0), "rope_high": ("beta_fast", 32.0)},
}


def _rope_of(keys: Keys) -> Keys:
    """Returns the keys of rotary embedding. Transformers 5 has them in `rope_parameters`, older files in `rope_scaling`."""
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    return Keys(keys.path, dict(old or new or {}))  # the order of transformers


def read_rotary(keys: Keys, width: int, default: float) -> int | None:
    """Returns how many entries of a head of that width turn; None for all. default: the share of a file that has none."""
    share = _rope_of(keys).get("partial_rotary_factor", keys.get("partial_rotary_factor", default))
    turned = int(width * share)
    return None if turned == width else turned


def read_rope(keys: Keys, base: float, partial: bool = False) -> dict[str, Any]:
    """Returns the keys of a model section that say how positions turn; in older files `rope_theta` is not among those of rotary
    embedding. partial: whether `read_rotary` reads which part of a head turns; otherwise it must be all of it."""
    inner = _rope_of(keys)
    theta = keys.get("rope_theta", base)
    values: dict[str, Any] = {"rope_base": float(inner.get("rope_theta", theta))}
    kind = inner.get("rope_type", "default", "type")
    for level in (keys, inner):
        if partial:
            level.get("partial_rotary_factor")
        else:
            level.only("partial_rotary_factor", 1.0)
    if kind != "default":
        values |= {"rope_scaling": kind, "rope_factor": float(inner.need("factor"))}
    if kind in ("llama3", "yarn"):
        length = keys.get("max_position_embeddings")
        length = inner.get("original_max_position_embeddings", length)
        if length is None:
            raise WeightsError(
                f"{keys.path} has rope_type = {kind!r} without original_max_position_embeddings; copy it again"
            )
        values["rope_original_length"] = int(length)
    for key, (name, default) in BANDS.get(kind, {}).items():
        value = inner.get(name, default)
        values[key] = None if value == default else float(value)
    if kind == "yarn":
        values["rope_truncate"] = bool(inner.get("truncate", True))
        factor, one, all_of = inner.get("attention_factor"), inner.get("mscale"), inner.get("mscale_all_dim")
        if factor is None and one and all_of:
            factor = magnitude(values["rope_factor"], one) / magnitude(values["rope_factor"], all_of)
        values["rope_attention_factor"] = factor
    elif kind not in ("default", "linear", "llama3"):
        raise WeightsError(
            f"{keys.path} has rope_type = {kind!r}, which is not supported; use default, linear, llama3 or yarn"
        )
    inner.finish()
    return values


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor for a context that many times longer."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def write_rope(c: DecoderShape) -> dict[str, Any]:
    """Returns the keys of a config.json for the model's positions, as every version of transformers reads them."""
    content: dict[str, Any] = {"rope_theta": c.rope_base}
    if c.rope_scaling is None:
        return content
    scaling: dict[str, Any] = {"rope_type": c.rope_scaling, "factor": c.rope_factor}
    if c.rope_scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = c.rope_original_length
    for key, (name, default) in BANDS.get(c.rope_scaling, {}).items():
        value = getattr(c, key)
        scaling[name] = default if value is None else value
    if c.rope_scaling == "yarn":
        scaling["truncate"] = c.rope_truncate
        if c.rope_attention_factor is not None:
            scaling["attention_factor"] = c.rope_attention_factor
    return content | {"rope_scaling": scaling}


def of_kinds(kinds: Sequence[str], ends: bool = False) -> dict[str, tuple[str, ...]]:
    """Returns the shortest `first_layers` and `layer_pattern` of these layers; `last_layers` too, if others may end it."""
    kinds = tuple(kinds)
    best = (len(kinds), 0, 0, len(kinds))  # how many there are of all three; of the last, the first, and the pattern
    for head in range(len(kinds)):
        rest = kinds[head:]
        for period in range(1, min(len(rest), best[0] - head) + 1):
            same = next((i for i, kind in enumerate(rest) if kind != rest[i % period]), len(rest))
            tail = len(rest) - same
            if ends or not tail:
                best = min(best, (head + period + tail, tail, head, period))
    _, tail, head, period = best
    last = {"last_layers": kinds[len(kinds) - tail :]} if tail else {}
    return {"first_layers": kinds[:head], "layer_pattern": kinds[head : head + period]} | last


def kind_of(windowed: bool, experts: bool) -> str:
    return "_".join([*(["window"] if windowed else []), *(["experts"] if experts else [])]) or "full"


def windows_of(c: DecoderShape) -> list[bool]:
    """Returns which layers have a window."""
    return ["window_attention" in layer for layer in c.layers()]


def layer_types(c: DecoderShape) -> list[str]:
    return ["sliding_attention" if windowed else "full_attention" for windowed in windows_of(c)]


def read_layer_types(keys: Keys, layers: int, default: Sequence[bool]) -> list[bool]:
    """Returns which layers have a window."""
    types = read_types(keys, layers, ("sliding_attention", "full_attention"))
    return list(default) if types is None else [t == "sliding_attention" for t in types]


def read_types(keys: Keys, layers: int, known: Collection[str]) -> list[str] | None:
    """Returns the type of each layer; None where the file has none. Raises WeightsError: one is not known, or they are not as
    many as the layers."""
    types = keys.get("layer_types")
    if types is None:
        return None
    strange = [t for t in types if t not in known]
    if strange or len(types) != layers:
        what = (
            f"has {strange[0]!r}, which this model does not have"
            if strange
            else f"is of {len(types)} layers, not {layers}"
        )
        raise WeightsError(f"{keys.path}: layer_types {what}")
    return types


def mixed_layers(keys: Keys, layers: int) -> list[bool]:
    """Returns which layers have experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    every, dense = keys.get("decoder_sparse_step", 1), set(keys.get("mlp_only_layers", []))
    return [i not in dense and (i + 1) % every == 0 for i in range(layers)]


def read_activation(keys: Keys, name: str, default: str, known: Mapping[str, str]) -> str:
    """Returns the activation of MLPs, which a key names in their words. known: theirs -> ours."""
    act = keys.get(name, default)
    if act not in known:
        raise WeightsError(
            f"{keys.path} has {name} = {act!r}, which is not supported; supported are {', '.join(known)}"
        )
    return known[act]


def write_activation(c: DecoderShape, known: Mapping[str, str]) -> str:
    """Returns the family's name of the model's activation; if it has none, the model's own, which every reader refuses."""
    return {ours: theirs for theirs, ours in reversed(list(known.items()))}.get(c.activation, c.activation)


def read_heads(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of attention's heads. sizes: those of the section that all families have."""
    heads = sizes["num_heads"]
    width = keys.get("head_dim", sizes["model_dim"] // heads)
    return {"num_kv_heads": keys.get("num_key_value_heads", heads), "head_dim": width}


def write_heads(c: DecoderShape) -> dict[str, Any]:
    return {"num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim}
