"""Operations on local arrays, each on every backend that it has.

The operations' folders are imported here, and only their contracts: a backend's file, and the toolchain it needs, is loaded
at the first call that may use it.
"""

from __future__ import annotations

from kernels._core.backend import Case
from kernels._core.config import BwdParams, ConfigCache, FwdParams, PersistentCache
from kernels._core.contract import Op, Unsupported
from kernels._core.executor import Executor, create_default_executor
from kernels._core.masks import MaskInfo
from kernels._core.public import public_functions
from kernels._core.registry import DeviceKind as Backend
from kernels._core.registry import KernelRegistry, Platform
from kernels._core.select import ConfigSelectorChain, config_overlay
from kernels._core.trees import tree_mask
from kernels.ops.blocksparse_attention import blocksparse_attention
from kernels.ops.cross_entropy import fused_cross_entropy, fused_token_losses
from kernels.ops.flash_attention import attention, flash_attention, scaled_dot_product_attention
from kernels.ops.gated_mlp import gated_mlp
from kernels.ops.mean_pooling import mean_pooling
from kernels.ops.native_sparse_attention import native_sparse_attention
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rotary_embedding import rotary_embedding

kernel_registry = KernelRegistry(public_functions)


def operations() -> dict[str, Op]:
    """Returns every operation by name."""
    return {op.name: op for function in public_functions().values() for op in function.ops}


_FRAMEWORK = (
    "Backend", "BwdParams", "Case", "ConfigCache", "ConfigSelectorChain", "Executor", "FwdParams", "KernelRegistry",
    "MaskInfo", "Op", "PersistentCache", "Platform", "Unsupported", "config_overlay", "create_default_executor",
    "kernel_registry", "operations", "public_functions", "tree_mask",
)  # fmt: skip
__all__ = [*_FRAMEWORK, *public_functions()]
