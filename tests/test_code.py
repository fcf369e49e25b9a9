"""The code of every operation for accelerators that are not here: what the real compilers of CUDA and of TPUs make of it.

The cases are those tagged "code". Quick: one case, one dtype, one target of each kind. The product of all is slow.
"""

import re
import sys
from types import ModuleType

import pytest

import kernels
from kernels.framework.public import PublicFunction
from kernels.toolchains.simulate import ahead_of_time as checks

OPS = kernels.operations()
MOST_CASES = 4
# What the compilers take more than a few seconds for: kernels that the files of their operations compile too, and those of
# engines of which another operation, or a smaller case, is quick.
SLOW = {
    "pallas": {
        # Of engines of which another operation is quick.
        ("grouped_matmul_quantized", "qwen3_int8"),
        ("grouped_matmul_gathered", "gathered"),
        ("ragged_delta_rule", "small"),
        ("page_attention_with_lse", "decode"),
        ("page_attention_with_lse", "together"),
        ("state_space_v2", "packed"),
        ("multi_latent_ragged_page_attention", "deepseek_v3_decode"),
        # Sums of rows are those of the operations that add, which are quick, and in test_rms_norm.py.
        *((norm, case) for norm in ("rms_norm", "layer_norm") for case in ("odd", "model_4k", "model_8k")),
        ("flash_attention", "together"),
        ("causal_conv1d", "packed"),
        ("linear_attention", "decode"),
        ("delta_rule", "decode"),
        ("ragged_delta_rule", "decode"),
        ("delta_rule", "qwen3_next"),
        ("delta_rule", "kimi_linear"),
        ("rwkv7", "small"),
        ("rwkv7", "rwkv7_3b"),
        ("flash_attention", "causal_32k_gqa"),
        ("flash_attention", "wide_causal_8k"),
        ("blocksparse_attention", "tenth_of_16k_per_head"),
        ("grouped_matmul", "qwen3_gate_up"),
        ("grouped_matmul", "qwen3_down"),
        ("grouped_matmul_gathered", "qwen3_gate_up"),
        ("rotary_embedding_pair", "llama_8b"),
        ("rotary_embedding", "llama_8b"),
        ("linear_attention", "lightning_64k"),
        ("state_space_v2", "mamba2_8k"),
        ("recurrent", "lstm_1k"),
        ("recurrent", "both_ways"),
        ("causal_conv1d", "documents_32k"),
        ("causal_conv1d", "qwen3_next"),
        # The kernel of "together" and of 8-bit pages, and both are in tests/kernels/test_paged_attention_pallas.py.
        ("page_attention", "decode_8k"),
        ("page_attention", "prefill_2k_of_8k"),
        ("decode_attention", "decode_8k"),
        ("append_and_attend", "mixed"),
        # Its choice of blocks is compiled in tests/kernels/test_native_sparse_attention_pallas.py.
        ("native_sparse_attention", "paper_64k"),
    },
    "triton": {
        *(("activate_both_ways", case) for case in ("silu", "mlp_8k", "mlp_8k_rows")),
        *((rows, case) for rows in ("activate_rows", "activated_row_cotangents") for case in ("silu", "qwen3")),
        ("kl_divergence", "llama_8b_of_70b"),
        *(("fused_add_layer_norm", case) for case in ("five_chunks", "model_4k", "model_8k")),
        ("scaled_grouped_matmul", "qwen3_down"),
        ("grouped_matmul_quantized", "qwen3_int8"),
        ("grouped_matmul_gathered", "gathered"),
        *(("quantized_grouped_matmul", case) for case in ("int4", "three_bits", "qwen3_decode_gate_up")),
        ("multi_latent_ragged_page_attention", "ragged"),
        ("rotary_embedding", "partial"),
        ("rotary_embedding", "llama_8b"),
        *((norm, case) for norm in ("rms_norm", "layer_norm") for case in ("odd", "model_4k", "model_8k")),
        # Every option at once takes 15 seconds; what Hopper's kernels make of fewer is in test_flash_attention_hopper.py.
        ("flash_attention", "together"),
        ("rwkv7", "small"),
        ("state_space_v1", "small"),
        ("rwkv4", "small"),
        ("delta_rule", "small"),
        ("paged_attention", "together"),
        ("page_attention", "together"),
        ("multi_latent_ragged_page_attention", "deepseek_v3_decode"),
        ("scaled_grouped_matmul", "mixtral_up_rows"),
        ("causal_conv1d", "qwen3_next"),
        ("recurrent", "lstm_1k"),
        ("state_space_v2", "packed"),  # the kernels of linear attention
        ("page_attention", "decode_8k_int8"),
        ("blocksparse_attention", "tenth_of_16k_per_head"),
        ("flash_attention", "causal_32k_gqa"),
        ("flash_attention", "wide_causal_8k"),
        ("grouped_matmul", "qwen3_gate_up"),
        ("grouped_matmul", "qwen3_down"),
        ("grouped_matmul_gathered", "qwen3_gate_up"),
        ("blocksparse_attention", "tenth_of_32k"),
        ("blocksparse_attention", "odd_widths"),
        ("native_sparse_attention", "paper_64k"),
        ("flash_mla", "wide_head"),
        ("delta_rule", "qwen3_next"),
        ("delta_rule", "kimi_linear"),
        ("linear_attention", "lightning_64k"),
        ("delta_rule", "decode"),
        ("rwkv7", "rwkv7_3b"),
        ("ragged_delta_rule", "small"),
        ("ragged_delta_rule", "decode"),
        ("linear_attention", "decode"),
        ("state_space_v2", "mamba2_8k"),
        ("state_space_v1", "mamba_4k"),
        ("state_space_v1", "packed"),
        ("rwkv4", "packed"),
        ("rwkv4", "rwkv_3b"),
        ("recurrent", "both_ways"),
        ("causal_conv1d", "documents_32k"),
        # The same kernels as in "together" and in tests/kernels/test_paged_attention_triton.py.
        ("page_attention", "decode_8k"),
        ("page_attention", "prefill_2k_of_8k"),
        ("page_attention_with_lse", "together"),
        ("decode_attention", "decode_8k"),
        ("append_and_attend", "mixed"),
    },
}
# Cases whose backward is the contract's own, by name of the operation and the backend: one token.
FORWARD_ALONE = {
    *(
        (name, backend, "decode")
        for name in ("linear_attention", "delta_rule")
        for backend in ("pallas_tpu", "triton_gpu")
    ),
    *(("ragged_delta_rule", backend, case) for backend in ("pallas_tpu", "triton_gpu") for case in ("small", "decode")),
}
TARGETS = {"triton": (90, 80), "pallas": checks.TPU_TOPOLOGIES}  # the first of each is in the quick tests
# Cases with that tag which a backend has no kernels for: its own are in others.
NOT_THEIRS = {
    ("recurrent", "triton_gpu", "gru_documents"),
    *(("scaled_matmul", "pallas_tpu", case) for case in ("row", "row_8192", "row_8192_fast")),
}
# Rows of cases that a kernel has not in one dtype: a latent of 512 numbers in float32 does not fit into registers.
NOT_IN = {("multi_latent_ragged_page_attention", "triton_gpu", "deepseek_v3_decode", "float32")}
# GPUs without conversions to 8-bit floats: there these backends are XLA's form of the contract, as the README says.
NOT_ON = {("quantize_both_ways", 80), ("quantize_rows", 80)}
# Bytes that a kernel may spill, and why it is left so. What is not here spills nothing.
SPILLS = {
    # Two sums, logits and their gradients fill the registers of a warpgroup; addresses go out around the loop over queries.
    ("flash_attention", "causal_32k_gqa", 90): 80,
    # The gradient of the keys holds two sums beside its logits.
    ("flash_attention", "causal_32k_gqa", 80): 96,
    # One sum of 64 keys of 256 entries each fills them; on Ampere it is the plain forward's, of 128 queries.
    ("flash_attention", "wide_causal_8k", 90): 72,
    ("flash_attention", "wide_causal_8k", 80): 64,
    # Half of the columns of the sums, logits and weights of two blocks.
    ("multi_latent_ragged_page_attention", "deepseek_v3_decode", 90): 64,
    # Flash attention's kernel over pages: their numbers are held beside the loop over keys.
    ("page_attention", "prefill_2k_of_8k", 90): 8,
    # Six sums of a chunk and half of the key dim fill the registers; addresses go out around the loop over columns.
    ("delta_rule", "qwen3_next", 90): 168,
    # Every option at once: a few registers short.
    ("flash_attention", "together", 90): 12,
    ("flash_attention", "together", 80): 20,
    # Two sums, logits and their gradients fill what a thread has where two programs share a multiprocessor; limits of masks are
    # held around the loop as well.
    ("blocksparse_attention", "odd_widths", 90): 20,
    # The gradients of flash attention, of the compressed and the sliding branch: two sums, as above. In float32 that of its
    # queries, and the choice of blocks.
    ("native_sparse_attention", "paper_64k", 90): 420,
    ("native_sparse_attention", "paper_64k", 80): 156,
    # In float32 on Ampere the gradient of the queries is one register short of two programs a multiprocessor.
    ("blocksparse_attention", "tenth_of_16k_per_head", 80): 4,
    # Tiles are those of Hopper, which reads them without registers; here the addresses of two of them are held beside the sums.
    ("grouped_matmul", "qwen3_gate_up", 80): 192,
    ("grouped_matmul", "qwen3_down", 80): 352,
    ("grouped_matmul_gathered", "qwen3_gate_up", 80): 16,
    ("grouped_matmul_gathered", "qwen3_gate_up", 90): 32,
    # Of the gradient of the matrices: a warp that writes keeps addresses there, and reads them once for 64 columns of a tile.
    ("grouped_matmul", "qwen3_down", 90): 16,
    ("grouped_matmul_quantized", "qwen3_int8", 80): 12,
    # Of the warps that store tiles of 256 rows, as above.
    ("scaled_matmul", "row_8192", 90): 28,
    ("scaled_matmul", "row_8192_fast", 90): 8,
    ("scaled_matmul", "block_8192", 90): 20,
    ("scaled_grouped_matmul", "qwen3_down", 90): 16,
    ("scaled_grouped_matmul", "mixtral_up_rows", 90): 32,
    # Two cotangents of 128 by 128 side by side; half of the warps have registers for them, and hide less of the loads.
    ("activation_cotangents", "silu", 90): 92,
    ("activation_cotangents", "mlp_8k", 90): 92,
    # Chunks of few channels: the assembler takes 96 registers, or 128, and a few bytes more.
    ("delta_rule", "small", 90): 8,
    ("delta_rule", "small", 80): 4,
    # Gradients of queries, keys and decays are summed beside those of two kinds of pairs; each program spills outside its
    # products. With half the channels a program took longer (in Triton: 1,540 us, and 1,360 with 64, on an H200).
    ("delta_rule", "kimi_linear", 90): 564,
    ("delta_rule", "kimi_linear", 80): 624,
    # Gradients of two readers, two writers and their decays are summed side by side, and four matrices of pairs.
    # A warp alone has all of a chunk: it spills outside its products, and more warps took longer (1,032 to 1,921 us for 962).
    ("rwkv7", "rwkv7_3b", 90): 300,
    ("rwkv7", "rwkv7_3b", 80): 244,
    # Operands lie in registers there, beside a state of 128 by 64.
    ("linear_attention", "lightning_64k", 80): 28,
}
# Names of kernels whose products the assembler lets follow one another (`serialized`), and why it is left so.
# Queries and keys that the heads of a program share stay in its registers, from which the assembler orders products one by one;
# loaded again for each head they take longer (mamba2_8k, 1.1 times).
SERIALIZED: dict[tuple[str, str, int], set[str]] = {
    ("state_space_v2", "mamba2_8k", 90): {"scalar_dk_kernel"},
}
SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024}  # what a block may have


def cases_of(op):
    return [case for case in op.cases if "code" in case.tags]


def compiled_backends(op):
    return [backend for backend in op.backends.values() if backend.toolchain in TARGETS]


def _rows(toolchain):
    for op in OPS.values():
        for backend in compiled_backends(op):
            if backend.toolchain != toolchain:
                continue
            cases = [case for case in cases_of(op) if (op.name, backend.name, case.name) not in NOT_THEIRS]
            soonest = [case.name for case in cases if (op.name, case.name) not in SLOW[toolchain]][-1:]
            usual = "bfloat16" if "bfloat16" in backend.dtypes else min(backend.dtypes)
            for target in TARGETS[toolchain]:
                if (op.name, target) in NOT_ON:
                    continue
                for dtype in sorted(backend.dtypes):
                    for case in cases:
                        if (op.name, backend.name, case.name, dtype) in NOT_IN:
                            continue
                        quick = dtype == usual and target == TARGETS[toolchain][0] and case.name in soonest
                        marks = () if quick else (pytest.mark.slow,)
                        name = f"{op.name}-{backend.name}-{case.name}-{dtype}-{target}"
                        yield pytest.param(op, backend, case, dtype, target, marks=marks, id=name)


def directions(op, backend, case, dtype):
    """Returns, for each program to be compiled, whether it has the backward too."""
    call = op.bind(**op.case_inputs(case, dtype=dtype, shapes_only=True))
    assert backend.refuses(op, call, False) is None, f"{backend.name} refuses case {case.name}: drop its tag `code`"
    if (op.name, backend.name, case.name) in FORWARD_ALONE:
        return (False,)
    return (False, True) if backend.backward and backend.refuses(op, call, True) is None else (False,)


def public_of(op):
    """Returns the packages of the operations whose public functions an operation's files call."""
    files = [vars(sys.modules[m]).values() for m in sys.modules if m.startswith(f"{op.package}.")]
    return {x.op.package for values in files for x in values if isinstance(x, PublicFunction)}


def rooms_of(package, name):
    """Returns the packages of the kernels of a backend's file: its own, and the engines and toolchains that it imports from."""
    own = vars(sys.modules[f"{package}.{name}"]).values() if f"{package}.{name}" in sys.modules else ()
    modules = {x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or "" for x in own}
    family = [m for m in modules if m.startswith(("kernels.engines.", "kernels.toolchains.", f"{package}."))]
    return {m.rpartition(".")[0] for m in family} | {package}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_operation_with_kernels_says_which_cases_are_compiled(op):
    if compiled_backends(op):
        assert 1 <= len(cases_of(op)) <= MOST_CASES, (
            f"tag 1 to {MOST_CASES} cases `code`: small and odd ones, and one with a model's sizes"
        )


@pytest.mark.parametrize(("op", "backend", "case", "dtype", "target"), list(_rows("triton")))
def test_for_cuda(op, backend, case, dtype, target):
    """Kernels of this backend's file, or of a family's in the core, the forward's and then the backward's; no spill but those
    above, a block fits."""
    reports = []
    for backward in directions(op, backend, case, dtype):
        function, arguments = checks.call_of(op, case, dtype=dtype, platform=backend.name, backward=backward)
        reports.append(checks.export_cuda(function, arguments, compute_capability=target).kernels)
    names = [[kernel.name for kernel in report] for report in reports]
    assert names[0], "the forward has no kernel"
    assert names[-1][: len(names[0])] == names[0], names
    assert len(names) == 1 or len(names[1]) > len(names[0]), f"the backward has no kernel of its own: {names[1]}"
    rooms = set().union(*(rooms_of(package, backend.name) for package in {op.package} | public_of(op)))
    assert set(names[-1]) <= set().union(
        *(vars(sys.modules[m]) for m in sys.modules if m.rpartition(".")[0] in rooms)
    ), names
    for kernel in {
        kernel.ptx: kernel for kernel in reports[-1]
    }.values():  # one is launched for each token, or group of rows
        assert re.search(rf"^\.target sm_{target}", kernel.ptx, re.M), kernel.name
        spilled = max(kernel.resources["spill_stores"], kernel.resources["spill_loads"])
        remedy = "use smaller tiles or more warps, or say in SPILLS why it is left so"
        assert spilled <= SPILLS.get((op.name, case.name, target), 0), (kernel.name, kernel.resources, remedy)
        known = SERIALIZED.get((op.name, case.name, target), ())
        assert not kernel.resources["serialized"] or kernel.name in known, kernel.name
        assert kernel.shared_memory_bytes <= SHARED_MEMORY[target], (kernel.name, kernel.shared_memory_bytes)


@pytest.mark.parametrize(("op", "backend", "case", "dtype", "target"), list(_rows("pallas")))
def test_for_tpus(op, backend, case, dtype, target):
    """The TPU compiler takes it, and each direction is at least one kernel of ours."""
    least = len(directions(op, backend, case, dtype))
    function, arguments = checks.call_of(op, case, dtype=dtype, platform=backend.name, backward=least == 2)
    assert checks.mosaic_calls(checks.compile_tpu(function, arguments, topology=target)) >= least
