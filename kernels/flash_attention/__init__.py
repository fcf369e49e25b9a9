"""Flash attention: exact attention with O(S) memory, on every backend."""

from kernels.flash_attention.contract import FlashAttentionConfig, op
from kernels.flash_attention.dropout import expand_dropout_seed
from kernels.flash_attention.faces import (
    attention,
    attention_of_canonical,
    canonical,
    flash_attention,
    flash_attention_backward,
    scaled_dot_product_attention,
)

__all__ = [
    "FlashAttentionConfig",
    "attention",
    "attention_of_canonical",
    "canonical",
    "expand_dropout_seed",
    "flash_attention",
    "flash_attention_backward",
    "op",
    "scaled_dot_product_attention",
]
