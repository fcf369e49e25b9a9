"""quantize and quantized_matmul: every format bit by bit against NumPy, products and gradients, memory, meshes, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh
from kernels import dequantize, quantize, quantized_matmul
from kernels.engines.matmul.formats import FP4, NF4, pack, unpack
from kernels.framework.interpret import interpret
from kernels.ops.quantized_matmul import op
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig
from kernels.ops.quantized_matmul.xla import tile_of
from kernels.toolchains.simulate import ahead_of_time

RNG = np.random.default_rng(0)
W = RNG.standard_normal((128, 6)).astype(np.float32)
MODES = {  # name -> options
    "affine": {"bits": 4, "group_size": 32},
    "nf4": {"group_size": 64},
    "mxfp4": {},
    "mxfp8": {},
}


def codes_of(words, bits):
    """Returns the codes [D, F] of words [D * bits / 32, F]: the bits of a column are one stream, lowest first."""
    words = np.ascontiguousarray(np.asarray(words).T).astype("<u4")
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    values = stream.reshape(words.shape[0], -1, bits) << np.arange(bits)
    return values.sum(-1).T


def numpy_weights(words, scales, biases, mode, bits):
    """Returns the float64 weights that these stand for."""
    codes, scales = codes_of(words, bits), np.asarray(scales)
    tables = {"nf4": np.asarray(NF4), "mxfp4": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)}
    tables["mxfp8"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = tables[mode].astype(np.float64)[codes] if mode in tables else codes.astype(np.float64)
    wide = np.ldexp(1.0, scales.astype(int) - 127) if mode.startswith("mx") else scales.astype(np.float64)
    group = codes.shape[0] // scales.shape[0]
    weights = values * np.repeat(wide, group, 0)
    return weights if biases is None else weights + np.repeat(np.asarray(biases, np.float64), group, 0)


# -- formats -----------------------------------------------------------------------------------------------------------


def test_packing_is_a_stream_of_bits():
    for bits in range(1, 9):
        codes = RNG.integers(0, 2**bits, (64, 3))
        words = pack(jnp.asarray(codes), bits)
        assert words.dtype == jnp.uint32 and words.shape == (2 * bits, 3)
        np.testing.assert_array_equal(codes_of(words, bits), codes)
        np.testing.assert_array_equal(unpack(words, bits), codes)


def test_tables_are_those_of_the_specifications():
    np.testing.assert_array_equal(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32), FP4)
    assert list(NF4) == sorted(NF4) and NF4[7] == 0 and len(NF4) == 16


@pytest.mark.parametrize("mode", MODES)
def test_every_value_is_the_nearest_that_the_format_has(mode):
    words, scales, biases = quantize(W, mode, **MODES[mode])
    bits = 32 * words.shape[0] // 128
    got = numpy_weights(words, scales, biases, mode, bits)
    np.testing.assert_allclose(dequantize(words, scales, biases, mode=mode, bits=bits), got, rtol=1e-6, atol=1e-7)
    group = 128 // scales.shape[0]
    wide = np.repeat(
        np.ldexp(1.0, np.asarray(scales, int) - 127) if mode.startswith("mx") else np.asarray(scales), group, 0
    )
    if mode == "affine":
        assert (np.abs(got - W) <= wide / 2 * (1 + 1e-5)).all()
        groups = W.reshape(-1, group, 6)
        np.testing.assert_allclose(got.reshape(groups.shape).max(1), groups.max(1), rtol=1e-5)
        return
    table = {"nf4": np.asarray(NF4), "mxfp4": np.asarray(FP4)}.get(mode)
    if table is None:
        wanted = np.clip(W / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        wanted = table[np.abs((W / wide)[..., None] - table).argmin(-1)]
    np.testing.assert_allclose(got / wide, wanted, atol=1e-6)
    if mode.startswith("mx"):  # the largest of a group is in the upper half of the format's range, or is cut to its end
        largest = np.abs(W / wide).reshape(-1, 32, 6).max(1)
        assert (largest >= {"mxfp4": 4, "mxfp8": 256}[mode]).all() and (
            largest < {"mxfp4": 8, "mxfp8": 512}[mode]
        ).all()


def test_ties_go_to_even_and_zeros_stay():
    ties = np.zeros((32, 1), np.float32)
    ties[:9, 0] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, 6.0]
    got = dequantize(*quantize(ties, "mxfp4"), mode="mxfp4")
    assert got[:9, 0].tolist() == [0, 1, 1, 2, 2, 4, 4, -1, 6] and not got[9:].any()
    for mode, options in MODES.items():
        assert not dequantize(*quantize(np.zeros((64, 2), np.float32), mode, **options), mode=mode, **options).any()
    constant = np.full((64, 2), 0.3, np.float32)
    np.testing.assert_array_equal(dequantize(*quantize(constant, bits=1), bits=1), constant)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_a_group_with_what_has_no_number_has_none(mode):
    """e2m1 has neither NaN nor infinity: they were 0 and 0.75."""
    w = np.full((64, 3), 0.5, np.float32)
    w[3], w[40, 0] = (np.nan, np.inf, -np.inf), 0
    got = dequantize(*quantize(w, mode), mode=mode)
    assert np.isnan(got[:32]).all() and (np.asarray(got[32:]) == w[32:]).all()


def test_quantize_takes_any_leading_dims_and_keeps_the_dtype():
    many = jnp.asarray(W.reshape(2, 64, 6), jnp.bfloat16)
    words, scales, biases = quantize(many, bits=3)
    assert words.shape == (2, 6, 6) and scales.dtype == biases.dtype == jnp.bfloat16 and scales.shape == (2, 1, 6)
    np.testing.assert_array_equal(words[1], quantize(many[1], bits=3)[0])
    assert dequantize(words, scales, biases, bits=3).shape == many.shape


# -- products ----------------------------------------------------------------------------------------------------------


def product(words, scales, biases, mode, bits):
    """Returns (out, dx) on a random x, and what NumPy has for them."""
    x = RNG.standard_normal((3, words.shape[0] * 32 // bits)).astype(np.float32)
    d = RNG.standard_normal((3, words.shape[1])).astype(np.float32)
    out, pull = jax.vjp(lambda x: quantized_matmul(x, words, scales, biases, mode=mode, bits=bits), x)
    weights = numpy_weights(words, scales, biases, mode, bits)
    return (out, pull(d)[0]), (x @ weights, d @ weights.T)


@pytest.mark.parametrize("mode", MODES)
def test_against_numpy(mode):
    words, scales, biases = quantize(W, mode, **MODES[mode])
    got, want = product(words, scales, biases, mode, 32 * words.shape[0] // 128)
    assert max(map(error, got, want)) < 1e-6


def test_zeros_in_place_of_biases():
    words, scales, _ = quantize(W, bits=8, group_size=64)
    zeros = jnp.asarray(RNG.integers(0, 255, scales.shape), jnp.int32)
    x = RNG.standard_normal((2, 128)).astype(np.float32)
    want = x @ numpy_weights(words, scales, -np.asarray(scales) * np.asarray(zeros), "affine", 8)
    assert error(quantized_matmul(x, words, scales, zeros=zeros, bits=8), want) < 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_code_that_stands_for_zero_is_zero_under_narrow_scales(dtype):
    words, scales, _ = quantize(RNG.standard_normal((64, 8)).astype(np.float32), bits=8, group_size=32)
    scales, zeros = scales.astype(dtype), jnp.asarray(RNG.integers(129, 255, scales.shape), jnp.int32)
    steps = np.repeat(np.asarray(scales, np.float64), 32, axis=0)
    want = steps * (numpy_weights(words, np.ones_like(zeros), 0 * zeros, "affine", 8) - np.repeat(zeros, 32, axis=0))
    got = dequantize(words, scales, zeros=zeros, bits=8)
    assert np.abs((got - want) / steps).max() < 1e-3
    x = jnp.asarray(RNG.standard_normal((3, 64)).astype(np.float32))
    assert error(quantized_matmul(x, words, scales, zeros=zeros, bits=8), np.asarray(x, np.float64) @ want) < 2e-6


def test_weights_have_no_gradient():
    words, scales, biases = quantize(W, **MODES["affine"])
    x = jnp.ones((1, 128))
    ds, db = jax.grad(lambda s, b: quantized_matmul(x, words, s, b).sum(), (0, 1))(scales, biases)
    assert not ds.any() and not db.any()


@st.composite
def calls(draw):
    mode = draw(st.sampled_from(list(MODES)))
    bits = draw(st.integers(1, 8)) if mode == "affine" else 8 if mode == "mxfp8" else 4
    # Few shapes, so that many calls are of one program.
    D, F = draw(st.sampled_from([(32, 5), (96, 1)]))
    group = 32 if mode.startswith("mx") else draw(st.sampled_from([1, 16]))
    return mode, bits, D, group, F, draw(st.integers(0, 100))


def _random_call(call):
    mode, bits, D, group, F, seed = call
    w = np.random.default_rng(seed).standard_normal((D, F)).astype(np.float32)
    words, scales, biases = quantize(w, mode, bits=bits, group_size=group)
    got, want = product(words, scales, biases, mode, bits)
    assert max(map(error, got, want)) < 5e-6


@pytest.mark.slow  # random calls; each option has a quick test
@settings(max_examples=2, deadline=None, derandomize=True)
@given(calls())
def test_some_random_calls(call):
    _random_call(call)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(calls())
def test_random_calls(call):
    _random_call(call)


def test_the_weights_are_never_unpacked_as_a_whole():
    D = F = 4096
    shapes = [((16, D), "float32"), ((D // 8, F), "uint32"), ((D // 64, F), "float32"), ((D // 64, F), "float32")]
    x, *weights = [jax.ShapeDtypeStruct(*s) for s in shapes]

    def run(x, *weights):
        out, pull = jax.vjp(lambda x: quantized_matmul(x, *weights), x)
        return out, pull(out)

    memory = jax.jit(run).lower(x, *weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < D * F * 4 // 3


def test_tiles_are_whole_groups_and_words():
    assert tile_of(4096, 4096, 64) == 256 and tile_of(96, 10**9, 24) == 96 and tile_of(640, 10**9, 32) == 32
    assert tile_of(3 * 4096, 8192, 128) == 128


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("mode", "bits", "dtype"), [
    ("affine", 4, "bfloat16"), ("affine", 4, "float16"), ("affine", 8, "bfloat16"), ("affine", 8, "float16"),
    ("nf4", 4, "bfloat16"), ("mxfp4", 4, "bfloat16"), ("mxfp4", 4, "float16"), ("mxfp8", 8, "bfloat16"),
])  # fmt: skip
def test_words_copied_by_tma(mode, bits, dtype, chunks):
    """On Hopper, with one chunk of D at a time and several, D no multiple of a step's, and parts of D that are summed."""
    rng = np.random.default_rng(1)
    words, scales, biases = quantize(jnp.asarray(rng.standard_normal((320, 48)), dtype), mode, bits=bits)
    x = jnp.asarray(rng.standard_normal((18, 320)), dtype)
    want = np.asarray(x, np.float64) @ numpy_weights(words, scales, biases, mode, bits)
    cfg = QuantizedMatmulConfig(block_m=16, block_f=32, splits=2, chunks=chunks, num_warps=2, dense=False, turned=False)
    how = {"mode": mode, "bits": bits, "cfg": cfg}
    with interpret(90):
        got = quantized_matmul(x, words, scales, biases, platform="triton", **how)
    # The result is rounded to its dtype, and so are the numbers of nf4.
    assert error(got, want) < 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.slow  # compiled; the numbers are quick
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 64), ("affine", 8, 64), ("mxfp4", 4, 32)],
)
def test_weights_are_unpacked_in_registers(mode, bits, group_size, turned):
    """Shared memory holds what is copied to it, and no weights: the compiler finds the layout that `joined` is written for."""
    M, D, F, floats = 16, 4096, 4096, "uint8" if mode == "mxfp4" else "bfloat16"
    shapes = {"x": ((M, D), "bfloat16"), "w": ((D * bits // 32, F), "uint32"), "scales": ((D // group_size, F), floats)}
    shapes |= {"biases": ((D // group_size, F), floats)} if mode == "affine" else {}
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    cfg = op.backends["triton_gpu"].heuristic(op.bind(**arguments, **how), "cuda")
    assert cfg.turned
    if not turned:
        tiles = {"block_m": 16, "block_f": 128, "splits": 4, "chunks": 4 if bits == 4 else 2, "num_stages": 3}
        cfg = dataclasses.replace(cfg, turned=False, **tiles)
    (kernel,) = ahead_of_time.export_cuda(lambda a: op(**a, **how, platform="triton", cfg=cfg), arguments).kernels
    assert kernel.name == ("unpacked_matmul_kernel" if turned else "quantized_matmul_kernel")
    depth = cfg.block_d if turned else cfg.chunks * group_size
    rows = [(M, depth * 2), (depth * bits // 32, cfg.block_f * 4)]
    rows += [(depth // group_size, cfg.block_f * jnp.dtype(floats).itemsize)] * (len(arguments) - 2)
    stage = sum(count * width for count, width in rows)
    stages = cfg.num_stages - (not turned)  # Triton's loop has one fewer
    assert stages * stage <= kernel.shared_memory_bytes < stages * stage + 1024


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def test_on_a_mesh():
    words, scales, biases = quantize(RNG.standard_normal((64, 8)).astype(np.float32), bits=4)
    x = RNG.standard_normal((4, 2, 64)).astype(np.float32)
    run = functools.partial(quantized_matmul, w=words, scales=scales, biases=biases)
    want, pull = jax.vjp(run, x)
    there = functools.partial(
        ejdist.quantized_matmul, w=words, scales=scales, biases=biases, mesh=make_mesh(dp=2, tp=2)
    )
    got, pull_there = jax.vjp(jax.jit(there), x)
    assert got.sharding.spec == P("dp", None, "tp") and error(got, want) < 1e-6
    d = jnp.cos(jnp.arange(want.size)).reshape(want.shape)
    assert error(pull_there(d)[0], pull(d)[0]) < 1e-6
    with pytest.raises(ValueError, match="'x' has dim D split over tp"):
        there(x, in_specs=P(None, None, "tp"))


# -- what is refused ---------------------------------------------------------------------------------------------------

X = np.zeros((2, 128), np.float32)
Q, S, B = (np.asarray(a) for a in quantize(W, **MODES["affine"]))
MX = [np.asarray(a) for a in quantize(W, "mxfp4")[:2]]


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        ("'w' must be a float array .* got int32", (W.astype(np.int32),), {}),
        ("'w' must be a float array .* got list", ([[1.0]],), {}),
        ("'mode' = 'int4' is unknown; use one of affine, nf4", (W, "int4"), {}),
        ("'bits' = 9 is not valid for mode 'affine'; use 1 or 2", (W,), {"bits": 9}),
        ("'bits' = 8 is not valid for mode 'nf4'; use 4", (W, "nf4"), {"bits": 8}),
        ("'group_size' = 64 is not valid for mode 'mxfp4'; use 32", (W, "mxfp4"), {"group_size": 64}),
        ("'group_size' = 0 is not valid for mode 'affine'", (W,), {"group_size": 0}),
        ("'group_size' = 48 must divide D = 128", (W,), {"group_size": 48}),
        ("'group_size' = 10 must divide D = 40, and so must 32", (W[:40],), {"group_size": 10}),
    ],
)
def test_what_quantize_refuses(said, args, options):
    with pytest.raises(ValueError, match=f"quantize: argument {said}"):
        quantize(*args, **options)


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        ("'w' must be an array returned by `quantize`, got list", ([[1]], S, B), {}),
        ("'w' must be an array returned by `quantize`, got uint32", (Q[0], S, B), {}),
        ("'w' must be an array .* got NoneType", (None, S, B), {}),
        ("'bits' must be at least 1, got 0", (Q, S, B), {"bits": 0}),
        ("'bits' must be int or None, got '4'", (Q, S, B), {"bits": "4"}),
        ("'group_size' = 1000000 exceeds the number of codes in 'w' of shape", (Q, S, B), {"group_size": 10**6}),
        (r"'mode' must be str, got \['affine'\]", (Q, S, B), {"mode": ["affine"]}),
        (r"'scales' of shape .* does not fit 'w' of shape", (Q, S[:, :2], B[:, :2]), {}),
    ],
)
def test_what_dequantize_refuses(said, args, options):
    with pytest.raises(ValueError, match=f"dequantize: argument {said}"):
        dequantize(*args, **options)


@pytest.mark.parametrize("options", [{"bits": 8, "group_size": 64}, {"bits": 3}, {"bits": 4}, {}], ids=str)
def test_affine_codes_of_unknown_width_are_not_guessed(options):
    """8 bits were read as 4, of twice as many rows."""
    packed = quantize(W, **options)
    with pytest.raises(ValueError, match=r"dequantize: argument 'bits' is missing: .* pass 'bits' or 'group_size'"):
        dequantize(*packed)
    bits, group_size = options.get("bits", 4), options.get("group_size", 64)
    want = numpy_weights(*packed, "affine", bits)
    for how in ({"bits": bits}, {"group_size": group_size}, {"bits": bits, "group_size": group_size}):
        np.testing.assert_allclose(dequantize(*packed, **how), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "far", "bits"), [("float32", 3e38, 4), ("float16", 6e4, 1)])
def test_a_group_that_spans_more_than_its_scales_reach_is_refused(dtype, far, bits):
    w = jnp.repeat(jnp.array([[far], [-far]], dtype), 16, axis=0)
    with pytest.raises(
        ValueError, match=f"quantize: argument 'w' has a group whose range exceeds what {bits} bits with {dtype}"
    ):
        quantize(w, bits=bits, group_size=32)
    np.testing.assert_allclose(dequantize(*quantize(w / 4, bits=bits, group_size=32), bits=bits), w / 4, rtol=1e-3)
    # What has no number has none, as under a trace.
    assert np.isnan(dequantize(*quantize(w.at[0].set(jnp.nan), bits=bits, group_size=32), bits=bits)).any()
    jax.jit(lambda w: quantize(w, bits=bits, group_size=32))(w)


def test_numbers_of_numpy_are_what_they_hold():
    for function, arrays in ((quantize, (W,)), (dequantize, (Q, S, B))):
        got = function(*arrays, bits=np.int64(4), group_size=np.int32(32))
        jax.tree.map(np.testing.assert_array_equal, got, function(*arrays, bits=4, group_size=32))


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        ("argument 'x' must be a float array .* got int32", (X.astype(np.int32), Q, S, B), {}),
        ("argument 'x' must be a float array .* shape \\(0,\\)", (X[0, :0], Q, S, B), {}),
        ("argument 'mode' = 'fp4' is unknown", (X, Q, S, B), {"mode": "fp4"}),
        ("argument 'w' must be packed uint32 from `quantize`, got float32", (X, W, S, B), {}),
        ("argument 'w' of shape .* does not fit D = 128 with bits = 8", (X, Q, S, B), {"bits": 8}),
        ("argument 'w' of shape .* does not fit D = 120", (X[:, :120], Q, S, B), {}),
        ("argument 'scales' of shape .* does not fit D = 128 with group_size = 64", (X, Q, S, B), {"group_size": 64}),
        ("argument 'bits' = 2 is not valid for mode 'nf4'", (X, Q[:8], S), {"mode": "nf4"}),
        ("argument 'biases': mode 'affine' needs 'biases', or 'zeros'", (X, Q, S), {}),
        ("argument 'biases': mode 'nf4' has neither", (X, Q, S, B), {"mode": "nf4"}),
        ("arguments 'biases' and 'zeros' are equivalent", (X, Q, S, B), {"zeros": B}),
        ("argument 'biases' must have the shape of 'scales'", (X, Q, S, B[:1]), {}),
        ("argument 'scales' of mode 'affine' must be float, got uint8", (X, Q, MX[1], B), {}),
        ("argument 'w' must be an array returned by `quantize`", (X, Q[:, :0], S[:, :0], B[:, :0]), {}),
        ("argument 'scales' of mode 'mxfp4' must be uint8, got float32", (X, Q, S), {"mode": "mxfp4"}),
    ],
)
def test_a_wrong_call_is_a_value_error(said, args, options):
    for function in (quantized_matmul, ejdist.quantized_matmul):
        with pytest.raises(ValueError, match=f"quantized_matmul: {said}"):
            function(*args, **options)


def test_the_public_functions():
    assert kernels.quantized_matmul is quantized_matmul and kernels.operations()["quantized_matmul"] is op
    assert ejdist.quantize is quantize and ejdist.dequantize is dequantize
    np.testing.assert_array_equal(ejdist.QuantizedMatmul()(X, Q, S, B), quantized_matmul(X, Q, S, B))
