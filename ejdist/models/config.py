"""The configuration of a decoder: its sizes and options, and the kinds of layers that a pattern may name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ejdist.dtypes import dtype_name
from ejdist.experts.layer import ACTIVATIONS as EXPERT_ACTIVATIONS
from ejdist.experts.layer import CLAMPED
from ejdist.experts.router import BALANCE, SCORES
from ejdist.models.ahead_shape import AheadShape
from ejdist.models.attention_shapes import LEAST, MOST, LatentShape, SparseShape
from ejdist.models.recurrent_shapes import GatedDeltaShape, GlaShape, KdaShape, LightningShape, Mamba2Shape, Rwkv7Shape
from ejdist.models.remat import REMAT
from ejdist.precision import BF16, check_head, check_precision
from ejdist.sections import operational, spelled
from kernels.ops.gated_mlp import ACTIVATIONS
from kernels.ops.rotary_embedding import EXACT_FROM, RopeScaling

# A kind of layer is MIXER+FEED_FORWARD, by their names in `PARTS` of ejdist/models/parts.py; "none" for a layer without one.
NONE = "none"
# Short names of mixers in patterns.
MIXERS = {
    "full": "attention",
    "window": "window_attention",
    "latent": "latent_attention",
    "sparse": "sparse_attention",
}
# Old names of kinds, kept as aliases. Do not add new ones.
ALIASES = {name: f"{name}+mlp" for name in MIXERS} | {
    "experts": "full+experts",
    "window_experts": "window+experts",
    "latent_experts": "latent+experts",
}
# Key of a model section that has no meaning without `rope_scaling` -> field of RopeScaling.
ROPE_SCALING = {
    "rope_factor": "factor",
    "rope_original_length": "original_length",
    "rope_low": "low",
    "rope_high": "high",
    "rope_attention_factor": "attention_factor",
    "rope_truncate": "truncate",
}
# The activation that only an MLP without a gate has, the square of relu (So et al., Primer, 2021, arXiv:2109.08668).
RELU2 = "relu2"
# Mixers that have the keys of plain attention: heads, RoPE, biases and what else one of them may have.
_PLAIN = ("attention", "window_attention", "sparse_attention")


def parts_of_kind(kind: str) -> tuple[str, ...]:
    """Returns the parts of a kind of layer, "window+experts" or one of `ALIASES`, in the order in which they run.
    `stack.check_kinds` checks that they exist."""
    mixer, _, feed_forward = ALIASES.get(kind, kind).partition("+")
    return tuple(name for name in (MIXERS.get(mixer, mixer), feed_forward) if name not in ("", NONE))


def _parts_of_kinds(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    return [parts_of_kind(kind) for kind in kinds]


@dataclass(unsafe_hash=True)
class ExpertsShape:
    """A mixture of experts in place of a layer's MLP; see `ejdist.moe` and `ejdist.route`."""

    num: int = 0  # experts of a layer; 0: none
    top_k: int = 2  # experts that a token goes to
    ffn_dim: int = 0  # width of one expert
    activation: str | None = None  # activation of an expert; null: the model's; clamped_swiglu for GPT-OSS
    bias: bool = False  # biases of the experts' products (GPT-OSS)
    shared_dim: int = 0  # width of the shared expert; of several, the sum of their widths
    shared_gate: bool = False  # weight the shared expert's output by a sigmoid of the token (Qwen2-MoE)
    score: str = "softmax"  # how the router's logits become weights: softmax, sigmoid, sqrtsoftplus
    normalize: bool = True  # the weights of a token's experts sum to one
    scaling_factor: float = 1.0  # multiplies the routing weights
    num_groups: int = 1  # groups of experts, of which a token's experts come from some (DeepSeek)
    topk_groups: int | None = None  # how many of the groups
    group_top: int = 2  # a group's score is the sum of this many of its best scores; 1 in DeepSeek-V2
    router_bias: bool = False  # a parameter, added to the logits (GPT-OSS)
    bias_rate: float = 0.0  # update rate of the bias that balances without a loss (DeepSeek-V3); 0: no bias
    # Scope of the balance loss: batch (a microbatch, over all devices), sequence, or global (the global batch, with the counts
    # of the previous step).
    balance: str = "batch"
    # Weight of the balance loss, a mean over a microbatch's tokens; microbatches count in proportion to their tokens.
    balance_loss: float = 0.0
    z_loss: float = 0.0  # weight of the squared log-sum-exp of the router's logits, a mean over tokens too
    jitter: float = 0.0  # multiplicative noise on the router's input
    forced_balance: bool = False  # assign experts in turn: only for benchmarks

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without experts all keys must keep their defaults."""
        if self == ExpertsShape():
            return
        for name in ("num", "top_k", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.experts.{name} must be positive, got {getattr(self, name)}")
        if self.top_k > self.num:
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than model.experts.num = {self.num}, the number of experts"
            )
        self._validate_groups()
        choices = {"score": SCORES, "balance": BALANCE, "activation": (None, *EXPERT_ACTIVATIONS)}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                listed = ", ".join("null" if value is None else value for value in values)
                raise ValueError(f"model.experts.{name} = {getattr(self, name)!r} is unknown; use one of {listed}")
        if self.shared_dim < 0 or (self.shared_gate and not self.shared_dim):
            raise ValueError(
                f"model.experts.shared_dim must be the width of the shared experts, got {self.shared_dim}; 0 for none, and "
                "then no model.experts.shared_gate"
            )
        if self.shared_dim and self.activation == CLAMPED:
            raise ValueError(
                f"model.experts.activation = {CLAMPED!r} does not support shared experts; set model.experts.shared_dim to 0"
            )
        for name in ("bias_rate", "balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.experts.{name} must be 0 or positive, got {getattr(self, name)}")
        if not 0 < self.scaling_factor < math.inf:
            raise ValueError(f"model.experts.scaling_factor must be positive, got {self.scaling_factor}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"model.experts.jitter must be in [0, 1), got {self.jitter}")
        if self.forced_balance and self.bias_rate:
            raise ValueError(
                "model.experts.forced_balance chooses nothing that a bias could balance; set bias_rate to 0"
            )

    def _validate_groups(self) -> None:
        size, rest = divmod(self.num, max(self.num_groups, 1))
        if self.num_groups < 1 or rest:
            raise ValueError(
                f"model.experts.num_groups = {self.num_groups} must divide model.experts.num = {self.num}; 1 for no groups"
            )
        if self.num_groups == 1:
            for name, default in (("topk_groups", None), ("group_top", 2)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"model.experts.{name} = {getattr(self, name)}: give model.experts.num_groups, or leave it out"
                    )
        elif self.topk_groups is None or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"model.experts.num_groups = {self.num_groups} needs model.experts.topk_groups, how many of them, at least 1 "
                f"and at most {self.num_groups}, got {'null' if self.topk_groups is None else self.topk_groups}"
            )
        elif self.top_k > self.topk_groups * size:
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than the {self.topk_groups * size} experts of "
                f"model.experts.topk_groups = {self.topk_groups} groups"
            )
        elif not 1 <= self.group_top <= size:
            raise ValueError(
                f"model.experts.group_top = {self.group_top} must be at least 1 and at most {size}, the experts of a group"
            )


# Name of a part -> its section of a model's, what that is, and the size in it that a layer cannot do without.
SECTIONS: dict[str, tuple[str, type, str]] = {
    "experts": ("experts", ExpertsShape, "num"),
    "latent_attention": ("latent", LatentShape, "kv_rank"),
    "sparse_attention": ("sparse", SparseShape, "block_size"),
    "gated_delta": ("gated_delta", GatedDeltaShape, "num_key_heads"),
    "kda": ("kda", KdaShape, "num_heads"),
    "mamba2": ("mamba2", Mamba2Shape, "num_heads"),
    "lightning": ("lightning", LightningShape, "num_heads"),
    "gla": ("gla", GlaShape, "num_heads"),
    "rwkv7": ("rwkv7", Rwkv7Shape, "num_heads"),
}


@dataclass(unsafe_hash=True)
class DecoderShape:
    """Shape and options of a decoder, which its layers read. Not frozen: recipes compose it."""

    vocab_size: int = 512  # rows of the embedding; at least the tokenizer's
    num_layers: int = 4  # layers, those of first_layers and last_layers too
    model_dim: int = 128  # width of the residual stream
    num_heads: int = 4  # query heads of a layer
    num_kv_heads: int = 2  # heads of keys and values, which groups of query heads share
    head_dim: int = 32  # width of a head
    ffn_dim: int = 384  # width of the MLP
    activation: str = "silu"  # activation of the MLP: silu, gelu, gelu_tanh, relu; relu2 of one without a gate
    rope_base: float = 10000.0  # base of RoPE's frequencies, which Llama calls rope_theta
    rope_scaling: str | None = None  # how RoPE is stretched: linear, ntk, yarn, llama3
    rope_factor: float = 1.0  # by how much it is stretched: the new context over the old one
    rope_original_length: int = 8192  # tokens of the context before scaling
    # Frequencies with fewer rotations over that context are divided by the factor: yarn's beta_slow, llama3's low_freq_factor.
    rope_low: float | None = None  # null for 1
    # Frequencies with more rotations over that context are kept: yarn's beta_fast, llama3's high_freq_factor.
    rope_high: float | None = None  # null for 32 (yarn) or 4 (llama3)
    rope_attention_factor: float | None = None  # what yarn multiplies cos and sin by; null for 0.1 ln(factor) + 1
    rope_truncate: bool = True  # whether yarn's ramp is between whole pairs; false in GPT-OSS
    # Position from which RoPE's angles are exact; before it they are float32, as in published models. 0: all; null: none.
    rope_exact_from: int | None = operational(EXACT_FROM, recorded=True)
    rotary_dim: int | None = None  # entries of a head that RoPE turns, its first; null for all (Qwen3-Next: a quarter)
    qk_norm: bool = False  # RMSNorm of each query and key head (Qwen3)
    attention_bias: bool = False  # biases of the q, k and v projections (Qwen2)
    attention_output_bias: bool = False  # a bias of the output projection (GPT-OSS)
    attention_sinks: bool = False  # a learned logit per head that takes probability without a value (GPT-OSS)
    attention_gate: bool = False  # weights each number of a head's output by a sigmoid of the token (Qwen3-Next)
    attention_rope: bool = (
        True  # RoPE turns queries and keys; in Nemotron-H nothing does, and recurrences know positions
    )
    attention_scale: float | None = None  # scale of the logits; null for 1/sqrt(width of a query's head)
    tie_embeddings: bool = True  # the output projection is the embedding
    # Kinds of the first layers, before the pattern, as in layer_pattern.
    first_layers: tuple[str, ...] = spelled((), _parts_of_kinds)
    # Kinds of layers that repeat, each MIXER+FEED_FORWARD, for example [window+mlp,full+experts]; full alone is full+mlp.
    layer_pattern: tuple[str, ...] = spelled(("full",), _parts_of_kinds)
    # Kinds of the last layers, after the pattern, where they are not what it goes on with.
    last_layers: tuple[str, ...] = spelled((), _parts_of_kinds)
    sliding_window: int | None = None  # number of keys that a windowed layer sees
    attention_soft_cap: float | None = (
        None  # attention's logits pass tanh, scaled to this bound (Gemma 2); null for none
    )
    logits_soft_cap: float | None = None  # the same for the logits of the vocabulary
    norm_eps: float = 1e-6  # added to the mean square in every RMSNorm
    zero_centered_norms: bool = (
        False  # RMSNorms multiply by 1 + their weight (Qwen3-Next); not those of a recurrence's result
    )
    init_std: float = 0.02  # standard deviation of the weights at the start
    compute_dtype: str = "float32"  # dtype of activations and matmuls, bfloat16 or float32; parameters stay float32
    # Products of the layers' matrices in 8 bits, both ways: fp8_block, fp8_row, fp8_tensor, mxfp8; bf16: all in compute_dtype.
    precision: str = BF16
    precision_keep: tuple[str, ...] = ()  # patterns of names of matrices that stay in compute_dtype: ["*_output"]
    precision_head: bool = False  # losses multiply by the output projection in 8 bits too, both ways
    remat: str = operational("attention")  # what the backward keeps or recomputes: none, dots, attention, full, ...
    # Layers run as a loop over stacks. false: one after the other in the program, which compiles longer and copies less.
    scan_layers: bool = operational(True)
    experts: ExpertsShape = field(default_factory=ExpertsShape)
    latent: LatentShape = field(default_factory=LatentShape)
    sparse: SparseShape = field(default_factory=SparseShape)
    gated_delta: GatedDeltaShape = field(default_factory=GatedDeltaShape)
    kda: KdaShape = field(default_factory=KdaShape)
    mamba2: Mamba2Shape = field(default_factory=Mamba2Shape)
    lightning: LightningShape = field(default_factory=LightningShape)
    gla: GlaShape = field(default_factory=GlaShape)
    rwkv7: Rwkv7Shape = field(default_factory=Rwkv7Shape)
    mtp: AheadShape = field(default_factory=AheadShape)

    def __post_init__(self) -> None:
        for name in ("first_layers", "layer_pattern", "last_layers"):
            setattr(self, name, tuple(getattr(self, name)))
        self.compute_dtype = dtype_name(self.compute_dtype)
        self.precision_keep = tuple(self.precision_keep)

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        period, rest = len(self.layer_pattern), self.num_layers - len(self.first_layers) - len(self.last_layers)
        between = [self.layer_pattern[i % period] for i in range(rest if period else 0)]
        return [*self.first_layers, *between, *self.last_layers]

    def layers(self) -> list[tuple[str, ...]]:
        """Returns the names of the parts of each layer."""
        return _parts_of_kinds(self.kinds())

    def part_names(self) -> set[str]:
        """Returns the names of the parts that some layer has."""
        return {part for layer in self.layers() for part in layer}

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy. The sections in it check themselves."""
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} must be a multiple of model.num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} must be even: rotary embedding rotates pairs")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ValueError(
                f"model.rotary_dim = {self.rotary_dim} must be even, positive and at most model.head_dim = {self.head_dim}, or "
                "null for a whole head"
            )
        if self.rope_exact_from is not None and not 0 <= self.rope_exact_from < 2**31:
            raise ValueError(
                f"model.rope_exact_from = {self.rope_exact_from} must be a position: 0 for exact angles at all, or null for "
                "float32 angles at all"
            )
        self._validate_layers()
        if self.activation not in (known := (*ACTIVATIONS, RELU2)):
            raise ValueError(f"model.activation = {self.activation!r} is unknown; use one of {', '.join(known)}")
        optional = ("sliding_window", "attention_soft_cap", "logits_soft_cap", "attention_scale")
        for name in ("rope_base", "norm_eps", "init_std", *optional):
            value, none = getattr(self, name), ", or null for none" if name in optional else ""
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(f"model.{name} must be positive, and representable in float32{none}, got {value}")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat = {self.remat!r} is unknown; use one of {', '.join(REMAT)}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            # Gradients here are of sums over tokens, which exceed the range of float16.
            scaled = "; float16 needs loss scaling, which is not supported" if self.compute_dtype == "float16" else ""
            raise ValueError(f"model.compute_dtype = {self.compute_dtype!r}: use bfloat16 or float32{scaled}")
        check_precision(self.precision, self.precision_keep)
        check_head(self.precision, self.precision_head, self.model_dim, self.vocab_size)
        self.scaling()

    def _validate_layers(self) -> None:
        if not self.layer_pattern:
            raise ValueError("model.layer_pattern = [] must list kinds of layers, for example [full+mlp]")
        if self.num_layers < len(self.first_layers) + len(self.layer_pattern) + len(self.last_layers):
            last = f" and the {len(self.last_layers)} of model.last_layers" if self.last_layers else ""
            raise ValueError(
                f"model.num_layers = {self.num_layers} is less than the {len(self.first_layers)} layers of model.first_layers "
                f"and the {len(self.layer_pattern)} of model.layer_pattern{last}: shorten them or add layers"
            )
        parts = self.part_names()
        if "window_attention" in parts and not self.sliding_window:
            raise ValueError("model.layer_pattern has windowed layers: give model.sliding_window, in keys")
        if self.sliding_window and "window_attention" not in parts:
            raise ValueError(
                f"model.sliding_window = {self.sliding_window}, but no layer has a window: put one into "
                "model.layer_pattern, for example [window,full], or leave the window out"
            )
        plain = ("qk_norm", "attention_bias", "attention_output_bias", "attention_sinks", "attention_gate", "attention_rope",
                 "rotary_dim")  # fmt: skip
        ignored = [name for name in plain if getattr(self, name) != getattr(DecoderShape, name)]
        if ignored and not self.plain():
            raise ValueError(
                f"model.{ignored[0]} applies to plain attention, but no layer of model.layer_pattern has it: leave it out, or "
                f"give model.{ignored[0]}={json.dumps(getattr(DecoderShape, ignored[0]))} where the recipe has it"
            )
        self._validate_rope(parts)
        for part, (section, shape, size) in SECTIONS.items():
            configured = getattr(self, section) != shape()
            if part in parts and not configured:
                raise ValueError(
                    f"model.{section}.{size} must be positive, got 0: model.layer_pattern has layers with {part}"
                )
            if configured and part not in parts:
                example = f"full+{part}" if section == "experts" else f"{section}+mlp"
                raise ValueError(
                    f"model.{section} is given, but no layer has {part}: put one into model.layer_pattern, for "
                    f"example {example}, or leave it out"
                )

    def plain(self) -> list[str]:
        """Returns the mixers that have the keys of plain attention: its heads, RoPE and biases."""
        return sorted(self.part_names() & {*_PLAIN})

    def turns(self) -> list[str]:
        """Returns the mixers, of those that attend, in which RoPE turns queries and keys."""
        latent = self.part_names() & {"latent_attention"}
        return sorted({*(self.plain() if self.attention_rope else ()), *(latent if self.latent.rope else ())})

    def _validate_rope(self, parts: set[str]) -> None:
        plain = self.plain()
        if plain and not self.attention_rope and self.rotary_dim is not None:
            raise ValueError(
                f"model.rotary_dim = {self.rotary_dim} is RoPE's, and model.attention_rope = false: leave one of them out"
            )
        if not (plain or "latent_attention" in parts) or self.turns():
            return
        for name in ("rope_base", "rope_scaling"):
            if getattr(self, name) != getattr(DecoderShape, name):
                raise ValueError(
                    f"model.{name} = {getattr(self, name)!r} is RoPE's, and with model."
                    f"{'attention_rope' if plain else 'latent.rope'} = false no layer has it: leave one of them out"
                )

    def scaling(self) -> RopeScaling | None:
        """Returns the scaling of RoPE's frequencies. Raises ValueError for keys that do not apply to it."""
        if self.rope_scaling is None:
            for name in ROPE_SCALING:
                if getattr(self, name) != getattr(DecoderShape, name):
                    raise ValueError(
                        f"model.{name} belongs to model.rope_scaling, which is null: set that, or leave this out"
                    )
            return None
        if self.rope_scaling in ("linear", "ntk") and self.rope_original_length != DecoderShape.rope_original_length:
            raise ValueError(
                f"model.rope_original_length is for yarn and llama3; model.rope_scaling = {self.rope_scaling!r} does not read "
                "it: leave it out"
            )
        fields = {field: getattr(self, name) for name, field in ROPE_SCALING.items()}
        try:
            return RopeScaling(self.rope_scaling, **fields)
        except ValueError as error:
            keys = ", ".join(f"{field} is model.{name}" for name, field in ROPE_SCALING.items() if field in str(error))
            message = f"model.rope_scaling = {self.rope_scaling!r}: {error}"
            raise ValueError(f"{message} ({keys})" if keys else message) from error
