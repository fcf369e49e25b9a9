"""Variants of attention: differential, Linformer, Performer, mixtures of heads, and int8 logits."""

from kernels.ops.attention_variants.functions import (
    differential_attention,
    linformer_attention,
    mixture_of_attention_heads,
    orthogonal_features,
    performer_attention,
    quantized_attention,
)

__all__ = [
    "differential_attention",
    "linformer_attention",
    "mixture_of_attention_heads",
    "orthogonal_features",
    "performer_attention",
    "quantized_attention",
]
