"""Products of experts in 8 bits: numbers against NumPy, tokens by index, meshes, kernels, what stays, and what is refused."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_names import names_of_kernels
from test_precision import CONFIG, calls, loss_and_gradients, off, rounded

from ejdist import make_mesh, moe
from ejdist.experts.products import expert_mlp
from ejdist.models.config import ExpertsShape
from ejdist.models.stack import narrow_matrices
from ejdist.models.told import told_of_precision
from ejdist.precision import BF16

RNG = np.random.default_rng(0)
TOKENS, D, F, E, K = 96, 256, 128, 4, 2
FINE = ml_dtypes.float8_e4m3fn


def normal(*shape, by=1.0):
    return (RNG.standard_normal(shape) * by).astype(np.float32)


X, GATE_UP, DOWN = normal(TOKENS, D), normal(E, D, 2, F, by=1 / 16), normal(E, F, D, by=1 / 8)
# Rows of each token's experts, sorted by expert; the second expert has none, and the last rows are of no token.
CHOSEN = RNG.choice([0, 2, 3], (TOKENS, K))
CHOSEN[:, 1] = np.where(CHOSEN[:, 0] == CHOSEN[:, 1], -1, CHOSEN[:, 1])


def places():
    """Returns (rows of each expert, the token of each row, the rows of each token), as `kernels.grouped_matmul` takes them."""
    flat = np.where(CHOSEN < 0, E, CHOSEN).ravel()
    order = np.argsort(flat, kind="stable")
    rows = np.where(flat[order] < E, order // K, -1)
    slots = np.argsort(order).reshape(TOKENS, K)
    return np.bincount(flat, minlength=E + 1)[:E], rows, np.where(CHOSEN < 0, -1, slots)


SIZES, ROWS, SLOTS = (x.astype(np.int32) for x in places())
D_OUT = normal(TOKENS * K, D) * (ROWS >= 0)[:, None]
ROUTER, BATCH, D_BATCH = normal(D, E), normal(4, 24, D), normal(4, 24, D)


def silu(x):
    return x / (1 + np.exp(-x))


def in_float64():
    """Returns (rows, gradients of x, of the gate with the up projection, and of down): 8-bit operands, float64 sums."""
    out, d_x, d_gate_up, d_down = (
        np.zeros((TOKENS * K, D)),
        np.zeros(X.shape),
        np.zeros(GATE_UP.shape),
        np.zeros(DOWN.shape),
    )
    ends = np.cumsum(SIZES)
    for e in np.flatnonzero(SIZES):
        here = slice(ends[e] - SIZES[e], ends[e])
        first, down = GATE_UP[e].reshape(D, 2 * F), DOWN[e]
        first_8, down_8 = rounded(first, 128, 128, FINE), rounded(down, 128, 128, FINE)
        x, d = X[ROWS[here]], D_OUT[here]
        z = rounded(x, 1, 128, FINE) @ first_8
        g, u = z[:, :F], z[:, F:]
        p = silu(g) * u
        out[here] = rounded(p, 1, 128, FINE) @ down_8
        d_p = rounded(d, 1, 128, FINE) @ down_8.T
        sigmoid = 1 / (1 + np.exp(-g))
        d_z = np.concatenate([d_p * u * sigmoid * (1 + g * (1 - sigmoid)), d_p * silu(g)], 1)
        np.add.at(d_x, ROWS[here], rounded(d_z, 1, 128, FINE) @ first_8.T)
        d_gate_up[e], d_down[e] = (x.T.astype(np.float64) @ d_z).reshape(D, 2, F), p.T @ d
    return out, d_x, d_gate_up, d_down


def of_experts(x, gate_up, down, d, separate=False, gathered=True):
    by_index = {"rows": jnp.asarray(ROWS), "slots": jnp.asarray(SLOTS)} if gathered else {}

    def run(x, gate_up, down):
        params = {"gate": gate_up, "down": down}
        if separate:
            params |= {"gate": gate_up[:, :, 0], "up": gate_up[:, :, 1]}
        return expert_mlp(params, x, jnp.asarray(SIZES), activation="silu", platform=None, **by_index)

    out, pull = jax.vjp(run, x, gate_up, down)
    return out, *pull(d)


@pytest.mark.parametrize("separate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_forward_and_gradients_of_rows_are_of_8_bit_operands_and_gradients_of_matrices_are_not(separate):
    got = jax.jit(functools.partial(of_experts, separate=separate))(X, GATE_UP, DOWN, D_OUT)
    for g, want in zip(got, in_float64(), strict=True):
        # Float32 and float64 round a few numbers to neighbours of 8 bits, 6% apart; rounding all of them is 4e-2 here.
        assert off(g, want) < 2e-3


@pytest.mark.slow
def test_rows_in_their_order_have_the_numbers_of_tokens_by_index():
    sorted_x = np.where((ROWS >= 0)[:, None], X[ROWS], 0)
    by_index = jax.jit(of_experts)(X, GATE_UP, DOWN, D_OUT)
    in_order = jax.jit(functools.partial(of_experts, gathered=False))(sorted_x, GATE_UP, DOWN, D_OUT)
    for which in (0, 2, 3):
        assert off(by_index[which], in_order[which]) < 1e-6
    summed = np.zeros(X.shape)
    np.add.at(summed, ROWS[ROWS >= 0], np.asarray(in_order[1])[ROWS >= 0])
    assert off(by_index[1], summed) < 1e-6


def layer(precision, mesh=None, **options):
    def run(x, gate_up, down, d):
        def out(x, gate_up, down):
            on = {"top_k": K, "precision": precision, "mesh": mesh, **options}
            return moe(x, ROUTER, gate_up, down=down, **on)[0]

        y, pull = jax.vjp(out, x, gate_up, down)
        return y, *pull(d)

    return jax.jit(run)


@pytest.mark.parametrize(
    "axes", [{"ep": 2}, pytest.param({"fsdp": 2, "ep": 2}, marks=pytest.mark.slow)], ids=lambda a: "_".join(a)
)
@pytest.mark.slow
def test_on_a_mesh_experts_have_the_numbers_of_one_device(axes):
    mesh = make_mesh(**axes, devices=jax.devices()[: 2 ** len(axes)])
    alone = layer("fp8_block")(BATCH, GATE_UP, DOWN, D_BATCH)
    got = layer("fp8_block", mesh)(BATCH, GATE_UP, DOWN, D_BATCH)
    for g, want in zip(got, alone, strict=True):
        assert off(g, want) < 1e-5
    exact = layer(BF16)(BATCH, GATE_UP, DOWN, D_BATCH)
    for g, want in zip(got, exact, strict=True):
        assert 0.01 < off(g, want) < 0.1


def test_on_hopper_a_token_is_quantised_once_and_matrices_once_for_both_directions():
    def run(x, gate_up, down, d):
        return of_experts(x, gate_up, down, d)

    shapes = (TOKENS, 2 * D), (E, 2 * D, 2, F), (E, F, 2 * D), (TOKENS * K, 2 * D)
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    got = collections.Counter(names_of_kernels(run, *arrays))
    # Of gate and up, and of down: the product and the gradient of its rows.
    assert got["warp_specialized_scaled_kernel"] == 4 and got["quantize_both_ways_kernel"] == 2, got


# -- models ------------------------------------------------------------------------------------------------------------

MIXTURE = dataclasses.replace(CONFIG, layer_pattern=("experts",), experts=ExpertsShape(num=4, top_k=2, ffn_dim=128))
BOTH = ("experts_gate_up", "experts_down")


@pytest.mark.slow
def test_a_mixture_in_8_bits_has_about_the_same_loss_and_gradients_and_the_same_parameters():
    narrow = dataclasses.replace(MIXTURE, precision="fp8_block", precision_keep=("query", "output"))
    assert narrow_matrices(narrow)[0] == BOTH
    assert narrow.build().declared == MIXTURE.build().declared
    (want, exact), (got, found) = map(loss_and_gradients, (MIXTURE, narrow))
    assert want != got and abs(got / want - 1) < 2e-3
    for name, gradient in exact["layers"].items():
        assert off(found["layers"][name], gradient) < 0.15, name


@pytest.mark.parametrize(
    ("keys", "experts", "words"),
    [
        ({}, {}, "products of query, output, experts_gate_up, experts_down are in 8 bits; key, value stay in float32"),
        (
            {"precision": "fp8_row"},
            {},
            "experts_gate_up, experts_down stay in float32; experts_gate_up, experts_down: grouped products in 8 bits are "
            "fp8_block's",
        ),
        ({}, {"ffn_dim": 192}, "experts_gate_up, experts_down: 128 must divide their inputs and outputs, 128 and 192"),
        (
            {},
            {"bias": True},
            "experts_gate_up, experts_down: grouped products in 8 bits have no bias, and of activations",
        ),
        ({}, {"shared_dim": 128}, "shared_gate, shared_up, shared_down: shared experts have no products in 8 bits"),
        (
            {"precision_keep": ("experts_*",)},
            {},
            "query, output are in 8 bits; key, value, experts_gate_up, experts_down stay",
        ),
    ],
)
def test_a_run_says_whether_its_experts_are_in_8_bits_and_why_not(keys, experts, words):
    config = dataclasses.replace(MIXTURE.experts, **experts)
    (line,) = told_of_precision(dataclasses.replace(MIXTURE, **{"precision": "fp8_block", "experts": config, **keys}))
    assert words in line


def test_experts_that_stay_are_computed_as_they_are():
    """Of fp8_row the experts stay: with the other matrices kept, the loss is that of no 8 bits at all."""
    keep = ("query", "output")
    config = dataclasses.replace(MIXTURE, precision="fp8_block", precision_keep=(*keep[:1], "experts_*"))
    step = dataclasses.replace(config, precision="fp8_row", precision_keep=keep[:1])
    assert narrow_matrices(config) == narrow_matrices(step)
    jaxpr = jax.make_jaxpr(lambda: loss_and_gradients(config))().jaxpr
    assert calls(jaxpr, "scaled_grouped_matmul") == 0 and calls(jaxpr, "scaled_matmul") > 0


def test_one_of_the_two_matrices_is_not_kept_alone():
    keys = {"precision": "fp8_block", "precision_keep": ("experts_down",)}
    with pytest.raises(ValueError, match="precision_keep keeps experts_down, and of experts_gate_up, experts_down all"):
        dataclasses.replace(MIXTURE, **keys).build()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "argument 'precision' = 'fp8' is unknown; use bf16 or fp8_block"),
        ({"precision": "fp8_row"}, "argument 'precision' = 'fp8_row': grouped products in 8 bits are fp8_block's"),
        ({"precision": "fp8_block", "activation": "clamped_swiglu"}, "have no bias, and of activations silu"),
    ],
)
def test_experts_that_have_no_form_in_8_bits_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        moe(BATCH, ROUTER, GATE_UP, down=DOWN, top_k=K, **options)


def test_features_of_a_device_that_no_block_divides_are_refused():
    mesh = make_mesh(tp=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"must divide D = 256 and, of the part of a device, F = 64"):
        layer("fp8_block", mesh)(BATCH, GATE_UP, DOWN, D_BATCH)
