"""The gated MLP and its activation against NumPy float64, in value and all gradients, and the memory contract."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients

import ejdist
from ejdist import make_mesh
from kernels import Unsupported
from kernels.framework.interpret import interpret
from kernels.ops.gated_mlp import ACTIVATIONS, GatedMLPConfig, activation_op, gated_activation, gated_mlp, op
from kernels.ops.gated_mlp.matmuls import block_tokens
from kernels.toolchains.simulate import ahead_of_time as checks

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


@pytest.mark.parametrize("backend", ["triton_gpu", "pallas_tpu", "xla"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_against_float64(activation, backend):
    z, u, d = np.random.default_rng(1).standard_normal((3, 5, 40)) * np.array([4.0, 1.0, 1.0])[:, None, None]
    act, slope = ORACLE[activation]
    narrow = {"gate": jnp.asarray(z, jnp.float32), "up": jnp.asarray(u, jnp.float32)}
    with on_this_machine(activation_op.backends[backend]):
        (out,), gradients, _ = value_and_gradients(
            lambda gate, up: gated_activation(gate, up, activation=activation, platform=backend),
            narrow,
            (jnp.asarray(d, jnp.float32),),
        )
    for actual, wanted in ((out, act(z) * u), (gradients["gate"], d * u * slope(z)), (gradients["up"], d * act(z))):
        np.testing.assert_allclose(
            actual, wanted, rtol=2e-5, atol=2e-5
        )  # one less tanh is good to 1e-7 of the 12 that z reaches


@pytest.mark.parametrize("backend", ["triton_gpu", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_nan_stays_nan(backend):
    """So that a guard of a run sees it."""
    x = jnp.zeros((2, 128)).at[0, 3].set(jnp.nan)
    with interpret():
        for activation in ACTIVATIONS:
            found = gated_activation(x, jnp.ones_like(x), activation=activation, platform=backend)
            np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(x))


@pytest.mark.parametrize("backend", ["triton_gpu", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_numbers_of_the_tuning_candidates(backend):
    a = activation_op.case_inputs(activation_op.cases[1])
    truth, true_gradients, d = value_and_gradients(activation_op.function, a)
    found = list(activation_op.backends[backend].candidates(activation_op.bind(**a)))
    assert len(found) == len(set(found)) >= 1
    for cfg in {(c.block_size, c.block_rows): c for c in found}.values():
        with interpret():
            got, gradients, _ = value_and_gradients(
                lambda **a: activation_op(**a, platform=backend, cfg=cfg),  # noqa: B023
                a,
                d,
            )
        for actual, wanted in [*zip(got, truth), *((gradients[n], true_gradients[n]) for n in true_gradients)]:
            assert error(actual, wanted) < 3e-6, cfg


def test_one_kernel_each_way_of_16_bytes_at_a_time():
    case = next(case for case in op.cases if case.name == "llama_8b")
    kernels = checks.export_cuda(*checks.call_of(op, case)).kernels
    assert [k.name for k in kernels] == ["gated_activation_fwd_kernel", "gated_activation_bwd_kernel"]
    for kernel, arrays in zip(kernels, (2, 3), strict=True):
        assert kernel.ptx.count("ld.global.v4.b32") == 2 * arrays and "ld.global.b" not in kernel.ptx


def test_the_activation_on_a_mesh():
    gate, up = (jnp.asarray(np.random.default_rng(s).standard_normal((4, 6, 8)).astype(np.float32)) for s in (0, 1))

    def gradients(function, **where):
        return jax.jit(jax.grad(lambda g, u: jnp.sum(jnp.sin(function(g, u, **where))), (0, 1)))(gate, up)

    got = gradients(ejdist.gated_activation, mesh=make_mesh(dp=2, tp=2))
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, atol=1e-6), got, gradients(gated_activation))


def test_dispatch_and_refusals():
    a, w = jnp.ones((2, 8)), jnp.ones((8, 8))

    def chosen(operation, *arrays):
        return [operation.choose(operation.bind(*arrays), None)[p].name for p in ("cpu", "cuda", "tpu")]

    assert chosen(op, a, w, w, w) == ["xla", "triton_gpu", "xla"]
    assert chosen(activation_op, a, a) == ["xla", "triton_gpu", "pallas_tpu"]
    with pytest.raises(Unsupported, match="gated_mlp has no pallas backend"):
        gated_mlp(a, w, w, w, platform="pallas")
    for platform in ("triton", "pallas"):
        with interpret(), pytest.raises(Unsupported, match="an array has no elements"):
            gated_activation(a[:0], a[:0], platform=platform)
        with interpret(), pytest.raises(ValueError, match="use one of silu, gelu"):
            gated_activation(a, a, activation="swish", platform=platform)


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


# -- a block of tokens at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4, 5, 15, 99])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_have_the_numbers_of_all_tokens_at_once(tokens, dtype):
    """15 tokens in blocks of 4, with padding, of 5, and of all; and in bfloat16 gradients are not rounded at each block."""
    arrays, d = inputs((3, 5), 16, 24)
    arrays = [jnp.asarray(a, dtype) for a in arrays]

    def run(cfg):
        out, pull = jax.vjp(lambda *a: gated_mlp(*a, platform="xla", cfg=cfg), *arrays)
        return out, *pull(jnp.asarray(d, dtype))

    limit = {"float32": 2e-6, "bfloat16": 2**-8}[dtype]
    for found, wanted in zip(run(GatedMLPConfig(block_tokens=tokens)), run(GatedMLPConfig()), strict=True):
        assert found.dtype == wanted.dtype and error(found, wanted) <= limit


def test_a_block_is_of_a_size_that_keeps_matmuls_large_and_intermediates_small():
    assert block_tokens(32768, 14336) is None and block_tokens(2**15 + 1, 2**14) is not None
    for tokens, width in ((65536, 14336), (458752, 12288), (131073, 8192), (2**20, 14336)):
        rows = block_tokens(tokens, width)
        assert 2**27 < rows * width <= 2**28 + 128 * width
    assert 458752 % block_tokens(458752, 12288) == 0


def test_a_program_of_many_tokens_holds_a_block_of_what_is_wide():
    """Compiled for this machine, where XLA multiplies in float32: a backward of 2^17 tokens has less beside arguments and
    results than one array of width F of all of them."""
    T, D, F = 2**17, 64, 2**13
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (D, F), (D, F), (F, D), (T, D))]

    def backward(*a):
        return jax.vjp(functools.partial(gated_mlp, platform="xla"), *a[:4])[1](a[4])

    compiled = jax.jit(backward).lower(*like).compile().memory_analysis()
    assert compiled.temp_size_in_bytes < 4 * T * F


def test_blocks_inside_a_map_that_checks_what_varies():
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    arrays, d = inputs((8, 3), 16, 24)
    arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
    spec = jax.sharding.PartitionSpec

    def total(x, gate, up, down):
        cfg = GatedMLPConfig(block_tokens=2)
        return jax.lax.psum((gated_mlp(x, gate, up, down, cfg=cfg) * 0.5).sum(), "dp")

    over = jax.shard_map(
        jax.grad(total, argnums=(0, 1, 3)),
        mesh=mesh,
        in_specs=(spec("dp"), *[spec()] * 3),
        out_specs=(spec("dp"), spec(), spec()),
    )
    wanted = jax.grad(lambda *a: (gated_mlp(*a) * 0.5).sum(), argnums=(0, 1, 3))(*arrays)
    for a, b in zip(over(*arrays), wanted, strict=True):
        assert error(a, b) <= 2e-6
