"""The shape of a decoder of the Llama and Qwen families."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gated_mlp import ACTIVATIONS
from kernels.rotary_embedding import RopeScaling

ATTENTION_KINDS = ("full", "window")


@dataclass(unsafe_hash=True)
class DecoderConfig:
    """What a decoder computes. Sizes are entries; nothing here says how it is run.

    Hashable, so that it can be compiled in; treat it as a value and change it with `dataclasses.replace`.

    Raises:
      ValueError: naming the field and the remedy.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    activation: str = "silu"
    rope_base: float = 500000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False  # RMSNorm of every query and key head, before RoPE (Qwen3)
    attention_bias: bool = False  # biases of query, key and value (Qwen2)
    tie_embeddings: bool = False  # the output projection is the embedding
    layer_pattern: tuple[str, ...] = ("full",)  # repeated over the layers: "full" or "window"
    sliding_window: int | None = None  # tokens that a query of a "window" layer sees, itself among them
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_logits_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self.layer_pattern = tuple(self.layer_pattern)
        self.validate()

    def validate(self) -> None:
        """Raises ValueError naming the first field that is wrong, and what it may be."""
        sizes = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
        for name in sizes:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} must be a multiple of model.num_kv_heads = {self.num_kv_heads}: "
                "each key head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model.activation = {self.activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        strange = [kind for kind in self.layer_pattern if kind not in ATTENTION_KINDS]
        if strange or not self.layer_pattern:
            raise ValueError(
                f"model.layer_pattern = {self.layer_pattern}: use a list of {' and '.join(ATTENTION_KINDS)}"
            )
        if len(self.layer_pattern) > self.num_layers:
            raise ValueError(
                f"model.layer_pattern has {len(self.layer_pattern)} entries for model.num_layers = {self.num_layers}; "
                "shorten it or add layers"
            )
        if ("window" in self.layer_pattern) != (self.sliding_window is not None):
            raise ValueError(
                f"model.sliding_window = {self.sliding_window} with model.layer_pattern = {self.layer_pattern}: "
                "give a window exactly when the pattern has 'window' layers"
            )
        for name in ("sliding_window", "softmax_scale", "attention_logits_soft_cap", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"model.{name} must be positive or null, got {value}")
        for name in ("rope_base", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer of one period of the pattern; None for full attention."""
        return tuple(self.sliding_window if kind == "window" else None for kind in self.layer_pattern)

    def window_of(self, layer: int) -> int | None:
        """Returns the window of one layer, None for full attention."""
        return self.windows[layer % len(self.windows)]
