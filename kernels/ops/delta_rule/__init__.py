"""The delta rules: recurrences that replace the value stored for a key. Plain, gated, RWKV-7, and over a pool of states."""

from kernels.ops.delta_rule.contract import op, rwkv7_op
from kernels.ops.delta_rule.functions import delta_rule, gated_delta_rule, kernel_delta_attention, rwkv7
from kernels.ops.delta_rule.pool import pool_op
from kernels.ops.delta_rule.ragged import ragged_gated_delta_rule

__all__ = [
    "delta_rule",
    "gated_delta_rule",
    "kernel_delta_attention",
    "op",
    "pool_op",
    "ragged_gated_delta_rule",
    "rwkv7",
    "rwkv7_op",
]
