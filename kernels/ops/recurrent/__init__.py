"""Recurrent cells (LSTM, GRU, RNN), and the time mix of RWKV-4."""

from kernels.ops.recurrent.contract import CELLS, EMPTY, FORGET, of_direction, op, rwkv4_op
from kernels.ops.recurrent.functions import recurrent, rwkv4

__all__ = ["CELLS", "EMPTY", "FORGET", "of_direction", "op", "recurrent", "rwkv4", "rwkv4_op"]
