"""FLOPs of the mask that is used, against counting every pair; both conventions; published sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist.device_rates import peak_flops
from ejdist.models.decoder import DecoderConfig, declare, flops, loss
from ejdist.models.parameters import num_parameters, shapes
from ejdist.operations import bind_ops
from ejdist.training.flops import matmul_flops_per_token, step_flops, visible_pairs
from kernels.engines.attention.masks import MaskInfo, window_of

LLAMA_8B = DecoderConfig(128256, 32, 4096, 32, 8, 128, 14336, tie_embeddings=False)


def documents(rng, rows=4, length=40):
    ids = np.full((rows, length), -1)
    for row in ids:
        edges = np.sort(rng.choice(np.arange(1, length), 4, replace=False))
        for k, (start, end) in enumerate(zip([0, *edges[:-1]], edges, strict=True)):
            row[start:end] = k
    return ids


@pytest.mark.parametrize("window", [None, 1, 2, 7, 40, 100])
def test_pairs_against_counting_them(window):
    rng = np.random.default_rng(0)
    ids = documents(rng)
    i, j = np.arange(40)[:, None], np.arange(40)[None]
    seen = (j <= i) & (i - j < (window or 100))
    count = sum(int(np.sum(seen & (row[:, None] == row[None]) & (row[:, None] >= 0))) for row in ids)
    mask = MaskInfo(causal=True, window=window_of(window))
    assert visible_pairs(ids, mask) == count
    packed = mask.combine(MaskInfo.from_segments(jnp.asarray(ids, jnp.int32)))
    assert visible_pairs(ids, mask) == int(np.sum(packed.visible(40, 40)))
    assert visible_pairs(ids[:, rng.permutation(40)], mask) == count


def test_pairs_of_rules_are_counted_in_each_document():
    ids = documents(np.random.default_rng(1))
    for rules in ({"chunk_size": 5}, {"chunk_size": 3, "window": (4, 0)}, {"window": (None, 2)}):
        packed = MaskInfo.from_segments(jnp.asarray(ids, jnp.int32), causal=True, **rules)
        assert visible_pairs(ids, MaskInfo(**rules)) == int(np.sum(packed.visible(40, 40))), rules


def test_ends():
    assert visible_pairs(np.full((2, 8), -1)) == 0
    assert visible_pairs(np.zeros((2, 8), int)) == 2 * 36
    assert visible_pairs(np.zeros((1, 1 << 20), int)) == (1 << 19) * ((1 << 20) + 1)  # no overflow, no square in memory


def test_matmuls_are_two_flops_a_weight():
    assert matmul_flops_per_token(flops(LLAMA_8B)) == 2 * (
        num_parameters(declare(LLAMA_8B)) - 128256 * 4096 - 65 * 4096
    )
    tied = dataclasses.replace(LLAMA_8B, tie_embeddings=True)
    assert matmul_flops_per_token(flops(tied)) == matmul_flops_per_token(flops(LLAMA_8B))
    fancy = dataclasses.replace(LLAMA_8B, qk_norm=True, attention_bias=True)
    assert matmul_flops_per_token(flops(fancy)) == matmul_flops_per_token(flops(LLAMA_8B))


def test_both_conventions_and_the_pattern():
    one_document = np.zeros((1, 131072), int)
    whole = step_flops(flops(LLAMA_8B), one_document)
    matmuls = 3 * matmul_flops_per_token(flops(LLAMA_8B)) * 131072
    assert matmuls == pytest.approx(6 * (8.03e9 - 0.525e9) * 131072, rel=1e-3)
    full = 3 * 4 * 32 * 32 * 128 * 131072**2
    assert whole.full == pytest.approx(matmuls + full, rel=1e-12)
    assert whole.causal == pytest.approx(matmuls + full / 2, rel=1e-4)
    narrow = dataclasses.replace(LLAMA_8B, layer_pattern=("window",), sliding_window=1024)
    window = step_flops(flops(narrow), one_document).causal - matmuls
    assert window < full / 100
    # 32 layers in threes: ten whole rounds, and two windows more.
    mixed = dataclasses.replace(narrow, layer_pattern=("window", "window", "full"))
    wanted = matmuls + window * 22 / 32 + (whole.causal - matmuls) * 10 / 32
    assert step_flops(flops(mixed), one_document).causal == pytest.approx(wanted, rel=1e-12)
    assert step_flops(flops(mixed), one_document).full == whole.full
    halves = np.repeat([[0, 1]], 65536, axis=1)
    assert step_flops(flops(LLAMA_8B), halves).causal == pytest.approx(matmuls + full / 4, rel=1e-4)


def test_compiled_matmul_flops_agree():
    """XLA's own count of a forward whose attention is nothing."""
    config = DecoderConfig(512, 3, 64, 4, 4, 16, 160, layer_pattern=("full",) * 3)  # no loop: XLA counts a body once
    ops = bind_ops(None).replace(attention=lambda query, key, value, **_: query + key + value)
    batch = {k: jax.ShapeDtypeStruct((2, 32), jnp.int32) for k in ("tokens", "targets", "positions", "segment_ids")}
    run = jax.jit(lambda p, b: loss(p, b, config, ops)[0])
    counted = run.lower(shapes(declare(config)), batch).compile().cost_analysis()["flops"]
    assert counted == pytest.approx(matmul_flops_per_token(flops(config)) * 64, rel=0.08)  # the rest is elementwise


def test_peaks():
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5") == 459e12
    assert peak_flops("cpu") is None
