"""Recurrent cells (LSTM, GRU, RNN), and the time mix of RWKV-4."""

from kernels.ops.recurrent.contract import op, rwkv4_op
from kernels.ops.recurrent.functions import recurrent, rwkv4

__all__ = ["op", "recurrent", "rwkv4", "rwkv4_op"]
