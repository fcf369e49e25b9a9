"""Rotary position embedding (RoPE), with linear, NTK, YaRN and Llama-3 scaling, and XPos."""

from kernels.ops.rotary_embedding.angles import EXACT_FROM
from kernels.ops.rotary_embedding.contract import RopeScaling, RotaryConfig, XPos, frequencies, op, pair_op
from kernels.ops.rotary_embedding.functions import rotary_embedding

__all__ = ["EXACT_FROM", "RopeScaling", "RotaryConfig", "XPos", "frequencies", "op", "pair_op", "rotary_embedding"]
