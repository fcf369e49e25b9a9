"""The operations of `kernels` on sharded arrays, and training with them.

Each operation is a function (`flash_attention`) and a module class (`FlashAttention`).
"""

from ejdist.bound import bind_ops
from ejdist.faces import (
    attention,
    cross_entropy_terms,
    flash_attention,
    fused_cross_entropy,
    gated_mlp,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
)
from ejdist.mesh import make_mesh
from ejdist.sequence import Order, ring_attention
from kernels._core.config import BwdParams, ConfigCache, ConfigSelectorChain, FwdParams
from kernels._core.contract import Unsupported
from kernels._core.executor import Executor, create_default_executor, module_class
from kernels._core.masks import MaskInfo
from kernels.flash_attention import FlashAttentionConfig

FlashAttention = module_class("FlashAttention", flash_attention)
ScaledDotProductAttention = module_class("ScaledDotProductAttention", scaled_dot_product_attention)
Attention = module_class("Attention", attention)
RingAttention = module_class("RingAttention", ring_attention)
RMSNorm = module_class("RMSNorm", rms_norm)
RotaryEmbedding = module_class("RotaryEmbedding", rotary_embedding)
GatedMLP = module_class("GatedMLP", gated_mlp)
FusedCrossEntropy = module_class("FusedCrossEntropy", fused_cross_entropy)

__all__ = [
    "Attention",
    "BwdParams",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "FlashAttention",
    "FlashAttentionConfig",
    "FusedCrossEntropy",
    "FwdParams",
    "GatedMLP",
    "MaskInfo",
    "Order",
    "RMSNorm",
    "RingAttention",
    "RotaryEmbedding",
    "ScaledDotProductAttention",
    "Unsupported",
    "attention",
    "bind_ops",
    "create_default_executor",
    "cross_entropy_terms",
    "flash_attention",
    "fused_cross_entropy",
    "gated_mlp",
    "make_mesh",
    "ring_attention",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
]
