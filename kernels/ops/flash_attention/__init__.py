"""Flash attention: exact attention with O(S) memory, on every backend."""

from kernels.engines.attention.dropout import expand_dropout_seed
from kernels.ops.flash_attention.contract import FlashAttentionConfig, op
from kernels.ops.flash_attention.functions import (
    attention,
    flash_attention,
    flash_attention_backward,
    scaled_dot_product_attention,
)
from kernels.ops.flash_attention.hops import TILE, hops_of, joins

__all__ = [
    "TILE",
    "FlashAttentionConfig",
    "attention",
    "expand_dropout_seed",
    "flash_attention",
    "flash_attention_backward",
    "hops_of",
    "joins",
    "op",
    "scaled_dot_product_attention",
]
