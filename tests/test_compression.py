"""Activations that are kept compressed: what they cost, how far off they are, and what becomes of the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error

from ejdist import compressed_checkpoint
from ejdist.compression import LARGEST, compress, decompress

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


# Of an element: part of its block's largest, part of itself.
BOUND = {"int8": (1 / 254, 0), "float8_e4m3fn": (2.0**-18, 1 / 16), "float8_e5m2": (2.0**-32, 1 / 8)}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("width", [1, 100, 128])
def test_the_error_is_what_is_stated(dtype, width):
    x = normal(7, width) * jnp.exp(3 * normal(7, width))
    x = x.at[0].set(0)
    small = compress(x, dtype, 32)
    back = decompress(small)
    assert back.shape == x.shape and back.dtype == x.dtype and small.values.dtype == dtype
    blocks = np.pad(np.abs(x), ((0, 0), (0, -width % 32))).reshape(7, -1, 32).max(-1)
    largest = np.repeat(blocks, 32, axis=1)[:, :width]
    of_block, of_itself = BOUND[dtype]
    assert (np.abs(back - x) <= (of_block * largest + of_itself * np.abs(x)) * 1.0001).all()


def layer(x, weights, ids):
    return {"y": jnp.tanh(x["h"] @ weights["w"]) + ids[:, None]}


@pytest.mark.parametrize("dtype", LARGEST)
def test_outputs_are_exact_and_gradients_are_those_at_the_rounded_arguments(dtype):
    x, weights, ids, scale = {"h": normal(5, 64)}, {"w": normal(64, 8) / 8}, jnp.arange(5), jnp.float32(1.5)

    def loss(f, x, weights, scale):
        return jnp.sum(jnp.sin(scale * f(x, weights, ids)["y"]))

    def through(scale):  # closes over an array, which has a gradient too
        return compressed_checkpoint(lambda *a: {"y": scale * layer(*a)["y"]}, dtype=dtype)

    def ours(x, w, s):
        return jnp.sum(jnp.sin(through(s)(x, w, ids)["y"]))

    value, got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2)))(x, weights, scale)
    np.testing.assert_allclose(value, loss(layer, x, weights, scale), rtol=1e-6)
    rounded = {"h": decompress(compress(x["h"], dtype))}
    d = jax.grad(lambda y: jnp.sum(jnp.sin(scale * y)))(layer(x, weights, ids)["y"])
    want = jax.vjp(lambda x, w: layer(x, w, ids)["y"], rounded, weights)[1](d)
    assert error(got[0]["h"], want[0]["h"]) < 1e-5 and error(got[1]["w"], want[1]["w"]) < 1e-5
    exact = jax.grad(lambda x, w, s: loss(layer, x, w, s), argnums=(0, 1, 2))(x, weights, scale)
    assert all(error(g, w) < 0.1 for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True))


def test_integers_that_it_closes_over():
    """Of a program around it and of a scan, as ids of segments and the number of a layer."""
    x, weights, ids = normal(4, 8), normal(2, 8, 8) / 8, jnp.arange(4)

    def loss(wrap, weights, ids):
        def step(x, now):
            w, i = now
            return wrap(lambda x: jnp.tanh(x @ w) * (ids > i)[:, None])(x), None

        return jnp.sum(jax.lax.scan(step, x, (weights, jnp.arange(2)))[0])

    def gradient(wrap):
        return jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(wrap, weights, ids)

    assert error(gradient(compressed_checkpoint), gradient(jax.checkpoint)) < 0.1


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-38, 1e-41, 0.0, 3.4e38])
def test_magnitudes_near_the_ends_of_float32(dtype, magnitude):
    x = jnp.full((2, 3), magnitude, jnp.float32)
    back = np.asarray(decompress(compress(x, dtype)), np.float64)
    assert np.abs(back - magnitude).max() <= magnitude / 8 + np.finfo(np.float32).tiny


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(4, 300), (2, 8, 300), (2, 5, 4, 128)], ids=str)
def test_what_is_no_number_stays_none(dtype, bad, shape):
    x = jnp.ones(shape).at[(0,) * len(shape)].set(bad)
    assert not np.isfinite(decompress(compress(x, dtype))[(0,) * len(shape)])


@pytest.mark.slow
def test_arrays_without_an_element():
    for shape in ((0, 8), (2, 0, 8), (3, 0)):
        gradient = jax.grad(lambda x: compressed_checkpoint(jnp.sin)(x).sum())(jnp.zeros(shape))
        assert gradient.shape == shape


def test_what_is_kept_is_smaller():
    """Of a scan over layers: a byte an element, and not four."""

    def temporaries(wrap):
        def loss(x, weights):
            return jnp.sum(jax.lax.scan(lambda x, w: (wrap(lambda x, w: jnp.tanh(x @ w))(x, w), None), x, weights)[0])

        shapes = jax.ShapeDtypeStruct((4096, 128), jnp.float32), jax.ShapeDtypeStruct((24, 128, 128), jnp.float32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(compressed_checkpoint) < 0.5 * temporaries(jax.checkpoint)


def test_wrong_calls():
    with pytest.raises(ValueError, match="argument 'dtype' = 'int4' is unknown; use one of int8"):
        compressed_checkpoint(layer, dtype="int4")
    with pytest.raises(ValueError, match="argument 'block' must be a positive integer, got 0"):
        compressed_checkpoint(layer, block=0)
    for places in (0, ("x",), None):
        with pytest.raises(ValueError, match="argument 'arguments' must be indices of positional arguments"):
            compressed_checkpoint(layer, arguments=places)
    with pytest.raises(ValueError, match=r"argument 'arguments' = \(3,\) names indices that a call with 3"):
        compressed_checkpoint(layer, arguments=(3,))({"h": normal(2, 4)}, {"w": normal(4, 4)}, jnp.arange(2))
