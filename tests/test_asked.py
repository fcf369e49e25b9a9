"""Outputs that nobody asks for: gradients are as with a cotangent of zero, and a backward may know that there is none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import as_tuple, differentiable, error

import ejdist
import kernels
from ejdist import make_mesh
from kernels._core.binding import floats_apart, is_float_array, merged
from kernels._core.interpret import interpret
from kernels.ops.flash_attention import cudnn_gpu, flash_attention
from kernels.ops.flash_attention.contract import op as flash

SEVERAL = {n: op for n, op in kernels.operations().items() if len(op.outputs) > 1 and differentiable(op)}


def call_of(op):
    """Returns (the floats of a small call, the function of them that asks for some outputs)."""
    case = next(c for c in op.cases if "bench" not in c.tags)
    call = op.bind(**op.case_inputs(case))
    floats, others = floats_apart(call.traced(), op.no_gradient)
    return floats, lambda x, asked: op(**call.static(), **merged(x, others), platform="xla", asked=asked)


def gradients(function, floats, asked, at):
    """Returns the gradients of a function of the output `at`, and those of a function of them."""

    def loss(x):
        out = as_tuple(function(x, asked))[at].astype(jnp.float32)
        return jnp.sum(jnp.sin(out) * jnp.where(jnp.isfinite(out), 1, 0))

    first = jax.grad(loss)
    second = jax.grad(lambda x: sum(jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(first(x))))
    return jax.jit(first)(floats), jax.jit(second)(floats)


# Of the first output, which callers ask for as a rule; of attention's also the other, which its backward takes apart.
ROWS = [(name, 0) for name in SEVERAL] + [(name, 1) for name, op in SEVERAL.items() if op.outputs == ("out", "lse")]


@pytest.mark.parametrize(("name", "at"), ROWS, ids=str)
def test_gradients_of_one_output(name, at):
    op = SEVERAL[name]
    floats, function = call_of(op)
    outputs = as_tuple(jax.eval_shape(lambda x: function(x, None), floats))
    assert is_float_array(outputs[at])
    asked = op.outputs[at : at + 1]
    some, every = as_tuple(function(floats, asked)), as_tuple(function(floats, None))
    assert [y is None for y in some] == [n not in asked for n in op.outputs]
    np.testing.assert_allclose(some[at], every[at], rtol=1e-5, atol=1e-5)
    got, want = (gradients(function, floats, of, at) for of in (asked, None))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < 1e-4


@pytest.mark.parametrize("asked", [("out", "sum"), (), "sum"], ids=str)
def test_an_output_that_there_is_not(asked):
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=f"argument 'asked' = {re.escape(repr(asked))} must name some of out, lse"):
        flash(x, x, x, asked=asked)


def test_one_output_by_its_name():
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    found = flash(x, x, x, asked="lse")
    assert found[0] is None
    np.testing.assert_array_equal(found[1], flash(x, x, x)[1])


QUERY = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))


def test_cudnn_takes_the_true_output(monkeypatch):
    """Where lse has no cotangent; where it has one, another is made that holds it."""
    x, made = QUERY.astype(jnp.bfloat16), []
    true = cudnn_gpu._out_of
    monkeypatch.setattr(cudnn_gpu, "_out_of", lambda *a: made.append(1) or true(*a))

    def gradient(return_lse, weight):
        def loss(x):
            found = flash_attention(x, x, x, causal=True, return_lse=return_lse, platform="cudnn")
            out, lse = found if return_lse else (found, jnp.zeros(()))
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + weight * jnp.sum(lse)

        return jax.grad(loss)(x).astype(jnp.float32)

    with interpret():
        alone = gradient(False, 0)
        assert not made
        both = gradient(True, 0)
        assert made
        other = gradient(True, 1)
    assert error(alone, both) < 1e-2 < error(other, both)


@pytest.mark.parametrize("devices", [1, 2])
def test_on_a_mesh_too(monkeypatch, devices):
    """The sharded function asks a device for what its caller wants."""
    asked, run = [], type(flash).run

    def spy(self, call, **how):
        if self is flash:
            asked.append(how["asked"])
        return run(self, call, **how)

    monkeypatch.setattr(type(flash), "run", spy)
    how = {"mesh": make_mesh(dp=devices, devices=jax.devices()[:devices])} if devices > 1 else {}

    def loss(x, return_lse):
        found = ejdist.flash_attention(x, x, x, causal=True, return_lse=return_lse, **how)
        return jnp.sum(jnp.sin(found[0] if return_lse else found))

    got = jax.jit(jax.grad(lambda x: loss(x, False)))(QUERY)
    assert asked and set(asked) == {("out",)}
    asked.clear()
    want = jax.jit(jax.grad(lambda x: loss(x, True)))(QUERY)
    assert asked and set(asked) == {("out", "lse")}
    np.testing.assert_allclose(got, want, atol=1e-5)
