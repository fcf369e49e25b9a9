"""Cross entropy from hidden states and the output projection, without the full logits in memory; or from logits."""

from kernels.ops.cross_entropy.adapters import BLOCK_ELEMENTS
from kernels.ops.cross_entropy.contract import (
    CrossEntropyConfig,
    TokenLosses,
    logits_op,
    op,
    summed,
    sums_op,
    terms_of_tokens,
    token_losses,
)
from kernels.ops.cross_entropy.functions import LossSums, fused_cross_entropy, fused_loss_sums, fused_token_losses

__all__ = [
    "BLOCK_ELEMENTS",
    "CrossEntropyConfig",
    "LossSums",
    "TokenLosses",
    "fused_cross_entropy",
    "fused_loss_sums",
    "fused_token_losses",
    "logits_op",
    "op",
    "summed",
    "sums_op",
    "terms_of_tokens",
    "token_losses",
]
