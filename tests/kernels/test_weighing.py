"""Rows and cotangents by their weights: kernels and XLA against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.engines.matmul.weighing import weigh
from kernels.framework.interpret import interpret
from kernels.toolchains.simulate.ahead_of_time import export_cuda

RNG = np.random.default_rng(0)
SLOPES = {
    None: lambda z: (z, np.ones_like(z)),
    "relu": lambda z: (np.maximum(z, 0), (z > 0) * 1.0),
    "silu": lambda z: (z / (1 + np.exp(-z)), (1 + np.exp(-z) + z * np.exp(-z)) / (1 + np.exp(-z)) ** 2),
}


@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize(
    ("F", "activation"), [(24, None), (768, "silu"), pytest.param(1100, "relu", marks=pytest.mark.slow), (128, "silu")]
)
def test_numbers(F, activation, platform):
    """What rows of no pair hold, NaN here, reaches no other; their gradient of a weight is 0."""
    sides = 1 if activation is None else 2
    d, rows, weights = (RNG.standard_normal(s).astype(np.float32) for s in ((9, F), (9, sides * F), (4, 3)))
    pairs = np.array([3, 11, 0, -1, 7, 5, -1, 1, 2])
    d[pairs < 0] = rows[pairs < 0] = np.nan
    with interpret():
        arrays = map(jnp.asarray, (d, rows, pairs.astype(np.int32), weights))
        got = weigh(*arrays, activation=activation, platform=platform)
    there = pairs >= 0
    d, rows, w = d[there].astype(np.float64), rows[there].astype(np.float64), weights.reshape(-1)[pairs[there], None]
    act, slope = SLOPES[activation](rows[:, :F])
    if activation is None:
        want = w * d, w * rows, (d * rows).sum(1)
    else:
        up = rows[:, F:]
        want = w * np.concatenate([d * up * slope, d * act], axis=1), w * act * up, (d * act * up).sum(1)
    for name, a, b in zip(got._fields, got, want):
        np.testing.assert_allclose(np.asarray(a)[there], b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)
    np.testing.assert_array_equal(got.d_weight[~there], 0)


@pytest.mark.parametrize(
    ("F", "activation", "most"),
    [(768, "silu", 80), pytest.param(768, None, 80, marks=pytest.mark.slow), (14336, "silu", 128)],
)
def test_a_layer_is_compiled_without_spills(F, activation, most):
    """What a rank of 8 has of Qwen3-30B-A3B, and rows as wide as Mixtral's."""
    M = 327680
    wide = jax.ShapeDtypeStruct((M, F if activation is None else 2 * F), jnp.bfloat16)
    d, pairs = jax.ShapeDtypeStruct((M, F), jnp.bfloat16), jax.ShapeDtypeStruct((M,), jnp.int32)
    weights = jax.ShapeDtypeStruct((218704, 8), jnp.float32)
    report = export_cuda(lambda *arrays: weigh(*arrays, activation=activation), d, wide, pairs, weights)
    (kernel,) = report.kernels
    assert kernel.resources["spill_stores"] == 0 and kernel.resources["registers"] <= most
