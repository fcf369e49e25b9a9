"""Outputs that nothing depends on have no cotangent: gradients are those of a zero, and a backward may know that it is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import as_tuple, differentiable, error

import ejdist
import kernels
from ejdist import make_mesh
from kernels.framework.binding import floats_apart, is_float_array, merged
from kernels.framework.interpret import interpret
from kernels.ops.flash_attention import cudnn_gpu

SEVERAL = {n: op for n, op in kernels.operations().items() if len(op.outputs) > 1 and differentiable(op)}


def call_of(op):
    """Returns (the floats of a small call, the function of them)."""
    case = next(c for c in op.cases if "bench" not in c.tags)
    call = op.bind(**op.case_inputs(case))
    floats, others = floats_apart(call.traced(), op.no_gradient)
    return floats, lambda x: as_tuple(op(**call.static(), **merged(x, others), platform="xla"))


def gradients(function, floats, at, twice):
    """Returns the gradients of a function of the output `at` alone, and the same where the others have a cotangent too, of
    zeros; `twice`: of a function of these gradients."""

    def of(y):
        y = y.astype(jnp.float32)
        return jnp.sum(jnp.sin(y) * jnp.where(jnp.isfinite(y), 1, 0))

    def alone(x):
        return of(function(x)[at])

    def beside(x):
        found = function(x)
        return of(found[at]) + 0 * sum(of(y) for i, y in enumerate(found) if i != at and is_float_array(y))

    def gradient(loss):
        first = jax.grad(loss)
        return jax.grad(lambda x: sum(jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(first(x)))) if twice else first

    return jax.jit(lambda x: (gradient(alone)(x), gradient(beside)(x)))(floats)


# Of the first output, which a loss is of as a rule; of attention's also the other, which its backward takes apart.
ROWS = [(name, 0) for name in SEVERAL] + [(name, 1) for name, op in SEVERAL.items() if op.outputs == ("out", "lse")]
# The second derivative is that of the contract, whatever the operation: quick are one whose backward takes an output apart, and
# one whose backward is given zeros.
TWICE = {("flash_attention", 0), ("rms_norm", 0)}


# Outputs that a backward takes apart, that it may leave out, sums, and states; of rwkv4 nothing depends on the last output.
QUICK = ("flash_attention", "rms_norm", "cross_entropy_sums", "linear_attention", "rwkv4")


def rows():
    for name, at in ROWS:
        marks = () if name in QUICK else pytest.mark.slow
        yield pytest.param(name, at, False, id=f"{name}-{at}-once", marks=marks)
        marks = () if (name, at) in TWICE else pytest.mark.slow
        yield pytest.param(name, at, True, id=f"{name}-{at}-twice", marks=marks)


@pytest.mark.parametrize(("name", "at", "twice"), list(rows()))
def test_gradients_of_one_output(name, at, twice):
    floats, function = call_of(SEVERAL[name])
    got, want = gradients(function, floats, at, twice)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < 1e-4


QUERY = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))
ATTENTION = {
    "local": kernels.flash_attention,
    "dp": lambda *x, **options: ejdist.flash_attention(*x, **options, mesh=make_mesh(dp=2, devices=jax.devices()[:2])),
    "ring": lambda *x, **options: ejdist.ring_attention(*x, **options, mesh=make_mesh(sp=2, devices=jax.devices()[:2])),
}


@pytest.mark.parametrize("where", [pytest.param(w, marks=[pytest.mark.slow] * (w != "ring")) for w in ATTENTION])
def test_cudnn_takes_the_true_output(monkeypatch, where):
    """Where lse has no cotangent; where it has one, another is made that holds it."""
    x, made = QUERY.astype(jnp.bfloat16), []
    true = cudnn_gpu._out_of
    monkeypatch.setattr(cudnn_gpu, "_out_of", lambda *a: made.append(1) or true(*a))

    def gradient(weight):
        def loss(x):
            # A ring knows by return_lse alone.
            alone = weight is None and where == "ring"
            found = ATTENTION[where](x, x, x, causal=True, return_lse=not alone, platform="cudnn")
            out, lse = (found, None) if alone else found
            total = jnp.sum(jnp.sin(out.astype(jnp.float32)))
            return total if weight is None else total + weight * jnp.sum(lse)

        # As the layers of a model are: rematerialised, in a loop, compiled.
        layers = jax.checkpoint(lambda x: jax.lax.scan(lambda c, _: (c, loss(x)), 0, None, length=1)[1][0])
        return jax.jit(jax.grad(layers))(x).astype(jnp.float32)

    with interpret():
        alone = gradient(None)
        assert not made
        both = gradient(0)
        assert made
        other = gradient(1)
    assert error(alone, both) < 1e-2 < error(other, both)
    want = jax.grad(lambda x: jnp.sum(jnp.sin(kernels.flash_attention(x, x, x, causal=True, platform="xla"))))(QUERY)
    assert error(alone, want) < 2e-2


def test_an_output_alone_under_vmap():
    def loss(x):
        return jnp.sum(jnp.sin(jax.vmap(lambda x: kernels.flash_attention(x, x, x, return_lse=True)[0])(x[:, None])))

    want = jax.grad(lambda x: jnp.sum(jnp.sin(kernels.flash_attention(x, x, x))))(QUERY)
    np.testing.assert_allclose(jax.grad(loss)(QUERY), want, atol=1e-5)
