"""What a decoder is made from: its sizes and options, and the kinds of layers that a pattern may name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.ops.gated_mlp import ACTIVATIONS
from kernels.ops.rotary_embedding import RopeScaling

# Kind of layer -> its parts, in the order in which they run; what each does is in `PARTS` of ejdist/models/parts.py.
KINDS: dict[str, tuple[str, ...]] = {"full": ("attention", "mlp"), "window": ("window_attention", "mlp")}
REMAT = ("none", "dots", "attention", "offload", "full")  # from most memory to least, see `stack.rematerialised`


@dataclass(unsafe_hash=True)
class DecoderShape:
    """Shape and options of a decoder, which its layers read. Not frozen: recipes compose it."""

    vocab_size: int = 512
    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_dim: int = 384
    activation: str = "silu"
    rope_base: float = 10000.0
    rope_scaling: str | None = None  # linear, ntk, yarn, llama3
    rope_factor: float = 1.0
    rope_original_length: int = 8192  # tokens of the context before scaling
    qk_norm: bool = False  # RMSNorm of each query and key head (Qwen3)
    attention_bias: bool = False  # biases of the q, k and v projections (Qwen2)
    tie_embeddings: bool = True
    layer_pattern: tuple[str, ...] = ("full",)  # repeated over the layers: the names of `KINDS`
    sliding_window: int | None = None  # keys that a windowed layer sees
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    norm_eps: float = 1e-6
    init_std: float = 0.02
    compute_dtype: str = "float32"  # of activations and matmuls; parameters stay float32
    remat: str = "attention"  # what the backward does not compute again: see `stack.rematerialised`

    def __post_init__(self) -> None:
        self.layer_pattern = tuple(self.layer_pattern)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} must be a multiple of model.num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        if not self.layer_pattern or set(self.layer_pattern) - set(KINDS):
            *others, last = KINDS
            known = f"{', '.join(others)} and {last}"
            raise ValueError(f"model.layer_pattern = {list(self.layer_pattern)} must be made of {known}")
        if self.num_layers < len(self.layer_pattern):
            raise ValueError(
                f"model.num_layers = {self.num_layers} is less than the {len(self.layer_pattern)} layers of "
                "model.layer_pattern: shorten it or add layers"
            )
        windowed = any("window_attention" in KINDS[kind] for kind in self.layer_pattern)
        if windowed and not self.sliding_window:
            raise ValueError("model.layer_pattern has windowed layers: give model.sliding_window, in keys")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model.activation = {self.activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        for name in ("sliding_window", "attention_soft_cap", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"model.{name} must be positive, or null for none, got {value}")
        if self.sliding_window and not windowed:
            raise ValueError(
                f"model.sliding_window = {self.sliding_window}, but no layer has a window: put one into "
                "model.layer_pattern, for example [window,full], or leave the window out"
            )
        for name in ("rope_base", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat = {self.remat!r} is unknown; use one of {', '.join(REMAT)}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            # float16 would need its loss scaled: gradients here are of sums over tokens, past its range.
            raise ValueError(f"model.compute_dtype = {self.compute_dtype!r}: use float32 or bfloat16")
        self.scaling()

    def scaling(self) -> RopeScaling | None:
        if self.rope_scaling is None:
            return None
        return RopeScaling(self.rope_scaling, self.rope_factor, self.rope_original_length)
