"""Multi-head latent attention: training and prefill, and absorbed decoding over caches of latents."""

from kernels.ops.multi_latent_attention.contract import decode_op, op, paged_op, scale_of
from kernels.ops.multi_latent_attention.functions import flash_mla, mla_decode, multi_latent_ragged_page_attention
from kernels.ops.multi_latent_attention.heads import joined_heads

__all__ = [
    "decode_op",
    "flash_mla",
    "joined_heads",
    "mla_decode",
    "multi_latent_ragged_page_attention",
    "op",
    "paged_op",
    "scale_of",
]
