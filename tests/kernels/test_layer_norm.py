"""layer_norm, its fused residual and its fused projection: against NumPy float64 loops, on meshes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import ejdist
from ejdist import make_mesh
from kernels import Unsupported, layer_norm, layer_norm_linear
from kernels.framework.interpret import interpret
from kernels.ops.layer_norm import NormConfig
from kernels.ops.layer_norm.contract import add_op, linear_op, op

RNG = np.random.default_rng(0)


def numpy_layer_norm(x, weight=None, bias=None, eps=1e-5):
    """Returns (out, mean, rstd) in float64, one number at a time."""
    D = x.shape[-1]
    out, mean, rstd = np.empty(x.shape), np.empty(x.shape[:-1]), np.empty(x.shape[:-1])
    for row in np.ndindex(x.shape[:-1]):
        mean[row] = sum(float(v) for v in x[row]) / D
        rstd[row] = 1 / np.sqrt(sum((float(v) - mean[row]) ** 2 for v in x[row]) / D + eps)
        for d in range(D):
            normal = (x[row][d] - mean[row]) * rstd[row]
            out[row][d] = normal * (1 if weight is None else weight[d]) + (0 if bias is None else bias[d])
    return out, mean, rstd


def numpy_of(operation, a):
    """Returns the outputs of an operation's contract, from `numpy_layer_norm` alone."""
    a = {n: np.asarray(v, np.float64) if hasattr(v, "shape") else v for n, v in a.items()}
    if operation is add_op:
        stream = a.pop("x") + a.pop("residual")
        out, mean, rstd = numpy_layer_norm(stream, **a)
        return out, stream, mean, rstd
    if operation is linear_op:
        projection = a.pop("projection")
        return (numpy_layer_norm(**a)[0] @ projection,)
    return numpy_layer_norm(**a)


CASES = [(o, c) for o in (op, add_op, linear_op) for c in o.cases if "bench" not in c.tags]


@pytest.mark.parametrize(("operation", "case"), CASES, ids=lambda x: x.name)
def test_contract_against_numpy(operation, case):
    a = operation.case_inputs(case)
    got = operation.reference(**a)
    for actual, wanted in zip(got if isinstance(got, tuple) else (got,), numpy_of(operation, a), strict=True):
        assert error(actual, wanted) < 2e-6


@pytest.mark.parametrize("operation", [op, add_op, linear_op], ids=lambda o: o.name)
def test_gradients_against_finite_differences(operation):
    a = operation.case_inputs(operation.cases[0])
    _, gradients, cotangents = value_and_gradients(operation.function, a)
    for name, gradient in gradients.items():
        way, h = np.random.default_rng(3).standard_normal(gradient.shape), 1e-5
        sides = []
        for step in (h, -h):
            moved = {**a, name: np.asarray(a[name], np.float64) + step * way}
            outputs = numpy_of(operation, moved)
            sides.append(sum(np.sum(y * np.asarray(d, np.float64)) for y, d in zip(outputs, cotangents, strict=True)))
        slope = np.sum(np.asarray(gradient, np.float64) * way)
        np.testing.assert_allclose(slope, (sides[0] - sides[1]) / (2 * h), rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_large_mean_does_not_cancel():
    x = (1000 + 0.1 * RNG.standard_normal((4, 64))).astype(np.float32)
    np.testing.assert_allclose(layer_norm(x), numpy_layer_norm(x.astype(np.float64))[0], atol=2e-3)
    naive = np.mean(x * x, -1, dtype=np.float32) - np.mean(x, -1, dtype=np.float32) ** 2
    assert (
        np.abs(naive - x.astype(np.float64).var(-1)).max() > 0.01
    )  # what is to be held away: twice the variance itself


def test_the_stream_is_rounded_before_it_is_normalised():
    x, residual = (jnp.asarray(RNG.standard_normal((3, 40)) * 3, "bfloat16") for _ in range(2))
    weight = jnp.asarray(RNG.standard_normal(40), "float32")
    out, stream = jax.jit(lambda x, r: layer_norm(x, weight, residual=r))(x, residual)
    np.testing.assert_array_equal(stream, x + residual)
    np.testing.assert_array_equal(out, layer_norm(stream, weight))
    # A stream of its own dtype stays it, and out has that of x.
    out, stream = layer_norm(x, weight, residual=residual.astype("float32"))
    assert (out.dtype, stream.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(stream, x.astype("float32") + residual.astype("float32"))


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_calls(data):
    random_call(data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_many_random_calls(data):
    random_call(data)


def random_call(data):
    lead = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    D, rng = data.draw(st.integers(1, 40)), np.random.default_rng(data.draw(st.integers(0, 1000)))
    given = {n: rng.standard_normal(D) for n in ("weight", "bias") if data.draw(st.booleans())}
    # Of one feature x is its mean, and out the bias; eps keeps rstd where float32 has digits.
    x, eps = rng.standard_normal((*lead, D)), data.draw(st.sampled_from([1e-5, 1e-2]))
    residual = rng.standard_normal(x.shape) if data.draw(st.booleans()) else None
    narrow = {n: v.astype(np.float32) for n, v in given.items()}
    fused = {} if residual is None else {"residual": residual.astype(np.float32)}
    got = layer_norm(x.astype(np.float32), **narrow, **fused, eps=eps)
    wanted = numpy_layer_norm(x if residual is None else x + residual, **given, eps=eps)[0]
    np.testing.assert_allclose(got if residual is None else got[0], wanted, rtol=1e-4, atol=1e-4)


def test_the_columns_of_the_projection_may_be_split():
    x, projection = (jnp.asarray(RNG.standard_normal(s), "float32") for s in ((4, 6, 16), (16, 8)))
    weight, bias = (jnp.asarray(RNG.standard_normal(16), "float32") for _ in range(2))
    mesh = make_mesh(dp=2, tp=4)

    def loss(function, x, *arrays):
        return jnp.sum(jnp.sin(function(x, *arrays)))

    def on_mesh(*arrays):
        return ejdist.layer_norm_linear(*arrays, mesh=mesh)

    arguments = (x, weight, bias, projection)
    got = jax.jit(jax.value_and_grad(lambda *a: loss(on_mesh, *a), (0, 1, 2, 3)))(*arguments)
    want = jax.jit(jax.value_and_grad(lambda *a: loss(layer_norm_linear, *a), (0, 1, 2, 3)))(*arguments)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)
    out = on_mesh(*arguments)
    assert {s.data.shape for s in out.addressable_shards} == {(2, 6, 2)}


def test_a_residual_on_a_mesh_and_as_a_module():
    x, residual = (jnp.asarray(RNG.standard_normal((4, 16)), "float32") for _ in range(2))
    want = layer_norm(x, residual=residual)
    got = ejdist.LayerNorm()(x, residual=residual, mesh=make_mesh(dp=4))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, want)


X = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: layer_norm(X, X[0, :7]), "'weight' of shape"),
        (lambda: layer_norm(X, bias=X[0, :7]), "'bias' of shape"),
        (lambda: layer_norm(X, residual=X[:1]), "'residual' of shape"),
        (lambda: layer_norm(X.astype(np.int32)), "'x' must have a float dtype"),
        (lambda: layer_norm(X, eps=jnp.float32(1)), "'eps' is compiled into the program"),
        (lambda: layer_norm(X, platform="cuDNN"), "'platform' = 'cuDNN' is unknown"),
        (lambda: layer_norm_linear(X, None, None, X), "'projection' of shape"),
        (lambda: layer_norm_linear(X, None, None, jnp.ones((8, 2), "bfloat16")), "'projection' is bfloat16"),
        (lambda: layer_norm_linear(X, X[0], None), "'projection' is missing"),
    ],
)
def test_a_wrong_call_is_a_value_error(call, said):
    with pytest.raises(ValueError, match=said):
        call()


BACKENDS = ("triton_gpu", "pallas_tpu", "xla")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_mean_does_not_cancel_in_a_kernel(backend):
    x = (1000 + 0.1 * RNG.standard_normal((4, 50))).astype(np.float32)
    with on_this_machine(op.backends[backend]):
        np.testing.assert_allclose(layer_norm(x, platform=backend), numpy_layer_norm(x.astype("float64"))[0], atol=2e-3)


@pytest.mark.parametrize(
    "given", [*(pytest.param((n,), marks=pytest.mark.slow) for n in ("weight", "bias")), ()], ids=str
)
@pytest.mark.parametrize("backend", ["triton_gpu", "pallas_tpu"])
def test_gradients_of_what_is_given(backend, given):
    a = {"x": jnp.asarray(RNG.standard_normal((7, 33)), "float32")}
    a |= {n: jnp.asarray(RNG.standard_normal(33), "float32") for n in given}
    _, wanted, d = value_and_gradients(op.function, a)
    with interpret():
        _, got, _ = value_and_gradients(lambda **a: op(**a, platform=backend), a, d)
    assert set(got) == set(wanted) == {"x", *given}
    assert {n for n in wanted if not error(got[n], wanted[n]) < 5e-6} == set()


@pytest.mark.parametrize("backend", [pytest.param(b, marks=[pytest.mark.slow] * (b == "pallas_tpu")) for b in BACKENDS])
def test_a_stream_of_another_dtype(backend):
    a = {n: jnp.asarray(RNG.standard_normal((6, 40)), "float32") for n in ("x", "residual")}
    a |= {n: jnp.asarray(RNG.standard_normal(40), "float32") for n in ("weight", "bias")}
    a["x"] = a["x"].astype("bfloat16")
    with on_this_machine(add_op.backends[backend]):
        (out, stream, *_), got, d = value_and_gradients(lambda **a: add_op(**a, platform=backend), a)
    wide = {**a, "x": a["x"].astype("float32")}
    truth, wanted, _ = value_and_gradients(add_op.function, wide, d)
    assert (str(out.dtype), str(stream.dtype), str(got["x"].dtype)) == ("bfloat16", "float32", "bfloat16")
    np.testing.assert_array_equal(stream, truth[1])
    assert {n for n in ("residual", "weight", "bias") if not error(got[n], wanted[n]) < 5e-6} == set()
    np.testing.assert_array_equal(got["x"], got["residual"].astype("bfloat16"))


@pytest.mark.parametrize("backend", ["triton_gpu", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_numbers_of_the_tuning_candidates(backend):
    case = next(case for case in op.cases if case.name == "odd")
    a = op.case_inputs(case)
    found = list(op.backends[backend].candidates(op.bind(**a)))
    assert len(found) == len(set(found)) >= 1
    tiles = list({(c.block_rows, c.backward_block_rows): c for c in found}.values())
    truth, true_gradients, d = value_and_gradients(op.function, a)
    for cfg in [*tiles[:: max(1, len(tiles) // 3)], NormConfig(16, 4, 16, 4, 2)]:
        with interpret():
            got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform=backend, cfg=cfg), a, d)  # noqa: B023
        for actual, wanted in [*zip(got, truth), *((gradients[n], true_gradients[n]) for n in true_gradients)]:
            assert error(actual, wanted) < 5e-6, cfg


def test_dispatch_and_refusals():
    for operation, arrays in ((op, (X,)), (add_op, (X, X))):
        chosen = operation.choose(operation.bind(*arrays), None)
        assert [chosen[p].name for p in ("cpu", "cuda", "rocm", "tpu")] == ["xla", "triton_gpu", "xla", "pallas_tpu"]
    with pytest.raises(Unsupported, match="layer_norm_linear has no triton backend; it has xla"):
        layer_norm_linear(X, None, None, jnp.ones((8, 2)), platform="triton")
    with interpret():
        with pytest.raises(Unsupported, match="D = 32769 exceeds 32768"):
            layer_norm(jnp.ones((1, 32769)), platform="triton")
        with pytest.raises(Unsupported, match="D = 500000 is too wide"):
            layer_norm(jnp.ones((1, 500000)), platform="pallas")
        for platform in ("triton", "pallas"):
            with pytest.raises(Unsupported, match="x has no elements"):
                layer_norm(X[:0], platform=platform)
