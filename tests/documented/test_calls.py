"""Every call that the API's documents show, as a table: a function of that name takes those arguments, and has a module class.

What a call computes is tested where its operation is, in `test_<operation>_examples.py` here or in `tests/kernels/`.
"""

import importlib
import inspect
from dataclasses import dataclass

import pytest

import ejdist
import kernels


@dataclass(frozen=True)
class Shown:
    """A call as it is shown: how many arguments stand by position, which by name, and the module class of the function."""

    function: str
    positional: int = 0
    named: tuple[str, ...] = ()
    module: str = ""


QKV = ("query", "key", "value")
CALLS = (
    # -- attention
    Shown("flash_attention", 3, ("causal",), "FlashAttention"),
    Shown("flash_attention", 3, ("causal", "dropout_prob", "softmax_scale")),
    Shown("flash_attention", 3, ("causal", "sliding_window", "logits_soft_cap")),
    Shown("flash_attention", 3, ("bias",)),
    Shown("flash_attention", 3, ("cum_seqlens_q", "cum_seqlens_k")),
    Shown("flash_attention", 3, ("mask_info",)),
    Shown("flash_attention", 3, ("attention_mask", "dropout_seed", "softmax_aux")),
    Shown("flash_attention", 3, ("mesh", "in_specs", "out_specs")),
    Shown("flash_attention", 3, ("platform",)),
    Shown("flash_attention", 3, ("cfg",)),
    Shown("flash_attention", 0, (*QKV, "causal")),
    Shown("ring_attention", 3, ("axis_name", "causal"), "RingAttention"),
    Shown("ring_attention", 3, ("axis_name", "chunk_size", "sliding_window", "softmax_aux")),
    Shown("scaled_dot_product_attention", 3, ("attention_mask", "causal"), "ScaledDotProductAttention"),
    Shown("native_sparse_attention", 3, ("block_indices", "block_counts"), "NativeSparseAttention"),
    Shown("native_sparse_attention", 3, ("block_indices", "cu_seqlens")),
    Shown("blocksparse_attention", 3, ("block_mask", "block_size"), "BlockSparseAttention"),
    # -- caches in pages
    Shown("page_attention", 5, (), "PageAttention"),
    Shown("ragged_page_attention_v2", 1, ()),
    Shown("ragged_page_attention_v3", 3, ("cu_seqlens_q", "cu_seqlens_k", "page_indices")),
    Shown("prefill_page_attention", 1),
    Shown("ragged_decode_attention", 1),
    Shown("unified_attention", 1),
    Shown("chunked_prefill_paged_decode", 1),
    Shown("decode_attention", 1),
    # -- recurrences
    Shown("gla_attention", 3, ("gate",), "GLAttention"),
    Shown("lightning_attention", 3, ("decay",), "LightningAttention"),
    Shown("recurrent_attention", 3, ("state",), "RecurrentAttention"),
    Shown("recurrent", 3, ("cell_type",)),
    Shown("kernel_delta_attention", 3),
    Shown("state_space_v1", 1),
    Shown("state_space_v2", 1),
    # -- the rest
    Shown("flash_mla", 1),
    Shown("grouped_matmul", 3, (), "GroupedMatmul"),
    Shown("grouped_matmul", 2, ("group_ids",)),
    Shown("mean_pooling", 2, (), "MeanPooling"),
    Shown("mean_pooling", 1, ("cu_seqlens",)),
)
# Where each name of the framework is imported from.
FRAMEWORK = {
    "ejdist": ("FlashAttentionConfig", "FlashAttention", "create_default_executor", "flash_attention"),
    "ejdist.ops": ("BwdParams", "ConfigCache", "ConfigSelectorChain", "Executor", "FwdParams"),
    "ejdist.types": ("MaskInfo",),
    "kernels": ("Backend", "Platform", "kernel_registry"),
}


def _shown(call):
    return f"{call.function}({', '.join([*'_' * call.positional, *call.named])})"


@pytest.mark.parametrize("call", CALLS, ids=_shown)
def test_a_function_takes_what_is_shown(call):
    function = getattr(ejdist, call.function)
    parameters = inspect.signature(function).parameters
    by_position = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(by_position) >= call.positional, f"it takes {len(by_position)} arguments by position"
    lacks = [n for n in (*call.named, "platform", "cfg") if n not in parameters]
    assert not lacks, f"it does not take {', '.join(lacks)}"
    if call.module:
        module = getattr(ejdist, call.module, None)
        assert module is not None and module.function is function, f"ejdist.{call.module} is not its module class"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in FRAMEWORK.items() for n in names])
def test_a_name_of_the_framework_is_where_it_is_imported_from(module, name):
    found = importlib.import_module(module)
    assert hasattr(found, name) and name in found.__all__


def test_every_operation_that_is_shown_is_in_the_registry():
    there = {call.function for call in CALLS} & set(kernels.public_functions())
    assert there <= set(kernels.kernel_registry.algorithms())
    assert {"flash_attention", "mean_pooling"} <= there
