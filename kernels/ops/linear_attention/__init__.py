"""Linear attention: a state that decays, is written by keys and values, and read by queries."""

from kernels.ops.linear_attention.contract import op
from kernels.ops.linear_attention.functions import (
    gla_attention,
    lightning_attention,
    recurrent_attention,
    retention,
    rwkv6,
)

__all__ = [
    "gla_attention",
    "lightning_attention",
    "op",
    "recurrent_attention",
    "retention",
    "rwkv6",
]
