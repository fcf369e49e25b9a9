"""flash_attention's kernels for Hopper, without one: who is chosen, what is refused, and the code. Their numbers are held in
tests/gpu/test_flash_attention_gpu.py."""

import jax
import jax.numpy as jnp
import pytest

from kernels import MaskInfo
from kernels._core.ahead_of_time import export_cuda
from kernels._core.config import BwdParams, FwdParams, KernelConfig
from kernels._core.interpret import interpret
from kernels.ops.flash_attention import op
from kernels.ops.flash_attention.triton_gpu import SPECIALISED

LENGTH = 512
PLAIN = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]
HOPPERS = ["specialised_forward_kernel", "specialised_gradient_kernel"]
EVERYTHING = {"logits_soft_cap": 30.0, "softmax_aux": jax.ShapeDtypeStruct((4, 1), "float32")}


def call(width=128, value_width=None, dtype="bfloat16", length=LENGTH, **options):
    """Returns the arguments of a call, as shapes."""
    wide, tall = (1, length, 4, width), (1, length, 2, value_width or width)
    given = {"query": wide, "key": (*wide[:2], 2, width), "value": tall}
    return {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in given.items()} | options


def warps(**given):
    found = op.backends["triton_gpu"].heuristic(op.bind(**given), "cuda")
    return found.fwd_params.num_warps, found.bwd_params.num_warps


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({}, True, True),
        ({"width": 64}, True, True),
        ({"width": 96}, True, True),
        ({"dtype": "float16"}, True, True),
        ({"mask": MaskInfo(causal=True, window=(100, 0), chunk_size=200)}, True, True),
        (EVERYTHING, True, True),
        ({"width": 256}, True, False),
        ({"width": 192, "value_width": 128}, True, False),
        ({"width": 128, "value_width": 64}, True, True),
        ({"width": 64, "value_width": 128}, False, False),
        ({"width": 32}, False, False),
        ({"width": 100}, False, False),
        ({"width": 128, "value_width": 68}, False, False),
        ({"dtype": "float32"}, False, False),
        ({"length": 64}, False, False),
        ({"softmax_scale": -1.0}, False, False),
        ({"bias": shape(1, 1, LENGTH, LENGTH)}, False, False),
        ({"alibi_slopes": shape(1, 4)}, False, False),
        ({"mask": MaskInfo(attention_mask=jnp.ones((1, 1, LENGTH, LENGTH), bool))}, False, False),
        ({"deterministic": True}, True, False),
    ],
    ids=str,
)
def test_who_is_chosen(given, forward, backward):
    assert [w == SPECIALISED for w in warps(**call(**given))] == [forward, backward]


def made(given, compute_capability, cfg=None):
    """Returns the kernels of a call with its gradients, compiled."""
    floats = {n: x for n, x in given.items() if n in ("query", "key", "value", "softmax_aux", "segments")}
    rest = {n: x for n, x in given.items() if n not in floats and n != "mask"}

    def run(floats):
        def loss(floats):
            mask, ids = given.get("mask", MaskInfo(causal=True)), floats.get("segments")
            mask = mask if ids is None else mask.replace(q_segment_ids=ids, kv_segment_ids=ids)
            arrays = {n: x for n, x in floats.items() if n != "segments"}
            out, lse = op(**arrays, **rest, mask=mask, platform="triton", cfg=cfg)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(loss, allow_int=True)(floats)

    return export_cuda(run, floats, compute_capability=compute_capability).kernels


def held(kernels, names, spills):
    assert [k.name for k in kernels] == names
    for kernel in kernels:
        assert kernel.shared_memory_bytes <= 227 * 1024
        resources = kernel.resources
        assert resources["serialized"] == 0 and resources["spill_stores"] <= spills, (kernel.name, resources)
        if kernel.name in HOPPERS:  # three warpgroups, and 168 registers each before they change hands
            assert (kernel.num_warps, resources["registers"]) == (SPECIALISED, 168) and "setmaxnreg" in kernel.ptx


SEGMENTS = {"segments": jax.ShapeDtypeStruct((1, LENGTH), "int32")}


def test_the_code_with_every_option():
    """A soft cap, sinks, a window and documents: 57 registers are out of the loop over queries."""
    given = call(**EVERYTHING, **SEGMENTS, mask=MaskInfo(causal=True, window=(100, 0)))
    held(made(given, 90), HOPPERS, 232)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"width": 64}, HOPPERS),
        ({"width": 96}, HOPPERS),
        ({"width": 128, "value_width": 64}, HOPPERS),
        ({"dtype": "float16", **SEGMENTS}, HOPPERS),
        ({"mask": MaskInfo()}, HOPPERS),
        ({"width": 256}, [HOPPERS[0], *PLAIN[1:]]),
        ({"width": 192, "value_width": 128}, [HOPPERS[0], *PLAIN[1:]]),
        ({"deterministic": True}, [HOPPERS[0], *PLAIN[1:]]),
    ],
    ids=str,
)
def test_the_code(given, names):
    # The plain gradient of the keys holds two sums beside its logits. Blocks without a spill were slower on an H200: 369
    # TFLOP/s as it is, 320 with half of the queries at once, 287 and 319 with 8 warps.
    held(made(call(**given), 90), names, 496)


def test_other_gpus_have_the_plain_kernels():
    assert [k.name for k in made(call(width=64), 80)] == PLAIN


CONFIG = KernelConfig(FwdParams(128, 128, SPECIALISED, 2), BwdParams(64, 128, SPECIALISED, 2))


@pytest.mark.parametrize(
    ("given", "cfg", "message"),
    [
        ({"bias": shape(1, 1, 64, 64)}, CONFIG, "fwd_params has 12 warps, .* it does not take bias: use 4 or 8 warps"),
        ({"alibi_slopes": shape(1, 4)}, CONFIG, "it does not take alibi_slopes"),
        ({"dropout_prob": 0.1, "dropout_seed": shape(1, 1)}, CONFIG, "it does not take dropout_prob"),
        ({"dtype": "float32"}, CONFIG, "of this call it has FwdParams"),
        (
            {"width": 256},
            CONFIG,
            "blocks of 128 queries and 128 keys; of this call it has .*kv_blocksize=64, num_warps=12",
        ),
        ({}, KernelConfig(FwdParams(64, 64, SPECIALISED, 2)), "blocks of 64 queries and 64 keys; of this call it has"),
    ],
    ids=["bias", "slopes", "dropout", "float32", "256", "blocks"],
)
def test_a_configuration_that_no_kernel_has_is_told(given, cfg, message):
    arrays = {
        n: jnp.zeros(x.shape, "int32" if n == "dropout_seed" else x.dtype) if hasattr(x, "shape") else x
        for n, x in call(length=64, **given).items()
    }
    with interpret(), pytest.raises(ValueError, match=message):
        op(**arrays, platform="triton", cfg=cfg)
