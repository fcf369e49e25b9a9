"""rms_norm: the contract against NumPy, and what is its own: residuals, tuning candidates, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients

import kernels
from kernels.framework.contract import Unsupported
from kernels.framework.interpret import interpret
from kernels.ops.rms_norm import NormConfig, cotangents_op, op, rms_norm
from kernels.toolchains.simulate import ahead_of_time as checks

CASES = {case.name: case for case in op.cases}
SMALL = [case for case in op.cases if "bench" not in case.tags]
BACKENDS = ("triton_gpu", "pallas_tpu", "xla")


def numpy_rms_norm(x, weight, eps, zero_centered):
    """The contract in float64, one row at a time."""
    D = x.shape[-1]
    out, rstd = np.empty_like(x), np.empty(x.shape[:-1])
    for row in np.ndindex(x.shape[:-1]):
        mean_square = sum(float(v) ** 2 for v in x[row]) / D
        rstd[row] = 1 / np.sqrt(mean_square + eps)
        for d in range(D):
            factor = 1.0 if weight is None else weight[d] + zero_centered
            out[row][d] = x[row][d] * rstd[row] * factor
    return out, rstd


def arguments_of(case):
    a = op.case_inputs(case)
    weight = None if "weight" not in a else np.asarray(a["weight"], np.float64)
    return a, np.asarray(a["x"], np.float64), weight, a.get("eps", 1e-6), a.get("zero_centered", False)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_contract_against_numpy(case):
    a, x, weight, eps, zero_centered = arguments_of(case)
    for actual, wanted in zip(op.reference(**a), numpy_rms_norm(x, weight, eps, zero_centered), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["odd", "no_weight", "zero_centered", "one_row"])
def test_contract_gradients_against_finite_differences(name):
    a, x, weight, eps, zero_centered = arguments_of(CASES[name])
    _, gradients, (d_out, d_rstd) = value_and_gradients(op.function, a)
    rng = np.random.default_rng(3)

    def scalar(x, weight):
        out, rstd = numpy_rms_norm(x, weight, eps, zero_centered)
        return np.sum(out * np.asarray(d_out, np.float64)) + np.sum(rstd * np.asarray(d_rstd, np.float64))

    for argument, gradient in gradients.items():
        way, h = rng.standard_normal(gradient.shape), 1e-5
        dx, dweight = (way, 0) if argument == "x" else (0, way)
        plus, minus = (scalar(x + s * dx, None if weight is None else weight + s * dweight) for s in (h, -h))
        slope = np.sum(np.asarray(gradient, np.float64) * way)
        np.testing.assert_allclose(slope, (plus - minus) / (2 * h), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dtype_of_the_weight_may_differ(backend):
    a = op.case_inputs(CASES["odd"])
    x, weight = a["x"].astype("bfloat16"), a["weight"]
    with on_this_machine(op.backends[backend]):
        (out, _), gradients, _ = value_and_gradients(
            lambda x, weight: op(x, weight, platform=backend), {"x": x, "weight": weight}
        )
    assert out.dtype == jnp.bfloat16
    assert {k: str(v.dtype) for k, v in gradients.items()} == {"x": "bfloat16", "weight": "float32"}
    assert error(out, op.reference(x, weight)[0]) < 4e-3


@pytest.mark.parametrize("forward", BACKENDS)
@pytest.mark.parametrize("backward", BACKENDS)
def test_any_backward_follows_any_forward(forward, backward):
    a = op.case_inputs(CASES["odd"])
    (_, _), wanted, (d_out, d_rstd) = value_and_gradients(op.function, a)
    with interpret():
        _, rstd = op(**a, platform=forward)
        got = op.backward({"d_out": d_out, "d_rstd": d_rstd, "rstd": rstd}, **a, platform=backward)
    assert set(got) == set(wanted)
    for name in wanted:
        assert error(got[name], wanted[name]) < 5e-6, name


@pytest.mark.parametrize("backend", ["triton_gpu", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["odd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("many_rows", "wide"))])
def test_numbers_of_the_tuning_candidates(backend, name):
    case, backend = CASES[name], op.backends[backend]
    a = op.case_inputs(case)
    candidates = backend.candidates(op.bind(**a))
    assert len(candidates) == len(set(candidates)) >= 1
    # Warps change nothing under the interpreter, so one candidate for each tile is enough.
    tiles = {(c.block_rows, c.backward_block_rows, c.backward_programs): c for c in candidates}
    few = list(tiles.values())[:: max(1, len(tiles) // 3)]
    truth, true_gradients, d = value_and_gradients(op.function, a)
    for cfg in [*few, NormConfig(block_rows=16, backward_block_rows=16, backward_programs=3)]:
        with interpret():
            got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform=backend.name, cfg=cfg), a, d)  # noqa: B023
        for actual, wanted in [*zip(got, truth), *((gradients[n], true_gradients[n]) for n in true_gradients)]:
            assert error(actual, wanted) < 5e-6, cfg


@pytest.mark.parametrize("num_warps", [1, 8], ids=["a thread has all rows", "it has some"])
def test_sums_over_the_rows_of_a_tile(num_warps):
    a = op.case_inputs(CASES["many_rows"])
    truth, wanted, d = value_and_gradients(op.function, a)
    cfg = NormConfig(8, 1, 8, num_warps, 3, 2)
    with interpret():
        _, got, _ = value_and_gradients(lambda **a: op(**a, platform="triton", cfg=cfg), a, d)
    assert max(error(got[n], wanted[n]) for n in wanted) < 5e-6


@pytest.mark.slow  # compiled; the numbers are quick
def test_rows_of_a_model_are_read_ahead_into_shared_memory():
    """In the backward, whose warps fill a multiprocessor; of the forward several blocks share one, so theirs must be small."""
    forward, backward = checks.export_cuda(*checks.call_of(op, CASES["model_4k"])).kernels
    assert forward.shared_memory_bytes <= 48 * 1024 and "cp.async" not in forward.ptx
    assert 2 * 16 * 1024 * 2 <= backward.shared_memory_bytes <= 163 * 1024
    assert backward.ptx.count("cp.async.cg") >= 8
    for kernel in checks.export_cuda(*checks.call_of(op, CASES["odd"])).kernels:
        assert kernel.shared_memory_bytes <= 48 * 1024 and "cp.async" not in kernel.ptx


@pytest.mark.parametrize("name", ["no_weight", pytest.param("zero_centered", marks=pytest.mark.slow), "one_row"])
def test_a_tpu_compiles_what_the_cases_of_the_code_tests_do_not_have(name):
    assert checks.mosaic_calls(checks.compile_tpu(*checks.call_of(op, CASES[name]))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the largest", "all"])
def test_every_tpu_candidate_fits_vmem(which):
    case = CASES["model_8k"]
    candidates = list(op.backends["pallas_tpu"].candidates(op.bind(**checks.call_of(op, case)[1])))
    for cfg in candidates if which == "all" else [max(candidates, key=lambda cfg: cfg.block_rows)]:
        assert checks.mosaic_calls(checks.compile_tpu(*checks.call_of(op, case, cfg=cfg))) == 2


def test_dispatch_follows_the_platform_and_a_name_never_falls_back():
    x = jnp.ones((2, 128))
    assert {p: b.name for p, b in op.choose(op.bind(x), None).items() if not isinstance(b, str)} == {
        "cpu": "xla",
        "cuda": "triton_gpu",
        "rocm": "xla",
        "tpu": "pallas_tpu",
    }
    with pytest.raises(Unsupported, match="triton"):
        rms_norm(x, platform="triton")
    with pytest.raises(Unsupported, match="x has no elements"), interpret():
        rms_norm(jnp.ones((0, 128)), platform="triton")
    with pytest.raises(Unsupported, match="D = 32769 exceeds 32768"), interpret():
        rms_norm(jnp.ones((1, 32769)), platform="triton")
    with pytest.raises(Unsupported, match="D = 500000 is too wide"), interpret():
        rms_norm(jnp.ones((1, 500000)), platform="pallas")
    assert rms_norm(jnp.ones((0, 128))).shape == (0, 128)


def test_a_wrong_call_is_a_value_error():
    with pytest.raises(ValueError, match="'weight' of shape"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(7))
    with pytest.raises(ValueError, match="'zero_centered'"):
        rms_norm(jnp.ones((2, 8)), zero_centered=True)


def test_the_face():
    a = op.case_inputs(CASES["zero_centered"])
    np.testing.assert_array_equal(rms_norm(**a), op(**a)[0])
    assert kernels.rms_norm is rms_norm or kernels.ops.rms_norm.rms_norm is rms_norm


def test_cotangents_are_those_of_the_norm_whose_rstd_was_kept():
    rng = np.random.default_rng(5)
    x, d = (rng.standard_normal((3, 5, 96)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(96).astype(np.float32)
    _, pull = jax.vjp(lambda x, weight: kernels.rms_norm(x, weight, eps=0.1), x, weight)
    rstd = 1 / np.sqrt(np.mean(np.square(x), -1) + 0.1)
    for platform in ("xla", "triton", "pallas"):
        with interpret():
            got = jax.jit(functools.partial(cotangents_op, platform=platform))(x, weight, rstd, d)
        for g, w in zip(got, pull(d), strict=True):
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="rms_norm_cotangents: argument 'weight'"):
        kernels.rms_norm_cotangents(x, weight[:5], rstd, d)
