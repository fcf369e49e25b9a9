"""quantize_scaled and scaled_matmul: scales and values bit by bit against NumPy, products in float64, refusals."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ejdist
import kernels
from kernels import quantize_scaled, scaled_matmul
from kernels.framework.interpret import interpret
from kernels.ops.scaled_matmul import (
    SCALINGS,
    activate_op,
    activate_rows_op,
    both_ways_op,
    cotangents_op,
    norm_both_ways_op,
    op,
    row_cotangents_op,
    rows_op,
)

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((256, 384)) * np.exp2(RNG.integers(-9, 9, (256, 1)))).astype(np.float32)
W = RNG.standard_normal((128, 384)).astype(np.float32)


def numpy_quantised(x, block, dtype, exponents):
    """Returns (values, scales) of x, by loops over its blocks."""
    rows, width = (size if count is None else count for size, count in zip(x.shape, block))
    kind = jnp.dtype(dtype)
    most = np.float32(ml_dtypes.finfo(kind).max)
    values, scales = np.zeros(x.shape, kind), np.zeros((x.shape[0] // rows, x.shape[1] // width), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * rows : (i + 1) * rows, j * width : (j + 1) * width]
        largest = np.abs(x[part]).max()
        scale = largest * np.float32(1 / most) if largest else np.float32(1)
        if exponents and largest:
            scale = np.exp2(np.floor(np.log2(largest)) - np.floor(np.log2(most)))
        scales[i, j] = scale
        values[part] = np.clip(x[part] * (np.float32(1) / scale), -most, most).astype(kind)
    return values, np.log2(scales).astype(np.uint8) + np.uint8(127) if exponents else scales


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("block", "exponents"),
    [((None, None), False), ((1, None), False), ((1, 128), False), ((128, 128), False), ((1, 32), True)],
)
def test_values_and_scales_are_those_of_numpy(block, exponents, dtype):
    x = X.copy()
    x[3], x[7, :128], x[9, ::2] = 0, 0, 0
    values, scales = quantize_scaled(x, block, dtype=dtype, exponents=exponents)
    wanted, wanted_scales = numpy_quantised(x, block, dtype, exponents)
    np.testing.assert_array_equal(scales, wanted_scales)
    assert np.asarray(values).tobytes() == wanted.tobytes()
    assert np.isfinite(np.asarray(values, np.float32)).all()


def test_what_has_no_number_is_in_its_block_alone_and_is_not_hidden():
    x = X.copy()
    x[0, 5], x[1, 200], x[2, 383] = np.inf, np.nan, -np.inf
    for exponents in (False, True):
        values, scales = quantize_scaled(x, (1, 128), exponents=exponents)
        bad = np.isnan(np.asarray(scales)) if not exponents else np.asarray(scales) == 255
        assert np.argwhere(bad).tolist() == [[0, 0], [1, 1], [2, 2]]
        b, b_scale = quantize_scaled(W, (128, 128), exponents=exponents)
        out = np.asarray(scaled_matmul(values, b, scales, b_scale), np.float32)
        assert np.isnan(out[:3]).all() and np.isfinite(out[3:]).all()


WAYS = [
    {},
    {"turned_rows": 128},
    {"rows": 128, "turned_rows": 128},
    {"dtype": "float8_e5m2"},
    {"entries": None},
    {"entries": None, "matrices": 2, "dtype": "float8_e5m2"},
    {"matrices": 2},
    {"rows": 128, "turned_rows": 128, "matrices": 2},
]


def awkward(*shape):
    """Returns bfloat16 numbers of many sizes, with zeros, ties of 8 bits, and some that are none."""
    x = RNG.standard_normal(shape) * np.exp2(RNG.integers(-9, 9, (shape[0], 1)))
    x[3], x[5] = 0, np.arange(shape[1]) % 57 / 8
    x[20, 7], x[150, 130] = np.nan, -np.inf
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_both_ways_are_those_of_each_bit_by_bit_and_nothing_is_not_hidden(way):
    x = awkward(256, 256)
    count, width = way.get("matrices", 1), way.get("entries", 128)
    blocks = (way.get("rows", 1), width), (way.get("turned_rows", 1), width)
    dtype = way.get("dtype", "float8_e4m3fn")
    want = [*quantize_scaled(x, blocks[0], dtype=dtype)]
    each = [quantize_scaled(part.T, blocks[1], dtype=dtype) for part in jnp.split(x, count)]
    want += [jnp.concatenate(parts) for parts in zip(*each, strict=True)]
    for platform in ("xla", "triton"):
        with interpret(90):
            got = jax.jit(functools.partial(both_ways_op, **way, platform=platform))(x)
        for g, w in zip(got, want, strict=True):
            assert np.isnan(np.asarray(g, np.float32)).tolist() == np.isnan(np.asarray(w, np.float32)).tolist()
            np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("entries", [128, None])
def test_an_activation_and_its_cotangents_are_quantised_as_they_are_alone(entries):
    rng = np.random.default_rng(2)
    gate, up, d = (jnp.asarray(rng.standard_normal((128, 256)), jnp.bfloat16) for _ in range(3))
    wide, pull = jax.vjp(kernels.gated_activation, gate, up)
    rows = 128 if entries else 1
    want = (
        kernels.quantize_both_ways(wide, entries=entries),
        tuple(y for x in pull(d) for y in kernels.quantize_both_ways(x, turned_rows=rows, entries=entries)),
    )
    for platform in ("xla", "triton"):
        with interpret(90):
            how = {"entries": entries, "platform": platform}
            run = jax.jit(lambda *a, how=how: (activate_op(*a[:2], **how), cotangents_op(*a, **how)))
            got = run(gate, up, d)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("M", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_rows_alone_are_quantised_as_in_blocks_and_an_activation_and_its_cotangents_too(M):
    x, d = jnp.asarray(awkward(256, 256)[:M]), jnp.asarray(RNG.standard_normal((M, 128)), jnp.bfloat16)
    pair = jnp.asarray(RNG.standard_normal((M, 2, 128)), jnp.bfloat16)
    wide, pull = jax.vjp(lambda pair: kernels.gated_activation(pair[:, 0], pair[:, 1]), pair)
    (d_pair,) = pull(d)
    want = (
        quantize_scaled(x, (1, 128)),
        quantize_scaled(wide, (1, 128)),
        (d_pair, *quantize_scaled(d_pair.reshape(M, -1), (1, 128)), wide),
    )
    for platform in ("xla", "triton"):
        with interpret(90):
            got = jax.jit(
                lambda x, pair, d, on=platform: (
                    rows_op(x, platform=on), activate_rows_op(pair, platform=on), row_cotangents_op(pair, d, platform=on)
                )
            )(x, pair, d)  # fmt: skip
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
            # The order of three factors changes a few results by one rounding; NaN is NaN in both.
            differs = ~((g == w) | (np.isnan(g) & np.isnan(w)))
            assert differs.mean() < 1e-3
            np.testing.assert_allclose(g[differs], w[differs], rtol=1 / 8)


@pytest.mark.parametrize("entries", [128, None])
def test_a_norm_is_quantised_as_after_it_is_written(entries):
    weight, eps = jnp.asarray(RNG.standard_normal(256), jnp.float32), 1e-3
    x = jnp.nan_to_num(awkward(256, 256), nan=1.0, neginf=-2.0)
    wanted = kernels.quantize_both_ways(kernels.rms_norm(x, weight, eps=eps), entries=entries)
    rstd = 1 / np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), 1) + eps)
    for platform in ("xla", "triton"):
        with interpret(90):
            got = jax.jit(lambda x, on=platform: norm_both_ways_op(x, weight, eps=eps, entries=entries, platform=on))(x)
        np.testing.assert_allclose(got[-1], rstd, rtol=1e-6)
        for g, w in zip(got, wanted, strict=False):
            g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
            assert (g != w).mean() < 1e-3
            np.testing.assert_allclose(g, w, rtol=1 / 8)
        with interpret(90):
            _, scale, _, turned, rstd_ = norm_both_ways_op(
                x.at[20, 7].set(np.nan), weight, entries=entries, platform=platform
            )
        assert np.isnan(scale[20]).all() and np.isnan(turned[:, 0]).all() and np.isnan(rstd_[20])
        assert not np.isnan(np.delete(scale, 20, 0)).any()


def test_the_least_and_the_largest_numbers_have_scales():
    """No scale is smaller than devices have numbers: the values are rounded to multiples of what is left of it."""
    least, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    values, scales = quantize_scaled(np.full((2, 32), 3 * least))
    np.testing.assert_array_equal(scales, least)
    np.testing.assert_array_equal(np.asarray(values, np.float32), 3)
    values, scales = quantize_scaled(np.full((2, 32), huge))
    np.testing.assert_allclose(np.asarray(values, np.float64) * np.asarray(scales, np.float64), huge, rtol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_those_of_float64_within_rounding_to_8_bits(scaling):
    how = SCALINGS[scaling]
    (a, a_scale), (b, b_scale) = (
        quantize_scaled(x, block, exponents=how.exponents) for x, block in ((X, how.a), (W, how.b))
    )
    got = np.asarray(scaled_matmul(a, b, a_scale, b_scale, dtype="float32"), np.float64)

    def wide(values, scale):
        scale = np.exp2(np.asarray(scale, np.float64) - 127) if how.exponents else np.asarray(scale, np.float64)
        repeats = [size // count for size, count in zip(values.shape, scale.shape)]
        return np.asarray(values, np.float64) * scale.repeat(repeats[0], 0).repeat(repeats[1], 1)

    want = wide(a, a_scale) @ wide(b, b_scale).T
    assert np.linalg.norm(got - want) < 2e-6 * np.linalg.norm(want)
    exact = X.astype(np.float64) @ W.T.astype(np.float64)
    off = np.linalg.norm((want - exact) / np.linalg.norm(X, axis=1, keepdims=True)) / np.linalg.norm(
        exact / np.linalg.norm(X, axis=1, keepdims=True)
    )
    # One scale for rows of 2^-9 to 2^9 leaves the small ones few bits.
    assert (0.005 < off < 0.06) if scaling != "tensor" else off > 0.03


def test_a_result_may_be_split_over_rows():
    mesh = ejdist.make_mesh(dp=2, devices=jax.devices()[:2])
    (a, a_scale), (b, b_scale) = quantize_scaled(X, (1, 128)), quantize_scaled(W, (128, 128))
    run = jax.jit(functools.partial(ejdist.scaled_matmul, mesh=mesh))
    np.testing.assert_array_equal(run(a, b, a_scale, b_scale), scaled_matmul(a, b, a_scale, b_scale))


A, S = (np.asarray(x) for x in quantize_scaled(X, (1, 128)))
B, T = (np.asarray(x) for x in quantize_scaled(W, (128, 128)))


def grouped(**change):
    arguments = {"a": A, "b": B[None], "a_scale": S, "b_scale": T[None], "group_sizes": np.array([256])}
    return kernels.scaled_grouped_matmul(**arguments | change)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_scaled(X[0]), r"argument 'x' must be a float array \[M, D\]"),
        (
            lambda: quantize_scaled(X, (1, 100)),
            r"argument 'block' = \(1, 100\): 100 does not divide D = 384; pad x with zeros",
        ),
        (lambda: quantize_scaled(X, (0, 128)), r"argument 'block' = \(0, 128\)"),
        (
            lambda: quantize_scaled(X, dtype="float8"),
            "argument 'dtype' = 'float8' is unknown; use float8_e4m3fn or float8_e5m2",
        ),
        (
            lambda: kernels.quantize_both_ways(X[:100]),
            r"'x' of shape \(100, 384\) must have sizes that 128 divides; pad it",
        ),
        (lambda: kernels.quantize_both_ways(X, rows=64), "argument 'rows' = 64 must be 1, or 128 and divide 256"),
        (lambda: kernels.activate_both_ways(X[:, :100], X[:, :100]), "argument 'gate' of shape"),
        (
            lambda: kernels.normalize_both_ways(X[:, :100], X[0, :100]),
            "normalize_both_ways: argument 'x' of shape",
        ),
        (
            lambda: kernels.normalize_both_ways(X, X[0], entries=64),
            "normalize_both_ways: argument 'entries' = 64 must be 128, or None",
        ),
        (
            lambda: kernels.activate_both_ways(X, X, entries=64),
            "argument 'entries' = 64 must be 128, or None for one scale",
        ),
        (lambda: kernels.activation_cotangents(X, X, X, entries=64), "argument 'entries' = 64 must be 128, or None"),
        (
            lambda: kernels.scaled_grouped_matmul(A, B[None], S[:, [0] * 5], T[None], jnp.array([256])),
            r"'a_scale' of shape \(256, 5\) must have a number of rows and of blocks that divide those of 'a', \(256, 384\)",
        ),
        (
            lambda: grouped(a=X),
            r"argument 'a' must be float8_e4m3fn or float8_e5m2, \[M, D\], got float32 .* makes it of wider",
        ),
        (lambda: grouped(b=B), r"argument 'b' must be float8_e4m3fn or float8_e5m2, \[E, F, D\]"),
        (
            lambda: grouped(a_scale=jnp.asarray(S, "bfloat16")),
            r"'a_scale' must be float32, \[M, blocks\].* got bfloat16",
        ),
        (lambda: grouped(b_scale=T[None].astype(np.uint8)), "'b_scale' must be float32, .* exponents=False, got uint8"),
        (lambda: grouped(group_sizes=np.array([257])), "'group_sizes' has 257 rows in total, but 'a' has 256"),
        (lambda: grouped(group_sizes=jnp.array([-1])), "'group_sizes' must be at least 0, got -1"),
        (
            lambda: grouped(dtype="fp8"),
            "'dtype' = 'fp8' is unknown; use one of the strings 'bfloat16', 'float16', 'float32'",
        ),
        (lambda: grouped(dtype=jnp.float32), "'dtype' = .*float32.* is unknown; use one of the strings"),
        (lambda: scaled_matmul(X, B, S, T), "argument 'a' must be float8_e4m3fn or float8_e5m2"),
        (
            lambda: scaled_matmul(A, B[:, :256], S, T),
            "argument 'b' of shape .* the contracted dim is the last one of both",
        ),
        (
            lambda: scaled_matmul(A, B, S[:, [0] * 5], T),
            r"argument 'a_scale' of shape \(256, 5\) must have a number of rows",
        ),
        (lambda: scaled_matmul(A, B, S[:128], T), "a scale for each row or one for all"),
        (lambda: scaled_matmul(A, B, S, T.astype(np.float16)), "argument 'b_scale' must be float32, or uint8"),
        (lambda: scaled_matmul(A, B, S, T, dtype="int8"), "argument 'dtype' = 'int8' is unknown"),
    ],
)
def test_what_is_wrong_is_said(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_derivative_is_refused_by_name():
    with pytest.raises(kernels.Unsupported, match="scaled_matmul"):
        jax.grad(lambda s: op(A, B, s, T).sum().astype(jnp.float32))(S)
