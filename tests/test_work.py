"""The work that operations declare: against hand counts, the dense mask, and what the compiler counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pairs import visible_pairs

OPERATIONS = kernels.operations()
FLASH = OPERATIONS["flash_attention"]
visible = jax.jit(MaskInfo.visible, static_argnums=(1, 2))


def bound(op, name, dtype="float32"):
    case = next(c for c in op.cases if c.name == name)
    return op.bind(**op.case_inputs(case, dtype=dtype))


@pytest.mark.parametrize("case", [c for c in FLASH.cases if "bench" not in c.tags], ids=lambda c: c.name)
def test_pairs_are_those_of_the_dense_mask(case):
    arguments = FLASH.case_inputs(case)
    B, T, S, N = (case.dims[d] for d in "BTSN")
    mask = arguments.get("mask")
    dense = np.broadcast_to(visible(mask or MaskInfo(), T, S), (B, N, T, S))
    assert visible_pairs(mask, B, N, T, S) == int(dense.sum())


def test_pairs_by_hand():
    assert visible_pairs(None, 2, 3, 5, 7) == 2 * 3 * 5 * 7
    assert visible_pairs(MaskInfo(causal=True), 1, 1, 1 << 20, 1 << 20) == (1 << 19) * ((1 << 20) + 1)
    window = MaskInfo(causal=True, window=(4095, 0))
    assert visible_pairs(window, 1, 1, 32768, 32768) == 4096 * 4097 // 2 + (32768 - 4096) * 4096
    assert visible_pairs(MaskInfo.from_segments(np.full((2, 8), -1), causal=True), 2, 4, 8, 8) == 0


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_unknown_fields_give_an_upper_bound(chunk_size):
    ids = jnp.asarray([[0, 0, 1, 1, 1, -1]], jnp.int32)
    seen = []

    @jax.jit
    def traced(ids):
        mask = MaskInfo.from_segments(ids, causal=True, chunk_size=chunk_size)
        seen.append(visible_pairs(mask, 1, 1, 6, 6))
        return ids

    traced(ids)
    exact = visible_pairs(MaskInfo.from_segments(ids, causal=True, chunk_size=chunk_size), 1, 1, 6, 6)
    assert exact == 3 + 6 and seen == [21]
    prefix = MaskInfo(causal=True, prefix_lengths=jax.ShapeDtypeStruct((1,), jnp.int32))
    assert visible_pairs(prefix, 1, 1, 6, 6) == 36


def test_counts_by_hand():
    forward, backward = OPERATIONS["rms_norm"].work(bound(OPERATIONS["rms_norm"], "small", "bfloat16"))
    assert (forward.flops, forward.bytes) == (4 * 640, 2 * 640 * 2 + 64 * 2 + 10 * 4)
    assert (backward.flops, backward.bytes) == (8 * 640, 3 * 640 * 2 + 2 * 64 * 2 + 10 * 4)
    forward, backward = OPERATIONS["fused_add_layer_norm"].work(bound(OPERATIONS["fused_add_layer_norm"], "small"))
    assert (forward.flops, forward.bytes) == (8 * 240, 4 * (4 * 240 + 2 * 24 + 2 * 10))
    assert (backward.flops, backward.bytes) == (12 * 240, 4 * (4 * 240 + 2 * 2 * 24 + 2 * 10))
    forward, backward = OPERATIONS["rotary_embedding"].work(bound(OPERATIONS["rotary_embedding"], "partial"))
    elements = 2 * 7 * 3
    assert forward == backward and forward.flops == elements * 8 // 2 * 6
    assert forward.bytes == 2 * elements * 16 * 4 + 14 * 4
    forward, backward = OPERATIONS["gated_mlp"].work(bound(OPERATIONS["gated_mlp"], "small"))
    assert (forward.flops, backward.flops) == (6 * 10 * 16 * 24, 16 * 10 * 16 * 24)
    assert forward.bytes == 4 * (2 * 160 + 3 * 384) and backward.bytes == 4 * (3 * 160 + 6 * 384)
    forward, backward = OPERATIONS["cross_entropy"].work(bound(OPERATIONS["cross_entropy"], "small"))
    assert (forward.flops, backward.flops) == (2 * 12 * 8 * 20, 6 * 12 * 8 * 20)
    assert forward.bytes == 4 * (96 + 160 + 4 * 12)
    assert (forward + backward).bytes == 4 * (3 * (96 + 160) + 9 * 12)
    forward, backward = OPERATIONS["cross_entropy_sums"].work(bound(OPERATIONS["cross_entropy_sums"], "small"))
    assert (forward.flops, backward.flops) == (2 * 12 * 8 * 20, 4 * 12 * 8 * 20)
    forward, backward = FLASH.work(bound(FLASH, "mqa"))
    pairs = 2 * 4 * 37 * 38 // 2
    assert (forward.flops, backward.flops) == (4 * 16 * pairs, 10 * 16 * pairs)
    q, kv, lse = 2 * 37 * 4 * 16 * 4, 2 * 2 * 37 * 16 * 4, 2 * 37 * 4 * 4
    assert (forward.bytes, backward.bytes) == (2 * q + kv + lse, 4 * q + 2 * kv + lse)


@pytest.mark.parametrize(
    "name, dims",
    [
        ("gated_mlp", {"lead": (64,), "D": 64, "F": 96}),
        ("cross_entropy", {"lead": (64,), "D": 128, "V": 160}),
        ("flash_attention", {"B": 1, "T": 64, "S": 64, "N": 4, "K": 4, "H": 128, "Hv": 128}),
    ],
)
def test_the_compiler_counts_the_same_matmuls(name, dims):
    """The dense contract, nothing masked: its matmuls are the declared flops, and the elementwise rest is small."""
    op = OPERATIONS[name]
    case = next(c for c in op.cases if c.name in ("full", "small"))
    arguments = op.case_inputs(type(case)(name, dims, make=case.make))
    counted = jax.jit(op.function).lower(**arguments).compile().cost_analysis()["flops"]
    declared = op.work(op.bind(**arguments))[0].flops
    assert declared <= counted <= 1.1 * declared


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_declares_its_work(name):
    """From shapes alone, so that a case too large for this machine has a count too."""
    op = OPERATIONS[name]
    arguments = op.case_inputs(next(c for c in op.cases if "bench" not in c.tags))
    shapes = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype) if isinstance(v, jax.Array) else v for k, v in arguments.items()
    }
    assert op.work(op.bind(**shapes)) == op.work(op.bind(**arguments))
