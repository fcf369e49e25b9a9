"""Native sparse attention: compressed, selected and sliding attention, gated and added."""

from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, op, ranked
from kernels.ops.native_sparse_attention.functions import native_sparse_attention

__all__ = ["NativeSparseConfig", "native_sparse_attention", "op", "ranked"]
