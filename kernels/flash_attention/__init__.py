"""Flash attention: exact attention with O(S) memory, on every backend."""

from kernels.flash_attention.contract import FlashAttentionConfig, op

__all__ = ["FlashAttentionConfig", "op"]
