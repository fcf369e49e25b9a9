"""The one door of a layer's products: numbers, where the arrays lie, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ejdist import make_mesh
from ejdist.layout import current_layout, sharding
from ejdist.projection import parsed, project

RNG = np.random.default_rng(0)
B, T, D, N, H = 4, 8, 16, 4, 6


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


X, WEIGHT, BIAS = normal(B, T, D), normal(D, N, H), normal(N, H)


def loss(x, weight, bias, mesh):
    return jnp.sum(jnp.sin(project(x, weight, "btd,dnh->btnh", bias=bias, mesh=mesh)))


def test_on_a_mesh_it_is_the_einsum_and_the_gradient_is_scattered_to_where_the_weight_is_stored():
    wanted = jnp.einsum("btd,dnh->btnh", X, WEIGHT, precision="highest") + BIAS
    np.testing.assert_allclose(project(X, WEIGHT, "btd,dnh->btnh", bias=BIAS), wanted, rtol=1e-6)
    mesh = make_mesh(fsdp=2, sp=2, tp=2)
    layout = current_layout()
    stored = sharding(mesh, ("D", "N", "H"), layout.parameters, shape=WEIGHT.shape)
    weight = jax.device_put(WEIGHT, stored)
    got = jax.jit(lambda x, w, b: project(x, w, "btd,dnh->btnh", bias=b, mesh=mesh))(X, weight, BIAS)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    placed = NamedSharding(mesh, sharding(mesh, ("B", "T", "N", "H"), layout.activations).spec)
    assert got.sharding.is_equivalent_to(placed, 4)
    gradients = jax.jit(jax.grad(lambda x, w, b: loss(x, w, b, mesh), argnums=(0, 1, 2)))(X, weight, BIAS)
    assert gradients[1].sharding.is_equivalent_to(stored, 3)
    for got, want in zip(gradients, jax.grad(loss, argnums=(0, 1, 2))(X, WEIGHT, BIAS, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_letters_are_the_dims():
    assert parsed("btnh,nhd->btd") == ([*"BTNH"], [*"NHD"], [*"BTD"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X, WEIGHT, "btd,dnh"), "must look like 'btd,dnh->btnh'"),
        ((X, WEIGHT, "bzd,dnh->bznh"), "the letters z, which name no dim"),
        ((X, WEIGHT, "btd,df->btf"), "'weight' of shape .* does not have the dims D F"),
        ((X[..., :-1], WEIGHT, "btd,dnh->btnh"), "'weight' .* has D = 16, but 'x' .* has 15"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        project(*arguments)


def test_a_bias_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"'bias' of shape \(6, 4\) must have the dims N H"):
        project(X, WEIGHT, "btd,dnh->btnh", bias=BIAS.T)
