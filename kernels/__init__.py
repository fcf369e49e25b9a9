"""Operations on local arrays, each with all its backends.

This imports the operations' folders, but only their contracts: a backend's file, and the toolchain it needs, is loaded
at the first call that may use it.
"""

from __future__ import annotations

# Pallas loads this part of it, which adds to what JAX knows its traces by. Were it first loaded with the backends, by a call
# inside a program, that program would be traced and compiled again when it is called next: a whole step of training.
import jax._src.pallas.fuser.jaxpr_fusion

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.trees import tree_attention_mask, tree_depths, verify_tree
from kernels.engines.scan.chunks import ChunkConfig
from kernels.framework.backend import Case
from kernels.framework.config import BwdParams, ConfigCache, FwdParams, PersistentCache
from kernels.framework.contract import Op, Unsupported
from kernels.framework.executor import Executor, create_default_executor
from kernels.framework.public import public_functions
from kernels.framework.registry import DeviceKind as Backend
from kernels.framework.registry import KernelRegistry, Platform
from kernels.framework.select import ConfigSelectorChain, config_overlay
from kernels.ops.attention_variants import (
    differential_attention,
    linformer_attention,
    mixture_of_attention_heads,
    performer_attention,
    quantized_attention,
)
from kernels.ops.blocksparse_attention import blocksparse_attention
from kernels.ops.combine_rows import combine_rows
from kernels.ops.cross_entropy import fused_cross_entropy, fused_loss_sums, fused_token_losses
from kernels.ops.delta_rule import (
    delta_rule,
    gated_delta_rule,
    kernel_delta_attention,
    ragged_gated_delta_rule,
    rwkv7,
)
from kernels.ops.flash_attention import attention, flash_attention, scaled_dot_product_attention
from kernels.ops.gated_mlp import gated_activation, gated_mlp
from kernels.ops.grouped_matmul import grouped_matmul, quantized_grouped_matmul
from kernels.ops.kl_divergence import fused_kl_divergence
from kernels.ops.layer_norm import layer_norm, layer_norm_linear
from kernels.ops.linear_attention import (
    gla_attention,
    lightning_attention,
    recurrent_attention,
    retention,
    rwkv6,
)
from kernels.ops.mean_pooling import mean_pooling
from kernels.ops.multi_latent_attention import flash_mla, mla_decode, multi_latent_ragged_page_attention
from kernels.ops.native_sparse_attention import native_sparse_attention
from kernels.ops.paged_attention import (
    append_to_cache,
    chunked_prefill_paged_decode,
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    unified_attention,
)
from kernels.ops.quantized_matmul import dequantize, quantize, quantized_matmul
from kernels.ops.recurrent import recurrent, rwkv4
from kernels.ops.rms_norm import rms_norm, rms_norm_cotangents, rms_norm_linear
from kernels.ops.rotary_embedding import rotary_embedding
from kernels.ops.scaled_matmul import (
    activate_both_ways,
    activate_rows,
    activated_row_cotangents,
    activation_cotangents,
    normalize_both_ways,
    quantize_both_ways,
    quantize_rows,
    quantize_scaled,
    scaled_grouped_matmul,
    scaled_matmul,
)
from kernels.ops.state_space import causal_conv1d, state_space_v1, state_space_v2
from kernels.toolchains.simulate.compile_for import compile_for

kernel_registry = KernelRegistry(public_functions)


def operations() -> dict[str, Op]:
    """Returns every operation by name."""
    return {op.name: op for function in public_functions().values() for op in function.ops}


_FRAMEWORK = (
    "Backend", "BwdParams", "Case", "ChunkConfig", "ConfigCache", "ConfigSelectorChain", "Executor", "FwdParams",
    "KernelRegistry", "MaskInfo", "Op", "PersistentCache", "Platform", "Unsupported", "compile_for", "config_overlay",
    "create_default_executor", "dequantize", "kernel_registry", "operations", "public_functions", "quantize", "quantize_scaled",
    "tree_attention_mask", "tree_depths", "verify_tree",
)  # fmt: skip
__all__ = [*_FRAMEWORK, *public_functions()]
