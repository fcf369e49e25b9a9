"""rms_norm with the residual stream before it, and with the projection after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients

import ejdist
from ejdist import make_mesh
from kernels import Unsupported, rms_norm, rms_norm_linear
from kernels.framework.interpret import interpret
from kernels.ops.rms_norm.contract import add_op, linear_op

RNG = np.random.default_rng(0)
X, RESIDUAL = (jnp.asarray(RNG.standard_normal((4, 5, 24)), "float32") for _ in range(2))
WEIGHT, PROJECTION = (
    jnp.asarray(RNG.standard_normal(24), "float32"),
    jnp.asarray(RNG.standard_normal((24, 8)), "float32"),
)


def numpy_of(operation, x, weight=None, residual=None, projection=None, eps=1e-6, zero_centered=False):
    """Returns the outputs of an operation's contract in float64, a row at a time."""
    stream = np.asarray(x, np.float64) + (0 if residual is None else np.asarray(residual, np.float64))
    out, rstd = np.empty(stream.shape), np.empty(stream.shape[:-1])
    for row in np.ndindex(rstd.shape):
        rstd[row] = 1 / np.sqrt(sum(float(v) ** 2 for v in stream[row]) / stream.shape[-1] + eps)
        out[row] = stream[row] * rstd[row]
    out = out if weight is None else out * (np.asarray(weight, np.float64) + zero_centered)
    return (out, stream, rstd) if operation is add_op else (out @ np.asarray(projection, np.float64),)


CASES = [(o, c) for o in (add_op, linear_op) for c in o.cases if "bench" not in c.tags]


@pytest.mark.parametrize(("operation", "case"), CASES, ids=lambda x: x.name)
def test_contract_against_numpy(operation, case):
    a = operation.case_inputs(case)
    got = operation.reference(**a)
    for actual, wanted in zip(got if isinstance(got, tuple) else (got,), numpy_of(operation, **a), strict=True):
        assert error(actual, wanted) < 2e-6


@pytest.mark.parametrize("operation", [add_op, linear_op], ids=lambda o: o.name)
def test_gradients_against_finite_differences(operation):
    a = operation.case_inputs(operation.cases[0])
    _, gradients, cotangents = value_and_gradients(operation.function, a)
    for name, gradient in gradients.items():
        way, h = np.random.default_rng(3).standard_normal(gradient.shape), 1e-5
        sides = []
        for step in (h, -h):
            outputs = numpy_of(operation, **{**a, name: np.asarray(a[name], np.float64) + step * way})
            sides.append(sum(np.sum(y * np.asarray(d, np.float64)) for y, d in zip(outputs, cotangents, strict=True)))
        slope = np.sum(np.asarray(gradient, np.float64) * way)
        np.testing.assert_allclose(slope, (sides[0] - sides[1]) / (2 * h), rtol=1e-4, atol=1e-4, err_msg=name)


def test_the_stream_is_rounded_before_it_is_normalised():
    x, residual = X.astype("bfloat16"), RESIDUAL.astype("bfloat16")
    out, stream = rms_norm(x, WEIGHT, residual=residual)
    np.testing.assert_array_equal(stream, x + residual)
    np.testing.assert_array_equal(out, rms_norm(stream, WEIGHT, platform="xla"))
    out, stream = rms_norm(x, WEIGHT, residual=residual.astype("float32"))
    assert (out.dtype, stream.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("backend", ["triton_gpu", "pallas_tpu", "xla"])
def test_a_stream_of_another_dtype(backend):
    x, residual = X.astype("bfloat16"), RESIDUAL
    with on_this_machine(add_op.backends[backend]):
        (out, stream, _), gradients, d = value_and_gradients(
            lambda x, residual, weight: add_op(x, residual, weight, platform=backend),
            {"x": x, "residual": residual, "weight": WEIGHT},
        )
    wanted, true_gradients, _ = value_and_gradients(
        add_op.function, {"x": x.astype("float32"), "residual": residual, "weight": WEIGHT}, d
    )
    assert {n: str(g.dtype) for n, g in gradients.items()} == {
        "x": "bfloat16",
        "residual": "float32",
        "weight": "float32",
    }
    assert (str(out.dtype), str(stream.dtype)) == ("bfloat16", "float32")
    np.testing.assert_array_equal(stream, wanted[1])
    assert error(gradients["residual"], true_gradients["residual"]) < 3e-6
    assert error(gradients["weight"], true_gradients["weight"]) < 3e-6
    np.testing.assert_array_equal(gradients["x"], gradients["residual"].astype("bfloat16"))


@pytest.mark.parametrize("forward", ["triton_gpu", "pallas_tpu", "xla"])
def test_any_backward_follows_any_forward(forward):
    a = {"x": X, "residual": RESIDUAL, "weight": WEIGHT}
    _, wanted, (d_out, d_stream, d_rstd) = value_and_gradients(add_op.function, a)
    with interpret():
        _, stream, rstd = add_op(**a, platform=forward)
        saved = {"d_out": d_out, "d_stream": d_stream, "d_rstd": d_rstd, "stream": stream, "rstd": rstd}
        for backward in ("triton_gpu", "pallas_tpu", "xla"):
            got = add_op.backward(saved, **a, platform=backward)
            assert {n for n in wanted if not error(got[n], wanted[n]) < 5e-6} == set(), backward


def test_on_a_mesh():
    mesh = make_mesh(dp=2, tp=2)

    def gradients(function, **where):
        def loss(x, weight, residual):
            out, stream = function(x, weight, residual=residual, **where)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(stream))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(X, WEIGHT, RESIDUAL)

    for got, want in zip(gradients(ejdist.rms_norm, mesh=mesh), gradients(rms_norm), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    linear = ejdist.rms_norm_linear(X, WEIGHT, PROJECTION, mesh=mesh)
    np.testing.assert_allclose(linear, rms_norm_linear(X, WEIGHT, PROJECTION), atol=1e-5)
    assert {s.data.shape for s in linear.addressable_shards} == {(2, 5, 4)}


def test_what_is_refused():
    with pytest.raises(ValueError, match="'residual' of shape"):
        rms_norm(X, residual=RESIDUAL[:2])
    with pytest.raises(ValueError, match="'zero_centered' applies to 'weight'"):
        rms_norm(X, residual=RESIDUAL, zero_centered=True)
    with interpret(), pytest.raises(Unsupported, match="D = 32769 exceeds 32768"):
        rms_norm(jnp.ones((1, 32769)), residual=jnp.ones((1, 32769)), platform="triton")
    with pytest.raises(Unsupported, match="rms_norm_linear has no triton backend"):
        rms_norm_linear(X, WEIGHT, PROJECTION, platform="triton")
    with pytest.raises(ValueError, match="'projection' of shape"):
        rms_norm_linear(X, WEIGHT, PROJECTION[1:])
