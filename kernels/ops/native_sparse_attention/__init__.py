"""Native sparse attention: compressed, selected and sliding attention, gated and added."""

from kernels.ops.native_sparse_attention.blocks import block_rows, means
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, op, ranked
from kernels.ops.native_sparse_attention.functions import native_sparse_attention
from kernels.ops.native_sparse_attention.parts import choice_op, selected_op

__all__ = [
    "NativeSparseConfig",
    "block_rows",
    "choice_op",
    "means",
    "native_sparse_attention",
    "op",
    "ranked",
    "selected_op",
]
