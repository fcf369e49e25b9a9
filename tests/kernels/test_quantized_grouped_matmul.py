"""quantized_grouped_matmul: every format against NumPy, products and gradients, memory, who runs it, meshes, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from jax.sharding import PartitionSpec as P
from test_quantized_matmul import MODES, numpy_weights

import ejdist
import kernels
from ejdist import make_mesh
from kernels import quantize, quantized_grouped_matmul
from kernels.framework.interpret import interpret
from kernels.ops.grouped_matmul import packed_op
from kernels.ops.grouped_matmul.packed import QuantizedGroupedMatmulConfig
from kernels.toolchains.simulate import ahead_of_time

RNG = np.random.default_rng(0)
SIZES = np.array([5, 0, 2, 4])
W = RNG.standard_normal((4, 128, 6)).astype(np.float32) * np.array([1, 2, 4, 8], np.float32)[:, None, None]
X = RNG.standard_normal((13, 128)).astype(np.float32)
GROUP = np.repeat([0, 1, 2, 3, -1], [*SIZES, 2])  # two rows are of no group
Q, S, B = quantize(W, bits=4, group_size=32)


def products(x, weights, turned=False):
    """Row by row, in float64."""
    rows = [x[m] @ (weights[g].T if turned else weights[g]) * (g >= 0) for m, g in enumerate(GROUP)]
    return np.stack(rows)


@pytest.mark.parametrize("mode", MODES)
def test_against_numpy(mode):
    words, scales, biases = quantize(W, mode, **MODES[mode])
    bits = 32 * words.shape[1] // 128
    each = [(words[e], scales[e], None if biases is None else biases[e]) for e in range(4)]
    weights = np.stack([numpy_weights(*of, mode, bits) for of in each])
    d = RNG.standard_normal((13, 6)).astype(np.float32)
    run = functools.partial(quantized_grouped_matmul, mode=mode, bits=bits)
    out, pull = jax.vjp(lambda x: run(x, words, scales, biases, SIZES), X)
    assert error(out, products(X, weights)) < 1e-6 and error(pull(d)[0], products(d, weights, True)) < 1e-6


def test_rows_of_no_group_are_zero_whatever_is_in_them():
    x = X.copy()
    x[-2:] = np.nan
    out, pull = jax.vjp(lambda x: quantized_grouped_matmul(x, Q, S, B, SIZES), x)
    d = np.ones_like(out)
    d[-2:] = np.nan
    assert not out[-2:].any() and not pull(d)[0][-2:].any() and np.isfinite(out).all()


def test_zeros_in_place_of_biases_and_no_gradient_of_weights():
    zeros = jnp.asarray(RNG.integers(0, 15, S.shape), jnp.int32)
    want = quantized_grouped_matmul(X, Q, S, -S * zeros, SIZES)
    assert error(quantized_grouped_matmul(X, Q, S, None, SIZES, zeros=zeros), want) < 2e-6
    ds, db = jax.grad(lambda s, b: quantized_grouped_matmul(X, Q, s, b, SIZES).sum(), (0, 1))(S, B)
    assert not ds.any() and not db.any()


def shapes(E, D, F, M, dtype="bfloat16"):
    """Of a call with int4 in groups of 64."""
    groups = jax.ShapeDtypeStruct((E, D // 64, F), dtype)
    words, sizes = jax.ShapeDtypeStruct((E, D // 8, F), "uint32"), jax.ShapeDtypeStruct((E,), "int32")
    return jax.ShapeDtypeStruct((M, D), dtype), words, groups, groups, sizes


def test_one_matrix_is_unpacked_at_a_time():
    E, D, F = 32, 512, 512

    def run(x, *weights):
        out, pull = jax.vjp(lambda x: quantized_grouped_matmul(x, *weights, platform="xla"), x)
        return out, pull(out)

    memory = jax.jit(run).lower(*shapes(E, D, F, 16, "float32")).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * D * F * 4  # all of them are 32


@pytest.mark.parametrize(("experts", "rows", "together"), [(128, 512, False), (128, 8192, True), (1024, 65536, False)])
def test_what_gpus_take(experts, rows, together):
    """Matrices of many rows are unpacked together and multiplied by grouped_matmul's kernels, but for those of 6 GiB."""
    call = packed_op.bind(*shapes(experts, 2048, 1536, rows), mode="affine", bits=4, group_size=64)
    choices = {c.platform: c for c in packed_op.plan(call, None, None, differentiated=True).choices}
    assert {platform: c.backend.name for platform, c in choices.items()} == {
        "cpu": "xla", "cuda": "triton_packed", "rocm": "xla", "tpu": "pallas_packed",
    }  # fmt: skip
    assert choices["cuda"].cfg.dense is together
    assert choices["tpu"].cfg.dense is False  # TPUs unpack together for many more rows
    why = packed_op.backends["composed"].refuses(packed_op, call, True)
    assert why is None if experts == 128 else "its matrices take 6.0 GiB unpacked" in why


# -- kernels -----------------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


def several_tiles(mode, bits, dtype, D, F=40):
    """Returns (the arguments of a call with groups of several tiles, of none and rows of no group, its mode and bits, the
    weights, the group of each row) with columns that end in the middle of a tile."""
    rng, sizes = np.random.default_rng(1), np.array([20, 0, 33, 1])
    words, scales, biases = quantize(jnp.asarray(rng.standard_normal((4, D, F)), dtype), mode, bits=bits)
    x = rng.standard_normal((59, D))
    x[-5:] = np.nan
    each = [(words[e], scales[e], None if biases is None else biases[e]) for e in range(4)]
    weights = np.stack([numpy_weights(*of, mode, bits) for of in each])
    group = np.repeat([0, 1, 2, 3, -1], [*sizes, 5])
    how = {"mode": mode, "bits": bits}
    return (jnp.asarray(x, dtype), words, scales, biases, jnp.asarray(sizes)), how, weights, group


def by_rows(x, weights, group):
    """Row by row, in float64; zeros for a row of no group, whatever is in it."""
    x = np.asarray(x, np.float64)
    return np.stack([x[m] @ weights[g] if g >= 0 else np.zeros(weights.shape[2]) for m, g in enumerate(group)])


@pytest.mark.parametrize(("mode", "bits", "dtype"), [
    ("affine", 4, "bfloat16"), ("mxfp8", 8, "bfloat16"), pytest.param("affine", 8, "float16", marks=SLOW),
    pytest.param("nf4", 4, "bfloat16", marks=SLOW), pytest.param("mxfp4", 4, "float16", marks=SLOW),
])  # fmt: skip
def test_words_are_unpacked_where_they_lie(mode, bits, dtype):
    arguments, how, weights, group = several_tiles(mode, bits, dtype, 192)
    cfg = QuantizedGroupedMatmulConfig(block_m=16, block_f=32, num_warps=2, dense=False)
    with interpret():
        got = quantized_grouped_matmul(*arguments, **how, platform="triton", cfg=cfg)
    assert error(got, by_rows(arguments[0], weights, group)) < 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(("mode", "bits", "dtype"), [
    ("affine", 4, "bfloat16"), ("mxfp4", 4, "float32"), pytest.param("nf4", 4, "bfloat16", marks=SLOW),
    pytest.param("mxfp8", 8, "bfloat16", marks=SLOW), pytest.param("affine", 3, "float32", marks=SLOW),
])  # fmt: skip
def test_words_are_unpacked_on_tpus(mode, bits, dtype):
    """Both ways, with blocks of rows that several groups share."""
    D = 1024 * (1 if bits in (4, 8) else 4)  # two steps and, of 3 bits, one: places of a word fill whole tiles
    D *= 2 if mode == "affine" and bits == 4 else 1
    arguments, how, weights, group = several_tiles(mode, bits, dtype, D, 136)
    d = jnp.asarray(np.random.default_rng(2).standard_normal((59, 136)), dtype).at[-5:].set(jnp.nan)
    cfg = QuantizedGroupedMatmulConfig(block_m=32, block_f=128, block_d=D if bits == 3 else 1024, dense=False)

    def both(x):
        out, pull = jax.vjp(lambda x: quantized_grouped_matmul(x, *arguments[1:], **how, platform="pallas", cfg=cfg), x)
        return out, pull(d)[0]

    with interpret():
        out, dx = jax.jit(both)(arguments[0])
    limit = max(1e-6, 2 * float(jnp.finfo(dtype).eps))
    assert error(out, by_rows(arguments[0], weights, group)) < limit
    assert error(dx, by_rows(d, weights.transpose(0, 2, 1), group)) < limit


def test_tpus_take_blocks_by_the_rows_of_a_group():
    """Blocks of few rows where groups are short, of 256 where they are not; together where they are long."""

    def cfg(rows):
        call = packed_op.bind(*shapes(128, 2048, 1536, rows), mode="affine", bits=4, group_size=64)
        return packed_op.backends["pallas_packed"].heuristic(call, "tpu")

    assert [cfg(rows).block_m for rows in (128, 512, 8192, 65536)] == [16, 32, 128, 256]
    assert [cfg(rows).dense for rows in (131072, 131073)] == [False, True]


@pytest.mark.slow  # compiled for a TPU; the numbers are quick
def test_tpus_read_the_words_as_they_are_stored():
    """XLA copied the words of all matrices, 201 MB here, where it made integers of another kind of them."""
    given = shapes(128, 2048, 1536, 512)
    how = {"mode": "affine", "bits": 4, "group_size": 64, "platform": "pallas"}
    program = ahead_of_time.compile_tpu(lambda *a: quantized_grouped_matmul(*a[:3], a[3], a[4], **how), *given)
    assert program.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.slow  # compiled; the numbers are quick
def test_matrices_are_unpacked_in_registers():
    """Shared memory holds what is copied to it, and no numbers."""
    arguments = dict(zip(("x", "w", "scales", "biases", "group_sizes"), shapes(128, 2048, 1536, 512), strict=True))
    how = {"mode": "affine", "bits": 4, "group_size": 64}
    cfg = packed_op.backends["triton_packed"].heuristic(packed_op.bind(**arguments, **how), "cuda")
    program = ahead_of_time.export_cuda(lambda a: packed_op(**a, **how, platform="triton", cfg=cfg), arguments)
    (kernel,) = [k for k in program.kernels if k.name == "packed_matmul_kernel"]
    stage = cfg.block_m * 64 * 2 + 64 // 8 * cfg.block_f * 4 + 2 * cfg.block_f * 2 + cfg.block_m * 4
    assert stage < kernel.shared_memory_bytes < cfg.num_stages * stage


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def test_columns_may_be_split():
    run = jax.jit(functools.partial(ejdist.quantized_grouped_matmul, mesh=make_mesh(tp=2)))
    assert error(run(X, Q, S, B, SIZES), quantized_grouped_matmul(X, Q, S, B, SIZES)) < 1e-6
    with pytest.raises(ValueError, match=r"dim E .*moe"):
        specs = (P(), P("ep"))
        ejdist.quantized_grouped_matmul(X, Q, S, B, SIZES, mesh=make_mesh(ep=2), in_specs=specs)


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        (r"argument 'x' must be a float array \[M, D\], got float32 of shape \(128,\)", (X[0], Q, S, B, SIZES), {}),
        (r"argument 'w' must be words \[E, D \* bits / 32, F\]", (X, Q[0], S[0], B[0], SIZES), {}),
        ("argument 'w' must be packed uint32 from `quantize`, got float32", (X, W, S, B, SIZES), {}),
        (r"argument 'scales' of shape \(3, 4, 6\) does not fit 'w'", (X, Q, S[:3], B[:3], SIZES), {}),
        ("argument 'bits' = 2 is not valid for mode 'nf4'", (X, Q[:, :8], S, None, SIZES), {"mode": "nf4"}),
        ("argument 'biases': mode 'affine' needs 'biases'", (X, Q, S, None, SIZES), {}),
        ("argument 'mode' = 'fp4' is unknown", (X, Q, S, B, SIZES), {"mode": "fp4"}),
        (r"argument 'group_sizes' must be integers \[E\] with E = 4 of 'w'", (X, Q, S, B, SIZES[:3]), {}),
        ("argument 'group_sizes' must be integers", (X, Q, S, B, SIZES * 1.0), {}),
        ("argument 'group_sizes' has 14 rows in total, but 'x' has 13", (X, Q, S, B, [*SIZES[:3], 7]), {}),
        ("argument 'group_sizes' must be at least 0, got -1", (X, Q, S, B, SIZES - [0, 1, 0, 0]), {}),
    ],
)
def test_a_wrong_call_is_a_value_error(said, args, options):
    for function in (quantized_grouped_matmul, ejdist.quantized_grouped_matmul):
        with pytest.raises(ValueError, match=f"quantized_grouped_matmul: {said}"):
            function(*args, **options)


def test_the_public_functions():
    assert kernels.operations()["quantized_grouped_matmul"] is packed_op
    np.testing.assert_array_equal(
        ejdist.QuantizedGroupedMatmul()(X, Q, S, B, list(SIZES)), quantized_grouped_matmul(X, Q, S, B, SIZES)
    )
