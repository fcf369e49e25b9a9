"""Operations written in others: programs hold the kernels that dispatch chooses, and none where XLA is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_names import names_of_kernels

import kernels
from kernels import MaskInfo, Unsupported
from kernels.framework.backend import Case
from kernels.framework.execute import Saved
from kernels.ops.attention_variants import composed as variants
from kernels.ops.attention_variants.contract import differential_op, mixture_op
from kernels.toolchains.simulate import ahead_of_time as checks

FLASH = kernels.operations()["flash_attention"]
MLA = kernels.operations()["flash_mla"]
CAUSAL = {"mask": lambda rng, dims: MaskInfo(causal=True)}
# Values of another width than keys: those have no kernel of cuDNN, which leaves no Triton kernel in a program.
HEADS = {"B": 1, "T": 128, "S": 128, "N": 2, "K": 2, "H": 64, "Hv": 128}
CASES = {
    differential_op: Case("heads", HEADS, make=CAUSAL),
    MLA: Case("heads", {**HEADS, "Hr": 64, "R": 64, "Hv": 64}, arrays=("query_rope", "key_rope"), make=CAUSAL),
    mixture_op: Case("heads", {**HEADS, "D": 64, "E": 4}, {"top_k": 2}, make=CAUSAL),
}
# The attention that each calls.
PLAIN = {
    differential_op: Case("heads", HEADS, make=CAUSAL),
    MLA: Case("heads", {**HEADS, "H": 128, "Hv": 64}, make=CAUSAL),
    mixture_op: Case("heads", {**HEADS, "K": 1}, make=CAUSAL),
}


def of_each(*slow):
    return pytest.mark.parametrize(
        "op", [pytest.param(op, id=op.name, marks=pytest.mark.slow if op in slow else ()) for op in CASES]
    )


# One of two outputs of attention, and one of wider queries; experts of attention are the same calls beside products.
each, fewest = of_each(mixture_op), of_each(mixture_op, differential_op)


def triton_kernels(op, case, **asked):
    return set(names_of_kernels(*checks.call_of(op, case, **asked)))


@fewest
def test_the_program_for_cuda_holds_the_kernels_of_attention_both_ways(op):
    forward = triton_kernels(FLASH, PLAIN[op], backward=False)
    both = triton_kernels(FLASH, PLAIN[op])
    assert forward and both > forward
    found = triton_kernels(op, CASES[op])
    assert both <= found
    assert forward <= triton_kernels(op, CASES[op], backward=False)
    assert (op is mixture_op) == any("matmul" in name for name in found)


@fewest
def test_xla_asked_by_name_is_xla_all_through(op):
    assert not triton_kernels(op, CASES[op], platform="xla")
    assert checks.mosaic_calls(checks.compile_tpu(*checks.call_of(op, CASES[op], platform="xla"))) == 0


@each
def test_the_program_for_a_tpu_holds_pallas_kernels(op):
    forward = checks.mosaic_calls(checks.compile_tpu(*checks.call_of(op, CASES[op], backward=False)))
    assert 0 < forward < checks.mosaic_calls(checks.compile_tpu(*checks.call_of(op, CASES[op])))


@each
def test_a_toolchain_that_the_operation_is_not_written_in_is_refused(op):
    with pytest.raises(Unsupported, match=f"has no pallas backend; it has {', '.join(op.backends)}"):
        op(**op.case_inputs(CASES[op]), platform="pallas")


def test_differential_attention_over_triton_kernels_has_the_numbers_of_the_contract():
    arrays = differential_op.case_inputs(differential_op.cases[0])
    mask = arrays.pop("mask")
    forward, backward = variants.differential("triton")

    @jax.jit
    def reference(arrays):
        wanted, pull = jax.vjp(lambda arrays: differential_op.reference(**arrays, mask=mask), arrays)
        cotangents = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), wanted)
        return wanted, cotangents, pull(cotangents)[0]

    wanted, cotangents, gradients_wanted = reference(arrays)
    residuals = dict(zip(differential_op.outputs, wanted, strict=True))
    residuals |= {f"d_{name}": d for name, d in zip(differential_op.outputs, cotangents, strict=True)}
    with checks.interpret():
        found = forward(**arrays, mask=mask, softmax_scale=None)
        gradients = backward(Saved(residuals), **arrays, mask=mask, softmax_scale=None)
    for a, b in zip(found, wanted, strict=True):
        assert np.allclose(a, b, atol=1e-5)
    for name, gradient in gradients_wanted.items():
        assert np.allclose(gradients[name], gradient, atol=1e-4), name
