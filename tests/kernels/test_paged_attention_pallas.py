"""Attention over pages in Pallas: against XLA's engine through the interpreter, what is written, and its code."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_paged_attention_triton import CALL, FLOAT32, OPTIONS, PAGES, C, H, K, N, arguments_of, normal, rows_of

import kernels
from kernels.engines.attention import pallas_paged_calls as calls
from kernels.engines.attention.pallas_paged_copies import FIELDS, Copies, Paged, Tile
from kernels.framework.interpret import interpret
from kernels.ops.paged_attention import PagedAttentionConfig, append_and_attend_op, append_op, decode_op, page_op
from kernels.toolchains.simulate import ahead_of_time as checks

# Blocks so small that requests have several, and a ring that is used more than once.
SMALL = PagedAttentionConfig(block_k=16, num_stages=3, mixed_rows=8, mixed_block_k=8, mixed_num_stages=2)


@functools.cache
def serving(index, platform):
    options = {n: x for n, x in OPTIONS[index].items() if n != "cache"}
    options |= {"cfg": SMALL} if platform == "pallas" else {}

    @jax.jit
    def run(arrays):
        return append_and_attend_op(**arrays, **options, platform=platform)

    return run


def check_random(seed, index, cuts, lens):
    """The outputs and new rows are those of XLA's engine, and slots that are not written keep their bits."""
    lens = [max(n, b - a) for n, (a, b) in zip(lens, itertools.pairwise([0, *cuts]))]
    arrays = arguments_of(seed, index, cuts, lens)
    wanted, *caches = serving(index, "xla")(arrays)
    with interpret():
        got, *after = serving(index, "pallas")(arrays)
    np.testing.assert_allclose(got, wanted, atol=3e-5, rtol=1e-4)
    written = np.zeros((PAGES, C), bool)
    for table, n, (begin, end) in zip(arrays["block_tables"], lens, itertools.pairwise([0, *cuts])):
        for p in range(n - (end - begin), n):
            written[table[p // C], p % C] = True
    for name, a, b in zip(("key_cache", "value_cache"), map(np.asarray, after), map(np.asarray, caches), strict=True):
        assert a[~written].tobytes() == arrays[name][~written].tobytes()
        assert a[written].tobytes() == b[written].tobytes()


@pytest.mark.slow  # a batch of every kind is quick in test_ops.py
@pytest.mark.parametrize("index", range(5))
@given(**CALL)
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_batches(index, seed, cuts, lens):
    check_random(seed, index, cuts, lens)


@pytest.mark.slow
@given(index=st.integers(0, len(OPTIONS) - 1), **CALL)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_500_random_batches(index, seed, cuts, lens):
    check_random(seed, index, cuts, lens)


def on_pallas(operation, **arguments):
    with interpret():
        return operation(**arguments, platform="pallas")


def compared(operation, allowed=FLOAT32, **arguments):
    wanted = operation(**{n: x for n, x in arguments.items() if n != "cfg"}, platform="xla")
    got = on_pallas(operation, **arguments)
    assert error(got, wanted) <= allowed
    return got


# -- blocks, lists, NaN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_one_product_of_all_heads_and_words_of_two(queries):
    """Pages of bfloat16: tiles of one query take heads as they lie, the others take them apart as halves of words."""
    a = rows_of(np.random.default_rng(1), 3, 3, 48, [48, 17, 0], "bfloat16")
    cfg = SMALL if queries == 1 else replace(SMALL, mixed_rows=4)
    compared(page_op, 1.6e-2, **(a | {"query": a["query"][:, :queries]}), cfg=cfg)


@pytest.mark.slow  # its code is quick, and the contract takes both
@pytest.mark.parametrize("T", [1, 3])
def test_keys_and_values_of_a_head_side_by_side(T):
    """The one cache of `ragged_page_attention_v2`."""
    rng = np.random.default_rng(2)
    a = rows_of(rng, 2, T, 32, [32, 9])
    wanted = page_op(**a, platform="xla")
    joined = jnp.concatenate([a.pop("key_cache"), a.pop("value_cache")], axis=-1)
    assert error(on_pallas(page_op, **a, key_cache=joined, cfg=SMALL), wanted) <= FLOAT32


@pytest.mark.slow  # several launches, which the lse has too
def test_requests_whose_tables_do_not_fit_at_once(monkeypatch):
    monkeypatch.setattr(calls, "TABLE_BYTES", 2 * 6 * 4)
    compared(page_op, **rows_of(np.random.default_rng(2), 5, 1, 48, [48, 0, 17, 33, 5]), cfg=SMALL)


@pytest.mark.slow  # pages of one piece are quick
def test_long_pages_are_copied_in_pieces(monkeypatch):
    monkeypatch.setattr(calls, "MOST_PIECE", 16)
    rng = np.random.default_rng(5)
    compared(page_op, **rows_of(rng, 2, 1, 96, [96, 45], page=32), cfg=SMALL)
    a = {n: normal(rng, 2, 48, K, H) for n in ("key_cache", "value_cache")} | {"query": normal(rng, 2, 2, N, H)}
    a["value_cache"][0, :21] = np.nan  # before the first key
    compared(decode_op, **a, kv_lens=np.int32([48, 13]), kv_starts=np.int32([21, 0]), cfg=SMALL)


def test_nan_of_one_request_is_in_the_output_of_no_other():
    a = rows_of(np.random.default_rng(3), 3, 1, 32, [32, 20, 9])
    a["value_cache"] = a["value_cache"].at[a["block_tables"][1, 2], 3].set(jnp.nan)  # its last key
    for name in ("key_cache", "value_cache"):  # past its last one
        a[name] = a[name].at[a["block_tables"][2, 1], 1].set(jnp.nan)
    out = np.asarray(on_pallas(page_op, **a, cfg=SMALL))
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_numbers_of_pages_that_are_not_there_read_nothing_else():
    """Past the last page in use a table may hold anything; before, a number is that of the nearest page, as in the contract."""
    a = rows_of(np.random.default_rng(4), 2, 1, 32, [9, 25])
    a["block_tables"][0, 2:] = 2**31 - 1, -(2**31)
    a["block_tables"][1, :2] = 8, -1  # of 8 pages
    compared(page_op, **a, cfg=SMALL)


@pytest.mark.slow  # slots that are no keys are quick without scales
def test_scales_of_slots_that_are_not_keys():
    """Those that were never written may be anything, and those of a page that was not copied are what was there before."""
    rng, lens = np.random.default_rng(10), (20, 3)
    a = rows_of(rng, 2, 1, 32, lens)
    scales = np.full((2, *a["key_cache"].shape[:3]), np.nan, np.float32)
    for table, n in zip(a["block_tables"], lens):
        for p in range(n):
            scales[:, table[p // 8], p % 8] = 0.1 + rng.random((2, K))
    a |= {n: np.round(20 * a[n]).astype(np.int8) for n in ("key_cache", "value_cache")}
    compared(page_op, **a, k_scale=scales[0], v_scale=scales[1], cfg=SMALL)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.slow) for d in ("float8_e4m3fn", "float8_e5m2")])
def test_every_number_of_8_bits(dtype):
    """Infinities and NaN too: each is the value of a key of its own, in a request of one key."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).reshape(32, 1, 1, 8)
    rows = {"query": np.zeros((32, 1, 1, 8), np.float32), "key_cache": np.zeros_like(numbers), "value_cache": numbers}
    got = on_pallas(decode_op, **rows, kv_lens=np.ones(32, np.int32))
    np.testing.assert_array_equal(np.asarray(got).reshape(-1), numbers.astype(np.float32).reshape(-1))


def test_rows_without_a_slot_are_not_written():
    rng = np.random.default_rng(7)
    cache, new = normal(rng, 3, 4, K, H), normal(rng, 5, K, H)
    a = {"key": new, "value": -new, "slots": np.int32([2, -1, 12, 200, 7])} | {
        "key_cache": cache,
        "value_cache": -cache,
    }
    for x, w in zip(on_pallas(append_op, **a), append_op(**a, platform="xla"), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(w).tobytes()


@pytest.mark.slow  # what is read, not what comes out
def test_pages_that_no_query_sees_are_not_copied(monkeypatch):
    """A window of 8 keys at the end of 48, in pages of 8: two pages of six, each once."""
    part = calls._Part(*(jnp.int32([x]) for x in (0, 1, 0, 48)), None)
    a = rows_of(np.random.default_rng(8), 1, 1, 48, [48])
    seen = []

    def kept(o, part, served, length):
        seen.append(o)
        return tiles_of(o, part, served, length)

    tiles_of = calls.tiles_of
    monkeypatch.setattr(calls, "tiles_of", kept)
    compared(page_op, **a, window=(12, 0), cfg=replace(SMALL, block_k=32))
    tiles, total = tiles_of(seen[0], part, (1, 1), 2)
    tile = Tile(*tiles[:FIELDS].tolist())
    assert total.tolist() == [1] and (tile.begin, tile.end, tile.first, tile.last) == (1, 2, 35, 48)
    kernel = Copies(seen[0], {})
    assert [int(x) for x in kernel.of_block(tile, 1)] == [0, 2]  # keys 32 to 47
    assert [int(x) for x in kernel.of_block(tile, 0)] == [4, 4]


@pytest.mark.slow  # what is read, not what comes out
def test_each_page_of_a_batch_of_decodes_is_copied_once():
    lens = np.random.default_rng(9).integers(0, 200, 12)
    lens[:2] = 32, 0
    o = Paged(
        N=4, K=2, H=8, HV=8, C=16, pages=64, pieces=1, longest=13, tables=True, form="apart", tokens=1, block=4, buffers=2,
        parts=2, flat=True, scale=1.0, cap=None, low=None, high=0, k_scales=False, v_scales=False, slopes=False, sinks=False,
    )  # fmt: skip
    ones = jnp.ones(12, jnp.int32)
    part = calls._Part(jnp.arange(12), ones, 0 * ones, jnp.asarray(lens), None)
    tiles, total = calls.tiles_of(o, part, (1, 1), 16)
    copied = 0
    for x in tiles.reshape(16, FIELDS)[: int(total[0])].tolist():
        tile = Tile(*x)
        spans = [Copies(o, {}).of_block(tile, block) for block in range(tile.begin, tile.end)]
        copied += sum(int(end - begin) for begin, end in spans)
    assert copied == sum(-(-lens // 16))


# -- code -------------------------------------------------------------------------------------------------------------------


def compiled(function, *arguments, donated=()):
    return checks.compile_tpu(function, *arguments, topology=checks.TPU_TOPOLOGIES[0], donate_argnums=donated)


def test_rows_are_written_in_the_caches_own_memory():
    """In a scan over layers that carries the pages of all of them, donated: nothing as large as a cache is made."""
    layers, shape = 3, (3 * 40, 16, 8, 128)
    pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((layers, 4, 8, 128), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((layers, 4, 1, 32, 128), jnp.bfloat16)
    integers = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((4,), (4, 8))]

    def step(keys, values, rows, query, lens, tables):
        def layer(caches, x):
            number, new, q = x
            pages = tables + 40 * number
            slots = jnp.take_along_axis(pages, lens[:, None] // 16, 1)[:, 0] * 16 + lens % 16
            caches = kernels.append_to_cache(new, new, *caches, slots)
            return caches, kernels.page_attention(q, *caches, lens + 1, pages)

        return jax.lax.scan(layer, (keys, values), (jnp.arange(layers), rows, query))

    program = compiled(step, pages, pages, rows, query, *integers, donated=(0, 1))
    text = program.as_text()
    assert checks.mosaic_calls(program) == 2, "one that writes, one that attends: taken without `platform=`"
    large = "bf16[" + ",".join(map(str, shape)) + "]"
    makers = [
        line for line in text.splitlines() if re.search(rf"= \(?{re.escape(large)}\S* (copy|fusion|dynamic)", line)
    ]
    assert not makers, makers
    cache = 2 * np.prod(shape)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < cache / 8 and memory.alias_size_in_bytes == 2 * cache


@pytest.mark.slow
def test_the_cache_of_v2_is_not_rearranged():
    """Its heads of keys and values lie side by side; as wide slots, as the contract takes them, they would be copied."""
    shape = jax.ShapeDtypeStruct
    pages, query = shape((512, 16, 16, 128), jnp.bfloat16), shape((8, 32, 128), jnp.bfloat16)
    integers = [shape(s, jnp.int32) for s in ((8,), (8, 32), (9,))]

    def step(query, pages, lens, tables, cuts):
        return kernels.ragged_page_attention_v2(query, pages, lens, tables, cuts)

    program = compiled(step, query, pages, *integers)
    assert checks.mosaic_calls(program) and program.memory_analysis().temp_size_in_bytes < 2**20
