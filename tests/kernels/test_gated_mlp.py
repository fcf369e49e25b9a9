"""The gated MLP against NumPy float64, in value and all gradients, and its memory contract."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.ops.gated_mlp import ACTIVATIONS, gated_mlp

erf = np.vectorize(math.erf)
ORACLE = {  # name -> (function, derivative)
    "silu": (lambda z: z / (1 + np.exp(-z)), lambda z: (1 + z / (1 + np.exp(z))) / (1 + np.exp(-z))),
    "gelu": (
        lambda z: z * 0.5 * (1 + erf(z / math.sqrt(2))),
        lambda z: 0.5 * (1 + erf(z / math.sqrt(2))) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi),
    ),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
}


def tanh_gelu(z):
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


ORACLE["gelu_tanh"] = (tanh_gelu, lambda z: (tanh_gelu(z + 1e-6) - tanh_gelu(z - 1e-6)) / 2e-6)


def inputs(lead, D, F, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape)

    return [make(*lead, D), make(D, F), make(D, F), make(F, D)], make(*lead, D)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_gradients_against_float64(activation):
    arrays, d = inputs((3, 5), 7, 11)
    x, gate, up, down = arrays
    act, slope = ORACLE[activation]
    g, u = x @ gate, x @ up
    dh = d @ down.T
    dg, du = dh * u * slope(g), dh * act(g)

    def rows(a):
        return a.reshape(-1, a.shape[-1])

    wanted = (
        dg @ gate.T + du @ up.T,
        rows(x).T @ rows(dg),
        rows(x).T @ rows(du),
        rows(act(g) * u).T @ rows(d),
    )
    narrow = [jnp.asarray(a, jnp.float32) for a in arrays]
    got, pull = jax.vjp(lambda *a: gated_mlp(*a, activation=activation), *narrow)
    np.testing.assert_allclose(got, (act(g) * u) @ down, rtol=1e-4, atol=1e-4)
    for a, w in zip(pull(jnp.asarray(d, jnp.float32)), wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-3)


def test_nothing_of_width_F_is_kept_for_the_backward():
    D, F, rows = 4, 100, 50
    x, w, v = jnp.ones((rows, D)), jnp.ones((D, F)), jnp.ones((F, D))
    _, pull = jax.vjp(gated_mlp, x, w, w, v)
    kept = [a.shape for a in jax.tree.leaves(pull) if hasattr(a, "shape")]
    assert (rows, D) in kept and (rows, F) not in kept, kept


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, v: gated_mlp(x, w, w, v, activation="swish"), "use one of silu, gelu"),
        (lambda x, w, v: gated_mlp(x, w, w[:, 1:], v), "'up'.*F"),
        (lambda x, w, v: gated_mlp(x, w, w, v.T), "'down'"),
        (lambda x, w, v: gated_mlp(x.astype(jnp.bfloat16), w, w, v), "'gate' is float32 but 'x' is bfloat16"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((2, 4)), jnp.ones((4, 6)), jnp.ones((6, 4)))
