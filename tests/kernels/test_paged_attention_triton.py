"""Attention over pages in Triton: against XLA's engine through the interpreter, what is written, and its code."""

import functools
import itertools
import re
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kernels
from kernels.engines.attention import triton_paged_calls as calls
from kernels.engines.attention.triton_paged_plan import Paged, tiles_of
from kernels.framework.interpret import interpret
from kernels.ops.paged_attention import (
    PagedAttentionConfig,
    append_and_attend_op,
    append_op,
    decode_op,
    lse_op,
    op,
    page_op,
)
from kernels.toolchains.simulate import ahead_of_time as checks
from kernels.toolchains.triton import triton_launch

# Tiles so small that requests have several, of both kinds, and keys are split over programs.
SMALL = PagedAttentionConfig(
    block_k=16, parallel=12, num_warps=4, num_stages=2, mixed_rows=16, mixed_block_k=16, mixed_num_warps=4,
    mixed_num_stages=2,
)  # fmt: skip
FLOAT32 = 3e-6


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Splits keys into pieces of one block where these are few, and merges them in few programs."""
    monkeypatch.setattr(calls, "LEAST_KEYS", 1)
    monkeypatch.setattr(calls, "ROWS", {16: 8})


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# -- random batches -----------------------------------------------------------------------------------------------------

M, N, K, H, PAGES, C, REQUESTS, LONGEST = 20, 4, 2, 8, 16, 8, 4, 4
RNG = np.random.default_rng(0)
# Each with other options; the program is compiled once, and lengths are data.
OPTIONS = (
    {"cache": "float32"},
    {"cache": "float32", "window": (9, None), "logits_soft_cap": 2.0, "softmax_aux": normal(RNG, N, 2)},
    {"cache": "int8", "alibi_slopes": np.abs(normal(RNG, N)), "softmax_aux": normal(RNG, N, 1)},
    {"cache": "float8_e4m3fn", "causal": False, "window": (11, 3), "softmax_scale": 0.3},
    {"cache": "float8_e5m2", "window": (0, 0), "alibi_slopes": normal(RNG, N)},
)


@functools.cache
def serving(index, platform):
    options = {n: x for n, x in OPTIONS[index].items() if n != "cache"}
    options |= {"cfg": SMALL} if platform == "triton" else {}

    @jax.jit
    def run(arrays):
        return append_and_attend_op(**arrays, **options, platform=platform)

    return run


def arguments_of(seed, index, cuts, lens):
    """Returns a batch: pages of random bits (NaNs among them), of which only the keys of requests are numbers."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(OPTIONS[index]["cache"])
    tables = rng.permutation(PAGES)[: REQUESTS * LONGEST].reshape(REQUESTS, LONGEST).astype(np.int32)
    used = np.zeros((PAGES, C), bool)
    for table, n in zip(tables, lens):
        for p in range(n):
            used[table[p // C], p % C] = True
    arrays = {}
    for name in ("key_cache", "value_cache"):
        bits = rng.integers(0, 256, (PAGES, C, K, H, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        arrays[name] = np.where(used[..., None, None], (3 * normal(rng, PAGES, C, K, H)).astype(dtype), bits)
    if dtype.itemsize == 1:
        shapes = ((1, 1, K), (PAGES, C, K)) if index == 2 else ((PAGES, 1, K), (1, 1, 1))
        arrays |= {n: (0.1 + rng.random(s)).astype(np.float32) for n, s in zip(("k_scale", "v_scale"), shapes)}
    arrays |= {n: normal(rng, M, heads, H) for n, heads in (("query", N), ("key", K), ("value", K))}
    integers = {"query_start_loc": [0, *cuts], "kv_lens": lens, "block_tables": tables}
    return arrays | {n: np.int32(x) for n, x in integers.items()}


def check_random(seed, index, cuts, lens):
    """The outputs and new rows are those of XLA's engine, and slots that are not written keep their bits."""
    lens = [max(n, b - a) for n, (a, b) in zip(lens, itertools.pairwise([0, *cuts]))]
    arrays = arguments_of(seed, index, cuts, lens)
    wanted, *caches = serving(index, "xla")(arrays)
    with interpret():
        got, *after = serving(index, "triton")(arrays)
    np.testing.assert_allclose(got, wanted, atol=3e-5, rtol=1e-4)
    written = np.zeros((PAGES, C), bool)
    for table, n, (begin, end) in zip(arrays["block_tables"], lens, itertools.pairwise([0, *cuts])):
        for p in range(n - (end - begin), n):
            written[table[p // C], p % C] = True
    for name, a, b in zip(("key_cache", "value_cache"), after, caches, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a[~written].tobytes() == arrays[name][~written].tobytes()
        assert a[written].tobytes() == b[written].tobytes()


CALL = {
    "seed": st.integers(0, 2**31),
    # Where requests begin and end: some are empty, some have one query, and the last rows may be of none.
    "cuts": st.lists(st.integers(0, M), min_size=REQUESTS, max_size=REQUESTS).map(sorted),
    "lens": st.lists(st.integers(0, LONGEST * C), min_size=REQUESTS, max_size=REQUESTS),
}


@pytest.mark.slow  # a batch of every kind is quick in test_ops.py
@pytest.mark.parametrize("index", range(5))
@given(**CALL)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_batches(index, seed, cuts, lens):
    check_random(seed, index, cuts, lens)


@pytest.mark.slow
@given(index=st.integers(0, len(OPTIONS) - 1), **CALL)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_500_random_batches(index, seed, cuts, lens):
    check_random(seed, index, cuts, lens)


# -- pieces, NaN, bits ----------------------------------------------------------------------------------------------------


def rows_of(rng, B, T, S, lens, dtype="float32", page=8):
    pages = S // page * B
    tables = rng.permutation(pages).reshape(B, -1).astype(np.int32)
    x = {n: jnp.asarray(normal(rng, pages, page, K, H), dtype) for n in ("key_cache", "value_cache")}
    return x | {"query": jnp.asarray(normal(rng, B, T, N, H), dtype), "kv_lens": np.int32(lens), "block_tables": tables}


@pytest.mark.parametrize("T", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_pieces_are_merged_exactly(T):
    """However keys are split, by how many programs; and the same bits twice."""
    a = rows_of(np.random.default_rng(1), 3, T, 160, [160, 17, 0])
    wanted = page_op(**a, platform="xla")
    run = functools.partial(page_op, **a, platform="triton")
    for programs in (1, 6, 64):
        cfg = PagedAttentionConfig(block_k=16, parallel=programs, num_warps=4, num_stages=2)
        with interpret():
            got = run(cfg=cfg)
        assert error(got, wanted) <= FLOAT32
    with interpret():
        assert np.asarray(run(cfg=cfg)).tobytes() == np.asarray(got).tobytes()


@pytest.mark.parametrize("T", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_the_lse_is_that_of_all_pieces_and_sinks(T):
    """Of tiles that are split and of those that are not, and -inf of queries without keys or sinks; few queries and many. One
    request is longer than its table, as on a rank that has its first keys."""
    a = rows_of(np.random.default_rng(6), 3, T, 160, [165, 17, 0])
    sinks = {"softmax_aux": jnp.asarray(normal(np.random.default_rng(7), N, 1), "float32")}
    for more, programs in (({}, 1), (sinks, 64)):
        wanted = lse_op(**a, **more, window=(60, None), platform="xla")
        cfg = PagedAttentionConfig(block_k=16, parallel=programs, num_warps=4, num_stages=2)
        with interpret():
            got = lse_op(**a, **more, window=(60, None), platform="triton", cfg=cfg)
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    cfg = PagedAttentionConfig(mixed_num_warps=12)
    with interpret(), pytest.raises(ValueError, match=r"mixed_num_warps = 12 .* returns no lse over pages; use 4 or 8"):
        lse_op(**a, platform="triton", cfg=cfg)


@pytest.mark.slow  # one form more of the count
def test_requests_are_counted_a_few_at_a_time(monkeypatch):
    """More requests than are summed at once: a piece of each part of them."""
    monkeypatch.setattr(calls, "REQUESTS", 2)
    a = rows_of(np.random.default_rng(2), 5, 1, 48, [48, 0, 17, 33, 5])
    wanted = page_op(**a, platform="xla")
    with interpret():
        got = page_op(**a, platform="triton", cfg=PagedAttentionConfig(16, 16, 12, 4, 2))
    assert error(got, wanted) <= FLOAT32


def test_nan_of_one_request_is_in_the_output_of_no_other():
    a = rows_of(np.random.default_rng(3), 3, 1, 32, [32, 20, 9])
    a["value_cache"] = a["value_cache"].at[a["block_tables"][1, 2], 3].set(jnp.nan)  # its last key
    a["key_cache"] = a["key_cache"].at[a["block_tables"][2, 1], 1].set(jnp.nan)  # past its last one
    with interpret():
        out = np.asarray(page_op(**a, platform="triton", cfg=PagedAttentionConfig(16, 16, 12, 4, 2)))
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_numbers_of_pages_that_are_not_there_read_nothing_else():
    """Past the last page in use a table may hold anything; before, a number is that of the nearest page, as in the contract."""
    a = rows_of(np.random.default_rng(4), 2, 1, 32, [9, 25])
    a["block_tables"][0, 2:] = 2**31 - 1, -(2**31)
    a["block_tables"][1, :2] = 8, -1  # of 8 pages
    wanted = page_op(**a, platform="xla")
    with interpret():
        assert error(page_op(**a, platform="triton"), wanted) <= FLOAT32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_of_8_bits(dtype):
    """Infinities and NaN too: each is the value of a key of its own, in a request of one key."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).reshape(4, 8, 1, 8)
    rows = {"query": np.zeros((32, 1, 1, 8), np.float32), "key_cache": np.zeros_like(numbers), "value_cache": numbers}
    rows = {n: x.reshape(32, 1, 1, 8) for n, x in rows.items()}
    with interpret():
        got = decode_op(**rows, kv_lens=np.ones(32, np.int32), platform="triton")
    np.testing.assert_array_equal(np.asarray(got).reshape(-1), numbers.astype(np.float32).reshape(-1))


@pytest.mark.parametrize(
    ("dtype", "queries"),
    [
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("float16", 1, marks=pytest.mark.slow),
        ("bfloat16", 9),
    ],
)
def test_int8_is_multiplied_as_float16_without_rounding(dtype, queries):
    """Each number is the value of a key of its own, and then a factor of a key: outputs and weights are those of exact ones.
    Rows of queries are of any size, above float16's range too; few of them meet int8 keys as two int8."""
    numbers = np.arange(-128, 128, dtype=np.int8).reshape(32, 1, 1, 8)
    ones = {n: np.ones((1, 1, 1), np.float32) for n in ("k_scale", "v_scale")}
    zeros = {"query": jnp.zeros((32, 1, 1, 8), dtype), "key_cache": np.zeros_like(numbers), "value_cache": numbers}
    with interpret():
        got = decode_op(**zeros, **ones, kv_lens=np.ones(32, np.int32), platform="triton")
    np.testing.assert_array_equal(np.asarray(got, np.float32).reshape(-1), numbers.astype(np.float32).reshape(-1))
    rng = np.random.default_rng(7)
    size = np.float32([3.0, 2.0**-12, 2.0**100 if dtype == "bfloat16" else 2.0**12, 0.0])
    query = jnp.asarray(normal(rng, 4, queries, N, H) * size[:, None, None, None], dtype)
    a = {n: rng.integers(-128, 128, (4, 56, K, H)).astype(np.int8) for n in ("key_cache", "value_cache")}
    small = 0.3 / np.where(size == 0, 1, size)[:, None, None]
    scales = {"k_scale": small * np.ones((4, 56, K), np.float32), "v_scale": ones["v_scale"]}
    where = {"kv_lens": np.int32([56, 7, 33, 48]), "kv_starts": np.int32([3, 0, 16, 30]), "window": (45, None)}
    with interpret():
        cfg = PagedAttentionConfig(None, 16, 12, 4, 2, 32, 16, 4, 2)
        got = decode_op(query, **a, **where, **scales, cfg=cfg, platform="triton")
    exact = {n: x.astype(np.float32) * scales[f"{n[0]}_scale"][..., None] for n, x in a.items()}
    wanted = decode_op(query.astype(jnp.float32), **exact, **where, platform="xla")
    assert error(got, wanted) <= 3e-3  # of the output and of the weights in 16 bits


# -- code -------------------------------------------------------------------------------------------------------------------


def decoding(B, S, page, dtype, T=1):
    shape, pages = jax.ShapeDtypeStruct, (B * S // page, page, 8, 128)
    a = {"query": shape((B, T, 32, 128), jnp.bfloat16), "kv_lens": shape((B,), jnp.int32)}
    return a | {
        "key_cache": shape(pages, dtype),
        "value_cache": shape(pages, dtype),
        "block_tables": shape((B, S // page), jnp.int32),
    }


@pytest.mark.slow  # compiled; the numbers are quick
def test_a_decode_step_keeps_several_blocks_of_keys_on_their_way():
    """Loads are of 16 bytes and asynchronous, and the last ones are not waited for; three programs share a multiprocessor."""
    run = functools.partial(page_op, platform="triton")
    attend, merge = checks.export_cuda(lambda a: run(**a), decoding(64, 8192, 16, jnp.bfloat16)).kernels
    assert (attend.name, merge.name) == ("paged_kernel", "paged_merge_kernel")
    assert attend.resources["spill_stores"] == merge.resources["spill_stores"] == 0
    wide = re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,", attend.ptx)
    assert len(wide) >= 2 * 16, "a thread of four warps copies keys and values of a block in 16 pieces"
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", attend.ptx)]
    assert max(waits) >= 2, waits
    assert attend.resources["registers"] <= 168 and attend.shared_memory_bytes <= 75 * 1024


@pytest.mark.slow
def test_gpus_without_8_bit_floats_take_their_bits():
    """Triton has e4m3 from compute capability 89 on."""
    shape = jax.ShapeDtypeStruct
    pages = shape((8, 16, 1, 16), jnp.float8_e4m3fn)
    new, slots = shape((2, 1, 16), jnp.bfloat16), shape((2,), jnp.int32)

    def step(new, slots, keys, values, tables):
        keys, values = append_op(new, new, slots, keys, values, platform="triton")
        return page_op(new[:, None], keys, slots, tables, values, platform="triton"), keys

    report = checks.export_cuda(step, new, slots, pages, pages, shape((2, 4), jnp.int32), compute_capability=80)
    assert [k.name for k in report.kernels] == ["append_kernel", "paged_kernel"]


def test_a_step_of_generation():
    """Pages of all layers in one array, without `platform=`."""
    shape, pages = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((64, 16, 2, 64), jnp.bfloat16)
    new = shape((4, 2, 64), jnp.bfloat16)

    def step(keys, values, new, slots, query, lens, tables):
        keys, values = kernels.append_to_cache(new, new, keys, values, slots)
        return kernels.page_attention(query, keys, values, lens, tables), keys, values

    integers = [shape(s, jnp.int32) for s in ((4,), (4,), (4, 8))]
    report = checks.export_cuda(step, pages, pages, new, integers[0], shape((4, 1, 8, 64), jnp.bfloat16), *integers[1:])
    assert [k.name for k in report.kernels] == ["append_kernel", "paged_kernel", "paged_merge_kernel"]


def test_rows_are_written_in_the_caches_own_memory():
    """In a scan over layers that carries the pages of all of them, what leaves the kernel is what enters it, and nothing else
    makes an array as large. That XLA then copies nothing is tested on GPUs."""
    layers, shape = 3, (3 * 40, 16, 2, 16)
    pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((layers, 4, 2, 16), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(keys, values, rows, slots):
        def layer(carry, x):
            row, new = x
            return append_op(new, new, slots + row * 640, *carry, platform="triton"), ()

        return jax.lax.scan(layer, (keys, values), (jnp.arange(layers), rows))[0]

    report = checks.export_cuda(step, pages, pages, rows, slots)
    text = str(report.exported.mlir_module())
    large = "tensor<" + "x".join(map(str, shape)) + "xbf16>"
    [call] = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    for output, operand in ((0, 3), (1, 4)):
        alias = f"output_tuple_indices = [{output}], operand_index = {operand}"
        assert alias in call, call
    makers = [
        line for line in text.splitlines() if re.search(rf"-> \(?{re.escape(large)}", line) and "func.func" not in line
    ]
    assert makers and all("call @" in line or "@triton_kernel_call" in line for line in makers), makers


# -- what else decides ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, (30, None)])
def test_tall_tiles_skip_the_mask_of_blocks_that_all_queries_see(window):
    rng = np.random.default_rng(5)
    a = rows_of(rng, 2, 24, 96, [96, 45])
    options = {} if window is None else {"window": window}
    wanted = page_op(**a, **options, platform="xla")
    cfg = replace(SMALL, mixed_rows=32, parallel=8)
    with interpret():
        got = page_op(**a, **options, platform="triton", cfg=cfg)
    assert error(got, wanted) <= FLOAT32


def test_one_instance_serves_each_request():
    """A batch with both kinds is served by both, and neither computes what the other does."""
    base = calls.Paged(
        **{f.name: 1 for f in fields(calls.Paged)} | {"M": 64, "R": 3, "T": None, "N": 4, "K": 2, "C": 16, "LONGEST": 8}
    )
    few, many = calls.Tile(16, 16, 4, 2), calls.Tile(32, 16, 4, 2)
    for most in (64, 20):  # longer ones are left to another kernel
        (short, _), (tall, _) = calls.instances(base, few, many, 8, most)
        assert (short.LEAST, short.MOST, tall.LEAST, tall.MOST) == (1, 8, 9, most)
    rng = np.random.default_rng(6)
    cache = {n: normal(rng, 12, 16, K, H) for n in ("key_cache", "value_cache")}
    a = cache | {
        "query": normal(rng, 24, N, H),
        "query_start_loc": np.int32([0, 12, 13]),
        "kv_lens": np.int32([33, 20]),
    }
    a |= {"block_tables": np.arange(12, dtype=np.int32).reshape(2, 6)}
    seen = []

    def counted(*arguments, **options):
        seen.append(options["O"])
        return launch(*arguments, **options)

    launch, calls.triton_launch = calls.triton_launch, counted
    try:
        with interpret():
            got = op(**a, platform="triton", cfg=SMALL)
    finally:
        calls.triton_launch = launch
    assert error(got, op(**a, platform="xla")) <= FLOAT32
    assert [o.MOST for o in dict.fromkeys(seen)] == [8, 24]
    tiles = functools.partial(tiles_served, a["query_start_loc"], a["kv_lens"])
    assert [tiles(o) for o in dict.fromkeys(seen)] == [[0, 1], [2, 0]]


def tiles_served(cuts, lens, o):
    """Returns how many tiles an instance has of each request, through the interpreter."""

    @triton.jit
    def kernel(cuts_ptr, lens_ptr, tiles_ptr, O: tl.constexpr):
        r = tl.arange(0, 2)
        tl.store(tiles_ptr + r, tiles_of(cuts_ptr, lens_ptr, None, r, O)[0])

    with interpret():
        return triton_launch(
            kernel, cuts, lens, out_shape=jax.ShapeDtypeStruct((2,), jnp.int32), grid=(1,), O=o
        ).tolist()


def test_rows_without_a_slot_are_not_written():
    rng = np.random.default_rng(7)
    cache, new = normal(rng, 3, 4, K, H), normal(rng, 5, K, H)
    a = {
        "key": new,
        "value": -new,
        "slots": np.int32([2, -1, 12, 200, 7]),
        "key_cache": cache,
        "value_cache": -cache,
    }
    with interpret():
        got = append_op(**a, platform="triton")
    for x, w in zip(got, append_op(**a, platform="xla"), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(w).tobytes()


def test_the_tile_of_a_merge(monkeypatch):
    """A program of one long request has all of its pieces, and few columns."""
    monkeypatch.undo()
    paged = {"M": 1, "R": 1, "T": 1, "N": 16, "K": 1, "H": 512, "HV": 512, "C": 64, "PAGES": 512, "LONGEST": 512}
    paged |= {"K_WIDTH": 576, "V_WIDTH": 576, "V_FIRST": 0, "KIND": 0, "HALVES": False, "K_SCALES": (0, 0, 0)}
    paged |= {
        "V_SCALES": (0, 0, 0),
        "SCALE": 1.0,
        "CAP": None,
        "LOW": None,
        "HIGH": 0,
        "SINKS": 0,
        "LEAST": 1,
        "MOST": 1,
    }
    paged |= {"FILLS": 0, "PIECES": 128, "LEAST_BLOCKS": 1, "QUERIES": 1, "ROWS": 16, "BLOCK_M": 16, "BLOCK_K": 64}
    paged |= {"BLOCK_H": 512, "BLOCK_V": 512, "BLOCK_R": 1}
    one = Paged(**paged)
    assert calls.merge_tile(one) == (1, 128, 32)
    assert calls.merge_tile(replace(one, LONGEST=64)) == (1, 64, 64)
    few = replace(one, M=64, R=64, LONGEST=128)
    assert calls.merge_tile(few) == (2, 4, 512)
    assert calls.merge_tile(replace(few, N=64, ROWS=64, BLOCK_M=64)) == (2, 4, 512)
    assert calls.merge_tile(replace(few, N=64, ROWS=64, BLOCK_M=64, HV=128, BLOCK_V=128)) == (1, 32, 128)
    assert calls.merge_tile(replace(one, BLOCK_M=128)) == (8, 4, 128)
