"""KL divergence of a teacher and a student, from hidden states and output projections, or from logits."""

from kernels.ops.kl_divergence.contract import KLDivergenceConfig, logits_op, op
from kernels.ops.kl_divergence.functions import fused_kl_divergence

__all__ = ["KLDivergenceConfig", "fused_kl_divergence", "logits_op", "op"]
