"""grouped_matmul's Triton and Pallas kernels, interpreted: several tiles of each dim, ragged ends, and the map of tiles."""

import itertools
from dataclasses import replace

import hopper_products
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.framework.execute import Saved
from kernels.framework.interpret import interpret
from kernels.ops.grouped_matmul import grouped_matmul, op, quantized_op, triton_gpu
from kernels.ops.grouped_matmul.contract import ACTIVATIONS, GroupedMatmulConfig, Tile
from kernels.toolchains.simulate import ahead_of_time as checks

TRITON = Tile(32, 32, 16, 4, 2, 3, 2, True)
PALLAS = Tile(16, 128, 128)
CONFIGS = {
    "triton": GroupedMatmulConfig(TRITON, TRITON, TRITON),
    "pallas": GroupedMatmulConfig(PALLAS, PALLAS, Tile(128, 128, 16)),
}
# Of 5 groups, of which the matrices are those of 4, the last or the first; 6 rows more are of none.
SIZES = (37, 0, 1, 50, 6)


def arguments(dtype, D, F, *, sizes=SIZES, offset=None, gated=False, transposed=False, bias=False, experts=5, rows=100):
    rng = np.random.default_rng(0)
    shape = (experts, D, 2, F) if gated else (experts, D, F)
    rhs = rng.standard_normal(shape) / np.sqrt(D)
    made = {"lhs": rng.standard_normal((rows, D)), "rhs": np.moveaxis(rhs, 1, -1) if transposed else rhs}
    made |= {"rhs_bias": rng.standard_normal((experts, *shape[2:]))} if bias else {}
    floats = {n: jnp.asarray(x, dtype) for n, x in made.items()}
    others = {"group_sizes": jnp.asarray(sizes, jnp.int32)}
    return floats, others if offset is None else {**others, "group_offset": jnp.int32(offset)}


def run(platform, floats, others, transposed=False, cfg=None, **options):
    """Returns the result and the gradients by name for a cotangent of cosines."""

    @jax.jit
    def both(floats, others):
        def forward(floats):
            rest = {n: x for n, x in floats.items() if n != "rhs"}
            rhs = (None, floats["rhs"]) if transposed else (floats["rhs"], None)
            return op(rhs=rhs[0], rhs_transposed=rhs[1], platform=platform, cfg=cfg, **rest, **others, **options)

        out, pull = jax.vjp(forward, floats)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))[0]

    with interpret():
        out, grads = both(floats, others)
    return {"out": out, **grads}


def check(platform, dtype, D, F, *, activation=None, transposed=False, empty_rows=None, **how):
    floats, others = arguments(dtype, D, F, transposed=transposed, **how)
    wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
    want = run("xla", wide, others, transposed, activation=activation)
    if empty_rows is not None:  # what is in a row of no group is nobody's business
        floats["lhs"] = floats["lhs"].at[empty_rows].set(jnp.nan)
    got = run(platform, floats, others, transposed, CONFIGS[platform], activation=activation)
    for name in want:
        assert error(got[name], want[name]) < FLOOR[dtype], name
    return got


CALLS = {
    "plain": {"D": 48, "F": 80, "empty_rows": slice(94, None)},
    "gated, offset": {"D": 32, "F": 40, "gated": True, "bias": True, "activation": "silu", "offset": 1, "experts": 4},
    "transposed": {"D": 48, "F": 72, "transposed": True, "activation": "gelu_tanh", "offset": 0, "experts": 3},
    "gated, transposed": {"D": 48, "F": 32, "gated": True, "transposed": True, "activation": "relu"},
    "odd": {"D": 35, "F": 41, "bias": True, "activation": "relu"},
}
QUICK = {("triton", "gated, offset"), ("pallas", "gated, offset")}


@pytest.mark.parametrize(
    ("platform", "name"),
    [pytest.param(p, n, marks=() if (p, n) in QUICK else pytest.mark.slow) for p in CONFIGS for n in CALLS],
)
def test_several_tiles(platform, name):
    """bfloat16, so that tiles of whole 16 bytes go the way of TMA."""
    check(platform, "bfloat16", **CALLS[name])


@pytest.mark.parametrize("platform", ["triton", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_wide_matrix_in_float32(platform):
    """Several blocks of the contracted dim, the last of them part of one."""
    check(platform, "float32", 140, 150, sizes=(3, 0, 20), experts=3, rows=24)


@pytest.mark.parametrize("platform", ["triton", pytest.param("pallas", marks=pytest.mark.slow)])
def test_nan_stays_nan(platform):
    """So that a guard of a run sees it."""
    lhs, rhs, sizes = jnp.zeros((8, 16)).at[1, 3].set(jnp.nan), jnp.ones((2, 16, 16)), jnp.array([4, 4])
    with interpret():
        for activation in set(ACTIVATIONS) - ({"gelu"} if platform == "pallas" else set()):
            found = grouped_matmul(lhs, rhs, sizes, activation=activation, platform=platform)
            assert jnp.isnan(found[1]).all() and not jnp.isnan(found[2:]).any()


@pytest.mark.parametrize("platform", ["triton", pytest.param("pallas", marks=pytest.mark.slow)])
def test_no_rows_in_any_group(platform):
    got = check(platform, "bfloat16", 16, 16, sizes=(0, 0), experts=2, rows=20, empty_rows=slice(None))
    assert not any(np.asarray(x, np.float32).any() for x in got.values())


# -- warps that load, multiply and write -------------------------------------------------------------------------------


def kernels_of(monkeypatch, target=90, M=1024, E=4, D=128, F=192, *, dtype="bfloat16", specialised=None, **how):
    """Returns the names of the kernels of products that a forward and a backward launch."""
    from kernels.ops.grouped_matmul import triton_gpu as gpu
    from kernels.toolchains.simulate.compile_for import compile_for

    names, launch, backend = [], gpu.triton_launch, op.backends["triton_gpu"]

    def recorded(kernel, *args, **named):
        names.append(kernel.fn.__name__)
        return launch(kernel, *args, **named)

    gated, transposed, bias = (how.get(n, False) for n in ("gated", "transposed", "bias"))
    shape = (E, D, 2, F) if gated else (E, D, F)
    shape = (E, *shape[2:], D) if transposed else shape
    weights, out = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((M, F), dtype)
    given = {"lhs": jax.ShapeDtypeStruct((M, D), dtype), "rhs": weights, "rhs_transposed": None}
    given |= {"rhs": None, "rhs_transposed": weights} if transposed else {}
    given |= {"group_sizes": jax.ShapeDtypeStruct((E,), "int32"), "group_offset": None}
    given["rhs_bias"] = jax.ShapeDtypeStruct((E, 2, F) if gated else (E, F), dtype) if bias else None
    options = {"activation": "silu" if gated else None}
    cfg = gpu.heuristic(op.bind(**given, **options), "cuda")
    if specialised is not None:
        cfg = GroupedMatmulConfig(*(replace(t, specialised=specialised) for t in (cfg.forward, cfg.d_lhs, cfg.d_rhs)))

    def both(given, d):
        backend.forward(**given, **options, cfg=cfg)
        return backend.backward(Saved(d_out=d), **given, **options, cfg=cfg)

    with monkeypatch.context() as patch, compile_for(target):
        patch.setattr(gpu, "triton_launch", recorded)
        jax.eval_shape(both, given, out)
    return [n.removesuffix("_kernel") for n in names if n not in ("tile_map_kernel", "group_sum_kernel")]


@pytest.mark.parametrize(
    ("M", "D", "F", "E", "wanted"),
    [
        (13952, 3968, 960, 72, ("wide", "wide", "wide")),  # few rows per group: half of a tall tile would be padding
        # 1064 columns are 9 tiles of 128, or 5 of 256; as rows that are read they are no whole lines of the cache.
        (39565, 1024, 1064, 16, ("tall", "wide", "tall")),
        (27392, 896, 3840, 128, ("wide", "wide", "wide")),
        (65536, 2048, 768, 32, ("tall", "tall", "wide")),  # nothing to choose between but speed
        (3200, 2048, 768, 32, ("wide", "wide", "tall")),
        (1504, 2048, 768, 32, ("none", "none", "none")),  # 47 rows per group
    ],
)
def test_a_specialised_tile_is_the_one_with_less_padding(M, D, F, E, wanted):
    x, weights = jax.ShapeDtypeStruct((M, D), "bfloat16"), jax.ShapeDtypeStruct((E, D, F), "bfloat16")
    sizes = jax.ShapeDtypeStruct((E,), "int32")
    cfg = op.backends["triton_gpu"].heuristic(
        op.bind(lhs=x, rhs=weights, group_sizes=sizes, rhs_transposed=None, group_offset=None, rhs_bias=None), "cuda"
    )
    assert tuple(tile.specialised for tile in (cfg.forward, cfg.d_lhs, cfg.d_rhs)) == wanted


PLAIN = ["grouped_matmul", "grouped_matmul", "ragged_contraction"]
WARP_SPECIALIZED = ["warp_specialized_matmul", "warp_specialized_matmul", "warp_specialized_contraction"]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, WARP_SPECIALIZED),
        ({"dtype": "float16", "transposed": True}, WARP_SPECIALIZED),
        ({"specialised": "wide"}, WARP_SPECIALIZED),
        ({"specialised": "none"}, PLAIN),
        ({"target": 80}, PLAIN),
        ({"target": 100}, PLAIN),  # wgmma is Hopper's alone
        ({"dtype": "float32"}, PLAIN),
        ({"M": 180}, PLAIN),  # short groups
        ({"M": 400, "gated": True}, [PLAIN[0], PLAIN[0], *WARP_SPECIALIZED[1:]]),  # too short for a gate
        ({"F": 100}, PLAIN),  # rows that begin anywhere
        ({"F": 200}, WARP_SPECIALIZED),  # a contracted dim that is not of whole steps
        ({"bias": True}, WARP_SPECIALIZED),
        ({"gated": True}, [WARP_SPECIALIZED[0], *WARP_SPECIALIZED]),
        ({"gated": True, "bias": True, "transposed": True}, [WARP_SPECIALIZED[0], *WARP_SPECIALIZED]),
        ({"gated": True, "D": 96}, [WARP_SPECIALIZED[0], *WARP_SPECIALIZED]),
        ({"gated": True, "target": 80}, [PLAIN[0], *PLAIN]),
    ],
    ids=str,
)
def test_which_products_have_specialised_warps(monkeypatch, how, wanted):
    assert kernels_of(monkeypatch, **how) == wanted


def test_nothing_is_specialised_where_kernels_are_interpreted(monkeypatch):
    with interpret():
        assert kernels_of(monkeypatch, M=1024, E=1, D=64, F=64) == PLAIN


# tests/test_code.py compiles the tall tiles, without a gate.
COMPILED: set[tuple] = set()  # tests/test_code.py compiles a layer's products


@pytest.mark.parametrize(
    ("specialised", "transposed", "activation"),
    [
        pytest.param(*how, marks=() if how in COMPILED else pytest.mark.slow)
        for how in itertools.product(("wide", "tall"), (False, True), (None, *ACTIVATIONS))
    ],
)
def test_specialised_warps_are_compiled(specialised, transposed, activation):
    """Columns that end in half of a tile, so that all bodies are there, with an activation those of a gate and a bias.
    Registers are those that the kernels share out. What spills is 13 values at most: tests/test_code.py says where."""
    kernels = compiled(specialised, transposed, activation)
    names = [kernel.name.removesuffix("_kernel") for kernel in kernels]
    assert names == ([WARP_SPECIALIZED[0]] if activation else []) + WARP_SPECIALIZED
    for kernel in kernels:
        assert kernel.num_warps == 12 and "setmaxnreg" in kernel.ptx and "wgmma.mma_async" in kernel.ptx
        assert kernel.resources["registers"] == 168 and kernel.resources["spill_stores"] <= 52, kernel.resources
        assert not kernel.resources["serialized"]


@pytest.mark.slow  # the CUDA compiler; tests/test_code.py compiles a layer's products
def test_plain_products_of_a_gate_and_an_up_projection_overlap():
    """Of groups too short for specialised warps: products of two sums in one loop would wait for one another (C7515)."""
    forward, *_ = compiled(None, False, "silu", rows=64)
    assert forward.name == "grouped_matmul_kernel" and "wgmma.mma_async" in forward.ptx
    assert not forward.resources["serialized"]


def compiled(specialised, transposed, activation, rows=512):
    """Returns the kernels of products of 4 groups of so many rows, forward and backward, as they are for Hopper."""

    def both(lhs, rhs, bias, sizes):
        def forward(lhs, rhs, bias):
            weights = (None, rhs) if transposed else (rhs, None)
            return op(lhs, *weights, sizes, None, bias, activation=activation, platform="triton", cfg=cfg)

        out, pull = jax.vjp(forward, lhs, rhs, bias)
        return out, pull(jnp.ones_like(out))

    cfg = None if specialised is None else GroupedMatmulConfig(*[Tile(specialised=specialised)] * 3)
    columns = (2, 320) if activation else (320,)
    shapes = ((4 * rows, 320), (4, *columns, 320) if transposed else (4, 320, *columns), (4, *columns), (4,))
    dtypes = ("bfloat16", "bfloat16", "bfloat16", "int32")
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    report = checks.export_cuda(both, *arguments, compute_capability=90).kernels
    return [kernel for kernel in report if kernel.name not in ("tile_map_kernel", "group_sum_kernel")]


# -- 8-bit weights -----------------------------------------------------------------------------------------------------


def quantised(platform, codes, scale, floats, others, transposed, **options):
    """Returns the result, and the gradients by name for a cotangent of cosines."""

    @jax.jit
    def both(floats, codes, scale, others):
        def forward(floats):
            rhs = {"rhs": None, "rhs_transposed": codes} if transposed else {"rhs": codes, "rhs_transposed": None}
            return quantized_op(**floats, **rhs, rhs_scale=scale, platform=platform, **others, **options)

        out, pull = jax.vjp(forward, floats)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))[0]

    with interpret():
        out, grads = both(floats, codes, scale, others)
    return {"out": out, **grads}


EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize(
    ("platform", "code", "how"),
    [
        pytest.param(
            platform, code, how, marks=() if (platform, code, how) == ("triton", "int8", "gated") else pytest.mark.slow
        )
        for platform in ("triton", "pallas")
        for code in EIGHT_BITS
        for how in ("gated", "transposed", "odd")
    ],
)
def test_eight_bit_weights(platform, code, how):
    """Against the weights times their scales in float32, which the other backend multiplies."""
    made = {
        "gated": {"D": 64, "F": 48, "gated": True, "bias": True},
        "transposed": {"D": 48, "F": 64, "transposed": True},
        "odd": {"D": 19, "F": 21, "bias": True},
    }[how]
    activation, transposed = ("silu" if how == "gated" else None), how == "transposed"
    floats, others = arguments("float32", **made)
    rhs = np.asarray(floats.pop("rhs"))
    D_at = -1 if transposed else 1
    scale = np.abs(rhs).max(D_at, keepdims=True) / (127 if code == "int8" else 4)
    codes = jnp.asarray(np.round(rhs / scale) if code == "int8" else rhs / scale).astype(code)
    scale = jnp.asarray(np.moveaxis(scale, D_at, 1))
    floats = {n: x.astype(jnp.bfloat16) for n, x in floats.items()}
    wide = {n: x.astype(jnp.float32) for n, x in floats.items()}
    want = quantised("xla", codes, scale, wide, others, transposed, activation=activation)
    tiles = {"cfg": CONFIGS[platform], "activation": activation}
    got = quantised(platform, codes, scale, floats, others, transposed, **tiles)
    for name in want:
        assert error(got[name], want[name]) < FLOOR["bfloat16"], name


@pytest.mark.parametrize("code", [pytest.param(c, marks=() if "e4" in c else pytest.mark.slow) for c in EIGHT_BITS])
def test_every_code_of_eight_bits(code):
    codes = np.arange(256, dtype=np.uint8).view(code).reshape(1, 16, 16)
    finite = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))
    others, scale = {"group_sizes": jnp.int32([16])}, jnp.ones((1, 1, 16))
    for dtype in ("float32", "bfloat16"):
        floats = {"lhs": jnp.eye(16, dtype=dtype)}
        got = quantised("triton", jnp.asarray(finite), scale, floats, others, False, cfg=CONFIGS["triton"])["out"]
        np.testing.assert_array_equal(np.asarray(got, np.float32), finite[0].astype(np.float32))
    got = quantised("triton", jnp.asarray(codes), scale, floats, others, False, cfg=CONFIGS["triton"])["out"]
    np.testing.assert_array_equal(
        np.isfinite(np.asarray(got, np.float32)).all(0), np.isfinite(codes[0].astype(np.float32)).all(0)
    )


# -- the map of tiles --------------------------------------------------------------------------------------------------


def _maps(sizes, offset, experts, rows, block_m):
    """Every row is in one tile, with the matrix of its group; a tile has rows of one group; the rest are zero rows."""
    from kernels.ops.grouped_matmul.triton_gpu import tile_map

    with interpret():
        where = tile_map(jnp.asarray(sizes, jnp.int32), jnp.int32(offset), rows, experts, block_m)
    tiles, limits = np.asarray(where.tiles), np.asarray(where.bounds)
    group = np.repeat(np.arange(len(sizes)), sizes)[:rows] - offset
    group = np.r_[group, np.full(rows - len(group), -1)]
    group[(group < 0) | (group >= experts)] = -1
    found = np.full(rows, -2)
    begin, end, (products, count), order = np.split(limits, [experts, 2 * experts, 2 * experts + 2])
    assert count <= where.bound
    assert ((tiles[0] >= 0)[:count] == (np.arange(count) < products)).all(), "zeros come last"
    assert sorted(order) == list(range(experts)) and (np.diff((end - begin)[order]) <= 0).all(), (
        "the longest come first"
    )
    for expert, row, stop in tiles[:, :count].T:
        assert row < stop, "a tile without rows"
        mine = slice(row, min(row + block_m, stop))
        assert (found[mine] == -2).all(), "a row in two tiles"
        found[mine] = expert
    np.testing.assert_array_equal(found, group)
    for e in range(experts):
        np.testing.assert_array_equal(np.flatnonzero(group == e), np.arange(begin[e], end[e]))


@st.composite
def maps(draw):
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=9))
    experts = draw(st.integers(1, len(sizes)))
    rows = max(1, sum(sizes) + draw(st.integers(0, 40)))
    return sizes, draw(st.integers(0, len(sizes) - experts)), experts, rows, draw(st.sampled_from([16, 32]))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(maps())
def test_the_map_of_tiles(arguments):
    _maps(*arguments)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(maps())
def test_many_maps_of_tiles(arguments):
    _maps(*arguments)


def test_products_that_are_kept_are_those_of_the_activation_where_no_kernel_is_specialised(monkeypatch):
    monkeypatch.setattr(triton_gpu, "WORTH_KEEPING", 8)
    monkeypatch.setattr(op, "_programs", {})
    matrices = jnp.ones((2, 8, 2, 6), jnp.bfloat16)
    call = op.bind(jnp.ones((5, 8), jnp.bfloat16), matrices, None, jnp.int32([3, 2]), activation="relu")
    assert triton_gpu.keeps(call, None)["products"].shape == (5, 12)
    with interpret(80):
        hopper_products.check("none", 24, 40, "bfloat16", False, None, (30, 0, 20), "relu", gated=True, bias=True)
