"""Cross entropy from hidden states and the output projection, or from logits, with no whole logits in memory."""

from kernels.ops.cross_entropy.contract import CrossEntropyConfig, op
from kernels.ops.cross_entropy.functions import TokenLosses, fused_cross_entropy, fused_token_losses, token_losses

__all__ = ["CrossEntropyConfig", "TokenLosses", "fused_cross_entropy", "fused_token_losses", "op", "token_losses"]
