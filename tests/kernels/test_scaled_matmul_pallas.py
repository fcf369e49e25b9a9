"""The Pallas kernel of products of 8-bit floats: tiles, parts of D and groups against the contract, and what it leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels.framework.interpret import interpret
from kernels.framework.platforms import PLATFORMS, Unsupported
from kernels.ops.scaled_matmul import ScaledMatmulConfig, grouped_op, op

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
