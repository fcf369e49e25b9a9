"""The operations of `kernels` on sharded arrays, and training with them.

Each operation is a function (`flash_attention`) and a module class (`FlashAttention`).
"""

from typing import TYPE_CHECKING, Any

from ejdist.own_kernels import check_kernels

check_kernels()  # before the first import of it

# ruff: noqa: E402
from ejdist.compression import compressed_checkpoint
from ejdist.layout import set_layout
from ejdist.mesh import make_mesh
from ejdist.operations import FUNCTIONS, MODULES, bind_ops
from ejdist.sequence import Order, ring_attention
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.trees import tree_attention_mask, tree_depths, verify_tree
from kernels.framework.config import BwdParams, ConfigCache, FwdParams
from kernels.framework.executor import Executor, create_default_executor
from kernels.framework.platforms import Unsupported
from kernels.framework.select import ConfigSelectorChain
from kernels.ops.attention_variants import orthogonal_features
from kernels.ops.flash_attention import FlashAttentionConfig, expand_dropout_seed
from kernels.ops.quantized_matmul import dequantize, quantize
from kernels.ops.rotary_embedding import RopeScaling, XPos

if (
    TYPE_CHECKING
):  # what a type checker cannot see: the functions of `kernels` with three arguments more, and their classes

    def __getattr__(name: str) -> Any: ...


_FRAMEWORK = (
    "BwdParams", "ConfigCache", "ConfigSelectorChain", "Executor", "FlashAttentionConfig", "FwdParams", "MaskInfo", "Order",
    "RopeScaling", "Unsupported", "XPos", "bind_ops", "compressed_checkpoint", "create_default_executor", "dequantize",
    "expand_dropout_seed", "make_mesh", "orthogonal_features", "quantize", "ring_attention", "set_layout",
    "tree_attention_mask", "tree_depths", "verify_tree",
)  # fmt: skip
globals().update(FUNCTIONS | MODULES)
__all__ = [*_FRAMEWORK, *FUNCTIONS, *MODULES]
