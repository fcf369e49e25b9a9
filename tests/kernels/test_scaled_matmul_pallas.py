"""The Pallas kernels of products of 8-bit floats, tiles, parts of D and groups, and of quantisation with scales of whole rows,
against the contracts; and what they leave."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels.framework.interpret import interpret
from kernels.framework.platforms import PLATFORMS, Unsupported
from kernels.ops.scaled_matmul import (
    ScaledMatmulConfig,
    activate_op,
    both_ways_op,
    cotangents_op,
    grouped_op,
    norm_both_ways_op,
    op,
)
from kernels.toolchains.simulate.ahead_of_time import compile_tpu, mosaic_calls

RNG = np.random.default_rng(3)
TILE = ScaledMatmulConfig(block_m=32, block_n=128)
FINE, WIDE = "float8_e4m3fn", "float8_e5m2"


def numbers(dtype, *shape):
    return jnp.asarray(RNG.standard_normal(shape) * 8, dtype)


def scales(*shape):
    return jnp.asarray(RNG.uniform(0.25, 2, shape), jnp.float32)


def same(got, want, dtype):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    limit = 2e-6 if dtype == "float32" else 2**-8
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def products(M, D, F, a_dtype, b_dtype, a_blocks, b_rows, b_blocks, dtype, a_rows=None):
    a, b = numbers(a_dtype, M, D), numbers(b_dtype, F, D)
    given = a, b, scales(M if a_rows is None else a_rows, a_blocks), scales(b_rows, b_blocks)
    with interpret():
        got = kernels.scaled_matmul(*given, dtype=dtype, platform="pallas", cfg=TILE)
    same(got, op.function(*given, dtype=dtype), dtype)


def test_every_part_of_d_has_its_own_scales_in_every_tile():
    """D is two parts of six blocks, rows and columns end inside of their last tiles."""
    products(70, 1536, 200, FINE, WIDE, 12, 200, 12, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "counts", "dtype"),
    [
        (FINE, FINE, (12, 2, 12), "bfloat16"),  # DeepSeek-V3's
        (WIDE, FINE, (6, 256, 4), "float32"),  # blocks of 256 and of 384: of 128 together
        (WIDE, WIDE, (1, 256, 2), "float32"),  # one part of D a program
        (FINE, FINE, (3, 1, 1), "bfloat16"),
    ],
)
def test_other_counts_of_scales(a_dtype, b_dtype, counts, dtype):
    products(70, 1536, 256, a_dtype, b_dtype, *counts, dtype)
    products(33, 1536, 256, a_dtype, b_dtype, *counts, dtype, a_rows=1)


# One group ends inside of a tile that another begins in, one is empty, one is longer than a tile; rows come after them.
SIZES = (9, 0, 50, 7)


def groups(blocks, dtype, sizes=SIZES, M=80, D=1536, F=256, b_dtype=FINE):
    a, b = numbers(FINE, M, D), numbers(b_dtype, len(sizes), F, D)
    of_rows, of_columns = (12, (2, 12)) if blocks else (1, (F, 1))
    a_scale, b_scale = scales(M, of_rows), scales(len(sizes), *of_columns)
    a_scale = a_scale.at[sum(sizes) :].set(jnp.nan)
    given = a, b, a_scale, b_scale, jnp.asarray(sizes, jnp.int32)
    with interpret():
        got = kernels.scaled_grouped_matmul(*given, dtype=dtype, platform="pallas", cfg=TILE)
    assert not np.asarray(got, np.float32)[sum(sizes) :].any()
    same(got, grouped_op.function(*given, dtype=dtype), dtype)


def test_rows_of_a_group_have_its_matrix_and_scales_of_blocks():
    groups(True, "float32", b_dtype=WIDE)


def test_rows_of_a_group_have_scales_of_rows():
    groups(False, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(80,), (0, 80, 0), (0, 0), (1, 31, 32, 16)], ids=str)
@pytest.mark.parametrize("blocks", [True, False])
def test_other_groups(sizes, blocks):
    groups(blocks, "float32", sizes)


def shaped(M, D, F, a_scale, b_scale, dtype=FINE, codes=jnp.float32, E=()):
    of = jax.ShapeDtypeStruct
    return of((M, D), dtype), of((*E, F, D), dtype), of(a_scale, codes), of((*E, *b_scale), codes)


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (shaped(64, 256, 128, (64, 1), (128, 1)), {}, "scales of whole rows need no more than XLA's product"),
        (shaped(64, 256, 128, (64, 8), (128, 8), codes=jnp.uint8), {}, "'a_scale' has powers of two"),
        (shaped(64, 256, 128, (64, 4), (128, 4)), {}, "scales are of 64 entries each; it takes blocks of 128"),
        (shaped(64, 256, 128, (64, 2), (1, 2)), {"dtype": "float16"}, "'float16' is a result that Mosaic has not"),
        (shaped(0, 256, 128, (1, 2), (1, 2)), {}, "an array has no elements"),
        (shaped(64, 131072, 128, (64, 2), (1, 2)), {}, "D = 131072 has no part of whole tiles"),
    ],
)
def test_what_the_kernel_has_not_is_refused_by_name_and_left_to_xla_without(call, options, words):
    run = functools.partial(kernels.scaled_matmul, **options)
    with interpret(), pytest.raises(Unsupported, match=words):
        run(*(np.zeros(x.shape, x.dtype) for x in call), platform="pallas")
    assert backend_on_tpus(op, *call, **options) == "xla"


def backend_on_tpus(operation, *arguments, **options):
    plan = operation.plan(operation.bind(*arguments, **options), None, None, differentiated=False)
    return plan.choices[PLATFORMS.index("tpu")].backend.name


def test_on_tpus_blocks_and_groups_are_the_kernels():
    assert backend_on_tpus(op, *shaped(64, 256, 128, (64, 2), (1, 2))) == "pallas_tpu"
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    for blocks in (1, 2):
        of_groups = shaped(64, 256, 128, (64, blocks), (128, blocks), E=(3,))
        assert backend_on_tpus(grouped_op, *of_groups, sizes) == "pallas_tpu"
    odd = shaped(64, 4104, 128, (64, 1), (128, 1), E=(3,))  # D that no tiles make up
    assert backend_on_tpus(grouped_op, *odd, sizes) == "xla"


# -- quantisation ------------------------------------------------------------------------------------------------------

SQUARE = ScaledMatmulConfig(block_m=128, block_n=128)


def awkward(*shape):
    """Returns numbers of many sizes, a row and a column of zeros, rows of the least and the largest numbers, and in a tile each
    some that are none."""
    x = RNG.standard_normal(shape).astype(np.float32) * np.exp2(RNG.integers(-9, 9, (shape[0], 1)))
    x[3] = x[:, 300] = 0
    x[4], x[5] = 1e-42, 3e38 * (np.arange(shape[1]) % 5 - 2) / 2
    x[20, 7], x[150, 130], x[151, 383] = np.nan, -np.inf, np.inf
    return x


def run(operation, arrays, **options):
    """Returns (what the kernels of an operation return with these tiles, what its contract does)."""
    options |= {"entries": None}
    with interpret():
        got = jax.jit(functools.partial(operation, **options, platform="pallas", cfg=SQUARE))(*arrays)
    return got, jax.jit(functools.partial(operation.function, **options))(*arrays)


def alike(got, want):
    """Compares numbers of which a few may be one rounding apart: factors in another order, erf beside erfc."""
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        differs = ~((g == w) | (np.isnan(g) & np.isnan(w)))
        assert differs.mean() < 1e-2 and not np.isnan(g[differs]).any()
        np.testing.assert_allclose(g[differs], w[differs], rtol=1 / 8)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("float32", {"matrices": 2, "dtype": WIDE}),
        pytest.param("float32", {}, marks=pytest.mark.slow),
        pytest.param("bfloat16", {"matrices": 2, "dtype": WIDE}, marks=pytest.mark.slow),
    ],
)
def test_rows_and_columns_have_scales_of_all_of_their_tiles_and_nothing_is_not_hidden(dtype, options):
    got, want = run(both_ways_op, [jnp.asarray(awkward(256, 384), dtype)], **options)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
    values, scale, turned, turned_scale = got
    assert np.flatnonzero(np.isnan(scale[:, 0])).tolist() == [20, 150, 151]
    columns = np.isnan(turned_scale[:, 0]).reshape(options.get("matrices", 1), -1).any(0)
    assert np.flatnonzero(columns).tolist() == [7, 130, 383]
    assert np.isnan(np.asarray(values, np.float32)[20]).all() and np.isnan(np.asarray(turned, np.float32)).any()


@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu", marks=pytest.mark.slow)])
def test_an_activation_and_its_cotangents_are_quantised_tile_by_tile(activation):
    gate, up, d = (jnp.asarray(RNG.standard_normal((256, 256)), jnp.bfloat16) for _ in range(3))
    gate = gate.at[130, 200].set(jnp.nan)
    alike(*run(activate_op, (gate, up), activation=activation))
    alike(*run(cotangents_op, (gate, up, d), activation=activation))


def test_a_norm_is_quantised_tile_by_tile():
    x, weight = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((256, 384), 384))
    (*got, rstd), (*want, wanted) = run(norm_both_ways_op, (x.astype(jnp.bfloat16).at[3].set(0), weight), eps=1e-3)
    np.testing.assert_allclose(rstd, wanted, rtol=1e-6)
    alike(got, want)


def test_scales_of_blocks_are_left_to_xla():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    assert [backend_on_tpus(both_ways_op, x, entries=entries) for entries in (128, None)] == ["xla", "pallas_tpu"]
    with interpret(), pytest.raises(Unsupported, match=r"scales of blocks are XLA's: on TPUs products with them take"):
        kernels.quantize_both_ways(np.zeros((128, 128), np.float32), platform="pallas")


def test_what_is_summed_over_rows_is_not_transposed_before_its_product():
    """A matrix's gradient as a layer has it, compiled for the TPU whose matrix unit multiplies 8 bits."""

    def gradient(x, d):
        (_, _, x, x_scale), (_, _, d, d_scale) = (kernels.quantize_both_ways(y, entries=None) for y in (x, d))
        return kernels.scaled_matmul(x, d, x_scale, d_scale)

    shapes = (jax.ShapeDtypeStruct((1024, width), jnp.bfloat16) for width in (512, 256))
    made = compile_tpu(gradient, *shapes, topology="tpu7x:2x2x1")
    assert mosaic_calls(made) == 4
    program = made.as_text()
    turned = re.findall(r"f8e4m3fn\[[\d,]+\]\S* (?:copy|transpose)\(.*", program[program.index("\nENTRY") :])
    assert not turned, turned
